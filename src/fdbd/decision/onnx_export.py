"""A guard as one ONNX graph: images (or features) in; logits, label, score, p_value, is_ood out, or
the maps of a guard of maps (`MAP_OUTPUTS`).

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.core.batch import Batch, Inputs
from fdbd.core.tokenizer import TextTokenizer
from fdbd.decision.export_record import ExportRecord
from fdbd.decision.map_threshold import MapThreshold, image_scores
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
_OLDEST_OPSET = 7
TOLERANCE = 1e-4
"""Largest difference to torch that `export` accepts, absolute or relative to torch's value."""
OUTPUTS = ("logits", "label", "score", "p_value", "is_ood")
"""Names of the graph's outputs, in order."""
MAP_OUTPUTS = (
    "logits",
    "label",
    "score",
    "is_ood",
    "ood_share",
    "image_score",
    "image_p_value",
    "image_is_ood",
)
"""Names of the outputs of a graph of maps, in order: those of `fdbd.decision.maps.MapDecision`."""
Run = Callable[[dict[str, NDArray[Any]]], Sequence[NDArray[Any]]]
"""From arrays by the names of a graph's inputs to those of OUTPUTS, in order."""
_LARGEST_FILE = 2_000_000_000
"""Protobuf's limit of 2 GiB, less the graph itself."""


class ExportError(RuntimeError):
    """A guard cannot be written as ONNX, or ONNX Runtime does not agree with torch on it.

    >>> import fdbd
    >>> guard = fdbd.Guard(nn.Sequential(nn.Linear(4, 3)), "odin")
    >>> guard = guard.fit([(torch.rand(9, 4), torch.arange(9) % 3)])
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
) -> ExportRecord:
    """Write a calibrated guard as one ONNX graph with a dynamic batch size, and check it in ONNX
    Runtime.

    Outputs: ``logits`` (N, C), ``label`` (N,) int64, ``score`` (N,), ``p_value`` (N,), ``is_ood``
    (N,) bool. A row with a NaN or an infinity scores −inf and is OOD. For the metadata see
    `metadata`. Those of a guard of maps are the fields of a `MapDecision`: ``logits`` (N, C, H, W),
    ``label``, ``score`` and ``is_ood`` (N, H, W), ``ood_share``, ``image_score``,
    ``image_p_value`` and ``image_is_ood`` (N,).

    Args:
        guard: fitted and calibrated. Detectors that perturb the images by a gradient (ODIN,
            AdaSCALE, a guard with `perturb`) cannot be exported, nor can approximate indices of the
            nearest-neighbour family.
        path: where the file appears once it has been verified.
        example: what the model takes: a tensor, a loader's item, a dict of tensors (its keys name
            the graph's inputs), or an `fdbd.Batch` for a graph that takes features. Use real data,
            since the graph is verified on it and on noisy copies. It fixes all sizes but the first,
            the length T of token ids and masks (N, T), and height and width of the images of a
            guard of maps. If the model computes with the example's length, height or width, these
            are fixed as well, and the record's `note` says so.
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
    _check_opset(opset)
    target = Path(path)
    graph = Graph(guard, example)
    # The draft first, so that a missing folder is an error before the work.
    with beside(target) as draft:
        description = _describe(guard, class_names, opset, graph.by_name)
        model = _trace(graph, opset)
        _check_written(model, opset)
        if graph.resized is not None and not _takes_any_size(graph, model, description, draft):
            graph.resized = None
            model = _trace(graph, opset)
        note = _note_on_images(graph)
        if graph.shorter is not None and _has_fixed_length(model):
            # The exporter found that the model computes with the length of the example.
            graph.shorter = None
            note = f"takes sequences of {graph.example[0].shape[1]} tokens alone"
        save(model, description, draft)
        runtime_name = f"ONNX Runtime {require('onnxruntime', 'onnx').__version__}"
        trials, largest = verify(graph, runtime(draft, graph.outputs), "ONNX Runtime")
    return ExportRecord((target,), runtime_name, trials, TOLERANCE, largest, note=note)


