"""The check at a Classifier's first call: the linear head that was found by structure is the one
whose output the model gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head, two_rows
from fdbd.core.grid import Grid
from fdbd.networks.find_head import is_linear, refuse_head

# Keys and attributes under which models return their logits: Hugging Face's and torchvision's
# segmentation models'.
_OUTPUT_NAMES = ("logits", "out")


@dataclass(frozen=True)
class FirstCall:
    """The first call of a model: what went in, what came out, and the head that was found."""

    model: nn.Module
    head_name: str
    #: whether the user named the head
    is_named: bool
    head: Head
    #: the head's input and output
    batch: Batch
    #: what the model returned
    output: Any
    #: number of samples that the model was given; None: not known
    samples: int | None
    #: runs the model on the same inputs
    run_again: Callable[[], object]

    @property
    def model_name(self) -> str:
        """The model's name in error messages."""
        return type(self.model).__name__


def output_logits(output: Any) -> Tensor | None:
    """The logits in what a model returned: a tensor, ``.logits``, ``["logits"]``, ``["out"]`` or
    the first of a tuple."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        found = output[0] if output else None
    elif isinstance(output, Mapping):
        found = next((output[name] for name in _OUTPUT_NAMES if name in output), None)
    else:
        found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else None


@torch.no_grad()
def check_head(call: FirstCall) -> bool:
    """ValueError unless the head maps the batch's features to its logits and these are the model's
    output. A head that the user named may be followed by more, but not by another number of
    classes. False: this batch is not finite, and cannot tell."""
    logits = call.batch.logits
    assert logits is not None
    output = output_logits(call.output)
    given = _as_rows(output, call)
    if given is None or given.shape != logits.shape:
        _refuse_unless_named(output, call)
    elif not torch.isfinite(logits).all():
        return False
    elif not call.is_named and not _is_close(given, logits):
        _refuse_other_logits(given, logits, call)
    _check_linear(call)
    return True


def _as_rows(output: Tensor | None, call: FirstCall) -> Tensor | None:
    """The model's output in the form of the head's logits, (N, C); as it is if it has another
    size."""
    logits = call.batch.logits
    grid = call.batch.grid
    assert logits is not None
    if output is None:
        return None
    if grid is not None:
        return _map_as_rows(output, logits, grid, call.head)
    classes = 1 if call.head.is_binary else call.head.num_classes
    if output.numel() != len(logits) * classes:
        return output
    rows = output.reshape(len(logits), -1)
    return two_rows(rows) if call.head.is_binary else rows


def _map_as_rows(output: Tensor, logits: Tensor, grid: Grid, head: Head) -> Tensor | None:
    """The model's maps as rows, to be compared with the head's logits.

    Most models enlarge the maps of their head. Output of another resolution counts as the head's
    if it is the head's maps, resized: then the logits themselves are returned. None for output of
    any other kind.
    """
    classes = 1 if head.is_binary else head.num_classes
    if output.ndim != 4 or output.shape[:2] != (grid.samples, classes):
        return None
    if output.shape[2:] == (grid.height, grid.width):
        rows = grid.to_rows(output)
        return two_rows(rows) if head.is_binary else rows
    maps = grid.to_maps(logits)
    if head.is_binary:
        # Of d/2 and −d/2, what the model gives is d.
        maps = maps[:, 1:] - maps[:, :1]
    return logits if _is_resized(maps, output) else None


def _is_resized(maps: Tensor, output: Tensor) -> bool:
    """Whether output (N, C, h, w) is what bilinear interpolation makes of maps (N, C, H, W)."""
    for align_corners in (False, True):
        resized = F.interpolate(
            maps.float(), output.shape[2:], mode="bilinear", align_corners=align_corners
        )
        if _is_close(resized, output):
            return True
    return False


def _refuse_unless_named(output: Tensor | None, call: FirstCall) -> None:
    """ValueError for output that has another form than the head's logits, unless the user has named
    the head and the output may be made of them."""
    if call.is_named and _may_be_made_of_logits(output, call):
        return
    hint = "pass head= to name the layer that holds the logits"
    if output is None:
        found = f"a {type(call.output).__name__}"
        hint += "; networks that find boxes take fdbd.decision.boxes.BoxGuard"
    else:
        found = str(tuple(output.shape))
        behind = _layer_behind(output, call)
        if behind is not None:
            hint = f"{behind!r} is the layer that the output comes from: pass head={behind!r}"
    ours = _shape(call.batch)
    refuse_head(
        call.model,
        f"{call.model_name} gives {found} and its linear layer {call.head_name!r} gives {ours}; "
        f"{hint}",
    )


def _may_be_made_of_logits(output: Tensor | None, call: FirstCall) -> bool:
    """Whether something behind the head may have made the output of its logits, in another form."""
    if output is not None:
        # A matrix would be logits of other classes.
        return output.ndim != 2
    assert call.batch.logits is not None
    samples_of_head = len(call.batch.logits)
    if call.batch.grid is not None:
        samples_of_head = call.batch.grid.samples
    # A head whose rows are of something else, such as boxes, is not that of the samples.
    return call.samples in (None, samples_of_head)


def _shape(batch: Batch) -> tuple[int, ...]:
    """The shape of a head's output, as the model gave it."""
    assert batch.logits is not None
    if batch.grid is None:
        return tuple(batch.logits.shape)
    samples, height, width = batch.grid
    return samples, batch.logits.shape[1], height, width


