"""A guard as an ONNX graph whose network computes in 8 bits, with a new threshold: `export_int8`.

Rounding moves every score, so the threshold is set again on the scores that the quantised graph
itself gives, and the file appears only where decisions are those of the guard but for a stated
share.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Inputs
from fdbd.decision.guard import Guard
from fdbd.decision.onnx_export import OPSET, ExportError, export, metadata, runtime, save
from fdbd.decision.threshold import Target
from fdbd.export import export_target
from fdbd.networks.classifier import split_batch
from fdbd.util.extras import require
from fdbd.util.files import beside

_RANGE_EVERY, _RANGE_ROWS = 5, 256
"""Every fifth sample, up to 256, sets the ranges of activations; the threshold is set on the
others, which the graph has then not seen."""
_PRODUCTS = ["Conv", "Gemm", "MatMul"]


class Shift(NamedTuple):
    """What 8 bits did, on the calibration samples that set the threshold.

    >>> Shift(samples=400, accepted=0.9, accepted_before=0.86, accepted_after=0.9, disagree=0.01).disagree
    0.01
    """

    samples: int
    accepted: float  #: share that the guard accepts
    accepted_before: (
        float  #: share that the quantised graph would accept with the guard's own threshold
    )
    accepted_after: float  #: share that the written graph accepts, with its new threshold
    disagree: float  #: share on which label or decision of the written graph are not the guard's

    def __str__(self) -> str:
        return (
            f"in 8 bits: of {self.samples} calibration samples it accepts {self.accepted_after:.1%} "
            f"({self.accepted_before:.1%} before it was calibrated again, the guard {self.accepted:.1%}); label or "
            f"decision differ on {self.disagree:.1%}"
        )


@export_target(".onnx", int8=True)
def export_int8(
    guard: Guard,
    path: str | os.PathLike[str],
    example: Inputs | Batch,
    data: Iterable[Any],
    *,
    class_names: Sequence[str] | None = None,
    opset: int = OPSET,
    disagreement: float = 0.05,
) -> Shift:
    """Write a guard as an ONNX graph whose convolutions and products before the head run in 8 bits;
    the rest stays in floating point.

    Args:
        guard: fitted and calibrated, with its model. path, example, class_names, opset: as for
        `fdbd.export.onnx.export`. data: calibration data, seen by neither the network's training
        nor the fit: batches of what the model takes, or
            (inputs, labels). It is iterated over several times.
        disagreement: the largest share of samples whose label or decision may differ from the
            guard's; where more do, an ExportError is raised and no file written.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    >>> train, fresh = list(torch.randn(4, 100, 8)), list(torch.randn(4, 100, 8))
    >>> guard = Guard(model).fit(train).calibrate(fresh, alpha=0.1)
    >>> export_int8(guard, Path(tempfile.mkdtemp(), "guard.onnx"), fresh[0], fresh, disagreement=1.0).samples
    320
    """
    if guard.classifier is None:
        raise ExportError(
            "a guard for features has no network to compute in 8 bits: export it without --int8"
        )
    if not 0 <= disagreement <= 1:
        raise ValueError(f"disagreement is {disagreement}, expected a share between 0 and 1")
    guard = copy.deepcopy(guard).cpu().eval()
    with tempfile.TemporaryDirectory() as folder, beside(path) as draft:
        plain, quantised = Path(folder, "plain.onnx"), Path(folder, "int8.onnx")

        def answers(run: Callable[[Tensor], Iterable[Tensor]]) -> list[Tensor]:
            """Logits, labels, scores, p-values and decisions on the rows that set the threshold."""
            found = [run(rows) for _, rows in _split(data) if len(rows)]
            if not found:
                raise ValueError(
                    "the calibration data hold no samples to set the threshold on; give more"
                )
            return [torch.cat(column) for column in zip(*found)]

        def in_8_bits(guard: Guard) -> list[Tensor]:
            export(guard, plain, example, class_names=class_names, opset=opset)
            _quantise(plain, quantised, [rows for rows, _ in _split(data) if len(rows)])
            run = runtime(quantised)
            return answers(lambda rows: map(torch.from_numpy, run({"images": rows.numpy()})))

        with torch.inference_mode():
            _, own_labels, _, _, own_rejected = answers(guard)
        _, labels, scores, _, _ = in_8_bits(guard)
        threshold, adjusted = guard.calibrated, copy.deepcopy(guard)
        target = Target(per_class=threshold.per_class)
        target["alpha" if threshold.kind == "conformal" else "tpr"] = threshold.target
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # few samples: the guard's own calibration has said so
            adjusted.set_threshold(scores, labels, **target)
        _, new_labels, _, _, rejected = in_8_bits(adjusted)
        differ = (new_labels != own_labels) | (rejected != own_rejected)
        flags = own_rejected, threshold.is_ood(scores, labels), rejected
        accepted, before, after = (1 - float(part.double().mean()) for part in flags)
        shift = Shift(len(scores), accepted, before, after, float(differ.double().mean()))
        if shift.disagree > disagreement:
            raise ExportError(
                f"in 8 bits, {shift.disagree:.1%} of {shift.samples} calibration samples get another label or "
                f"decision, more than the {disagreement:.1%} that were allowed; no file was written"
            )
        model = require("onnx", "onnx").load_model(os.fspath(quantised))
        save(model, {**metadata(plain), "int8": shift._asdict()}, draft)
    return shift


def _split(data: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each batch as the rows that set ranges, and the rows that set the threshold."""
    seen = taken = 0
    for item in data:
        if isinstance(item, Batch):
            raise ValueError("calibration data are features, expected what the model takes")
        inputs = split_batch(item)[0]
        if not isinstance(inputs, Tensor):
            raise ExportError("only models that take one tensor can be exported in 8 bits")
        is_range = (torch.arange(seen, seen + len(inputs)) % _RANGE_EVERY == 0) & (
            taken < _RANGE_ROWS
        )
        seen, taken = seen + len(inputs), taken + int(is_range.sum())
        yield inputs[is_range].cpu(), inputs[~is_range].cpu()


