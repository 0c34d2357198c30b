"""fdbd export: a guard for another runtime; modules of `fdbd.export` do the writing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fdbd.commands import options
from fdbd.commands.options import opt

if TYPE_CHECKING:
    from torch import Tensor

    from fdbd.decision.guard_file import OpenedGuard
    from fdbd.jobs.fitting import Loader

ROWS = 4
"""Rows that the graph is verified on."""
TEXTS = (
    "What is the weather like in Paris tomorrow?",
    "Please cancel my order from yesterday, it has not arrived and I do not need it any more.",
    "Play some music.",
    "12:30, gate B7",
)
"""Texts of various lengths that a graph is verified on if no others are given."""


def export(
    guard: Path = options.GUARD,
    out: Path = opt(
        Path("guard.onnx"),
        "An .onnx file, an .xml file for OpenVINO, or an ending that another package registered.",
    ),
    example: Path | None = opt(
        None,
        "An image, or a file of features or texts, to verify it on; default: noise or some texts.",
    ),
    text: str | None = opt(None, "The column of texts in the example."),
    features: bool = opt(False, "A graph that takes features, without the model.", "--features"),
    int8: bool = opt(False, "Run the network in 8 bits; needs --calibration.", "--int8"),
    calibration: str | None = opt(
        None,
        "With --int8: data for ranges and threshold, seen by neither the network's training nor "
        "the fit.",
    ),
    max_disagreement: float = opt(
        0.05, "With --int8: largest share whose label or decision may differ from the guard's."
    ),
    opset: int | None = opt(None, "Version of the ONNX operators; default: 18."),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = opt(False, "Print what the file says of itself, as JSON.", "--json"),
) -> None:
    """Write a guard as one ONNX graph, images in and decisions out, verified in ONNX Runtime before
    it appears.

    The graph is written on the CPU and in full precision unless told otherwise; ONNX Runtime
    decides where it runs later.

    Examples: `fdbd export guard.safetensors --out guard.onnx --example photo.png`, `fdbd export
    guard.safetensors --int8 --calibration fresh`, `fdbd export guard.safetensors --out guard.xml`
    """
    from fdbd.decision.guard_file import open_guard
    from fdbd.export import find_export
    from fdbd.export.onnx import OPSET
    from fdbd.util.files import check_place

    check_place(out)
    _check_int8(int8, calibration, features)
    write = find_export(out, int8)
    opened = open_guard(
        guard,
        model=model,
        checkpoint=checkpoint,
        trust=trust_model,
        device="cpu",
        features=features,
    )
    if opened.tokenizer is not None and (int8 or out.suffix.lower() == ".xml"):
        raise ValueError("a guard of texts is exported as .onnx, without --int8")
    if opened.guard.classifier is not None:
        # In full precision.
        opened.guard.classifier.autocast = None
    if example is not None:
        inputs = _first_rows(opened, example, text)
    elif opened.tokenizer is not None:
        inputs = opened.tokenizer.encoder()(TEXTS)
    else:
        inputs = _noise(opened)
    settings: dict[str, object] = {
        "class_names": opened.class_names or None,
        "opset": OPSET if opset is None else opset,
    }
    if calibration is not None:
        settings["data"] = _loader(opened, calibration)
        settings["disagreement"] = max_disagreement
    result = write(opened.guard, out, inputs, **settings)
    _report(opened, out, result, as_json)


def _check_int8(int8: bool, calibration: str | None, features: bool) -> None:
    """An error if options are given that do not go together."""
    if int8 and calibration is None:
        raise ValueError("--int8 calibrates the graph in 8 bits: give --calibration DATA with it")
    if calibration is not None and not int8:
        raise ValueError("--calibration is for a graph in 8 bits: give --int8 with it")
    if int8 and features:
        raise ValueError("--int8 is about the network: leave --features out")


def _loader(
    opened: OpenedGuard, data: str, workers: int | None = None, text: str | None = None
) -> Loader:
    """Data for this guard, images with labels if they have any."""
    from fdbd.data.images import Images
    from fdbd.data.inputs import open_rows
    from fdbd.jobs.classes import match_classes
    from fdbd.jobs.fitting import Loader
    from fdbd.jobs.scoring import Engine

    rows = open_rows(data, "test", text)
    head = opened.guard.detector.head
    labels = None
    if isinstance(rows, Images):
        labels = match_classes(rows, head.num_classes, opened.class_names).labels
    preparation = opened.preprocess if opened.tokenizer is None else opened.tokenizer
    return Loader(rows, head, preparation, Engine(workers=workers), labels)


def _first_rows(opened: OpenedGuard, example: Path, text: str | None) -> Tensor | dict[str, Tensor]:
    """The first rows of the user's example, as the guard takes them."""
    from fdbd.core.batch import Batch

    first: Any = next(iter(_loader(opened, str(example), 1, text)), None)
    if first is None:
        raise ValueError(f"{str(example)!r} holds nothing to verify the graph on")
    if isinstance(first, Batch):
        return first.features[:ROWS].clone()
    inputs, _ = first
    if isinstance(inputs, dict):
        return {name: tensor[:ROWS].clone() for name, tensor in inputs.items()}
    images: Tensor = inputs[:ROWS].clone()
    return images


def _noise(opened: OpenedGuard) -> Tensor:
    """Images of noise, or positive random features, as the guard takes them."""
    import numpy as np
    import torch

    if opened.preprocess is None:
        generator = torch.Generator().manual_seed(0)
        width = opened.guard.detector.head.num_features
        return torch.randn(ROWS, width, generator=generator).abs()
    shape = (ROWS, opened.preprocess.height, opened.preprocess.width, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return opened.preprocess(pixels).clone()


def _report(opened: OpenedGuard, out: Path, result: object, as_json: bool) -> None:
    """What was written, how large it is, and what was verified of it."""
    from fdbd.decision.export_record import ExportRecord
    from fdbd.export.onnx import metadata

    record = result
    if not isinstance(record, ExportRecord):
        # A target of another package that says nothing of what it verified.
        record = ExportRecord((out,))
    about: dict[str, Any] = {}
    if out.suffix.lower() == ".onnx":
        about = metadata(out)
    names = " and ".join(str(file) for file in record.files)
    facts = [_size_in_words(record.files)]
    if about:
        facts.append(f"opset {about['opset']}")
    facts.append(opened.guard.detector.label)
    facts.append(str(record))
    line = f"{names}: {', '.join(facts)}"
    answer = {"out": str(out), **about, "verification": record.to_dict()}
    options.answer(answer, as_json, line)


def _size_in_words(files: Sequence[Path]) -> str:
    """The size of all files together."""
    size = sum(file.stat().st_size for file in files)
    if size < 100_000:
        return f"{size / 1e3:.1f} kB"
    return f"{size / 1e6:.1f} MB"
