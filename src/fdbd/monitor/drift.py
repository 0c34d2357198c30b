"""A sequential test of whether a stream of scores still looks like the calibration scores, at any
time."""

from __future__ import annotations

import math
import random
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

_BETS = ((0.1, 0.15), (0.3, 0.3), (1.0, 0.7), (1.0, 0.85))
"""(ε, κ) of the bets 1 − ε + ε·κ·p^(κ−1), which win if scores have moved to the low end of their
range: a few of the scores, many, all, or all of them a little. With 1 − p in place of p they win if
scores have moved to the high end. Each pays 1 on average if p is uniform."""
_EDGE = 1e-12
"""How far p-values are kept from 0 and 1: a bet's payout then stays finite, and can only get
smaller."""
_HUGE = 1e200
MAX_HORIZON = 1_000_000_000
"""The longest horizon, a number that no service reaches: bounds what a forged state can ask for."""


class DriftTest:
    """A betting martingale on online, smoothed conformal p-values (Vovk, Gammerman & Shafer, 2005).

    Each score s is ranked among the calibration scores and all stream scores before it, then joins
    them:

        p = (#{earlier < s} + u · (1 + #{earlier = s})) / (1 + #earlier),   u uniform on (0, 1]

    While calibration and stream are exchangeable (no drift) these p-values are independent and
    uniform. (Against a fixed calibration set they are not, given that set, and a test on them fails
    sooner or later.) A capital of 1 is bet against that at fair odds: half at once, half in equal
    parts before each sample of the horizon, where drift may begin. Without drift the capital is a
    martingale M, and by Ville's inequality

        P(M reaches 1/delta at any time of a horizon) ≤ delta,

    however often one looks. After `horizon` samples the test restarts, with the calibration scores
    alone and a capital of 1, so memory stays below 16 · (calibration + horizon) bytes. The bound
    holds for each horizon, since its samples by themselves are exchangeable with the calibration
    scores; over m horizons it is m · delta.

    Args:
        calibration: scores of in-distribution samples, in any order.
        delta: largest probability of a false alarm in a horizon, a fraction in (0, 1).
        horizon: number of samples after which the test restarts.
        seed: of the random tie-breaking u.

    >>> test = DriftTest([float(i) for i in range(100)], delta=0.01)
    >>> for _ in range(20):
    ...     p = test.update(-1.0)
    >>> test.alarm, test.log_martingale > math.log(100)
    (True, True)
    """

    def __init__(
        self,
        calibration: Sequence[float],
        delta: float = 0.01,
        horizon: int = 100_000,
        seed: int = 0,
    ) -> None:
        if not len(calibration):
            raise ValueError(
                "there are no calibration scores; it takes at least one, better hundreds"
            )
        if not 0 < delta < 1:
            raise ValueError(
                f"delta is {delta}, expected the probability of a false alarm, between 0 and 1"
            )
        if not isinstance(horizon, int) or horizon < 1:
            raise ValueError(
                f"horizon is {str(horizon)[:40]}, expected a number of samples, at least 1"
            )
        if horizon > MAX_HORIZON:
            raise ValueError(f"the horizon is too long, expected at most {MAX_HORIZON:,} samples")
        self.calibration = array("d", sorted(calibration))
        self.delta = float(delta)
        self.horizon = horizon
        self._random = random.Random(seed)
        self.restarts = -1
        self.alarm = False
        self.peak = 0.0
        self.restart()

    def restart(self) -> None:
        """Begin a horizon: calibration scores alone, a capital of 1. An alarm stays."""
        self.reference = array("d", self.calibration)
        # Samples of this horizon.
        self.count = 0
        self.stakes = [0.25 / len(_BETS)] * (2 * len(_BETS))
        # Stakes are in multiples of exp(log_unit) = 1/unit.
        self.log_unit = 0.0
        self.unit = 1.0
        self.log_martingale = 0.0
        self.restarts += 1

    def update(self, score: float) -> float:
        """Rank one score, bet on its p-value, and return that; NaN and +inf count as −inf, the
        lowest of all."""
        if self.count == self.horizon:
            self.restart()
        score = float(score) if score < math.inf else -math.inf
        below = bisect_left(self.reference, score)
        up_to = bisect_right(self.reference, score)
        u = 1.0 - self._random.random()
        p = (below + u * (1 + up_to - below)) / (1 + len(self.reference))
        self.reference.insert(up_to, score)
        self._bet(min(max(p, _EDGE), 1 - _EDGE))
        return p

    def _bet(self, p: float) -> None:
        """Bet every stake on the next p-value, and add up what they have become."""
        self.count += 1
        share = 0.25 / len(_BETS) / self.horizon * self.unit
        payouts = []
        for epsilon, kappa in _BETS:
            for value in (p, 1 - p):
                payouts.append(1 - epsilon + epsilon * kappa * value ** (kappa - 1))
        self.stakes = [(stake + share) * payout for stake, payout in zip(self.stakes, payouts)]
        not_yet_bet = 0.5 * (1 - self.count / self.horizon) * self.unit
        capital = sum(self.stakes) + not_yet_bet
        self.log_martingale = math.log(capital) + self.log_unit
        if capital > _HUGE:
            self._change_unit(1 / _HUGE)
        elif capital < 1 / _HUGE and self.log_unit > 0:
            self._change_unit(_HUGE)
        self.peak = max(self.peak, self.log_martingale)
        self.alarm = self.alarm or self.log_martingale >= -math.log(self.delta)

    def _change_unit(self, factor: float) -> None:
        """Count stakes in another unit, so that they stay within what a float holds: they may
        become a fortune, and lose it again."""
        self.stakes = [stake * factor for stake in self.stakes]
        self.log_unit = max(0.0, self.log_unit - math.log(factor))
        self.unit = math.exp(-self.log_unit)

    def state(self) -> dict[str, Any]:
        """Everything but the scores, as JSON takes it; with ``reference`` it restores the test bit
        for bit."""
        return {
            "delta": self.delta,
            "horizon": self.horizon,
            "stakes": self.stakes,
            "count": self.count,
            "restarts": self.restarts,
            "peak": self.peak,
            "log_unit": self.log_unit,
            "unit": self.unit,
            "log_martingale": self.log_martingale,
            "alarm": self.alarm,
            "random": self._random.getstate(),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Any], calibration: Sequence[float], reference: Sequence[float]
    ) -> DriftTest:
        """The test that `state` and `reference` came from; ValueError if they do not fit each
        other."""
        if not isinstance(state, dict):
            raise ValueError("the state of the drift test cannot be read: it is not a table")
        try:
            test = cls(calibration, _number(state, "delta"), _count(state, "horizon"))
            version, internal, gauss = state["random"]
            test._random.setstate((version, tuple(internal), gauss))
            if not any(internal[:-1]):
                raise ValueError("the state of the drift test has no random numbers")
            test.stakes = [_finite("stakes", stake) for stake in state["stakes"]]
            test.reference = array("d", reference)
            test.count = _count(state, "count")
            test.restarts = _count(state, "restarts")
            test.peak = _number(state, "peak")
            test.log_unit = _number(state, "log_unit")
            test.unit = _number(state, "unit")
            test.log_martingale = _number(state, "log_martingale")
            test.alarm = _flag(state, "alarm")
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"the state of the drift test cannot be read: {error!r}") from None
        if not test._is_sound():
            raise ValueError("the state of the drift test does not fit its scores")
        return test

    def _is_sound(self) -> bool:
        """Whether stakes and scores could come from a run of this test."""
        if len(self.stakes) != 2 * len(_BETS) or min(self.stakes) < 0:
            return False
        if self.log_unit < 0 or not 0 <= self.unit <= 1:
            return False
        if not 1 / _HUGE <= sum(self.stakes) + self.unit <= _HUGE:
            return False
        if not 0 <= self.count <= self.horizon:
            return False
        if len(self.reference) != len(self.calibration) + self.count:
            return False
        return all(a <= b for a, b in zip(self.reference, self.reference[1:]))


def _finite(name: str, value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"the state of the drift test has no number as {name}")
    return float(value)


def _number(state: dict[str, Any], name: str) -> float:
    return _finite(name, state[name])


def _count(state: dict[str, Any], name: str) -> int:
    value = state[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"the state of the drift test has no count as {name}")
    return value


def _flag(state: dict[str, Any], name: str) -> bool:
    value = state[name]
    if type(value) is not bool:
        raise ValueError(f"the state of the drift test says neither yes nor no as {name}")
    return value
