"""The scikit-learn estimator: scikit-learn's own checks, classifiers, detectors, sparse data,
composition, text."""

from __future__ import annotations

import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_iris, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

import fdbd
from fdbd.integrations import sklearn as deploy
from fdbd.integrations.sklearn import OODDetector

CLASSIFIERS = [
    LogisticRegression(),
    LinearSVC(),
    LinearSVC(fit_intercept=False),
    SGDClassifier(random_state=0),
    RidgeClassifier(),
    RidgeClassifier(fit_intercept=False),
    make_pipeline(StandardScaler(), LogisticRegression()),
]


def blobs(count: int = 400, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    centers = np.random.default_rng(42).normal(scale=6, size=(classes, 10))
    return make_blobs(count, centers=centers, random_state=seed)


def far(count: int = 100) -> np.ndarray:
    """Between the classes, near the origin."""
    return np.random.default_rng(5).normal(scale=0.5, size=(count, 10))


@parametrize_with_checks([OODDetector(LogisticRegression())])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [OODDetector(RidgeClassifier(), detector="energy", calibration=0), OODDetector()]
)
def test_scikit_learns_own_checks_of_other_options(estimator, check):
    check(estimator)


@pytest.mark.parametrize("classifier", CLASSIFIERS, ids=lambda c: str(c).replace("\n", ""))
@pytest.mark.parametrize("classes", [2, 4])
def test_any_linear_classifier_accepts_what_it_knows_and_rejects_what_it_does_not(
    classifier, classes
):
    X, y = blobs(classes=classes)
    model = OODDetector(classifier).fit(X, y)
    fresh, labels = blobs(2000, classes, seed=1)
    # 80 calibration samples.
    assert abs((model.predict(fresh) == 1).mean() - 0.95) < 0.06
    assert (model.predict(far()) == -1).mean() > 0.7
    assert (model.predict_class(fresh) == labels).mean() > 0.95


def test_the_score_is_that_of_the_detector_on_the_classifiers_weights():
    X, y = blobs()
    model = OODDetector(make_pipeline(StandardScaler(), LogisticRegression())).fit(X, y)
    scaler, linear = model.classifier_[0], model.classifier_[1]
    Z = scaler.transform(far(5))
    W = linear.coef_
    b = linear.intercept_
    mean = None
    train, held = model._split(y)
    mean = scaler.transform(X[train]).mean(axis=0)
    for z, score in zip(Z, model.score_samples(far(5))):
        logits = W @ z + b
        k = logits.argmax()
        distances = [
            (logits[k] - logits[c]) / np.linalg.norm(W[k] - W[c]) for c in range(4) if c != k
        ]
        assert score == pytest.approx(np.mean(distances) / np.linalg.norm(z - mean), rel=1e-9)
    held_scores = np.sort(model.score_samples(X[held]))
    assert model.offset_ == held_scores[len(held) - int(np.ceil(0.95 * len(held)))]
    assert scaler.n_samples_seen_ == len(train) == 320


def test_decision_function_is_the_score_less_the_offset_and_predict_its_sign():
    X, y = blobs()
    model = OODDetector(detector="mds").fit(X, y)
    mixed = np.concatenate([X[:50], far()])
    scores = model.score_samples(mixed)
    assert np.array_equal(model.decision_function(mixed), scores - model.offset_)
    assert np.array_equal(model.predict(mixed), np.where(scores >= model.offset_, 1, -1))


def test_the_hold_out_is_stratified_and_leaves_every_class_a_sample():
    labels = np.repeat([0, 1, 2, 3], [500, 100, 2, 1])
    train, held = OODDetector(calibration=0.2)._split(labels)
    assert sorted([*train, *held]) == list(range(603))
    assert len(held) == 121
    counts = np.bincount(labels[held], minlength=4)
    assert abs(counts[0] - 100) <= 2
    assert abs(counts[1] - 20) <= 2
    assert counts[3] == 0
    assert set(labels[train]) == {0, 1, 2, 3}


