"""Pseudo-OOD images: shapes, ranges and repeatability of all kinds, and what each one keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdbd.data.pseudo_ood import KINDS, WEIGHING, make_kinds


def photographs(count: int = 6, side: int = 32, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """Smooth random images, with values of both signs as after a normalisation."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, channels, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic")
    return smooth + 0.05 * torch.randn(count, channels, side, side, generator=generator)


@settings(max_examples=15)
@given(st.integers(8, 40), st.integers(8, 40), st.sampled_from([1, 3]), st.integers(1, 5))
def test_every_kind_has_the_shape_and_the_range_of_its_images(
    height: int, width: int, channels: int, count: int
) -> None:
    images = torch.randn(3, channels, height, width, generator=torch.Generator().manual_seed(1))
    low = images.amin(dim=(0, 2, 3), keepdim=True)
    high = images.amax(dim=(0, 2, 3), keepdim=True)
    for name, made in make_kinds(images, count, list(KINDS)).items():
        assert made.shape == (count, channels, height, width), name
        assert torch.isfinite(made).all(), name
        assert (made >= low).all(), name
        assert (made <= high).all(), name


def test_the_same_seed_gives_the_same_images_and_another_seed_others() -> None:
    images = photographs()
    first, again, other = (make_kinds(images, 4, seed=seed) for seed in (0, 0, 1))
    assert tuple(first) == WEIGHING
    for name in WEIGHING:
        assert torch.equal(first[name], again[name])
    assert not torch.equal(first["patches"], other["patches"])


def test_a_kind_is_the_same_whichever_others_are_made() -> None:
    images = photographs(50)
    alone = make_kinds(images, 50, ["noise"])["noise"]
    assert torch.equal(alone, make_kinds(images, 50, ["blur", "noise"])["noise"])


def test_the_images_that_were_given_are_not_changed() -> None:
    images = photographs()
    before = images.clone()
    make_kinds(images, 6, list(KINDS))
    assert torch.equal(images, before)


def test_shuffled_patches_hold_the_same_pixels_in_other_places() -> None:
    images = photographs(side=32)
    shuffled = make_kinds(images, 6, ["patches"])["patches"]
    assert torch.equal(shuffled.flatten(1).sort().values, images.flatten(1).sort().values)
    assert (shuffled != images).float().mean() > 0.5


def test_scrambled_phases_keep_the_spectrum() -> None:
    images = photographs()
    wide = (images.new_full((1, 3, 1, 1), -100), images.new_full((1, 3, 1, 1), 100))
    scrambled = make_kinds(images, 6, ["phases"], limits=wide)["phases"]
    torch.testing.assert_close(
        torch.fft.rfft2(scrambled).abs(), torch.fft.rfft2(images).abs(), rtol=1e-3, atol=1e-2
    )
    assert (scrambled - images).abs().mean() > 0.1


def test_a_poster_has_two_levels_in_each_channel() -> None:
    poster = make_kinds(photographs(), 6, ["poster"])["poster"]
    for channel in range(3):
        assert len(poster[:, channel].unique()) == 2


def test_tiles_repeat_and_blur_removes_what_is_fine() -> None:
    images = photographs()
    tiles = make_kinds(images, 6, ["tiles"])["tiles"]
    torch.testing.assert_close(tiles[..., :4], tiles[..., 4:8])
    grain = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    blurred = make_kinds(grain, 4, ["blur"])["blur"]
    assert blurred.diff(dim=3).abs().mean() < 0.05 * grain.diff(dim=3).abs().mean()


def test_the_nearer_kinds_are_what_they_say() -> None:
    images = photographs(4)
    made = make_kinds(images, 4, ["half-turn"])["half-turn"]
    assert torch.equal(made, images.rot90(2, (2, 3)))
    mixture = make_kinds(images, 4, ["mixture"])["mixture"]
    torch.testing.assert_close(mixture[1], (images[0] + images[1]) / 2)


@pytest.mark.parametrize(
    ("images", "options", "says"),
    [
        (torch.zeros(2, 10), {}, "not of torch.float32 \\(2, 10\\)"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), {}, "not of torch.uint8"),
        ([[0.0]], {}, "not of list"),
        (torch.zeros(2, 3, 4, 4), {}, "sides of at least 8"),
        (torch.zeros(0, 3, 32, 32), {}, "at least one"),
        (torch.zeros(2, 3, 32, 32), {"count": 0}, "count is 0"),
        (torch.zeros(2, 3, 32, 32), {"kinds": ["fog"]}, "no kind is called 'fog'"),
    ],
)
def test_what_no_kind_can_be_made_of_is_refused(images, options, says) -> None:
    with pytest.raises(ValueError, match=says):
        make_kinds(images, **options)
