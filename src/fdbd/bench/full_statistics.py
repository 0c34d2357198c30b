"""Statistics of the full training set where only a part of its samples, the bank, is at hand."""

from __future__ import annotations

from typing import Any

import torch

from fdbd.data.feature_set import FeatureSet
from fdbd.detectors.mds import PartMoments
from fdbd.fitting.statistics import ClassMoments, Count, Mean, Moments, Together, Transformed


class FullStatistics:
    """Puts the moments of the full training set in the place of those of the bank, once a fit has summed them up.

    Means and covariances follow from the moments, also for the members of an ensemble and behind a shaping that leaves
    all samples of the bank as they are. Percentiles, neighbours and statistics of shaped features do not: they remain
    the bank's, and `used_bank` says so. Without moments (None) the bank is the full set.
    """

    def __init__(self, full: ClassMoments | None, bank: FeatureSet) -> None:
        self.full, self.bank = full, bank
        self.used_bank = False

    def __call__(self, statistic: Any) -> Any:
        """The statistic with the sums of the full training set, where they are known."""
        full = self.full
        if full is None or isinstance(statistic, Count):
            return statistic
        if isinstance(statistic, PartMoments) and not statistic.layers:
            statistic.parts = [full]
        elif type(statistic) is Together:
            statistic.parts = [self(part) for part in statistic.parts]
        elif isinstance(statistic, Transformed) and self._leaves_features(statistic):
            statistic.statistic = self(statistic.statistic)
        elif type(statistic) is Mean:
            statistic.count, statistic.total = full.count, full.mean() * full.count
        elif type(statistic) in (Moments, ClassMoments):
            statistic.count, statistic.average, statistic.scatter = full.count, full.average, full.scatter
            if isinstance(statistic, ClassMoments):
                statistic.counts, statistic.totals = full.counts, full.totals
        else:
            self.used_bank = True
        return statistic

    def _leaves_features(self, statistic: Transformed[Any]) -> bool:
        return all(torch.equal(statistic.transform(batch).features, batch.features) for batch in self.bank.batches())
