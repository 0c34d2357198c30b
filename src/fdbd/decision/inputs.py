"""What a guard knows of the numbers that its network was given during the fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_READ_WHOLE = 1 << 18
"""Values up to which a batch is read whole: that takes a single call."""
_SAMPLED = 4096
"""Values of a larger batch that are looked at: enough for a mean, and cheap beside any network."""
_ROUNDING = 1e-4
"""Relative error of a mean in float32, with room to spare."""


class InputRange(NamedTuple):
    """The least and the largest number in the inputs of a fit.

    >>> seen = InputRange.from_inputs(torch.tensor([[-2.0, 2.5]]))
    >>> (
    ...     seen,
    ...     seen.is_missed_by(torch.rand(1, 3, 4, 4)),
    ...     seen.is_missed_by(255 * torch.rand(1, 3, 4, 4)),
    ... )
    (InputRange(low=-2.0, high=2.5), False, True)
    """

    low: float
    high: float

    @classmethod
    def from_inputs(cls, inputs: Any) -> InputRange | None:
        """The range of a training batch; None if nothing in it is measured, as token ids are
        not."""
        values = _measured(inputs)
        if values is None or not values.numel():
            return None
        least, largest = values.detach().aminmax()
        return cls(float(least), float(largest))

    @classmethod
    def from_values(cls, values: Any) -> InputRange:
        """The range in a guard's file; ValueError if it is not one."""
        if not isinstance(values, list) or len(values) != 2:
            raise ValueError(f"the range of its inputs is {values!r}, expected two numbers")
        for value in values:
            if not isinstance(value, float) or not math.isfinite(value):
                raise ValueError(f"the range of its inputs is {values!r}, expected two numbers")
        return cls(*values)

    def merged(self, other: InputRange | None) -> InputRange:
        """The range of both batches."""
        if other is None:
            return self
        return InputRange(min(self.low, other.low), max(self.high, other.high))

    def is_missed_by(self, inputs: Any, total: float | None = None) -> bool:
        """Whether a batch lies outside: its mean is below the least or above the largest number of
        the fit. Only inputs in the CPU's memory are looked at, so that no device is waited for.

        Args:
            inputs: what the model takes.
            total: the sum of all numbers, if the inputs are one tensor and it is known already.
        """
        values = _measured(inputs)
        if values is None or not values.is_cpu or not values.numel():
            return False
        if total is not None and math.isfinite(total):
            mean = total / values.numel()
        else:
            mean = _mean(values.detach())
        # The mean of equal numbers, as in a white image, is rounded to either side of them.
        margin = _ROUNDING * max(abs(self.low), abs(self.high))
        # False for NaN, which says nothing of how the numbers were prepared.
        return mean < self.low - margin or mean > self.high + margin


def _mean(values: Tensor) -> float:
    """The approximate mean of a tensor's finite numbers; NaN if there are none."""
    if values.numel() > _READ_WHOLE:
        values = values.reshape(-1)
        values = values[:: len(values) // _SAMPLED]
    mean = values.sum(dtype=torch.float32).item() / values.numel()
    if math.isfinite(mean):
        return mean
    # One infinite pixel says nothing of how the others were prepared.
    return values[torch.isfinite(values)].mean(dtype=torch.float64).item()


def _measured(inputs: Any) -> Tensor | None:
    """The first tensor of measured values: floating-point, or integers in three dimensions or
    more, such as the pixels of images; integers of fewer dimensions are ids."""
    for tensor in _tensors(inputs):
        if tensor.is_floating_point():
            return tensor
        is_integer = tensor.dtype != torch.bool and not tensor.is_complex()
        if is_integer and tensor.ndim >= 3:
            return tensor
    return None


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from _tensors(value)
    elif isinstance(inputs, (tuple, list)):
        for value in inputs:
            yield from _tensors(value)
