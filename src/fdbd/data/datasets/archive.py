"""Archives, read with suspicion: no path leaves its folder, no link is followed, no bomb is unpacked."""

from __future__ import annotations

import contextlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, NamedTuple

from fdbd.util.files import atomic_folder

MAX_BYTES = 8 << 30
MAX_MEMBERS = 2_000_000
_CHUNK = 1 << 20
# RuntimeError: encrypted files and unknown methods of compression; the last three: impossible numbers and names.
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    OverflowError,
    LookupError,
)


class ArchiveError(ValueError):
    """An archive that is broken, or that would write outside its folder or more than allowed."""


class Member(NamedTuple):
    """A regular file in an archive: its name and a reader."""

    name: str
    file: IO[bytes]


def extract(archive: Path, target: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Unpacks a tar (plain, gz, bz2, xz) or zip archive into the folder `target`, which appears when it is whole.

    Args:
        archive: the archive's path.
        target: a folder that does not exist yet.
        max_bytes: the most that is written; more is a decompression bomb.

    Raises:
        ArchiveError: for absolute names, names with ``..``, links, devices, too much data, and broken archives.
    """
    with atomic_folder(target) as draft:
        for name, file in members(archive, max_bytes=max_bytes):
            path = draft.joinpath(*PurePosixPath(name).parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as out:
                while chunk := file.read(_CHUNK):
                    out.write(chunk)


def members(archive: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[Member]:
    """The regular files of a tar or zip archive, one after the other; each reader is valid until the next.

    Raises:
        ArchiveError: as `extract` does, when the offending member or byte is reached.
    """
    budget = _Budget(archive, max_bytes)
    with _readable(archive):
        yield from _zip_members(archive, budget) if zipfile.is_zipfile(archive) else _tar_members(archive, budget)


@contextlib.contextmanager
def _readable(archive: Path) -> Iterator[None]:
    """Turns what the standard library raises on a broken archive into an ArchiveError."""
    try:
        yield
    except ArchiveError:
        raise
    except _BROKEN as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ArchiveError(f"{archive} is broken ({' '.join(str(error).split()) or type(error).__name__})") from error


class _Budget:
    """What may still be read. Sizes that headers claim are not believed: bytes are counted as they come."""

    def __init__(self, archive: Path, max_bytes: int) -> None:
        self.archive, self.max_bytes = archive, max_bytes
        self.bytes = self.members = 0

    def check_name(self, name: str) -> None:
        self.members += 1
        if self.members > MAX_MEMBERS:
            raise ArchiveError(f"{self.archive} holds more than {MAX_MEMBERS:,} files")
        parts = PurePosixPath(name).parts + PureWindowsPath(name).parts
        is_absolute = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or name.startswith("\\")
        if is_absolute or ".." in parts or "\0" in name:
            raise ArchiveError(f"{self.archive} names a file outside its folder ({name!r}); it was not unpacked")

    def spend(self, count: int) -> None:
        self.bytes += count
        if self.bytes > self.max_bytes:
            raise ArchiveError(f"{self.archive} unpacks to more than {self.max_bytes:,} bytes; it was not unpacked")


class _Counted:
    """A reader that charges a budget for what it gives."""

    def __init__(self, file: IO[bytes], budget: _Budget) -> None:
        self._file, self._budget = file, budget

    def read(self, size: int = -1) -> bytes:
        if size is not None and size >= 0:
            with _readable(self._budget.archive):
                data = self._file.read(size)
            self._budget.spend(len(data))
            return data
        chunks = []
        while chunk := self.read(_CHUNK):
            chunks.append(chunk)
        return b"".join(chunks)


def _tar_members(archive: Path, budget: _Budget) -> Iterator[Member]:
    with tarfile.open(archive, "r:*") as tar:
        for member in tar:
            budget.check_name(member.name)
            if member.isdir():
                continue
            if not member.isreg():
                raise ArchiveError(f"{archive} holds a link or device ({member.name!r}); it was not unpacked")
            if budget.bytes + member.size > budget.max_bytes:  # a tar reader would skip over it by decompressing it
                budget.spend(member.size)
            file = tar.extractfile(member)
            assert file is not None
            yield Member(member.name, _Counted(file, budget))  # type: ignore[arg-type]


def _zip_members(archive: Path, budget: _Budget) -> Iterator[Member]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            budget.check_name(info.filename)
            if info.is_dir():
                continue
            if (info.external_attr >> 16) & 0o170000 == 0o120000:
                raise ArchiveError(f"{archive} holds a link or device ({info.filename!r}); it was not unpacked")
            with zipped.open(info) as file:
                yield Member(info.filename, _Counted(file, budget))  # type: ignore[arg-type]
