"""Files that appear whole or not at all: atomic writes, locks and content hashes; and where cache
and data lie."""

import contextlib
import errno
import glob
import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from fdbd.util.terminal import one_line

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

parse_toml = tomllib.loads
"""A mistake in the text is a ValueError."""
_SETTLED_SECONDS = 2.0
"""A file may change again within one tick of its time stamp."""


def cache_root() -> Path:
    """The cache folder: ``FDBD_CACHE``, or ``~/.cache/fdbd``."""
    return Path(os.environ.get("FDBD_CACHE") or "~/.cache/fdbd").expanduser()


def data_roots() -> tuple[Path, ...]:
    """The user's own data folders: ``FDBD_DATA``, one or several joined like ``PATH``."""
    return tuple(
        Path(part).expanduser()
        for part in os.environ.get("FDBD_DATA", "").split(os.pathsep)
        if part
    )


def downloads_allowed() -> bool:
    """Whether anything may be downloaded: not if ``FDBD_OFFLINE`` is set, except to 0."""
    return os.environ.get("FDBD_OFFLINE", "") in ("", "0")


@contextlib.contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file next to `path`, renamed to it when the block ends well and removed when it
    does not. It is on the disk before that, and its folder afterwards: a power cut leaves the old
    file or the new one. Old drafts that killed runs left behind are removed."""
    target = Path(path)
    check_place(target)
    remove_drafts(target)
    draft = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    draft.touch()
    usual = draft.stat().st_mode
    try:
        yield draft
        # A library that puts a file of its own in this place may let only its owner read it.
        draft.chmod(usual)
        _to_disk(draft)
        os.replace(draft, target)
        _to_disk(target.parent)
    finally:
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it gets its name when the block ends. If `path` is there by then, that one
    stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    draft.mkdir()
    try:
        yield draft
        # One call for what may be 100,000 files.
        if hasattr(os, "sync"):
            os.sync()
        try:
            os.rename(draft, path)
        except OSError:
            if not path.is_dir():
                raise
        _to_disk(path.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_place(path: Path) -> None:
    """An error of one sentence if no file can be written under this name."""
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist; create it first")
    if path.is_dir():
        raise IsADirectoryError(
            f"{str(path)!r} is a folder, and the output is a file; choose another name"
        )
    if path.exists() and not path.is_file():
        raise FileExistsError(
            f"{str(path)!r} is not a regular file, and would be replaced by one; choose another "
            "name"
        )


def refuse_overlap(
    out: str | os.PathLike[str], inputs: Iterable[str | os.PathLike[str] | None]
) -> None:
    """FileExistsError if writing `out` would overwrite one of the inputs, also through links."""
    for path in inputs:
        if path is None:
            continue
        try:
            is_same = os.path.samefile(out, os.path.expanduser(path))
        except (OSError, ValueError):
            # One of the two does not exist, so nothing is overwritten.
            is_same = False
        if is_same:
            raise FileExistsError(
                f"the output {os.fspath(out)!r} is also an input, which would be lost; choose "
                "another --out"
            )


def remove_drafts(target: Path, older_than: float = 3600.0) -> None:
    """Remove drafts of `target` that killed runs left behind and that are older than so many
    seconds. Give 0 only while holding a lock: another run may be writing its draft now."""
    for path in target.absolute().parent.glob(f".{'[0-9a-f]' * 8}.{glob.escape(target.name)}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()


def remove(path: Path) -> None:
    """Remove a file, if it is there, and wait until that is on the disk."""
    path.unlink(missing_ok=True)
    _to_disk(path.parent)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write text beside `path`, then rename."""
    with beside(path) as draft:
        draft.write_bytes(text.encode())
    return Path(path)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON beside `path`, then rename; missing folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON in a file, or None if there is no such file or it is broken."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


