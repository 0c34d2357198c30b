"""How many of n scores a rate stands for, without the rounding errors of floating-point
fractions."""

import math
from fractions import Fraction


def as_decimal(fraction: float) -> Fraction:
    """The ratio that is meant, without rounding errors: 1/10 for ``1 - 0.9``."""
    return Fraction(float(fraction)).limit_denominator(10**9)


def count_to_accept(count: int, tpr: float) -> int:
    """The smallest k with k / count ≥ tpr."""
    return math.ceil(as_fraction("tpr", tpr) * count)


def count_to_flag(count: int, alpha: float) -> int:
    """The largest k with k / (count + 1) ≤ alpha: a score with fewer than k calibration scores at
    or below is OOD."""
    return math.floor(as_fraction("alpha", alpha) * (count + 1))


def samples_for(alpha: float) -> int:
    """The smallest number of calibration samples for a conformal threshold at `alpha`."""
    return math.ceil(1 / as_fraction("alpha", alpha)) - 1


def as_fraction(name: str, value: float) -> Fraction:
    """The ratio that is meant by a share named "alpha" (below 1) or "tpr" (up to 1), else a
    ValueError."""
    if name == "alpha":
        is_right = 0 < value < 1
        expected = "between 0 and 1"
    else:
        is_right = 0 < value <= 1
        expected = "above 0 and at most 1"
    # A value below about 5e-10 is rounded to 0.
    if not is_right or as_decimal(value) == 0:
        raise ValueError(f"{name} is {value}, expected a fraction {expected}")
    return as_decimal(value)
