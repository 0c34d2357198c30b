"""A guard as one ONNX graph: images (or features) in; logits, label, score, p_value, is_ood out.

The file appears only after ONNX Runtime has given torch's answers on the example and on batches of
other sizes.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.core.batch import Batch, Inputs
from fdbd.decision.threshold import Threshold
from fdbd.detectors import KNN
from fdbd.networks.classifier import split_batch
from fdbd.util.extras import require
from fdbd.util.files import beside
from fdbd.util.version import __version__

if TYPE_CHECKING:
    from fdbd.decision.guard import Guard

OPSET = 18
"""The ONNX operator set of exported graphs, unless another is asked for."""
TOLERANCE = 1e-4
"""Largest difference to torch that `export` accepts, absolute or relative to torch's value."""
OUTPUTS = ("logits", "label", "score", "p_value", "is_ood")
"""Names of the graph's outputs, in order."""
Run = Callable[[dict[str, NDArray[Any]]], Sequence[NDArray[Any]]]
"""From arrays by the names of a graph's inputs to those of OUTPUTS, in order."""
_LARGEST_FILE = 2_000_000_000  # protobuf's limit of 2 GiB, less the graph itself


class ExportError(RuntimeError):
    """A guard cannot be written as ONNX, or ONNX Runtime does not agree with torch on it.

    >>> import fdbd
    >>> guard = fdbd.Guard(nn.Sequential(nn.Linear(4, 3)), "odin").fit([(torch.rand(9, 4), torch.arange(9) % 3)])
    >>> export(guard, "guard.onnx", torch.rand(2, 4))
    Traceback (most recent call last):
    fdbd.decision.onnx_export.ExportError: odin follows the network's gradient ...
    """


def export(
    guard: Guard,
    path: str | os.PathLike[str],
    example: Inputs | Batch,
    *,
    class_names: Sequence[str] | None = None,
    opset: int = OPSET,
) -> Path:
    """Write a calibrated guard as one ONNX graph with a dynamic batch size, and check it in ONNX
    Runtime.

    Outputs: ``logits`` (N, C), ``label`` (N,) int64, ``score`` (N,), ``p_value`` (N,), ``is_ood``
    (N,) bool. A row with a NaN or an infinity scores −inf and is OOD. For the metadata see
    `metadata`.

    Args:
        guard: fitted and calibrated. Detectors that perturb the images by a gradient (ODIN,
            AdaSCALE, a guard with `perturb`) cannot be exported, nor can approximate indices of the
            nearest-neighbour family.
        path: where the file appears once it has been verified.
        example: what the model takes: a tensor, a loader's item, a dict of tensors (its keys name
            the graph's inputs), or an `fdbd.Batch` for a graph that takes features. Use real data,
            since the graph is verified on it and on noisy copies. It fixes all sizes but the first,
            and but the length T of token ids and masks (N, T).
        class_names: one per class, for the metadata.
        opset: version of the ONNX operator set.

    ExportError: the graph cannot be made, or its outputs differ from torch's by more than 1e-4.

    >>> import fdbd, tempfile
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([Batch(torch.rand(50, 3))])
    >>> guard = guard.calibrate([Batch(torch.rand(50, 3))], tpr=0.9)
    >>> path = export(guard, Path(tempfile.mkdtemp(), "guard.onnx"), Batch(torch.rand(4, 3)))
    >>> metadata(path)["threshold"]["target"]
    0.9
    """
    for module in ("onnx", "onnxscript", "onnxruntime"):
        require(module, "onnx")
    _check(guard, example, class_names)
    graph, threshold = Graph(guard, example), guard.calibrated
    with beside(path) as draft:  # first, so that a missing folder is an error before the work
        description = {
            "version": __version__,
            "id": guard.id,
            "guard_version": guard.version,
            "opset": opset,
            "detector": guard.detector.to_config(),
            "head": guard.detector.head.fingerprint(),
            "threshold": {**threshold.to_config(), "value": threshold.value.tolist()},
            "class_names": None if class_names is None else list(map(str, class_names)),
            "calibration": base64.b64encode(
                np.sort(threshold.calibration.double().cpu().numpy()).tobytes()
            ).decode(),
            "promise": threshold.guarantee,
            "preprocess": guard.about.get("preprocess"),
            "p_value_resolution": 0.0,
        }
        save(_trace(graph, opset), description, draft)
        verify(graph, runtime(draft), "ONNX Runtime")
    return Path(path)


