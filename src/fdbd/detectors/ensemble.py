"""Several detectors as one, on the common scale of p-values."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fdbd.core.batch import as_batch
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Inputs,
    Needs,
    NotFittedError,
    Paper,
    Passes,
    expect,
    one_of,
)
from fdbd.detectors.registry import as_detector
from fdbd.detectors.shaping.base import Shaping
from fdbd.fitting.driver import side_by_side
from fdbd.util.torch_compat import undisturbed


class Ensemble(Detector):
    """Detectors combined by the p-values of their scores under in-distribution data; no OOD data
    are needed.

    A member's p-value is the share of calibration scores at or below its own, (1 + #{calibration ≤
    s}) / (n + 1), interpolated between calibration scores. The score is their combination, in (0,
    1]:

    - "harmonic": M / Σ 1/pᵢ (Wilson, 2019), low as soon as one member is sure, and robust to
      dependence: members see the same features, so their p-values are anything but independent;
    - "fisher": the geometric mean (Fisher, 1932), which gives all members the same weight;
    - "cauchy": ½ − arctan(mean tan((½ − pᵢ)π)) / π (Liu & Xie, 2020), robust to dependence too, but
      a member that is sure of the opposite can outvote one that is sure.

    With `weights` each mean above is a weighted mean, so that "fisher" is exp(Σ wᵢ log pᵢ) for
    weights that sum to 1.

    After `fit`, call `calibrate` on in-distribution data that neither the fit nor the threshold
    uses; in a Guard that is ``guard.detector.calibrate(map(guard.classifier, loader))``, before
    ``guard.calibrate``.

    Args:
        detectors: two or more detectors, or their names as in `create`; none that needs the
            network.
        combine: how p-values are combined.
        weights: a positive number for each detector; only their ratios matter. None: all the same.

    >>> z = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    >>> head = Head(torch.eye(4), torch.zeros(4))
    >>> ensemble = Ensemble(["fdbd", "energy"]).fit(Batch(z[:100]), head).calibrate(Batch(z[100:]))
    >>> ensemble.score(Batch(z[:3])).shape
    torch.Size([3])
    """

    #: ascending calibration scores of each member
    knots: Annotated[Tensor, "M K"]
    #: p-values at the knots
    levels: Annotated[Tensor, "K"]

    name = "ensemble"
    paper = Paper("The harmonic mean p-value for combining dependent tests", "Wilson", "PNAS", 2019)

    def __init__(
        self,
        detectors: Sequence[Detector | Shaping | str],
        combine: Literal["harmonic", "fisher", "cauchy"] = "harmonic",
        weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(detectors, str) or not isinstance(detectors, Sequence) or len(detectors) < 2:
            raise ValueError(
                "an ensemble needs a list of at least two detectors or names, such as ['fdbd',"
                " 'knn']"
            )
        expect("the number of detectors", len(detectors), len(detectors) <= 100, "at most 100")
        members = [as_detector(detector) for detector in detectors]
        self.needs = _needs_of_all(members)
        self.detectors = nn.ModuleList(members)
        self.combine = one_of("combine", combine, "harmonic", "fisher", "cauchy")
        self.weights = _checked_weights(weights, len(members))

    @property
    def members(self) -> list[Detector]:
        """The detectors, in order."""
        return list(self.detectors)  # type: ignore[arg-type]

    def options(self) -> dict[str, object]:
        return {**super().options(), "detectors": self.members}

    @property
    def shares(self) -> tuple[float, ...]:
        """The weight of each member, normalised so that they sum to 1."""
        weights = self.weights or (1.0,) * len(self.detectors)
        total = math.fsum(weights)
        return tuple(weight / total for weight in weights)

    def extra_repr(self) -> str:
        if self.weights is None:
            return f"combine={self.combine!r}"
        shown = ", ".join(f"{share:.3f}" for share in self.shares)
        return f"combine={self.combine!r}, shares=({shown})"

    @property
    def is_calibrated(self) -> bool:
        """Whether `calibrate` has been called since the fit."""
        return "knots" in self._buffers

    def passes(self, head: Head) -> Passes:
        return side_by_side([member.passes(head) for member in self.members])

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        # Each member observes what the one before it makes of the images: the batch collects what
        # all of them add to it.
        for member in self.members:
            classifier = partial(member.observe, classifier=classifier, labels=labels)
        return classifier(images)

    def example(self) -> Batch:
        example = self.members[0].example()
        for member in self.members[1:]:
            other = member.example()
            if other.layers is not None:
                example = example._replace(layers={**(example.layers or {}), **other.layers})
            if example.views is None:
                example = example._replace(views=other.views)
        return example

    def calibrate(self, batches: Batch | Iterable[Batch]) -> Self:
        """Learn how each member scores in-distribution data; `batches` are one Batch or an iterable
        of them."""
        given = [batches] if isinstance(batches, Batch) else batches
        parts = [torch.zeros(len(self.detectors), 0)]
        with torch.no_grad(), undisturbed():
            for batch in given:
                parts.append(self._member_scores(as_batch(batch)))
        if len(parts) > 1:
            # The scores' own dtype and device, not those of the empty start.
            parts = parts[1:]
        scores = torch.cat(parts, dim=1)
        count = scores.shape[1]
        if count < 2:
            raise ValueError(f"{count} calibration samples, expected at least 2, better hundreds")
        self._require_finite(scores)
        with undisturbed():
            # 1 is the lowest score.
            ranks = _ranks(count).to(scores.device)
        ascending = scores.sort(dim=1).values
        self._set_buffer("knots", ascending[:, ranks - 1].contiguous())
        self._set_buffer("levels", (ranks + 1).to(scores.dtype) / (count + 1))
        return self

    def _require_finite(self, scores: Tensor) -> None:
        """An error that names the member and the calibration sample whose score is not finite."""
        for member, row in zip(self.members, scores):
            bad = (~torch.isfinite(row)).nonzero()[:, 0]
            if len(bad):
                sample = int(bad[0])
                raise ValueError(
                    f"{member.label} scores calibration sample {sample} {row[sample]}, expected a "
                    "finite score"
                )

    def _member_scores(self, batch: Batch) -> Tensor:
        """(M, N)."""
        return torch.stack([member.score(batch) for member in self.members])

    def p_values(self, batch: Batch) -> Tensor:
        """(M, N) p-value of each member's score; small means out-of-distribution, 0 that the row is
        not trusted."""
        if not self.is_calibrated:
            data = "in-distribution data that the fit did not see"
            raise NotFittedError(
                f"the ensemble is not calibrated: call calibrate(batches) on {data}"
            )
        scores = self._member_scores(batch)
        # Each score lies between the calibration scores index − 1 and index.
        index = self._places(scores)
        count = self.knots.shape[1]
        lower = (index - 1).clamp_min(0)
        upper = index.clamp_max(count - 1)
        left = self.knots.gather(1, lower)
        right = self.knots.gather(1, upper)
        is_between = (index > 0) & (index < count)
        width = torch.where(is_between, right - left, 1)
        share = torch.where(is_between, (scores - left) / width, 0)
        p = torch.lerp(self.levels[lower], self.levels[upper], share)
        # Below all calibration scores: 1 / (n + 1).
        p = torch.where(index == 0, self.levels[0] / 2, p)
        return torch.where(scores == -torch.inf, 0, p)

    def _places(self, scores: Tensor) -> Tensor:
        """(M, N) how many of a member's calibration scores are at or below its score."""
        # ONNX has no binary search.
        if torch.compiler.is_compiling():
            return (scores.unsqueeze(2) >= self.knots.unsqueeze(1)).sum(dim=2)
        return torch.searchsorted(self.knots, scores.contiguous(), right=True)

    def formula(self, batch: Batch) -> Tensor:
        p = self.p_values(batch)
        shares = p.new_tensor(self.shares).unsqueeze(1)
        if self.combine == "harmonic":
            combined = 1 / (shares / p).sum(dim=0)
        elif self.combine == "fisher":
            combined = (shares * p.log()).sum(dim=0).exp()
        else:
            # At p = 1 the rounded angle may lie beyond −π/2, where the tangent is as large as it
            # should be small.
            largest = 1 - 4 * torch.finfo(p.dtype).eps
            angles = (0.5 - p.clamp_max(largest)) * math.pi
            combined = 0.5 - (shares * angles.tan()).sum(dim=0).atan() / math.pi
        return torch.where((p == 0).any(dim=0), -torch.inf, combined)

    def objections(self, batch: Batch) -> Tensor:
        """(M, N) each member's share of what speaks against a sample: its weight times −log of its
        p-value, divided by the sum over all members. A column sums to 1.

        Of a row that is not trusted, members that trust it have a share of 0; if every p-value is
        1, nobody objects, and all shares are equal.
        """
        p = self.p_values(batch)
        surprise = -p.new_tensor(self.shares).unsqueeze(1) * p.log()
        is_untrusted = p == 0
        surprise = torch.where(is_untrusted.any(dim=0), is_untrusted.to(p.dtype), surprise)
        surprise = torch.where(surprise.sum(dim=0) > 0, surprise, torch.ones_like(surprise))
        return surprise / surprise.sum(dim=0)


