"""Measures of how well scores tell in-distribution (ID) from out-of-distribution (OOD): AUROC,
FPR@TPR, AUPR; how well they also reject wrong predictions (AURC, AUGRC, accuracy at coverage); and
the measures of score maps.

Higher score = more in-distribution. Everything is a fraction in [0, 1]; `as_percent` is for tables.
Scores come as tensors, arrays or lists; ties and ±inf are handled exactly, NaN is an error. Nothing
here knows a detector.
"""

from fdbd.metrics.comparison import Comparison, delong_test
from fdbd.metrics.evaluation import Estimate, Evaluation, as_percent, average, evaluate
from fdbd.metrics.pixels import (
    Components,
    PixelEvaluation,
    evaluate_components,
    evaluate_pixels,
)
from fdbd.metrics.points import aupr, auroc, fpr_at_tpr, roc_curve
from fdbd.metrics.selective import (
    accuracy_at_coverage,
    augrc,
    aurc,
    evaluate_full_spectrum,
    evaluate_joint,
    risk_coverage,
)

__all__ = [
    "Comparison",
    "Components",
    "Estimate",
    "Evaluation",
    "PixelEvaluation",
    "accuracy_at_coverage",
    "as_percent",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "average",
    "delong_test",
    "evaluate",
    "evaluate_components",
    "evaluate_full_spectrum",
    "evaluate_joint",
    "evaluate_pixels",
    "fpr_at_tpr",
    "risk_coverage",
    "roc_curve",
]
