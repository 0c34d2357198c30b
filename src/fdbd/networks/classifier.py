"""Classifier: any torch model, split into backbone and linear head (found in `find_head`): a
loader's item becomes what the model takes, the model runs once per call, and what its head saw
comes back as a Batch of rows.

This is the one place that turns a model's output into rows: one per sample; or one per position of
a map, if the head is a 1×1 convolution over a map (`Batch.grid` says how these lie)."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head, Inputs, as_tensor, two_rows
from fdbd.core.grid import Grid
from fdbd.networks.boxes import finds_boxes
from fdbd.networks.find_head import (
    FoundHead,
    HeadName,
    describe_linear_layers,
    find_heads,
    get_layer,
)
from fdbd.networks.head_check import FirstCall, check_head, output_logits
from fdbd.networks.input_mistakes import explain_inputs
from fdbd.networks.wrapped import unwrapped
from fdbd.util.devices import device_of
from fdbd.util.torch_compat import is_out_of_sight

Call = tuple[str, Any, Any]
"""Name of a watched module, its input, its output."""
_NUMBERS = "biufc"
"""Kinds of NumPy's types that are numbers."""
PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""Precisions that a model may run in under autocast, by name."""


class Classifier(nn.Module):
    """A model with a linear head, asked for the head's input and output in one forward pass.

    ``classifier(images)`` gives ``Batch(features, logits)``: the exact input (N, P) of the linear
    head and its output (N, C). The model itself is not changed: it keeps its outputs, its weights
    and its training mode.

    - The head is found by timm's ``get_classifier()``, by the usual names (``classifier``, ``fc``,
      ``head``, …) or as the last linear layer. The first eager call checks that the model's output
      is the head's, and raises otherwise. With an explicit `head` the model may go on after it
      (softmax, say): logits are then the head's output.
    - Averaged heads (distilled DeiT, CrossViT) are one linear head on their inputs side by side. A
      head on every token of which the model keeps one (GPT-2 and others) yields the features of
      that token.
    - A head that is a 1×1 convolution over a map (torchvision's DeepLabV3, FCN and LR-ASPP, Hugging
      Face's SegFormer and UperNet) gives one row per position: features (N·H·W, P), logits (N·H·W,
      C), and ``Batch.grid``, which turns rows into maps at the head's resolution and back. Labels
      are then maps (N, h, w) of any resolution and come out as one per row.
    - A head of scaled cosines (ArcFace, `fdbd.networks.CosineHead` with class prompts) is linear in
      normalised features, so these are the features, and `head` holds the scale. It is recognised
      by what it computes.
    - Calls run in eval mode: a model in training mode is switched for the call and restored,
      submodule by submodule, once no call is under way. Only ``model.training`` is asked, so
      dropout that is switched on below an eval model stays on. A model in training mode can be
      neither compiled nor exported.
    - Gradients and autocast follow the caller: wrap the call in ``torch.inference_mode()`` when
      none are needed.
    - Calls from several threads do not see each other's features. ``torch.compile``,
      ``torch.export``, ``deepcopy`` and ``pickle`` work; compile the Classifier instead of the
      model (a compiled model is unwrapped). A model with graph breaks runs uncompiled.

    Args:
        model: any ``nn.Module`` that ends in a linear layer or in a 1×1 convolution after global
            pooling.
        head: the head's module name or the module itself, or several ("a+b" or a list) that the
            model averages; None finds it.
        layers: names of modules whose pooled outputs (N, P_layer) go to ``Batch.layers``: the mean
            over tokens of (N, T, C), over positions of (N, C, H, W), and of (N, H, W, C) in models
            that say so (timm's ``output_fmt``, torchvision's Swin).
        autocast: run the model under autocast in this lower precision, ``torch.bfloat16`` or
            ``torch.float16``, for speed on GPUs; features and logits still come out in float32.
            None: as it is.

    >>> model = nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> classifier = Classifier(model, layers=["0"])
    >>> batch = classifier(torch.randn(4, 8))
    >>> batch.features.shape, batch.logits.shape, batch.layers["0"].shape
    (torch.Size([4, 5]), torch.Size([4, 3]), torch.Size([4, 5]))
    >>> classifier.head, classifier.head_name
    (Head(3 classes, 5 features), '2')
    """

    def __init__(
        self,
        model: nn.Module,
        head: HeadName = None,
        layers: Sequence[str] = (),
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
        if isinstance(model, torch.jit.ScriptModule):
            raise TypeError(
                "the model is a TorchScript module, whose layers cannot be watched: give the "
                "torch.nn.Module that it was made from, or a .pt2 file of torch.export"
            )
        if finds_boxes(model):
            raise ValueError(
                f"{type(model).__name__} finds boxes, several in each image: guard it with "
                "fdbd.decision.boxes.BoxGuard"
            )
        if autocast not in (None, *PRECISIONS.values()):
            raise ValueError(
                f"autocast is {autocast}, expected torch.bfloat16, torch.float16 or None"
            )
        # A compiled model hides its hooks, and copies for several devices would not call them here.
        self.model: nn.Module = unwrapped(model)
        self.training = self.model.training
        self.autocast = autocast
        self.layer_names = (layers,) if isinstance(layers, str) else tuple(layers)
        self._found = FoundHead(find_heads(self.model, head))
        self.head_name = self._found.name
        # In a plain dict, so that modules are not registered twice.
        self._watched = dict(self._found.layers)
        for name in self.layer_names:
            self._watched[name] = get_layer(self.model, name)
        self._first_layer = next(iter(self._found.layers.values()))
        self._channels_last = {
            name for name in self.layer_names if _is_channels_last(self.model, name)
        }
        self._is_explicit = head is not None
        self._is_checked = False
        # Reading the head also refuses weights that are not finite.
        self._is_binary = self.head.is_binary
        self._recorder = _Recorder()
        self._handles = [
            module.register_forward_hook(_Tap(self._recorder, name), with_kwargs=True)
            for name, module in self._watched.items()
        ]
        self._remove_hooks_at_end()

    @property
    def head(self) -> Head:
        """The linear head with its present weights."""
        return self._found.linear()

    @property
    def may_give_maps(self) -> bool:
        """Whether the head is a convolution. It gives one row per position, unless the model pools
        before or after it; ``classifier(images).grid`` says which."""
        return isinstance(self._first_layer, nn.Conv2d)

    @property
    def batch_statistics(self) -> list[str]:
        """Names of batch normalisations that use, in a call, the statistics of the batch at hand:
        those without running statistics, and those in training mode below a model in eval mode."""
        names = []
        for name, module in self.model.named_modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                continue
            is_training = module.training and not self.model.training
            if is_training or module.running_mean is None:
                names.append(name)
        return names

    def fingerprint(self) -> str:
        """The head's fingerprint."""
        return self.head.fingerprint()

    def forward(self, inputs: Inputs) -> Batch:
        """Runs the model once, on what it takes: a tensor, or a dict of keyword arguments; a
        loader's item with labels (see `split_batch`) goes in as it is, and its labels come out.
        Inputs are moved to the model's device."""
        inputs, labels = split_batch(inputs)
        device = next(self._first_layer.parameters()).device
        if not isinstance(inputs, Tensor) or inputs.device != device:
            inputs = _move(inputs, device_of(self.model))
        calls: list[Call] = []
        if torch.compiler.is_compiling():
            output = self._run_traced(inputs, calls)
        else:
            output = self._run_uncompiled(inputs, calls)
        batch = self._collect(calls, output, labels)
        self._check_once(batch, output, inputs)
        return batch if self.autocast is None else batch.to(dtype=torch.float32)

    def with_gradients(
        self, inputs: Inputs, objective: Callable[[Batch], Tensor]
    ) -> tuple[Batch, dict[str, Tensor]]:
        """The batch of `inputs`, and for each of `layer_names` the gradient of the objective, Batch
        to (N,), with respect to that layer's output, pooled like it: (N, P_layer). Costs a forward
        pass, and a backward one down to the earliest of the layers."""
        inputs, labels = split_batch(inputs)
        # Independent of the caller's grad mode; parameters collect no gradients.
        with torch.inference_mode(False), torch.enable_grad():
            given = _move(inputs, device_of(self.model))
            if isinstance(given, Tensor) and given.is_floating_point():
                # If all parameters are frozen, the graph starts at the input.
                given = given.detach().clone().requires_grad_()
            calls: list[Call] = []
            output = self._run_uncompiled(given, calls)
            batch = self._collect(calls, output, labels)
            self._check_once(batch, output, given)
            results = {name: result for name, _, result in calls}
            outputs = [_first_tensor(results[name]) for name in self.layer_names]
            values = objective(batch).sum()
            gradients = torch.autograd.grad(values, outputs, allow_unused=True)
        pooled = {}
        for name, gradient in zip(self.layer_names, gradients):
            if gradient is None:
                raise ValueError(f"the model's logits do not depend on the layer {name!r}")
            pooled[name] = self._pool(name, gradient)
        batch = batch.detach()
        if self.autocast is not None:
            batch = batch.to(dtype=torch.float32)
            pooled = {name: gradient.float() for name, gradient in pooled.items()}
        return batch, pooled

    def _check_once(self, batch: Batch, output: Any, inputs: Any) -> None:
        """Compares the head with the model's output, at the first call that can tell."""
        if self._is_checked or torch.compiler.is_compiling():
            return
        if batch.features.is_meta or not len(batch.features):
            return
        samples = next((tensor.shape[0] for _, tensor in _tensors(inputs) if tensor.ndim), None)
        call = FirstCall(
            model=self.model,
            head_name=self.head_name,
            is_named=self._is_explicit,
            head=self.head,
            batch=batch,
            output=output,
            samples=samples,
            run_again=lambda: self._run(inputs, []),
        )
        self._is_checked = check_head(call)

    def _run_traced(self, inputs: Any, calls: list[Call]) -> Any:
        """Runs the model inside a trace of torch.compile or torch.export."""
        if self.model.training:
            raise RuntimeError(
                "the model is in training mode; call model.eval() before it is compiled or exported"
            )
        self._recorder.traced = calls
        try:
            with self._precision():
                return call_model(self.model, inputs)
        finally:
            self._recorder.traced = None

    def _run_uncompiled(self, inputs: Any, calls: list[Call]) -> Any:
        run = self._run
        # A graph break in the model leaves this method to Python, but would compile the hooks away.
        # Nothing is compiled without torch._dynamo, whose import takes seconds.
        if "torch._dynamo" in sys.modules:
            run = torch.compiler.disable(run)
        return run(inputs, calls)

    def _run(self, inputs: Any, calls: list[Call]) -> Any:
        """Runs the model in eval mode; what the hooks of this thread see goes to `calls`."""
        local = self._recorder.local
        local.calls = calls
        try:
            with _eval_mode(self.model), self._precision():
                return call_model(self.model, inputs)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            dtype = next(self._first_layer.parameters()).dtype
            explanation = explain_inputs(inputs, dtype, error)
            if explanation is not None:
                raise TypeError(explanation) from error
            raise
        finally:
            local.calls = None

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_of(self.model).type, self.autocast)

    def _collect(self, calls: list[Call], output: Any, labels: Tensor | None) -> Batch:
        """The Batch of what the watched modules saw and gave in one call."""
        if len(calls) != len(self._watched):
            self._refuse_repeated(calls)
        seen = {name: (given, result) for name, given, result in calls}
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}
        grid = None
        for name in self._found.layers:
            given, result = seen[name]
            inputs[name], outputs[name], grid = self._rows(name, given, result, output)
        features = self._found.features(inputs)
        logits = self._found.logits(outputs)
        if self._is_binary:
            logits = two_rows(logits)
        if labels is not None:
            labels = _labels_of_rows(labels.to(features.device), grid)
        layers = {name: self._pool(name, seen[name][1]) for name in self.layer_names}
        if layers and grid is not None:
            raise ValueError(
                f"layers are pooled per sample, and the head {self.head_name!r} gives a row per "
                "position: leave layers out"
            )
        return Batch(features, logits, labels, layers or None, grid=grid)

    def _refuse_repeated(self, calls: list[Call]) -> None:
        """ValueError for a watched module that did not run exactly once."""
        for name in self._watched:
            count = sum(name == called for called, _, _ in calls)
            if count != 1:
                raise ValueError(
                    f"the model called {name!r} {count} times in one forward pass, expected once; "
                    "name a module that it calls once (if the model is compiled, compile the "
                    f"Classifier instead); {describe_linear_layers(self.model)}"
                )

    def _rows(
        self, name: str, features: Tensor, logits: Tensor, output: Any
    ) -> tuple[Tensor, Tensor, Grid | None]:
        """Rows (N, P) and (N, C) from what a layer of the head was given and gave: per sample, from
        (N, P), (N, P, 1, 1) or (N, 1, P), or of the token that the model kept; or per position of a
        map (N, P, H, W), with the map's grid."""
        if features.ndim == 2:
            return features, logits, None
        num_classes, num_features = self._found.size(name)
        final = output_logits(output)
        # A small image may have a map of one position, which the model then enlarges.
        is_enlarged = final is not None and final.ndim == 4 and final.shape[2:].numel() > 1
        has_one_row = features.ndim > 2 and features.shape[1:].numel() == num_features
        if has_one_row and not is_enlarged:
            return features.flatten(1), logits.flatten(1), None
        has_tokens = features.ndim == 3
        if has_tokens and final is not None and final.shape == (len(features), num_classes):
            return _kept_token(features, logits, final), final, None
        if isinstance(self._found.layers[name], nn.Conv2d) and features.ndim == 4:
            # A model that pools after its head ends in a matrix, for which there are no rows.
            ends_in_maps = final is not None and final.ndim > 2
            # What a model makes of its maps (masks, say) is not asked if its head was named.
            is_named = final is None and self._is_explicit
            if ends_in_maps or is_named:
                grid = Grid.from_maps(features)
                return grid.to_rows(features), grid.to_rows(logits), grid
            if _holds_maps(output, num_classes):
                raise ValueError(
                    f"the model gives a dict with {', '.join(map(repr, output))}, expected maps of "
                    f"logits under 'out' or 'logits': pass head={name!r} to take the output of its "
                    "last 1×1 convolution as logits, or name another layer"
                )
        raise ValueError(
            f"the head {name!r} saw an input of shape {tuple(features.shape)}, expected "
            f"(N, {num_features}) or (N, {num_features}, 1, 1): one prediction per sample, after "
            "pooling; or a 1×1 convolution that ends in maps; token classifiers, and heads that "
            "stand before the pooling, are not supported"
        )

    def _pool(self, name: str, output: Any) -> Tensor:
        """(N, P_layer) from a layer's output."""
        output = _first_tensor(output)
        if not isinstance(output, Tensor) or output.ndim < 2:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"layer {name!r} gives {shape}, expected a tensor of (N, C), (N, T, C) or (N, C,"
                " H, W)"
            )
        if output.ndim == 3 or name in self._channels_last:
            return output.flatten(1, -2).mean(dim=1)
        if output.ndim == 2:
            return output
        return output.flatten(2).mean(dim=2)

    def _remove_hooks_at_end(self) -> None:
        for handle in self._handles:
            weakref.finalize(self, handle.remove).atexit = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._remove_hooks_at_end()


