"""What a guard notes while it is fitted and calibrated, beside what its detector learns."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field

from torch import Tensor

from fdbd.data.labels import Agreement
from fdbd.decision.inputs import InputRange
from fdbd.fitting.overlap import Sketch


@dataclass
class GuardRecord:
    """Notes on the data and the model of a guard."""

    agreement: dict[str, Agreement] = field(default_factory=dict)
    """How often given labels are the model's own predictions, for ``"fit"`` and
    ``"calibration"``."""
    seen: Sketch | None = None
    """Which samples the fit saw, so that `Guard.calibrate` notices them; None: not known."""
    inputs: InputRange | None = None
    """The range of the model's inputs at the fit; None: not known, or the guard takes features."""
    weights: str | None = None
    """`weights_hash` of the model at the fit; None: not known, or the guard takes features."""
    gives_maps: bool = False
    """Whether the model gave maps of several positions during the fit or the calibration. An image
    so small that its map has one position is then a map as well, and no single prediction."""
    version: int = 0
    """How many thresholds there have been since the fit."""
    has_warned_of_inputs: bool = False
    """Whether the guard has warned that a batch lies outside of the range of its inputs."""

    def compare(
        self, stage: str, labels: Tensor | None, predicted: Tensor, num_classes: int
    ) -> None:
        """Count how often given labels and predictions agree."""
        if labels is None:
            return
        if len(labels) != len(predicted):
            raise ValueError(
                f"a batch has {len(predicted)} samples and {len(labels)} labels, "
                "expected one per sample"
            )
        if labels.ndim != 1 or labels.is_floating_point():
            return
        if stage not in self.agreement:
            self.agreement[stage] = Agreement(num_classes)
        self.agreement[stage].add(labels, predicted)

    def count_labels(self, stage: str, labels: Tensor | None) -> None:
        """Count given labels whose predictions are not compared, since those of others were."""
        if labels is not None and labels.ndim == 1 and stage in self.agreement:
            self.agreement[stage].add_labels(labels)


def warn_caller(text: str, category: type[UserWarning] = UserWarning) -> None:
    """Warn at the line outside this package that called it, perhaps by calling a module of
    torch."""
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and _is_ours(str(frame.f_globals.get("__name__"))):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "fdbd" or module == "torch.nn.modules.module"