def _checked_weights(weights: Sequence[float] | None, num_members: int) -> tuple[float, ...] | None:
    """The weights as numbers; ValueError unless there is a positive one for each member."""
    if weights is None:
        return None
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise ValueError(
            f"weights are {weights!r}, expected a list with a number for each detector"
        )
    if len(weights) != num_members:
        raise ValueError(
            f"{len(weights)} weights for {num_members} detectors, expected one for each"
        )
    checked = []
    for weight in weights:
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(f"a weight is {weight!r}, expected a positive number")
        checked.append(float(weight))
    # Ratios beyond this would round the smaller shares to zero in float32.
    if max(checked) > 1e30 * min(checked):
        raise ValueError("the largest weight is more than 1e30 times the smallest: leave those out")
    return tuple(checked)


def _needs_of_all(members: Sequence[Detector]) -> Needs:
    """The needs of all members together; ValueError for members that cannot be combined."""
    layers: list[str] = []
    reads_views = False
    passes: int | None = 0
    for member in members:
        needs = member.needs
        if needs.network:
            raise ValueError(
                f"{member.label} needs the network and cannot be in an ensemble: guard it by itself"
            )
        layers += [name for name in needs.layers if name not in layers]
        reads_views = reads_views or needs.views
        # The members share their passes, so that the longest fit decides; None is any number.
        if needs.passes is None:
            passes = None
        elif passes is not None:
            passes = max(passes, needs.passes)
    if layers and reads_views:
        raise ValueError(
            "one member reads views and another layers, which cannot be fitted together: use one"
        )
    return Needs(
        features=any(member.needs.features for member in members),
        logits=any(member.needs.logits for member in members),
        views=reads_views,
        layers=tuple(layers),
        labels=any(member.needs.labels for member in members),
        heldout=any(member.needs.heldout for member in members),
        many_labels=any(member.needs.many_labels for member in members),
        passes=passes,
        calibration=True,
    )


def _ranks(count: int, kept: int = 1024) -> Tensor:
    """Ranks, from 1, of the calibration scores to keep: all if they are few; else the lowest, where
    decisions are made, for one half of those kept, and an even spread over the rest for the
    other."""
    if count <= kept:
        return torch.arange(1, count + 1)
    half = kept // 2
    lowest = torch.arange(1, half + 1)
    spread = torch.linspace(half + 1, count, half, dtype=torch.float64)
    return torch.cat([lowest, spread.round().to(torch.int64)])
