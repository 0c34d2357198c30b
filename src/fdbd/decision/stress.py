"""A stress card: how often a guard, at its own threshold, flags pseudo-OOD images of each kind and
each corruption of in-distribution images, and how often it flags the clean ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.pixels import ImageError, Pixels
from fdbd.core.preprocessing import Preprocess
from fdbd.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from fdbd.data.images import ImageFiles, Images, spread_evenly
from fdbd.data.inputs import open_rows
from fdbd.data.pseudo_ood import KINDS, WEIGHING, make_kinds
from fdbd.decision.answers import Decision
from fdbd.decision.guard_file import OpenedGuard
from fdbd.util.progress import Bar
from fdbd.util.terminal import one_line

CAUTION = (
    "Pseudo-OOD images are far from most of what a model meets, and corruptions are those of "
    "CIFAR-10-C, with its strengths in pixels: a card compares guards and versions of a guard, it "
    "does not say how many real OOD images will be flagged."
)


class Share(NamedTuple):
    """How many of some images were flagged, with a 95 % interval of the share."""

    flagged: int
    total: int
    low: float
    high: float

    @classmethod
    def from_flags(cls, is_ood: NDArray[np.bool_]) -> Share:
        """The interval is exact (Clopper and Pearson, 1934).

        >>> Share.from_flags(np.array([True, False, False, True])).share
        0.5
        """
        from scipy.special import betaincinv

        flagged = int(is_ood.sum())
        total = len(is_ood)
        low = 0.0
        high = 1.0
        if flagged > 0:
            low = float(betaincinv(flagged, total - flagged + 1, 0.025))
        if flagged < total:
            high = float(betaincinv(flagged + 1, total - flagged, 0.975))
        return cls(flagged, total, low, high)

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.flagged / self.total

    def to_dict(self) -> dict[str, float]:
        """All numbers by name."""
        return {**self._asdict(), "share": self.share}


class Stressed(NamedTuple):
    """What a guard made of one change of the images."""

    name: str
    severity: int | None
    """From 1 to 5; None: a kind of pseudo-OOD images, which has none."""
    flagged: Share
    changed: float
    """Share of the images whose predicted class is not that of the clean image."""
    missed: float
    """Share whose predicted class changed and that were not flagged."""
    picture: Pixels
    """The first image, (height, width, 3)."""

    def to_dict(self) -> dict[str, Any]:
        """All numbers by name, without the picture."""
        return {
            "name": self.name,
            "severity": self.severity,
            **self.flagged.to_dict(),
            "changed": self.changed,
            "missed": self.missed,
        }


@dataclass(frozen=True)
class StressCard:
    """What a guard made of clean, changed and corrupted images."""

    guard_id: str
    detector: str
    data: str
    expected: float
    """Share of in-distribution images that the threshold is to reject."""
    guarantee: str
    clean: Share
    clean_picture: Pixels
    kinds: tuple[Stressed, ...]
    corruptions: tuple[Stressed, ...]
    errors: tuple[str, ...] = ()
    """Images that could not be read, a sentence each."""

    @property
    def weakest(self) -> Stressed:
        """The far kind that is flagged least."""
        far = [kind for kind in self.kinds if kind.name in WEIGHING]
        return min(far, key=lambda kind: kind.flagged.share)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        return {
            "guard": self.guard_id,
            "detector": self.detector,
            "data": self.data,
            "expected_false_alarms": self.expected,
            "guarantee": self.guarantee,
            "clean": self.clean.to_dict(),
            "kinds": [kind.to_dict() for kind in self.kinds],
            "corruptions": [corruption.to_dict() for corruption in self.corruptions],
            "weakest": self.weakest.name,
            "weakest_share": self.weakest.flagged.share,
            "caution": CAUTION,
            "errors": list(self.errors),
        }


def stress_files(
    opened: OpenedGuard,
    data: str,
    count: int = 50,
    clean: int = 500,
    *,
    batch_size: int = 128,
    progress: bool = True,
    corruptions: Sequence[str] = CORRUPTIONS,
    split: str = "test",
    seed: int = 0,
) -> StressCard:
    """The card of a guard on in-distribution images.

    Args:
        opened: a guard with its model, calibrated.
        data: in-distribution images, as in `open_images`, preferably none that the threshold was
            set on.
        count: images of each kind, and of each corruption at each severity.
        clean: the largest number of images that are scored as they are.
        batch_size: images that the model sees at once.
        progress: show a bar when it takes more than two seconds.
        corruptions: names of the corruptions to try.
        split: which part of a dataset by name.
        seed: of everything that is drawn.
    """
    if opened.preprocess is None:
        raise ValueError(
            "the guard takes no images: it takes texts, or its file names no model (it was fitted "
            "on features, or saved in Python); stress needs a guard that fdbd fit made with a model"
        )
    if count < 1 or clean < 1:
        raise ValueError(f"count is {count} and clean is {clean}, expected at least 1 image each")
    threshold = opened.guard.stages.require_threshold()
    images = open_rows(data, split)
    if not isinstance(images, Images):
        raise ValueError(f"{data!r} are features, expected images")
    pictures, errors = _read_images(images, opened.preprocess, clean)
    few = pictures[: min(count, len(pictures))]
    trial = _Trial(opened, batch_size)
    num_corrupted = len(few) * len(corruptions) * len(SEVERITIES)
    total = len(pictures) + len(few) + num_corrupted + count * len(KINDS)
    with Bar("stress", total, enabled=progress) as bar:
        trial.bar = bar
        flags = trial.decide(pictures).is_ood.cpu().numpy()
        labels = trial.decide(few).labels
        kinds = tuple(_kinds(trial, few, labels, count, seed))
        found = tuple(_corruptions(trial, few, labels, corruptions, seed))
    return StressCard(
        guard_id=opened.guard.id,
        detector=opened.guard.detector.label,
        data=images.source,
        expected=threshold.expected_rate,
        guarantee=threshold.guarantee,
        clean=Share.from_flags(flags),
        clean_picture=pictures[0],
        kinds=kinds,
        corruptions=found,
        errors=tuple(errors),
    )


class _Trial:
    """A guard that decides on images of its network's size."""

    def __init__(self, opened: OpenedGuard, batch_size: int) -> None:
        assert opened.preprocess is not None
        self.guard = opened.guard
        self.preprocess = opened.preprocess
        self.batch_size = batch_size
        self.bar: Bar | None = None
        self.done = 0

    def decide(self, pictures: Pixels) -> Decision:
        """The decision on images (N, height, width, 3)."""
        parts = []
        for start in range(0, len(pictures), self.batch_size):
            batch = pictures[start : start + self.batch_size]
            parts.append(self.guard(self.preprocess.normalise(batch)))
            self.done += len(batch)
            if self.bar is not None:
                self.bar.update(self.done)
        return Decision(
            logits=torch.cat([part.logits for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            scores=torch.cat([part.scores for part in parts]),
            p_values=torch.cat([part.p_values for part in parts]),
            is_ood=torch.cat([part.is_ood for part in parts]),
        )

    def stressed(
        self, name: str, severity: int | None, pictures: Pixels, clean_labels: torch.Tensor
    ) -> Stressed:
        """What the guard makes of changed images, whose clean ones have these predicted classes."""
        decision = self.decide(pictures)
        has_changed = decision.labels != clean_labels
        is_missed = has_changed & ~decision.is_ood
        return Stressed(
            name,
            severity,
            Share.from_flags(decision.is_ood.cpu().numpy()),
            has_changed.float().mean().item(),
            is_missed.float().mean().item(),
            pictures[0],
        )


def _kinds(
    trial: _Trial, pictures: Pixels, labels: torch.Tensor, count: int, seed: int
) -> Iterator[Stressed]:
    for name in KINDS:
        # One kind at a time, each made of the same images, so that fewer are in memory.
        images = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
        black = torch.zeros(1, 3, 1, 1)
        made = make_kinds(images, count, [name], limits=(black, black + 255), seed=seed)[name]
        pixels = made.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        # The made images take the clean ones in turn.
        rows = torch.arange(count, device=labels.device) % len(pictures)
        yield trial.stressed(name, None, pixels, labels[rows])


def _corruptions(
    trial: _Trial, pictures: Pixels, labels: torch.Tensor, names: Sequence[str], seed: int
) -> Iterator[Stressed]:
    for name in names:
        for severity in SEVERITIES:
            corrupted = corrupt(pictures, name, severity, seed=seed)
            yield trial.stressed(name, severity, corrupted, labels)


def _read_images(images: Images, preprocess: Preprocess, most: int) -> tuple[Pixels, list[str]]:
    """Pixels (N, height, width, 3) of at most `most` images, spread evenly over the set, and a
    sentence for each image that cannot be read."""
    pictures = []
    errors = []
    for row in spread_evenly(min(most, len(images)), len(images)).tolist():
        try:
            if isinstance(images.images, ImageFiles):
                pixels = images.images[row]
            else:
                # A slice, for an array may lie in a file that gives nothing else.
                pixels = images.images[row : row + 1][0]
            pictures.append(preprocess.fit(pixels))
        except ImageError as error:
            errors.append(one_line(error))
    if not pictures:
        raise ValueError(f"{images.source} has no image that can be read; the first: {errors[0]}")
    return np.stack(pictures), errors
