"""Grid: how rows lie in maps. Detectors score rows; a classifier of pixels has one row per position
of its last map, and this is the one place that turns maps into rows and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Grid(NamedTuple):
    """N samples of height × width positions. Their rows stand sample by sample, each sample line by
    line from its upper left corner.

    >>> grid = Grid(samples=2, height=3, width=4)
    >>> maps = torch.rand(2, 5, 3, 4)
    >>> grid.to_rows(maps).shape, torch.equal(grid.to_maps(grid.to_rows(maps)), maps)
    (torch.Size([24, 5]), True)
    """

    samples: int
    height: int
    width: int

    @classmethod
    def from_maps(cls, maps: Tensor) -> Grid:
        """The grid of maps (N, P, H, W)."""
        samples, _, height, width = maps.shape
        return cls(samples, height, width)

    @property
    def positions(self) -> int:
        """Rows per sample."""
        return self.height * self.width

    def to_rows(self, maps: Tensor) -> Tensor:
        """Maps (N, P, H, W) to rows (N·H·W, P); a view if the maps are channels-last in memory."""
        return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])

    def to_maps(self, rows: Tensor) -> Tensor:
        """Rows (N·H·W, P) to maps (N, P, H, W), or one number per row (N·H·W,) to (N, H, W); a view
        of the rows."""
        maps = rows.reshape(self.samples, self.height, self.width, *rows.shape[1:])
        return maps if rows.ndim == 1 else maps.permute(0, 3, 1, 2)

    def label_rows(self, labels: Tensor) -> Tensor:
        """Class indices (N, h, w) of another resolution, such as the images', to one per row
        (N·H·W,): those of the nearest pixels. An index that stands for "no class" stays as it is.
        """
        if labels.ndim != 3 or len(labels) != self.samples:
            raise ValueError(
                f"label maps have shape {tuple(labels.shape)}, expected ({self.samples}, h, w): "
                "one class index per pixel; leave labels out if there are none"
            )
        if 0 in labels.shape[1:]:
            raise ValueError(
                f"label maps have shape {tuple(labels.shape)}: expected at least one pixel"
            )
        rows = nearest_pixels(labels.shape[1], self.height, labels.device)
        columns = nearest_pixels(labels.shape[2], self.width, labels.device)
        return labels[:, rows][:, :, columns].reshape(-1)


def nearest_pixels(size: int, wanted: int, device: torch.device) -> Tensor:
    """(wanted,) indices of pixels in a line of `size`: if the line is divided into `wanted` equal
    parts, those that hold the centres of the parts.

    >>> nearest_pixels(2, 4, torch.device("cpu"))
    tensor([0, 0, 1, 1])
    """
    centres = (torch.arange(wanted, device=device) + 0.5) * size / wanted
    return centres.long().clamp_max(size - 1)
