"""Archives, read with suspicion: no path leaves its folder, no link is followed, no bomb is
unpacked."""

from __future__ import annotations

import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

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
    counter = _ByteCounter(archive, max_bytes)
    with readable(archive, "archive"):
        for count, entry in enumerate(_entries(archive), start=1):
            if count > MAX_MEMBERS:
                raise ValueError(f"{archive} holds more than {MAX_MEMBERS:,} files")
            _check_name(archive, entry.name)
            if entry.kind == "other":
                raise ValueError(
                    f"{archive} holds a link or device ({entry.name!r}); it was not unpacked"
                )
            if entry.kind == "file":
                # A tar reader would skip over a large file by decompressing it.
                counter.check(entry.size)
                yield entry.name, _chunks(archive, entry, counter)


class _Entry(NamedTuple):
    """One entry of an archive, as its header describes it."""

    name: str
    #: folder, file or other
    kind: str
    size: int
    open: Callable[[], Any]


class _ByteCounter:
    """Bytes that came out of an archive. Headers are not believed: bytes are counted as they
    come."""

    def __init__(self, archive: Path, max_bytes: int) -> None:
        self._archive = archive
        self._max_bytes = max_bytes
        self._count = 0

    def check(self, size: int) -> None:
        """ValueError if so many more bytes would be too many."""
        if self._count + size > self._max_bytes:
            raise ValueError(
                f"{self._archive} unpacks to more than {self._max_bytes:,} bytes; "
                "it was not unpacked"
            )

    def add(self, size: int) -> None:
        self.check(size)
        self._count += size


def _chunks(archive: Path, entry: _Entry, counter: _ByteCounter) -> Iterator[bytes]:
    with readable(archive, "archive"), entry.open() as file:
        while chunk := file.read(1 << 20):
            counter.add(len(chunk))
            yield chunk


def _check_name(archive: Path, name: str) -> None:
    """ValueError for a name that leads out of the folder into which the archive is unpacked."""
    # Windows' rules take both kinds of slashes.
    path = PureWindowsPath(name)
    if path.drive or path.root or ".." in path.parts or "\0" in name:
        raise ValueError(
            f"{archive} names a file outside its folder ({name!r}); it was not unpacked"
        )


def _entries(archive: Path) -> Iterator[_Entry]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                check_compression(archive, member)
                yield _Entry(
                    member.filename,
                    _zip_kind(member),
                    member.file_size,
                    partial(zipped.open, member),
                )
        return
    with tarfile.open(archive, "r:*") as tar:
        for item in tar:
            yield _Entry(item.name, _tar_kind(item), item.size, partial(tar.extractfile, item))


def _zip_kind(member: zipfile.ZipInfo) -> str:
    if member.is_dir():
        return "folder"
    # The upper half of the attributes is a Unix file mode.
    is_link = (member.external_attr >> 16) & 0o170000 == 0o120000
    return "other" if is_link else "file"


def _tar_kind(item: tarfile.TarInfo) -> str:
    if item.isdir():
        return "folder"
    return "file" if item.isreg() else "other"


def check_compression(archive: str | os.PathLike[str], member: zipfile.ZipInfo) -> None:
    """ValueError unless a member of a zip file is stored or deflated. Python's reader of zip files
    unpacks bzip2 and LZMA without a limit: three kilobytes can become gigabytes in memory."""
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"{os.fspath(archive)}: {member.filename!r} is compressed by method "
            f"{member.compress_type}, expected stored or deflated members: pack it again, as "
            "np.savez_compressed or zip do it"
        )