def _holds_maps(output: Any, num_classes: int) -> bool:
    """Whether a model's output is a dict in which something may be maps of logits."""
    if not isinstance(output, Mapping):
        return False
    tensors = [value for value in output.values() if isinstance(value, Tensor)]
    return any(tensor.ndim == 4 and tensor.shape[1] == num_classes for tensor in tensors)


def _first_tensor(output: Any) -> Any:
    """A layer's main output: the first part of what it returns, if that is a tuple."""
    # Layers of Hugging Face give tuples.
    while isinstance(output, (tuple, list)) and output:
        output = output[0]
    return output


class _Local(threading.local):
    calls: list[Call] | None = None


class _Recorder:
    """Where the hooks write: to the list of the call that is under way in this thread, or in this
    trace."""

    def __init__(self) -> None:
        self.local = _Local()
        self.traced: list[Call] | None = None

    def __reduce__(self) -> tuple[type[_Recorder], tuple[()]]:
        # A copy starts with no call under way.
        return _Recorder, ()


class _Tap:
    """The forward hook on one watched module. Outside a Classifier's call it does nothing."""

    def __init__(self, recorder: _Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    @property
    def __name__(self) -> str:
        # Asked for by torch.jit.script alone, whose own error would name this class.
        raise AttributeError(
            "torch.jit.script cannot compile a model with a Classifier or Guard around it: use "
            "guard.export_onnx or torch.export"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], *others: Any) -> None:
        """`others` are keyword arguments and the output; the output alone if a tool (quantisation)
        has copied the hook to a module of its own."""
        calls = self.recorder.traced if torch.compiler.is_compiling() else self.recorder.local.calls
        if calls is None:
            return
        given = list(args)
        if len(others) > 1:
            given.extend(others[0].values())
        first = given[0] if given else None
        calls.append((self.name, first, others[-1]))


