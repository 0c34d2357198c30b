"""Measures for score maps: does the score of each pixel, and each connected region of flagged
pixels, find the OOD objects of an image?

Scores are higher for in-distribution pixels, as everywhere. In a truth map 1 is OOD, 0 is ID, and
255 is ignored. OOD is the positive class, as in SegmentMeIfYouCan and Fishyscapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.core.batch import ArrayLike
from fdbd.core.configuration import expect
from fdbd.metrics.evaluation import Estimate
from fdbd.metrics.points import Counts, Floats, area, average_precision, false_positive_rate

ID = 0
OOD = 1
IGNORED = 255
# Thresholds of F1*: 0.25, 0.30, …, 0.75 (Chan et al., 2021).
F1_LEVELS = tuple(np.arange(25, 76, 5) / 100)
# Bins of scores behind the intervals; the values themselves are exact.
BOOTSTRAP_BINS = 2048


@dataclass(frozen=True)
class PixelEvaluation:
    """The result of `evaluate_pixels`: fractions, each with an interval over images.

    >>> found = evaluate_pixels([[[3.0, 0.5], [1.0, 0.0]]], [[[0, 0], [1, 255]]])
    >>> float(found.auroc), found.num_id_pixels, found.num_ood_pixels
    (0.5, 2, 1)
    """

    auroc: Estimate
    #: share of ID pixels flagged when 95 % of OOD pixels are
    fpr95: Estimate
    #: average precision, OOD positive
    ap: Estimate
    num_images: int
    num_ood_pixels: int
    num_id_pixels: int


def evaluate_pixels(
    scores: Iterable[ArrayLike],
    truth: Iterable[ArrayLike],
    *,
    confidence: float = 0.95,
    bootstrap: int = 1000,
    seed: int = 0,
) -> PixelEvaluation:
    """Pixel AUROC, FPR at 95 % TPR and average precision over all pixels of all images.

    Pixels of one image resemble each other, so the intervals draw whole images, with replacement,
    `bootstrap` times. They are over the images that were given: with a handful of images they are
    wide, and rightly so.

    Args:
        scores: maps (H, W), one per image, higher = more in-distribution.
        truth: maps (H, W) of 0 (ID), 1 (OOD) and 255 (ignored).
        confidence: of the intervals, a fraction.
        bootstrap, seed: number of random draws of images, and their seed.

    >>> found = evaluate_pixels([[[3.0, 2.0], [1.0, 0.0]]], [[[0, 0], [1, 1]]])
    >>> float(found.auroc), float(found.fpr95), float(found.ap)
    (1.0, 0.0, 1.0)
    """
    expect("confidence", confidence, 0 < confidence < 1, "a fraction between 0 and 1")
    expect("bootstrap", bootstrap, bootstrap >= 100, "at least 100 draws for an interval")
    inside: list[Floats] = []
    outside: list[Floats] = []
    for score, mask in _checked_pairs(scores, truth):
        inside.append(score[mask == ID])
        outside.append(score[mask == OOD])
    if not sum(map(len, inside)) or not sum(map(len, outside)):
        raise ValueError("the truth maps hold no ID pixel or no OOD pixel, expected some of each")
    # OOD is positive, by the negated score.
    counts = Counts.from_scores(np.concatenate(inside), np.concatenate(outside)).swapped()
    values = _measures(counts)
    lows, highs = _image_intervals(inside, outside, confidence, bootstrap, seed)
    estimates = []
    for value, low, high in zip(values, lows, highs):
        estimates.append(Estimate(value, min(low, value), max(high, value)))
    return PixelEvaluation(
        auroc=estimates[0],
        fpr95=estimates[1],
        ap=estimates[2],
        num_images=len(inside),
        num_ood_pixels=counts.num_positive,
        num_id_pixels=counts.num_negative,
    )


def _measures(counts: Counts) -> tuple[float, float, float]:
    """AUROC, FPR95 and AP."""
    return area(counts), false_positive_rate(counts, 0.95), average_precision(counts)


def _checked_pairs(
    scores: Iterable[ArrayLike], truth: Iterable[ArrayLike]
) -> Iterator[tuple[Floats, NDArray[Any]]]:
    """Score and truth of each image as arrays of one shape."""
    score_maps = list(scores)
    truth_maps = list(truth)
    if len(score_maps) != len(truth_maps):
        raise ValueError(
            f"{len(score_maps)} score maps and {len(truth_maps)} truth maps, expected one of each "
            "for every image"
        )
    for number, (score_map, truth_map) in enumerate(zip(score_maps, truth_maps)):
        score = np.asarray(score_map, dtype=np.float64)
        mask = np.asarray(truth_map)
        if score.ndim != 2 or score.shape != mask.shape:
            raise ValueError(
                f"image {number} has scores {score.shape} and truth {mask.shape}, expected two "
                "maps (H, W) of one shape"
            )
        if not np.isin(mask, (ID, OOD, IGNORED)).all():
            raise ValueError(f"the truth of image {number} holds other values than 0, 1 and 255")
        if np.isnan(score[mask != IGNORED]).any():
            raise ValueError(f"the scores of image {number} hold NaN")
        yield score, mask


def _image_intervals(
    inside: Sequence[Floats], outside: Sequence[Floats], confidence: float, draws: int, seed: int
) -> tuple[Floats, Floats]:
    """Limits of AUROC, FPR95 and AP from `draws` draws of images, on binned scores: a draw is then
    a sum of histograms, however many pixels there are."""
    pooled = np.concatenate([*inside, *outside])
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, BOOTSTRAP_BINS + 1)[1:-1]))
    id_counts = _histograms(inside, edges)
    ood_counts = _histograms(outside, edges)
    num_images = len(inside)
    rng = np.random.default_rng(seed)
    found: list[tuple[float, float, float]] = []
    for _ in range(draws):
        drawn_images = rng.integers(num_images, size=num_images)
        times_drawn = np.bincount(drawn_images, minlength=num_images)
        counts = _counts_of_bins(times_drawn @ id_counts, times_drawn @ ood_counts)
        # A draw without any ID pixel, or any OOD pixel, has no measures.
        if counts.num_positive > 0 and counts.num_negative > 0:
            found.append(_measures(counts))
    if not found:
        return np.zeros(3), np.ones(3)
    tail = (1 - confidence) / 2
    return np.quantile(found, tail, axis=0), np.quantile(found, 1 - tail, axis=0)


def _counts_of_bins(id_pixels: Floats, ood_pixels: Floats) -> Counts:
    """The pixels in each bin, from the lowest scores up, OOD being positive."""
    is_filled = id_pixels + ood_pixels > 0
    # A number for each bin in place of its scores, falling: the most OOD-like pixels come first.
    levels = -np.arange(len(id_pixels), dtype=np.float64)
    return Counts(ood_pixels[is_filled], id_pixels[is_filled], levels[is_filled])


def _histograms(scores_of_images: Sequence[Floats], edges: Floats) -> Floats:
    """(images, bins) how many pixels of each image lie between neighbouring edges."""
    found = []
    for scores in scores_of_images:
        bin_of_pixel = np.searchsorted(edges, scores, "right")
        found.append(np.bincount(bin_of_pixel, minlength=len(edges) + 1))
    return np.stack(found).astype(np.float64)


class Components(NamedTuple):
    """The result of `evaluate_components`, over all images.

    >>> evaluate_components([[[0, 0, 1, 1]]], [[[0, 0, 1, 1]]]).siou
    1.0
    """

    #: mean adjusted intersection over union of the true components
    siou: float
    #: mean precision of the predicted components; NaN if nothing was predicted
    ppv: float
    #: F1*, the mean of F1 over the thresholds 0.25 to 0.75
    f1: float
    num_true: int
    num_predicted: int


def evaluate_components(
    flagged: Iterable[ArrayLike], truth: Iterable[ArrayLike], *, min_pixels: int = 1
) -> Components:
    """sIoU, PPV and F1* of connected components, by the definitions of SegmentMeIfYouCan (Chan et
    al., 2021).

    With K(k̂) the true components that a predicted component k̂ touches, K̂(k) the predicted ones
    that a true component k touches, and A(k) the pixels of the true components other than k:

        sIoU(k) = |k ∩ K̂(k)| / |(k ∪ K̂(k)) \\ A(k)|        PPV(k̂) = |k̂ ∩ K(k̂)| / |k̂|

    At a threshold τ, k is found if sIoU(k) > τ and k̂ is a false alarm if PPV(k̂) ≤ τ; F1* is the
    mean of F1 = 2 TP / (2 TP + FN + FP) over τ = 0.25, 0.30, …, 0.75. Components are 8-connected.

    Args:
        flagged: maps (H, W) of booleans, True for a pixel that is called OOD.
        truth: maps (H, W) of 0 (ID), 1 (OOD) and 255 (ignored: neither side counts it).
        min_pixels: predicted components that are smaller are left out (SegmentMeIfYouCan takes 500
            for its anomaly track and 50 for its obstacle track).

    >>> evaluate_components([[[1, 1, 0, 0]]], [[[0, 1, 0, 0]]])
    Components(siou=0.5, ppv=0.5, f1=0.454..., num_true=1, num_predicted=1)
    """
    expect("min_pixels", min_pixels, min_pixels >= 1, "at least 1")
    true_scores: list[float] = []
    predicted_scores: list[float] = []
    flags = [np.asarray(each, dtype=np.float64) for each in flagged]
    for score, mask in _checked_pairs(flags, truth):
        is_counted = mask != IGNORED
        truths = connected((mask == OOD) & is_counted)
        predictions = connected((score > 0) & is_counted, min_pixels)
        true_scores += _adjusted_ious(truths, predictions)
        predicted_scores += _precisions(truths, predictions)
    if not true_scores:
        raise ValueError("the truth maps hold no OOD component")
    ppv = float(np.mean(predicted_scores)) if predicted_scores else float("nan")
    f1_at_levels = [_f1(true_scores, predicted_scores, level) for level in F1_LEVELS]
    return Components(
        siou=float(np.mean(true_scores)),
        ppv=ppv,
        f1=float(np.mean(f1_at_levels)),
        num_true=len(true_scores),
        num_predicted=len(predicted_scores),
    )


def connected(mask: NDArray[np.bool_], min_pixels: int = 1) -> NDArray[np.int64]:
    """(H, W) numbers of the 8-connected components of `mask`, 0 outside them; those with fewer than
    `min_pixels` are left out."""
    from scipy.ndimage import label

    numbers, count = label(mask, structure=np.ones((3, 3), dtype=int))
    sizes = np.bincount(numbers.ravel(), minlength=count + 1)
    is_kept = sizes >= min_pixels
    is_kept[0] = False
    renumbered = np.where(is_kept, np.cumsum(is_kept), 0)
    return np.asarray(renumbered[numbers], dtype=np.int64)


def _adjusted_ious(truths: NDArray[np.int64], predictions: NDArray[np.int64]) -> list[float]:
    """sIoU of each true component."""
    found = []
    for number in range(1, int(truths.max(initial=0)) + 1):
        own = truths == number
        touching = np.unique(predictions[own])
        covering = np.isin(predictions, touching[touching > 0])
        others = (truths > 0) & ~own
        union = (own | covering) & ~others
        found.append(float((own & covering).sum() / union.sum()))
    return found


def _precisions(truths: NDArray[np.int64], predictions: NDArray[np.int64]) -> list[float]:
    """PPV of each predicted component."""
    sizes = np.bincount(predictions.ravel())
    hits = np.bincount(predictions.ravel(), weights=(truths > 0).ravel(), minlength=len(sizes))
    return [float(hit / size) for hit, size in zip(hits[1:], sizes[1:])]


def _f1(true_scores: Sequence[float], predicted_scores: Sequence[float], level: float) -> float:
    found = sum(score > level for score in true_scores)
    missed = len(true_scores) - found
    false_alarms = sum(score <= level for score in predicted_scores)
    return 2 * found / (2 * found + missed + false_alarms)
