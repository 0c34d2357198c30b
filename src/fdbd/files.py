"""Files that appear whole or not at all."""

from __future__ import annotations

import os
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


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write text beside `path`, then rename."""
    with beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return Path(path)
