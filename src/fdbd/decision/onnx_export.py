"""A guard as one ONNX graph: images (or features) in; logits, label, score, p_value, is_ood out.

The file appears only after ONNX Runtime has given torch's answers on the example and on batches of other sizes.
"""

from __future__ import annotations

import base64
import copy
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
from fdbd.decision.answers import NotCalibratedError
from fdbd.decision.threshold import GRID_POINTS, Threshold
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

_LARGEST_FILE = 2_000_000_000  # protobuf's limit of 2 GiB, less the graph itself


class ExportError(RuntimeError):
    """A guard cannot be written as ONNX, or ONNX Runtime does not agree with torch on it."""


def export(
    guard: Guard,
    path: str | os.PathLike[str],
    example: Inputs | Batch,
    *,
    class_names: Sequence[str] | None = None,
    opset: int = OPSET,
) -> Path:
    """Write a calibrated guard as one ONNX graph with a dynamic batch size, and check it in ONNX Runtime.

    Outputs: ``logits`` (N, C), ``label`` (N,) int64, ``score`` (N,), ``p_value`` (N,), ``is_ood`` (N,) bool. Decisions
    are exact; with more than 1,024 calibration scores p-values come from a grid of 1,024 of them, off by less than
    1/1,000. A row with a NaN or an infinity scores −inf and is OOD. The metadata (see `metadata`) hold class names,
    threshold, detector, the head's fingerprint, the opset and the version of fdbd.

    Args:
        guard: fitted and calibrated. Detectors that perturb the images by a gradient (ODIN, AdaSCALE, a guard with
            `perturb`) cannot be exported, nor can approximate indices of the nearest-neighbour family.
        path: where the file appears once it has been verified; whatever was there before stays until then.
        example: what the model takes: a tensor, a loader's item, a dict of tensors (its keys name the graph's inputs),
            or an `fdbd.Batch` for a graph that takes features. Realistic, since the graph is verified on it and on
            noisy copies. All sizes but the first are fixed by it; of token ids and masks (N, T), the length T is not.
        class_names: one per class, for the metadata.
        opset: version of the ONNX operator set.

    Raises:
        ExportError: the graph cannot be made, or its outputs differ from torch's by more than 1e-4.
    """
    onnx = require("onnx", "onnx")
    for module in ("onnxscript", "onnxruntime"):
        require(module, "onnx")
    _check(guard, class_names)
    if guard.classifier is not None and guard.classifier.autocast is not None and not isinstance(example, Batch):
        raise ValueError(
            "the guard's network runs under autocast, which an ONNX graph cannot: set guard.classifier.autocast = None "
            "for a graph in full precision, whose scores differ a little"
        )
    graph, names, inputs = _prepare(guard, example)
    with beside(path) as temporary:  # first, so that a missing folder is told before the work
        shorter = _shorter(graph, inputs)
        model = _trace(graph, names, inputs, opset, shorter is not None)
        _strip(model)
        onnx.helper.set_model_props(model, _metadata(graph.guard, class_names, opset))
        onnx.save_model(model, os.fspath(temporary))
        _verify(graph, os.fspath(temporary), names, inputs, shorter)
    return Path(path)


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an exported file says of itself: version, opset, detector, head, threshold, class_names, p_value_resolution,
    preprocess, promise, and calibration: the sorted scores, as base64 of little-endian float64.

    Reads the description alone: no graph is run. In other languages it is the model's custom metadata, JSON under keys
    that start with ``fdbd.``
    """
    onnx = require("onnx", "onnx")
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no ONNX file at {str(source)!r}: no such file")
    try:
        properties = onnx.load_model(os.fspath(source), load_external_data=False).metadata_props
        found = {p.key[5:]: json.loads(p.value) for p in properties if p.key.startswith("fdbd.")}
    except Exception as error:  # protobuf has no common class for what a damaged file raises
        raise ValueError(f"{str(source)!r} is no ONNX file: {error}") from None
    if "version" not in found:
        raise ValueError(f"{str(source)!r} is an ONNX file, but was not exported by fdbd")
    return found


class _Graph(nn.Module):
    """The guard as a function of tensors alone."""

    def __init__(self, guard: Guard, names: Sequence[str] | None, takes_features: bool) -> None:
        super().__init__()
        self.guard = guard
        self.names = names
        self.takes_features = takes_features

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given: Any = inputs[0] if self.names is None else dict(zip(self.names, inputs))
        return tuple(self.guard(Batch(given) if self.takes_features else given))


def _check(guard: Guard, class_names: Sequence[str] | None) -> None:
    if not hasattr(guard, "observe"):
        raise TypeError(f"expected an fdbd.Guard, got {type(guard).__name__}")
    guard.require_fitted()
    if guard.detector.needs.network or guard.perturb is not None:
        name = guard.detector.label if guard.perturb is None else "a guard with input perturbation"
        raise ExportError(
            f"{name} follows the network's gradient or transforms the images by itself, which a plain graph cannot: "
            "export a guard with another detector, such as fdbd"
        )
    for part in guard.detector.modules():
        if isinstance(part, KNN) and part.index not in ("exact", "flat"):
            raise ExportError(
                f"{guard.detector.label} searches its neighbours approximately (index={part.index!r}), a graph "
                "exactly, and the threshold would not fit: use index='exact', and calibrate again"
            )
    if guard.threshold is None:
        raise NotCalibratedError("the guard has no threshold: call calibrate(loader, tpr=0.95) before the export")
    classes = guard.detector.head.num_classes
    if class_names is not None and (isinstance(class_names, str) or len(class_names) != classes):
        raise ValueError(f"class_names are {class_names!r}, expected a list of {classes} names, one per class")
    if any(tensor.dtype is torch.bfloat16 for tensor in guard.parameters()):
        raise ExportError(
            "the model is in bfloat16, which ONNX Runtime does not run on a CPU: call model.float(), and export that"
        )
    size = sum(tensor.nbytes for tensor in (*guard.parameters(), *guard.buffers()))
    if size > _LARGEST_FILE:
        raise ExportError(
            f"the guard holds {size / 1e9:.1f} GB, an ONNX file at most 2 GB: use a detector that keeps no samples, or "
            "a smaller alpha of the nearest-neighbour family"
        )


def _prepare(guard: Guard, example: Inputs | Batch) -> tuple[_Graph, list[str], tuple[Tensor, ...]]:
    """The graph on the CPU in eval mode, the names of its inputs, and the example's tensors, at least two rows each."""
    takes_features = isinstance(example, Batch) or guard.classifier is None
    inputs = example.features if isinstance(example, Batch) else split_batch(example)[0]
    if isinstance(inputs, Mapping):
        names, tensors = [str(name) for name in inputs], tuple(inputs.values())
    else:
        names, tensors = ["features" if takes_features else "images"], (inputs,)
    for name, tensor in zip(names, tensors):
        if not isinstance(tensor, Tensor) or tensor.ndim == 0 or not len(tensor) or len(tensor) != len(tensors[0]):
            what = f"a tensor of shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"the example's {name} are {what}, expected a tensor of one row per sample, at least one")
    copied = copy.deepcopy(guard).cpu().eval()
    graph = _Graph(copied, names if isinstance(inputs, Mapping) else None, takes_features)
    rows = torch.arange(max(2, len(tensors[0]))) % len(tensors[0])  # one row would become a fixed batch size
    return graph, names, tuple(tensor.detach().cpu()[rows].contiguous() for tensor in tensors)


