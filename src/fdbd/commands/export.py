"""fdbd export: one ONNX graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdbd.commands import options

if TYPE_CHECKING:
    from torch import Tensor

    from fdbd.core.batch import Batch
    from fdbd.decision.guard_file import OpenedGuard

ROWS = 4
"""Samples that the graph is verified on."""


def export(
    guard: options.GuardFile,
    out: Annotated[Path, typer.Option(help="The ONNX file.")] = Path("guard.onnx"),
    example: Annotated[
        Path | None,
        typer.Option(help="An image, or an .npz or .parquet of features, to verify the graph on; default: noise."),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="A graph that takes features, without the model.")
    ] = False,
    opset: Annotated[int | None, typer.Option(help="Version of the ONNX operators; default: 18.")] = None,
    model: options.Model = None,
    checkpoint: options.Checkpoint = None,
    trust_model: options.TrustModel = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what the file says of itself, as JSON.")] = False,
) -> None:
    """Write a guard as one ONNX graph, images in and decisions out, verified in ONNX Runtime before it appears.

    The graph is written on the CPU and in full precision; where it runs later is up to ONNX Runtime.

    Example: `fdbd export guard.safetensors --out guard.onnx --example photo.png`
    """
    from fdbd.decision.guard_file import open_guard
    from fdbd.deploy.onnx import OPSET, metadata
    from fdbd.deploy.onnx import export as export_onnx
    from fdbd.util.files import check_place, refuse_overlap

    check_place(out)
    refuse_overlap(out, [guard, example, checkpoint, model])
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust_model, device="cpu", features=features)
    if opened.guard.classifier is not None:
        opened.guard.classifier.autocast = None
    path = export_onnx(
        opened.guard,
        out,
        _example(opened, example),
        class_names=opened.class_names or None,
        opset=OPSET if opset is None else opset,
    )
    about = metadata(path)
    size = path.stat().st_size / 1e6
    if as_json:
        typer.echo(json.dumps({"out": str(path), **about}))
    else:
        label = opened.guard.detector.label
        options.say(f"{path}: {size:.1f} MB, opset {about['opset']}, {label}, agrees with torch to 1e-4")


def _example(opened: OpenedGuard, source: Path | None) -> Tensor | Batch:
    """A few rows to trace and verify the graph on: an image and noise, the first features of a file, or noise."""
    import numpy as np
    import torch

    from fdbd.core.batch import Batch
    from fdbd.data.features import Widths, holds_features, open_features
    from fdbd.data.images import decode

    head = opened.guard.detector.head
    if opened.preprocess is None:
        if source is None:
            return Batch(torch.randn(ROWS, head.num_features, generator=torch.Generator().manual_seed(0)).abs())
        if not holds_features(str(source)):
            raise ValueError(f"{str(source)!r} is no file of features, and the graph takes features")
        rows, widths = open_features(source), Widths.of(head)
        rows.check(widths)
        first = next(iter(rows.read(rows.spans(1)[0], widths)), None) if len(rows) else None
        if first is None or not isinstance(first.inputs, Batch) or not len(first.inputs.features):
            raise ValueError(f"{str(source)!r} holds no features to verify the graph on")
        return Batch(first.inputs.features[:ROWS].clone())
    size = opened.preprocess.size
    noise = np.random.default_rng(0).integers(0, 256, (ROWS, size, size, 3), np.uint8)
    return opened.preprocess(noise if source is None else [decode(source), *noise[1:]])
