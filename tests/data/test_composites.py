"""Composites of four images and their sets of labels."""

from __future__ import annotations

import pytest
import torch

from fdbd.data.composites import composite_labels, composites


def test_a_composite_has_its_four_images_in_reading_order() -> None:
    images = torch.randint(0, 256, (8, 3, 5, 6), dtype=torch.uint8)
    joined = composites(images)
    assert joined.shape == (2, 3, 10, 12)
    assert joined.dtype == torch.uint8
    for number, picture in enumerate(joined):
        parts = [picture[:, :5, :6], picture[:, :5, 6:], picture[:, 5:, :6], picture[:, 5:, 6:]]
        assert torch.equal(torch.stack(parts), images[4 * number : 4 * number + 4])


def test_the_labels_of_a_composite_are_the_classes_of_its_parts() -> None:
    labels = torch.tensor([4, 4, 0, -1, -1, -1, -1, -1])
    assert composite_labels(labels, 5).tolist() == [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0]]


def test_images_that_do_not_fill_a_composite_are_refused() -> None:
    with pytest.raises(ValueError, match="6 images cannot be joined"):
        composites(torch.zeros(6, 3, 4, 4))
    with pytest.raises(ValueError, match="0 images cannot be joined"):
        composite_labels(torch.zeros(0, dtype=torch.int64), 3)
