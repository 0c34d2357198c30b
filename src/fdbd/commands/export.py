"""fdbd export: one ONNX graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fdbd.commands import options


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

    Example: `fdbd export guard.safetensors --out guard.onnx --example photo.png`
    """
    from fdbd.decision.guard import load
    from fdbd.decision.guard_file import OpenedGuard, open_guard
    from fdbd.deploy.onnx import OPSET, metadata
    from fdbd.deploy.onnx import export as export_onnx
    from fdbd.jobs.examples import example_for

    if features:
        known = load(guard)
        opened = OpenedGuard(known, None, tuple(map(str, known.about.get("class_names") or ())))
    else:
        opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust_model, device="cpu")
    path = export_onnx(
        opened.guard,
        out,
        example_for(opened, example),
        class_names=opened.class_names or None,
        opset=OPSET if opset is None else opset,
    )
    about = metadata(path)
    size = path.stat().st_size / 1e6
    shown = f"{path}: {size:.1f} MB, opset {about['opset']}, {opened.guard.detector.label}, agrees with torch to 1e-4"
    typer.echo(json.dumps({"out": str(path), **about}) if as_json else shown)
