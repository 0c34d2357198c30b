"""A guard as an ONNX graph whose network computes in 8 bits, with a new threshold: `export_int8`.

Rounding moves every score, so the threshold is set again on the scores that the quantised graph
itself gives, and the file appears only if decisions are those of the guard but for a stated
share.
"""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Inputs
from fdbd.decision.answers import Decision
from fdbd.decision.export_record import ExportRecord
from fdbd.decision.guard import Guard
from fdbd.decision.onnx_export import OPSET, ExportError, export, metadata, runtime, save
from fdbd.decision.threshold import Target
from fdbd.export import export_target
from fdbd.networks.classifier import split_batch
from fdbd.util.extras import require
from fdbd.util.files import beside

_RANGE_EVERY = 5
_RANGE_ROWS = 256
"""Every fifth sample, up to 256, sets the ranges of activations; the threshold is set on the
others, which the graph has then not seen."""
_PRODUCTS = ["Conv", "Gemm", "MatMul"]


class Shift(NamedTuple):
    """What 8 bits did, on the calibration samples that set the threshold.

    >>> shift = Shift(400, accepted=0.9, accepted_before=0.86, accepted_after=0.9, disagree=0.01)
    >>> shift.disagree
    0.01
    """

    samples: int
    accepted: float
    """Share that the guard accepts."""
    accepted_before: float
    """Share that the quantised graph would accept with the guard's own threshold."""
    accepted_after: float
    """Share that the written graph accepts, with its new threshold."""
    disagree: float
    """Share on which label or decision of the written graph are not the guard's."""

    def __str__(self) -> str:
        return (
            f"in 8 bits: of {self.samples} calibration samples it accepts {self.accepted_after:.1%}"
            f" ({self.accepted_before:.1%} before it was calibrated again, the guard"
            f" {self.accepted:.1%}); label or decision differ on {self.disagree:.1%}"
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
) -> ExportRecord:
    """Write a guard as an ONNX graph whose convolutions and products before the head run in 8 bits;
    the rest stays in floating point.

    Args:
        guard: fitted and calibrated, with its model.
        path, example, class_names, opset: as for `fdbd.export.onnx.export`.
        data: calibration data, seen by neither the network's training nor the fit: batches of what
            the model takes, or (inputs, labels). It is iterated over several times.
        disagreement: the largest share of samples whose label or decision may differ from the
            guard's; if more do, an ExportError is raised and no file written.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    >>> train, fresh = list(torch.randn(4, 100, 8)), list(torch.randn(4, 100, 8))
    >>> guard = Guard(model).fit(train).calibrate(fresh, alpha=0.1)
    >>> path = Path(tempfile.mkdtemp(), "guard.onnx")
    >>> record = export_int8(guard, path, fresh[0], fresh, disagreement=1.0)
    >>> record.details["int8"]["samples"]
    320
    """
    if guard.classifier is None:
        raise ExportError(
            "a guard for features has no network to compute in 8 bits: export it without --int8"
        )
    if guard.map_threshold is not None:
        raise ExportError(
            "the guard decides on maps, and 8 bits are for one prediction per image: export it "
            "without --int8"
        )
    if not 0 <= disagreement <= 1:
        raise ValueError(f"disagreement is {disagreement}, expected a share between 0 and 1")
    target = Path(path)
    guard = copy.deepcopy(guard).cpu().eval()
    with tempfile.TemporaryDirectory(prefix="fdbd-int8-") as folder, beside(target) as draft:
        writer = _Writer(Path(folder), example, data, class_names, opset)
        with torch.inference_mode():
            own = _answers(guard, data)
        first = writer.write(guard)
        recalibrated = _with_threshold_from(guard, first)
        last = writer.write(recalibrated)
        shift = _shift(guard, own, first, last)
        if shift.disagree > disagreement:
            raise ExportError(
                f"in 8 bits, {shift.disagree:.1%} of {shift.samples} calibration samples get "
                f"another label or decision, more than the {disagreement:.1%} that were allowed; "
                "no file was written"
            )
        writer.save(shift, draft)
    return ExportRecord(
        (target,),
        f"ONNX Runtime {require('onnxruntime', 'onnx').__version__}",
        (f"{shift.samples} calibration samples",),
        details={"int8": shift._asdict()},
        note=str(shift),
    )


@dataclass(frozen=True)
class _Writer:
    """Writes guards as graphs in 8 bits, one after the other, to a temporary folder."""

    folder: Path
    example: Inputs | Batch
    data: Iterable[Any]
    class_names: Sequence[str] | None
    opset: int

    @property
    def plain(self) -> Path:
        """The latest guard in floating point."""
        return self.folder / "plain.onnx"

    @property
    def quantised(self) -> Path:
        """The latest guard in 8 bits."""
        return self.folder / "int8.onnx"

    def write(self, guard: Guard) -> Decision:
        """Write the graph of a guard, and return what it decides on the calibration data."""
        names = self.class_names
        export(guard, self.plain, self.example, class_names=names, opset=self.opset)
        _quantise(self.plain, self.quantised, _rows_for_ranges(self.data))
        run = runtime(self.quantised)

        def ask(rows: Tensor) -> list[Tensor]:
            answers = run({"images": rows.numpy()})
            return [torch.from_numpy(answer) for answer in answers]

        return _answers(ask, self.data)

    def save(self, shift: Shift, draft: Path) -> None:
        """Write the latest graph with its description, to which `shift` is added."""
        model = require("onnx", "onnx").load_model(os.fspath(self.quantised))
        save(model, {**metadata(self.plain), "int8": shift._asdict()}, draft)


