"""Measures of score maps against definitions written with sets and loops."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fdbd.metrics import evaluate_components, evaluate_pixels


def scene(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A score map and its truth: a few rectangles of OOD, a border that is ignored."""
    rng = np.random.default_rng(seed)
    truth = np.zeros((20, 24), dtype=np.uint8)
    for _ in range(3):
        top, left = rng.integers(2, 14, 2)
        truth[top : top + rng.integers(2, 5), left : left + rng.integers(2, 6)] = 1
    truth[0] = 255
    scores = rng.normal(size=truth.shape).round(1) - 1.5 * (truth == 1)
    return scores, truth


def test_pixel_measures_equal_those_of_all_pixels_in_one_list() -> None:
    scores, truth = zip(*(scene(seed) for seed in range(5)))
    found = evaluate_pixels(scores, truth)
    pixels = np.concatenate([s[t != 255] for s, t in zip(scores, truth)])
    is_ood = np.concatenate([t[t != 255] == 1 for t in truth])
    assert found.auroc == pytest.approx(roc_auc_score(is_ood, -pixels))
    assert found.ap == pytest.approx(average_precision_score(is_ood, -pixels))
    # The strictest threshold that flags 95 % of the OOD pixels.
    flagged = sorted(pixels[is_ood])[int(np.ceil(0.95 * is_ood.sum())) - 1]
    assert found.fpr95 == pytest.approx((pixels[~is_ood] <= flagged).mean())
    assert (found.num_images, found.num_ood_pixels) == (5, is_ood.sum())
    for estimate in (found.auroc, found.fpr95, found.ap):
        assert estimate.low <= estimate <= estimate.high


def test_intervals_are_wider_if_the_pixels_of_an_image_resemble_each_other() -> None:
    rng = np.random.default_rng(0)
    truth = [np.tile([0, 1], (8, 8)) for _ in range(12)]
    alone = [rng.normal(size=t.shape) - t for t in truth]
    # The same spread of scores, but shared by all OOD pixels of an image.
    alike = [rng.normal(size=t.shape) * (t == 0) + (rng.normal() - 1) * (t == 1) for t in truth]
    widths = [
        evaluate_pixels(scores, truth).auroc.high - evaluate_pixels(scores, truth).auroc.low
        for scores in (alone, alike)
    ]
    assert widths[1] > 2 * widths[0]


def flood(mask: np.ndarray) -> list[set[tuple[int, int]]]:
    """Connected components as sets of places, by walking to the eight neighbours."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(mask))}
    found = []
    while left:
        component = {left.pop()}
        border = set(component)
        while border:
            near = {(y + dy, x + dx) for y, x in border for dy in (-1, 0, 1) for dx in (-1, 0, 1)}
            border = near & left
            left -= border
            component |= border
        found.append(component)
    return found


def components_by_sets(
    flagged: list[np.ndarray], truth: list[np.ndarray], min_pixels: int
) -> tuple[float, float, float]:
    ious: list[float] = []
    precisions: list[float] = []
    for flags, mask in zip(flagged, truth):
        truths = flood(mask == 1)
        predictions = [c for c in flood((flags > 0) & (mask != 255)) if len(c) >= min_pixels]
        for own in truths:
            covering = set().union(*(c for c in predictions if c & own))
            others = set().union(*(c for c in truths if c is not own))
            ious.append(len(own & covering) / len((own | covering) - others))
        for own in predictions:
            touched = set().union(*(c for c in truths if c & own))
            precisions.append(len(own & touched) / len(own))
    scores = []
    for level in np.arange(25, 76, 5) / 100:
        hits = sum(iou > level for iou in ious)
        misses = len(ious) - hits
        alarms = sum(precision <= level for precision in precisions)
        scores.append(2 * hits / (2 * hits + misses + alarms))
    return float(np.mean(ious)), float(np.mean(precisions)), float(np.mean(scores))


@pytest.mark.parametrize("min_pixels", [1, 4])
def test_components_equal_their_definition_with_sets(min_pixels: int) -> None:
    scenes = [scene(seed) for seed in range(8)]
    flagged = [scores < -1.2 for scores, _ in scenes]
    truth = [mask for _, mask in scenes]
    found = evaluate_components(flagged, truth, min_pixels=min_pixels)
    expected = components_by_sets(flagged, truth, min_pixels)
    assert (found.siou, found.ppv, found.f1) == pytest.approx(expected)


def test_one_prediction_over_two_objects_is_not_held_against_either() -> None:
    """The adjustment of sIoU: pixels of another object do not count as too much."""
    truth = [[1, 1, 0, 1, 1]]
    found = evaluate_components([[[1, 1, 1, 1, 1]]], [truth])
    assert found.siou == pytest.approx(2 / 3)
    assert found.ppv == pytest.approx(4 / 5)
    assert (found.num_true, found.num_predicted) == (2, 1)


def test_nothing_predicted_finds_nothing() -> None:
    found = evaluate_components([np.zeros((3, 3))], [np.eye(3)])
    assert (found.siou, found.f1, found.num_predicted) == (0.0, 0.0, 0)
    assert np.isnan(found.ppv)


def test_bad_maps_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="1 score maps and 2 truth maps"):
        evaluate_pixels([np.zeros((2, 2))], [np.zeros((2, 2))] * 2)
    with pytest.raises(ValueError, match="expected two maps"):
        evaluate_pixels([np.zeros((2, 2))], [np.zeros((2, 3))])
    with pytest.raises(ValueError, match="other values than 0, 1 and 255"):
        evaluate_pixels([np.zeros((2, 2))], [np.full((2, 2), 7)])
    with pytest.raises(ValueError, match="no OOD pixel"):
        evaluate_pixels([np.zeros((2, 2))], [np.zeros((2, 2))])
    with pytest.raises(ValueError, match="no OOD component"):
        evaluate_components([np.zeros((2, 2))], [np.zeros((2, 2))])
