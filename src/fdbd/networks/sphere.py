"""Heads that look at the direction of features alone: cosine classifiers (ArcFace, CLIP's prompts),
found by what they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.core.batch import ArrayLike, as_floats

_PROBES = 8
_TOLERANCE = 1e-3


class CosineHead(nn.Module):
    """Logits are scaled cosines: ``scale · cos(features, weight_c) + bias``.

    With embeddings of class prompts as `weight` (C, P), a sequence of an image encoder and this
    head is the zero-shot classifier of CLIP (bias 0) or SigLIP.

    >>> head = CosineHead(torch.eye(2), scale=10)
    >>> head(torch.tensor([[3.0, 0.0]]))
    tensor([[10.,  0.]])
    """

    def __init__(self, weight: ArrayLike, scale: float = 1.0, bias: float = 0.0) -> None:
        super().__init__()
        matrix = as_floats(weight, "the head's weights").detach()
        if matrix.ndim != 2:
            raise ValueError(
                f"the head's weights have shape {tuple(matrix.shape)}, expected (classes, features)"
            )
        if not torch.isfinite(matrix).all() or not matrix.any(dim=1).all():
            raise ValueError("the head's weights hold NaN, infinity or a row of zeros")
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale}, expected a positive number")
        self.weight = nn.Parameter(matrix.clone(), requires_grad=False)
        self.scale = float(scale)
        self.bias = float(bias)

    def forward(self, features: Tensor) -> Tensor:
        """(N, P) features of any length to (N, C) logits."""
        directions = F.normalize(self.weight, dim=1)
        return F.linear(F.normalize(features, dim=-1), self.scale * directions) + self.bias

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        return f"classes={classes}, features={features}, scale={self.scale}, bias={self.bias}"


class ZeroShotClassifier(nn.Module):
    """An encoder of images or texts, and a head of scaled cosines with one embedding per class.

    Args:
        encoder: gives embeddings (N, P) for whatever it takes.
        embeddings: (C, P), one per class: those of its prompt or name, by the text encoder that
            belongs to `encoder`.
        scale: of the cosines.
    """

    def __init__(self, encoder: nn.Module, embeddings: ArrayLike, scale: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = CosineHead(embeddings, scale)
        # Its parts are in the mode that they are in.
        self.training = encoder.training

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """(N, C) logits."""
        embeddings = self.encoder(*inputs, **named)
        width = self.head.weight.shape[1]
        has_shape = isinstance(embeddings, Tensor) and embeddings.ndim == 2
        if not has_shape or embeddings.shape[1] != width:
            kind = type(embeddings).__name__
            if isinstance(embeddings, Tensor):
                kind = f"tensor of shape {tuple(embeddings.shape)}"
            raise TypeError(
                f"the encoder gives a {kind}, expected embeddings (N, {width}), as wide as those "
                "of the classes: wrap it in a module that returns these alone"
            )
        logits: Tensor = self.head(embeddings)
        return logits


class LinearOnSphere(NamedTuple):
    """A layer that is ``weight · x/‖x‖ + bias``."""

    #: (C, P)
    weight: Tensor
    #: (C,)
    bias: Tensor


@torch.no_grad()
def linear_on_sphere(module: nn.Module) -> LinearOnSphere | None:
    """The linear map that a layer applies to normalised features; None if it computes something
    else.

    The layer is asked, not its attributes: implementations differ in names, in the order of axes
    and in how they keep their scale, but each gives the same for x and 3·x, and is linear on the
    sphere."""
    if not _may_be_on_sphere(module):
        return None
    was_training = module.training
    if was_training:
        # Margins are added in training alone.
        module.eval()
    try:
        for num_features in _widths(module):
            found = _probe(module, num_features)
            if found is not None:
                return found
        return None
    finally:
        if was_training:
            module.train()


def _may_be_on_sphere(module: nn.Module) -> bool:
    """Whether a module is worth a probe: a layer of the user's own, with a matrix and no parts."""
    if next(module.children(), None) is not None:
        return False
    if type(module).forward is nn.Linear.forward:
        return False
    is_torch = type(module).__module__.startswith("torch.")
    return not is_torch and next(_widths(module), None) is not None


def _widths(module: nn.Module) -> Iterator[int]:
    """Numbers of features that the layer may take: either axis of its matrices."""
    for parameter in module.parameters(recurse=False):
        is_initialised = not isinstance(parameter, nn.UninitializedParameter)
        if is_initialised and parameter.ndim == 2 and not parameter.is_meta:
            yield parameter.shape[1]
            yield parameter.shape[0]


def _probe(module: nn.Module, num_features: int) -> LinearOnSphere | None:
    parameter = next(module.parameters(recurse=False))
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(_PROBES, num_features, generator=generator).to(parameter)
    axes = torch.eye(num_features).to(parameter)
    try:
        given = module(features)
        if not isinstance(given, Tensor) or given.ndim != 2 or len(given) != _PROBES:
            return None
        is_on_sphere = _is_close(module(3 * features), given)
        if not is_on_sphere:
            return None
        forth = module(axes)
        back = module(-axes)
    except Exception:
        # A layer that takes other inputs, an embedding for instance, is not a head of this kind.
        return None
    bias = (forth + back).mean(dim=0) / 2
    weight = ((forth - back) / 2).T
    if not _is_close(F.linear(F.normalize(features, dim=1), weight, bias), given):
        return None
    return LinearOnSphere(weight.contiguous(), bias)


def _is_close(a: Tensor, b: Tensor) -> bool:
    difference = (a.cpu().double() - b.cpu().double()).abs().max()
    return bool(difference <= _TOLERANCE * b.cpu().double().abs().max())
