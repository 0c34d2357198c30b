"""A guard as an OpenVINO model, an .xml file with its .bin: `export_openvino`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fdbd.core.batch import Batch, Inputs
from fdbd.decision.export_record import ExportRecord
from fdbd.decision.guard import Guard
from fdbd.decision.onnx_export import (
    OPSET,
    OUTPUTS,
    TOLERANCE,
    ExportError,
    Graph,
    Run,
    export,
    metadata,
    verify,
)
from fdbd.export import export_target
from fdbd.util.extras import require
from fdbd.util.files import beside, check_place, remove


@export_target(".xml")
def export_openvino(
    guard: Guard,
    path: str | os.PathLike[str],
    example: Inputs | Batch,
    *,
    class_names: Sequence[str] | None = None,
    opset: int = OPSET,
) -> ExportRecord:
    """Write a guard for OpenVINO, in full precision: an ``.xml`` file, and beside it the weights
    with the ending ``.bin``. Arguments, inputs, outputs and errors are those of
    `fdbd.export.onnx.export`.

    The files appear after OpenVINO has given torch's answers on its CPU in float32; on processors
    for which it prefers bfloat16, compile the model with ``INFERENCE_PRECISION_HINT`` "f32" to get
    them. What the ONNX file says of itself is in the model's runtime information, JSON under
    ``fdbd``.

    >>> import fdbd, torch
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([Batch(torch.rand(50, 3))])
    >>> guard = guard.calibrate([Batch(torch.rand(50, 3))], tpr=0.9)
    >>> path = Path(tempfile.mkdtemp(), "guard.xml")
    >>> export_openvino(guard, path, Batch(torch.rand(4, 3))).path.name
    'guard.xml'
    """
    openvino = require("openvino", "openvino")
    if guard.map_threshold is not None:
        raise ExportError(
            "the guard decides on maps, which OpenVINO was not tried with: export it as .onnx"
        )
    target = Path(path)
    if target.suffix.lower() != ".xml":
        raise ValueError(f"the path is {str(target)!r}, expected a name that ends with .xml")
    check_place(target)
    weights = target.with_suffix(".bin")
    check_place(weights)
    with tempfile.TemporaryDirectory(prefix="fdbd-openvino-") as folder:
        source = Path(folder, "guard.onnx")
        draft = Path(folder, "guard.xml")
        export(guard, source, example, class_names=class_names, opset=opset)
        _convert(source, draft)
        graph = Graph(guard, example)
        # Its converter keeps the length of the example.
        graph.shorter = None
        trials, largest = verify(graph, _run_of(draft), "OpenVINO")
        _replace_pair(draft, target)
    runtime = f"OpenVINO {openvino.__version__}"
    return ExportRecord((target, weights), runtime, trials, TOLERANCE, largest)


def _convert(source: Path, draft: Path) -> None:
    """An ONNX file as an .xml with its .bin, and what it says of itself."""
    openvino = require("openvino", "openvino")
    try:
        model = openvino.convert_model(os.fspath(source))
    except Exception as error:
        # Its converter raises classes of its own.
        raise ExportError(f"OpenVINO cannot convert the graph: {error}") from error
    for key, value in metadata(source).items():
        model.set_rt_info(json.dumps(value, sort_keys=True), ["fdbd", key])
    openvino.save_model(model, os.fspath(draft), compress_to_fp16=False)


def _run_of(draft: Path) -> Run:
    """A model in OpenVINO, on the CPU in float32."""
    core = require("openvino", "openvino").Core()
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = core.compile_model(os.fspath(draft), "CPU", hint)

    def run(given: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
        answers = compiled(given)
        # A copy, since the next call writes to the same memory.
        return [answers[name].copy() for name in OUTPUTS]

    return run


def _replace_pair(draft: Path, target: Path) -> None:
    """Put an .xml file and its .bin in their place. OpenVINO crashes on two that do not belong
    together, and two files cannot be renamed at once: the old .xml goes first, and the new one
    comes last, so that a crash in between leaves no model rather than a mixed one."""
    weights = target.with_suffix(".bin")
    with beside(target) as xml_draft:
        shutil.copyfile(draft, xml_draft)
        with beside(weights) as weights_draft:
            shutil.copyfile(draft.with_suffix(".bin"), weights_draft)
            remove(target)
