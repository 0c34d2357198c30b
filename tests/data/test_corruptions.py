"""Corruptions: deterministic, of the published strength, and equal to the definitions written out
for one image."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fdbd.data import corruptions
from fdbd.data.corruptions import CORRUPTIONS, FAMILIES, corrupt, mixed, mixture

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Smooth random pictures: 12 of 32 × 32."""
    rng = np.random.default_rng(0)
    coarse = rng.uniform(0, 255, (12, 8, 8, 3))
    fine = coarse.repeat(4, axis=1).repeat(4, axis=2) + rng.normal(0, 12, (12, 32, 32, 3))
    return np.clip(fine, 0, 255).astype(np.uint8)


def test_all_four_families_are_there() -> None:
    assert set(FAMILIES) == {"noise", "blur", "weather", "digital"}
    assert len(CORRUPTIONS) == 14
    assert "frost" not in CORRUPTIONS


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_changes_images_the_same_way_every_time(images: np.ndarray, name: str) -> None:
    once = corrupt(images, name, 3)
    assert once.shape == images.shape
    assert once.dtype == np.uint8
    assert not np.array_equal(once, images)
    np.testing.assert_array_equal(corrupt(images, name, 3), once)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_first_images_do_not_depend_on_those_that_follow(images: np.ndarray, name: str) -> None:
    np.testing.assert_array_equal(corrupt(images[:5], name, 2), corrupt(images, name, 2)[:5])


@pytest.mark.parametrize("name", sorted(set(CORRUPTIONS) - {"elastic_transform", "glass_blur"}))
def test_severity_five_is_farther_from_the_original_than_one(images: np.ndarray, name: str) -> None:
    weak, strong = (np.abs(corrupt(images, name, s).astype(int) - images).mean() for s in (1, 5))
    assert strong > weak > 0


def test_another_seed_gives_other_noise(images: np.ndarray) -> None:
    assert not np.array_equal(
        corrupt(images, "gaussian_noise", 1), corrupt(images, "gaussian_noise", 1, seed=1)
    )


def test_numpys_global_generator_is_not_touched(images: np.ndarray) -> None:
    np.random.seed(7)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    for name in CORRUPTIONS:
        corrupt(images[:2], name, 2)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize(
    ("severity", "sigma"), [(1, 0.04), (2, 0.06), (3, 0.08), (4, 0.09), (5, 0.10)]
)
def test_gaussian_noise_has_the_published_deviation(severity: int, sigma: float) -> None:
    grey = np.full((20, 32, 32, 3), 128, np.uint8)
    assert corrupt(grey, "gaussian_noise", severity).std() / 255 == pytest.approx(sigma, rel=0.02)


def test_shot_noise_has_the_variance_of_photon_counts() -> None:
    # 0.4 of full scale; at severity 5 that is 20 photons.
    grey = np.full((20, 32, 32, 3), 102, np.uint8)
    assert corrupt(grey, "shot_noise", 5).std() / 255 == pytest.approx(math.sqrt(20) / 50, rel=0.02)


def test_impulse_noise_hits_the_published_share_with_black_and_white() -> None:
    grey = np.full((40, 32, 32, 3), 128, np.uint8)
    noisy = corrupt(grey, "impulse_noise", 4)
    assert (noisy == 0).mean() == pytest.approx(0.025, rel=0.05)
    assert (noisy == 255).mean() == pytest.approx(0.025, rel=0.05)


def test_contrast_shrinks_every_channel_towards_its_mean(images: np.ndarray) -> None:
    out = corrupt(images, "contrast", 3)
    x = images / 255.0
    for channel in range(3):
        mean = x[0, :, :, channel].mean()
        expected = np.floor(np.clip((x[0, :, :, channel] - mean) * 0.4 + mean, 0, 1) * 255)
        np.testing.assert_allclose(out[0, :, :, channel], expected, atol=1)


def test_brightness_adds_to_the_value_of_hsv(images: np.ndarray) -> None:
    import colorsys

    out = corrupt(images, "brightness", 4)
    for row, column in [(0, 0), (5, 17), (31, 31)]:
        hue, saturation, value = colorsys.rgb_to_hsv(*(images[1, row, column] / 255.0))
        expected = np.array(colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1))) * 255
        np.testing.assert_allclose(out[1, row, column], expected, atol=1)
    # Black has no hue to keep.
    assert corrupt(np.zeros((1, 32, 32, 3), np.uint8), "brightness", 4).max() == 51


def test_motion_blur_is_half_a_gaussian_along_a_line() -> None:
    x = np.random.default_rng(1).uniform(size=(1, 32, 32, 3))
    radius, sigma, degrees = 6, 2.0, 30.0
    out = corruptions._smear(x, radius, sigma, np.array([degrees]))
    weights = [math.exp(-(tap**2) / (2 * sigma**2)) for tap in range(2 * radius + 1)]
    for row, column in [(0, 0), (10, 20), (31, 5)]:
        expected = np.zeros(3)
        for tap, weight in enumerate(weights):
            r = min(max(row + math.ceil(tap * math.sin(math.radians(degrees)) - 0.5), 0), 31)
            c = min(max(column + math.ceil(tap * math.cos(math.radians(degrees)) - 0.5), 0), 31)
            expected += weight / sum(weights) * x[0, r, c]
        np.testing.assert_allclose(out[0, row, column], expected, atol=1e-12)


