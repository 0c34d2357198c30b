"""Pasted objects: exact masks, the same for the same seed."""

import numpy as np

from fdbd.data.pasting import paste_object


def test_a_pixel_differs_from_the_photograph_only_inside_the_mask():
    random = np.random.default_rng(3)
    image = random.integers(0, 100, (60, 90, 3), dtype=np.uint8)
    filling = random.integers(150, 256, (20, 20, 3), dtype=np.uint8)
    for seed in range(20):
        found = paste_object(image, filling, np.random.default_rng(seed))
        is_changed = (found.image != image).any(axis=2)
        assert np.array_equal(is_changed, found.mask)
        assert 0.005 < found.mask.mean() < 0.4


def test_the_same_seed_pastes_the_same_object():
    image = np.zeros((50, 50, 3), np.uint8)
    first = paste_object(image, image + 9, np.random.default_rng(1))
    again = paste_object(image, image + 9, np.random.default_rng(1))
    other = paste_object(image, image + 9, np.random.default_rng(2))
    assert np.array_equal(first.image, again.image)
    assert not np.array_equal(first.mask, other.mask)
    assert not image.any()
