"""fdbd score: decisions on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fdbd.commands import options


def score(
    guard: options.GuardFile,
    data: Annotated[
        str,
        typer.Argument(
            help="A folder of images, one image, an .npz of images, the name of a dataset, or a .parquet or .npz of "
            "features.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="A .parquet or .csv file, or a folder for Parquet parts.")] = Path(
        "scores.parquet"
    ),
    engine: options.EngineName = options.Engine.local,
    address: options.Address = None,
    batch_size: options.BatchSize = 128,
    workers: options.Workers = None,
    split: Annotated[str, typer.Option(help="Which part of a dataset by name.")] = "test",
    model: options.Model = None,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    trust_model: options.TrustModel = False,
    restart: Annotated[bool, typer.Option("--restart", help="Throw unfinished scores of other data away.")] = False,
    nearest: Annotated[
        bool, typer.Option("--nearest", help="Also write the class beyond the nearest decision boundary of each row.")
    ] = False,
    fdr: Annotated[
        float | None,
        typer.Option(
            help="Also write which rows are OOD at this false discovery rate, such as 0.1: of those named, the share "
            "that is wrong on average."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score images or features: one row of output for each row of input, in order. A killed run goes on where it ended.

    Files that cannot be read are OOD, and the column error says why.

    Examples: `fdbd score guard.safetensors ./images`, `fdbd score guard.safetensors features.parquet --out scores.csv`
    """
    from fdbd.data.folders import describe_skipped
    from fdbd.jobs.scoring import score_files

    summary = score_files(
        guard,
        data,
        out,
        engine=engine.value,
        address=address,
        model=model,
        checkpoint=checkpoint,
        trust=trust_model,
        device=device,
        split=split,
        batch_size=batch_size,
        workers=workers,
        restart=restart,
        nearest=nearest,
        fdr=fdr,
    )
    if as_json:
        found = {"out": str(out), **summary._asdict(), "rate": summary.rate}
        typer.echo(json.dumps(found))
        return
    rows = f"{summary.rows:,} row{'' if summary.rows == 1 else 's'}"
    before = summary.rows - summary.computed
    resumed = f", {before:,} of them by an earlier run" if before else ""
    named = "" if summary.discoveries is None else f", {summary.discoveries:,} at a false discovery rate of {fdr}"
    options.say(
        f"{out}: {rows}{resumed}, {summary.ood:,} OOD ({summary.ood / max(1, summary.rows):.1%}){named}, "
        f"{summary.unreadable:,} unreadable; {summary.rate:,.0f} rows/s{describe_skipped(summary.skipped)}"
    )
