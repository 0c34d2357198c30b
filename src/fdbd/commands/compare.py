"""fdbd compare: two files of results, or two files of scores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fdbd.commands import bench, options
from fdbd.commands.options import arg, opt

if TYPE_CHECKING:
    from fdbd.jobs.comparing import Compared


def compare(
    first: Path = arg(..., "A results.json of fdbd bench, or a file or folder of fdbd score."),
    second: Path = arg(..., "Another of the same kind."),
    metric: bench.CompareMetric = opt(
        bench.CompareMetric.auroc, "For results of fdbd bench: what to compare.", "--metric"
    ),
    out: Path | None = opt(None, "For scores: a page with the rows on which they disagree."),
    images: Path | None = opt(None, "With --out: the folder of scored images, for thumbnails."),
    as_json: bool = options.JSON,
) -> None:
    """Compare two results of fdbd bench, or the scores of two guards on the same rows.

    For results, it compares each detector that both files have, over the OOD sets that both have,
    and tests whether the two differ. If both files hold the scores of the same samples (two models
    on the same images, or two versions of one model), the test is paired. Otherwise the results
    count as independent, and small differences go unnoticed.

    For scores, it shows how often the guards agree, which rows only one of them flags, and whether
    the alarm rates differ by more than chance.

    Examples: `fdbd compare before/results.json after/results.json`,
    `fdbd compare old.parquet new.parquet --out disagreements.html --images ./inbox`
    """
    if first.suffix.lower() == ".json":
        if out is not None or images is not None:
            raise ValueError(
                "--out and --images are for scores, and these are results of fdbd bench"
            )
        bench.compare(first, second, metric, as_json)
        return
    from fdbd.jobs.comparing import compare_scored, write_page
    from fdbd.jobs.scored import read_scored
    from fdbd.util.files import check_place

    if images is not None and not images.is_dir():
        raise ValueError(
            f"--images is {str(images)!r}, expected the folder of images that was scored"
        )
    if images is not None and out is None:
        raise ValueError("--images are for a page: give --out PAGE.html with it")
    if out is not None:
        check_place(out)
    found = compare_scored(read_scored(first), read_scored(second))
    if out is not None:
        write_page(found, out, images)
    if as_json:
        options.answer({**found.to_dict(), "out": None if out is None else str(out)}, as_json)
        return
    _print(found)
    if out is not None:
        options.say(f"{out}: the {len(found.disagreements):,} rows that only one guard flags")


def _print(found: Compared) -> None:
    """Who flags what as a table, then the figures in sentences."""
    rows = [
        ["flagged by the first", f"{found.both:,}", f"{found.by_first:,}"],
        ["not flagged", f"{found.by_second:,}", f"{found.neither:,}"],
    ]
    titles = ["", "flagged by the second", "not flagged"]
    options.print_table(titles, rows, right=titles[1:])
    options.say(
        f"Both decide alike on {found.agreement} of {found.rows:,} rows, and predict the same "
        f"class on {found.same_label}."
    )
    options.say(found.difference_in_words())
    if found.rank_correlation is not None:
        options.say(f"The ranks of their scores correlate by {found.rank_correlation:.3f}.")
    if found.only_first or found.only_second:
        options.note(
            f"{found.only_first:,} rows are in {found.first} alone, {found.only_second:,} in "
            f"{found.second}"
        )
