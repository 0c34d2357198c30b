"""A scikit-learn estimator that tells familiar samples from unfamiliar ones, around any linear
classifier."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import BaseEstimator, clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.utils import _safe_indexing, check_random_state, column_or_1d, gen_batches
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
from typing_extensions import Self

from fdbd.core.batch import Batch, Head
from fdbd.decision.threshold import Target, Threshold
from fdbd.detectors import Detector, Ensemble, as_detector

_CHUNK = 1 << 22
"""Numbers made dense at once: 32 MB."""
_TABLE: dict[str, Any] = {"accept_sparse": "csr", "dtype": (np.float64, np.float32)}


class OODDetector(BaseEstimator):  # type: ignore[misc]
    """A linear classifier that also says which samples it has no business classifying.

    Fits a clone of `classifier`, then a detector on its inputs and weights, then sets the threshold
    on a part of the data that neither has seen. Sparse X is made dense a chunk at a time. Scores
    are computed in float64.

    Args:
        classifier: any classifier with ``coef_`` and ``intercept_`` whose prediction is their
            argmax (LogisticRegression, LinearSVC, SGDClassifier, RidgeClassifier, …), or a Pipeline
            that ends in one: its earlier steps make the features. None: LogisticRegression.
        detector: a detector's name as in `fdbd.create`, or a detector, which is copied and never
            changed.
        tpr: share of the n held-out samples to accept, a fraction in (0, 1]. Let k be the
            smallest number with k/n ≥ tpr: of new samples of the known classes, k/(n + 1) are
            accepted on average, such as 94.1 % for n = 50 at 0.95.
        alpha: instead, the largest share of false alarms, a fraction in (0, 1), on average over the
            draw of the held-out samples: a conformal threshold, which takes 1/alpha − 1 of them at
            least. None: `tpr` decides.
        calibration: share of the samples, stratified by class, that is held out for the threshold;
            each class keeps at least one sample to train on. 0: none, and the threshold comes from
            the training scores, which are too good, so that more than 1 − tpr of new samples are
            rejected.
        random_state: seed of the hold-out.

    Attributes:
        classifier_: the fitted clone.
        detector_: the fitted `fdbd.Detector`.
        threshold_: the `fdbd.Threshold`; its ``p_values`` take scores.
        offset_: the threshold as a number: ``decision_function = score_samples − offset_``.
        classes_: (C,) the known labels.
        n_features_in_, feature_names_in_: as in scikit-learn; for a Pipeline, if its first step has
            them.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = OODDetector(LogisticRegression(max_iter=5000), tpr=0.95).fit(X[y < 8], y[y < 8])
    >>> familiar = model.predict(X[y < 8]).mean()  # +1 familiar, −1 not
    >>> bool(familiar > model.predict(X[y >= 8]).mean())
    True
    >>> model.predict_class(X[:3])
    array([0, 1, 2])
    """

    def __init__(
        self,
        classifier: Any = None,
        detector: Detector | str = "fdbd",
        *,
        tpr: float = 0.95,
        alpha: float | None = None,
        calibration: float = 0.2,
        random_state: Any = 0,
    ) -> None:
        self.classifier = classifier
        self.detector = detector
        self.tpr = tpr
        self.alpha = alpha
        self.calibration = calibration
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Fit classifier, detector and threshold on samples X (N, P) of the known classes y
        (N,)."""
        if not 0 <= self.calibration < 1:
            raise ValueError(
                f"calibration is {self.calibration}, expected the share to hold out, from 0 to"
                " below 1"
            )
        X, y = self._check_training(X, y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y holds {len(self.classes_)} class, expected samples of at least two classes"
            )
        train, held = self._split(labels)
        self._fit_classifier(_safe_indexing(X, train), y[train])
        data = _Chunks(self._features(_safe_indexing(X, train)), labels[train])
        self.detector_ = copy.deepcopy(as_detector(self.detector))
        self.detector_.fit(data, self._head(next(iter(data))))
        calibration = data
        if len(held):
            calibration = _Chunks(self._features(_safe_indexing(X, held)))
        self._set_threshold(calibration, can_be_shared=len(held) > 3)
        return self

    def _check_training(self, X: Any, y: Any) -> tuple[Any, NDArray[Any]]:
        """Samples and labels as scikit-learn wants them checked."""
        if not isinstance(self.classifier, Pipeline):
            X, y = validate_data(self, X, y, **_TABLE, ensure_min_samples=2)
        elif y is None:
            raise ValueError("OODDetector requires y to be passed, but the target y is None")
        y = column_or_1d(y, warn=True)
        check_consistent_length(X, y)
        check_classification_targets(y)
        return X, y

    def _fit_classifier(self, X: Any, y: NDArray[Any]) -> None:
        classifier = LogisticRegression() if self.classifier is None else self.classifier
        self.classifier_ = clone(classifier)
        self.classifier_.fit(X, y)
        if not isinstance(self.classifier_, Pipeline):
            return
        if hasattr(self.classifier_, "n_features_in_"):
            self.n_features_in_ = self.classifier_.n_features_in_
        if hasattr(self.classifier_, "feature_names_in_"):
            self.feature_names_in_ = self.classifier_.feature_names_in_

    def _set_threshold(self, calibration: _Chunks, can_be_shared: bool) -> None:
        """Set the threshold; an ensemble's p-values need ID data of their own, which are every
        other sample if there are enough to share."""
        if isinstance(self.detector_, Ensemble):
            of_ensemble = calibration
            if can_be_shared:
                held_features = calibration.X
                of_ensemble = _Chunks(held_features[::2])
                calibration = _Chunks(held_features[1::2])
            self.detector_.calibrate(of_ensemble)
        target = Target(tpr=self.tpr) if self.alpha is None else Target(alpha=self.alpha)
        self.threshold_ = Threshold.from_scores(self._scores(calibration), **target)
        self.offset_ = float(self.threshold_.value[0])

    def score_samples(self, X: Any) -> NDArray[np.float64]:
        """(N,) scores; higher is more like the training data."""
        check_is_fitted(self)
        return self._scores(_Chunks(self._features(self._check(X))))

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """(N,) ``score_samples(X) - offset_``: negative means unfamiliar."""
        return self.score_samples(X) - self.offset_

    def predict(self, X: Any) -> NDArray[np.int64]:
        """(N,) +1 for familiar samples, −1 for those that are out-of-distribution."""
        return np.where(self.decision_function(X) >= 0, 1, -1)

    def predict_class(self, X: Any) -> NDArray[Any]:
        """(N,) the classifier's own prediction, whatever the detector thinks of it."""
        check_is_fitted(self)
        prediction: NDArray[Any] = self.classifier_.predict(self._check(X))
        return prediction

    def score(self, X: Any, y: Any) -> float:
        """Share of samples that are handled correctly: those of a known class accepted and
        classified correctly, those whose label y was not in the training data rejected."""
        y = column_or_1d(y)
        is_accepted = self.predict(X) == 1
        is_right = self.predict_class(X) == y
        is_known = np.isin(y, self.classes_)
        is_handled = np.where(is_known, is_accepted & is_right, ~is_accepted)
        return float(is_handled.mean())

    def _check(self, X: Any) -> Any:
        if isinstance(self.classifier_, Pipeline):
            # Its first step knows what it takes: text, tables, …
            return X
        return validate_data(self, X, **_TABLE, reset=False)

    def _split(self, labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Indices to train on and to hold out: of each class about the share `calibration`, never
        its last sample."""
        if not self.calibration:
            return np.arange(len(labels)), np.arange(0)
        random = check_random_state(self.random_state)
        # In random order, class by class; `rank` counts from 0 within each class.
        order = random.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        counts = np.bincount(labels)
        first_of_class = np.repeat(np.cumsum(counts) - counts, counts)
        rank = np.arange(len(labels)) - first_of_class
        # Spread evenly over (0, 1) in every class: the largest hold out the same share of each.
        place = (rank + random.uniform(size=len(labels))) / np.repeat(counts, counts)
        spare = np.flatnonzero(rank > 0)
        if not len(spare):
            raise ValueError(
                f"each of the {len(labels)} samples has a class of its own, so none can be held "
                "out for the threshold: give more samples, or calibration=0"
            )
        wanted = max(1, round(self.calibration * len(labels)))
        by_descending_place = spare[np.argsort(-place[spare])]
        held = order[by_descending_place[:wanted]]
        return np.setdiff1d(np.arange(len(labels)), held), np.sort(held)

    def _features(self, X: Any) -> Any:
        """What the linear classifier sees."""
        if isinstance(self.classifier_, Pipeline) and len(self.classifier_.steps) > 1:
            X = self.classifier_[:-1].transform(X)
        return X.tocsr() if sparse.issparse(X) else np.asarray(X)

    def _head(self, some: Batch) -> Head:
        """The classifier's weights, tried on a few training samples."""
        last = self.classifier_[-1] if isinstance(self.classifier_, Pipeline) else self.classifier_
        kind = type(last).__name__
        expected = "LogisticRegression, LinearSVC, SGDClassifier or RidgeClassifier"
        if not hasattr(last, "coef_") or not hasattr(last, "intercept_"):
            raise TypeError(
                f"{kind} has no coef_ and intercept_, expected a linear classifier such as"
                f" {expected}"
            )
        weight = last.coef_.toarray() if sparse.issparse(last.coef_) else np.atleast_2d(last.coef_)
        bias = np.broadcast_to(last.intercept_, len(weight))
        head = Head(weight.astype(np.float64), bias.astype(np.float64))
        if head.num_classes == len(self.classes_):
            features = some.features[:256]
            predicted = np.searchsorted(self.classes_, last.predict(features.numpy()))
            if _predicts_largest(head(features).numpy(), predicted):
                return head
        raise TypeError(
            f"{kind} with coef_ of shape {weight.shape} does not predict the largest of "
            f"coef_ · x + intercept_ over {len(self.classes_)} classes, expected one such as "
            f"{expected}"
        )

    def _scores(self, chunks: _Chunks) -> NDArray[np.float64]:
        with torch.no_grad():
            scores = [self.detector_.score(batch).to(torch.float64).numpy() for batch in chunks]
        found = np.concatenate([np.zeros(0), *scores])
        # What is not finite is unfamiliar.
        return np.where(found < np.inf, found, -np.inf)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.target_tags.required = True
        return tags


def _predicts_largest(logits: NDArray[np.float64], predicted: NDArray[Any]) -> bool:
    """Whether the predicted classes (N,) have the largest logits (N, C), but for rounding."""
    largest = logits.max(axis=1)
    of_predicted = np.take_along_axis(logits, predicted[:, None], axis=1)[:, 0]
    return bool(np.all(largest - of_predicted <= 1e-6 * (1 + np.abs(largest))))


class _Chunks:
    """Batches of a dense or sparse matrix (N, P), each dense and in float64."""

    def __init__(self, X: Any, labels: NDArray[Any] | None = None) -> None:
        self.X = X
        self.labels = labels

    def __iter__(self) -> Iterator[Batch]:
        count, width = self.X.shape
        rows_per_batch = max(1, _CHUNK // max(1, width))
        for rows in gen_batches(count, rows_per_batch):
            part = self.X[rows].toarray() if sparse.issparse(self.X) else self.X[rows]
            labels = None if self.labels is None else torch.from_numpy(self.labels[rows])
            yield Batch(torch.from_numpy(np.array(part, dtype=np.float64)), labels=labels)
