"""Decisions on maps: what a guard around a classifier of pixels answers, and which positions of a
map its fit reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import Batch
from fdbd.core.grid import Grid, nearest_pixels
from fdbd.decision.map_threshold import MapThreshold, image_scores
from fdbd.decision.show import html_table
from fdbd.fitting.overlap import sample_hashes
from fdbd.util.torch_compat import tracing

POSITIONS = 256
"""Training positions that are drawn from each image. Neighbours are nearly copies of each other, so
more positions of the same image add time and little knowledge."""

NOT_FOR_MAPS = (
    "the guard decides on maps, one verdict per position, and this takes guards with one "
    "prediction per image; guard(images) in Python and fdbd's fit, score, explain, gallery, "
    "inspect, export and serve take maps"
)
"""What is said wherever a guard of maps cannot be used."""


class PixelAnswers(NamedTuple):
    """The answers of a `MapDecision` on every pixel of N images."""

    labels: Tensor
    """(N, h, w) predicted classes."""
    scores: Tensor
    """(N, h, w)."""
    is_ood: Tensor
    """(N, h, w) bool."""


class MapDecision(NamedTuple):
    """A guard's decision on N images whose model predicts a class for each of H × W positions.

    >>> from fdbd.decision.map_threshold import PixelShares
    >>> shares = PixelShares()
    >>> shares.add(torch.rand(200, 6))
    >>> threshold = MapThreshold.from_shares(shares, alpha=0.1)
    >>> decision = decide_maps(Grid(2, 2, 3), torch.rand(12, 4), torch.zeros(12), threshold)
    >>> decision
    MapDecision(2 images, 4 classes, 2 × 3 positions, 100 % of positions OOD, 2 images OOD)
    >>> decide_maps(Grid(1, 1, 1), torch.rand(1, 4), torch.ones(1), threshold)
    MapDecision(1 image, 4 classes, 1 × 1 position, 0 % of positions OOD, 0 images OOD)
    >>> decision.upsample((8, 12)).is_ood.shape
    torch.Size([2, 8, 12])
    """

    logits: Tensor
    """(N, C, H, W) output of the model's head, at the head's resolution."""
    labels: Tensor
    """(N, H, W) predicted classes."""
    scores: Tensor
    """(N, H, W) higher is more in-distribution; −inf if a number was not finite, which is always
    OOD. A number of the image that is not finite makes all of its positions −inf."""
    is_ood: Tensor
    """(N, H, W) bool."""
    ood_share: Tensor
    """(N,) share of the image's positions that are OOD: what the threshold bounds on average."""
    image_scores: Tensor
    """(N,) the score that 5 % of the image's positions stay at or below."""
    image_p_values: Tensor
    """(N,) conformal p-values of the images' scores; small means out-of-distribution."""
    image_is_ood: Tensor
    """(N,) bool, the verdict on the image as a whole."""

    def upsample(self, size: tuple[int, int]) -> PixelAnswers:
        """Labels, scores and verdicts at another resolution (h, w), such as the images': those of
        the nearest position. Nothing is interpolated, since the promise is about the positions
        alone."""
        if not isinstance(size, Sequence) or len(size) != 2 or min(size) < 1:
            raise ValueError(f"size is {size}, expected (height, width) of at least one pixel")
        height, width = size
        rows = nearest_pixels(self.labels.shape[1], height, self.labels.device)
        columns = nearest_pixels(self.labels.shape[2], width, self.labels.device)
        return PixelAnswers(
            self.labels[:, rows][:, :, columns],
            self.scores[:, rows][:, :, columns],
            self.is_ood[:, rows][:, :, columns],
        )

    def __repr__(self) -> str:
        return f"MapDecision({', '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        return html_table("MapDecision", self._facts())

    def _facts(self) -> dict[str, str]:
        """What a person wants to know at a glance, by name. A graph under construction has shapes
        and no numbers."""
        _, classes, height, width = self.logits.shape
        images = len(self.logits)
        facts = {"images": f"{images:,} {_noun('image', images)}"}
        facts["classes"] = f"{classes:,} {_noun('class', classes)}"
        facts["positions"] = f"{height} × {width} {_noun('position', height * width)}"
        if tracing() or self.scores.is_meta or not len(self.scores):
            return facts
        facts["OOD positions"] = f"{100 * float(self.ood_share.mean()):.3g} % of positions OOD"
        ood = int(self.image_is_ood.sum())
        facts["OOD images"] = f"{ood:,} {_noun('image', ood)} OOD"
        return facts

    def image_labels(self) -> Tensor:
        """(N,) the class that most positions of each image have; the first of several."""
        classes = self.logits.shape[1]
        labels = self.labels.flatten(1)
        counts = torch.zeros(len(labels), classes, device=labels.device)
        counts.scatter_add_(1, labels, torch.ones_like(labels, dtype=counts.dtype))
        return counts.argmax(dim=1)