def _describe(
    guard: Guard, class_names: Sequence[str] | None, opset: int, takes_texts: bool
) -> dict[str, object]:
    """What the file says of itself; see `metadata`."""
    tokenizer = None
    if takes_texts:
        tokenizer = _tokenizer_of(guard)
    threshold = guard.stages.require_any_threshold()
    if isinstance(threshold, MapThreshold):
        calibration = threshold.image_threshold.calibration
    else:
        calibration = threshold.calibration
    scores = np.sort(calibration.double().cpu().numpy())
    names = None
    if class_names is not None:
        names = [str(name) for name in class_names]
    return {
        "version": __version__,
        "id": guard.id,
        "guard_version": guard.version,
        "opset": opset,
        "detector": guard.detector.to_config(),
        "head": guard.detector.head.fingerprint(),
        "threshold": {**threshold.to_config(), "value": threshold.value.tolist()},
        "class_names": names,
        "calibration": base64.b64encode(scores.tobytes()).decode(),
        "promise": threshold.guarantee,
        "preprocess": guard.about.get("preprocess"),
        "tokenizer": tokenizer,
        "p_value_resolution": 0.0,
    }


def _tokenizer_of(guard: Guard) -> dict[str, Any] | None:
    """How the guard's model takes texts, as JSON values; None if it takes none."""
    tokenizer = TextTokenizer.from_model(guard.about.get("model"))
    if tokenizer is None:
        return None
    return tokenizer.to_dict()


def save(model: Any, description: Mapping[str, Any], path: Path) -> None:
    """Write a graph together with the description that `metadata` reads."""
    onnx = require("onnx", "onnx")
    texts = {f"fdbd.{key}": json.dumps(value, sort_keys=True) for key, value in description.items()}
    onnx.helper.set_model_props(model, texts)
    onnx.save_model(model, os.fspath(path))


def metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What an exported file says of itself: version (of the library), id and guard_version (of the
    guard), opset, detector, head, threshold, class_names, p_value_resolution, preprocess, tokenizer
    (of a guard of texts, as `fdbd.core.tokenizer.TextTokenizer.to_dict` gives it), promise, and
    calibration: the sorted scores, as base64 of little-endian float64. No graph is run. Other
    languages find it in the model's custom metadata, JSON under keys that start with ``fdbd.``

    >>> metadata("missing.onnx")  # `export` shows it with a file
    Traceback (most recent call last):
    FileNotFoundError: no ONNX file at 'missing.onnx': no such file
    """
    onnx = require("onnx", "onnx")
    name = os.fspath(path)
    if not os.path.isfile(name):
        raise FileNotFoundError(f"no ONNX file at {name!r}: no such file")
    try:
        found = {}
        for entry in onnx.load_model(name, load_external_data=False).metadata_props:
            if entry.key.startswith("fdbd."):
                found[entry.key.removeprefix("fdbd.")] = json.loads(entry.value)
    except Exception as error:
        # protobuf has no common class for what a damaged file raises.
        raise ValueError(f"{name!r} is not an ONNX file: {error}") from None
    if "version" not in found:
        raise ValueError(f"{name!r} is an ONNX file, but was not exported by fdbd")
    return found


def runtime(path: Path, outputs: Sequence[str] = OUTPUTS) -> Run:
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
    return lambda given: session.run(list(outputs), given)


class Graph(nn.Module):
    """The guard as a function of tensors alone, on the CPU, with the example to trace and verify it
    on."""

    def __init__(self, guard: Guard, example: Inputs | Batch) -> None:
        super().__init__()
        self.outputs = OUTPUTS if guard.map_threshold is None else MAP_OUTPUTS
        self.takes_features = isinstance(example, Batch) or guard.classifier is None
        if isinstance(example, Batch):
            given: Any = example.features
        else:
            given, _ = split_batch(example)
        self.by_name = isinstance(given, Mapping)
        if self.by_name:
            named = dict(given)
        elif self.takes_features:
            named = {"features": given}
        else:
            named = {"images": given}
        self.names = [str(name) for name in named]
        rows = _common_rows(named)
        # A single row is taken twice: as an example of one row it would fix the batch size.
        places = torch.arange(max(2, rows)) % rows
        parts = []
        for tensor in named.values():
            parts.append(tensor.detach().cpu()[places].contiguous())
        self.example = tuple(parts)
        self.guard = copy.deepcopy(guard).cpu().eval()
        self.shorter = self._shorter_example()
        """The example with sequences shorter by one, if it is token ids and masks (N, T) and the
        model takes any T."""
        self.resized = self._resized_example()
        """The example with images of another height and width, if it is images (N, channels, H, W)
        of a guard of maps and the model takes any size."""

    def _shorter_example(self) -> tuple[Tensor, ...] | None:
        shape = self.example[0].shape
        for tensor in self.example:
            if tensor.is_floating_point() or tensor.shape != shape:
                return None
        if len(shape) != 2 or shape[1] <= 3:
            return None
        shorter = tuple(tensor[:, :-1].contiguous() for tensor in self.example)
        try:
            with torch.no_grad():
                self(*shorter)
        except Exception:
            # A model of one length may raise anything.
            return None
        return shorter

    def _resized_example(self) -> tuple[Tensor, ...] | None:
        images = self.example[0]
        is_of_images = len(self.example) == 1 and images.ndim == 4 and images.is_floating_point()
        if self.outputs != MAP_OUTPUTS or not is_of_images:
            return None
        # Sides stay multiples of 32, which some networks need, and a square is not one any more.
        height, width = images.shape[2:]
        larger = (height + 32, width + 64)
        resized = nn.functional.interpolate(images.float(), larger).to(images.dtype)
        try:
            with torch.no_grad():
                self(resized)
        except Exception:
            # A model of one size may raise anything.
            return None
        return (resized,)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given: Any = dict(zip(self.names, inputs)) if self.by_name else inputs[0]
        if self.takes_features:
            given = Batch(given)
        return tuple(self.guard(given))


def _common_rows(named: Mapping[Any, Any]) -> int:
    """The number of rows of all tensors of an example; ValueError if it is not one number."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, part in named.items():
        # What is not a tensor, or holds a single number, has no rows.
        shapes[name] = tuple(part.shape) if isinstance(part, Tensor) else ()
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1 or 0 in counts:
        shown = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"the example has {shown}; expected tensors with one row per sample, at least one"
        )
    return counts.pop()


