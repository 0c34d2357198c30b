"""What all commands go through before they run: no output may be an input, and no input may be
something that is waited for, such as a FIFO."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fdbd.core.pixels import EXTENSIONS
from fdbd.util.files import refuse_overlap

OUTPUTS = ("out", "init", "share")
"""Parameters of commands that name what is written; all others may name what is read."""


def checked(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which refuses an output that is one of its inputs, and an input that is neither
    a file nor a folder, before it does anything."""

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        refuse_odd_inputs(values)
        refuse_lost_inputs(values)
        return command(**values)

    return run


def refuse_lost_inputs(values: Mapping[str, Any]) -> None:
    """One sentence if writing an output of a command would destroy one of its inputs; `values` are
    those of the command's parameters."""
    inputs = list(_inputs(values))
    for name in OUTPUTS:
        value = values.get(name)
        if value is None:
            continue
        for out in _written(Path(value)):
            refuse_overlap(out, inputs)
            for each in inputs:
                if _reads(each, out) or _discards(out, each):
                    raise FileExistsError(
                        f"the output {str(out)!r} would replace files of the input {str(each)!r}; "
                        f"choose another --{name}"
                    )


def refuse_odd_inputs(values: Mapping[str, Any]) -> None:
    """One sentence if an input is a FIFO, a socket or a device: reading it might never end."""
    for path in _inputs(values):
        try:
            mode = path.stat().st_mode
        except (OSError, ValueError):
            # What is not a path, such as the name of a model.
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(
                f"{str(path)!r} is neither a regular file nor a folder: save what it gives in a "
                "file first"
            )


def _inputs(values: Mapping[str, Any]) -> Iterator[Path]:
    """All that might be the path of an input."""
    for name, value in values.items():
        if name in OUTPUTS:
            continue
        several = value if isinstance(value, (list, tuple)) else [value]
        for each in several:
            if isinstance(each, (str, os.PathLike)) and os.fspath(each):
                yield Path(os.path.expanduser(os.fspath(each)))


def _written(out: Path) -> Iterator[Path]:
    """The files that an output is made of."""
    yield out
    # An OpenVINO model is two files, of which only the first is named.
    if out.suffix.lower() == ".xml":
        yield out.with_suffix(".bin")


def _reads(folder: Path, out: Path) -> bool:
    """Whether `out` is a file that reading the folder would read: an image, or a part of scores."""
    is_read = _is_part(out) or out.suffix.lower() in EXTENSIONS
    return is_read and _is_inside(out, folder)


def _discards(out: Path, file: Path) -> bool:
    """Whether a folder of parts, written to `out`, might discard a file that is read."""
    return _is_part(file) and _is_inside(file, out)


def _is_part(path: Path) -> bool:
    return path.name.startswith("part-") and path.suffix.lower() in (".parquet", ".csv")


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether both are there, and the file is in the folder, also through links."""
    try:
        if not file.is_file() or not folder.is_dir():
            return False
        return folder.resolve() in file.resolve().parents
    except (OSError, ValueError):
        # What is not a path, such as the name of a model, holds no file.
        return False
