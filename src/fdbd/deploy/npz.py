"""Arrays in NPZ files, read a slice at a time: memory does not grow with the file, compressed or not."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NpzArray:
    """One array of an NPZ file, sliced along its first axis.

    A slice that starts where the last one ended costs no search; others start anew where they must. Not for several
    threads at once; a copy by pickle opens the file anew. Nothing in the file is unpickled.

    Attributes:
        shape, dtype: as the array's header says.
    """

    def __init__(self, path: str | os.PathLike[str], name: str) -> None:
        self.path, self.name = os.fspath(path), name
        with self._errors():
            self._zip = zipfile.ZipFile(self.path)
            info = self._zip.getinfo(f"{name}.npy")
            self._file = self._zip.open(info)
            version = np.lib.format.read_magic(self._file)
            reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = reader(self._file)
        self._start = self._file.tell()
        self.shape, self.dtype = tuple(shape), dtype
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=object))
        if dtype.hasobject or not shape or (is_fortran and len(shape) > 1) or not self._row_bytes:
            raise ValueError(f"{self.path}: the array {name!r} is {dtype} {shape}, expected numbers, one row a sample")
        if self._start + shape[0] * self._row_bytes != info.file_size:
            raise ValueError(f"{self.path}: the array {name!r} is not what its header says")

    def __len__(self) -> int:
        return int(self.shape[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return NpzArray, (self.path, self.name)  # a copy in another process opens the file for itself

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        start, stop, _ = rows.indices(len(self))
        count = max(0, stop - start)
        with self._errors():
            self._file.seek(self._start + start * self._row_bytes)
            data = self._file.read(count * self._row_bytes)
            if len(data) != count * self._row_bytes:
                raise EOFError("it ends early")
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{self.path} is not a readable NPZ file ({reason})") from None


class NpzImages:
    """uint8 images (N, H, W, 3), or grey ones (N, H, W), under ``x`` of an NPZ file; slices are RGB."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._array = array = NpzArray(path, "x")
        if array.dtype != np.uint8 or len(array.shape) not in (3, 4) or (*array.shape, 3)[3] != 3:
            raise ValueError(f"{array.path}: x is {array.dtype} {array.shape}, expected uint8 (N, height, width, 3)")

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
        images = self._array[rows]
        return images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=3)


def array_names(path: str | os.PathLike[str]) -> list[str]:
    """Names of the arrays in an NPZ file."""
    try:
        with zipfile.ZipFile(path) as file:
            return [name.removesuffix(".npy") for name in file.namelist() if name.endswith(".npy")]
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(f"{os.fspath(path)} is not a readable NPZ file ({error})") from None


def read_array(path: str | os.PathLike[str], name: str) -> NDArray[Any]:
    """A whole array, of a size that its header and the file agree on."""
    return NpzArray(path, name)[:]