@contextlib.contextmanager
def readable(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """One sentence for whatever a broken file makes its reader raise; an error that names the file
    passes, as does one of the system, such as a missing permission."""
    try:
        yield
    except Exception as error:
        names_the_file = os.fspath(path) in str(error)
        is_of_the_system = isinstance(error, OSError) and error.filename is not None
        if names_the_file or is_of_the_system:
            raise
        raise ValueError(
            f"{os.fspath(path)} is not a readable {kind} ({one_line(error)[:200]})"
        ) from None


@contextlib.contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool | None]:
    """Hold the lock file `path`, shared by processes and threads; it is released even if the holder
    is killed. Yields True when the lock is held, False if another has it and `wait` is False, and
    None if the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the thread's own: a second lock of this process on the same file has to wait, too.
    file_lock = FileLock(path, thread_local=False)
    is_held: bool | None = True
    try:
        file_lock.acquire(blocking=wait)
    except Timeout:
        is_held = False
    except NotImplementedError:
        is_held = None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        is_held = None
    try:
        yield is_held
    finally:
        file_lock.release()


def stamp(path: str | os.PathLike[str]) -> str:
    """A text that changes when a file is rewritten or replaced: its size, times and inode, and the
    machine that reads them; empty if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return (
        f"{found.st_size} {found.st_mtime_ns} {found.st_ino} {found.st_ctime_ns} {platform.node()}"
    )


def check_unchanged(path: str | os.PathLike[str], expected: str) -> None:
    """ValueError if a file no longer has the `stamp` that it had."""
    now = stamp(path).split(" ")
    before = expected.split(" ")
    is_same_machine = now[-1] == before[-1]
    if not is_same_machine:
        # Another machine knows the file, or its copy, by an inode of its own: size and time count.
        now = now[:2]
        before = before[:2]
    if now != before:
        raise ValueError(
            f"{os.fspath(path)} was changed or replaced while it was read; run the command again"
        )


def stamp_key(path: str | os.PathLike[str]) -> str:
    """SHA-256 over the path and the `stamp`, whatever the machine."""
    text = f"{os.path.abspath(path)}\0{stamp(path).rpartition(' ')[0]}\n"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def hash_file(path: str | os.PathLike[str], algorithm: str = "sha256") -> str:
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
    # In parts, so that a memory map is not read at once.
    for start in range(0, len(array), rows):
        digest.update(np.ascontiguousarray(array[start : start + rows]).data)
    return digest.hexdigest()


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, remembered in the cache folder by path, size and time stamp;
    "unreadable" for one that cannot be read."""
    if not paths:
        return []
    folder = os.path.commonpath([os.path.abspath(path.parent) for path in paths])
    folder_hash = hashlib.sha256(folder.encode()).hexdigest()[:32]
    index_path = cache_root() / "hashes" / f"{folder_hash}.json"
    index = read_json(index_path)
    known = index if isinstance(index, dict) else {}
    fresh: dict[str, list[Any]] = {}

    def hash_one(path: Path) -> str:
        absolute = os.path.abspath(path)
        try:
            stat = os.stat(absolute)
            size_and_time = [stat.st_size, stat.st_mtime_ns]
            entry = known.get(absolute)
            if isinstance(entry, list) and entry[:-1] == size_and_time:
                return str(entry[-1])
            digest = hash_file(path)
            # A file that was just written may change again within the resolution of its time.
            if time.time() - stat.st_mtime > _SETTLED_SECONDS:
                fresh[absolute] = [*size_and_time, digest]
            return digest
        except OSError:
            return "unreadable"

    with ThreadPoolExecutor(4) as pool:
        hashes = list(pool.map(hash_one, paths))
    if fresh:
        # A read-only cache costs time, not correctness.
        with contextlib.suppress(OSError):
            write_json(index_path, {**known, **fresh})
    return hashes


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    mode = os.O_RDONLY if is_folder else os.O_RDWR
    number = os.open(path, mode)
    try:
        os.fsync(number)
    except OSError:
        # Some file systems cannot do it for folders.
        if not is_folder:
            raise
    finally:
        os.close(number)
