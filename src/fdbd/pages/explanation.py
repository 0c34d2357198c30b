"""Where one sample stands, as numbers and as a picture: boundaries around it, its score among those
of calibration."""

import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fdbd.decision.answers import Explanation
from fdbd.decision.guard import Guard
from fdbd.util.extras import require
from fdbd.util.files import beside
from fdbd.util.pages import score_range

FORMATS = (".png", ".svg", ".pdf")
BINS = 40
# The colours of the pages' light theme (util/assets/style.css).
BLUE = "#0072b2"
ORANGE = "#d55e00"
GREY = "#b9c0c8"
INK = "#1c2127"
# The range of the histogram is cut only if scores lie farther out than this many times the range of
# all but the outermost: one score of 1e9 would leave no shape to see.
FARTHEST = 5.0


class SampleExplanation(NamedTuple):
    """Where one sample stands."""

    predicted: str
    score: float
    p_value: float
    is_ood: bool
    threshold: float
    """The threshold; that of the predicted class, if each class has its own."""
    standing: float
    """Fraction of the calibration scores below the sample's."""
    boundaries: list[dict[str, Any]]
    """The nearest first: ``name`` of the other class, ``distance``, and ``share`` of the average
    distance to all."""
    others: int
    """Boundaries that are farther away and not listed."""
    members: list[dict[str, Any]]
    """The members of an ensemble, the one that objects most first: ``name``, ``p_value``, and
    ``objection``, its share of what speaks against the sample."""
    calibration: NDArray[Any]
    """(n,) calibration scores."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the calibration scores; a number that is not finite is
        None."""
        found: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if name == "calibration":
                continue
            is_lost = isinstance(value, float) and not math.isfinite(value)
            found[name] = None if is_lost else value
        return found


def explain_sample(
    guard: Guard, image: Any, class_names: Sequence[str] = (), top: int = 10
) -> SampleExplanation:
    """What a guard says of one sample: `image` is a batch of one, as the guard takes it."""
    explanation = guard.explain(image)
    decision = explanation.decision
    threshold = guard.stages.require_threshold()
    label = int(decision.labels[0])
    names = list(class_names)
    for index in range(len(class_names), explanation.distances.shape[1]):
        names.append(f"class {index}")
    boundaries = _boundaries(explanation, names)
    own_threshold = threshold.value[label] if threshold.per_class else threshold.value[0]
    return SampleExplanation(
        predicted=_predicted(guard, explanation, names),
        score=float(decision.scores[0]),
        p_value=float(decision.p_values[0]),
        is_ood=bool(decision.is_ood[0]),
        threshold=float(own_threshold),
        standing=float(explanation.standing[0]),
        boundaries=boundaries[:top],
        others=max(0, len(boundaries) - top),
        members=_members(explanation),
        calibration=threshold.calibration.double().cpu().numpy(),
    )


def _boundaries(explanation: Explanation, names: Sequence[str]) -> list[dict[str, Any]]:
    """The boundaries that the first sample has, nearest first."""
    distances = explanation.distances[0].double().tolist()
    shares = explanation.shares[0].double().tolist()
    found = []
    for name, distance, share in zip(names, distances, shares):
        if math.isfinite(distance):
            found.append({"name": name, "distance": distance, "share": share})
    found.sort(key=lambda boundary: boundary["distance"])
    return found


def _predicted(guard: Guard, explanation: Explanation, names: Sequence[str]) -> str:
    """What the model says of the first sample: its class, or the names of its labels."""
    decision = explanation.decision
    if not guard.detector.needs.many_labels:
        return names[int(decision.labels[0])]
    is_present = decision.label_sets()[0].tolist()
    present = [name for name, is_there in zip(names, is_present) if is_there]
    return " + ".join(present) if present else "no label"


def _members(explanation: Explanation) -> list[dict[str, Any]]:
    """What each member of an ensemble says of the first sample."""
    if explanation.member_p_values is None or explanation.objections is None:
        return []
    p_values = explanation.member_p_values[0].tolist()
    objections = explanation.objections[0].tolist()
    members = []
    for name, p_value, objection in zip(explanation.members, p_values, objections):
        members.append({"name": name, "p_value": p_value, "objection": objection})
    return sorted(members, key=lambda member: -float(member["objection"]))


