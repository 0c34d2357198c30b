"""Augmentation: seeded, the same for any split of the batch, and doing what its name says."""

import numpy as np
import pytest
import torch

from fdbd.train.augment import Augment
from fdbd.train.presets import preset

LIGHT, STRONG = preset("supcon-small").augment, preset("supcon-resnet18").augment


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images():
    return torch.rand(12, 3, 8, 8, generator=generator(9))


@pytest.mark.parametrize("augment", [Augment(), Augment(padding="reflect"), LIGHT, STRONG])
def test_seeded_and_independent_of_the_split(augment, images):
    draws = augment.draw(12, generator())
    whole = augment.apply(images, draws)
    assert torch.equal(whole, augment.apply(images, augment.draw(12, generator())))
    parts = []
    for rows in (slice(0, 5), slice(5, 12)):
        draws_of_rows = {name: values[rows] for name, values in draws.items()}
        parts.append(augment.apply(images[rows], draws_of_rows))
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=0)
    assert not torch.equal(whole, augment.apply(images, augment.draw(12, generator(1))))
    assert whole.shape == images.shape
    assert 0 <= float(whole.min()) <= float(whole.max()) <= 1


def test_crop_shifts_and_flip_mirrors(images):
    augment = Augment(pad=2)
    draws = {"flip": torch.zeros(12).bool(), "offset": torch.full((12, 2), 2)}
    assert torch.equal(augment.apply(images, draws), images)
    assert torch.equal(
        augment.apply(images, {**draws, "flip": torch.ones(12).bool()}), images.flip(3)
    )
    moved = augment.apply(images, {**draws, "offset": torch.tensor([[3, 2]]).repeat(12, 1)})
    assert torch.equal(moved[:, :, :-1], images[:, :, 1:])
    assert not moved[:, :, -1].any()


def test_a_smaller_window_reaches_both_corners_and_keeps_pixels(images):
    augment = Augment(pad=1)
    draws = {"flip": torch.zeros(12).bool(), "offset": torch.zeros(12, 2).long()}
    corner = augment.apply(images, draws, size=6)
    assert torch.equal(corner[:, :, 1:, 1:], images[:, :, :5, :5])
    other = augment.apply(images, {**draws, "offset": torch.full((12, 2), 2)}, size=6)
    assert torch.equal(other[:, :, :-1, :-1], images[:, :, 3:, 3:])


def test_resized_crop_of_everything_is_the_image_and_takes_another_size(images):
    augment = Augment(area=(1.0, 1.0))
    draws = {
        "flip": torch.zeros(12).bool(),
        "size": torch.ones(12, 2),
        "centre": torch.zeros(12, 2),
    }
    torch.testing.assert_close(augment.apply(images, draws), images)
    assert augment.apply(images, draws, size=5).shape == (12, 3, 5, 5)
    torch.testing.assert_close(
        augment.apply(images, {**draws, "flip": torch.ones(12).bool()}), images.flip(3)
    )


def test_random_boxes_lie_inside_the_image():
    draws = Augment(area=(0.2, 1.0)).draw(2000, generator())
    assert float((draws["centre"].abs() + draws["size"]).max()) <= 1 + 1e-6
    area = draws["size"].prod(dim=1)
    assert float(area.min()) > 0.19
    assert float(area.mean()) == pytest.approx(0.6, abs=0.03)


def test_gray_drops_colour_and_keeps_brightness(images):
    augment = Augment(flip=False, pad=0, gray_p=1.0)
    out = augment.apply(images, augment.draw(12, generator()))
    torch.testing.assert_close(out[:, 0], out[:, 1], atol=1e-3, rtol=0)
    luma = (images * torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)).sum(1)
    torch.testing.assert_close(out[:, 0], luma, atol=5e-3, rtol=0)


def test_a_whole_turn_of_hue_changes_nothing(images):
    augment = Augment(flip=False, pad=0, hue=0.1)
    draws = {"flip": torch.zeros(12).bool(), "factors": torch.ones(12, 3), "turn": torch.ones(12)}
    torch.testing.assert_close(augment.apply(images, draws), images, atol=1e-4, rtol=0)


def test_a_window_larger_than_the_padded_image_is_refused():
    with pytest.raises(ValueError, match="a window of 20 does not fit images of 8×8 padded by 4"):
        Augment().apply(torch.zeros(1, 3, 8, 8), Augment().draw(1, generator()), size=20)


def test_a_blur_is_that_of_scipy_and_leaves_the_other_images_alone():
    ndimage = pytest.importorskip("scipy.ndimage")
    images = torch.rand(3, 3, 80, 80, generator=torch.Generator().manual_seed(0))
    deviations = torch.tensor([0.0, 0.7, 1.9])
    found = Augment(blur_p=1.0).apply(images, {"flip": torch.zeros(3).bool(), "blur": deviations})
    assert torch.equal(found[0], images[0])
    for place in (1, 2):
        sigma = float(deviations[place])
        # A kernel of radius 4, a twentieth of the side; scipy's "mirror" is torch's "reflect".
        expected = ndimage.gaussian_filter(
            images[place].numpy(), (0, sigma, sigma), mode="mirror", radius=(0, 4, 4)
        )
        assert np.allclose(found[place].numpy(), expected, atol=1e-5)


def test_half_of_the_images_are_blurred_by_a_standard_deviation_up_to_two_pixels():
    draws = Augment(blur_p=0.5).draw(4000, torch.Generator().manual_seed(0))["blur"]
    blurred = draws[draws > 0]
    assert len(blurred) / 4000 == pytest.approx(0.5, abs=0.03)
    assert 0.1 <= blurred.min() < 0.15
    assert 1.95 < blurred.max() <= 2.0
