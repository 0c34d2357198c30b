"""Random image transformations on whole batches, in plain torch.

Drawing and applying are apart: the numbers are drawn for the joint batch from one seeded generator,
so a process that holds a part of the batch applies its rows of them, and any number of processes
sees the same images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

Draws = dict[str, Tensor]

# RGB to YIQ (NTSC). Brightness, saturation and hue are linear there, so all three are one 3×3
# matrix per sample.
_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])


@dataclass(frozen=True)
class Augment:
    """The random changes of an image; the default is the flip and pad-4 crop of He et al. (2016).

    pad: pixels of padding before a random crop of the original size; padding: "constant" (zeros) or
        "reflect".
    area: range of the share of the image that a random resized crop keeps, aspect ratio 3/4 to 4/3;
        None for none.
    jitter, hue: largest relative change of brightness, contrast and saturation, largest turn of hue
        in fractions of the colour circle, applied with probability `jitter_p`.
    gray_p: probability of dropping colour.
    blur_p: probability of a Gaussian blur with a standard deviation of 0.1 to 2 pixels, whose
        kernel is a tenth of the side (Chen et al., 2020, as are the colours)."""

    flip: bool = True
    pad: int = 4
    padding: str = "constant"
    area: tuple[float, float] | None = None
    jitter: float = 0.0
    hue: float = 0.0
    jitter_p: float = 0.8
    gray_p: float = 0.0
    blur_p: float = 0.0

    def draw(self, n: int, generator: Generator) -> Draws:
        """Random numbers for n images: each value has n rows."""

        def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
            return low + (high - low) * torch.rand(n, *shape, generator=generator)

        flip_probability = 0.5 if self.flip else 0.0
        draws: Draws = {"flip": uniform() < flip_probability}
        if self.area is not None:
            share = uniform(low=self.area[0], high=self.area[1]).sqrt()
            # Aspect ratios from 3/4 to 4/3: log(4/3) = 0.2877.
            ratio = torch.exp(uniform(low=-0.2877, high=0.2877)).sqrt()
            size = torch.stack([(share * ratio).clamp(max=1), (share / ratio).clamp(max=1)], dim=1)
            draws["size"] = size
            # In grid_sample's coordinates, −1 … 1.
            draws["centre"] = (2 * uniform(2) - 1) * (1 - size)
        elif self.pad:
            draws["offset"] = torch.randint(0, 2 * self.pad + 1, (n, 2), generator=generator)
        if self.jitter or self.hue:
            factors = uniform(3, low=1 - self.jitter, high=1 + self.jitter)
            turn = uniform(low=-self.hue, high=self.hue)
            off = uniform() >= self.jitter_p
            draws["factors"] = factors.masked_fill(off[:, None], 1)
            draws["turn"] = turn.masked_fill(off, 0)
        if self.gray_p:
            draws["gray"] = uniform() < self.gray_p
        if self.blur_p:
            is_blurred = uniform() < self.blur_p
            # A deviation of 0 stands for no blur.
            draws["blur"] = uniform(low=0.1, high=2.0).masked_fill(~is_blurred, 0)
        return draws

    def apply(self, images: Tensor, draws: Draws, size: int | None = None) -> Tensor:
        """Change images, float (N, 3, H, W) in [0, 1], as was drawn for each. The range stays.

        Args:
            size: the side of the results, if images are cropped: a resized crop is sampled at that
                side, a plain crop is a window of that side. None: as the images.
        """
        draws = {key: value.to(images.device) for key, value in draws.items()}
        if "size" in draws:
            images = _resized_crop(images, draws, size)
        elif "offset" in draws:
            images = _crop(images, draws, self.pad, self.padding, size)
        else:
            images = torch.where(draws["flip"][:, None, None, None], images.flip(3), images)
        if "factors" in draws or "gray" in draws:
            images = _colour(images, draws)
        if "blur" in draws:
            images = _blur(images, draws["blur"])
        return images


def _crop(images: Tensor, draws: Draws, pad: int, padding: str, side: int | None) -> Tensor:
    """Pad, crop at each image's offset, mirror those with `flip`: one gather for all. For a window
    of another `side` the offset, 0 … 2·pad, is stretched to all places that the window has."""
    n, _, height, width = images.shape
    offset = draws["offset"]
    device = images.device
    padded = F.pad(images, (pad, pad, pad, pad), mode=padding).permute(0, 2, 3, 1)
    if side is not None:
        room = torch.tensor([height + 2 * pad - side, width + 2 * pad - side], device=device)
        if bool((room < 0).any()):
            raise ValueError(
                f"a window of {side} does not fit images of {height}×{width} padded by {pad}"
            )
        offset = offset * room // (2 * pad)
        height = side
        width = side
    rows = offset[:, :1] + torch.arange(height, device=device)
    columns = offset[:, 1:] + torch.arange(width, device=device)
    columns = torch.where(draws["flip"][:, None], columns.flip(1), columns)
    sample = torch.arange(n, device=device)[:, None, None]
    return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _resized_crop(images: Tensor, draws: Draws, side: int | None) -> Tensor:
    """Bilinear resampling of a box of each image; centre and size: (N, 2) as (x, y), in units of
    half the image."""
    size = draws["size"]
    theta = images.new_zeros(len(images), 2, 3)
    theta[:, 0, 0] = torch.where(draws["flip"], -size[:, 0], size[:, 0])
    theta[:, 1, 1] = size[:, 1]
    theta[:, :, 2] = draws["centre"]
    height, width = images.shape[2:]
    if side is not None:
        height = side
        width = side
    grid = F.affine_grid(theta, [*images.shape[:2], height, width], align_corners=False)
    return F.grid_sample(
        images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )


def _colour(images: Tensor, draws: Draws) -> Tensor:
    """Brightness, saturation, hue and grey as one colour matrix per sample, then contrast around
    the mean grey."""
    n = len(images)
    to_yiq = _YIQ.to(images)
    factors = draws.get("factors", images.new_ones(n, 3))
    turn = draws.get("turn", images.new_zeros(n)) * (2 * torch.pi)
    saturation = factors[:, 2]
    if "gray" in draws:
        saturation = saturation.masked_fill(draws["gray"], 0)
    in_yiq = images.new_zeros(n, 3, 3)
    in_yiq[:, 0, 0] = 1
    # A turn of hue rotates the plane of I and Q, and saturation stretches it.
    in_yiq[:, 1, 1] = saturation * turn.cos()
    in_yiq[:, 1, 2] = -saturation * turn.sin()
    in_yiq[:, 2, 1] = saturation * turn.sin()
    in_yiq[:, 2, 2] = saturation * turn.cos()
    brightness = factors[:, :1, None]
    in_rgb = brightness * (torch.linalg.inv(to_yiq) @ in_yiq @ to_yiq)
    images = (in_rgb @ images.flatten(2)).view_as(images)
    # The first row of the matrix weighs the channels to grey.
    gray = (images * to_yiq[0].view(1, 3, 1, 1)).sum(dim=1)
    mean_gray = gray.mean(dim=(1, 2)).view(n, 1, 1, 1)
    contrast = factors[:, 1].view(n, 1, 1, 1)
    return (mean_gray + contrast * (images - mean_gray)).clamp(0, 1)


def _blur(images: Tensor, deviations: Tensor) -> Tensor:
    """Each image under a Gaussian of its own standard deviation (N,), in pixels; 0 leaves it as it
    is. Rows and columns are blurred one after the other, which is the same and costs less."""
    n, channels, height, width = images.shape
    radius = max(1, min(height, width) // 20)
    places = torch.arange(-radius, radius + 1, device=images.device)
    gaussians = torch.exp(-(places**2) / (2 * deviations.clamp_min(1e-3)[:, None] ** 2))
    gaussians = gaussians / gaussians.sum(dim=1, keepdim=True)
    # All planes become channels of one image, in groups of one, so that each has its own kernel.
    kernels = gaussians.repeat_interleave(channels, dim=0)
    planes = images.reshape(1, n * channels, height, width)
    planes = F.pad(planes, (radius, radius, radius, radius), mode="reflect")
    planes = F.conv2d(planes, kernels[:, None, None, :], groups=n * channels)
    planes = F.conv2d(planes, kernels[:, None, :, None], groups=n * channels)
    blurred = planes.view(n, channels, height, width)
    return torch.where(deviations[:, None, None, None] > 0, blurred, images)
