"""fdbd sample: a random set of scored rows to review."""

from __future__ import annotations

from pathlib import Path

from fdbd.commands import options
from fdbd.commands.options import arg, opt


def sample(
    scores: Path = arg(
        ...,
        "What fdbd score wrote: .parquet, .csv or a folder of parts; or the folder of records of "
        "fdbd serve --decisions.",
    ),
    count: int = opt(200, "How many rows.", min=1),
    seed: int = opt(0, "Another number gives another draw."),
    out: Path = opt(Path("sample.parquet"), "The rows: a .parquet or .csv file."),
    as_json: bool = options.JSON,
) -> None:
    """Draw rows of scores at random, to be reviewed for a new threshold.

    A review of the most suspicious samples finds outliers, but a threshold set on it promises
    nothing. Here each row has the same chance, whatever its score.

    Example: `fdbd sample scores.parquet --count 300 --out review.parquet`, then
    `fdbd gallery review.parquet --images ./inbox`
    """
    from fdbd.jobs.sampling import write_sample

    found = write_sample(scores, out, count, seed)
    options.answer(
        {"out": str(out), "rows": found.rows, "of": found.of, "ood": found.ood, "seed": seed},
        as_json,
        f"{out}: {found.rows:,} of {found.of:,} rows at random, {found.ood:,} of them alarms",
    )
