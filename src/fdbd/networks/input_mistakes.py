"""What was wrong with inputs that a model refused, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fdbd.util.terminal import one_line

_CONVERSIONS = {
    torch.float16: "half",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
}
"""The method of a tensor that gives it this type."""
_CHANNELS = (1, 3, 4)
"""Usual numbers of channels."""


def explain_inputs(inputs: Any, dtype: torch.dtype, error: Exception) -> str | None:
    """Why a model, whose weights have this type, may have refused its inputs, and what to do; None:
    the error speaks for itself."""
    said = one_line(error)[:200]
    if isinstance(inputs, Tensor):
        return _explain_type(inputs, dtype, said) or _explain_shape(inputs, said)
    if _holds_tensors(inputs):
        return None
    return (
        f"the model was given {_named(inputs)} instead of a tensor ({said}): give a batch of "
        "images as a tensor (N, C, H, W), prepared as in the model's training; for files there is "
        "fdbd.networks.Preprocess, or fdbd score"
    )


def _explain_type(inputs: Tensor, dtype: torch.dtype, said: str) -> str | None:
    """What is wrong with the type of a tensor."""
    if inputs.ndim == 4 and not inputs.is_floating_point():
        return (
            f"the model takes no images of {inputs.dtype} ({said}): prepare them first, with "
            'fdbd.networks.Preprocess.preset("imagenet") for instance'
        )
    if inputs.is_floating_point() and inputs.dtype != dtype and dtype in _CONVERSIONS:
        given = str(inputs.dtype).removeprefix("torch.")
        wanted = str(dtype).removeprefix("torch.")
        return (
            f"the inputs are {given} and the model's weights {wanted} ({said}): give "
            f"inputs.{_CONVERSIONS[dtype]}()"
        )
    return None


def _explain_shape(inputs: Tensor, said: str) -> str | None:
    """What is wrong with the shape of images."""
    shape = tuple(inputs.shape)
    if inputs.ndim == 3 and (shape[0] in _CHANNELS or shape[2] in _CHANNELS):
        return (
            f"the input has shape {shape}, which looks like a single image ({said}): give a batch "
            "(N, C, H, W), such as images[None]"
        )
    if inputs.ndim == 3 and "channels" in said:
        return (
            f"the images have shape {shape}, without channels ({said}): give (N, C, H, W), such as "
            "images[:, None]"
        )
    if inputs.ndim == 2 and "conv2d" in said:
        return (
            f"the input has shape {shape}, which looks like a single grey image ({said}): give a "
            "batch (N, C, H, W), such as images[None, None]"
        )
    if inputs.ndim == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS:
        return (
            f"the images have shape {shape}, which looks like channels last ({said}): give "
            "(N, C, H, W), such as images.permute(0, 3, 1, 2)"
        )
    return None


def _holds_tensors(inputs: Any) -> bool:
    """Whether there is a tensor among the inputs."""
    if isinstance(inputs, Mapping):
        return any(_holds_tensors(value) for value in inputs.values())
    if isinstance(inputs, (tuple, list)):
        return any(_holds_tensors(value) for value in inputs)
    return isinstance(inputs, Tensor)


def _named(inputs: Any) -> str:
    """What was given, in words."""
    if isinstance(inputs, str):
        return f"the text {inputs[:80]!r}"
    return f"a {type(inputs).__name__}"
