"""A client of `fdbd serve` that needs nothing beyond Python."""

from __future__ import annotations

import email.utils
import http.client
import json
import os
import random
import time
import urllib.parse
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

_REPEATED = (429, 503)
"""Statuses after which a request is sent again: it was not begun."""
_FIRST_WAIT = 0.2
"""Seconds before the second try, if the service names none. Doubled with each try."""
_LONGEST_WAIT = 10.0
_NAMES = {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png", ".webp": "image/webp"}


class HasToList(Protocol):
    """An array or a tensor, of whatever package."""

    def tolist(self) -> object: ...


class ServiceError(RuntimeError):
    """The service refused a request, or could not be reached in time.

    >>> from fdbd.serve.client import Client, ServiceError
    >>> try:
    ...     Client("http://127.0.0.1:9", timeout=0.1).status()
    ... except ServiceError as error:
    ...     print(error.status)
    None
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The status of the answer; None if there was none."""


class Client:
    """Asks a service for decisions.

    A request that the service was too busy for (503) or whose connection broke is sent again, not
    before the time that `Retry-After` names. All tries together end within `timeout`. A decision
    changes nothing but the service's counts, so asking twice does no harm.

    Args:
        url: of the service, ``http://127.0.0.1:8000`` for instance.
        token: what the service was started with; None: it asks for none.
        timeout: seconds for one call, repetitions included.

    >>> Client("http://127.0.0.1:1", timeout=0.1).decide(b"")
    Traceback (most recent call last):
    ...
    fdbd.serve.client.ServiceError: http://127.0.0.1:1 did not answer within 0.1 s: ...
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 30.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"the address is {url!r}, expected one such as http://127.0.0.1:8000")
        self._url = url.rstrip("/")
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")
        self._token = token
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None

    def decide(
        self,
        image: str | os.PathLike[str] | bytes,
        *,
        guard: str | None = None,
        explain: bool = False,
    ) -> dict[str, object]:
        """The decision on one image: the name of a file, or its bytes. `explain` adds the nearest
        boundaries; `guard` names one of several guards."""
        kind = "application/octet-stream"
        if isinstance(image, bytes):
            content = image
        else:
            with open(image, "rb") as file:
                content = file.read()
            kind = _NAMES.get(os.path.splitext(image)[1].lower(), kind)
        found: dict[str, object] = self._ask("POST", _path(guard, explain), content, kind)
        return found

    def decide_features(
        self,
        features: Sequence[Sequence[float]] | HasToList,
        *,
        guard: str | None = None,
        explain: bool = False,
    ) -> list[dict[str, object]]:
        """The decisions on rows of features: lists, or an array (N, P)."""
        rows = features.tolist() if hasattr(features, "tolist") else features
        content = json.dumps({"features": rows}).encode()
        answer = self._ask("POST", _path(guard, explain), content, "application/json")
        found: list[dict[str, object]] = answer["decisions"]
        return found

    def decide_text(
        self, text: str, *, guard: str | None = None, explain: bool = False
    ) -> dict[str, object]:
        """The decision on one text."""
        content = json.dumps({"text": text}).encode()
        path = _path(guard, explain)
        found: dict[str, object] = self._ask("POST", path, content, "application/json")
        return found

    def status(self, guard: str | None = None) -> dict[str, object]:
        """What the service's page shows: the guard, its monitor, the latest rejected images."""
        query = "" if guard is None else f"?{urllib.parse.urlencode({'guard': guard})}"
        found: dict[str, object] = self._ask("GET", f"/status{query}")
        return found

    def acknowledge(self, note: str = "", guard: str | None = None) -> dict[str, object]:
        """Say that the drift alarm was seen: the test begins anew. Returns the monitor's view."""
        query = "" if guard is None else f"?{urllib.parse.urlencode({'guard': guard})}"
        content = json.dumps({"note": note}).encode()
        answer = self._ask("POST", f"/monitor/acknowledge{query}", content, "application/json")
        found: dict[str, object] = answer["monitor"]
        return found

    def is_ready(self) -> bool:
        """Whether the service answers now. Asked once."""
        try:
            status, _, _ = self._try("GET", "/v2/health/ready", None, {}, self._timeout)
        except (OSError, http.client.HTTPException):
            return False
        return status == 200

    def close(self) -> None:
        """Close the connection; the next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, content: bytes | None = None, kind: str = "") -> Any:
        """The answer as JSON, after as many tries as there is time for."""
        deadline = time.monotonic() + self._timeout
        headers = {"content-type": kind} if content is not None else {}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        wait = _FIRST_WAIT
        while True:
            left = max(0.01, deadline - time.monotonic())
            status: int | None = None
            try:
                status, stated_wait, answer = self._try(method, path, content, headers, left)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                stated_wait = None
                reason = str(error) or type(error).__name__
            else:
                if status < 400:
                    return self._read(answer, status)
                reason = _reason(answer)
                if status not in _REPEATED:
                    raise ServiceError(f"{self._url} answered {status}: {reason}", status)
            pause = _pause(wait, stated_wait)
            if time.monotonic() + pause >= deadline:
                waited = f"within {self._timeout:g} s"
                raise ServiceError(f"{self._url} did not answer {waited}: {reason}", status)
            time.sleep(pause)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _try(
        self, method: str, path: str, content: bytes | None, headers: dict[str, str], left: float
    ) -> tuple[int, float | None, bytes]:
        """Status, seconds that the service asks to wait, and body of one answer."""
        if self._connection is None:
            if self._is_secure:
                self._connection = http.client.HTTPSConnection(self._host, self._port)
            else:
                self._connection = http.client.HTTPConnection(self._host, self._port)
        self._connection.timeout = left
        if self._connection.sock is not None:
            self._connection.sock.settimeout(left)
        self._connection.request(method, self._prefix + path, content, headers)
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.will_close:
            self.close()
        return answer.status, _stated_wait(answer.headers.get("retry-after", "")), body

    def _read(self, answer: bytes, status: int) -> Any:
        try:
            return json.loads(answer)
        except ValueError:
            reason = f"{self._url} answered {status} without JSON: is fdbd serve at this address?"
            raise ServiceError(reason, status) from None


def _pause(wait: float, stated_wait: float | None) -> float:
    """Seconds before the next try: at least what the service stated, or about `wait`. They are
    random, so that clients that were refused together do not come back together."""
    if stated_wait is None:
        return wait * (0.5 + random.random())
    return stated_wait + _FIRST_WAIT * random.random()


def _stated_wait(text: str) -> float | None:
    """The seconds that `Retry-After` names, which may be a date; None if it names none."""
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    return max(0.0, moment.timestamp() - time.time())


def _path(guard: str | None, explain: bool) -> str:
    query = {}
    if guard is not None:
        query["guard"] = guard
    if explain:
        query["explain"] = "true"
    return f"/decide?{urllib.parse.urlencode(query)}" if query else "/decide"


def _reason(answer: bytes) -> str:
    """The sentence of a refusal."""
    try:
        found = json.loads(answer)
    except ValueError:
        return answer[:200].decode(errors="replace")
    return str(found.get("error", found)) if isinstance(found, dict) else str(found)
