"""The contract of a detector: say what it needs, ask for statistics, keep buffers, score batches.
It knows arrays, not models or loaders; the base class fits, checks batches, and fails closed: a row
that cannot be trusted scores −inf."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fdbd.core.batch import (
    Batch,
    Head,
    Inputs,
    as_matrix,
    as_tensor,
    required_labels,
    required_logits,
    required_perturbed,
    unit_rows,
)
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
from fdbd.kernels import survive_forks
from fdbd.util.torch_compat import autocasts, full_precision, is_out_of_sight, tracing

_LARGE = {torch.float32: 1e15, torch.float64: 1e145}
"""Magnitudes whose squares, summed over any feature width, still fit the dtype."""


class Detector(Configured):
    """Scores how in-distribution a sample is: higher is more in-distribution.

    Users call `fit` and `score`. An author writes

    - `needs`: what it reads and what its fit takes (`Needs`);
    - `passes`: what to learn from the training data, kept as buffers by
      ``self.set_buffers(name=tensor)``;
    - `formula`: the scores of a checked batch.

    Two hooks are for the few detectors that need them: `observe` and `example`. Detectors that it
    holds as submodules keep the head for it, and forget what they had learnt when it is fitted.

    >>> import fdbd
    >>> class Largest(fdbd.Detector):
    ...     needs = Needs(passes=0)
    ...
    ...     def formula(self, batch):
    ...         return batch.features.amax(dim=1)
    >>> Largest().fit(fdbd.Batch(torch.eye(2)), fdbd.Head(torch.eye(2))).score(
    ...     fdbd.Batch(torch.tensor([[1.0, 5.0]]))
    ... )
    tensor([5.])
    """

    #: weight of the head that it was fitted with
    head_weight: Annotated[Tensor, "C P"]
    #: its bias
    head_bias: Annotated[Tensor, "C"]

    has_known_direction: bool = True
    """Whether a higher score is known to mean in-distribution, as everywhere but in ablations."""
    _notices_bad_rows: bool = False
    """Whether the formula itself gives NaN for every row with a number that is not finite or too
    large, so that the base class need not read the batch a second time to look for them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "score" in cls.__dict__:
            _adopt_old_score(cls)

    # For users

    def fit(self, batches: Batch | Iterable[Batch], head: Head) -> Self:
        """Learn from training data: one Batch, or an iterable of batches that can be iterated once
        per pass."""
        if self.needs.network:
            raise ValueError(self._through_a_guard("guard.fit(loader)"))
        fit_detector(self, batches, head)
        return self

    def score(self, batch: Batch) -> Tensor:
        """(N,) scores of a batch; higher is more in-distribution. −inf for a row that cannot be
        trusted. Not to be overridden: a detector's author writes `formula`."""
        # A graph is for any number of rows, so their number must not decide.
        if not tracing():
            scores = self._score_of_few(batch)
            if scores is not None:
                return scores
        return self._checked_score(type(self).formula, batch)

    def forward(self, batch: Batch) -> Tensor:
        return self.score(batch)

    @property
    def label(self) -> str:
        """How `fdbd.create` spells this detector, such as "react+energy"."""
        return self.name or type(self).__name__

    @property
    def is_fitted(self) -> bool:
        """Whether `fit` or a file has filled the buffers."""
        if "head_weight" in self._buffers:
            return True
        return all("head_weight" in detector._buffers for detector in innermost(self))

    @property
    def head(self) -> Head:
        """The head that it was fitted with; NotFittedError if it was not."""
        buffers: Any = self._buffers
        if "head_weight" not in buffers:
            buffers = innermost(self)[0]._buffers
        if "head_weight" not in buffers:
            raise NotFittedError(
                f"{type(self).__name__} is not fitted: call fit(batches, head), or load a fitted "
                "one from a file"
            )
        return Head._unchecked(
            buffers["head_weight"], buffers["head_bias"], "head_is_cosine" in buffers
        )

    # For authors

    def passes(self, head: Head) -> Passes:
        """Ask for statistics: ``m = yield Moments(P)`` suspends until m holds the sum over the
        training data."""
        return
        yield

    @abstractmethod
    def formula(self, batch: Batch) -> Tensor:
        """(N,) scores of a checked batch: right shapes, the dtype of the fit, logits if `needs`
        names them. NaN means that a row is not to be trusted. `score` calls this."""
        raise NotImplementedError(f"{type(self).__name__} defines no formula")

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """What a Guard scores and learns from: the untouched model's Batch of these images, with
        whatever else the score rests on in its other fields. `labels` (N,) are there only while
        fitting."""
        return classifier(images)

    def example(self) -> Batch:
        """Two rows of zeros with all that a score reads, to try a fitted detector on."""
        return Batch(self.head.weight.new_zeros(2, self.head.num_features))

    # For drivers of a fit, for explanations and for subclasses

    def _prepare(self, batch: Batch) -> Batch:
        """The batch as the formula gets it: checked shapes, the dtype of the fit, logits if the
        formula reads them."""
        head = self.head
        dtype = head.weight.dtype
        is_bare = batch.views is None and batch.perturbed is None and batch.layers is None
        if is_bare and self.needs.network:
            raise ValueError(self._through_a_guard("guard(images)"))
        features = as_matrix(
            batch.features, head.num_features, "features", "the head's input", dtype
        )
        if head.is_cosine:
            features = unit_rows(features)
        logits = batch.logits
        if self.needs.logits:
            logits = _prepared_logits(logits, features, head)
        # Logits that the formula does not read are passed on as they were given, perhaps an array.
        if isinstance(logits, Tensor) and logits.shape[0] != features.shape[0]:
            raise ValueError(
                f"{features.shape[0]} rows of features but {logits.shape[0]} rows of logits"
            )
        if not is_bare:
            batch = self._other_parts(batch, head)
        # The usual case, and a copy takes longer than the score of one row.
        if features is batch.features and logits is batch.logits:
            return batch
        return batch._replace(features=features, logits=logits)

    def _other_parts(self, batch: Batch, head: Head) -> Batch:
        """The batch with layers, views and perturbed features as the formula gets them."""
        batch = batch._replace(labels=None, adversarial=None).to(dtype=head.weight.dtype)
        if head.is_cosine and batch.views is not None:
            batch = batch._replace(views=torch.stack([unit_rows(view) for view in batch.views]))
        if head.is_cosine and batch.perturbed is not None:
            batch = batch._replace(perturbed=unit_rows(batch.perturbed))
        return batch

    def _start_fit(self, head: Head, dtype: torch.dtype | None = None) -> Passes:
        """Begin a fit: keep the head and return the running `passes`."""
        if head.num_classes < 2:
            raise ValueError(
                f"a detector needs at least two classes, the head has {head.num_classes}"
            )
        self._forget()
        fit_dtype = torch.promote_types(head.weight.dtype, dtype or head.weight.dtype)
        for module in self.modules():
            if isinstance(module, Configured):
                module.fit_dtype = fit_dtype
        for detector in innermost(self):
            detector.set_buffers(head_weight=head.weight, head_bias=head.bias)
            if head.is_cosine:
                detector.set_buffers(head_is_cosine=torch.ones((), dtype=torch.bool))
        program = self.passes(head)
        if not isinstance(program, Generator):
            raise TypeError(
                f"{type(self).__name__}.passes yields nothing, expected to ask for a statistic by "
                "yield, such as mean = yield Mean(head.num_features)"
            )
        return program

    def _forget(self) -> None:
        """Drop everything that was learnt."""
        for module in self.modules():
            if isinstance(module, Configured):
                module._buffers.clear()

    def _through_a_guard(self, call: str) -> str:
        return (
            f"{self.label} looks at the images through the network, so features are not enough: "
            f"use it as guard = fdbd.Guard(model, {self.label!r}) and call {call}"
        )

    def _score_of_few(self, batch: Batch) -> Tensor | None:
        """(N,) scores of a few rows that can all be trusted, for detectors with a quicker way to
        them than through all the checks; None: these rows take the usual way."""
        return None

    # Failing closed

    def _checked_score(self, formula: Callable[[Any, Batch], Tensor], batch: Batch) -> Tensor:
        """(N,) scores by a formula that is given a prepared batch, −inf for rows that cannot be
        trusted.

        Not trusted are rows with a number that is not finite, in what the detector reads and as it
        was given, and rows whose score is not finite, in float64 if the dtype of the fit is too
        narrow for them. This is the only place that decides so; autocast around it changes nothing.
        """
        if autocasts():
            with full_precision():
                return self._checked_score(formula, batch)
        prepared = self._prepare(batch)
        if not tracing():
            survive_forks()
            if not prepared.features.shape[0]:
                return prepared.features.new_zeros(0)
        scores = formula(self, prepared)
        if not isinstance(scores, Tensor):
            raise TypeError(
                f"{type(self).__name__}.formula returned a {type(scores).__name__}, expected a "
                "tensor (N,) of scores"
            )
        read = [] if self._notices_bad_rows else self._read(prepared)
        if is_out_of_sight(scores):
            return _closed_by_masks(scores, read)
        if _all_are_plain(scores, read):
            return scores
        return self._closed(scores, read, batch)

    def _closed(self, scores: Tensor, read: list[Tensor], batch: Batch) -> Tensor:
        """The scores with doubtful rows decided one by one, in float64 if they can be trusted."""
        limit = _LARGE[scores.dtype]
        doubtful = ~torch.isfinite(scores.detach())
        for values in read:
            largest = torch.maximum(values.amax(dim=1), -values.amin(dim=1))
            # A NaN is not below the limit either.
            doubtful |= ~(largest < limit)
        given = batch.to(scores.device)
        finite = torch.ones_like(doubtful)
        for values in self._read(given):
            finite &= torch.isfinite(values).all(dim=1)
        rescued = (doubtful & finite).nonzero()[:, 0]
        is_wide = self.head.weight.dtype == torch.float64
        if len(rescued) and not is_wide:
            scores = scores.index_copy(0, rescued, self._in_float64(given.rows(rescued), scores))
        return torch.where(finite & torch.isfinite(scores), scores, -torch.inf)

    def _in_float64(self, batch: Batch, like: Tensor) -> Tensor:
        """(N,) scores computed in float64 and rounded to the dtype, and on the device, of `like`.
        On the CPU, since this is rare and not every device has float64."""
        wide = copy.deepcopy(self).cpu().double()
        exact = wide.score(batch.cpu().to(dtype=torch.float64))
        limits = torch.finfo(like.dtype)
        exact = torch.where(exact.isfinite(), exact.clamp(limits.min, limits.max), exact)
        return exact.to(like.dtype).to(like.device)

    def _read(self, batch: Batch) -> list[Tensor]:
        """(N, D) each: the parts of a batch that a score rests on."""
        needs = self.needs
        parts = []
        if needs.features or (needs.logits and batch.logits is None):
            parts.append(batch.features)
        if needs.logits and batch.logits is not None:
            parts.append(batch.logits)
        if needs.views and batch.views is not None:
            parts.append(batch.views.transpose(0, 1).flatten(1))
        if needs.perturbed and batch.perturbed is not None:
            parts.append(batch.perturbed)
        for name in needs.layers:
            parts.append(as_tensor((batch.layers or {})[name]))
        return parts


