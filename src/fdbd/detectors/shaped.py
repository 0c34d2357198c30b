"""A detector that looks at shaped features."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Head, Inputs, Needs, Passes, one_of, unit_rows
from fdbd.detectors.fdbd import FDBD
from fdbd.detectors.shaping.base import Shaping
from fdbd.fitting.driver import next_request
from fdbd.fitting.statistics import Mean, Transformed, check_finite


class Shaped(Detector):
    """Any detector on shaped features: fitted on them, asked with them, logits recomputed from
    them.

    Raw features are checked before they are shaped, so a row with a NaN or an infinity scores −inf
    although clipping might have hidden it. The shaping learns first (ReAct its percentile), then
    the detector from shaped training data.

    Args:
        shaping: an activation shaping, such as ``ReAct(80)``.
        detector: the detector behind it, itself `Shaped` if several shapings follow each other.
        mean: which training mean fDBD measures the deviation from: "shaped", the mean of the raw
            features, shaped (the paper's), or "of_shaped", the mean of the shaped features. None:
            "shaped" directly before `FDBD`, "of_shaped" elsewhere. Which is better depends on the
            network (docs/migrating.md has numbers): compare both.

    >>> import fdbd, torch
    >>> detector = Shaped(fdbd.ASHP(50), fdbd.Energy()).fit(Batch(torch.eye(2)), Head(torch.eye(2)))
    >>> detector.score(Batch(torch.tensor([[3.0, 2.0]])))  # logsumexp of (3, 0)
    tensor([3.0486])
    """

    name = "shaped"

    def __init__(
        self,
        shaping: Shaping,
        detector: Detector,
        mean: Literal["of_shaped", "shaped"] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(shaping, Shaping):
            raise TypeError(
                f"shaping is a {type(shaping).__name__}, expected an fdbd shaping such as ReAct()"
            )
        if not isinstance(detector, Detector):
            raise TypeError(
                f"detector is a {type(detector).__name__}, expected an fdbd detector such as FDBD()"
            )
        if one_of("mean", mean, "of_shaped", "shaped", None) is None:
            is_form_of_paper = isinstance(detector, FDBD) and not shaping.needs.network
            mean = "shaped" if is_form_of_paper else "of_shaped"
        if mean == "shaped":
            _require_one_mean(shaping, detector)
        _require_effect(shaping, detector)
        self.shaping = shaping
        self.detector = detector
        self.mean = mean
        self.needs = self._needs_of_both()

    def _needs_of_both(self) -> Needs:
        """The needs of the shaping and the detector together."""
        shaping = self.shaping.needs
        detector = self.detector.needs
        # The shaped mean takes one pass, whatever the detector would take by itself.
        behind = 1 if self.mean == "shaped" else detector.passes
        passes = None
        if shaping.passes is not None and behind is not None:
            passes = shaping.passes + behind
        return replace(
            detector,
            features=True,
            logits=shaping.logits,
            # Views and perturbed features are shaped like the features.
            views=True,
            perturbed=shaping.perturbed or detector.perturbed,
            network=shaping.network or detector.network,
            passes=passes,
        )

    @property
    def label(self) -> str:
        return f"{self.shaping.name or type(self.shaping).__name__}+{self.detector.label}"

    def passes(self, head: Head) -> Passes:
        yield from self.shaping.passes(head)
        if self.mean == "shaped":
            assert isinstance(self.detector, FDBD)
            raw = yield Mean(head.num_features)
            self.detector.set_mean(self._shaped_mean(raw.mean()))
            return
        # The detector's own passes, each over shaped training data.
        program = self.detector.passes(head)
        asked = next_request(program, None)
        while asked is not None:
            transformed = yield Transformed(asked, self._shape_for_fit)
            asked = next_request(program, transformed.statistic)

    def _shaped_mean(self, mean: Tensor) -> Tensor:
        """(P,) a mean as the shaping makes it."""
        shaped: Tensor = self.shaping(mean.to(self.fit_dtype)[None])
        return shaped[0]

    def _shape_for_fit(self, batch: Batch) -> Batch:
        if batch.views is not None:
            check_finite(batch.views.transpose(0, 1), "its views")
        if batch.perturbed is not None:
            check_finite(batch.perturbed, "its perturbed features")
        return self.shape(batch._replace(features=batch.features.to(self.fit_dtype)))

    def shape(self, batch: Batch) -> Batch:
        """The batch that the detector behind the shaping sees; its logits are None if it is to
        compute them."""
        head = self.head
        if self.shaping.needs.logits and batch.logits is None:
            batch = batch._replace(logits=head(batch.features))
        shaped = self.shaping.shape(batch)
        if head.is_cosine:
            shaped = shaped._replace(features=unit_rows(shaped.features))
        return shaped

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        behind = partial(self.detector.observe, classifier=classifier, labels=labels)
        return self.shaping.observe(images, behind)

    def example(self) -> Batch:
        return self.detector.example()

    def formula(self, batch: Batch) -> Tensor:
        return self.detector.score(self.shape(batch))


def _require_one_mean(shaping: Shaping, detector: Detector) -> None:
    """An error unless there is a training mean that can be shaped by itself."""
    if not isinstance(detector, FDBD):
        raise ValueError(
            f"mean='shaped' replaces the one training mean of FDBD, and {detector.label} has none: "
            "leave mean out"
        )
    if shaping.needs.network:
        raise ValueError(
            f"mean='shaped' shapes the mean alone, and {shaping.name} needs images: leave mean out"
        )


def _require_effect(shaping: Shaping, detector: Detector) -> None:
    """An error if the detector would not see what the shaping does, or cannot stand behind it."""
    if shaping.touches == "logits":
        changes = f"{shaping.name} changes logits, and {detector.label}"
        if not detector.needs.logits:
            raise ValueError(f"{changes} reads features alone: it would change nothing")
        if detector.needs.network:
            raise ValueError(f"{changes} takes its own from the images: it would change nothing")
    if shaping.needs.network and detector.needs.network:
        raise ValueError(f"{shaping.name} and {detector.label} both perturb the images: use one")
    if detector.needs.calibration:
        kind = type(shaping).__name__
        raise ValueError(
            f"{detector.label} is calibrated after its fit and cannot stand behind a shaping: "
            f"shape the members instead, Ensemble([Shaped({kind}(), …), …])"
        )
