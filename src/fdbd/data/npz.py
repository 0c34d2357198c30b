"""Arrays in NPZ files, read a slice at a time: memory does not grow with the file, compressed or
not."""

from __future__ import annotations

import io
import math
import os
import zipfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import MAX_PIXELS
from fdbd.util.archive import check_compression
from fdbd.util.files import check_unchanged, readable, stamp

# The largest array that is read as a whole: 250,000 classes × 4,096 features in float32.
MAX_WHOLE_BYTES = 4 << 30
# A member of an NPZ file starts with the description of its array; numpy writes about 128 bytes.
_MAX_HEADER_BYTES = 1 << 16
# The most bytes that one byte of a deflated stream can stand for.
_DEFLATE = 1032


class NpzArray:
    """One array of an NPZ file, sliced along its first axis; nothing in the file is unpickled.

    Members are stored or deflated, as numpy writes them: of other compressions, a few kilobytes
    become gigabytes before a reader can stop. In a deflated array, going back costs a read from the
    start. Not for several threads at once. A file that no longer has the `stamp` that it had (or
    `expected`) is an error."""

    def __init__(
        self, path: str | os.PathLike[str], name: str, expected: str | None = None
    ) -> None:
        self.path = os.fspath(path)
        self.name = name
        self._stamp = stamp(self.path) if expected is None else expected
        with readable(self.path, "NPZ file"):
            self._zip = zipfile.ZipFile(self.path)
            member = self._zip.getinfo(f"{name}.npy")
            self.is_compressed = member.compress_type != zipfile.ZIP_STORED
            check_compression(self.path, member)
            self._file = self._zip.open(member)
            shape, is_fortran, dtype, self._start = _read_header(self._file)
        self.shape = tuple(shape)
        self.dtype = dtype
        self.nbytes = dtype.itemsize * math.prod(shape)
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])
        if is_fortran and len(shape) > 1:
            raise ValueError(
                f"{self.path}: the array {name!r} is stored by columns, expected rows: save "
                "np.ascontiguousarray of it"
            )
        if dtype.hasobject or not shape or not self._row_bytes:
            raise ValueError(
                f"{self.path}: the array {name!r} is {dtype} {shape}, "
                "expected numbers, a row per sample"
            )
        size = self._start + self.nbytes
        if size != member.file_size or size > _DEFLATE * os.path.getsize(self.path):
            raise ValueError(f"{self.path}: the array {name!r} is not what its header says")

    def __len__(self) -> int:
        return int(self.shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process opens the file for itself.
        return NpzArray, (self.path, self.name, self._stamp)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        count = max(0, stop - start)
        with readable(self.path, "NPZ file"):
            self._file.seek(self._start + start * self._row_bytes)
            data = self._file.read(count * self._row_bytes)
            if len(data) != count * self._row_bytes:
                raise EOFError("it ends early")
        check_unchanged(self.path, self._stamp)
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, whether columns come first, dtype, and where the numbers start. Only the first bytes
    are read, even if the header says that it has gigabytes."""
    start = io.BytesIO(file.read(_MAX_HEADER_BYTES))
    version = np.lib.format.read_magic(start)
    if version == (1, 0):
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(start)
    else:
        shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(start)
    return shape, is_fortran, dtype, start.tell()


class NpzImages:
    """uint8 images (N, H, W, 3), or grey ones (N, H, W), under ``x`` of an NPZ file; slices are
    RGB."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        array = NpzArray(path, "x")
        self._array = array
        is_grey = len(array.shape) == 3
        is_rgb = len(array.shape) == 4 and array.shape[3] == 3
        if array.dtype != np.uint8 or not (is_grey or is_rgb):
            raise ValueError(
                f"{array.path}: x is {array.dtype} {array.shape}, expected images, uint8 (N, "
                "height, width, 3); if these are features, name the array 'features'"
            )
        count, height, width = array.shape[:3]
        self.shape = (count, height, width, 3)
        if height * width > MAX_PIXELS:
            what = f"the images in x have {width} × {height} pixels"
            raise ValueError(f"{array.path}: {what}, more than the limit of {MAX_PIXELS:,}")

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
        images = self._array[rows]
        return images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=3)


def array_names(path: str | os.PathLike[str]) -> list[str]:
    """Names of the arrays in an NPZ file."""
    with readable(path, "NPZ file"), zipfile.ZipFile(path) as file:
        return [name.removesuffix(".npy") for name in file.namelist() if name.endswith(".npy")]


def read_array(path: str | os.PathLike[str], name: str) -> NDArray[Any]:
    """A whole array, of a size that its header and the file agree on, and of at most
    `MAX_WHOLE_BYTES`."""
    array = NpzArray(path, name)
    if array.nbytes > MAX_WHOLE_BYTES:
        what = f"the array {name!r} has {array.nbytes:,} bytes"
        raise ValueError(f"{array.path}: {what}, more than the limit of {MAX_WHOLE_BYTES:,}")
    return array[:]
