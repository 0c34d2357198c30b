"""The Mahalanobis distance, at the penultimate layer or over several."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from fdbd.core.linear_algebra import in_blocks
from fdbd.core.perturbation import adversarial, checked_std
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Inputs,
    Needs,
    Paper,
    Passes,
    as_matrix,
    expect,
)
from fdbd.fitting.statistics import Bank, ClassMoments, Moments, Together, Transformed, check_finite
from fdbd.geometry import nearest_squared_distance

ADVERSARIAL_STEP = 0.05  # of the samples that weigh the layers, in [0, 1] pixel units
_ADVERSARIAL = "adversarial:"  # before the names of adversarial copies' layers in Batch.layers; features are a view


class MDS(Detector):
    """Mahalanobis distance to the nearest class mean, under one shared covariance (Lee et al.,
    2018).

        score(z) = −min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c)

    With Σ⁻¹ = WᵀW the distance is Euclidean after whitening by W, so all classes cost one matrix
    product: O(P² + CP) per sample instead of O(CP²). Σ is the covariance within classes, divided by
    the number of samples; where it is singular its pseudo-inverse is taken, as in the authors'
    code. Classes without samples leave the minimum.

    Over several layers the score is Σ_l w_l (s_l − m_l)/σ_l + w_0, where s_l is the score above of
    layer l with its own means and covariance, and m_l and σ_l are its mean and deviation over the
    training data. A Guard that is fitted on images makes an adversarially perturbed copy of each,
    and the weights are those of a logistic regression of clean against perturbed samples: the score
    is the log-odds of being clean. Fitted on features alone, all layers weigh the same. Where a
    Guard adds input noise, that noise follows the combined score, so layers are weighed without it.

    Args:
        layers: names in ``Batch.layers`` that are used in addition to the penultimate features.
        std: the per-channel std by which images were normalised, or one number: the adversarial
            step, which is in [0, 1] pixel units, is divided by it. None: images are in pixel units.

    >>> features, labels = torch.randn(100, 4), torch.arange(100) % 2
    >>> detector = MDS().fit(Batch(features, None, labels), Head(torch.randn(2, 4)))
    >>> bool(detector.score(Batch(features)).mean() > detector.score(Batch(10 * features)).mean())
    True
    """

    name = "mds"
    paper = Paper(
        "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks",
        "Lee et al.",
        "NeurIPS",
        2018,
    )
    needs = Needs(labels=True, passes=1)
    center: Annotated[Tensor, "P"]
    whitener: Annotated[Tensor, "P P"]
    means: Annotated[Tensor, "M P"]
    shift: Annotated[Tensor, "L"]
    scale: Annotated[Tensor, "L"]
    weights: Annotated[Tensor, "L"]
    intercept: Annotated[Tensor, ""]

    def __init__(
        self, layers: Sequence[str] = (), std: float | Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.std = checked_std(std)
        names = (layers,) if isinstance(layers, str) else tuple(layers)
        self.layers = expect("layers", names, len(set(names)) == len(names), "each name once")
        if self.layers:
            self.needs = Needs(labels=True, layers=self.layers)

    def passes(self, head: Head) -> Passes:
        moments = yield PartMoments(head.num_classes, self.layers)
        for part, of_part in enumerate(moments.parts):
            whitening, means = of_part.whitened()
            fitted = {"center": of_part.mean(), "whitener": whitening, "means": means}
            self.set(**{buffer_name(name, part): tensor for name, tensor in fitted.items()})
        if self.layers:
            count = len(self.layers) + 1
            summed = yield Transformed(Moments(count), self._with_scores)
            spread = summed.statistic.covariance().diagonal().clamp_min(0).sqrt()
            self.set(shift=summed.statistic.mean(), scale=torch.where(spread > 0, spread, 1))
            self.set(
                weights=torch.full((count,), 1 / count, dtype=torch.float64),
                intercept=torch.zeros(()),
            )
            if moments.has_adversarial:
                bank = yield Bank(value=self._clean_and_adversarial)
                self._weigh(bank.samples().double().numpy())

    def _weigh(self, scores: NDArray[np.float64]) -> None:
        """Weigh the layers by a logistic regression of clean against adversarially perturbed
        samples, (N, 2L + 2) of both side by side, with scikit-learn's default penalty."""
        from sklearn.linear_model import LogisticRegression  # takes a second to import

        is_clean = np.arange(2 * len(scores)) < len(scores)
        regression = LogisticRegression(solver="newton-cholesky", tol=1e-8)
        regression.fit(np.concatenate(np.split(scores, 2, axis=1)), is_clean)
        self.set(
            weights=torch.as_tensor(regression.coef_[0]),
            intercept=torch.as_tensor(regression.intercept_[0]),
        )

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """The model's batch; while fitting over several layers, with features and layers of
        adversarial copies."""
        batch = classifier(images)
        if not self.layers or labels is None:
            return batch
        moved = classifier(adversarial(images, labels, classifier, ADVERSARIAL_STEP, self.std))
        copies = {_ADVERSARIAL + name: part for name, part in (moved.layers or {}).items()}
        return batch._replace(layers={**(batch.layers or {}), **copies}, views=moved.features[None])

    def example(self) -> Batch:
        means = [
            getattr(self, buffer_name("means", part)) for part in range(1, len(self.layers) + 1)
        ]
        layers = {name: part.new_zeros(2, part.shape[1]) for name, part in zip(self.layers, means)}
        return super().example()._replace(layers=layers or None)

    def buffer_shape(self, name: str) -> str | None:
        of_part, _, part = name.partition("_")
        if not part.isdigit():
            return super().buffer_shape(name)
        shape = super().buffer_shape(of_part)  # each layer has its own width and number of classes
        return shape and " ".join(letter + part for letter in shape.split())

    def score(self, batch: Batch) -> Tensor:
        if not self.layers:
            return in_blocks(partial(self._part_score, 0), batch.features, self.means.shape[0])
        scores = self.standardised(batch)
        combined = (scores * self.weights).sum(
            dim=1
        ) + self.intercept  # ONNX Runtime multiplies no empty batch
        # A weight may be negative: −inf in one layer must not become +inf in all.
        return torch.where(torch.isfinite(scores).all(dim=1), combined, torch.nan)

    def standardised(self, batch: Batch) -> Tensor:
        """(N, L + 1) score of each layer, the penultimate first, with mean 0 and deviation 1 over
        the training data."""
        return (self._part_scores(batch) - self.shift) / self.scale

    def _with_scores(self, batch: Batch) -> Batch:
        return Batch(self._part_scores(batch._replace(features=batch.features.to(self.means))))

    def _clean_and_adversarial(self, batch: Batch) -> Tensor:
        """(N, 2L + 2) standardised scores of each sample and of its adversarial copy."""
        assert batch.layers is not None and batch.views is not None  # noqa: PT018
        perturbed = Batch(
            batch.views[0], layers={name: batch.layers[_ADVERSARIAL + name] for name in self.layers}
        )
        pair = [self.standardised(part.to(dtype=self.means.dtype)) for part in (batch, perturbed)]
        for what, scores in zip(("clean", "perturbed"), pair):
            check_finite(scores, f"its {what} samples")
        return torch.cat(pair, dim=1)

    def _part_scores(self, batch: Batch) -> Tensor:
        scores = []
        for part, rows in enumerate(parts_of(batch, self.layers)):
            means = getattr(self, buffer_name("means", part))
            rows = as_matrix(
                rows,
                means.shape[1],
                f"features of layer {self.layers[part - 1]!r}",
                "those of the fit",
            )
            scores.append(
                in_blocks(partial(self._part_score, part), rows.to(means), means.shape[0])
            )
        return torch.stack(scores, dim=1)

    def _part_score(self, part: int, rows: Tensor) -> Tensor:
        center, whitening, means = (
            getattr(self, buffer_name(name, part)) for name in ("center", "whitener", "means")
        )
        return -nearest_squared_distance((rows - center) @ whitening.T, means)


