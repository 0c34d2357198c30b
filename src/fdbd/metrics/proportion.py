"""Shares of samples with exact intervals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proportion:
    """A share with its 95 % interval by Clopper and Pearson, which holds for any number of samples.

    >>> share = Proportion.from_counts(2, 50)
    >>> round(share.value, 3), round(share.low, 3), round(share.high, 3), str(share)
    (0.04, 0.005, 0.137, '4.0 % (0.5 to 13.7 %)')
    """

    count: int
    total: int
    value: float
    """A fraction; NaN without samples."""
    low: float
    high: float

    @classmethod
    def from_counts(cls, count: int, total: int, confidence: float = 0.95) -> Proportion:
        """The share `count` / `total`."""
        from scipy.special import betaincinv

        if not 0 <= count <= total:
            raise ValueError(f"{count} of {total} samples is not a share")
        if total == 0:
            return cls(0, 0, float("nan"), 0.0, 1.0)
        tail = (1 - confidence) / 2
        low = float(betaincinv(count, total - count + 1, tail)) if count else 0.0
        high = float(betaincinv(count + 1, total - count, 1 - tail)) if count < total else 1.0
        return cls(count, total, count / total, low, high)

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON values."""
        value = self.value if self.total else None
        return {
            "count": self.count,
            "total": self.total,
            "value": value,
            "low": self.low,
            "high": self.high,
        }

    def __str__(self) -> str:
        if not self.total:
            return "not known"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f} %)"
