"""Drift of features: a two-sample test per feature space and window, for shifts that leave the
scores alone. Needs torch, neither a guard nor a model."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fdbd.core.batch import ArrayLike, as_tensor

FeatureSpaces = ArrayLike | Mapping[str, ArrayLike]
"""Features (N, P), or several feature spaces of the same samples by name."""
_BLOCK = 512
"""Permutations that are computed together."""
_ENOUGH = 100
"""After so many permutations with a distance at least as large as the window's, there is no alarm,
and the test of the window ends (Besag & Clifford, 1991)."""
_ONE = "features"
"""The name of a single feature space."""


class WindowResult(NamedTuple):
    """The test of one window in one feature space."""

    space: str
    window: int
    """Number of the window, from 1."""
    distance: float
    """Energy distance between window and reference: 0 for the same distribution, else above."""
    p_value: float
    """Small means that the window is unlike the reference."""
    is_alarm: bool


class FeatureDrift:
    """A windowed two-sample test on features, beside the martingale on scores (`DriftTest`): a
    shift along a direction that the detector does not read leaves the scores as they are.

    Each full window is compared with the reference by the energy distance (Székely & Rizzo,
    "Energy statistics", 2013), 2 E‖X − Y‖ − E‖X − X'‖ − E‖Y − Y'‖, which is zero only for equal
    distributions. Its p-value comes from random permutations of the two samples:

        p = (1 + #{permutations with a distance at least as large}) / (1 + #permutations)

    P(p ≤ a) ≤ a for every a and every sample size, if reference and window are exchangeable
    (Phipson & Smyth, 2010; Besag & Clifford, 1991, for a test that ends early). An alarm is p ≤
    delta / (windows · spaces): by the union bound, which needs no independence of windows that
    share a reference, a horizon of `windows` windows has a false alarm with probability at most
    `delta`. Then the next horizon begins.

    Samples in bursts, such as frames of a video, are not exchangeable: give one of each.

    Args:
        reference: in-distribution features (n, P), or several spaces by name, such as
            ``classifier(images).layers``. Data that neither the network's training nor the fit has
            seen; at most `rows` of them, drawn at random, are kept.
        delta: largest probability of a false alarm in a horizon, a fraction in (0, 1).
        window: samples per window.
        windows: windows per horizon.
        rows: most rows of the reference.
        seed: of the rows that are kept, and of the permutations.

    >>> drift = FeatureDrift(torch.randn(400, 8), window=50)
    >>> [result.is_alarm for result in drift.update(torch.randn(50, 8) + 1)]
    [True]
    >>> drift
    FeatureDrift(windows of 50: 1 tested, samples that wait: 0, ALARM in window 1)
    """

    def __init__(
        self,
        reference: FeatureSpaces,
        *,
        delta: float = 0.01,
        window: int = 200,
        windows: int = 20,
        rows: int = 500,
        seed: int = 0,
    ) -> None:
        if not 0 < delta < 1:
            raise ValueError(
                f"delta is {delta}, expected the probability of a false alarm, between 0 and 1"
            )
        _check_whole("window", window, 2)
        _check_whole("windows", windows, 1)
        _check_whole("rows", rows, 2)
        self.delta = delta
        self.window = window
        self.windows = windows
        self._generator = torch.Generator().manual_seed(seed)
        self._reference: dict[str, Tensor] = {}
        for name, features in _checked_spaces(reference).items():
            if len(features) < 2:
                raise ValueError(f"the reference of {name!r} has {len(features)} rows, expected 2")
            order = torch.randperm(len(features), generator=self._generator)
            self._reference[name] = features[order[:rows]]
        self.level = delta / (windows * len(self._reference))
        """The p-value at or below which a window raises the alarm."""
        # Ten times as many as the level takes, so that no alarm depends on a single permutation.
        self._permutations = max(2 * _ENOUGH, math.ceil(10 / self.level))
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self._reference}
        self._num_waiting = 0
        self._lock = threading.Lock()
        self.skipped = 0
        """Samples with a number that is not finite, which no window holds: their scores are −inf,
        and the test of the scores counts them."""
        self.tested = 0
        """Windows tested so far."""
        self.alarm: WindowResult | None = None
        """The first alarm since the start or the last `reset`."""

    def __repr__(self) -> str:
        state = "no alarm"
        if self.alarm is not None:
            state = f"ALARM in window {self.alarm.window}"
        return (
            f"FeatureDrift(windows of {self.window:,}: {self.tested:,} tested, samples that wait: "
            f"{self._num_waiting:,}, {state})"
        )

    def update(self, features: FeatureSpaces) -> list[WindowResult]:
        """Add features of new samples; returns the tests of the windows that they fill."""
        spaces = _checked_spaces(features)
        if spaces.keys() != self._reference.keys():
            raise ValueError(
                f"the feature spaces are {', '.join(spaces)}, expected those of the reference: "
                f"{', '.join(self._reference)}"
            )
        results: list[WindowResult] = []
        with self._lock:
            is_finite = self._check_rows(spaces)
            self.skipped += int((~is_finite).sum())
            for name, values in spaces.items():
                self._waiting[name].append(values[is_finite])
            self._num_waiting += int(is_finite.sum())
            while self._num_waiting >= self.window:
                results.extend(self._test_next_window())
        return results

    def reset(self) -> None:
        """Take the alarm back and begin a new horizon and window."""
        with self._lock:
            self.alarm = None
            self.tested = 0
            self._num_waiting = 0
            for name in self._waiting:
                self._waiting[name] = []

    def _check_rows(self, spaces: Mapping[str, Tensor]) -> Tensor:
        """(N,) whether all numbers of a sample are finite; ValueError for shapes that do not
        fit."""
        is_finite: Tensor | None = None
        for name, values in spaces.items():
            width = self._reference[name].shape[1]
            if values.shape[1] != width:
                raise ValueError(
                    f"features of {name!r} have shape {tuple(values.shape)}, expected (N, {width})"
                )
            finite = torch.isfinite(values).all(dim=1)
            if is_finite is not None and len(is_finite) != len(finite):
                raise ValueError(f"{name!r} has {len(finite)} rows, another space {len(is_finite)}")
            is_finite = finite if is_finite is None else is_finite & finite
        assert is_finite is not None
        return is_finite

    def _test_next_window(self) -> list[WindowResult]:
        self.tested += 1
        results = []
        for name, waiting in self._waiting.items():
            rows = torch.cat(waiting)
            self._waiting[name] = [rows[self.window :]]
            reference = self._reference[name]
            distance, p_value = self._compare(rows[: self.window], reference)
            result = WindowResult(name, self.tested, distance, p_value, p_value <= self.level)
            if result.is_alarm and self.alarm is None:
                self.alarm = result
            results.append(result)
        self._num_waiting -= self.window
        return results

    def _compare(self, window: Tensor, reference: Tensor) -> tuple[float, float]:
        """The energy distance of two samples, and its p-value by permutations."""
        pooled = torch.cat([window, reference])
        distances = torch.cdist(pooled, pooled)
        # With weights 1/m on the window and −1/n on the reference, −wᵀDw is the energy distance.
        weights = torch.full((len(pooled),), -1 / len(reference), dtype=pooled.dtype)
        weights[: len(window)] = 1 / len(window)
        observed = -weights @ distances @ weights
        # Equal distances count as at least as large, whatever they were rounded to.
        tolerance = 1e-9 * float(distances.max())
        num_as_large = 0
        done = 0
        while done < self._permutations:
            count = min(_BLOCK, self._permutations - done)
            permuted = self._permuted(weights, count)
            values = -(permuted * (distances @ permuted)).sum(dim=0)
            is_as_large = values >= observed - tolerance
            # After each permutation of this block, how many were as large so far.
            so_far = num_as_large + is_as_large.cumsum(0)
            if so_far[-1] >= _ENOUGH:
                # The p-value stays valid, since it counts the permutations drawn until here.
                place = int((so_far >= _ENOUGH).int().argmax())
                return max(0.0, float(observed)), _ENOUGH / (done + place + 1)
            num_as_large = int(so_far[-1])
            done += count
        return max(0.0, float(observed)), (1 + num_as_large) / (1 + self._permutations)

    def _permuted(self, weights: Tensor, count: int) -> Tensor:
        """(N, count) the weights (N,) in random orders."""
        columns = []
        for _ in range(count):
            order = torch.randperm(len(weights), generator=self._generator)
            columns.append(weights[order])
        return torch.stack(columns, dim=1)


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number, at least {least}")


def _checked_spaces(features: FeatureSpaces) -> dict[str, Tensor]:
    """Feature spaces by name, in float64 on the CPU."""
    if not isinstance(features, Mapping):
        features = {_ONE: features}
    if not features:
        raise ValueError("there are no features, expected (N, P) or several spaces by name")
    found = {}
    for name, values in features.items():
        tensor = as_tensor(values).detach().cpu()
        if tensor.ndim != 2 or tensor.is_complex():
            raise ValueError(
                f"features of {name!r} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}, "
                "expected real numbers (N, P)"
            )
        found[name] = tensor.double()
    return found