@dataclass
class _SwitchedModel:
    """A training model that is in eval mode while calls are under way."""

    training: set[nn.Module]
    """Its modules that were in training mode, and are put back into it."""
    calls: int = 0
    """The number of calls under way, in all threads."""


_MODE_LOCK = threading.Lock()
_SWITCHED: dict[int, _SwitchedModel] = {}
"""The training models by their ids."""


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """A training model in eval mode; the last call under way restores the mode of each
    submodule."""
    with _MODE_LOCK:
        switched = _switch_to_eval(model)
    try:
        yield
    finally:
        if switched is not None:
            with _MODE_LOCK:
                _end_call(model, switched)


def _switch_to_eval(model: nn.Module) -> _SwitchedModel | None:
    """Counts one more call of a training model and puts it into eval mode; None for a model that
    was in eval mode anyway."""
    if id(model) not in _SWITCHED:
        if not model.training:
            return None
        _SWITCHED[id(model)] = _SwitchedModel(set())
    switched = _SWITCHED[id(model)]
    switched.calls += 1
    # During another call, someone may have put it back into training mode.
    if model.training:
        switched.training.update(module for module in model.modules() if module.training)
        model.eval()
    return switched


def _end_call(model: nn.Module, switched: _SwitchedModel) -> None:
    """Counts one call less; after the last one the modules have the modes they had before."""
    switched.calls -= 1
    if switched.calls == 0:
        del _SWITCHED[id(model)]
        model.train()
        for module in model.modules():
            module.training = module in switched.training