def _shift(guard: Guard, own: Decision, first: Decision, last: Decision) -> Shift:
    """How the decisions of the graph differ from the guard's `own`: `first` with the guard's
    threshold, `last` with the new one."""
    threshold = guard.stages.require_threshold()
    rejected_before = threshold.is_ood(first.scores, first.labels)
    differs = (last.labels != own.labels) | (last.is_ood != own.is_ood)
    return Shift(
        samples=len(last.scores),
        accepted=1 - _share(own.is_ood),
        accepted_before=1 - _share(rejected_before),
        accepted_after=1 - _share(last.is_ood),
        disagree=_share(differs),
    )


def _rows_for_ranges(data: Iterable[Any]) -> list[Tensor]:
    """The rows of each batch that set the ranges of activations."""
    found = []
    for rows, _ in _split(data):
        if len(rows):
            found.append(rows)
    return found


def _answers(ask: Callable[[Tensor], Sequence[Tensor]], data: Iterable[Any]) -> Decision:
    """The decisions on the rows that set the threshold."""
    found = []
    for _, rows in _split(data):
        if len(rows):
            found.append(Decision(*ask(rows)))
    if not found:
        raise ValueError("the calibration data hold no samples to set the threshold on; give more")
    return Decision(*[torch.cat(parts) for parts in zip(*found)])


def _with_threshold_from(guard: Guard, answers: Decision) -> Guard:
    """A copy of the guard with the same target for the scores that the quantised graph gives."""
    threshold = guard.stages.require_threshold()
    target = Target(per_class=threshold.per_class)
    if threshold.kind == "conformal":
        target["alpha"] = threshold.target
    else:
        target["tpr"] = threshold.target
    recalibrated = copy.deepcopy(guard)
    with warnings.catch_warnings():
        # The guard's own calibration has warned of few samples.
        warnings.simplefilter("ignore")
        recalibrated.set_threshold(answers.scores, answers.labels, **target)
    return recalibrated


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def _split(data: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each batch as the rows that set ranges, and the rows that set the threshold."""
    seen = 0
    taken = 0
    for item in data:
        if isinstance(item, Batch):
            raise ValueError("calibration data are features, expected what the model takes")
        inputs, _ = split_batch(item)
        if not isinstance(inputs, Tensor):
            raise ExportError("only models that take one tensor can be exported in 8 bits")
        numbers = torch.arange(seen, seen + len(inputs))
        is_range = numbers % _RANGE_EVERY == 0
        if taken >= _RANGE_ROWS:
            is_range[:] = False
        seen += len(inputs)
        taken += int(is_range.sum())
        yield inputs[is_range].cpu(), inputs[~is_range].cpu()


def _quantise(source: Path, target: Path, ranges: list[Tensor]) -> None:
    """The graph with the network's products in 8 bits; weights have 7, since processors without
    VNNI overflow at 8."""
    onnx = require("onnx", "onnx")
    quantization = require("onnxruntime.quantization", "onnx")
    model = _prepare_graph(source, target)
    products = _products_before_the_head(model.graph)
    if not products:
        raise ExportError(
            "the graph has no convolution and no product before its head that could run in 8 bits"
        )
    input_name = model.graph.input[0].name
    quantization.quantize_static(
        model,
        os.fspath(target),
        _range_reader(ranges, input_name),
        per_channel=True,
        reduce_range=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=_PRODUCTS,
        nodes_to_quantize=products,
    )
    model = onnx.load_model(os.fspath(target))
    _check_unrounded_input(model.graph, input_name, products)
    onnx.save_model(model, os.fspath(target))


def _range_reader(ranges: list[Tensor], input_name: str) -> Any:
    """The rows that set the ranges, in the form in which ONNX Runtime asks for them."""
    quantization = require("onnxruntime.quantization", "onnx")
    feeds = iter([{input_name: rows.numpy()} for rows in ranges])

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    return Reader()


def _prepare_graph(source: Path, target: Path) -> Any:
    """The graph with shapes inferred and a name for each node, by which nodes are chosen."""
    shapes = require("onnxruntime.quantization.shape_inference", "onnx")
    shapes.quant_pre_process(os.fspath(source), os.fspath(target), skip_symbolic_shape=True)
    model = require("onnx", "onnx").load_model(os.fspath(target))
    for number, node in enumerate(model.graph.node):
        if not node.name:
            node.name = f"node_{number}"
    return model


def _check_unrounded_input(graph: Any, input_name: str, products: Sequence[str]) -> None:
    """Give the input itself to all nodes but the quantised products: rounding to 8 bits makes
    numbers finite that are not, and the check for them must see the input as it was."""
    codes = set()
    for node in graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] == input_name:
            codes.add(node.output[0])
    rounded = set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in codes:
            rounded.add(node.output[0])
    for node in graph.node:
        if node.name in products:
            continue
        for place, given in enumerate(node.input):
            if given in rounded:
                node.input[place] = input_name


def _products_before_the_head(graph: Any) -> list[str]:
    """Names of the products that lead to the logits, in the order of the graph, without the head,
    which is the last of them."""
    wanted = {"logits"}
    products = []
    # ONNX lists a node after those that it reads.
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            if node.op_type in _PRODUCTS:
                products.append(node.name)
    without_head = products[1:]
    without_head.reverse()
    return without_head
