"""BoxGuard: a guard around a network that finds boxes, with a decision on each detection.

Detections of one image are not exchangeable, images are. So the threshold is set from one random
detection of each calibration image, and what it promises is about one random detection of a new
image, drawn in the same way: among those that match a true box, or among the confident ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self, Unpack

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import Target
from fdbd.detectors import Detector
from fdbd.networks.boxes import Detections, box_network

CONFIDENT = 0.7
"""Confidence from which on a detection is learnt from if no true boxes are given."""
MATCHED = 0.5
"""Intersection over union with a true box of its class from which on a detection is a match."""


class BoxDecision(NamedTuple):
    """A guard's decisions on the D detections of one image.

    >>> nothing = torch.zeros(0)
    >>> BoxDecision(torch.zeros(0, 4), nothing.long(), nothing, nothing, nothing, nothing.bool())
    BoxDecision(0 detections, 0 OOD)
    """

    boxes: Tensor
    """(D, 4) as the network gives them: see `Detections.boxes`."""
    labels: Tensor
    """(D,) the network's classes."""
    confidences: Tensor
    """(D,) the network's own scores."""
    scores: Tensor
    """(D,) the guard's: higher is more in-distribution."""
    p_values: Tensor
    """(D,)"""
    is_ood: Tensor
    """(D,) bool."""

    def __repr__(self) -> str:
        count = len(self.labels)
        noun = "detection" if count == 1 else "detections"
        return f"BoxDecision({count} {noun}, {int(self.is_ood.sum())} OOD)"


class BoxGuard:
    """A guard around a network that finds boxes: torchvision's Faster R-CNN or Mask R-CNN, or
    Hugging Face's DETR.

    Args:
        model: the network.
        detector: a detector or its name; or a fitted `Guard` of such features, as `fdbd.load` reads
            what ``box_guard.guard.save(path)`` wrote.
        min_confidence: for DETR, whose queries all give a box: those below it have found nothing.
            Faster R-CNN has a limit of its own, ``roi_heads.score_thresh``.
        seed: of the draw of one detection per calibration image.
    """

    def __init__(
        self,
        model: nn.Module,
        detector: Detector | Guard | str = "fdbd",
        *,
        min_confidence: float = 0.5,
        seed: int = 0,
    ) -> None:
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"min_confidence is {min_confidence}, expected a number from 0 to 1")
        self.network = box_network(model, min_confidence)
        if isinstance(detector, Guard):
            _check_guard(detector, self.network.head)
            self.guard = detector
        else:
            self.guard = Guard(self.network.head, detector)
        self._seed = seed

    def fit(self, data: Iterable[Any]) -> Self:
        """Fit the detector on detections of training images: on those that match a true box if
        `data` gives (images, targets), else on confident ones.

        Args:
            data: batches of what the network takes, or (batch, targets). A target is a dict of
                ``boxes`` (B, 4), with corners as in `Detections`, and ``labels`` (B,).
        """
        self.guard.fit(self._batches(data))
        return self

    def calibrate(self, data: Iterable[Any], **target: Unpack[Target]) -> Self:
        """Set the threshold from in-distribution images that neither the network's training nor the
        fit has seen: from one random detection of each, among those that `fit` would learn from.

        With `alpha`, one random detection of a new in-distribution image is flagged with
        probability at most `alpha`. It has to be drawn in the same way as here: among the
        detections that match a true box if `data` gives targets, else among those with a confidence
        of at least `CONFIDENT`. Other detections may be flagged more often. Images without any such
        detection do not count."""
        generator = torch.Generator().manual_seed(self._seed)
        drawn = []
        for found in self._learnable(data):
            count = len(found.labels)
            if count:
                place = torch.randint(count, (1,), generator=generator)
                drawn.append(_as_batch(found.chosen(place.to(found.labels.device))))
        if not drawn:
            raise ValueError(
                "no calibration image has a detection to learn from: none matches a true box, or "
                f"none has a confidence of {CONFIDENT}"
            )
        self.guard.calibrate(drawn, **target)
        return self

    def __call__(self, inputs: Any) -> list[BoxDecision]:
        """The decisions on what the network finds in each image of a batch."""
        decisions = []
        for found in self.network.detections(inputs):
            decision = self.guard.decide(_as_batch(found))
            decisions.append(
                BoxDecision(
                    found.boxes,
                    found.labels,
                    found.confidences,
                    decision.scores,
                    decision.p_values,
                    decision.is_ood,
                )
            )
        return decisions

    def __repr__(self) -> str:
        return f"BoxGuard({type(self.network.model).__name__}, {self.guard!r})"

    def _batches(self, data: Iterable[Any]) -> Iterator[Batch]:
        """The detections to learn from, as rows of features, with the network's classes if the
        detector learns by class."""
        has_rows = False
        for found in self._learnable(data):
            if len(found.labels):
                has_rows = True
                batch = _as_batch(found)
                # The background is a class without samples, of which the guard would warn.
                if self.guard.detector.needs.labels:
                    batch = batch._replace(labels=found.labels)
                yield batch
        if not has_rows:
            raise ValueError(
                "the training images have no detection to learn from: none matches a true box, or "
                f"none has a confidence of {CONFIDENT}"
            )

    def _learnable(self, data: Iterable[Any]) -> Iterator[Detections]:
        """The detections of each image that a fit learns from."""
        for item in data:
            inputs, targets = _split(item)
            found = self.network.detections(inputs)
            if targets is None:
                for detections in found:
                    yield detections.chosen(detections.confidences >= CONFIDENT)
                continue
            if len(targets) != len(found):
                raise ValueError(
                    f"there are {len(targets)} targets for {len(found)} images: expected one dict "
                    "of boxes and labels for each"
                )
            for place, (detections, target) in enumerate(zip(found, targets)):
                _check_target(target, place)
                yield detections.chosen(is_matched(detections, target))


