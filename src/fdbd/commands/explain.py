"""fdbd explain: the boundaries around images or texts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdbd.commands import options
from fdbd.commands.options import answer, arg, opt, print_table, say
from fdbd.util.terminal import printable

if TYPE_CHECKING:
    from fdbd.core.pixels import Pixels
    from fdbd.decision.guard_file import OpenedGuard
    from fdbd.pages.explanation import SampleExplanation
    from fdbd.pages.map_explanation import MapExplanation


def explain(
    guard: Path = options.GUARD,
    images: list[Path] | None = arg(None, "One or more image files."),
    text: list[str] = opt([], "A text, for a guard of texts. Repeat it for several."),
    out: Path | None = opt(
        None, "Also draw a picture: .png, .svg or .pdf; for several samples, a folder for them."
    ),
    top: int = opt(10, "How many boundaries to show, the nearest first.", min=1),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = options.JSON,
) -> None:
    """Show where an image or a text stands: the distance to each class's boundary, and its score
    among the calibration scores. For a guard that decides on maps: the classes that the model sees,
    which share of each is OOD, and where.

    Examples: `fdbd explain guard.safetensors photo.png --out why.png`, `fdbd explain
    guard.safetensors a.png b.png`, `fdbd explain guard.safetensors --text "will it rain"`
    """
    from fdbd.core.pixels import decode
    from fdbd.decision.guard_file import open_guard

    given = images or []
    if bool(given) == bool(text):
        raise ValueError("give one or more images, or texts with --text")
    names = ["text" for _ in text]
    if given:
        names = [image.stem for image in given]
    pictures = _pictures(out, names, [guard, *given])
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust_model, device=device)
    _check_kind(opened, guard, is_text=bool(text))
    # All images are decoded before anything is printed or drawn.
    decoded = [decode(image) for image in given]
    found = []
    if text:
        for each, picture in zip(text, pictures):
            found.append(_explain_text(opened, each, picture, top, as_json))
    else:
        for image, pixels, picture in zip(given, decoded, pictures):
            found.append(_explain_image(opened, image, pixels, picture, top, as_json))
    if as_json:
        shown = found[0] if len(found) == 1 else found
        answer(shown, as_json)


def _check_kind(opened: OpenedGuard, guard: Path, is_text: bool) -> None:
    """ValueError if a guard takes images and is given texts, or the other way round."""
    if opened.tokenizer is not None:
        if not is_text:
            raise ValueError(f"{str(guard)!r} takes texts, not images: give them with --text")
        return
    if opened.preprocess is None:
        kind = "a text" if is_text else "an image"
        raise ValueError(
            f"{str(guard)!r} names no model (it was fitted on features, or saved in Python), so it "
            f"cannot look at {kind}: call guard.explain in Python, or fit it with a model by name"
        )
    if is_text:
        raise ValueError(f"{str(guard)!r} takes images, not texts: leave --text out")


def _explain_text(
    opened: OpenedGuard, text: str, picture: Path | None, top: int, as_json: bool
) -> dict[str, Any]:
    """Show what a guard says of one text."""
    assert opened.tokenizer is not None
    if not text:
        raise ValueError("a text is empty")
    inputs = opened.tokenizer.encoder()([text])
    title = _title(text)
    explained = _explain_row(opened, inputs, text, title, title, picture, top, as_json)
    return {"text": text, **explained}


def _explain_image(
    opened: OpenedGuard, image: Path, pixels: Pixels, picture: Path | None, top: int, as_json: bool
) -> dict[str, Any]:
    """Show what a guard says of one image."""
    if opened.guard.map_threshold is not None:
        return _explain_map(opened, image, pixels, picture, top, as_json)
    assert opened.preprocess is not None
    inputs = opened.preprocess([pixels])
    explained = _explain_row(opened, inputs, pixels, str(image), image.name, picture, top, as_json)
    return {"image": str(image), **explained}


def _explain_row(
    opened: OpenedGuard,
    inputs: Any,
    content: Any,
    title: str,
    picture_title: str,
    picture: Path | None,
    top: int,
    as_json: bool,
) -> dict[str, Any]:
    """Draw and print the explanation of one image or text, and return it."""
    from fdbd.pages.explanation import draw, explain_sample

    sample = explain_sample(opened.guard, inputs, opened.class_names, top)
    written = None
    if picture is not None:
        picture.parent.mkdir(exist_ok=True)
        draw(sample, content, printable(picture_title), picture)
        written = str(picture)
    if not as_json:
        _print(sample, title)
        if written is not None:
            say(written)
    return {**sample.to_dict(), "picture": written}


def _explain_map(
    opened: OpenedGuard, image: Path, pixels: Pixels, picture: Path | None, top: int, as_json: bool
) -> dict[str, Any]:
    """Show what a guard of maps says of one image."""
    from fdbd.pages.map_explanation import draw_map, explain_map

    assert opened.preprocess is not None
    found = explain_map(opened.guard, opened.preprocess([pixels]), opened.class_names, top)
    written = None
    if picture is not None:
        picture.parent.mkdir(exist_ok=True)
        draw_map(found, pixels, opened.preprocess, printable(image.name), picture)
        written = str(picture)
    if not as_json:
        _print_map(found, str(image))
        if written is not None:
            say(written)
    return {"image": str(image), **found.to_dict(), "picture": written}


def _print_map(found: MapExplanation, title: str) -> None:
    """The classes in one image as a table, and the verdict in a sentence."""
    titles = ["class", "share of the image", "of it out-of-distribution"]
    rows = []
    for entry in found.classes:
        rows.append([entry["name"], f"{entry['share']:.1%}", f"{entry['ood_share']:.1%}"])
    print_table(titles, rows, right=titles[1:], title=title)
    if found.others:
        say(f"and {found.others} more, smaller")
    verdict = "out-of-distribution" if found.image_is_ood else "in-distribution"
    say(
        f"{found.ood_share:.1%} of the positions are out-of-distribution (score below "
        f"{found.threshold:.4g}). The image as a whole: {verdict}, score {found.image_score:.4g} "
        f"(threshold {found.image_threshold:.4g}, p-value {found.image_p_value:.3g})."
    )


def _title(text: str) -> str:
    """A text as the title of its table."""
    shown = " ".join(text.split())
    return shown if len(shown) <= 60 else shown[:60] + "…"


def _print(sample: SampleExplanation, title: str) -> None:
    """The boundaries around one image or text as a table, and the verdict in a sentence."""
    titles = ["boundary to", "distance", "share of all distances"]
    rows = []
    for boundary in sample.boundaries:
        name = boundary["name"]
        distance = boundary["distance"]
        share = boundary["share"]
        rows.append([name, f"{distance:.4g}", f"{share:.1%}"])
    print_table(titles, rows, right=titles[1:], title=title)
    if sample.others:
        say(f"and {sample.others} more, farther away")
    if sample.members:
        titles = ["member", "p-value", "share of the objection"]
        rows = []
        for member in sample.members:
            rows.append([member["name"], f"{member['p_value']:.3g}", f"{member['objection']:.1%}"])
        print_table(titles, rows, right=titles[1:])
    verdict = "out-of-distribution" if sample.is_ood else "in-distribution"
    standing = "is not finite"
    if math.isfinite(sample.score):
        standing = f"is above {sample.standing:.1%} of the calibration scores"
    say(
        f"predicted {sample.predicted}: {verdict}. Score {sample.score:.4g} {standing} "
        f"(threshold {sample.threshold:.4g}, p-value {sample.p_value:.3g})."
    )


def _pictures(out: Path | None, stems: list[str], inputs: list[Path]) -> list[Path | None]:
    """Where the picture of each sample goes, checked before any work."""
    from fdbd.pages.explanation import FORMATS
    from fdbd.util.extras import require
    from fdbd.util.files import check_place, refuse_overlap

    if out is None:
        return [None] * len(stems)
    require("matplotlib", "report")
    if len(stems) == 1:
        if out.suffix.lower() not in FORMATS:
            raise ValueError(
                f"--out is {str(out)!r}, expected a name that ends in {', '.join(FORMATS)}"
            )
        check_place(out)
        return [out]
    if out.suffix or (out.exists() and not out.is_dir()):
        raise ValueError(
            f"--out is {str(out)!r}; for {len(stems)} samples give a folder, without an ending"
        )
    pictures: list[Path | None] = []
    for number, stem in enumerate(stems, start=1):
        picture = out / f"{number:03d}-{stem}.png"
        refuse_overlap(picture, inputs)
        pictures.append(picture)
    return pictures
