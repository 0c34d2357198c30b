"""Compiled kernels: fDBD's score and the sums of a streaming fit, each in one read of the
features."""

from fdbd.kernels.dispatch import argmax, column_sums, compile_kernels, folded_score
from fdbd.kernels.few import FewRows
from fdbd.kernels.threads import survive_forks