def _labels_of_rows(labels: Tensor, grid: Grid | None) -> Tensor:
    """Labels as they belong to the rows of a head: one per sample, or the pixels of its maps."""
    if grid is not None:
        return grid.label_rows(labels)
    if labels.ndim not in (1, 2):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, and the model gives one prediction per "
            "sample, expected class indices (N,), or zeros and ones (N, C)"
        )
    return labels


def _kept_token(features: Tensor, logits: Tensor, output: Tensor) -> Tensor:
    """(N, P) features of the token whose logits (N, T, C) are the model's output (N, C); NaN if
    none is."""
    is_kept = (logits == output[:, None]).all(dim=2)
    index = is_kept.int().argmax(dim=1)
    kept = features.gather(1, index[:, None, None].expand(-1, 1, features.shape[2]))[:, 0]
    return kept.masked_fill(~is_kept.any(dim=1, keepdim=True), float("nan"))


def _is_channels_last(model: nn.Module, name: str) -> bool:
    """Whether a layer gives (N, H, W, C): if it, or a module around it, says so."""
    if isinstance(get_layer(model, name), (nn.Conv2d, nn.BatchNorm2d)):
        return False
    parts = name.split(".")
    for depth in range(len(parts) + 1):
        module = get_layer(model, ".".join(parts[:depth]))
        if getattr(module, "output_fmt", None) == "NHWC":
            return True
        kind = type(module)
        if kind.__name__ == "SwinTransformer" and kind.__module__.startswith("torchvision."):
            return True
    return False


