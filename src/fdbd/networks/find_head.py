"""Finds the linear head of a torch model by its structure, and checks the finding against what the
model gave."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head, two_rows
from fdbd.networks.wrapped import modules_by_plain_name, name_without_wrappers, plain_names

HeadName: TypeAlias = str | nn.Module | Sequence[str | nn.Module] | None
"""A head by its module's name or as a module; several that the model averages; None: to be
found."""

# Attributes that hold the head: two averaged ones of distilled models (Hugging Face, timm), then
# single ones.
_PAIRS = (
    ("cls_classifier", "distillation_classifier"),
    ("classifier", "classifier_distill"),
    ("head", "head_dist"),
)
_NAMES = ("classifier", "classification_head", "score", "logits_proj", "fc", "head", "heads")


def find_heads(model: nn.Module, head: HeadName) -> dict[str, nn.Module]:
    """Name to module of the linear head; several entries are heads whose outputs the model
    averages.

    Without an explicit `head`, timm's ``get_classifier()`` is asked, then the usual attribute names
    are tried (``classifier``, ``fc``, ``head``, …), then the last linear layer of the model is
    taken."""
    names = {module: name for name, module in model.named_modules()}
    if head is None:
        modules = _conventional(model) or _layers_in(model)
    else:
        chosen = (
            head.split("+")
            if isinstance(head, str)
            else head
            if isinstance(head, Sequence)
            else [head]
        )
        modules = [get_layer(model, each) if isinstance(each, str) else each for each in chosen]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no linear layer (nn.Linear or 1×1 nn.Conv2d) to be its head"
        )
    for module in modules:
        if module not in names:
            _refuse(model, f"head={type(module).__name__}(…) is not a module of the model")
        if not _is_linear(module):
            what = f"head={names[module]!r} is a {type(module).__name__}"
            _refuse(model, f"{what}, expected nn.Linear or an ungrouped 1×1 nn.Conv2d")
    found = [names[module] for module in modules]
    return dict(zip(plain_names(model, found), modules))


def merged_head(modules: Sequence[nn.Module]) -> Head:
    """The Head of one linear layer, or of several averaged ones: a linear head on their inputs side
    by side."""
    heads = [Head.of(module) for module in modules]
    if len(heads) == 1:
        return heads[0]
    weight = torch.cat([head.weight for head in heads], dim=1) / len(heads)
    return Head(weight, torch.stack([head.bias for head in heads]).mean(0))


def describe_linear_layers(model: nn.Module, limit: int = 8) -> str:
    """One line for error messages: the last linear layers of `model` with their widths, from the
    last."""
    layers = []
    for name, module in model.named_modules():
        if _is_linear(module):
            rows, columns = module.weight.shape[:2]
            layers.append(f"{name or '(the model itself)'} ({columns} to {rows})")
    return f"linear layers found, from the last: {', '.join(layers[: -limit - 1 : -1]) or 'none'}"


def get_layer(model: nn.Module, name: str) -> nn.Module:
    """The module called `name`, with or without what wrappers add to it, or an error with the
    closest names."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        modules = modules_by_plain_name(model)
    if name not in modules:
        plain = name_without_wrappers(name)
        if plain in modules:
            return modules[plain]
        close = difflib.get_close_matches(name, modules, n=5, cutoff=0.4)
        hint = (
            f"did you mean {', '.join(close)}?"
            if close
            else "see model.named_modules() for the names there are"
        )
        raise ValueError(f"{type(model).__name__} has no module named {name!r}; {hint}")
    return modules[name]


