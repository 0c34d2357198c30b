"""fdbd score: decisions on files."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..deploy.scoring import Summary


class Engine(str, Enum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


def score(
    guard: Annotated[Path, typer.Argument(help="A guard's file, as fdbd fit writes it.", show_default=False)],
    data: Annotated[
        str,
        typer.Argument(
            help="A folder of images, an .npz of images, the name of a dataset, or a .parquet or .npz of features.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="A .parquet or .csv file, or a folder for Parquet parts.")] = Path(
        "scores.parquet"
    ),
    engine: Annotated[Engine, typer.Option(help="local, or ray for a cluster.")] = Engine.local,
    address: Annotated[str | None, typer.Option(help="Ray's address; default: Ray on this machine.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images that the model sees at once.")] = 128,
    workers: Annotated[
        int | None, typer.Option(help="Processes that decode images (with ray: model actors); default: by the machine.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which part of a dataset by name.")] = "test",
    model: Annotated[
        str | None, typer.Option(help="The model, where the guard's file does not name it or names code.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Where the model's weights are now.")] = None,
    device: Annotated[str | None, typer.Option(help="Where the model runs; default: a GPU where there is one.")] = None,
    trust_model: Annotated[bool, typer.Option("--trust-model", help="Load a .pt2 file, which can run code.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw unfinished scores of other data away.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score images or features: one row of output for each row of input, in order. A killed run goes on where it ended.

    Unreadable files are OOD, and the column error says why.

    Examples: `fdbd score guard.safetensors ./images`, `fdbd score guard.safetensors features.parquet --out scores.csv`
    """
    options: dict[str, Any] = {}
    score_files: Callable[..., Summary]
    if engine is Engine.ray:
        from ..deploy import ray

        score_files, options["address"] = ray.score_files, address
    else:
        from ..deploy import scoring

        score_files = scoring.score_files
        if address is not None:
            raise ValueError("--address is Ray's: give --engine ray too")
    summary = score_files(
        guard,
        data,
        out,
        model=model,
        checkpoint=checkpoint,
        trust=trust_model,
        device=device,
        split=split,
        batch_size=batch_size,
        workers=workers,
        restart=restart,
        progress=not as_json,
        **options,
    )
    if as_json:
        found = {"out": str(out), **summary._asdict(), "rate": summary.rate}
        typer.echo(json.dumps(found))
        return
    before = summary.rows - summary.computed
    resumed = f", {before:,} of them by an earlier run" if before else ""
    typer.echo(
        f"{out}: {summary.rows:,} rows{resumed}, {summary.ood:,} OOD ({summary.ood / max(1, summary.rows):.1%}), "
        f"{summary.unreadable:,} unreadable; {summary.rate:,.0f} rows/s"
    )