def _refuse_other_logits(given: Tensor, logits: Tensor, call: FirstCall) -> None:
    name = call.head_name
    if not call.head.is_binary and _is_close(given, logits.sigmoid()):
        raise ValueError(
            f"{call.model_name} ends in a sigmoid for each of its {call.head.num_classes} classes, "
            "so a sample may have several at once, and such classes have no boundaries between "
            f"them: pass head={name!r} to take the logits before the sigmoid, with a detector for "
            'several labels, fdbd.Guard(model, "multilabel-fdbd", head=…) or "joint-energy"; with '
            "others if each sample has one class all the same"
        )
    output = output_logits(call.output)
    assert output is not None
    behind = _layer_behind(output, call)
    if behind is None:
        hint = (
            "something follows it, such as a softmax, a ReLU, a scaling or a second head: pass "
            f"head={name!r} to take this layer's output as logits all the same, or name another "
            "layer"
        )
    else:
        hint = f"it is that of {behind!r}: pass head={behind!r}"
    refuse_head(call.model, f"the model's output is not that of its linear layer {name!r}; {hint}")


def _layer_behind(given: Tensor, call: FirstCall) -> str | None:
    """The linear layer whose output is what the model gives, maps of another resolution included;
    only looked for after a wrong first guess."""
    found: list[str] = []

    def compare(name: str, module: nn.Module, args: object, output: Tensor) -> None:
        are_maps = output.ndim == 4 and given.ndim == 4 and output.shape[:2] == given.shape[:2]
        if output.numel() == given.numel():
            is_same = _is_close(output.reshape(given.shape), given)
        else:
            is_same = are_maps and _is_resized(output, given)
        if is_same:
            found.append(name)

    with contextlib.ExitStack() as hooks:
        for name, module in call.model.named_modules():
            if is_linear(module):
                hook = module.register_forward_hook(partial(compare, name))
                hooks.callback(hook.remove)
        call.run_again()
    return found[-1] if found else None


def _check_linear(call: FirstCall) -> None:
    """ValueError unless logits are weight · features + bias."""
    features = call.batch.features
    logits = call.batch.logits
    assert logits is not None
    if not torch.isfinite(features).all():
        refuse_head(
            call.model,
            f"the head {call.head_name!r} is applied to every token and the model does not keep "
            "one of them, expected one prediction per sample",
        )
    if not _is_close(call.head(features.float()), logits):
        refuse_head(
            call.model,
            f"the output of {call.head_name!r} is not weight · input + bias: its module computes "
            "something else, or the output is changed in place after it; a linear head is needed",
        )


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to the rounding of their dtype; TensorFloat-32 counts as
    float32."""
    is_single = {a.dtype, b.dtype} <= {torch.float32, torch.float64}
    tolerance = 1e-3 if is_single else 2e-2
    # Not every device has float64.
    a = a.cpu().double()
    b = b.cpu().double()
    return bool((a - b).abs().max() <= tolerance * b.abs().max())
