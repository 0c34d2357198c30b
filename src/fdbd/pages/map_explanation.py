"""What a guard of maps says of one image: as values, and as a picture with overlays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.core.pixels import Pixels
from fdbd.core.preprocessing import Preprocess
from fdbd.data.label_maps import mask_of, overlaid
from fdbd.decision.guard import Guard
from fdbd.decision.maps import MapDecision
from fdbd.util.extras import require
from fdbd.util.files import beside

SHOWN_SIDE = 640
"""Pixels of the longer side of the pictures, at most."""


class MapExplanation(NamedTuple):
    """What a guard says of the positions of one image."""

    classes: list[dict[str, Any]]
    """The classes that the model sees, the largest first: ``name``, ``share`` of the positions, and
    ``ood_share`` of these that are OOD."""
    others: int
    """Classes that are smaller and not listed."""
    ood_share: float
    """Share of all positions that are OOD."""
    threshold: float
    """Positions with a lower score are OOD."""
    image_score: float
    image_threshold: float
    """Images with a lower score are OOD."""
    image_p_value: float
    image_is_ood: bool
    scores: NDArray[np.float32]
    """(h, w)."""
    is_ood: NDArray[np.bool_]
    """(h, w)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the maps; a number that is not finite is None."""
        found: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if name in ("scores", "is_ood"):
                continue
            is_lost = isinstance(value, float) and not np.isfinite(value)
            found[name] = None if is_lost else value
        return found


def explain_map(
    guard: Guard, image: Tensor, class_names: Sequence[str] = (), top: int = 10
) -> MapExplanation:
    """What a guard of maps says of one image: a batch of one, as the guard takes it."""
    threshold = guard.stages.require_map_threshold()
    with torch.inference_mode():
        decision = guard(image)
    assert isinstance(decision, MapDecision)
    labels = decision.labels[0].cpu()
    is_ood = decision.is_ood[0].cpu()
    counts = torch.bincount(labels.flatten())
    present = counts.nonzero().flatten().tolist()
    present.sort(key=lambda label: -int(counts[label]))
    classes = []
    for label in present[:top]:
        of_class = labels == label
        name = class_names[label] if label < len(class_names) else f"class {label}"
        share = float(of_class.float().mean())
        ood_share = float(is_ood[of_class].float().mean())
        classes.append({"name": name, "share": share, "ood_share": ood_share})
    return MapExplanation(
        classes=classes,
        others=max(0, len(present) - top),
        ood_share=float(decision.ood_share[0]),
        threshold=float(threshold.value),
        image_score=float(decision.image_scores[0]),
        image_threshold=float(threshold.image_threshold.value[0]),
        image_p_value=float(decision.image_p_values[0]),
        image_is_ood=bool(decision.image_is_ood[0]),
        scores=decision.scores[0].float().cpu().numpy(),
        is_ood=is_ood.numpy(),
    )


def draw_map(
    explanation: MapExplanation,
    pixels: Pixels,
    preprocess: Preprocess,
    title: str,
    path: str | os.PathLike[str],
) -> Path:
    """Three panels: the image (H, W, 3), the scores of its positions, and the image with its OOD
    pixels tinted."""
    target = Path(path)
    pillow = require("PIL.Image", "vision")
    small = pillow.fromarray(pixels)
    small.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    shown = np.asarray(small)
    mask = mask_of(explanation.is_ood, preprocess, *shown.shape[:2])
    figure = require("matplotlib.figure", "report").Figure(figsize=(11, 4), layout="constrained")
    image, scores, overlay = figure.subplots(1, 3)
    image.imshow(shown)
    image.set_title("image", fontsize=9)
    _draw_scores(figure, scores, explanation)
    overlay.imshow(overlaid(shown, mask))
    overlay.set_title(f"{explanation.ood_share:.1%} of the positions flagged", fontsize=9)
    for axes in (image, scores, overlay):
        axes.set_axis_off()
    verdict = "out-of-distribution" if explanation.image_is_ood else "in-distribution"
    heading = figure.suptitle(f"{title}: the image as a whole is {verdict}", fontsize=11)
    # Files may be called $…$.
    heading.set_parse_math(False)
    with beside(target) as temporary:
        figure.savefig(temporary, format=target.suffix[1:].lower(), dpi=120)
    return target


def _draw_scores(figure: Any, axes: Any, explanation: MapExplanation) -> None:
    """The scores of all positions, with the threshold in the bar beside them."""
    finite = np.where(np.isfinite(explanation.scores), explanation.scores, np.nan)
    drawn = axes.imshow(finite, cmap="viridis")
    axes.set_title("score of each position; a low one is out-of-distribution", fontsize=9)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.7)
    bar.ax.axhline(explanation.threshold, color="black", linewidth=1.5)
    bar.ax.tick_params(labelsize=8)