def save(model: Any, description: Mapping[str, Any], path: Path) -> None:
    """Write a graph together with the description that `metadata` reads."""
    onnx = require("onnx", "onnx")
    texts = {f"fdbd.{key}": json.dumps(value, sort_keys=True) for key, value in description.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.save_model(model, os.fspath(path))


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an exported file says of itself: version (of the library), id and guard_version (of the guard), opset, detector, head, threshold, class_names,
    p_value_resolution, preprocess, promise, and calibration: the sorted scores, as base64 of
    little-endian float64. No graph is run. Other languages find it in the model's custom metadata,
    JSON under keys that start with ``fdbd.``

    >>> metadata("missing.onnx")  # `export` shows it with a file
    Traceback (most recent call last):
    FileNotFoundError: no ONNX file at 'missing.onnx': no such file
    """
    onnx, name = require("onnx", "onnx"), os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"no ONNX file at {name!r}: no such file")
    try:
        properties = onnx.load_model(name, load_external_data=False).metadata_props
        found = {p.key[5:]: json.loads(p.value) for p in properties if p.key.startswith("fdbd.")}
    except Exception as error:  # protobuf has no common class for what a damaged file raises
        raise ValueError(f"{name!r} is no ONNX file: {error}") from None
    if "version" not in found:
        raise ValueError(f"{name!r} is an ONNX file, but was not exported by fdbd")
    return found


def runtime(path: Path) -> Run:
    """A graph in ONNX Runtime, on the CPU."""
    onnxruntime = require("onnxruntime", "onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(
            os.fspath(path), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load the graph: {error}") from error
    return lambda given: session.run(list(OUTPUTS), given)


class Graph(nn.Module):
    """The guard as a function of tensors alone, on the CPU, with the example to trace and verify it
    on."""

    def __init__(self, guard: Guard, example: Inputs | Batch) -> None:
        super().__init__()
        self.takes_features = isinstance(example, Batch) or guard.classifier is None
        given = example.features if isinstance(example, Batch) else split_batch(example)[0]
        self.by_name = isinstance(given, Mapping)
        named = (
            dict(given)
            if self.by_name
            else {"features" if self.takes_features else "images": given}
        )
        shapes = {
            name: part.shape if isinstance(part, Tensor) else () for name, part in named.items()
        }
        rows = {shape[0] if shape else 0 for shape in shapes.values()}
        if len(rows) != 1 or 0 in rows:
            shown = ", ".join(f"{name} of shape {tuple(shape)}" for name, shape in shapes.items())
            raise ValueError(
                f"the example has {shown}; expected tensors with one row per sample, at least one"
            )
        places = torch.arange(max(2, *rows)) % rows.pop()  # one row would become a fixed batch size
        self.names = list(map(str, named))
        self.example = tuple(
            tensor.detach().cpu()[places].contiguous() for tensor in named.values()
        )
        self.guard = copy.deepcopy(guard).cpu().eval()
        self.shorter: tuple[Tensor, ...] | None = None
        """The example with sequences shorter by one, if it is token ids and masks (N, T) and the
        model takes any T."""
        shape, kinds = (
            self.example[0].shape,
            {(t.shape, t.is_floating_point()) for t in self.example},
        )
        if kinds == {(shape, False)} and len(shape) == 2 and shape[1] > 3:
            shorter = tuple(tensor[:, :-1].contiguous() for tensor in self.example)
            with (
                contextlib.suppress(Exception),
                torch.no_grad(),
            ):  # a model of one length may raise anything
                self(*shorter)
                self.shorter = shorter

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given: Any = dict(zip(self.names, inputs)) if self.by_name else inputs[0]
        return tuple(self.guard(Batch(given) if self.takes_features else given))


def _check(guard: Guard, example: Inputs | Batch, class_names: Sequence[str] | None) -> None:
    guard.require_fitted()
    name = guard.detector.label if guard.perturb is None else "a guard with input perturbation"
    if guard.detector.needs.network or guard.perturb is not None:
        why = "follows the network's gradient or transforms the images, which a plain graph cannot"
        raise ExportError(f"{name} {why}: export a guard with another detector, such as fdbd")
    for part in guard.detector.modules():
        if isinstance(part, KNN) and part.index not in ("exact", "flat"):
            why = (
                f"searches its neighbours approximately (index={part.index!r}) and a graph exactly"
            )
            raise ExportError(
                f"{name} {why}, so the threshold would not fit: use index='exact', and calibrate again"
            )
    classes = guard.detector.head.num_classes
    if class_names is not None and (isinstance(class_names, str) or len(class_names) != classes):
        raise ValueError(
            f"class_names are {class_names!r}, expected a list of {classes} names, one per class"
        )
    if (
        guard.classifier is not None
        and guard.classifier.autocast is not None
        and not isinstance(example, Batch)
    ):
        remedy = "set guard.classifier.autocast = None for a graph in full precision, whose scores differ a little"
        raise ValueError(
            f"the guard's network runs under autocast, which an ONNX graph cannot: {remedy}"
        )
    if any(tensor.dtype is torch.bfloat16 for tensor in guard.parameters()):
        raise ExportError(
            "the model is in bfloat16, which ONNX Runtime cannot run on a CPU: call model.float() first"
        )
    size = sum(tensor.nbytes for tensor in (*guard.parameters(), *guard.buffers()))
    if size > _LARGEST_FILE:
        remedy = "use a detector that keeps no samples, or a smaller alpha of the nearest-neighbour family"
        raise ExportError(
            f"the guard holds {size / 1e9:.1f} GB, an ONNX file at most 2 GB: {remedy}"
        )


def _trace(graph: Graph, opset: int) -> Any:
    """The model as ONNX's protobuf, without the exporter's stack traces, which name paths of this
    machine and are larger than the graph."""
    sizes = {
        0: torch.export.Dim("N"),
        **({} if graph.shorter is None else {1: torch.export.Dim("T")}),
    }
    try:
        # The exporter warns of how it registers operators, and prints what it rewrote where
        # commands print JSON.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                graph,
                graph.example,
                dynamo=True,
                input_names=graph.names,
                output_names=list(OUTPUTS),
                dynamic_shapes=(tuple(sizes for _ in graph.example),),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        what = f"the guard ({graph.guard.detector.label}) to ONNX opset {opset}"
        raise ExportError(f"torch cannot export {what}: {reason}") from error
    assert program is not None
    require("onnx_ir.passes.common", "onnx").ClearMetadataAndDocStringPass()(program.model)
    return program.model_proto


def verify(graph: Graph, run: Run, name: str) -> None:
    """Raise ExportError unless the runtime of this name gives torch's answers."""
    for what, tensors in _trials(graph):
        with torch.no_grad():
            expected = graph(*tensors)
        try:
            results = run({key: tensor.numpy() for key, tensor in zip(graph.names, tensors)})
        except Exception as error:
            raise ExportError(f"{name} cannot run the graph on {what}: {error}") from error
        _compare(
            list(map(torch.from_numpy, results)),
            expected,
            graph.guard.calibrated,
            f"{what} ({name})",
        )


def _trials(graph: Graph) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The example, other batch sizes, noisy copies, a row of NaN, and sequences of another
    length."""
    inputs, generator = graph.example, torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor, scale: float) -> Tensor:
        copies = tensor[torch.arange(len(tensor) + 1) % len(tensor)]
        if not tensor.is_floating_point():
            return copies
        spread = tensor[torch.isfinite(tensor)].float().std(correction=0).nan_to_num().item()
        return copies + (scale * spread * torch.randn(copies.shape, generator=generator)).to(
            tensor.dtype
        )

    yield "the example", inputs
    yield "its first sample alone", tuple(tensor[:1] for tensor in inputs)
    for scale in (0.1, 1.0):
        yield (
            f"the example with noise of {scale:g} of its spread",
            tuple(noisy(tensor, scale) for tensor in inputs),
        )
    if any(tensor.is_floating_point() for tensor in inputs):
        broken = tuple(tensor.clone() for tensor in inputs)
        for tensor in filter(Tensor.is_floating_point, broken):
            tensor[(1, *(-1 for _ in tensor.shape[1:]))] = torch.nan
        yield "a batch with a NaN", broken
    if graph.shorter is not None:
        yield "shorter sequences", graph.shorter


def _compare(
    got: Sequence[Tensor], expected: Sequence[Tensor], threshold: Threshold, what: str
) -> None:
    """Logits and scores against torch's; label, p-value and decision against what they follow from,
    since a rounding error next to a threshold or between two equal logits moves them by a step."""
    shapes, right_shapes = (
        [tuple(tensor.shape) for tensor in answers] for answers in (got, expected)
    )
    if shapes != right_shapes:
        raise ExportError(
            f"shapes of {', '.join(OUTPUTS)} differ on {what}: {shapes}, torch has {right_shapes}"
        )
    logits, label, score, p_value, is_ood = got
    readable = torch.isfinite(expected[0]).all(
        dim=1
    )  # what becomes of a NaN in the network is the runtime's
    same = (label == expected[1]) | ~readable
    found = (logits[readable], label[readable], score[same], p_value, is_ood)
    right = (
        expected[0][readable],
        logits[readable].argmax(dim=1),
        expected[2][same],
        *threshold(score, label),
    )
    for name, actual, wanted in zip(OUTPUTS, found, right):
        try:
            torch.testing.assert_close(
                actual.double(), wanted.double(), rtol=TOLERANCE, atol=TOLERANCE
            )
        except AssertionError as error:
            raise ExportError(
                f"{name} differs from torch on {what}, no file was written: {' '.join(str(error).split())}"
            ) from None
