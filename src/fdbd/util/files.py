"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path next to `path`, renamed to it when the block ends well and removed when it does not."""
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(target.parent)!r} does not exist; create it first")
    temporary = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    temporary.touch()
    usual = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(usual)  # safetensors makes files that only their owner can read
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_beside(path: Path, target: Path) -> bool:
    """Whether `beside` gave `path` its name, for a file in the place of `target`.

    >>> is_beside(Path("out/.00c0ffee.a.csv"), Path("a.csv")), is_beside(Path(".coffee.a.csv"), Path("a.csv"))
    (True, False)
    """
    return re.fullmatch(rf"\.[0-9a-f]{{8}}\.{re.escape(target.name)}", path.name) is not None


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write text beside `path`, then rename."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)
