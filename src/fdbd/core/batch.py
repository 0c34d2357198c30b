"""Batch and Head, the two values that the library passes around. Neither knows a model or a
loader."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.core.grid import Grid

Array: TypeAlias = Tensor | NDArray[np.generic]
ArrayLike: TypeAlias = Array | Sequence[object]
"""Numbers: a tensor, an array, or a (nested) list."""
Inputs: TypeAlias = Array | Mapping[str, object] | Sequence[object]
"""What a model takes, a tensor or array (N, …) or a dict of keyword arguments; or a pair of that
and labels."""


class Batch(NamedTuple):
    """A classifier's features and logits of N samples.

    Attributes:
        features: (N, P) input of the linear head.
        logits: (N, C) output of the head. None: computed from the head when a detector reads them.
        labels: (N,) class indices, or (N, C) zeros and ones for a head of many labels; only for
            fitting.
        layers: pooled earlier layers, name to (N, P_layer), for multi-layer MDS.
        views: (V, N, P) features of V transformed copies of each sample, for CSI. None: the sample
            itself is its only view.
        perturbed: (N, P) features of the same samples after a small step of the input, for ODIN and
            AdaSCALE.
        adversarial: features and layers of adversarial copies of the samples, which multi-layer MDS
            learns its weights from; only for fitting.
        grid: how the rows lie in maps, if each is a position. None: one row per sample.

    >>> Batch(torch.eye(3), labels=torch.arange(3)).rows(slice(1, 3)).labels
    tensor([1, 2])
    """

    features: Tensor
    logits: Tensor | None = None
    labels: Tensor | None = None
    layers: Mapping[str, Tensor] | None = None
    views: Tensor | None = None
    perturbed: Tensor | None = None
    adversarial: Batch | None = None
    grid: Grid | None = None

    def rows(self, which: slice | Tensor) -> Batch:
        """Some rows of every part: a slice, without a copy, or an index (M,) or mask (N,)."""
        some = self._map(lambda part: part[which], lambda views: views[:, which])
        # A selection of a map's positions is no longer a map.
        return some._replace(grid=None)

    def without(self, rows: Collection[int]) -> Batch:
        """All rows but these."""
        if not rows:
            return self
        left = [row for row in range(len(self.features)) if row not in rows]
        return self.rows(torch.tensor(left, dtype=torch.int64))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Batch:
        """The same batch as tensors, on this device and (except for the labels) in this floating
        dtype. None leaves either as it is; arrays go to the CPU's memory."""

        def move(part: Tensor) -> Tensor:
            return part.to(device) if dtype is None else part.to(device, dtype)

        moved = self._map(move)
        if self.labels is None:
            return moved
        return moved._replace(labels=as_tensor(self.labels).to(device))

    def cpu(self) -> Batch:
        """The same batch in the CPU's memory."""
        return self.to("cpu")

    def detach(self) -> Batch:
        """The same batch without gradients."""
        return self._map(Tensor.detach)

    def _map(
        self,
        change: Callable[[Tensor], Tensor],
        change_views: Callable[[Tensor], Tensor] | None = None,
    ) -> Batch:
        """The batch with `change` applied to every tensor, and `change_views`, if given, to the
        views, whose rows are on the second axis."""
        changed: dict[str, Any] = {}
        for name in ("features", "logits", "labels", "perturbed"):
            part = getattr(self, name)
            if part is not None:
                changed[name] = change(as_tensor(part))
        if self.layers is not None:
            changed["layers"] = {
                name: change(as_tensor(part)) for name, part in self.layers.items()
            }
        if self.views is not None:
            changed["views"] = (change_views or change)(as_tensor(self.views))
        if self.adversarial is not None:
            changed["adversarial"] = self.adversarial._map(change, change_views)
        return self._replace(**changed)