def _shorter(graph: _Graph, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The example with sequences shorter by one, where it is token ids and masks (N, T) of which the model takes any
    length; None: all sizes but the first are fixed."""
    if any(tensor.is_floating_point() or tensor.ndim != 2 or tensor.shape != inputs[0].shape for tensor in inputs):
        return None
    if inputs[0].shape[1] < 4:
        return None
    shorter = tuple(tensor[:, :-1].contiguous() for tensor in inputs)
    try:
        with torch.no_grad():
            graph(*shorter)
    except Exception:  # a model of one length raises what it likes
        return None
    return shorter


def _trace(graph: _Graph, names: list[str], inputs: tuple[Tensor, ...], opset: int, any_length: bool) -> Any:
    sizes = {0: torch.export.Dim("N"), **({1: torch.export.Dim("T")} if any_length else {})}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporter's own, on how it registers operators
            program = torch.onnx.export(
                graph,
                inputs,
                dynamo=True,
                input_names=names,
                output_names=list(OUTPUTS),
                dynamic_shapes=(tuple(sizes for _ in inputs),),
                opset_version=opset,
                verbose=False,
            )
    except Exception as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise ExportError(
            f"torch cannot export the guard ({graph.guard.detector.label}) to ONNX opset {opset}: {reason}"
        ) from error
    assert program is not None
    return program.model_proto


def _strip(model: Any) -> None:
    """Remove the exporter's notes: stack traces with the paths of this machine, larger than the graph itself."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.doc_string = ""
        if hasattr(part, "metadata_props"):
            del part.metadata_props[:]
    del model.metadata_props[:]
    for function in model.functions:
        function.doc_string = ""
        del function.metadata_props[:]
        for node in function.node:
            node.doc_string = ""
            del node.metadata_props[:]


def _metadata(guard: Guard, class_names: Sequence[str] | None, opset: int) -> dict[str, str]:
    threshold = _threshold(guard)
    description = {
        "version": __version__,
        "opset": opset,
        "detector": guard.detector.to_config(),
        "head": guard.detector.head.fingerprint(),
        "threshold": {**threshold.to_config(), "value": threshold.value.tolist()},
        "class_names": None if class_names is None else [str(name) for name in class_names],
        "calibration": base64.b64encode(np.sort(threshold.calibration.double().numpy()).tobytes()).decode(),
        "promise": threshold.guarantee,
        "preprocess": guard.about.get("preprocess"),
        "p_value_resolution": 1 / GRID_POINTS if threshold.grid_is_coarse else 0.0,
    }
    return {f"fdbd.{key}": json.dumps(value, sort_keys=True) for key, value in description.items()}


def _verify(
    graph: _Graph, path: str, names: list[str], inputs: tuple[Tensor, ...], shorter: tuple[Tensor, ...] | None
) -> None:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ExportError(f"ONNX Runtime cannot load the graph: {error}") from error
    _check_answers(graph, lambda given: session.run(list(OUTPUTS), given), "ONNX Runtime", names, inputs, shorter)


def verify(guard: Guard, run: Run, runtime: str, example: Inputs | Batch) -> None:
    """Raise ExportError unless another runtime gives torch's answers on the example, as `export` asks of ONNX Runtime.

    Args:
        guard: which was exported.
        run: from arrays by the names of the inputs to those of OUTPUTS, in order.
        runtime: its name, for errors.
        example: as for `export`.
    """
    graph, names, inputs = _prepare(guard, example)
    _check_answers(graph, run, runtime, names, inputs, None)


def _check_answers(
    graph: _Graph,
    run: Run,
    runtime: str,
    names: list[str],
    inputs: tuple[Tensor, ...],
    shorter: tuple[Tensor, ...] | None,
) -> None:
    others = [] if shorter is None else [("shorter sequences", shorter)]
    for what, tensors in (*_trials(inputs), *others):
        with torch.no_grad():
            expected = dict(zip(OUTPUTS, graph(*tensors)))
        try:
            results = run({name: tensor.numpy() for name, tensor in zip(names, tensors)})
        except Exception as error:
            raise ExportError(f"{runtime} cannot run the graph on {what}: {error}") from error
        got = dict(zip(OUTPUTS, map(torch.from_numpy, results)))
        _compare(got, expected, _threshold(graph.guard), f"{what} ({runtime})")


def _trials(inputs: tuple[Tensor, ...]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The example, other batch sizes, noisy copies, and a row of NaN."""
    generator = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor, rows: int, scale: float) -> Tensor:
        copies = tensor[torch.arange(rows) % len(tensor)]
        if not tensor.is_floating_point():
            return copies
        spread = tensor[torch.isfinite(tensor)].float().std(correction=0).nan_to_num().item()
        return copies + (scale * spread * torch.randn(copies.shape, generator=generator)).to(tensor.dtype)

    yield "the example", inputs
    yield "its first sample alone", tuple(tensor[:1] for tensor in inputs)
    rows = len(inputs[0])
    for scale in (0.1, 1.0):
        yield f"the example with noise of {scale:g} of its spread", tuple(noisy(t, rows + 1, scale) for t in inputs)
    if any(tensor.is_floating_point() for tensor in inputs):
        broken = tuple(tensor.clone() for tensor in inputs)
        for tensor in broken:
            if tensor.is_floating_point():
                tensor[(1, *(-1 for _ in tensor.shape[1:]))] = torch.nan
        yield "a batch with a NaN", broken


def _compare(got: dict[str, Tensor], expected: dict[str, Tensor], threshold: Threshold, what: str) -> None:
    """Logits and scores against torch's; label, p-value and decision against what they follow from, since a rounding
    error next to a threshold or between two equal logits moves them by a step."""
    for name in OUTPUTS:
        if got[name].shape != expected[name].shape:
            raise ExportError(
                f"{name} differs on {what}: shape {tuple(got[name].shape)}, torch has {tuple(expected[name].shape)}"
            )
    readable = torch.isfinite(expected["logits"]).all(dim=1)  # what becomes of a NaN in the network is the runtime's
    _require("logits", got["logits"][readable], expected["logits"][readable], what)
    _require("label", got["label"][readable], got["logits"][readable].argmax(dim=1), what)
    same = (got["label"] == expected["label"]) | ~readable
    _require("score", got["score"][same], expected["score"][same], what)
    predicted = got["label"] if threshold.per_class else None
    _require("p_value", got["p_value"], threshold.p_values_on_grid(got["score"], predicted), what)
    _require("is_ood", got["is_ood"], threshold.is_ood(got["score"], predicted), what)


def _require(name: str, got: Tensor, expected: Tensor, what: str) -> None:
    actual, wanted = got.double().numpy(), expected.double().numpy()
    close = np.isclose(actual, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    if not close.all():
        place = tuple(int(i) for i in np.argwhere(~close)[0])
        raise ExportError(
            f"{name} differs from torch on {what}: {(~close).sum()} of {close.size} values by more "
            f"than {TOLERANCE:g}, such as {actual[place]:.6g} instead of {wanted[place]:.6g} at {list(place)}; "
            "no file was written"
        )


def _threshold(guard: Guard) -> Threshold:
    assert guard.threshold is not None
    return guard.threshold
