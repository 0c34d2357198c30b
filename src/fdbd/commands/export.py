"""fdbd export: a guard for another runtime; modules of `fdbd.export` do the writing."""

from __future__ import annotations

from pathlib import Path

from fdbd.commands import options
from fdbd.commands.options import opt

ROWS = 4  # that the graph is verified on


def export(
    guard: Path = options.GUARD,
    out: Path = opt(Path("guard.onnx"), "An .onnx file; or an .xml file, for OpenVINO."),
    example: Path | None = opt(
        None, "An image, or an .npz or .parquet of features, to verify it on; default: noise."
    ),
    features: bool = opt(False, "A graph that takes features, without the model.", "--features"),
    int8: bool = opt(False, "Run the network in 8 bits; asks for --calibration.", "--int8"),
    calibration: str | None = opt(
        None, "With --int8: data for ranges and threshold, seen by neither network nor fit."
    ),
    max_disagreement: float = opt(
        0.05, "With --int8: share whose label or decision may differ from the guard's."
    ),
    opset: int | None = opt(None, "Version of the ONNX operators; default: 18."),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = opt(False, "Print what the file says of itself, as JSON.", "--json"),
) -> None:
    """Write a guard as one ONNX graph, images in and decisions out, verified in ONNX Runtime before
    it appears.

    The graph is written on the CPU and in full precision unless told otherwise; where it runs later
    is up to ONNX Runtime.

    Examples: `fdbd export guard.safetensors --out guard.onnx --example photo.png`, `fdbd export
    guard.safetensors --int8 --calibration fresh`, `fdbd export guard.safetensors --out guard.xml`
    """
    import numpy as np
    import torch

    from fdbd.core.batch import Batch
    from fdbd.data.images import Images
    from fdbd.data.inputs import open_rows
    from fdbd.decision.guard_file import open_guard
    from fdbd.export import find_export
    from fdbd.export.onnx import OPSET, metadata
    from fdbd.jobs.classes import match_classes
    from fdbd.jobs.fitting import Loader
    from fdbd.jobs.scoring import Engine
    from fdbd.util.files import check_place, refuse_overlap

    check_place(out)
    refuse_overlap(out, [guard, example, checkpoint, model, calibration])
    if int8 != (calibration is not None):
        raise ValueError(
            "--int8 and --calibration DATA go together: the graph in 8 bits is calibrated on these data"
        )
    if int8 and features:
        raise ValueError("--int8 is about the network: leave --features out")
    write = find_export(out, int8)
    opened = open_guard(
        guard,
        model=model,
        checkpoint=checkpoint,
        trust=trust_model,
        device="cpu",
        features=features,
    )
    if opened.guard.classifier is not None:
        opened.guard.classifier.autocast = None
    head, preprocess = opened.guard.detector.head, opened.preprocess

    def load(data: str, workers: int | None = None) -> Loader:
        rows = open_rows(data, "test")
        labels = None
        if isinstance(rows, Images):
            labels = match_classes(rows, head.num_classes, opened.class_names).labels
        return Loader(rows, head, preprocess, Engine(workers=workers), labels)

    if example is not None:
        first = next(iter(load(str(example), workers=1)), None)
        if first is None:
            raise ValueError(f"{str(example)!r} holds nothing to verify the graph on")
        given = first.features if isinstance(first, Batch) else first[0]
    elif preprocess is not None:
        noise = np.random.default_rng(0).integers(
            0, 256, (ROWS, preprocess.size, preprocess.size, 3), np.uint8
        )
        given = preprocess(noise)
    else:
        given = torch.randn(
            ROWS, head.num_features, generator=torch.Generator().manual_seed(0)
        ).abs()
    asked: dict[str, object] = {
        "class_names": opened.class_names or None,
        "opset": OPSET if opset is None else opset,
    }
    if calibration is not None:
        asked |= {"data": load(calibration), "disagreement": max_disagreement}
    result = write(opened.guard, out, given[:ROWS].clone(), **asked)
    about = metadata(out) if out.suffix.lower() == ".onnx" else {}
    files = [out, out.with_suffix(".bin")] if out.suffix.lower() == ".xml" else [out]
    size = f"{sum(file.stat().st_size for file in files) / 1e6:.1f} MB" + (
        f", opset {about['opset']}" if about else ""
    )
    verified = "agrees with torch to 1e-4" if isinstance(result, Path) else str(result)
    line = f"{' and '.join(map(str, files))}: {size}, {opened.guard.detector.label}, {verified}"
    options.answer({"out": str(out), **about}, as_json, line)