def _check(guard: Guard, example: Inputs | Batch, class_names: Sequence[str] | None) -> None:
    """An error if a graph could not do what the guard does."""
    guard.stages.require_fitted()
    if guard.map_threshold is not None and isinstance(example, Batch):
        raise ExportError(
            "a graph of features has one row per sample, and the guard decides on maps: export it "
            "with its model, from images"
        )
    _check_detector(guard)
    classes = guard.detector.head.num_classes
    if class_names is not None and (isinstance(class_names, str) or len(class_names) != classes):
        raise ValueError(
            f"class_names are {class_names!r}, expected a list of {classes} names, one per class"
        )
    _check_network(guard, example)
    size = sum(tensor.nbytes for tensor in guard.parameters())
    size += sum(tensor.nbytes for tensor in guard.buffers())
    if size > _LARGEST_FILE:
        raise ExportError(
            f"the guard holds {size / 1e9:.1f} GB, an ONNX file at most 2 GB: use a detector that "
            "keeps no samples, or a smaller alpha of the nearest-neighbour family"
        )


def _check_detector(guard: Guard) -> None:
    """An error if the scores need more than a plain graph."""
    detector = guard.detector
    if detector.needs.network or guard.perturb is not None:
        name = detector.label
        if guard.perturb is not None:
            name = "a guard with input perturbation"
        raise ExportError(
            f"{name} follows the network's gradient or transforms the images, which a plain graph "
            "cannot: export a guard with another detector, such as fdbd"
        )
    for part in detector.modules():
        if isinstance(part, KNN) and part.index not in ("exact", "flat"):
            raise ExportError(
                f"{detector.label} searches its neighbours approximately (index={part.index!r}) "
                "and a graph exactly, so the threshold would not fit: use index='exact', and "
                "calibrate again"
            )


def _check_network(guard: Guard, example: Inputs | Batch) -> None:
    """An error if the network runs in a precision that graphs do not have."""
    classifier = None if isinstance(example, Batch) else guard.classifier
    if classifier is not None and classifier.autocast is not None:
        raise ValueError(
            "the guard's network runs under autocast, which an ONNX graph cannot: set "
            "guard.classifier.autocast = None for a graph in full precision, whose scores differ a "
            "little"
        )
    if any(tensor.dtype is torch.bfloat16 for tensor in guard.parameters()):
        raise ExportError(
            "the model is in bfloat16, which ONNX Runtime cannot run on a CPU: call model.float() "
            "first"
        )


def _trace(graph: Graph, opset: int) -> Any:
    """The model as ONNX's protobuf, without the exporter's stack traces, which name paths of this
    machine and are larger than the graph."""
    sizes: dict[int, Any] = {0: torch.export.Dim("N")}
    if graph.shorter is not None:
        sizes[1] = torch.export.Dim("T")
    if graph.resized is not None:
        # Torch may find relations between these, such as multiples of 8, and keeps them.
        sizes[2] = torch.export.Dim.AUTO
        sizes[3] = torch.export.Dim.AUTO
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
                output_names=list(graph.outputs),
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