def test_zoom_equals_scipys_linear_zoom_of_the_centre() -> None:
    from scipy import ndimage

    x = np.random.default_rng(2).uniform(size=(2, 32, 32, 3))
    for factor in (1.0, 1.07, 1.25, 1.75, 2.25):
        inner = math.ceil(32 / factor)
        top = (32 - inner) // 2
        whole = ndimage.zoom(
            x[0, top : top + inner, top : top + inner], (factor, factor, 1), order=1
        )
        trim = (whole.shape[0] - 32) // 2
        np.testing.assert_allclose(
            corruptions._zoom(x, factor)[0], whole[trim : trim + 32, trim : trim + 32], atol=1e-9
        )


@pytest.mark.parametrize(("border", "mode"), [("reflect", "mirror"), ("symmetric", "reflect")])
def test_sampling_equals_scipys_linear_interpolation(border: str, mode: str) -> None:
    from scipy import ndimage

    rng = np.random.default_rng(3)
    x = rng.uniform(size=(2, 32, 32, 3))
    rows, columns = rng.uniform(-20, 52, (2, 2, 32, 32))
    out = corruptions._sample(x, rows, columns, border)
    for image in range(2):
        for channel in range(3):
            expected = ndimage.map_coordinates(
                x[image, :, :, channel], [rows[image], columns[image]], order=1, mode=mode
            )
            np.testing.assert_allclose(out[image, :, :, channel], expected, atol=1e-9)


def test_an_elastic_map_sends_the_moved_corners_back() -> None:
    # Severity 1 is the affine part alone: a picture of its own coordinates shows where each pixel
    # came from.
    axis = np.arange(32) / 31.0
    picture = np.stack([*np.meshgrid(axis, axis), np.zeros((32, 32))], axis=2)[None]
    draw = corruptions._draws(5)
    shift = corruptions._draws(5)("uniform", -0.08 * 32, 0.08 * 32, size=(1, 3, 2))[0]
    out = corruptions._elastic_transform(picture, 0, draw)[0] * 31
    # Centre 16, a third of the side 10: (x, y).
    corners = np.array([[26, 26], [26, 6], [6, 6]])
    for corner, moved in zip(corners, corners + shift):
        left, top = np.floor(moved).astype(int)
        right, down = moved - (left, top)
        patch = out[top : top + 2, left : left + 2, :2]
        value = (patch[0, 0] * (1 - right) + patch[0, 1] * right) * (1 - down) + (
            patch[1, 0] * (1 - right) + patch[1, 1] * right
        ) * down
        np.testing.assert_allclose(value, corner, atol=1e-6)


def test_glass_blur_takes_every_pixel_from_its_neighbourhood() -> None:
    # At severity 1 the Gaussians are too narrow to matter: values move, none is invented.
    image = np.arange(32 * 32, dtype=np.int64).reshape(1, 32, 32, 1).repeat(3, axis=3)
    colours = np.concatenate(
        [image[..., :1] % 256, image[..., :1] // 256, image[..., :1] * 0], axis=3
    ).astype(np.uint8)
    out = corrupt(colours, "glass_blur", 1)
    assert not np.array_equal(out, colours)
    # 256 pixels are 8 rows: nothing moves that far.
    assert (np.abs(out.astype(int) - colours)[..., 1] <= 1).all()


def test_fog_is_a_cloud_from_nought_to_one() -> None:
    cloud = corruptions._plasma(3, 32, 2.0, corruptions._draws(0))
    assert cloud.shape == (3, 32, 32, 1)
    np.testing.assert_allclose(cloud.min(axis=(1, 2, 3)), 0)
    np.testing.assert_allclose(cloud.max(axis=(1, 2, 3)), 1)
    odd = corruptions._plasma(3, 30, 2.0, corruptions._draws(0))
    assert odd.shape == (3, 30, 30, 1)
    assert odd.min() == 0
    assert odd.max() == 1


def test_mixed_gives_each_family_a_quarter_and_each_corruption_its_share() -> None:
    images = np.random.default_rng(4).integers(0, 256, (480, 32, 32, 3), dtype=np.uint8)
    out = mixed(images, 1)
    which = mixture(480)
    assert out.shape == images.shape
    for names in FAMILIES.values():
        counts = [(which == name).sum() for name in names]
        assert sum(counts) == 120
        assert max(counts) - min(counts) <= 1
    np.testing.assert_array_equal(mixed(images, 1), out)
    row = int(np.flatnonzero(which == "contrast")[0])
    np.testing.assert_array_equal(out[row], corrupt(images[row : row + 1], "contrast", 1)[0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sepia", 1), "no corruption is called 'sepia'"),
        (("fog", 0), "severity is 0, expected 1 to 5"),
        (("fog", 6), "severity is 6"),
    ],
)
def test_bad_names_and_severities_are_refused(
    images: np.ndarray, args: tuple[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        corrupt(images, *args)


def test_images_of_another_form_are_refused(images: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        corrupt(images / 255.0, "fog", 1)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_images_that_are_not_square_are_corrupted_too(shape: tuple[int, int]) -> None:
    rectangles = np.random.default_rng(0).integers(0, 256, (3, *shape, 3), np.uint8)
    for name in CORRUPTIONS:
        found = corrupt(rectangles, name, 5)
        assert found.shape == rectangles.shape
        assert (found != rectangles).any(axis=(1, 2, 3)).all(), name
    # What changes each pixel for itself is the same in a part of a square.
    square = np.pad(rectangles, [(0, 0), *((0, 40 - side) for side in shape), (0, 0)])
    part = corrupt(square, "brightness", 3)[:, : shape[0], : shape[1]]
    np.testing.assert_array_equal(corrupt(rectangles, "brightness", 3), part)


def test_no_images_give_no_images() -> None:
    for name in CORRUPTIONS:
        assert corrupt(np.empty((0, 32, 32, 3), np.uint8), name, 1).shape == (0, 32, 32, 3)