def _quantise(source: Path, target: Path, ranges: list[Tensor]) -> None:
    """The graph with the network's products in 8 bits; weights have 7, since processors without
    VNNI overflow at 8."""
    onnx, quantization = require("onnx", "onnx"), require("onnxruntime.quantization", "onnx")
    shapes, path = require("onnxruntime.quantization.shape_inference", "onnx"), os.fspath(target)
    shapes.quant_pre_process(os.fspath(source), path, skip_symbolic_shape=True)
    model = onnx.load_model(path)
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node_{number}"
    names = _network(model.graph)
    if not names:
        raise ExportError(
            "the graph has no convolution and no product before its head that could run in 8 bits"
        )
    name = model.graph.input[0].name
    feeds = iter([{name: rows.numpy()} for rows in ranges])
    reader = type(
        "Reader", (quantization.CalibrationDataReader,), {"get_next": lambda _: next(feeds, None)}
    )
    quantization.quantize_static(
        model,
        path,
        reader(),
        per_channel=True,
        reduce_range=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=_PRODUCTS,
        nodes_to_quantize=names,
    )
    # The check for numbers that are not finite sees the input itself: rounding to 8 bits makes them
    # finite.
    model = onnx.load_model(path)
    nodes = model.graph.node
    codes = {
        node.output[0]
        for node in nodes
        if node.op_type == "QuantizeLinear" and node.input[0] == name
    }
    rounded = {
        node.output[0]
        for node in nodes
        if node.op_type == "DequantizeLinear" and node.input[0] in codes
    }
    for node in nodes:
        if node.name not in names:
            node.input[:] = [name if given in rounded else given for given in node.input]
    onnx.save_model(model, path)


def _network(graph: Any) -> list[str]:
    """Names of the products that lead to the logits, without the head itself, which is the last."""
    wanted, products = {"logits"}, []
    for node in reversed(graph.node):  # ONNX lists a node after those that it reads
        if wanted.intersection(node.output):
            wanted.update(node.input)
            if node.op_type in _PRODUCTS:
                products.append(node.name)
    return products[:0:-1]  # in the order of the graph
