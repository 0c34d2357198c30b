"""Who may ask: the token, the host that a request names, and the page that it comes from."""

from __future__ import annotations

import hmac
import ipaddress

from starlette.exceptions import HTTPException
from starlette.requests import Request

from fdbd.serve.settings import Settings

OPEN_PATHS = frozenset({"/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no token: probes of an orchestrator, and pages that hold nothing of the guard."""
FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded"})
"""Content types, beside multipart forms, that a browser sends to any site without asking it."""


def check_access(request: Request, settings: Settings) -> None:
    """HTTPException if the request may not be answered."""
    _check_host(request, settings)
    _check_origin(request)
    if settings.token is not None and request.scope["path"] not in OPEN_PATHS:
        _check_token(request, settings.token)


def has_token(request: Request, settings: Settings) -> bool:
    """Whether a request may be shown what is known of the guard."""
    return settings.token is None or _is_token_right(request, settings.token)


def _check_token(request: Request, token: str) -> None:
    if _is_token_right(request, token):
        return
    reason = "this service asks for a bearer token"
    if "authorization" in request.headers:
        reason = "the bearer token is not the one that this service asks for"
    raise HTTPException(401, reason, {"www-authenticate": "Bearer"})


def _is_token_right(request: Request, token: str) -> bool:
    given = request.headers.get("authorization", "").encode("latin-1")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def _check_host(request: Request, settings: Settings) -> None:
    """Refuse names that the operator has not allowed.

    A page of another site can have its own name point to this machine (DNS rebinding) and then
    counts as this origin; the Host header still holds that name. An address cannot be rebound, and
    a client that has the token is not such a page.
    """
    named = request.headers.getlist("host")
    if len(named) > 1:
        # A proxy in front may have looked at another one than this service would.
        raise HTTPException(400, "the request has more than one Host header")
    host = _without_port("".join(named))
    if host in settings.allowed_hosts or "*" in settings.allowed_hosts:
        return
    if host == "localhost" or _is_loopback(host):
        return
    is_harmless = settings.token is not None or _is_address(host) or not host
    if is_harmless and not settings.allowed_hosts:
        return
    hint = f"start it with --allowed-host {host[:80]}" if host else "send a Host header"
    raise HTTPException(421, f"this service does not answer to the host {host[:80]!r}; {hint}")


def _check_origin(request: Request) -> None:
    """Refuse posts that a browser sends for a page of another site. Programs send no Origin."""
    if request.method in ("GET", "HEAD"):
        return
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        raise HTTPException(403, "pages of other sites may not post to this service")
    origin = request.headers.get("origin")
    if origin is None:
        return
    scheme, separator, authority = origin.partition("://")
    is_web = bool(separator) and scheme in ("http", "https")
    if not is_web or authority.lower() != request.headers.get("host", "").lower():
        raise HTTPException(403, "pages of other sites may not post to this service")


def _without_port(host: str) -> str:
    host = host.strip().lower()
    is_ipv6 = host.startswith("[")
    if is_ipv6:
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback
