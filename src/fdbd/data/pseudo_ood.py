"""Pseudo-OOD images: held-out in-distribution images, changed until they show nothing that a
classifier was trained on.

They stand in for OOD data that nobody has. They are guides for weighing detectors and a smoke test
for a guard, not a measurement on real OOD data: most of them are far from any photograph.
All functions take and return float images (N, C, H, W), whatever their normalisation, and draw from
the generator that they are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fdbd.core.pixels import Pixels

Limits = tuple[Tensor, Tensor]
"""The least and the largest value that a pixel may have, (1, C, 1, 1) each."""
Change = Callable[[Tensor, Limits, torch.Generator], Tensor]

GRID = 8
"""Patches along a side for the shuffle, and copies of a tiny crop along a side."""


@dataclass(frozen=True)
class Kind:
    """One way to turn in-distribution images into pseudo-OOD images."""

    name: str
    summary: str
    """A few words on the change, for the caption of a picture."""
    change: Change


def make_kinds(
    images: Tensor,
    count: int = 50,
    kinds: Sequence[str] | None = None,
    *,
    limits: Limits | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Pseudo-OOD images of each kind, (count, C, H, W), made of in-distribution images.

    Each kind is made of other images as far as there are enough. The same images and seed give the
    same result.

    Args:
        images: (N, C, H, W) floating-point images, as the model takes them.
        count: how many of each kind; images are used again if there are fewer.
        kinds: names of `KINDS`; None: those that weigh detectors, `WEIGHING`.
        limits: the range of pixel values, (1, C, 1, 1) each; None: that of `images`.
        seed: of everything that is drawn.

    >>> kinds = make_kinds(torch.rand(6, 3, 32, 32), count=4, kinds=["noise", "blur"])
    >>> {name: tuple(images.shape) for name, images in kinds.items()}
    {'noise': (4, 3, 32, 32), 'blur': (4, 3, 32, 32)}
    """
    check_images(images)
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 image of each kind")
    images = images.detach().to("cpu", torch.float32)
    if limits is None:
        limits = value_range(images)
    made = {}
    names = WEIGHING if kinds is None else kinds
    for number, name in enumerate(names):
        if name not in KINDS:
            raise ValueError(f"no kind is called {name!r}, expected one of {', '.join(KINDS)}")
        generator = torch.Generator().manual_seed(seed * 1000 + list(KINDS).index(name))
        rows = torch.arange(number * count, (number + 1) * count) % len(images)
        changed = KINDS[name].change(images[rows], limits, generator)
        made[name] = torch.maximum(torch.minimum(changed, limits[1]), limits[0])
    return made


def kinds_of_pixels(
    squares: Pixels, names: Sequence[str], count: int, seed: int = 0
) -> dict[str, Pixels]:
    """Pseudo-OOD images of each kind, uint8 (count, side, side, 3), of images of that form."""
    images = torch.from_numpy(squares).permute(0, 3, 1, 2).float()
    black = torch.zeros(1, 3, 1, 1)
    made = make_kinds(images, count, names, limits=(black, black + 255), seed=seed)
    pixels = {}
    for name, kind in made.items():
        by_row = kind.round().to(torch.uint8).permute(0, 2, 3, 1)
        pixels[name] = by_row.contiguous().numpy()
    return pixels


def check_images(images: object) -> None:
    """ValueError unless these are images that kinds can be made of."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        found = type(images).__name__
        if isinstance(images, Tensor):
            found = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(
            f"pseudo-OOD images are made of floating-point images (N, C, H, W), not of {found}"
        )
    if not len(images) or min(images.shape[2:]) < GRID:
        shape = tuple(images.shape)
        raise ValueError(
            f"images have shape {shape}, expected at least one, with sides of at least {GRID} "
            "pixels"
        )


def value_range(images: Tensor) -> Limits:
    """The least and the largest value of each channel, over all images."""
    low = images.amin(dim=(0, 2, 3), keepdim=True)
    high = images.amax(dim=(0, 2, 3), keepdim=True)
    return low, high


def shuffle_patches(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """The image cut into a grid of 8 × 8 patches, which change places: textures and colours stay,
    shapes go."""
    count, channels, height, width = images.shape
    # Sides that are not a multiple of the grid are resized to the next one, and back afterwards.
    tall = _next_multiple(height)
    wide = _next_multiple(width)
    even = images
    if (tall, wide) != (height, width):
        even = _resize(images, tall, wide)
    grid = even.reshape(count, channels, GRID, tall // GRID, GRID, wide // GRID)
    # (count, number of the patch, channels, height and width of a patch)
    patches = grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    order = torch.rand(count, GRID * GRID, generator=generator).argsort(dim=1)
    moved = torch.stack([patch[places] for patch, places in zip(patches, order)])
    # And back to images.
    grid = moved.unflatten(1, (GRID, GRID)).permute(0, 3, 1, 4, 2, 5)
    shuffled: Tensor = grid.reshape(count, channels, tall, wide)
    if (tall, wide) != (height, width):
        shuffled = _resize(shuffled, height, width)
    return shuffled


def scramble_phases(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """The image's own amplitude spectrum with random phases, the same shift in all channels:
    colours and coarseness stay, edges go."""
    spectrum = torch.fft.rfft2(images)
    noise = torch.rand(len(images), 1, *images.shape[2:], generator=generator)
    # The phases of a real image, so that the inverse transform is real, too.
    shift = torch.angle(torch.fft.rfft2(noise))
    shift[..., 0, 0] = 0
    scrambled: Tensor = torch.fft.irfft2(spectrum * torch.exp(1j * shift), s=images.shape[2:])
    return scrambled


def spectrum_noise(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """Noise with the mean amplitude spectrum of all the images, and their mean and spread of each
    channel: coloured clouds."""
    amplitude = torch.fft.rfft2(images - images.mean(dim=(2, 3), keepdim=True)).abs()
    amplitude = amplitude.mean(dim=0, keepdim=True)
    white = torch.randn(images.shape, generator=generator)
    noise: Tensor = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=images.shape[2:])
    noise = noise / noise.std(dim=(2, 3), keepdim=True).clamp_min(1e-12)
    spread = images.std(dim=(0, 2, 3), keepdim=True)
    return images.mean(dim=(0, 2, 3), keepdim=True) + spread * noise


def tile_tiny_crops(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """An eighth of the side, cut out at a random place and repeated over the whole image: a
    texture."""
    height, width = images.shape[2:]
    tall = math.ceil(height / GRID)
    wide = math.ceil(width / GRID)
    tops = _random_integers(height - tall, len(images), generator)
    lefts = _random_integers(width - wide, len(images), generator)
    tiled = []
    for image, top, left in zip(images, tops, lefts):
        crop = image[:, top : top + tall, left : left + wide]
        tiled.append(crop.repeat(1, GRID, GRID)[:, :height, :width])
    return torch.stack(tiled)


def posterise(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """Two levels in each channel, split at the channel's median: flat areas in eight colours."""
    low, high = limits
    median: Tensor = images.flatten(2).median(dim=2).values[:, :, None, None]
    return torch.where(images > median, high, low)


def uniform_noise(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """Independent values for each pixel, evenly over the range."""
    low, high = limits
    return low + (high - low) * torch.rand(images.shape, generator=generator)


def enlarge_corners(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """A corner of a fifth of the side, enlarged to the whole image: mostly background, out of
    focus."""
    height, width = images.shape[2:]
    tall = max(2, height // 5)
    wide = max(2, width // 5)
    corners = _random_integers(3, len(images), generator)
    enlarged = []
    for image, corner in zip(images, corners):
        is_bottom, is_right = divmod(corner, 2)
        rows = slice(height - tall, height) if is_bottom else slice(0, tall)
        columns = slice(width - wide, width) if is_right else slice(0, wide)
        enlarged.append(_resize(image[None, :, rows, columns], height, width)[0])
    return torch.stack(enlarged)


def blur(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """A Gaussian with a standard deviation of a tenth of the side: only the largest shapes stay."""
    blurred = images
    for axis, side in ((2, images.shape[2]), (3, images.shape[3])):
        blurred = _smooth(blurred, side / 10, axis)
    return blurred


def invert(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """The negative: shapes stay, colours and light change."""
    low, high = limits
    return low + high - images


def mix_pairs(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """The mean of two images, each with the next: two objects, neither of them whole."""
    return (images + images.roll(1, dims=0)) / 2


def quarter(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """Four images, one in each quarter, each showing its own quarter there: parts of objects."""
    top = images.shape[2] // 2
    left = images.shape[3] // 2
    joined = images.clone()
    joined[:, :, :top, left:] = images.roll(1, dims=0)[:, :, :top, left:]
    joined[:, :, top:, :left] = images.roll(2, dims=0)[:, :, top:, :left]
    joined[:, :, top:, left:] = images.roll(3, dims=0)[:, :, top:, left:]
    return joined


def turn(images: Tensor, limits: Limits, generator: torch.Generator) -> Tensor:
    """Upside down, by a half turn: everything stays but the direction."""
    return images.flip(2, 3)


_ALL = (
    Kind("patches", "8 × 8 patches change places", shuffle_patches),
    Kind("phases", "random phases, own spectrum", scramble_phases),
    Kind("spectrum", "noise with the images' spectrum", spectrum_noise),
    Kind("tiles", "a tiny crop, repeated", tile_tiny_crops),
    Kind("poster", "two levels in each channel", posterise),
    Kind("noise", "uniform noise", uniform_noise),
    Kind("corner", "a corner, enlarged", enlarge_corners),
    Kind("blur", "strong blur", blur),
    Kind("negative", "the negative", invert),
    Kind("mixture", "the mean of two images", mix_pairs),
    Kind("quarters", "quarters of four images", quarter),
    Kind("half-turn", "upside down", turn),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _ALL}
"""All kinds by name. The last four are nearer to the distribution than the others."""
WEIGHING = tuple(kind.name for kind in _ALL[:8])
"""The kinds that weigh detectors."""


def _next_multiple(side: int) -> int:
    return math.ceil(side / GRID) * GRID


def _resize(images: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(images, (height, width), mode="bilinear", align_corners=False)


def _random_integers(largest: int, count: int, generator: torch.Generator) -> list[int]:
    """`count` integers from 0 to `largest`, both included."""
    numbers: list[int] = torch.randint(largest + 1, (count,), generator=generator).tolist()
    return numbers


def _smooth(images: Tensor, deviation: float, axis: int) -> Tensor:
    """Convolved with a Gaussian along one axis; the edge is repeated."""
    reach = math.ceil(3 * deviation)
    offsets = torch.arange(-reach, reach + 1, dtype=images.dtype)
    weights = torch.exp(-0.5 * (offsets / deviation) ** 2)
    weights = weights / weights.sum()
    lines = images.movedim(axis, 3)
    padded = F.pad(lines, (reach, reach, 0, 0), mode="replicate")
    smoothed = padded.unfold(3, len(weights), 1) @ weights
    return smoothed.movedim(3, axis)