def _prepared_logits(logits: Tensor | None, features: Tensor, head: Head) -> Tensor:
    """(N, C) the logits that were given, or else the head's, in the dtype of the fit."""
    if logits is None:
        return nn.functional.linear(features, head.weight, head.bias)
    return as_matrix(logits, head.num_classes, "logits", "the head's classes", head.weight.dtype)


def _all_are_plain(scores: Tensor, read: list[Tensor]) -> bool:
    """Whether all scores are finite, and all numbers that they rest on finite and of moderate size.
    No value exceeds the norm of all, which is found ten times as fast as the largest value of each
    row."""
    limit = _LARGE[scores.dtype]
    for values in read:
        if not torch.linalg.vector_norm(values).item() < limit:
            return False
    return math.isfinite(scores.sum().item())


def _closed_by_masks(scores: Tensor, read: list[Tensor]) -> Tensor:
    """The scores, −inf for each row that is not finite or rests on numbers that are not finite or
    too large.

    For graphs, which cannot branch on a number, and for accelerators, which would have to be waited
    for: unlike `Detector._closed`, no row is scored again in float64."""
    limit = _LARGE[scores.dtype]
    for values in read:
        scores = torch.where((values.abs() < limit).all(dim=1), scores, torch.nan)
    return torch.where(scores.abs() < torch.inf, scores, -torch.inf)


def _adopt_old_score(cls: type[Detector]) -> None:
    """Until 0.2 an author wrote `score` instead of `formula`: such a class still works, with
    a warning."""
    warnings.warn(
        f"{cls.__qualname__} defines score(batch): rename it to formula(batch), which Detector's "
        "score calls with a checked batch; the old name will be removed in 0.4",
        DeprecationWarning,
        stacklevel=4,
    )
    formula: Any = cls.__dict__["score"]

    @functools.wraps(formula)
    def score(self: Detector, batch: Batch) -> Tensor:
        return self._checked_score(formula, batch)

    cls.score = score  # type: ignore[method-assign]


def innermost(module: nn.Module) -> list[Detector]:
    """The detectors in a module that hold no others."""
    inner = []
    for child in module.children():
        inner += innermost(child)
    if not inner and isinstance(module, Detector):
        return [module]
    return inner
