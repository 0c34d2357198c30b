"""Finds the linear head of a torch model by its structure. Whether the finding is right is checked
at the first call, by `fdbd.networks.head_check`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.core.batch import Head
from fdbd.networks.sphere import linear_on_sphere
from fdbd.networks.wrapped import modules_by_plain_name, name_without_wrappers, plain_names

HeadName: TypeAlias = str | nn.Module | Sequence[str | nn.Module] | None
"""A head by its module's name or as a module; several that the model averages; None: to be
found."""

# Attributes that hold two heads whose outputs a model averages: distilled models of Hugging Face
# and timm.
_AVERAGED = (
    ("cls_classifier", "distillation_classifier"),
    ("classifier", "classifier_distill"),
    ("head", "head_dist"),
)
# Attributes that hold two heads whose outputs a model adds: torchvision's LR-ASPP.
_ADDED = ("low_classifier", "high_classifier")
# Names of what holds a single head, from the model on.
_NAMES = (
    "classifier",
    "classification_head",
    "score",
    "logits_proj",
    "fc",
    "head",
    "heads",
    "decode_head.classifier",
    "decode_head.conv_seg",
    "segmentation_head",
)


class FoundHead:
    """The linear head of a model: one layer, or several whose outputs the model averages or adds.

    A layer that looks at normalised features alone (see `fdbd.networks.sphere`) is linear in them,
    so these are what `features` gives for it."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        self.name = "+".join(layers)
        last_names = tuple(name.rpartition(".")[2] for name in layers)
        self.is_sum = last_names == _ADDED
        # Names of the layers that look at normalised features alone.
        self._on_sphere: set[str] = set()
        self._sizes: dict[str, tuple[int, int]] = {}
        for name, layer in layers.items():
            # Layers of cosines may keep their weight under another name.
            on_sphere = None if _is_plain(layer) else linear_on_sphere(layer)
            if on_sphere is not None:
                self._on_sphere.add(name)
            weight: Any = layer.weight if on_sphere is None else on_sphere.weight
            self._sizes[name] = (int(weight.shape[0]), int(weight.shape[1]))

    def linear(self) -> Head:
        """The head with its present weights; of several layers, one head on their inputs side by
        side."""
        heads = [self._linear_layer(name, layer) for name, layer in self.layers.items()]
        if len(heads) == 1:
            return heads[0]
        weight = torch.cat([head.weight for head in heads], dim=1)
        bias = torch.stack([head.bias for head in heads]).sum(0)
        if self.is_sum:
            return Head(weight, bias)
        return Head(weight / len(heads), bias / len(heads))

    def _linear_layer(self, name: str, layer: nn.Module) -> Head:
        if name not in self._on_sphere:
            return Head.from_linear(layer)
        on_sphere = linear_on_sphere(layer)
        if on_sphere is None:
            raise ValueError(
                f"the head {name!r} was a cosine classifier and now computes something else"
            )
        return Head(on_sphere.weight, on_sphere.bias)

    def size(self, name: str) -> tuple[int, int]:
        """Classes and features of one layer."""
        return self._sizes[name]

    def features(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """(N, P) what the linear head takes, from rows (N, P_layer) that its layers were given."""
        parts = []
        for name in self.layers:
            rows = inputs[name]
            if name in self._on_sphere:
                rows = F.normalize(rows, dim=1)
            parts.append(rows)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def logits(self, outputs: Mapping[str, Tensor]) -> Tensor:
        """(N, C) the head's output, from the outputs of its layers."""
        parts = [outputs[name] for name in self.layers]
        if len(parts) == 1:
            return parts[0]
        total = torch.stack(parts).sum(0)
        return total if self.is_sum else total / len(parts)


def find_heads(model: nn.Module, head: HeadName) -> dict[str, nn.Module]:
    """Name to module of the linear head; several entries are layers whose outputs the model
    averages or adds.

    Without an explicit `head`, timm's ``get_classifier()`` is asked, then the usual attribute names
    are tried (``classifier``, ``fc``, ``head``, …), then the last linear layer of the model is
    taken."""
    names = {module: name for name, module in model.named_modules()}
    modules = _guessed(model) if head is None else _chosen(model, head)
    if not modules:
        _refuse_lazy_layers(model)
        raise ValueError(
            f"{type(model).__name__} has no linear layer (nn.Linear or 1×1 nn.Conv2d) to be its"
            " head"
        )
    for module in modules:
        if module not in names:
            refuse_head(model, f"head={type(module).__name__}(…) is not a module of the model")
        if not _is_head(module):
            what = f"head={names[module]!r} is a {type(module).__name__}"
            expected = "expected nn.Linear, an ungrouped 1×1 nn.Conv2d, or a layer of cosines"
            refuse_head(model, f"{what}, {expected}")
    found = [names[module] for module in modules]
    return dict(zip(plain_names(model, found), modules))


def _refuse_lazy_layers(model: nn.Module) -> None:
    """ValueError if the model has lazy linear layers that have not seen their first batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.LazyLinear) and module.has_uninitialized_params():
            raise ValueError(
                f"the layer {name!r} is a LazyLinear without weights: run the model on one batch "
                "first, and train it or load its weights"
            )


def _guessed(model: nn.Module) -> list[nn.Module]:
    """The modules that the model's library names, else the last linear one."""
    return _conventional(model) or _layers_in(model)


def _chosen(model: nn.Module, head: str | nn.Module | Sequence[str | nn.Module]) -> list[nn.Module]:
    """The modules that a user named."""
    if isinstance(head, str):
        return [get_layer(model, name) for name in head.split("+")]
    if isinstance(head, nn.Module):
        return [head]
    if not isinstance(head, Sequence):
        kind = type(head).__name__
        raise TypeError(f"head is a {kind}, expected a module's name or the module itself")
    chosen = []
    for each in head:
        module = get_layer(model, each) if isinstance(each, str) else each
        chosen.append(module)
    return chosen


def describe_linear_layers(model: nn.Module, limit: int = 8) -> str:
    """One line for error messages: the last linear layers of `model` with their widths, from the
    last."""
    layers = []
    for name, module in model.named_modules():
        if is_linear(module):
            kind = "1×1 convolution, " if isinstance(module, nn.Conv2d) else ""
            weight: Any = module.weight
            rows, columns = weight.shape[:2]
            layers.append(f"{name or '(the model itself)'} ({kind}{columns} to {rows})")
    if not layers:
        return "it has no linear layers"
    last = ", ".join(reversed(layers[-limit:]))
    more = f" and {len(layers) - limit} more before" if len(layers) > limit else ""
    return f"linear layers found, from the last: {last}{more}"


def get_layer(model: nn.Module, name: str) -> nn.Module:
    """The module called `name`, with or without what wrappers add to it, or an error with the
    closest names."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        modules = modules_by_plain_name(model)
    if name in modules:
        return modules[name]
    plain = name_without_wrappers(name)
    if plain in modules:
        return modules[plain]
    close = difflib.get_close_matches(name, modules, n=5, cutoff=0.4)
    hint = "see model.named_modules() for the names there are"
    if close:
        hint = f"did you mean {', '.join(close)}?"
    raise ValueError(f"{type(model).__name__} has no module named {name!r}; {hint}")


def refuse_head(model: nn.Module, why: str) -> NoReturn:
    """A ValueError that says why, and lists the layers to choose from."""
    raise ValueError(f"{why}; {describe_linear_layers(model)}")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is an ``nn.Linear`` or an ungrouped 1×1 ``nn.Conv2d`` with initialised
    weights."""
    if isinstance(module, nn.Conv2d):
        is_wanted = tuple(module.kernel_size) == (1, 1) and module.groups == 1
    else:
        is_wanted = isinstance(module, nn.Linear)
    return is_wanted and not isinstance(module.weight, nn.UninitializedParameter)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is linear and computes what its class computes in torch."""
    own = (nn.Linear.forward, nn.Conv2d.forward)
    return is_linear(module) and type(module).forward in own


def _is_head(module: nn.Module) -> bool:
    return is_linear(module) or linear_on_sphere(module) is not None


def _conventional(model: nn.Module) -> list[nn.Module]:
    """The head that the model's library names: timm's ``get_classifier``, or a well-known
    attribute."""
    for module in model.modules():
        get_classifier: Any = getattr(module, "get_classifier", None)
        if not callable(get_classifier):
            continue
        found = _layers_in_answer(get_classifier())
        if found:
            return found
        if module is model:
            kind = type(model).__name__
            raise ValueError(
                f"{kind} has no classifier: get_classifier() holds no linear layer; create the "
                "model with num_classes above 0, or pass head= to name another layer"
            )
    pair = _pair_in(model)
    if pair:
        return pair
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in _NAMES:
        found = _layers_in(modules.get(name))
        if found:
            return found
    return []


def _layers_in_answer(answer: Any) -> list[nn.Module]:
    """The linear layers in what ``get_classifier()`` returned: a module, or several heads."""
    parts = answer if isinstance(answer, (tuple, list, nn.ModuleList)) else [answer]
    layers = []
    for part in parts:
        layers += _layers_in(part)
    return layers


def _layers_in(module: Any) -> list[nn.Module]:
    """The last linear layer inside `module`, or of each of the two heads that it averages or
    adds."""
    if not isinstance(module, nn.Module):
        return []
    pair = _pair_in(module)
    if pair:
        return pair
    heads = [layer for layer in module.modules() if _is_head(layer)]
    return heads[-1:]


def _pair_in(module: nn.Module) -> list[nn.Module]:
    for names in (*_AVERAGED, _ADDED):
        pair = [getattr(module, name, None) for name in names]
        if all(isinstance(part, nn.Module) for part in pair):
            return _layers_in(pair[0]) + _layers_in(pair[1])
    return []