def _check_opset(opset: int) -> None:
    """ValueError unless there is such a version of the ONNX operators."""
    newest = require("onnx", "onnx").defs.onnx_opset_version()
    if not _OLDEST_OPSET <= opset <= newest:
        raise ValueError(
            f"opset is {str(opset)[:40]}, expected a version of the ONNX operators, "
            f"{_OLDEST_OPSET} to {newest}"
        )


def _check_written(model: Any, opset: int) -> None:
    """ExportError if torch wrote another version of ONNX's operators: it keeps its own default if
    it cannot convert to the one that was asked for."""
    written = {entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")}
    if written != {opset}:
        found = ", ".join(map(str, sorted(written)))
        raise ExportError(
            f"torch writes this guard with ONNX opset {found} and cannot convert it to {opset}: "
            f"export it with opset {OPSET}"
        )


def _note_on_images(graph: Graph) -> str:
    """Which sizes of images a graph of maps takes; empty for other graphs."""
    if graph.outputs != MAP_OUTPUTS:
        return ""
    if graph.resized is not None:
        return "takes images of any size that the model takes"
    return f"takes images of {' × '.join(map(str, graph.example[0].shape[2:]))} pixels alone"


def _has_fixed_length(model: Any) -> bool:
    """Whether an input of the graph has a number, not a name, as the length of its sequences."""
    for given in model.graph.input:
        dimensions = given.type.tensor_type.shape.dim
        if len(dimensions) == 2 and not dimensions[1].dim_param:
            return True
    return False


def _takes_any_size(
    graph: Graph, model: Any, description: Mapping[str, object], draft: Path
) -> bool:
    """Whether a graph of maps gives torch's answers on images of another size, too: the exporter
    may have written the example's height or width into it."""
    assert graph.resized is not None
    save(model, description, draft)
    run = runtime(draft, graph.outputs)
    try:
        _try_on(graph, run, "ONNX Runtime", "images of another size", graph.resized)
    except ExportError:
        return False
    return True


def verify(graph: Graph, run: Run, name: str) -> tuple[tuple[str, ...], float]:
    """What the runtime of this name was tried on, and its largest difference to torch; ExportError
    if it does not give torch's answers."""
    tried = []
    largest = 0.0
    for what, tensors in _trials(graph):
        largest = max(largest, _try_on(graph, run, name, what, tensors))
        tried.append(what)
    return tuple(tried), largest


def _try_on(graph: Graph, run: Run, name: str, what: str, tensors: tuple[Tensor, ...]) -> float:
    """The largest difference to torch of the runtime of this name on some inputs; ExportError if it
    does not give torch's answers."""
    with torch.no_grad():
        expected = graph(*tensors)
    try:
        results = run({key: tensor.numpy() for key, tensor in zip(graph.names, tensors)})
    except Exception as error:
        raise ExportError(f"{name} cannot run the graph on {what}: {error}") from error
    answers = [torch.from_numpy(result) for result in results]
    where = f"{what} ({name})"
    _compare_shapes(answers, expected, graph.outputs, where)
    threshold = graph.guard.stages.require_any_threshold()
    if isinstance(threshold, MapThreshold):
        return _compare_maps(answers, expected, threshold, where)
    return _compare(answers, expected, threshold, where)


def _trials(graph: Graph) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """The example, other batch sizes, noisy copies, a row of NaN, sequences of another length and
    images of another size."""
    inputs = graph.example
    generator = torch.Generator().manual_seed(0)
    yield "the example", inputs
    yield "its first sample alone", tuple(tensor[:1] for tensor in inputs)
    for scale in (0.1, 1.0):
        noisy = tuple(_with_noise(tensor, scale, generator) for tensor in inputs)
        yield f"the example with noise of {scale:g} of its spread", noisy
    if any(tensor.is_floating_point() for tensor in inputs):
        broken = tuple(tensor.clone() for tensor in inputs)
        for tensor in broken:
            if tensor.is_floating_point():
                # The last number of the second sample.
                last = (-1,) * (tensor.ndim - 1)
                tensor[(1, *last)] = torch.nan
        yield "a batch with a NaN", broken
    if graph.shorter is not None:
        yield "shorter sequences", graph.shorter
    if graph.resized is not None:
        yield "images of another size", graph.resized


def _with_noise(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """The samples, and the first one again, with noise of `scale` times their spread."""
    copies = tensor[torch.arange(len(tensor) + 1) % len(tensor)]
    if not tensor.is_floating_point():
        return copies
    finite = tensor[torch.isfinite(tensor)].float()
    spread = finite.std(correction=0).nan_to_num().item()
    noise = scale * spread * torch.randn(copies.shape, generator=generator)
    return copies + noise.to(tensor.dtype)


def _compare(
    got: Sequence[Tensor], expected: Sequence[Tensor], threshold: Threshold, what: str
) -> float:
    """The largest difference of logits and scores to torch's, relative above 1; ExportError if it
    is too large. Label, p-value and decision are compared with what follows from the graph's own
    logits and score, since a rounding error next to a threshold or between two equal logits moves
    them by a step."""
    logits, label, score, p_value, is_ood = got
    expected_logits, expected_label, expected_score, *_ = expected
    # A runtime may lose a NaN inside the network, so the logits of such a row may be any.
    readable = torch.isfinite(expected_logits).all(dim=1)
    same = (label == expected_label) | ~readable
    right_p_value, right_is_ood = threshold(score, label)
    pairs = (
        ("logits", logits[readable], expected_logits[readable]),
        ("label", label[readable], logits[readable].argmax(dim=1)),
        ("score", score[same], expected_score[same]),
        ("p_value", p_value, right_p_value),
        ("is_ood", is_ood, right_is_ood),
    )
    return _largest_of(pairs, what)


def _compare_shapes(
    got: Sequence[Tensor], expected: Sequence[Tensor], names: Sequence[str], what: str
) -> None:
    """ExportError if an output has another shape than torch's."""
    shapes = [tuple(tensor.shape) for tensor in got]
    right_shapes = [tuple(tensor.shape) for tensor in expected]
    if shapes != right_shapes:
        raise ExportError(
            f"shapes of {', '.join(names)} differ on {what}: {shapes}, torch has {right_shapes}"
        )


def _compare_maps(
    got: Sequence[Tensor], expected: Sequence[Tensor], threshold: MapThreshold, what: str
) -> float:
    """The largest difference of a guard of maps, as `_compare` finds it: labels, shares, p-values
    and decisions are compared with what follows from the graph's own logits and scores."""
    logits, label, score, is_ood, ood_share, image_score, image_p_value, image_is_ood = got
    expected_logits, expected_label, expected_score, *_ = expected
    # A runtime may lose a NaN inside the network, so the logits of such an image may be any.
    is_readable = torch.isfinite(expected_logits).flatten(1).all(dim=1)
    same = (label == expected_label) & is_readable[:, None, None]
    right_image_score = image_scores(score.flatten(1))
    of_images = threshold.image_threshold
    pairs = (
        ("logits", logits[is_readable], expected_logits[is_readable]),
        ("label", label[is_readable], logits[is_readable].argmax(dim=1)),
        ("score", score[same], expected_score[same]),
        ("is_ood", is_ood, threshold.is_ood(score)),
        ("ood_share", ood_share, is_ood.flatten(1).float().mean(dim=1)),
        ("image_score", image_score, right_image_score),
        ("image_p_value", image_p_value, of_images.p_values(image_score)),
        ("image_is_ood", image_is_ood, of_images.is_ood(image_score)),
    )
    return _largest_of(pairs, what)


def _largest_of(pairs: Iterable[tuple[str, Tensor, Tensor]], what: str) -> float:
    """The largest difference of outputs to what they should be; ExportError if it is too large."""
    largest = 0.0
    for name, actual, wanted in pairs:
        actual = actual.double()
        wanted = wanted.double()
        try:
            torch.testing.assert_close(actual, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        except AssertionError as error:
            reason = " ".join(str(error).split())
            raise ExportError(
                f"{name} differs from torch on {what}, no file was written: {reason}"
            ) from None
        largest = max(largest, _largest_difference(actual, wanted))
    return largest


def _largest_difference(actual: Tensor, wanted: Tensor) -> float:
    finite = torch.isfinite(wanted)
    if not finite.any():
        return 0.0
    difference = (actual[finite] - wanted[finite]).abs() / wanted[finite].abs().clamp(min=1)
    return float(difference.max())
