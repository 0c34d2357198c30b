"""What is worth a compiled kernel: fDBD's score and the sums of a streaming fit, each in one read of the features.

Each has its definition in plain torch (`plain`), which everything takes that the kernel cannot: small inputs,
gradients, other devices, compiled and exported graphs.
"""

from torch.nn.functional import linear

from fdbd.kernels.dispatch import column_sums, compile_kernels, folded_score
from fdbd.kernels.threads import survive_forks
from fdbd.util.torch_compat import is_plain, tracing

fits_kernel = is_plain


def warm_up(*_: object) -> None:
    """Kernels are compiled at their first use: there is nothing to do ahead."""


__all__ = [
    "column_sums",
    "compile_kernels",
    "fits_kernel",
    "folded_score",
    "is_plain",
    "linear",
    "survive_forks",
    "tracing",
    "warm_up",
]
