"""fdbd gallery: a page of what was scored."""

from __future__ import annotations

from pathlib import Path

import typer

from fdbd.commands.options import arg, opt


def gallery(
    scores: Path = arg(..., "What fdbd score wrote: .parquet, .csv or a folder of parts."),
    images: Path | None = opt(None, "The folder of images that was scored, for thumbnails."),
    out: Path = opt(Path("gallery.html"), "The page."),
    thumbnails: int = opt(2000, "Thumbnails inside the page, of the most suspicious samples.", min=0),
    title: str | None = opt(None, "The page's title; default: the file's name."),
) -> None:
    """Write one self-contained page to review what was scored: the most suspicious samples first, with filters.

    Example: `fdbd gallery scores.parquet --images ./inbox`
    """
    from fdbd.report.gallery import write_gallery

    if images is not None and not images.is_dir():
        raise ValueError(f"--images is {str(images)!r}, expected the folder of images that was scored")
    rows = write_gallery(scores, out, images, embedded=thumbnails, title=title)
    typer.echo(f"{out}: {rows:,} samples, the most suspicious first")
