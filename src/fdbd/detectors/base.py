"""The contract of a detector: say what it needs, ask for statistics, keep buffers, score batches. It knows arrays, not
models or loaders; the base class fits, checks batches, and fails closed: a row that cannot be trusted scores −inf."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from fdbd import kernels
from fdbd.core.batch import Batch, Head, Inputs, as_matrix, as_tensor, labels_of, logits_of
from fdbd.core.configuration import (
    Configured,
    Needs,
    NotFittedError,
    Paper,
    Passes,
    at_least_one,
    expect,
    one_of,
    positive,
)
from fdbd.fitting.driver import fit_detector
from fdbd.util.torch_compat import autocasts, full_precision, tracing

_LARGE = {torch.float32: 1e15, torch.float64: 1e145}
"""Magnitudes whose squares, summed over any feature width, still fit the dtype."""


class Detector(Configured):
    """Scores how in-distribution a sample is: higher is more in-distribution.

    A subclass writes

    - `needs`: what it reads and what its fit takes (`Needs`);
    - `passes`: what to learn from the training data, kept as buffers by ``self.set(name=tensor)``;
    - `score`: the formula, on a checked batch in the dtype of the fit with all that `needs` names. NaN means that a row
      is not to be trusted.

    When the class is created, `score` is wrapped by `checked_score`: it prepares the batch before the formula and gives
    untrusted rows −inf after it, so a formula needs no checks. Three hooks are for the few detectors that need them:
    `observe`, `example` and `parts`.

    >>> import fdbd
    >>> class Largest(fdbd.Detector):
    ...     needs = Needs(passes=0)
    ...     def score(self, batch):
    ...         return batch.features.amax(dim=1)
    >>> Largest().fit(fdbd.Batch(torch.eye(2)), fdbd.Head(torch.eye(2))).score(fdbd.Batch(torch.tensor([[1.0, 5.0]])))
    tensor([5.])
    """

    notices_bad_rows: bool = False
    """Whether the formula itself gives NaN for every row with a number that is not finite or too large, so that the
    base class need not read the batch a second time to look for them."""

    def __init__(self) -> None:
        super().__init__()
        kernels.survive_forks()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "score" in cls.__dict__:
            formula: Callable[[Any, Batch], Tensor] = cls.__dict__["score"]

            @functools.wraps(formula)
            def score(self: Detector, batch: Batch) -> Tensor:
                return self.checked_score(formula, batch)

            cls.score = score  # type: ignore[method-assign]

    def passes(self, head: Head) -> Passes:
        """Ask for statistics: ``m = yield Moments(P)`` suspends until m holds the sum over the training data."""
        return
        yield

    def score(self, batch: Batch) -> Tensor:
        """(N,) scores of a batch; higher is more in-distribution."""
        raise NotImplementedError(f"{type(self).__name__} defines no score")

    def observe(self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None) -> Batch:
        """What a Guard scores and learns from: the untouched model's Batch of these images, with whatever else the
        score rests on in ``Batch.views`` or ``Batch.layers``. `labels` (N,) are there only while fitting."""
        for part in self.parts:
            classifier = functools.partial(part.observe, classifier=classifier, labels=labels)
        return classifier(images)

    def example(self) -> Batch:
        """Two rows of zeros with all that a score reads, to try a fitted detector on."""
        batch = Batch(self.head_weight.new_zeros(2, self.head_weight.shape[1]))
        for inner in (part.example() for part in self.parts):
            layers = {**(batch.layers or {}), **(inner.layers or {})}
            batch = batch._replace(layers=layers or None, views=inner.views if batch.views is None else batch.views)
        return batch

    @property
    def parts(self) -> tuple[Detector, ...]:
        """The detectors that this one is made of, which keep the head; none for most."""
        return ()

    def fit(self, batches: Batch | Iterable[Batch], head: Head) -> Self:
        """Learn from training data: one Batch, or an iterable of batches that can be iterated once per pass."""
        if self.needs.network:
            raise ValueError(self._through_a_guard("guard.fit(loader)"))
        fit_detector(self, batches, head)
        return self

    def _through_a_guard(self, call: str) -> str:
        lack = f"{self.label} looks at the images through the network, so features are not enough"
        return f"{lack}: use it as guard = fdbd.Guard(model, {self.label!r}) and call {call}"

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes:
        """Begin a fit: keep the head and return the running `passes`. Drivers call this, users call `fit`."""
        if head.num_classes < 2:
            raise ValueError(f"a detector needs at least two classes, the head has {head.num_classes}")
        for module in self._family():
            module._buffers.clear()
            module.fit_dtype = torch.promote_types(head.weight.dtype, dtype or head.weight.dtype)
            if isinstance(module, Detector) and not module.parts:
                module.set(head_weight=head.weight, head_bias=head.bias)
        return self.passes(head)

    def forget(self) -> None:
        """Drop everything that was learnt."""
        for module in self._family():
            module._buffers.clear()

    def _family(self) -> Iterator[Configured]:
        yield self
        yield from (part for part in self.children() if isinstance(part, Configured) and not isinstance(part, Detector))
        for part in self.parts:
            yield from part._family()

    @property
    def label(self) -> str:
        """How `fdbd.create` spells this detector, such as "react+energy"."""
        return self.name or type(self).__name__

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` or a file has filled the buffers."""
        return all(part.is_fitted for part in self.parts) if self.parts else "head_weight" in self._buffers

    def require_fitted(self) -> None:
        """Raise NotFittedError unless `is_fitted`."""
        if not self.is_fitted:
            kind = type(self).__name__
            raise NotFittedError(f"{kind} is not fitted: call fit(batches, head), or load a fitted one from a file")

    @property
    def head_weight(self) -> Tensor:
        """(C, P) weight of the head that it was fitted with."""
        return self._of_head("head_weight")

    @property
    def head_bias(self) -> Tensor:
        """(C,) bias of the head that it was fitted with."""
        return self._of_head("head_bias")

    def _of_head(self, name: str) -> Tensor:
        if self.parts:
            return self.parts[0]._of_head(name)
        tensor = self._buffers.get(name)  # as an attribute of a module it would cost a microsecond
        if tensor is None:
            self.require_fitted()
            raise AttributeError(name)
        return tensor

    @property
    def head(self) -> Head:
        """The head that it was fitted with."""
        self.require_fitted()
        head = Head.__new__(Head)  # checked when it was kept
        head.weight, head.bias, head.is_binary = self.head_weight, self.head_bias, False
        return head

    def buffer_shape(self, name: str) -> str | None:
        return {"head_weight": "C P", "head_bias": "C"}.get(name) or super().buffer_shape(name)

    def forward(self, batch: Batch) -> Tensor:
        return self.score(batch)

    def checked_score(self, formula: Callable[[Self, Batch], Tensor], batch: Batch) -> Tensor:
        """(N,) scores by a formula that is given a prepared batch, −inf for rows that cannot be trusted.

        Not trusted are rows with a number that is not finite, in what the detector reads and as it was given, and rows
        whose score is not finite, in float64 where the dtype of the fit is too narrow for them. This is the only place
        that decides so; autocast around it changes nothing.
        """
        if autocasts():
            with full_precision():
                return self.checked_score(formula, batch)
        prepared = self.prepare(batch)
        if tracing():  # a graph cannot inspect values, so no row can be scored again in float64
            scores = formula(self, prepared)
            for values in [] if self.notices_bad_rows else self._read(prepared):
                scores = torch.where((values.abs() < _LARGE[scores.dtype]).all(dim=1), scores, torch.nan)
            return torch.where(scores.abs() < torch.inf, scores, -torch.inf)
        if not prepared.features.shape[0]:
            return prepared.features.new_zeros(0)
        scores = formula(self, prepared)
        read = [] if self.notices_bad_rows else self._read(prepared)
        limit = _LARGE[scores.dtype]
        if all(_within(values, limit) for values in read) and _within(scores, torch.inf):
            return scores
        doubtful = ~torch.isfinite(scores.detach())
        for values in read:
            doubtful |= ~(torch.maximum(values.amax(dim=1), -values.amin(dim=1)) < limit)  # a NaN is not below
        given = batch.to(prepared.features.device)
        finite = torch.stack([torch.isfinite(values).all(dim=1) for values in self._read(given)]).all(dim=0)
        rescued = (doubtful & finite).nonzero()[:, 0]
        if prepared.features.dtype != torch.float64 and len(rescued):
            # On the CPU, since this is rare and not every device has float64.
            exact = copy.deepcopy(self).cpu().double().score(given.rows(rescued).cpu().to(dtype=torch.float64))
            limits = torch.finfo(scores.dtype)
            exact = torch.where(exact.isfinite(), exact.clamp(limits.min, limits.max), exact)
            scores = scores.index_copy(0, rescued, exact.to(scores.dtype).to(scores.device))
        return torch.where(finite & torch.isfinite(scores), scores, -torch.inf)

    def prepare(self, batch: Batch) -> Batch:
        """The batch as the formula expects it: checked shapes, the dtype of the fit, logits where it reads them."""
        weight, needs = self._of_head("head_weight"), self.needs
        if needs.network and batch.views is None:
            raise ValueError(self._through_a_guard("guard(images)"))
        classes, width = weight.shape
        features = as_matrix(batch.features, width, "features", "the head's input", weight.dtype)
        logits = batch.logits
        if needs.logits:
            if logits is None:
                logits = torch.nn.functional.linear(features, weight, self._of_head("head_bias"))
            else:
                logits = as_matrix(logits, classes, "logits", "the head's classes", weight.dtype)
        if isinstance(logits, Tensor) and logits.shape[0] != features.shape[0]:
            raise ValueError(f"{features.shape[0]} rows of features but {logits.shape[0]} rows of logits")
        if batch.layers is not None or batch.views is not None:
            batch = batch._replace(labels=None).to(dtype=weight.dtype)
        if features is batch.features and logits is batch.logits:
            return batch
        return batch._replace(features=features, logits=logits)

    def _read(self, batch: Batch) -> list[Tensor]:
        """(N, D) each: the parts of a batch that a score rests on."""
        needs, logits = self.needs, batch.logits
        parts = [batch.features] if needs.features or (needs.logits and logits is None) else []
        parts += [logits] if needs.logits and logits is not None else []
        if needs.views and batch.views is not None:
            parts.append(batch.views.transpose(0, 1).flatten(1))
        return parts + [as_tensor((batch.layers or {})[name]) for name in needs.layers]


def _within(values: Tensor, limit: float) -> bool:
    """Whether all values are known to lie within ±limit, none of them NaN: no value exceeds the norm of all, and that
    is found ten times as fast as the largest of each row."""
    return bool(torch.linalg.vector_norm(values).item() < limit)
