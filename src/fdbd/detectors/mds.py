"""The Mahalanobis distance: at the penultimate layer, over several layers, and of normalised
features."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from fdbd.core.linear_algebra import in_blocks, unit
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
from fdbd.fitting.sample_size import warn_of_few_for_covariance
from fdbd.fitting.statistics import Bank, ClassMoments, Moments, Together, Transformed, check_finite
from fdbd.geometry import nearest_squared_distance

ADVERSARIAL_STEP = 0.05
"""Step of the adversarial copies that weigh the layers, in [0, 1] pixel units."""


class SharedCovariance(Detector):
    """The common base of MDS, MDS++ and SSD: distances to class means under one covariance, which
    whitening makes Euclidean."""

    center: Annotated[Tensor, "P"]
    whitener: Annotated[Tensor, "P P"]
    means: Annotated[Tensor, "M P"]

    def set_shared_covariance(self, moments: ClassMoments, suffix: str = "") -> None:
        """Keep the whitening of the covariance within classes, and the whitened class means.
        `suffix` tells the buffers of several layers apart."""
        whitener, means = moments.whitened()
        width = whitener.shape[1]
        warn_of_few_for_covariance(self.label, moments.count, width, len(means))
        buffers = {"center": moments.mean(), "whitener": whitener, "means": means}
        self.set_buffers(**{name + suffix: tensor for name, tensor in buffers.items()})

    def shared_distance(self, rows: Tensor, suffix: str = "") -> Tensor:
        """(N,) squared Mahalanobis distance of rows (N, P) to the nearest class mean."""
        center = getattr(self, "center" + suffix)
        whitener = getattr(self, "whitener" + suffix)
        means = getattr(self, "means" + suffix)

        def distance(block: Tensor) -> Tensor:
            return nearest_squared_distance((block - center) @ whitener.T, means)

        return in_blocks(distance, rows, means.shape[0])


class MDS(SharedCovariance):
    """Mahalanobis distance to the nearest class mean, under one shared covariance (Lee et al.,
    2018).

        score(z) = −min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c)

    With Σ⁻¹ = WᵀW the distance is Euclidean after whitening by W, so all classes cost one matrix
    product: O(P² + CP) per sample instead of O(CP²). Σ is the covariance within classes, divided by
    the number of samples; if it is singular its pseudo-inverse is taken, as in the authors' code.
    Classes without samples leave the minimum.

    Over several layers the score is Σ_l w_l (s_l − m_l)/σ_l + w_0, where s_l is the score above of
    layer l with its own means and covariance, and m_l and σ_l are its mean and deviation over the
    training data. A Guard that is fitted on images makes an adversarially perturbed copy of each,
    and the weights are those of a logistic regression of clean against perturbed samples: the score
    is the log-odds of being clean. Fitted on features alone, all layers weigh the same. If a Guard
    adds input noise, that noise follows the combined score, so layers are weighed without it.

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
        "A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial"
        " Attacks",
        "Lee et al.",
        "NeurIPS",
        2018,
    )
    needs = Needs(labels=True, passes=1)
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
        moments = yield LayerMoments(head.num_classes, self.layers)
        for index, of_layer in enumerate(moments.parts):
            self.set_shared_covariance(of_layer, _suffix(index))
        if not self.layers:
            return
        count = len(self.layers) + 1
        summed = yield Transformed(Moments(count), self._with_scores)
        spread = summed.statistic.covariance().diagonal().clamp_min(0).sqrt()
        self.set_buffers(
            shift=summed.statistic.mean(),
            scale=torch.where(spread > 0, spread, 1),
            weights=torch.full((count,), 1 / count, dtype=torch.float64),
            intercept=torch.zeros(()),
        )
        if moments.has_adversarial:
            bank = yield Bank(value=self._clean_and_adversarial)
            self._weigh(bank.samples().double().numpy())

    def _weigh(self, scores: NDArray[np.float64]) -> None:
        """Weigh the layers by a logistic regression of clean against adversarially perturbed
        samples, with scikit-learn's default penalty. A row of `scores` (N, 2L + 2) has those of a
        clean sample, then those of its perturbed copy."""
        # Here, since it takes a second to import.
        from sklearn.linear_model import LogisticRegression

        clean, adversarial = np.split(scores, 2, axis=1)
        is_clean = np.repeat([True, False], len(scores))
        regression = LogisticRegression(solver="newton-cholesky", tol=1e-8)
        regression.fit(np.concatenate([clean, adversarial]), is_clean)
        self.set_buffers(
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
        moved = adversarial(images, labels, classifier, ADVERSARIAL_STEP, self.std)
        return batch._replace(adversarial=classifier(moved))

    def example(self) -> Batch:
        example = super().example()
        if not self.layers:
            return example
        layers = {}
        for index, name in enumerate(self.layers, start=1):
            means = getattr(self, "means" + _suffix(index))
            layers[name] = means.new_zeros(2, means.shape[1])
        return example._replace(layers=layers)

    def buffer_shape(self, name: str) -> str | None:
        kind, _, index = name.partition("_")
        if not index.isdigit():
            return super().buffer_shape(name)
        # Each layer has its own width and number of classes.
        shape = super().buffer_shape(kind)
        if shape is None:
            return None
        return " ".join(letter + index for letter in shape.split())

    def formula(self, batch: Batch) -> Tensor:
        if not self.layers:
            return -self.shared_distance(batch.features)
        scores = self.standardised(batch)
        # Not a matrix product: ONNX Runtime multiplies no empty batch.
        combined = (scores * self.weights).sum(dim=1) + self.intercept
        # A weight may be negative: −inf in one layer must not become +inf in all.
        return torch.where(torch.isfinite(scores).all(dim=1), combined, torch.nan)

    def standardised(self, batch: Batch) -> Tensor:
        """(N, L + 1) score of each layer, the penultimate first, with mean 0 and deviation 1 over
        the training data."""
        return (self._layer_scores(batch) - self.shift) / self.scale

    def _with_scores(self, batch: Batch) -> Batch:
        """The scores of the layers as features, for a statistic of them."""
        return Batch(self._layer_scores(batch._replace(features=batch.features.to(self.means))))

    def _clean_and_adversarial(self, batch: Batch) -> Tensor:
        """(N, 2L + 2) standardised scores of each sample and of its adversarial copy."""
        if batch.adversarial is None:
            raise ValueError(
                "some training batches have adversarial copies and others none: fit on images alone"
            )
        dtype = self.means.dtype
        clean = self.standardised(batch._replace(adversarial=None).to(dtype=dtype))
        check_finite(clean, "its clean samples")
        perturbed = self.standardised(batch.adversarial.to(dtype=dtype))
        check_finite(perturbed, "its perturbed samples")
        return torch.cat([clean, perturbed], dim=1)

    def _layer_scores(self, batch: Batch) -> Tensor:
        """(N, L + 1) negated distances in each layer, the penultimate first."""
        scores = []
        for index, rows in enumerate(parts_of(batch, self.layers)):
            means = getattr(self, "means" + _suffix(index))
            what = "features" if index == 0 else f"features of layer {self.layers[index - 1]!r}"
            rows = as_matrix(rows, means.shape[1], what, "those of the fit")
            scores.append(-self.shared_distance(rows.to(means), _suffix(index)))
        return torch.stack(scores, dim=1)


class MDSPlusPlus(SharedCovariance):
    """Mahalanobis distance of the normalised feature to the nearest class mean (Müller & Hein,
    2025).

        score(z) = −min_c (ẑ − μ_c)ᵀ Σ⁻¹ (ẑ − μ_c),   ẑ = z/‖z‖

    with class means and their shared covariance of the normalised training features. Norms of
    features differ more between samples than Gaussians allow; without them, the distance is among
    the strongest on modern networks. O(P² + CP) per sample, as `MDS`.

    Between this and `MDS` lies ẑ = z/‖z‖^β (radially scaled normalisation, Janiak et al., 2025).
    Their β is predicted from the geometry of the training features by a fit over many networks, so
    it has no rule that one network could follow: give it by hand.

    Args:
        beta: β from 0 (`MDS`) to 1, the published MDS++.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = MDSPlusPlus().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "mds++"
    paper = Paper(
        "Mahalanobis++: Improving OOD Detection via Feature Normalization",
        "Müller and Hein",
        "ICML",
        2025,
    )
    needs = Needs(labels=True, passes=1)

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = float(expect("beta", beta, 0 <= beta <= 1, "a number from 0 to 1"))

    def passes(self, head: Head) -> Passes:
        moments = ClassMoments(head.num_classes, head.num_features)
        summed = yield Transformed(moments, self._scaled_batch)
        self.set_shared_covariance(summed.statistic)

    def _scaled_batch(self, batch: Batch) -> Batch:
        return batch._replace(features=self._scaled(batch.features))

    def _scaled(self, features: Tensor) -> Tensor:
        """(N, P) z/‖z‖^β."""
        directions = unit(features)
        if self.beta == 1:
            return directions
        norms: Tensor = torch.linalg.vector_norm(features, dim=1, keepdim=True)
        return directions * norms ** (1 - self.beta)

    def formula(self, batch: Batch) -> Tensor:
        return -self.shared_distance(self._scaled(batch.features))


def with_unit_features(batch: Batch) -> Batch:
    """The batch with features divided by their norms."""
    return batch._replace(features=unit(batch.features))


def _suffix(index: int) -> str:
    """The end of the names of a layer's buffers; those of the penultimate features, 0, have plain
    names."""
    return f"_{index}" if index else ""


def parts_of(batch: Batch, layers: Sequence[str]) -> list[Tensor]:
    """The penultimate features, then each named layer, (N, P_l)."""
    given: Any = batch.layers or {}
    missing = [name for name in layers if name not in given]
    if missing:
        raise ValueError(
            f"the batch lacks the layers {missing}: give Batch(features, layers={{name: (N, P) "
            "tensor}), or use fdbd.Guard(model, detector), which takes them from the network"
        )
    # `len` would fix the batch size of a graph.
    rows = batch.features.shape[0]
    parts = [batch.features]
    for name in layers:
        part = given[name]
        if part.ndim != 2 or part.shape[0] != rows:
            expected = f"({rows}, P): one row per sample"
            raise ValueError(f"layer {name!r} has shape {tuple(part.shape)}, expected {expected}")
        parts.append(part)
    return parts


class LayerMoments(Together):
    """ClassMoments of the penultimate features and of each named layer, whose width is known from
    the first batch; and whether batches came with adversarial copies."""

    def __init__(self, num_classes: int, layers: Sequence[str]) -> None:
        super().__init__(())
        self.num_classes = num_classes
        self.layers = layers
        self.has_adversarial = False

    def update(self, batch: Batch) -> None:
        parts = parts_of(batch, self.layers)
        self.has_adversarial |= batch.adversarial is not None
        if not self.parts:
            self.parts = [ClassMoments(self.num_classes, part.shape[1]) for part in parts]
        for name, part in zip(self.layers, parts[1:]):
            check_finite(part, f"its layer {name!r}")
        for moments, part in zip(self.parts, parts):
            moments.update(batch._replace(features=part))

    def merge(self, other: Self) -> None:
        super().merge(other)
        self.has_adversarial |= other.has_adversarial
        if not self.parts:
            # No batch was counted here yet.
            self.parts = other.parts
