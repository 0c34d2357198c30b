"""The contract of a detector: say what it needs, ask for statistics, keep buffers, score batches.
It knows arrays, not models or loaders; the base class fits, checks batches, and fails closed: a row
that cannot be trusted scores −inf."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
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

    When the class is created, its `score` is replaced by a method that passes it to
    `checked_score`, so a formula needs no checks. Two hooks are for the few detectors that need
    them: `observe` and `example`. Detectors that it holds as submodules keep the head for it, and
    forget what they had learnt when it is fitted.

    >>> import fdbd
    >>> class Largest(fdbd.Detector):
    ...     needs = Needs(passes=0)
    ...     def score(self, batch):
    ...         return batch.features.amax(dim=1)
    >>> Largest().fit(fdbd.Batch(torch.eye(2)), fdbd.Head(torch.eye(2))).score(fdbd.Batch(torch.tensor([[1.0, 5.0]])))
    tensor([5.])
    """

    notices_bad_rows: bool = False
    """Whether the formula itself gives NaN for every row with a number that is not finite or too
    large, so that the base class need not read the batch a second time to look for them."""

    def __init__(self) -> None:
        super().__init__()
        kernels.survive_forks()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if formula := cls.__dict__.get("score"):
            checked = functools.wraps(formula)(
                lambda self, batch: self.checked_score(formula, batch)
            )
            cls.score = checked  # type: ignore[method-assign]

    def passes(self, head: Head) -> Passes:
        """Ask for statistics: ``m = yield Moments(P)`` suspends until m holds the sum over the
        training data."""
        return
        yield

    def score(self, batch: Batch) -> Tensor:
        """(N,) scores of a batch; higher is more in-distribution."""
        raise NotImplementedError(f"{type(self).__name__} defines no score")

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """What a Guard scores and learns from: the untouched model's Batch of these images, with
        whatever else the score rests on in ``Batch.views`` or ``Batch.layers``. `labels` (N,) are
        there only while fitting."""
        return classifier(images)

    def example(self) -> Batch:
        """Two rows of zeros with all that a score reads, to try a fitted detector on."""
        return Batch(self.head.weight.new_zeros(2, self.head.num_features))

    def fit(self, batches: Batch | Iterable[Batch], head: Head) -> Self:
        """Learn from training data: one Batch, or an iterable of batches that can be iterated once
        per pass."""
        if self.needs.network:
            raise ValueError(self._through_a_guard("guard.fit(loader)"))
        fit_detector(self, batches, head)
        return self

    def _through_a_guard(self, call: str) -> str:
        lack = f"{self.label} looks at the images through the network, so features are not enough"
        return f"{lack}: use it as guard = fdbd.Guard(model, {self.label!r}) and call {call}"

    def start(self, head: Head, dtype: torch.dtype | None = None) -> Passes:
        """Begin a fit: keep the head and return the running `passes`. Drivers call this, users call
        `fit`."""
        if head.num_classes < 2:
            raise ValueError(
                f"a detector needs at least two classes, the head has {head.num_classes}"
            )
        self.forget()
        for module in self.modules():
            if isinstance(module, Configured):
                module.fit_dtype = torch.promote_types(
                    head.weight.dtype, dtype or head.weight.dtype
                )
        for detector in innermost(self):
            detector.set(head_weight=head.weight, head_bias=head.bias)
        return self.passes(head)

    def forget(self) -> None:
        """Drop everything that was learnt."""
        for module in self.modules():
            if isinstance(module, Configured):
                module._buffers.clear()

    @property
    def label(self) -> str:
        """How `fdbd.create` spells this detector, such as "react+energy"."""
        return self.name or type(self).__name__

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` or a file has filled the buffers."""
        return all("head_weight" in detector._buffers for detector in innermost(self))

    @property
    def head(self) -> Head:
        """The head that it was fitted with; NotFittedError if it was not."""
        buffers: Any = (
            self._buffers if "head_weight" in self._buffers else innermost(self)[0]._buffers
        )
        if "head_weight" not in buffers:
            kind = type(self).__name__
            raise NotFittedError(
                f"{kind} is not fitted: call fit(batches, head), or load a fitted one from a file"
            )
        head = Head.__new__(Head)  # checked when it was kept
        head.weight, head.bias, head.is_binary = buffers["head_weight"], buffers["head_bias"], False
        return head

    @property
    def head_weight(self) -> Tensor:
        """(C, P) weight of the head that it was fitted with."""
        return self.head.weight

    @property
    def head_bias(self) -> Tensor:
        """(C,) bias of the head that it was fitted with."""
        return self.head.bias

    def buffer_shape(self, name: str) -> str | None:
        return {"head_weight": "C P", "head_bias": "C"}.get(name) or super().buffer_shape(name)

    def forward(self, batch: Batch) -> Tensor:
        return self.score(batch)

    def checked_score(self, formula: Callable[[Self, Batch], Tensor], batch: Batch) -> Tensor:
        """(N,) scores by a formula that is given a prepared batch, −inf for rows that cannot be
        trusted.

        Not trusted are rows with a number that is not finite, in what the detector reads and as it
        was given, and rows whose score is not finite, in float64 where the dtype of the fit is too
        narrow for them. This is the only place that decides so; autocast around it changes nothing.
        """
        if autocasts():
            with full_precision():
                return self.checked_score(formula, batch)
        prepared = self.prepare(batch)
        if not tracing() and not prepared.features.shape[0]:
            return prepared.features.new_zeros(0)
        scores = formula(self, prepared)
        read = [] if self.notices_bad_rows else self._read(prepared)
        limit = _LARGE[scores.dtype]
        if tracing():  # a graph cannot inspect values, so no row can be scored again in float64
            for values in read:
                scores = torch.where((values.abs() < limit).all(dim=1), scores, torch.nan)
            return torch.where(scores.abs() < torch.inf, scores, -torch.inf)
        # No value exceeds the norm of all, which is found ten times as fast as the largest value of
        # each row.
        norms = (torch.linalg.vector_norm(values).item() for values in read)
        if all(norm < limit for norm in norms) and math.isfinite(scores.sum().item()):
            return scores
        doubtful = ~torch.isfinite(scores.detach())
        for values in read:
            doubtful |= ~(
                torch.maximum(values.amax(dim=1), -values.amin(dim=1)) < limit
            )  # a NaN is not below
        given = batch.to(prepared.features.device)
        finite = torch.stack(
            [torch.isfinite(values).all(dim=1) for values in self._read(given)]
        ).all(dim=0)
        rescued = (doubtful & finite).nonzero()[:, 0]
        if prepared.features.dtype != torch.float64 and len(rescued):
            # On the CPU, since this is rare and not every device has float64.
            exact = (
                copy.deepcopy(self)
                .cpu()
                .double()
                .score(given.rows(rescued).cpu().to(dtype=torch.float64))
            )
            limits = torch.finfo(scores.dtype)
            exact = torch.where(exact.isfinite(), exact.clamp(limits.min, limits.max), exact)
            scores = scores.index_copy(0, rescued, exact.to(scores.dtype).to(scores.device))
        return torch.where(finite & torch.isfinite(scores), scores, -torch.inf)

    def prepare(self, batch: Batch) -> Batch:
        """The batch as the formula expects it: checked shapes, the dtype of the fit, logits where
        it reads them."""
        head, logits = self.head, batch.logits
        if self.needs.network and batch.views is None:
            raise ValueError(self._through_a_guard("guard(images)"))
        dtype = head.weight.dtype
        features = as_matrix(
            batch.features, head.num_features, "features", "the head's input", dtype
        )
        if self.needs.logits:
            if logits is None:
                logits = torch.nn.functional.linear(features, head.weight, head.bias)
            logits = as_matrix(logits, head.num_classes, "logits", "the head's classes", dtype)
        if isinstance(logits, Tensor) and logits.shape[0] != features.shape[0]:
            raise ValueError(
                f"{features.shape[0]} rows of features but {logits.shape[0]} rows of logits"
            )
        if batch.layers is not None or batch.views is not None:
            batch = batch._replace(labels=None).to(dtype=dtype)
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


def innermost(module: nn.Module) -> list[Detector]:
    """The detectors in a module that hold no others."""
    inner = [detector for child in module.children() for detector in innermost(child)]
    return inner if inner or not isinstance(module, Detector) else [module]