class PositionalInputs(tuple[Any, ...]):
    """Several inputs of a model, by position. `split_batch` makes it, and does not take the second
    of them for labels when it is given it again."""


def split_batch(batch: Inputs) -> tuple[Any, Tensor | None]:
    """Splits what a loader yields into what the model takes and class indices, (N,) or maps
    (N, h, w); None if there are none.

    A tensor is the input. A tuple or list is (inputs, labels, …) and what follows is left out; a
    second element that is not an array (None, file names) is not taken for labels. The inputs of a
    pair may be a tuple or list themselves, which the model takes by position. A list of texts is
    one input. A dict holds keyword arguments for the model, and labels under ``labels`` or
    ``label``; if there is nothing but ``image`` (or ``images``, ``img``) beside them, that is the
    input. NumPy arrays become tensors.

    >>> images, labels = split_batch([torch.zeros(2, 3, 8, 8), torch.tensor([4, 1])])
    >>> images.shape, labels
    (torch.Size([2, 3, 8, 8]), tensor([4, 1]))
    >>> split_batch({"input_ids": torch.ones(1, 2), "labels": [3]})
    ({'input_ids': tensor([[1., 1.]])}, tensor([3]))
    """
    if isinstance(batch, Mapping):
        return _split_dict(batch)
    if isinstance(batch, PositionalInputs) or _are_texts(batch):
        return batch, None
    if not isinstance(batch, (tuple, list)):
        return _with_tensors(batch), None
    if not batch:
        raise ValueError("the batch is an empty tuple, expected (inputs,) or (inputs, labels)")
    _refuse_single_samples(batch)
    first = batch[0]
    labels = None
    if isinstance(first, Mapping):
        inputs, labels = split_batch(first)
    elif isinstance(first, (tuple, list)) and not _are_texts(first):
        inputs = PositionalInputs(_with_tensors(value) for value in first)
    else:
        inputs = _with_tensors(first)
    if len(batch) > 1:
        labels = _as_labels(batch[1])
    return inputs, labels


