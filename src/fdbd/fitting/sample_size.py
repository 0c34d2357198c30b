"""One rule for fits with too few samples: a warning that says how many there were, and how many the
estimate takes."""

import math
import warnings


class FewSamplesWarning(UserWarning):
    """A detector was fitted on fewer samples than what it estimates takes; the base of the
    same warning of a threshold (see `fdbd.Threshold.caution`).

    >>> import fdbd, torch, warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     _ = fdbd.create("vim").fit(fdbd.Batch(torch.rand(5, 8)), fdbd.Head(torch.rand(3, 8)))
    >>> print(caught[0].message)
    vim was fitted on 5 samples; the covariance of 8 features takes at least 9. Its scores may mean
    little: give more training data, or choose a detector that estimates less, such as fdbd
    """


def warn_of_few_samples(detector: str, estimate: str, samples: int, needed: int) -> None:
    """Warn if there are fewer `samples` than the `needed` ones.

    Args:
        detector: name of the detector, as `fdbd.create` spells it.
        estimate: what it estimates, such as "the covariance of 512 features".
        samples: number of training samples.
        needed: the smallest number of samples from which that can be estimated.
    """
    if samples >= needed:
        return
    warnings.warn(
        f"{detector} was fitted on {samples:,} samples; {estimate} takes at least {needed:,}. "
        "Its scores may mean little: give more training data, or choose a detector that estimates "
        "less, such as fdbd",
        FewSamplesWarning,
        stacklevel=3,
    )


def warn_of_few_for_percentile(detector: str, samples: int, percentile: float) -> None:
    """Warn if no sample is expected above this percentile of each feature."""
    needed = math.ceil(100 / (100 - percentile) - 1e-9)
    warn_of_few_samples(detector, f"percentile {percentile:g} of each feature", samples, needed)


def warn_of_few_for_covariance(
    detector: str, samples: float, features: int, means: int = 1
) -> None:
    """Warn if a covariance of this many features, about this many means, is singular because the
    samples are too few: each mean takes one of them away."""
    about = "" if means == 1 else f" about {means:,} class means"
    estimate = f"the covariance of {features:,} features{about}"
    warn_of_few_samples(detector, estimate, int(samples), features + means)