def _noun(noun: str, count: int) -> str:
    """The noun as it stands behind this number."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def decide_maps(grid: Grid, logits: Tensor, scores: Tensor, threshold: MapThreshold) -> MapDecision:
    """The decision that follows from logits (N·H·W, C) and scores (N·H·W,) of the positions."""
    maps = grid.to_maps(scores)
    # The calibration counted float32 numbers: others would be rounded to another side of it.
    compared = maps.to(torch.float32)
    is_ood = threshold.is_ood(compared)
    of_images = image_scores(compared.flatten(1))
    return MapDecision(
        logits=grid.to_maps(logits),
        labels=grid.to_maps(logits.argmax(dim=1)),
        scores=maps,
        is_ood=is_ood,
        ood_share=is_ood.flatten(1).to(torch.float32).mean(dim=1),
        image_scores=of_images,
        image_p_values=threshold.image_threshold.p_values(of_images),
        image_is_ood=threshold.image_threshold.is_ood(of_images),
    )


def draw_positions(batch: Batch, hashes: Tensor, num_classes: int, count: int = POSITIONS) -> Batch:
    """Rows of `count` random positions of each image, in the order of the images; of all positions
    if there are fewer.

    The draw follows from the image alone, so it is the same however the data are split into batches
    and processes. Positions whose label is not a class (an ignore index, such as 255) are left out.

    Args:
        batch: rows with a grid.
        hashes: (N,) `sample_hashes` of the images.
        num_classes: C; labels from 0 to C − 1 are classes.
        count: positions per image.

    >>> batch = Batch(torch.rand(12, 5), labels=torch.tensor([0, 1, 255] * 4), grid=Grid(2, 2, 3))
    >>> drawn = draw_positions(batch, torch.tensor([7, 8]), num_classes=2, count=3)
    >>> drawn.features.shape, int(drawn.labels.max()), drawn.grid
    (torch.Size([6, 5]), 1, None)
    """
    grid = batch.grid
    if grid is None:
        raise ValueError("the batch has no grid, so its rows are not positions of images")
    if len(hashes) != grid.samples:
        raise ValueError(
            f"the model's maps are of {grid.samples} images, and its first input holds "
            f"{len(hashes)} samples: expected a tensor of images (N, …) as the first input"
        )
    has_class = None
    if batch.labels is not None:
        labels = batch.labels.cpu().reshape(grid.samples, grid.positions)
        has_class = (labels >= 0) & (labels < num_classes)
    drawn = [torch.zeros(0, dtype=torch.int64, device="cpu")]
    for image, seed in enumerate(hashes.tolist()):
        generator = torch.Generator("cpu").manual_seed(seed)
        places = torch.randperm(grid.positions, generator=generator, device="cpu")
        if has_class is not None:
            places = places[has_class[image][places]]
        drawn.append(image * grid.positions + places[:count].sort().values)
    return batch.rows(torch.cat(drawn).to(batch.features.device))


def batch_hashes(batch: Batch) -> Tensor:
    """(N,) `sample_hashes` of a batch of features: of its images, if its rows are positions."""
    if batch.grid is None:
        return sample_hashes(batch.features)
    return sample_hashes(batch.features.reshape(batch.grid.samples, -1))