def _split_dict(batch: Mapping[str, Any]) -> tuple[Any, Tensor | None]:
    """The keyword arguments in a dict, or its images if there is nothing else; and its labels."""
    inputs = {}
    for key, value in batch.items():
        if key not in ("labels", "label"):
            inputs[key] = _with_tensors(value)
    labels = _as_labels(batch.get("labels", batch.get("label")))
    if len(inputs) == 1:
        [(name, only)] = inputs.items()
        # Names of the images in datasets, not of a model's argument.
        if name in ("image", "images", "img") and isinstance(only, Tensor):
            return only, labels
    return inputs, labels


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``; a dict is given as keyword arguments, a tuple or list as positional ones
    unless it holds texts."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)) and not _are_texts(inputs):
        return model(*inputs)
    return model(inputs)


def _move(inputs: Any, device: torch.device) -> Any:
    """The inputs with every tensor on a device; copies from pinned memory to CUDA do not wait."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=device.type == "cuda")
    if isinstance(inputs, Mapping):
        return {key: _move(value, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)) and not _are_texts(inputs):
        return tuple(_move(value, device) for value in inputs)
    return inputs


def rows_finite(inputs: Any) -> Tensor | None:
    """(N,) whether all numbers of each sample are finite; None if no tensor is floating-point. Each
    tensor is read once.

    Left out are masks, by their name, which may hold −inf, and tensors whose first size is not that
    of the first tensor: their rows are not samples.

    >>> images = torch.tensor([[1.0, 2.0], [3.0, torch.inf]])
    >>> rows_finite({"image": images, "ids": torch.tensor([1, 2])})
    tensor([ True, False])
    """
    count: int | None = None
    found: Tensor | None = None
    for name, tensor in _tensors(inputs):
        if not tensor.ndim:
            continue
        if count is None:
            count = tensor.shape[0]
        is_of_samples = tensor.shape[0] == count and not name.endswith("mask")
        if not is_of_samples or not tensor.is_floating_point():
            continue
        finite = _rows_of_finite_numbers(tensor.detach())
        found = finite if found is None else found & finite
    return found


def _rows_of_finite_numbers(values: Tensor) -> Tensor:
    """(N,) whether all numbers of each row of (N, …) are finite."""
    # One dimension more, so that there is one to sum over.
    values = values[..., None]
    is_compiling = torch.compiler.is_compiling()
    if not values.is_cpu and not is_compiling:
        # Looking at a sum would wait for the device.
        return torch.isfinite(values).flatten(1).all(dim=1)
    # A sum shows NaN and infinity, whatever the memory layout.
    wide = torch.promote_types(values.dtype, torch.float32)
    sums = values.sum(dim=tuple(range(1, values.ndim)), dtype=wide)
    finite = torch.isfinite(sums)
    if is_compiling or finite.all():
        return finite
    # It overflows for huge numbers, too: each number is looked at.
    return torch.isfinite(values).flatten(1).all(dim=1)


def sum_in_sight(inputs: Any) -> float | None:
    """The sum of all numbers of a floating-point tensor, which is finite only if each of them is;
    None for anything else, and if looking at it would mean waiting for a device.

    >>> sum_in_sight(torch.ones(2, 3)), sum_in_sight(torch.tensor([[1.0, torch.nan]]))
    (6.0, nan)
    """
    if not isinstance(inputs, Tensor) or inputs.dtype not in (torch.float32, torch.float64):
        return None
    if is_out_of_sight(inputs):
        return None
    return float(inputs.detach().sum())


def _tensors(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _tensors(value, str(key))
    elif isinstance(inputs, (tuple, list)):
        for value in inputs:
            yield from _tensors(value, name)


def _with_tensors(value: Any) -> Any:
    """Arrays of numbers as tensors. NumPy's default, float64, becomes float32, which networks
    take."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in _NUMBERS:
        return value
    if value.dtype.kind == "f":
        value = value.astype(np.float32)
    return torch.from_numpy(value)


