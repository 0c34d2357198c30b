"""A detector that looks at shaped features."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.core.batch import Batch, Head
from fdbd.detectors.base import Detector, Passes
from fdbd.fitting.statistics import Mean, Transformed, check_finite
from fdbd.shaping.shapings import Shaping


class Shaped(Detector):
    """Any detector on shaped features: fitted on them, asked with them, logits recomputed from them.

    Raw features are checked before they are shaped, so a row with a NaN or an infinity scores −inf although clipping
    might have hidden it. The shaping learns first (ReAct its percentile), then the detector from shaped training data.

    Args:
        shaping: an activation shaping, such as ``ReAct(80)``.
        detector: the detector behind it, itself `Shaped` where several shapings follow each other.
        mean: which training mean fDBD measures the deviation from: that of the shaped features ("of_shaped"), or the
            shaped mean of the raw features ("shaped", as in the fDBD paper's experiments). The latter is only for
            detectors with one training mean, `FDBD`.

    >>> from fdbd import Batch, Head
    >>> from fdbd.detectors import Energy
    >>> from fdbd.shaping.shapings import ASHP
    >>> detector = Shaped(ASHP(50), Energy()).fit(Batch(torch.eye(2)), Head(torch.eye(2), torch.zeros(2)))
    >>> detector.score(Batch(torch.tensor([[3.0, 2.0]])))  # logsumexp of (3, 0)
    tensor([3.0486])
    """

    name = "shaped"

    def __init__(
        self, shaping: Shaping, detector: Detector, mean: Literal["of_shaped", "shaped"] = "of_shaped"
    ) -> None:
        super().__init__()
        if not isinstance(shaping, Shaping):
            raise TypeError(f"shaping is a {type(shaping).__name__}, expected an fdbd shaping such as ReAct()")
        if not isinstance(detector, Detector):
            raise TypeError(f"detector is a {type(detector).__name__}, expected an fdbd detector such as FDBD()")
        if mean not in ("of_shaped", "shaped"):
            raise ValueError(f"mean is {mean!r}, expected 'of_shaped' or 'shaped'")
        if mean == "shaped" and not hasattr(detector, "set_mean"):
            raise ValueError(
                f"mean='shaped' replaces the one training mean of FDBD, and {detector.label} has none: leave mean out"
            )
        if shaping.touches == "logits" and "logits" not in detector.reads:
            raise ValueError(
                f"{shaping.name} changes logits, and {detector.label} reads features alone: it would change nothing"
            )
        if shaping.touches == "logits" and detector.needs_network:
            raise ValueError(
                f"{shaping.name} changes logits, and {detector.label} takes its own from the images that it perturbs: "
                "it would change nothing"
            )
        if mean == "shaped" and shaping.needs_network:
            raise ValueError(f"mean='shaped' shapes the mean alone, and {shaping.name} needs images: leave mean out")
        if shaping.needs_network and detector.needs_network:
            raise ValueError(f"{shaping.name} and {detector.label} both perturb the images: use one of them")
        if hasattr(detector, "calibrate"):
            raise ValueError(f"shape the members instead: Ensemble([Shaped({type(shaping).__name__}(), …), …])")
        self.shaping = shaping
        self.detector = detector
        self.mean = mean

    @property
    def label(self) -> str:
        return f"{self.shaping.name or type(self.shaping).__name__}+{self.detector.label}"

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """Raw features, and raw logits where the shaping scales those."""
        return self.shaping.reads

    @property
    def fit_reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.shaping.reads

    @property
    def needs_labels(self) -> bool:  # type: ignore[override]
        return self.detector.needs_labels

    @property
    def needs_network(self) -> bool:  # type: ignore[override]
        return self.shaping.needs_network or self.detector.needs_network

    @property
    def one_pass(self) -> bool:  # type: ignore[override]
        return self.detector.one_pass and not self.shaping.learns

    @property
    def fits_on_heldout(self) -> bool:  # type: ignore[override]
        return self.detector.fits_on_heldout

    @property
    def layers(self) -> tuple[str, ...]:
        """Inner layers that the detector reads, which are not shaped."""
        return tuple(getattr(self.detector, "layers", ()))

    @property
    def needs_combination(self) -> bool:
        """Whether the detector weighs its layers."""
        return bool(getattr(self.detector, "needs_combination", False))

    def fit_combination(
        self, clean: Iterable[Batch], perturbed: Iterable[Batch], combine: Callable[[Any], Any] | None = None
    ) -> Self:
        """`MDS.fit_combination` on shaped samples."""
        shaped = (map(self._shape_for_fit, map(Batch.cpu, batches)) for batches in (clean, perturbed))
        self.detector.fit_combination(*shaped, combine)  # type: ignore[operator]
        return self

    def example(self) -> Batch:
        return self.detector.example()

    def begin(self, head: Head, dtype: torch.dtype | None = None) -> None:
        self.detector.begin(head, dtype)  # the detector keeps the head for both
        self.fit_dtype = self.shaping.fit_dtype = self.detector.fit_dtype
        self.shaping.warm_up()

    @property
    def is_fitted(self) -> bool:
        return self.detector.is_fitted

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        weight: Tensor = self.detector.head.weight
        return weight

    @property
    def head_bias(self) -> Tensor:  # type: ignore[override]
        bias: Tensor = self.detector.head.bias
        return bias

    def passes(self, head: Head) -> Passes:
        yield from self.shaping.passes(head)
        if self.mean == "shaped":
            mean = yield Mean(head.num_features)
            self.detector.set_mean(self.shaping(mean.mean().to(self.fit_dtype)[None])[0])  # type: ignore[operator]
            return
        program, statistic = self.detector.passes(head), None
        while True:
            try:
                asked = program.send(statistic)
            except StopIteration:
                return
            statistic = (yield Transformed(asked, self._shape_for_fit)).statistic

    def _shape_for_fit(self, batch: Batch) -> Batch:
        if batch.views is not None:
            check_finite(batch.views.transpose(0, 1), "its views")
        shaped = self.shape(batch._replace(features=batch.features.to(self.fit_dtype)))
        if "logits" in self.detector.learns_from and shaped.logits is None:
            shaped = shaped._replace(logits=self.head(shaped.features))
        return shaped

    def shape(self, batch: Batch) -> Batch:
        """The batch that the detector behind the shaping sees; its logits are None where it is to compute them."""
        if "logits" in self.shaping.reads and batch.logits is None:
            batch = batch._replace(logits=self.head(batch.features))
        return self.shaping.shape(batch)

    def network_batch(self, images: Any, classifier: Callable[[Any], Batch]) -> Batch:
        part = self.shaping if self.shaping.needs_network else self.detector
        return part.network_batch(images, classifier)

    def score(self, batch: Batch) -> Tensor:
        scores = self.detector.score(self.shape(batch))
        if batch.views is None:
            return scores
        return torch.where(torch.isfinite(batch.views).all(dim=2).all(dim=0), scores, -torch.inf)
