"""Files that appear whole or not at all: the cache folder, atomic writes, locks, and content hashes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows: renames still keep two runs from harming each other
    fcntl = None  # type: ignore[assignment]

UNREADABLE = "unreadable"
_SETTLED_SECONDS = 2.0  # a file may change again within one tick of its time stamp


def cache_root() -> Path:
    """The cache folder: ``FDBD_CACHE``, or ``~/.cache/fdbd``."""
    return Path(os.environ.get("FDBD_CACHE") or "~/.cache/fdbd").expanduser()


def data_roots() -> tuple[Path, ...]:
    """The user's own data folders: ``FDBD_DATA``, one or several joined like ``PATH``."""
    return tuple(Path(part).expanduser() for part in os.environ.get("FDBD_DATA", "").split(os.pathsep) if part)


def temporary(path: Path) -> Path:
    """A fresh hidden name beside `path`, for what is renamed to it when it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether `path` was named by `temporary`."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to write; it gets its name when the block ends, and vanishes if the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary(path)
    try:
        with open(draft, "xb") as file:
            yield file
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name when the block ends. If `path` is there by then, that one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = temporary(path)
    draft.mkdir()
    try:
        yield draft
        try:
            os.rename(draft, path)
        except OSError:
            if not path.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, atomically."""
    with atomic_file(path) as file:
        file.write((json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON in a file, or None where there is none or it is broken."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Holds the lock file `path`, shared by processes and threads; it is released even if the holder is killed.

    Yields True when the lock is held, False where another has it and `wait` is False, and None where the platform or
    the file system knows no locks.
    """
    if fcntl is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    is_held: bool | None = True
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = False
        except OSError:
            is_held = None
        yield is_held


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a file's bytes, in hexadecimal."""
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_array(array: NDArray[Any]) -> str:
    """SHA-256 of dtype, shape and values."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    rows = max(1, (1 << 24) // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):  # in parts, so that a memory map is not read at once
        digest.update(np.ascontiguousarray(array[start : start + rows]).data)
    return digest.hexdigest()


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, remembered in the cache folder by path, size and time stamp.

    A file that cannot be read counts as `UNREADABLE`: it has no content that could be stale.
    """
    if not paths:
        return []
    folder = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    index_path = cache_root() / "hashes" / (hashlib.sha256(folder.encode()).hexdigest()[:32] + ".json")
    index = read_json(index_path)
    if not isinstance(index, dict):
        index = {}
    fresh: dict[str, list[Any]] = {}

    def hash_one(path: Path) -> str:
        absolute = os.path.abspath(path)
        try:
            stat = os.stat(absolute)
            known = index.get(absolute)
            if isinstance(known, list) and known[:2] == [stat.st_size, stat.st_mtime_ns]:
                return str(known[2])
            digest = hash_file(path)
        except OSError:
            return UNREADABLE
        if time.time() - stat.st_mtime > _SETTLED_SECONDS:
            fresh[absolute] = [stat.st_size, stat.st_mtime_ns, digest]
        return digest

    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(hash_one, paths))
    if fresh:
        with contextlib.suppress(OSError):  # a read-only cache costs time, not correctness
            write_json(index_path, {**index, **fresh})
    return hashes