def _are_labels(value: Any) -> bool:
    """Whether what a loader gives beside the inputs is meant as labels: not text, a dict or a list
    of file names."""
    if value is None or isinstance(value, (str, bytes, Mapping)):
        return False
    if isinstance(value, (tuple, list)):
        return all(isinstance(label, (int, Tensor)) for label in value)
    return not isinstance(value, np.ndarray) or value.dtype.kind in _NUMBERS


def _are_texts(value: Any) -> bool:
    """Whether a value is a list of texts."""
    if not isinstance(value, (tuple, list)) or not value:
        return False
    return all(isinstance(text, str) for text in value)


def _refuse_single_samples(batch: Sequence[Any]) -> None:
    """ValueError for a list of samples, of which the second would be taken for labels."""
    if len(batch) < 2:
        return
    first = batch[0]
    second = batch[1]
    for each in (first, second):
        if not isinstance(each, (Tensor, np.ndarray)):
            return
    if not first.ndim or tuple(first.shape) != tuple(second.shape):
        return
    if as_tensor(second).is_floating_point():
        raise ValueError(
            f"the batch is a list of {len(batch)} samples of shape {tuple(first.shape)}, expected "
            "one tensor (N, …), such as torch.stack(samples), or (inputs, labels)"
        )


def _as_labels(labels: Any) -> Tensor | None:
    """Labels as int64; None for what is not meant as labels, ValueError for labels of a wrong
    form."""
    if not _are_labels(labels):
        return None
    indices = as_tensor(labels)
    # Masks of images often keep their one channel.
    if indices.ndim in (2, 4) and indices.shape[1] == 1:
        indices = indices[:, 0]
    is_whole = not indices.is_floating_point() or not bool((indices != indices.round()).any())
    # Several labels per sample are zeros and ones, one column per label.
    is_multi_hot = indices.ndim == 2 and bool(((indices == 0) | (indices == 1)).all())
    are_indices = indices.ndim in (1, 3) and is_whole
    if not is_multi_hot and not are_indices:
        raise ValueError(
            f"labels have shape {tuple(indices.shape)} and dtype {indices.dtype}, expected class"
            " indices (N,), zeros and ones (N, C) for a head of many labels, or maps (N, h, w) for"
            " a model of pixels; give a loader of dicts when the model takes several inputs"
        )
    return indices.long()
