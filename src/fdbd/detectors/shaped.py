"""A detector that looks at shaped features."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Head, Inputs, Passes, one_of
from fdbd.detectors.fdbd import FDBD
from fdbd.detectors.shaping.base import Shaping
from fdbd.fitting.statistics import Mean, Transformed, check_finite


class Shaped(Detector):
    """Any detector on shaped features: fitted on them, asked with them, logits recomputed from
    them.

    Raw features are checked before they are shaped, so a row with a NaN or an infinity scores −inf
    although clipping might have hidden it. The shaping learns first (ReAct its percentile), then
    the detector from shaped training data.

    Args:
        shaping: an activation shaping, such as ``ReAct(80)``.
        detector: the detector behind it, itself `Shaped` where several shapings follow each other.
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
            mean = (
                "shaped"
                if isinstance(detector, FDBD) and not shaping.needs.network
                else "of_shaped"
            )
        first, second, on_logits, on_mean = (
            shaping.needs,
            detector.needs,
            shaping.touches == "logits",
            mean == "shaped",
        )
        of_mean, of_logits = "mean='shaped'", f"{shaping.name} changes logits, and {detector.label}"
        no_mean = f"{of_mean} replaces the one training mean of FDBD, and {detector.label} has none: leave mean out"
        no_images = (
            f"{of_mean} shapes the mean alone, and {shaping.name} needs images: leave mean out"
        )
        for is_wrong, why in (
            (on_mean and not isinstance(detector, FDBD), no_mean),
            (on_mean and first.network, no_images),
            (
                on_logits and not second.logits,
                f"{of_logits} reads features alone: it would change nothing",
            ),
            (
                on_logits and second.network,
                f"{of_logits} takes its own from the images: it would change nothing",
            ),
            (
                first.network and second.network,
                f"{shaping.name} and {detector.label} both perturb the images: use one",
            ),
            (
                second.calibration,
                f"shape the members instead: Ensemble([Shaped({type(shaping).__name__}(), …), …])",
            ),
        ):
            if is_wrong:
                raise ValueError(why)
        self.shaping, self.detector, self.mean = shaping, detector, mean
        behind = 1 if on_mean else second.passes
        passes = None if first.passes is None or behind is None else first.passes + behind
        network = first.network or second.network  # views are shaped like the features
        self.needs = replace(
            second, features=True, logits=first.logits, views=True, network=network, passes=passes
        )

    @property
    def label(self) -> str:
        return f"{self.shaping.name or type(self.shaping).__name__}+{self.detector.label}"

    def passes(self, head: Head) -> Passes:
        yield from self.shaping.passes(head)
        if self.mean == "shaped":
            assert isinstance(self.detector, FDBD)
            mean = yield Mean(head.num_features)
            self.detector.set_mean(self.shaping(mean.mean().to(self.fit_dtype)[None])[0])
            return
        program, statistic = self.detector.passes(head), None
        with suppress(StopIteration):
            while True:
                statistic = (
                    yield Transformed(program.send(statistic), self._shape_for_fit)
                ).statistic

    def _shape_for_fit(self, batch: Batch) -> Batch:
        if batch.views is not None:
            check_finite(batch.views.transpose(0, 1), "its views")
        return self.shape(batch._replace(features=batch.features.to(self.fit_dtype)))

    def shape(self, batch: Batch) -> Batch:
        """The batch that the detector behind the shaping sees; its logits are None where it is to
        compute them."""
        if self.shaping.needs.logits and batch.logits is None:
            batch = batch._replace(logits=self.head(batch.features))
        return self.shaping.shape(batch)

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        return self.shaping.observe(
            images, partial(self.detector.observe, classifier=classifier, labels=labels)
        )

    def example(self) -> Batch:
        return self.detector.example()

    def score(self, batch: Batch) -> Tensor:
        return self.detector.score(self.shape(batch))
