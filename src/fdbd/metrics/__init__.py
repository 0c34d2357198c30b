"""Measures of how well scores tell in-distribution (ID) from out-of-distribution (OOD): AUROC,
FPR@TPR, AUPR.

Higher score = more in-distribution. Everything is a fraction in [0, 1]; `as_percent` is for tables.
Scores come as tensors, arrays or lists; ties and ±inf are handled exactly, NaN is an error. Nothing
here knows a detector.
"""

from fdbd.metrics.comparison import Comparison, delong_test
from fdbd.metrics.evaluation import Estimate, Evaluation, as_percent, average, evaluate
from fdbd.metrics.points import aupr, auroc, fpr_at_tpr, roc_curve

__all__ = [
    "Comparison",
    "Estimate",
    "Evaluation",
    "as_percent",
    "aupr",
    "auroc",
    "average",
    "delong_test",
    "evaluate",
    "fpr_at_tpr",
    "roc_curve",
]
