"""fdbd explain: the boundaries around one image."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdbd.commands import options

if TYPE_CHECKING:
    from fdbd.report.explanation import Sample


def explain(
    guard: options.GuardFile,
    image: Annotated[Path, typer.Argument(help="An image file.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Also draw a picture: .png, .svg or .pdf.")] = None,
    top: Annotated[int, typer.Option(help="How many boundaries to show, the nearest first.")] = 10,
    model: options.Model = None,
    checkpoint: options.Checkpoint = None,
    trust_model: options.TrustModel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where an image stands: the distance to each class's boundary, and its score among the calibration scores.

    Example: `fdbd explain guard.safetensors photo.png --out why.png`
    """
    from fdbd.data.images import decode
    from fdbd.decision.guard_file import open_guard
    from fdbd.report.explanation import FORMATS, draw, sample_of

    if top < 1:
        raise ValueError(f"--top is {top}, expected at least 1 boundary")
    if out is not None and out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out is {str(out)!r}, expected a name that ends in {', '.join(FORMATS)}")
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust_model)
    if opened.preprocess is None:
        raise ValueError(f"{str(guard)!r} was fitted on features without a model, and cannot look at an image")
    pixels = decode(image)
    sample = sample_of(opened.guard, opened.preprocess([pixels]), opened.class_names, top)
    if out is not None:
        draw(sample, pixels, image.name, out)
    if as_json:
        typer.echo(json.dumps({"image": str(image), **sample.to_dict(), "picture": None if out is None else str(out)}))
        return
    _print(sample, image, out)


def _print(sample: Sample, image: Path, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(str(image)), title_justify="left")
    for title in ("boundary to", "distance", "share of the score"):
        table.add_column(title, justify="left" if title == "boundary to" else "right")
    for boundary in sample.boundaries:
        table.add_row(Text(boundary.name), f"{boundary.distance:.4g}", f"{boundary.share:.1%}")
    console = Console()
    console.print(table)
    if sample.others:
        console.print(Text(f"and {sample.others} more, farther away", style="dim"))
    verdict = "out-of-distribution" if sample.is_ood else "in-distribution"
    standing = (
        "is not finite" if not math.isfinite(sample.score) else f"is above {sample.standing:.1%} of calibration's"
    )
    console.print(
        Text(
            f"predicted {sample.predicted}: {verdict}. Score {sample.score:.4g} {standing} "
            f"(threshold {sample.threshold:.4g}, p-value {sample.p_value:.3g})."
        )
    )
    if out is not None:
        console.print(Text(str(out), style="dim"))
