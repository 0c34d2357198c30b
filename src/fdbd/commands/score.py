"""fdbd score: decisions on files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fdbd.commands import options
from fdbd.commands.options import answer, arg, opt

DATA = "A folder of images, one image, an .npz of images, the name of a dataset, or a .parquet or .npz of features."
FDR = "Also write which rows are OOD at this false discovery rate, such as 0.1: the mean share of wrong ones."


def score(
    guard: options.GuardFile,
    data: Annotated[str, arg(DATA)],
    out: Annotated[Path, opt("A .parquet or .csv file, or a folder for Parquet parts.")] = Path("scores.parquet"),
    engine: options.EngineName = options.Engine.local,
    address: options.Address = None,
    batch_size: options.BatchSize = 128,
    workers: options.Workers = None,
    split: Annotated[str, opt("Which part of a dataset by name.")] = "test",
    model: options.Model = None,
    checkpoint: options.Checkpoint = None,
    device: options.Device = "auto",
    trust_model: options.TrustModel = False,
    restart: Annotated[bool, opt("Throw unfinished scores of other data away.", "--restart")] = False,
    nearest: Annotated[
        bool, opt("Also write the class beyond the nearest decision boundary of each row.", "--nearest")
    ] = False,
    fdr: Annotated[float | None, opt(FDR)] = None,
    as_json: Annotated[bool, opt("Print the summary as JSON.", "--json")] = False,
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
    rows = f"{summary.rows:,} row{'' if summary.rows == 1 else 's'}"
    before = summary.rows - summary.computed
    resumed = f", {before:,} of them by an earlier run" if before else ""
    named = "" if summary.discoveries is None else f", {summary.discoveries:,} at a false discovery rate of {fdr}"
    answer(
        {"out": str(out), **summary._asdict(), "rate": summary.rate},
        as_json,
        f"{out}: {rows}{resumed}, {summary.ood:,} OOD ({summary.ood / max(1, summary.rows):.1%}){named}, "
        f"{summary.unreadable:,} unreadable; {summary.rate:,.0f} rows/s{describe_skipped(summary.skipped)}",
    )