def test_without_a_hold_out_the_threshold_is_on_the_training_scores():
    X, y = blobs()
    model = OODDetector(calibration=0, tpr=0.9).fit(X, y)
    assert (model.predict(X) == 1).mean() == 0.9


@pytest.mark.parametrize("name", ["react+fdbd", "knn", "vim", "msp", "she"])
def test_any_detector_works_by_name(name):
    X, y = blobs()
    model = OODDetector(LogisticRegression(), name).fit(X, y)
    assert np.isfinite(model.score_samples(far())).all()
    assert (model.predict(X) == 1).mean() > 0.9


def test_a_detector_that_is_given_is_copied_not_changed():
    X, y = blobs()
    detector = fdbd.KNN(k=3)
    model = OODDetector(detector=detector).fit(X, y)
    assert not detector.is_fitted
    assert model.detector_.is_fitted
    assert clone(model).detector.k == 3


def test_an_ensemble_is_calibrated_on_half_of_the_hold_out():
    X, y = blobs()
    model = OODDetector(detector=fdbd.Ensemble(["fdbd", "energy"])).fit(X, y)
    assert model.threshold_.count == 40
    assert model.predict(far()).mean() < model.predict(X).mean()


def test_a_detector_that_needs_the_network_is_refused():
    X, y = blobs()
    with pytest.raises(ValueError, match="through the network"):
        OODDetector(detector="odin").fit(X, y)


def test_sparse_samples_are_scored_a_chunk_at_a_time(monkeypatch):
    X, y = blobs()
    X[np.abs(X) < 1] = 0
    # Its origin rests on the inverse of a head whose rows sum to zero.
    dense = OODDetector(detector="vim").fit(X, y)
    # Seven rows.
    monkeypatch.setattr(deploy, "_CHUNK", 70)
    largest = []
    toarray = sparse.csr_matrix.toarray
    monkeypatch.setattr(
        sparse.csr_matrix,
        "toarray",
        lambda self, *a: largest.append(self.shape[0]) or toarray(self, *a),
    )
    model = OODDetector(detector="vim").fit(sparse.csr_matrix(X), y)
    scores = model.score_samples(sparse.coo_matrix(X))
    assert max(largest) == 7
    assert scores == pytest.approx(dense.score_samples(X), rel=1e-6)


def test_labels_may_be_strings():
    iris = load_iris()
    names = iris.target_names[iris.target]
    model = OODDetector(make_pipeline(StandardScaler(), LogisticRegression())).fit(iris.data, names)
    assert list(model.classes_) == ["setosa", "versicolor", "virginica"]
    assert (model.predict_class(iris.data) == names).mean() > 0.9
    assert model.n_features_in_ == 4


def test_columns_of_a_table_keep_their_names():
    pandas = pytest.importorskip("pandas")
    X, y = blobs()
    table = pandas.DataFrame(X, columns=[f"x{i}" for i in range(10)])
    for classifier in (LogisticRegression(), make_pipeline(StandardScaler(), LogisticRegression())):
        model = OODDetector(classifier).fit(table, y)
        assert list(model.feature_names_in_) == list(table.columns)
        with pytest.raises(ValueError, match="feature names"):
            model.predict(table[table.columns[::-1]])


def test_it_pickles_and_clones():
    X, y = blobs()
    model = OODDetector(LogisticRegression(C=0.1), "react+fdbd").fit(X, y)
    copied = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copied.score_samples(X), model.score_samples(X))
    assert clone(model).get_params()["classifier__C"] == 0.1
    with pytest.raises(NotFittedError):
        clone(model).predict(X)


def test_it_sits_in_a_pipeline_and_a_grid_search():
    X, y = blobs()
    pipeline = make_pipeline(StandardScaler(), OODDetector(LogisticRegression()))
    grid = {"ooddetector__classifier__C": [1e-4, 1.0], "ooddetector__detector": ["fdbd", "energy"]}
    search = GridSearchCV(pipeline, grid, cv=3, error_score="raise").fit(X, y)
    assert search.best_params_["ooddetector__classifier__C"] in (1e-4, 1.0)
    assert search.best_score_ > 0.85
    assert set(search.predict(far())) <= {-1, 1}
    assert pipeline.fit(X, y).decision_function(X).shape == (400,)


