"""fdbd score and fdbd gallery: decisions on files, and a page of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fdbd.commands import options
from fdbd.commands.options import answer, arg, opt

if TYPE_CHECKING:
    from fdbd.jobs.scoring import Summary

DATA = (
    "A folder of images, one image, an .npz of images, the name of a dataset, a .parquet, .npz or "
    ".csv of features, or with --text a .csv, .jsonl or .parquet of texts."
)
FDR = (
    "Also write which rows are OOD at this false discovery rate, such as 0.1: the share of false "
    "alarms among them, on average."
)


def score(
    guard: Path = options.GUARD,
    data: str = arg(..., DATA),
    out: Path = opt(
        Path("scores.parquet"), "A .parquet or .csv file, or a folder for Parquet parts."
    ),
    engine: options.Engine = options.ENGINE,
    address: str | None = options.ADDRESS,
    batch_size: int = options.BATCH_SIZE,
    workers: int | None = options.WORKERS,
    split: str = opt("test", "Which part of a dataset by name."),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
    restart: bool = opt(False, "Discard partial results of another guard or dataset.", "--restart"),
    nearest: bool = opt(
        False, "Also write the class behind the nearest decision boundary of each row.", "--nearest"
    ),
    fdr: float | None = opt(None, FDR),
    text: str | None = opt(None, "The column of texts in a .csv, .jsonl or .parquet file."),
    keep: str | None = opt(
        None, "Columns of a table to carry through, such as ids, separated by commas."
    ),
    masks: Path | None = opt(
        None,
        "For a guard that decides on maps: a folder to write the mask of each image to, as .png.",
    ),
    as_json: bool = opt(False, "Print the summary as JSON.", "--json"),
) -> None:
    """Score images or features: one output row per input row, in order. A killed run continues
    where it ended.

    Files that cannot be read are OOD, and the column error says why.

    Examples: `fdbd score guard.safetensors ./images`, `fdbd score guard.safetensors
    features.parquet --out scores.csv`,
    `fdbd score guard.safetensors queries.csv --text query --keep id`,
    `fdbd score deeplab.safetensors ./photos --masks ./masks`
    """
    from fdbd.jobs.scoring import Engine, score_files

    where = Engine(engine.value, address, device, batch_size, workers)
    summary = score_files(
        guard,
        data,
        out,
        where,
        model,
        checkpoint,
        trust_model,
        split=split,
        restart=restart,
        nearest=nearest,
        fdr=fdr,
        text=text,
        keep=options.names(keep or ""),
        masks=masks,
    )
    if as_json:
        answer({"out": str(out), **summary.to_dict()}, as_json)
    else:
        options.say(f"{out}: {_in_words(summary, fdr)}")


def _in_words(summary: Summary, fdr: float | None) -> str:
    """What a run did, in one sentence."""
    from fdbd.data.images import describe_skipped

    words = "1 row" if summary.rows == 1 else f"{summary.rows:,} rows"
    before = summary.rows - summary.computed
    if before:
        words += f", {before:,} of them by an earlier run"
    words += f", {summary.ood:,} OOD ({summary.ood_rate:.1%})"
    if summary.discoveries is not None:
        words += f", {summary.discoveries:,} at a false discovery rate of {fdr}"
    words += f", {summary.unreadable:,} unreadable; {summary.rows_per_second:,.0f} rows/s"
    return words + describe_skipped(summary.skipped)


def gallery(
    scores: Path = arg(
        ...,
        "What fdbd score wrote: .parquet, .csv or a folder of parts; or the folder of fdbd serve "
        "--decisions.",
    ),
    images: Path | None = opt(None, "The folder of scored images, for thumbnails."),
    out: Path = opt(Path("gallery.html"), "The page."),
    thumbnails: int = opt(
        2000, "Thumbnails inside the page, of the most suspicious samples.", min=0
    ),
    masks: Path | None = opt(
        None, "The folder of masks that fdbd score wrote; OOD pixels are tinted in the thumbnails."
    ),
    text: str | None = opt(
        None, "The column of the scored texts, which fdbd score --keep has kept."
    ),
    title: str | None = opt(None, "The page's title; default: the file's name."),
) -> None:
    """Write one self-contained page to review what was scored: the most suspicious samples first,
    with filters.

    Examples: `fdbd gallery scores.parquet --images ./inbox`, `fdbd gallery scores.parquet --images
    ./photos --masks ./masks`, `fdbd gallery scores.parquet --text query`
    """
    from fdbd.pages.gallery import write_gallery

    if images is not None and not images.is_dir():
        raise ValueError(
            f"--images is {str(images)!r}, expected the folder of images that was scored"
        )
    if masks is not None and not masks.is_dir():
        raise ValueError(
            f"--masks is {str(masks)!r}, expected the folder of masks that fdbd score wrote"
        )
    if masks is not None and images is None:
        raise ValueError("--masks tints thumbnails: give the folder of images with --images")
    rows = write_gallery(scores, out, images, masks, embedded=thumbnails, text=text, title=title)
    options.say(f"{out}: {rows:,} samples, the most suspicious first")
