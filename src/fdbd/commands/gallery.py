"""fdbd gallery: a page of what was scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fdbd.commands.options import arg, opt


def gallery(
    scores: Annotated[Path, arg("What fdbd score wrote: .parquet, .csv or a folder of parts.")],
    images: Annotated[Path | None, opt("The folder of images that was scored, for thumbnails.")] = None,
    out: Annotated[Path, opt("The page.")] = Path("gallery.html"),
    thumbnails: Annotated[int, opt("Thumbnails inside the page, of the most suspicious samples.", min=0)] = 2000,
    title: Annotated[str | None, opt("The page's title; default: the file's name.")] = None,
) -> None:
    """Write one self-contained page to review what was scored: the most suspicious samples first, with filters.

    Example: `fdbd gallery scores.parquet --images ./inbox`
    """
    from fdbd.report.gallery import write_gallery

    if images is not None and not images.is_dir():
        raise ValueError(f"--images is {str(images)!r}, expected the folder of images that was scored")
    rows = write_gallery(scores, out, images, embedded=thumbnails, title=title)
    typer.echo(f"{out}: {rows:,} samples, the most suspicious first")