def draw(
    sample: SampleExplanation,
    content: NDArray[np.uint8] | str,
    title: str,
    path: str | os.PathLike[str],
) -> Path:
    """Three panels: the image (H, W, 3) or the text, distances to the boundaries as bars, and the
    score among the calibration scores."""
    target = Path(path)
    size = (11, max(3.2, 1.4 + 0.26 * max(1, len(sample.boundaries))))
    figure = require("matplotlib.figure", "report").Figure(figsize=size, layout="constrained")
    image, bars, histogram = figure.subplots(1, 3, width_ratios=(1, 1.3, 1.3))
    if isinstance(content, str):
        kind = "text"
        _text_card(image, content)
    else:
        kind = "image"
        is_small = max(content.shape[:2]) < 128
        interpolation = "nearest" if is_small else "antialiased"
        image.imshow(content, interpolation=interpolation)
    image.set_axis_off()
    verdict = "out-of-distribution" if sample.is_ood else "in-distribution"
    colour = ORANGE if sample.is_ood else BLUE
    heading = figure.suptitle(
        f"{title}: predicted {sample.predicted}, {verdict}", fontsize=11, color=colour
    )
    _bars(bars, sample)
    _histogram(histogram, sample, colour, kind)
    for text in (heading, *bars.get_yticklabels()):
        # Files and classes may be called $…$.
        text.set_parse_math(False)
    for axes in (bars, histogram):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    with beside(target) as temporary:
        figure.savefig(temporary, format=target.suffix[1:].lower(), dpi=144)
    return target


def _text_card(axes: Any, text: str) -> None:
    """The beginning of a text, in lines that fit into its panel."""
    lines = textwrap.wrap(text, width=30, max_lines=12, placeholder=" …")
    shown = axes.text(0.02, 0.98, "\n".join(lines), va="top", fontsize=9, color=INK)
    shown.set_parse_math(False)


def _bars(axes: Any, sample: SampleExplanation) -> None:
    places = range(len(sample.boundaries))
    axes.barh(
        places, [boundary["distance"] for boundary in sample.boundaries], color=BLUE, height=0.7
    )
    axes.set_yticks(places, [boundary["name"] for boundary in sample.boundaries])
    axes.invert_yaxis()
    axes.set_xlabel("distance to the boundary")
    more = f", {sample.others} more farther away" if sample.others else ""
    axes.set_title(f"boundaries, nearest first{more}", fontsize=9)


def _histogram(axes: Any, sample: SampleExplanation, colour: str, kind: str) -> None:
    low, high = histogram_range(sample)
    bins = min(BINS, 4 + int(2 * math.sqrt(len(sample.calibration))))
    is_inside = (sample.calibration >= low) & (sample.calibration <= high)
    axes.hist(sample.calibration[is_inside], bins=bins, range=(low, high), color=GREY)
    axes.set_xlim(low, high)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.axvline(sample.threshold, color=INK, linewidth=1, linestyle="--", label="threshold")
    if math.isfinite(sample.score):
        axes.axvline(sample.score, color=colour, linewidth=2.5, label=f"this {kind}")
    # Below the axes, where it covers no bar.
    axes.figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    axes.set_xlabel("score, higher is more in-distribution")
    axes.set_ylabel("calibration samples")
    text = "the score is not finite"
    if math.isfinite(sample.score):
        text = f"score {sample.score:.4g}, above {sample.standing:.1%} of these"
    beyond = int((~is_inside).sum())
    if beyond:
        text += f"; {beyond:,} lie beyond this range"
    axes.set_title(text, fontsize=9)


def histogram_range(sample: SampleExplanation) -> tuple[float, float]:
    """The range that holds every calibration score, the threshold and the sample's own score, with
    a little room; far outliers among the calibration scores are left out."""
    marks = [value for value in (sample.score, sample.threshold) if math.isfinite(value)]
    low, high = score_range([sample.calibration, np.array(marks)])
    finite = sample.calibration[np.isfinite(sample.calibration)]
    reach = FARTHEST * (high - low)
    near = finite[(finite >= low - reach) & (finite <= high + reach)]
    everything = [low, high, *near, *marks]
    room = 0.02 * (max(everything) - min(everything))
    return min(everything) - room, max(everything) + room