def _check_guard(guard: Guard, layer: Head) -> None:
    """ValueError unless a guard of features takes what the class layer reads."""
    if guard.head.weight.shape != layer.weight.shape:
        raise ValueError(
            f"the guard takes {guard.head.num_features:,} features of {guard.head.num_classes:,} "
            f"classes, and the network's class layer has {layer.num_features:,} and "
            f"{layer.num_classes:,}: give a guard that was fitted on boxes of this network"
        )


def _split(item: Any) -> tuple[Any, Sequence[dict[str, Tensor]] | None]:
    """A loader's item as (inputs, targets). A list of images is inputs alone."""
    is_pair = isinstance(item, (tuple, list)) and len(item) == 2
    # Two images are no pair of a batch and targets.
    if not is_pair or not _is_batch(item[0]):
        return item, None
    inputs, targets = item
    is_list = isinstance(targets, (tuple, list))
    if not is_list or not all(isinstance(target, dict) for target in targets):
        raise ValueError(
            f"the targets of a batch are of type {type(targets).__name__}, expected a list with "
            "one dict of boxes and labels for each image"
        )
    return inputs, targets


def _is_batch(inputs: Any) -> bool:
    if isinstance(inputs, Tensor):
        return inputs.ndim == 4
    return isinstance(inputs, (tuple, list, dict))


def _check_target(target: dict[str, Any], place: int) -> None:
    """ValueError unless a target has true boxes, and a label for each."""
    expected = "expected a dict of tensors, boxes (B, 4) and labels (B,)"
    boxes = target.get("boxes")
    labels = target.get("labels")
    if not isinstance(boxes, Tensor) or not isinstance(labels, Tensor):
        found = ", ".join(map(repr, target)) or "nothing"
        raise ValueError(f"target {place} of a batch holds {found}, {expected}")
    if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != boxes.shape[:1]:
        raise ValueError(
            f"target {place} of a batch has boxes {tuple(boxes.shape)} and labels "
            f"{tuple(labels.shape)}, {expected}"
        )


def _as_batch(found: Detections) -> Batch:
    return Batch(found.features, found.logits)


def is_matched(found: Detections, target: dict[str, Tensor]) -> Tensor:
    """(D,) whether each detection overlaps a true box of its class by at least one half."""
    device = found.boxes.device
    overlap = _intersection_over_union(found.boxes, target["boxes"].to(device))
    is_same = found.labels[:, None] == target["labels"].to(device)[None]
    return ((overlap >= MATCHED) & is_same).any(dim=1)


def _intersection_over_union(first: Tensor, second: Tensor) -> Tensor:
    """(D, B) of boxes (D, 4) and (B, 4), given by their corners."""
    upper_left = torch.maximum(first[:, None, :2], second[None, :, :2])
    lower_right = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (lower_right - upper_left).clamp_min(0).prod(dim=2)
    area = (first[:, 2:] - first[:, :2]).prod(dim=1)
    other_area = (second[:, 2:] - second[:, :2]).prod(dim=1)
    return shared / (area[:, None] + other_area[None] - shared).clamp_min(1e-12)