def test_the_score_counts_correct_classes_and_rejected_strangers():
    X, y = blobs()
    model = OODDetector().fit(X, y)
    mixed = np.concatenate([X, far()])
    labels = np.concatenate([y, np.full(100, 77)])
    accepted = model.predict(mixed) == 1
    is_known = labels < 4
    is_right = model.predict_class(mixed) == labels
    handled = np.where(is_known, accepted & is_right, ~accepted)
    assert model.score(mixed, labels) == handled.mean()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"classifier": GaussianNB()}, TypeError, "has no coef_"),
        ({"classifier": SVC(kernel="linear")}, TypeError, "does not predict the largest"),
        ({"detector": "fbdb"}, ValueError, "did you mean 'fdbd'"),
        ({"tpr": 95}, ValueError, "tpr is 95"),
        ({"calibration": 1.0}, ValueError, "calibration is 1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, message):
    X, y = blobs()
    with pytest.raises(error, match=message):
        OODDetector(**options).fit(X, y)


@pytest.mark.parametrize(
    "classifier", [None, make_pipeline(StandardScaler(), LogisticRegression())]
)
def test_bad_labels_are_refused(classifier):
    X, y = blobs()
    with pytest.raises(ValueError, match="y"):
        OODDetector(classifier).fit(X, None)
    with pytest.raises(ValueError, match=r"inconsistent|as many"):
        OODDetector(classifier).fit(X, y[:-1])
    with pytest.raises(ValueError, match="at least two classes"):
        OODDetector(classifier).fit(X, np.zeros(400, dtype=int))
    with pytest.raises(ValueError, match="continuous"):
        OODDetector(classifier).fit(X, X[:, 0])
    with pytest.raises(ValueError, match="class of its own"):
        OODDetector(classifier).fit(X[:4], np.arange(4))


def test_text_goes_through_the_pipeline():
    texts = ["cat dog pet fur", "dog cat paw", "fur pet cat paw dog"] * 20 + [
        "car road wheel",
        "road car engine",
    ] * 30
    topics = ["animals"] * 60 + ["traffic"] * 60
    model = OODDetector(make_pipeline(CountVectorizer(), LogisticRegression())).fit(texts, topics)
    assert list(model.predict_class(["my dog", "the road"])) == ["animals", "traffic"]
    assert model.score_samples(["dog fur", "quantum entropy"]).argmax() == 0


def test_the_example_finds_documents_on_unseen_topics(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "text_topics.py"))
    result = example["main"]()
    assert result["accuracy"] > 0.95
    assert abs(result["accepted_known"] - 0.9) < 0.08
    assert result["auroc"] > 0.9
    assert "most sure to reject" in capsys.readouterr().out


def test_scores_are_float64():
    X, y = blobs()
    model = OODDetector().fit(X.astype(np.float32), y)
    assert model.score_samples(X).dtype == np.float64
    assert model.detector_.head_weight.dtype == torch.float64


def test_alpha_sets_a_conformal_threshold_on_what_was_held_out():
    X, y = make_blobs(150, centers=3, n_features=4, random_state=0, cluster_std=2.0)
    model = OODDetector(alpha=0.1, calibration=0.2).fit(X, y)
    assert (model.threshold_.kind, model.threshold_.target, model.threshold_.count) == (
        "conformal",
        0.1,
        30,
    )
    scores = model.score_samples(X)
    assert np.array_equal(
        model.predict(X) == -1, model.threshold_.p_values(torch.from_numpy(scores)).numpy() <= 0.1
    )
    with pytest.raises(
        ValueError, match=r"there are 30 calibration samples, alpha=0.01 takes at least 99"
    ):
        OODDetector(alpha=0.01, calibration=0.2).fit(X, y)
