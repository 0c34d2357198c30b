"""Where one sample stands, as numbers and as a picture: boundaries around it, its score among those
of calibration."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.decision.guard import Guard
from fdbd.util.extras import require
from fdbd.util.files import beside
from fdbd.util.pages import score_range

FORMATS = (".png", ".svg", ".pdf")
BINS = 40
BLUE, ORANGE, GREY, INK = "#3b6ea8", "#d1602b", "#b9c0c8", "#30343a"


class Sample(NamedTuple):
    """Where one sample stands."""

    predicted: str
    score: float
    p_value: float
    is_ood: bool
    threshold: float  #: of the predicted class, where each has its own
    standing: float  #: fraction of the calibration scores below the sample's
    boundaries: list[dict[str, Any]]
    """The nearest first: ``name`` of the other class, ``distance``, and ``share`` of the average
    distance to all."""
    others: int  #: boundaries that are farther away and not listed
    calibration: NDArray[Any]  #: (n,) calibration scores

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the calibration scores; a number that is not finite is
        None."""
        values = {name: value for name, value in self._asdict().items() if name != "calibration"}
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }


def sample_of(guard: Guard, image: Any, class_names: Sequence[str] = (), top: int = 10) -> Sample:
    """What a guard says of one sample: `image` is a batch of one, as the guard takes it."""
    why, threshold = guard.explain(image), guard.stages.require_threshold()
    logits, label, score, p_value, is_ood = (part[0] for part in why.decision)
    distances, shares = why.distances[0].double().tolist(), why.shares[0].double().tolist()
    names = [*class_names, *(f"class {index}" for index in range(len(class_names), len(logits)))]
    order = sorted(
        (c for c in range(len(distances)) if math.isfinite(distances[c])), key=distances.__getitem__
    )
    return Sample(
        predicted=names[label],
        score=float(score),
        p_value=float(p_value),
        is_ood=bool(is_ood),
        threshold=float(threshold.value[int(label) if threshold.per_class else 0]),
        standing=float(why.standing[0]),
        boundaries=[
            {"name": names[c], "distance": distances[c], "share": shares[c]} for c in order[:top]
        ],
        others=max(0, len(order) - top),
        calibration=threshold.calibration.double().cpu().numpy(),
    )


def draw(
    sample: Sample, pixels: NDArray[np.uint8], title: str, path: str | os.PathLike[str]
) -> Path:
    """Three panels: the image (H, W, 3), distances to the boundaries as bars, and the score among
    the calibration scores."""
    target = Path(path)
    size = (11, max(3.2, 1.4 + 0.26 * max(1, len(sample.boundaries))))
    figure = require("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    image, bars, histogram = figure.subplots(1, 3, width_ratios=(1, 1.3, 1.3))
    image.imshow(pixels, interpolation="nearest" if max(pixels.shape[:2]) < 128 else "antialiased")
    image.set_axis_off()
    verdict, colour = (
        ("out-of-distribution", ORANGE) if sample.is_ood else ("in-distribution", BLUE)
    )
    heading = figure.suptitle(
        f"{title}: predicted {sample.predicted}, {verdict}", fontsize=11, color=colour
    )
    _bars(bars, sample)
    _histogram(histogram, sample, colour)
    for text in (heading, *bars.get_yticklabels()):
        text.set_parse_math(False)  # files and classes may be called $…$
    for axes in (bars, histogram):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    with beside(target) as temporary:
        figure.savefig(temporary, format=target.suffix[1:].lower(), dpi=144)
    return target


def _bars(axes: Any, sample: Sample) -> None:
    places = range(len(sample.boundaries))
    axes.barh(
        places, [boundary["distance"] for boundary in sample.boundaries], color=BLUE, height=0.7
    )
    axes.set_yticks(places, [boundary["name"] for boundary in sample.boundaries])
    axes.invert_yaxis()
    axes.set_xlabel("distance to the boundary")
    more = f", {sample.others} more farther away" if sample.others else ""
    axes.set_title(f"boundaries, nearest first{more}", fontsize=9)


def _histogram(axes: Any, sample: Sample, colour: str) -> None:
    finite = [np.array([sample.score])] if math.isfinite(sample.score) else []
    low, high = score_range([sample.calibration, *finite])
    bins = min(BINS, 4 + int(2 * math.sqrt(len(sample.calibration))))
    axes.hist(np.clip(sample.calibration, low, high), bins=bins, range=(low, high), color=GREY)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.axvline(sample.threshold, color=INK, linewidth=1, linestyle="--", label="threshold")
    if finite:
        axes.axvline(
            min(max(sample.score, low), high), color=colour, linewidth=2.5, label="this image"
        )
    axes.figure.legend(
        loc="outside lower right", ncols=2, frameon=False, fontsize=8
    )  # beneath, over no bar
    axes.set_xlabel("score, higher is more in-distribution")
    axes.set_ylabel("calibration samples")
    text = (
        f"score {sample.score:.4g}, above {sample.standing:.1%} of these"
        if finite
        else "the score is not finite"
    )
    axes.set_title(text, fontsize=9)
