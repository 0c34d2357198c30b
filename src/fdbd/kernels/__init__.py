"""What is done sample by sample, twice: a fused CPU kernel and the plain torch definition that it must agree with.

`folded_score` chooses: the kernel for CPU tensors, the twin for everything that traces, differentiates or sits on
another device. The twin of `softmax_sums` is in `detectors.exponentials`.
"""

from fdbd.kernels.dispatch import (
    column_sums,
    fits_kernel,
    folded_score,
    linear,
    softmax_sums,
    tracing,
    warm_up,
)

__all__ = [
    "column_sums",
    "fits_kernel",
    "folded_score",
    "linear",
    "softmax_sums",
    "tracing",
    "warm_up",
]