class Head:
    """The linear head of a classifier: ``logits = features @ weight.T + bias``.

    A cosine head (`Head.cosine`) divides each feature vector by its norm first. Detectors then see
    these unit vectors as the features: the geometry of the head is that of hyperplanes through the
    unit sphere.

    Args:
        weight: (C, P) array or tensor. One row (a binary head with logit d) becomes two, with
            logits −d/2 and d/2, so that softmax gives the sigmoid of d and both classes are treated
            alike.
        bias: (C,) array or tensor; None is zero.

    >>> Head(torch.eye(3), torch.zeros(3))(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 2., 3.]])
    >>> Head(torch.ones(1, 2), torch.zeros(1)).num_classes
    2
    """

    is_cosine: bool = False
    """Whether features are divided by their norms before the linear map."""

    def __init__(self, weight: ArrayLike, bias: ArrayLike | None = None) -> None:
        weight = as_floats(weight, "head weights").detach()
        if weight.ndim != 2:
            raise ValueError(
                f"head weight has shape {tuple(weight.shape)}, expected (classes, features)"
            )
        if bias is None:
            bias = weight.new_zeros(len(weight))
        bias = as_floats(bias, "head biases").detach().to(weight.device, weight.dtype).reshape(-1)
        if len(bias) != len(weight):
            raise ValueError(
                f"head bias has {len(bias)} entries, expected one for each of the "
                f"{len(weight)} weight rows"
            )
        if not (torch.isfinite(weight).all() and torch.isfinite(bias).all()):
            raise ValueError(
                "head holds NaN or infinite values; check the checkpoint that it came from"
            )
        self.is_binary = len(weight) == 1
        if self.is_binary:
            weight = two_rows(weight.T).T
            bias = two_rows(bias[None])[0]
        self.weight = weight
        self.bias = bias

    @classmethod
    def cosine(cls, weight: ArrayLike, scale: float = 1.0) -> Head:
        """A head whose logits are scaled cosines, as in CLIP, SigLIP, ArcFace and weight-normalised
        layers: ``logits = scale · cos(features, weight_c)``.

        Args:
            weight: (C, P), one row per class; rows are divided by their norms.
            scale: of the cosines; CLIP's is 100.

        >>> Head.cosine([[2.0, 0.0], [0.0, 1.0]], scale=10)(torch.tensor([[3.0, 4.0]]))
        tensor([[6., 8.]])
        """
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale!r}, expected a positive number")
        rows = as_floats(weight, "head weights").detach()
        if rows.ndim != 2 or len(rows) < 2:
            raise ValueError(
                f"weight of a cosine head has shape {tuple(rows.shape)}, expected (classes, "
                "features) with at least two classes"
            )
        if not (rows != 0).any(dim=1).all():
            raise ValueError("a class of a cosine head has the weight 0, which has no direction")
        head = cls(scale * unit_rows(rows))
        head.is_cosine = True
        return head

    @classmethod
    def from_linear(cls, source: object) -> Head:
        """The head in an ``nn.Linear``, a 1×1 ``nn.Conv2d``, a pair of arrays or a fitted linear
        classifier of scikit-learn (``coef_``, ``intercept_``); a Head unchanged."""
        if isinstance(source, Head):
            return source
        if isinstance(source, nn.Conv2d) and (source.kernel_size != (1, 1) or source.groups != 1):
            raise ValueError(f"a convolution head must be 1×1 and ungrouped, got {source}")
        if isinstance(source, (nn.Linear, nn.Conv2d)):
            return cls(source.weight.flatten(1), source.bias)
        if hasattr(source, "coef_") and hasattr(source, "intercept_"):
            return cls(np.atleast_2d(source.coef_), np.atleast_1d(source.intercept_))
        if isinstance(source, (tuple, list)) and len(source) == 2:
            return cls(*source)
        raise TypeError(
            f"no linear head in a {type(source).__name__}; expected nn.Linear, a 1×1 nn.Conv2d, "
            "(weight, bias) or a fitted linear classifier with coef_ and intercept_"
        )

    @classmethod
    def of(cls, source: object) -> Head:
        """Deprecated: use `Head.from_linear`."""
        warnings.warn(
            "Head.of is now Head.from_linear; the old name will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        return cls.from_linear(source)

    @classmethod
    def _unchecked(cls, weight: Tensor, bias: Tensor, is_cosine: bool) -> Head:
        """A head from tensors that were checked when they were kept: takes a microsecond."""
        head = cls.__new__(cls)
        head.weight = weight
        head.bias = bias
        head.is_binary = False
        head.is_cosine = is_cosine
        return head

    @property
    def num_classes(self) -> int:
        """C."""
        return int(self.weight.shape[0])

    @property
    def num_features(self) -> int:
        """P."""
        return int(self.weight.shape[1])

    def cpu(self) -> Head:
        """The same head in the CPU's memory."""
        head = copy.copy(self)
        head.weight = self.weight.cpu()
        head.bias = self.bias.cpu()
        return head

    def __call__(self, features: Tensor) -> Tensor:
        """(N, P) features to (N, C) logits, on the features' device and in their dtype; for
        integers, in the head's."""
        if not features.is_floating_point():
            features = features.to(self.weight.dtype)
        if self.is_cosine:
            features = unit_rows(features)
        return nn.functional.linear(features, self.weight.to(features), self.bias.to(features))

    def fingerprint(self) -> str:
        """SHA-256 of shape and float32 values, the same on every device."""
        kind = "cosine " if self.is_cosine else ""
        digest = hashlib.sha256(f"{kind}{self.num_classes}x{self.num_features}".encode())
        for tensor in (self.weight, self.bias):
            digest.update(tensor.to("cpu", torch.float32).contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        kind = "cosine, " if self.is_cosine else ""
        return f"Head({kind}{self.num_classes} classes, {self.num_features} features)"


def unit_rows(rows: Tensor) -> Tensor:
    """Rows (N, P) divided by their norms, whatever their size: the largest entry is divided out
    first, so that no square overflows or underflows. A row of zeros stays zero."""
    largest = rows.abs().amax(dim=1, keepdim=True)
    is_zero = largest == 0
    scaled = rows / largest.masked_fill(is_zero, 1)
    norms: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return scaled / norms.masked_fill(is_zero, 1)


def as_tensor(value: Any) -> Tensor:
    """A tensor unchanged, an array or a list in the CPU's memory (``torch.as_tensor`` uses the
    default device)."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def as_batch(value: object) -> Batch:
    """A Batch unchanged; TypeError for anything else."""
    if not isinstance(value, Batch):
        raise TypeError(
            f"expected fdbd.Batch(features, logits, labels), got {type(value).__name__}"
        )
    return value


def required_logits(batch: Batch) -> Tensor:
    """(N, C) logits; ValueError if there are none."""
    if batch.logits is None:
        raise ValueError(
            "the batch has no logits; give Batch(features, logits), as a Classifier does"
        )
    return batch.logits


def required_perturbed(batch: Batch) -> Tensor:
    """(N, P) features of the perturbed samples; ValueError if there are none."""
    if batch.perturbed is None:
        raise ValueError("the batch has no features of perturbed images, which only a Guard takes")
    return batch.perturbed


def required_labels(batch: Batch) -> Tensor:
    """(N,) int64 labels on the CPU; ValueError if there are none."""
    if batch.labels is None:
        raise ValueError(
            "this detector learns by class: give labels in Batch(features, logits, labels)"
        )
    return batch.labels.detach().to("cpu", torch.int64)


def as_matrix(
    values: Any, width: int, what: str, expected: str, dtype: torch.dtype | None = None
) -> Tensor:
    """`as_floats` of (N, width) values."""
    matrix = as_tensor(values)
    if matrix.ndim != 2 or matrix.shape[1] != width:
        raise ValueError(
            f"{what} have shape {tuple(matrix.shape)}, expected (N, {width}): {expected}"
        )
    return matrix if matrix.dtype is dtype else as_floats(matrix, what, dtype)


def as_floats(values: Any, what: str, dtype: torch.dtype | None = None) -> Tensor:
    """Real numbers as a tensor of this dtype, by default float64 or else float32."""
    tensor = as_tensor(values)
    if tensor.is_complex():
        raise TypeError(f"{what} are complex, expected real numbers")
    if dtype is None:
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.to(dtype)


def two_rows(logit: Tensor) -> Tensor:
    """The two logits (N, 2) that a binary head's single one (N, 1) stands for: −d/2 and d/2."""
    return torch.cat([-logit / 2, logit / 2], dim=1)