def logits_of(output: Any) -> Tensor | None:
    """The logits in what a model returned: a tensor, ``.logits``, ``["logits"]`` or the first of a
    tuple."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, (tuple, list)):
        output = output[0] if output else None
    elif not isinstance(output, Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, Tensor) else None


@torch.no_grad()
def check_head(
    model: nn.Module,
    name: str,
    head: Head,
    batch: Batch,
    output: Any,
    count: int | None,
    is_named: bool,
) -> bool:
    """Raises unless `head` maps the batch's features to its logits and these are the model's output
    for `count` samples. A head that the user named may be followed by more, but not by another
    number of classes. False: this batch is not finite, and cannot tell."""
    features, logits = batch.features, batch.logits
    assert logits is not None
    given = logits_of(output)
    if given is not None and given.numel() == len(logits) * (
        1 if head.is_binary else head.num_classes
    ):
        given = given.reshape(len(logits), -1)
        given = two_rows(given) if head.is_binary else given
    if given is None or given.shape != logits.shape:
        if not is_named or (count not in (None, len(logits)) if given is None else given.ndim == 2):
            shape = f"a {type(output).__name__}" if given is None else tuple(given.shape)
            what = f"{type(model).__name__} gives {shape} where its linear layer {name!r} gives {tuple(logits.shape)}"
            hint = "models for detection and segmentation are not supported"
            _refuse(model, f"{what}; pass head= to name the layer that holds the logits; {hint}")
    elif not torch.isfinite(logits).all():
        return False
    elif not is_named and not _is_close(given, logits):
        if not head.is_binary and _is_close(given, logits.sigmoid()):
            raise ValueError(
                f"{type(model).__name__} ends in a sigmoid for each of its {head.num_classes} classes, so a sample may "
                "have several at once: such classes have no boundaries between them, and multi-label models are not "
                f"supported; pass head={name!r} if each sample has one class all the same"
            )
        why = "something follows it, such as a softmax, a ReLU, a scaling or a second head"
        how = f"pass head={name!r} to take this layer's output as logits all the same, or name another layer"
        _refuse(model, f"the model's output is not that of its linear layer {name!r}; {why}: {how}")
    if not torch.isfinite(features).all():
        what = "is applied to every token and the model does not keep one of them"
        _refuse(model, f"the head {name!r} {what}, expected one prediction per sample")
    if not _is_close(head(features.float()), logits):
        why = "its module computes something else, or the output is changed in place after it"
        _refuse(
            model,
            f"the output of {name!r} is not weight · input + bias: {why}; a linear head is needed",
        )
    return True


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise ValueError(f"{why}; {describe_linear_layers(model)}")


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` can be a head: an ``nn.Linear`` or an ungrouped 1×1 ``nn.Conv2d``, with
    initialised weights."""
    is_conv = (
        isinstance(module, nn.Conv2d) and tuple(module.kernel_size) == (1, 1) and module.groups == 1
    )
    return (is_conv or isinstance(module, nn.Linear)) and not isinstance(
        module.weight, nn.UninitializedParameter
    )


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Equal up to the rounding of their dtype; TensorFloat-32 counts as float32."""
    is_single = {a.dtype, b.dtype} <= {torch.float32, torch.float64}
    a, b = a.cpu().double(), b.cpu().double()  # not every device has float64
    return bool((a - b).abs().max() <= (1e-3 if is_single else 2e-2) * b.abs().max())


def _conventional(model: nn.Module) -> list[nn.Module]:
    """The head that the model's library names: timm's ``get_classifier``, or a well-known
    attribute."""
    for module in model.modules():
        get_classifier: Any = getattr(module, "get_classifier", None)
        if callable(get_classifier):
            answer = get_classifier()
            parts = answer if isinstance(answer, (tuple, list, nn.ModuleList)) else [answer]
            if found := [layer for part in parts for layer in _layers_in(part)]:
                return found
            if module is model:
                why = f"{type(model).__name__} has no classifier: get_classifier() holds no linear layer"
                advice = (
                    "create the model with num_classes above 0, or pass head= to name another layer"
                )
                raise ValueError(f"{why}; {advice}")
    candidates = (_layers_in(getattr(model, name, None)) for name in _NAMES)
    return _pair_in(model) or next(filter(None, candidates), [])


def _layers_in(module: Any) -> list[nn.Module]:
    """The last linear layer inside `module`, or of each of the two heads that it averages."""
    if not isinstance(module, nn.Module):
        return []
    return _pair_in(module) or [layer for layer in module.modules() if _is_linear(layer)][-1:]


def _pair_in(module: nn.Module) -> list[nn.Module]:
    for names in _PAIRS:
        pair = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in pair):
            return [layer for part in pair for layer in _layers_in(part)]
    return []
