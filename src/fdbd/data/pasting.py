"""Objects pasted into photographs, with exact masks: the truth for every pixel, without labelling
by hand."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import Pixels
from fdbd.util.extras import require

BUMPS = 5
"""Waves of an outline: more make it less round."""


class Pasted(NamedTuple):
    """A photograph with an object pasted into it."""

    image: Pixels
    """(H, W, 3)"""
    mask: NDArray[np.bool_]
    """(H, W) True for the pixels of the object."""


def paste_object(
    image: Pixels,
    filling: Pixels,
    random: np.random.Generator,
    share: tuple[float, float] = (0.03, 0.15),
) -> Pasted:
    """Paste one object with a random smooth outline at a random place.

    Args:
        image: uint8 (H, W, 3), which is not changed.
        filling: uint8 (h, w, 3), what the object looks like, such as a texture.
        random: draws outline, place and size; the same state gives the same object.
        share: least and largest share of the image's pixels that the outline's circle has.

    >>> black = np.zeros((64, 96, 3), np.uint8)
    >>> found = paste_object(black, black + 255, np.random.default_rng(0))
    >>> bool((found.image[found.mask] == 255).all()), bool((found.image[~found.mask] == 0).all())
    (True, True)
    """
    height, width = image.shape[:2]
    mask = _outline(height, width, random, share)
    pillow = require("PIL.Image", "vision")
    stretched = np.asarray(pillow.fromarray(filling).resize((width, height)))
    pasted = image.copy()
    pasted[mask] = stretched[mask]
    return Pasted(pasted, mask)


def _outline(
    height: int, width: int, random: np.random.Generator, share: tuple[float, float]
) -> NDArray[np.bool_]:
    """A circle whose radius goes up and down with the angle, inside the image for the most part."""
    area = random.uniform(*share) * height * width
    radius = math.sqrt(area / math.pi)
    centre_y = random.uniform(min(radius, height / 2), max(height - radius, height / 2))
    centre_x = random.uniform(min(radius, width / 2), max(width - radius, width / 2))
    y, x = np.ogrid[:height, :width]
    angle = np.arctan2(y - centre_y, x - centre_x)
    limit = np.ones((height, width))
    for wave in range(2, 2 + BUMPS):
        depth = random.uniform(0, 0.3 / wave)
        phase = random.uniform(0, 2 * math.pi)
        limit += depth * np.cos(wave * angle + phase)
    distance = np.hypot(y - centre_y, x - centre_x)
    return np.asarray(distance < radius * limit)
