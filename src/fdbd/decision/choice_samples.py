"""Where a guard's held-out samples come from: a random part of what a loader yields, kept while the
network runs over it once, and the pseudo-OOD samples that are made of that part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fdbd.core.batch import Batch
from fdbd.data.pseudo_ood import GRID, make_kinds, value_range
from fdbd.decision.choice import FEWEST, Auto
from fdbd.fitting.spool import MOST_ROWS, Spool

KIND_BATCH = 64
"""Pseudo-OOD samples that the network sees at once."""
MOST_CHANNELS_LAST = 4
"""Channels up to which a tensor (N, H, W, C) is told from one (N, C, H, W)."""


class Seen(NamedTuple):
    """What the network said of one batch of held-out data."""

    batch: Batch
    inputs: Any
    """What the network was given: a tensor, a dict of tensors, or None for features."""
    hashes: Tensor
    """(N,) hashes of the samples."""


class HeldOut:
    """A random part of some data: at most `most` of its samples, and at most the share `share`.

    The network has run over all the data; features of all are on disk, inputs of the part are in
    memory. Which samples are chosen follows from the seed and the number of samples alone, so the
    rest is exchangeable with new data if the whole is.
    """

    def __init__(self, most: int, share: float, seed: int) -> None:
        self.most = most
        self.share = share
        self.count = 0
        self._generator = torch.Generator().manual_seed(seed)
        # Of the candidates, in no order.
        self._rows: list[int] = []
        self._inputs: list[Any] = []

    def add(self, inputs: Any, size: int) -> None:
        """Offer one batch: each sample so far is a candidate with the same probability (reservoir
        sampling, algorithm R of Vitter, 1985)."""
        for row in range(size):
            place = len(self._rows)
            if place < self.most:
                self._rows.append(self.count)
                self._inputs.append(_row_of(inputs, row))
            else:
                place = self._draw(self.count + 1)
                if place < self.most:
                    self._rows[place] = self.count
                    self._inputs[place] = _row_of(inputs, row)
            self.count += 1

    def finish(self) -> tuple[list[int], Any]:
        """The chosen row numbers, and their inputs as one batch; None for features."""
        size = min(self.most, int(self.share * self.count))
        if size < FEWEST:
            raise ValueError(
                f"{size} of {self.count} samples can be held out to weigh detectors with, "
                f"expected at least {FEWEST}: give more data, or other data as fit(…, held_out=…)"
            )
        order = torch.randperm(len(self._rows), generator=self._generator).tolist()
        chosen = order[:size]
        rows = [self._rows[place] for place in chosen]
        inputs = _stacked([self._inputs[place] for place in chosen])
        return rows, inputs

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self._generator))


class SetAside:
    """What the network said of all samples, divided into a part that is held out and the others.

    Args:
        seen: goes through all samples, once.
        spool: keeps their features.
        held: says which are held out.
    """

    def __init__(self, seen: Iterable[Seen], spool: Spool, held: HeldOut) -> None:
        self._spool = spool
        self._hashes: list[Tensor] = []
        sizes: list[int] = []
        for batch, inputs, hashes in seen:
            count = len(batch.features)
            held.add(inputs, count)
            for start in range(0, count, MOST_ROWS):
                part = slice(start, start + MOST_ROWS)
                spool.append(batch.rows(part))
                sizes.append(min(MOST_ROWS, count - start))
                self._hashes.append(hashes[part])
        rows, inputs = held.finish()
        self.inputs = inputs
        """What the model was given for the part that is held out; None for features."""
        is_held = torch.zeros(held.count, dtype=torch.bool)
        is_held[rows] = True
        # For each batch of the spool, which of its rows are held out.
        self._masks = is_held.split(sizes)
        self.features = self._held_in_order(rows, is_held)

    def _held_in_order(self, rows: Sequence[int], is_held: Tensor) -> Batch:
        """The features of these rows, in the order of `inputs`."""
        parts = []
        for batch, mask in zip(self._spool, self._masks):
            if mask.any():
                parts.append(batch.rows(mask))
        # The spool has them in the order in which they were seen.
        place_among_held = torch.cumsum(is_held, 0) - 1
        return _joined(parts).rows(place_among_held[torch.tensor(rows)])

    def others(self) -> Iterator[tuple[Batch, Tensor]]:
        """Features and hashes of all samples that are not held out, batch by batch."""
        for batch, mask, hashes in zip(self._spool, self._masks, self._hashes):
            if not mask.all():
                yield batch.rows(~mask), hashes.cpu()[~mask]


def pseudo_ood(inputs: Any, held_out: Batch, auto: Auto) -> dict[str, Any]:
    """Pseudo-OOD samples by kind, each what the model takes or a Batch: those of the user, else
    images made of the held-out ones; none if the inputs are not images."""
    if callable(auto.kinds):
        taken_by_model = inputs
        if inputs is None:
            taken_by_model = held_out
        made = auto.kinds(taken_by_model)
    elif auto.kinds is not None:
        made = auto.kinds
    else:
        return _of_images(inputs, auto)
    if not isinstance(made, Mapping) or not made:
        raise ValueError(
            f"kinds gave {type(made).__name__}, expected a dict of pseudo-OOD samples by kind"
        )
    return dict(made)


def first_pictures(kinds: Mapping[str, Any], held_out: Any) -> dict[str, Tensor]:
    """One image (C, H, W) of each kind, and of what was held out, with values from 0 to 1; none
    if samples are not images."""
    found = _find_images(held_out)
    if found is None:
        return {}
    low, high = value_range(found.images.float())
    pictures = {}
    for name, samples in {"held out": held_out, **kinds}.items():
        of_kind = _find_images(samples)
        if of_kind is not None:
            picture = (of_kind.images[:1].float() - low) / (high - low).clamp_min(1e-12)
            pictures[name] = picture[0].clamp(0, 1)
    return pictures


def in_pieces(samples: Any) -> Iterator[Any]:
    """What the model takes, in batches that it takes at once, and which it may write to."""
    first = samples if isinstance(samples, Tensor) else next(iter(samples.values()))
    for start in range(0, len(first), KIND_BATCH):
        part = slice(start, start + KIND_BATCH)
        if isinstance(samples, Tensor):
            yield copied(samples[part])
        else:
            yield copied({name: values[part] for name, values in samples.items()})


def copied(inputs: Any) -> Any:
    """Tensors in memory of their own, for a model may write to its inputs; others as they are."""
    if isinstance(inputs, Tensor):
        return inputs.detach().clone()
    if isinstance(inputs, Mapping):
        return {name: copied(values) for name, values in inputs.items()}
    return inputs


class _Images(NamedTuple):
    """The images among what a model takes."""

    name: str | None
    """The key in a dict of inputs; None: the images are all that it takes."""
    images: Tensor
    """(N, C, H, W)."""
    has_channels_last: bool
    """Whether the model takes them as (N, H, W, C)."""


def _of_images(inputs: Any, auto: Auto) -> dict[str, Any]:
    """Kinds of the images among the inputs; what else the model takes stays as it is."""
    found = _find_images(inputs)
    if found is None:
        return {}
    images = found.images
    kinds: dict[str, Any] = {}
    for kind, changed in make_kinds(images.float(), auto.per_kind, seed=auto.seed).items():
        if not images.is_floating_point():
            changed = changed.round()
        changed = changed.to(images.dtype)
        if found.has_channels_last:
            changed = changed.permute(0, 2, 3, 1).contiguous()
        if found.name is None:
            kinds[kind] = changed
            continue
        # For each changed image, the other inputs of some given image.
        rows = torch.arange(len(changed)) % len(images)
        others = {name: values[rows] for name, values in inputs.items()}
        kinds[kind] = {**others, found.name: changed}
    return kinds


def _find_images(inputs: Any) -> _Images | None:
    """The images that the model takes, alone or as the one tensor of images in a dict; None if it
    takes none."""
    if not isinstance(inputs, Mapping):
        return _as_images(None, inputs)
    found = []
    for name, values in inputs.items():
        images = _as_images(name, values)
        if images is not None:
            found.append(images)
    return found[0] if len(found) == 1 else None


def _as_images(name: str | None, values: Any) -> _Images | None:
    """A tensor as images of any number of channels; None if it holds none."""
    if not isinstance(values, Tensor) or values.ndim != 4:
        return None
    _, first, second, last = values.shape
    if first >= GRID and second >= GRID and last <= MOST_CHANNELS_LAST:
        return _Images(name, values.permute(0, 3, 1, 2), True)
    if min(second, last) < GRID:
        return None
    return _Images(name, values, False)


def _row_of(inputs: Any, row: int) -> Any:
    """One sample, in memory of its own."""
    if isinstance(inputs, Tensor):
        return inputs[row].detach().cpu().clone()
    if isinstance(inputs, Mapping) and all(isinstance(part, Tensor) for part in inputs.values()):
        return {name: part[row].detach().cpu().clone() for name, part in inputs.items()}
    return None


def _stacked(rows: list[Any]) -> Any:
    """Samples as one batch of what the model takes; None if they cannot be one."""
    if any(row is None for row in rows):
        return None
    if isinstance(rows[0], Tensor):
        return torch.stack(rows) if _have_one_shape(rows) else None
    batch = {}
    for name in rows[0]:
        tensors = [row[name] for row in rows]
        if not _have_one_shape(tensors):
            if "attention_mask" not in rows[0] or tensors[0].ndim != 1:
                return None
            # Texts of several lengths: the mask says where there is nothing.
            tensors = list(pad_sequence(tensors, batch_first=True))
        batch[name] = torch.stack(tensors)
    return batch


def _have_one_shape(tensors: list[Tensor]) -> bool:
    return len({tensor.shape for tensor in tensors}) == 1


def _joined(parts: list[Batch]) -> Batch:
    """Features, logits and labels of several batches as one."""
    first = parts[0]
    logits = None
    labels = None
    if first.logits is not None:
        logits = torch.cat([part.logits for part in parts if part.logits is not None])
    if first.labels is not None:
        labels = torch.cat([part.labels for part in parts if part.labels is not None])
    features = torch.cat([part.features for part in parts])
    return Batch(features, logits=logits, labels=labels)
