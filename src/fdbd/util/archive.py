"""Archives, read with suspicion: no path leaves its folder, no link is followed, no bomb is
unpacked."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any

from fdbd.util.files import atomic_folder, readable

MAX_BYTES = 8 << 30
MAX_MEMBERS = 2_000_000


def extract(archive: Path, target: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Unpacks a tar (plain, gz, bz2, xz) or zip archive into a new folder, which appears when it is
    whole. Absolute names, names with ``..``, links, devices, broken archives, and more than
    `max_bytes` are a ValueError."""
    with atomic_folder(target) as draft:
        for name, chunks in members(archive, max_bytes=max_bytes):
            path = draft.joinpath(*PurePosixPath(name).parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as out:
                out.writelines(chunks)


def members(archive: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The regular files of a tar or zip archive: the name of each, and its bytes in chunks, to be
    read before the next. A ValueError, as of `extract`, comes when the offending member or byte is
    reached."""
    spent = 0

    def spend(size: int) -> int:
        if spent + size > max_bytes:
            raise ValueError(
                f"{archive} unpacks to more than {max_bytes:,} bytes; it was not unpacked"
            )
        return spent + size

    def chunks(open_file: Callable[[], IO[bytes]]) -> Iterator[bytes]:
        nonlocal spent
        with readable(archive, "archive"), open_file() as file:
            while chunk := file.read(1 << 20):
                spent = spend(
                    len(chunk)
                )  # headers are not believed: bytes are counted as they come
                yield chunk

    with readable(archive, "archive"):
        for count, (name, kind, size, open_file) in enumerate(_entries(archive), start=1):
            if count > MAX_MEMBERS:
                raise ValueError(f"{archive} holds more than {MAX_MEMBERS:,} files")
            windows = PureWindowsPath(name)  # takes both kinds of slashes
            if windows.drive or windows.root or ".." in windows.parts or "\0" in name:
                raise ValueError(
                    f"{archive} names a file outside its folder ({name!r}); it was not unpacked"
                )
            if kind == "other":
                raise ValueError(
                    f"{archive} holds a link or device ({name!r}); it was not unpacked"
                )
            if kind == "file":
                spend(size)  # a tar reader would skip over it by decompressing it
                yield name, chunks(open_file)


def _entries(archive: Path) -> Iterator[tuple[str, str, int, Callable[[], Any]]]:
    """Name of each entry, its kind (folder, file or other), its size by its header, and what opens
    it."""
    item: Any
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for item in zipped.infolist():
                is_link = (item.external_attr >> 16) & 0o170000 == 0o120000
                kind = "folder" if item.is_dir() else "other" if is_link else "file"
                yield item.filename, kind, item.file_size, partial(zipped.open, item)
        return
    with tarfile.open(archive, "r:*") as tar:
        for item in tar:
            kind = "folder" if item.isdir() else "file" if item.isreg() else "other"
            yield item.name, kind, item.size, partial(tar.extractfile, item)