def buffer_name(name: str, part: int) -> str:
    """Buffers of the penultimate features, part 0, have plain names."""
    return f"{name}_{part}" if part else name


def parts_of(batch: Batch, layers: Sequence[str]) -> list[Tensor]:
    """The penultimate features, then each named layer, (N, P_l)."""
    missing = [name for name in layers if name not in (batch.layers or {})]
    if missing:
        raise ValueError(
            f"the batch lacks the layers {missing}: give Batch(features, layers={{name: (N, P) tensor}}), or use "
            "fdbd.Guard(model, detector), which takes them from the network"
        )
    parts = [batch.features, *((batch.layers or {})[name] for name in layers)]
    for name, part in zip(layers, parts[1:]):
        if (
            part.ndim != 2 or part.shape[0] != batch.features.shape[0]
        ):  # `len` would fix the batch size of a graph
            expected = f"({batch.features.shape[0]}, P): one row per sample"
            raise ValueError(f"layer {name!r} has shape {tuple(part.shape)}, expected {expected}")
    return parts


class PartMoments(Together):
    """ClassMoments of the penultimate features and of each named layer, whose width is known from
    the first batch; and whether batches came with adversarial copies."""

    def __init__(self, num_classes: int, layers: Sequence[str]) -> None:
        super().__init__(())
        self.num_classes, self.layers, self.has_adversarial = num_classes, layers, False

    def update(self, batch: Batch) -> None:
        rows = parts_of(batch, self.layers)
        self.has_adversarial |= any(
            _ADVERSARIAL + name in (batch.layers or {}) for name in self.layers
        )
        if not self.parts:
            self.parts = [ClassMoments(self.num_classes, part.shape[1]) for part in rows]
        for name, part in zip(self.layers, rows[1:]):
            check_finite(part, f"its layer {name!r}")
        for moments, part in zip(self.parts, rows):
            moments.update(batch._replace(features=part))

    def merge(self, other: Self) -> None:
        super().merge(other)
        self.has_adversarial |= other.has_adversarial
        self.parts = self.parts or other.parts
