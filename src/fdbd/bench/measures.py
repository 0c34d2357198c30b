"""The metrics of a benchmark by name: what each is called, which direction is better, what it
needs, and how it follows from a detector's scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from fdbd.metrics import (
    Estimate,
    accuracy_at_coverage,
    augrc,
    aurc,
    evaluate_full_spectrum,
    evaluate_joint,
)


class Measure(NamedTuple):
    """How a metric is shown, and what it needs besides scores."""

    title: str
    smaller_is_better: bool = False
    explanation: str = ""
    needs_labels: bool = False
    """It takes labels of the ID samples, which say whether predictions are right."""
    needs_shifted: bool = False
    """It takes scores of covariate-shifted ID sets."""
    of_id_alone: bool = False
    """It does not depend on an OOD set."""


MEASURES = {
    "auroc": Measure("AUROC"),
    "fpr95": Measure("FPR95", smaller_is_better=True),
    "aupr_in": Measure("AUPR-in"),
    "aupr_out": Measure("AUPR-out"),
    "joint_auroc": Measure(
        "joint AUROC",
        explanation="right ID predictions against wrong ones and OOD samples together",
        needs_labels=True,
    ),
    "joint_fpr95": Measure(
        "joint FPR95",
        smaller_is_better=True,
        explanation="as joint AUROC: a rejected misclassification is not a false alarm",
        needs_labels=True,
    ),
    "aurc": Measure(
        "AURC",
        smaller_is_better=True,
        explanation="mean share of wrong predictions and OOD samples among the accepted, over all "
        "coverages",
        needs_labels=True,
    ),
    "augrc": Measure(
        "AUGRC",
        smaller_is_better=True,
        explanation="mean probability that a sample is accepted and wrong or OOD",
        needs_labels=True,
    ),
    "full_auroc": Measure(
        "full-spectrum AUROC",
        explanation="covariate-shifted ID samples count as ID",
        needs_shifted=True,
    ),
    "full_fpr95": Measure(
        "full-spectrum FPR95",
        smaller_is_better=True,
        explanation="covariate-shifted ID samples count as ID",
        needs_shifted=True,
    ),
    "id_aurc": Measure(
        "ID AURC",
        smaller_is_better=True,
        explanation="AURC of the ID samples alone",
        needs_labels=True,
        of_id_alone=True,
    ),
    "accuracy90": Measure(
        "accuracy at 90 %",
        explanation="accuracy on the ID samples when 90 % of them are accepted",
        needs_labels=True,
        of_id_alone=True,
    ),
    "accuracy80": Measure(
        "accuracy at 80 %",
        explanation="accuracy on the ID samples when 80 % of them are accepted",
        needs_labels=True,
        of_id_alone=True,
    ),
}
"""Every metric that tables, files and pages may show."""

METRICS = ("auroc", "fpr95", "aupr_in", "aupr_out")
"""Those that every result has."""


class Scores(NamedTuple):
    """What a measure is computed from."""

    inside: Tensor
    correct: Sequence[bool] | None
    shifted: Sequence[Tensor] = ()
    outside: Tensor | None = None


def measure(metric: str, scores: Scores, positive: Literal["id", "ood"]) -> Estimate:
    """A metric that no `Evaluation` holds, from scores."""
    if metric in ("full_auroc", "full_fpr95"):
        shifted = np.concatenate([part.double().cpu().numpy() for part in scores.shifted])
        assert scores.outside is not None
        found = evaluate_full_spectrum(scores.inside, shifted, scores.outside, positive=positive)
        return found.auroc if metric == "full_auroc" else found.fpr95
    if scores.correct is None:
        raise ValueError(f"{MEASURES[metric].title} takes labels of the ID samples")
    correct = np.asarray(scores.correct)
    if metric in ("joint_auroc", "joint_fpr95"):
        assert scores.outside is not None
        found = evaluate_joint(scores.inside, correct, scores.outside, positive=positive)
        return found.auroc if metric == "joint_auroc" else found.fpr95
    if metric == "aurc":
        return aurc(scores.inside, correct, scores.outside)
    if metric == "augrc":
        return augrc(scores.inside, correct, scores.outside)
    if metric == "id_aurc":
        return aurc(scores.inside, correct)
    if metric == "accuracy90":
        return accuracy_at_coverage(scores.inside, correct, 0.9)
    if metric == "accuracy80":
        return accuracy_at_coverage(scores.inside, correct, 0.8)
    raise ValueError(f"no metric is called {metric!r}: there are {', '.join(MEASURES)}")


class Spread(Estimate):
    """A mean over several runs (checkpoints of other seeds, say) with their standard deviation.

    The deviation is that of the runs themselves (divided by their number, as OpenOOD's tables have
    it), not that of their mean; the interval is Student's for the mean.

    >>> Spread.from_values([0.90, 0.92, 0.94])
    Spread(0.92, std=0.0163..., runs=3)
    """

    std: float
    runs: int

    def __new__(cls, value: float, low: float, high: float, std: float, runs: int) -> Spread:
        self = super().__new__(cls, value, low, high)
        assert isinstance(self, Spread)
        self.std = float(std)
        self.runs = int(runs)
        return self

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """The mean of at least one value. With one, the interval is everything: [0, 1]."""
        from scipy.special import stdtrit

        numbers = np.array([float(value) for value in values])
        count = len(numbers)
        mean = float(numbers.mean())
        if count == 1:
            return cls(mean, 0.0, 1.0, 0.0, 1)
        error = float(numbers.std(ddof=1)) / math.sqrt(count)
        reach = float(stdtrit(count - 1, 0.975)) * error
        return cls(
            mean, max(0.0, mean - reach), min(1.0, mean + reach), float(numbers.std()), count
        )

    def to_dict(self) -> dict[str, float]:
        return {**super().to_dict(), "std": self.std, "runs": self.runs}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Estimate:
        """What `to_dict` of a Spread or of an Estimate gave."""
        if "std" in values:
            return Spread(**values)
        return Estimate(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        return Spread, (float(self), self.low, self.high, self.std, self.runs)

    def __repr__(self) -> str:
        return f"Spread({float(self):.6g}, std={self.std:.6g}, runs={self.runs})"


def available(has_labels: bool, has_shifted: bool) -> list[str]:
    """Names of the metrics per OOD set that these data allow."""
    found = []
    for name, each in MEASURES.items():
        if each.of_id_alone:
            continue
        if each.needs_labels and not has_labels:
            continue
        if each.needs_shifted and not has_shifted:
            continue
        found.append(name)
    return found


def available_on_id(has_labels: bool) -> list[str]:
    """Names of the metrics of ID samples alone that these data allow."""
    if not has_labels:
        return []
    return [name for name, each in MEASURES.items() if each.of_id_alone]
