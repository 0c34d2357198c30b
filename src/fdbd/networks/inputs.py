"""What a loader yields and a model takes: splitting off labels, moving to a device, looking for bad numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.core.batch import as_tensor

Array: TypeAlias = Tensor | NDArray[np.generic]
Inputs: TypeAlias = Array | Mapping[str, Any] | Sequence[Any]
"""What a model takes, or a loader's item with labels: a tensor or array (N, …); a dict of keyword arguments; a tuple or
list (inputs, labels)."""


def split_batch(batch: Inputs) -> tuple[Any, Tensor | None]:
    """Splits what a loader yields into what the model takes and labels (N,), or None where there are none.

    A tensor is the input. A tuple or list is (inputs, labels, …) and what follows is left out. A dict holds keyword
    arguments for the model, and labels under ``labels`` or ``label``. Labels are class indices; a second element
    that is no array (None, file names) is not taken for labels. NumPy arrays become tensors.

    >>> images, labels = split_batch([torch.zeros(2, 3, 8, 8), torch.tensor([4, 1])])
    >>> images.shape, labels
    (torch.Size([2, 3, 8, 8]), tensor([4, 1]))
    >>> split_batch({"input_ids": torch.ones(1, 2), "labels": [3]})
    ({'input_ids': tensor([[1., 1.]])}, tensor([3]))
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Mapping):
        inputs = {key: _with_tensors(value) for key, value in batch.items() if key not in ("labels", "label")}
        return inputs, _as_labels(batch.get("labels", batch.get("label")))
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise ValueError("the batch is an empty tuple, expected (inputs,) or (inputs, labels)")
        if isinstance(batch[0], Mapping):
            inputs, labels = split_batch(batch[0])
            return inputs, _as_labels(batch[1]) if len(batch) > 1 else labels
        return _with_tensors(batch[0]), _as_labels(batch[1]) if len(batch) > 1 else None
    return _with_tensors(batch), None


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)``, where a dict is given as keyword arguments and a tuple or list as positional ones."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def move(inputs: Any, device: torch.device) -> Any:
    """The inputs with every tensor on a device; copies from pinned memory do not wait."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=device.type != "cpu")
    if isinstance(inputs, Mapping):
        return {key: move(value, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(move(value, device) for value in inputs)
    return inputs


def rows_finite(inputs: Any) -> Tensor | None:
    """(N,) whether all numbers of each sample are finite; None where there are none with a point. One read.

    A mask, by its name, may hold −inf. Tensors whose first size is not that of the first tensor belong to no sample.

    >>> rows_finite({"image": torch.tensor([[1.0, 2.0], [3.0, torch.inf]]), "ids": torch.tensor([1, 2])})
    tensor([ True, False])
    """
    found: Tensor | None = None
    count: int | None = None
    for name, tensor in _tensors(inputs):
        count = tensor.shape[0] if count is None and tensor.ndim else count
        if not tensor.is_floating_point() or not tensor.ndim or tensor.shape[0] != count or name.endswith("mask"):
            continue
        values = tensor.detach()
        others = tuple(range(1, values.ndim))
        # A sum shows NaN and infinity, whatever the memory layout. It overflows for huge numbers, too: look again then.
        total = values.sum(dim=others, dtype=torch.promote_types(values.dtype, torch.float32)) if others else values
        finite = torch.isfinite(total)
        if not torch.compiler.is_compiling() and not finite.all():
            finite = torch.isfinite(values).flatten(1).all(dim=1) if others else finite
        found = finite if found is None else found & finite
    return found


def count_samples(inputs: Any) -> int | None:
    """N, by the first tensor; None where there is none."""
    return next((tensor.shape[0] for _, tensor in _tensors(inputs) if tensor.ndim), None)


def _tensors(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, Mapping):
        for key, value in inputs.items():
            yield from _tensors(value, str(key))
    elif isinstance(inputs, (tuple, list)):
        for value in inputs:
            yield from _tensors(value, name)


def _with_tensors(value: Any) -> Any:
    """Arrays as tensors. NumPy's default, float64, becomes float32, which networks take."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind not in "biuf":
        raise TypeError(f"inputs are an array of {value.dtype}, expected numbers")
    return torch.from_numpy(value.astype(np.float32) if value.dtype.kind == "f" else value)


def _as_labels(labels: Any) -> Tensor | None:
    if labels is None or isinstance(labels, (str, bytes, Mapping)):
        return None
    if isinstance(labels, (tuple, list)) and not all(isinstance(label, (int, Tensor)) for label in labels):
        return None
    indices = as_tensor(labels)
    if indices.ndim == 2 and indices.shape[1] == 1:
        indices = indices[:, 0]
    is_whole = not indices.is_floating_point() or bool((indices == indices.round()).all())
    if indices.ndim == 2 and indices.shape[1] > 1:
        raise ValueError(
            f"labels have shape {tuple(indices.shape)}, expected class indices (N,): turn one-hot labels into indices "
            "with labels.argmax(1), or give a loader of dicts when the model takes several inputs; models that give a "
            "sample several labels at once are not supported, since their classes have no boundaries between them"
        )
    if indices.ndim != 1 or not is_whole:
        raise ValueError(
            f"labels have shape {tuple(indices.shape)} and dtype {indices.dtype}, expected class indices (N,); "
            "give a loader of (inputs, labels), or of dicts when the model takes several inputs"
        )
    return indices.long()
