"""The contract of a detector: what the base class promises to those who write one and to those who
use one."""

import copy
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import fdbd
from fdbd import Batch, Detector, Head
from fdbd.core.configuration import from_config, registered
from fdbd.detectors import Needs, NotFittedError
from fdbd.fitting import statistics
from fdbd.fitting.statistics import ClassMoments, Mean, Moments


class Norm(Detector):
    """Reads features, asks for nothing."""

    name = "test-norm"

    def __init__(self, power: int = 2) -> None:
        super().__init__()
        self.power = power

    def formula(self, batch):
        return -batch.features.abs().pow(self.power).sum(dim=1)


class TwoPasses(Detector):
    """The mean, then the mean distance from it."""

    def passes(self, head):
        mean = (yield Mean(head.num_features)).mean()
        moments = yield Moments(head.num_features)
        self.set_buffers(mean=mean, spread=moments.covariance().trace())

    def formula(self, batch):
        return -(batch.features - self.mean).norm(dim=1) / self.spread


class MaxLogit(Detector):
    needs = Needs(features=False, logits=True)

    def formula(self, batch):
        return batch.logits.amax(dim=1)


class ByClass(Detector):
    needs = Needs(labels=True)

    def passes(self, head):
        moments = yield ClassMoments(head.num_classes, head.num_features)
        self.set_buffers(means=moments.means())

    def formula(self, batch):
        return -torch.cdist(batch.features, self.means).amin(dim=1)


class Pair(Detector):
    name = "test-pair"

    def __init__(self, inner: Detector, weights: tuple = (1.0, 2.0)) -> None:
        super().__init__()
        self.inner = inner
        self.weights = weights

    def passes(self, head):
        return self.inner.passes(head)

    def formula(self, batch):
        return batch.features.sum(dim=1)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEAD = Head(random(3, 4), random(3, seed=1))
DATA = Batch(random(40, 4, seed=2), None, torch.arange(40) % 3)


# Fitting


class Counted:
    """Batches that count how often they are run through."""

    def __init__(self, batches):
        self.batches = batches
        self.runs = 0

    def __iter__(self):
        self.runs += 1
        return iter(self.batches)


def test_a_detector_of_two_passes_takes_one_batch_or_anything_that_starts_anew():
    batches = [DATA._replace(features=part, labels=None) for part in DATA.features.split(7)]
    one = TwoPasses().fit(DATA, HEAD)
    many = TwoPasses().fit(batches, HEAD)
    torch.testing.assert_close(one.mean, many.mean)
    torch.testing.assert_close(one.spread, many.spread)
    torch.testing.assert_close(one.mean, DATA.features.mean(dim=0))


def test_a_one_shot_iterator_is_enough_for_one_pass_and_an_error_for_two():
    batches = [Batch(part) for part in DATA.features.split(7)]
    ByClass().fit(iter([DATA]), HEAD)
    with pytest.raises(
        ValueError,
        match=r"TwoPasses needs another pass .* one-shot iterator is used up: give a list",
    ):
        TwoPasses().fit(iter(batches), HEAD)
    with pytest.raises(ValueError, match="one-shot"):
        TwoPasses().fit((batch for batch in batches), HEAD)


def test_the_members_of_an_ensemble_share_their_passes():
    data = Counted([DATA])
    ensemble = fdbd.Ensemble([TwoPasses(), ByClass(), MaxLogit(), TwoPasses()]).fit(data, HEAD)
    # Two passes, and a look at the first batch before them.
    assert data.runs <= 3
    for detector, alone in zip(ensemble.members, [TwoPasses(), ByClass(), MaxLogit(), TwoPasses()]):
        alone.fit(DATA, HEAD)
        assert torch.equal(detector.score(DATA), alone.score(DATA))


@pytest.mark.parametrize("detector", [TwoPasses, ByClass, Norm], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_training_feature_is_named_by_batch_and_row(detector, bad):
    batches = [
        DATA._replace(features=part, labels=torch.zeros(len(part), dtype=int))
        for part in DATA.features.split(10)
    ]
    broken = batches[2].features.clone()
    broken[6, 1] = bad
    batches[2] = batches[2]._replace(features=broken)
    if detector is Norm:
        # It asks for nothing, so nothing is looked at.
        detector().fit(batches, HEAD)
        return
    with pytest.raises(ValueError, match="batch 2, row 6: its features hold NaN or infinity"):
        detector().fit(batches, HEAD)


def test_features_are_blamed_for_logits_that_follow_from_them():
    broken = DATA.features.clone()
    broken[6, 1] = math.nan
    for names in (["knn", "klm"], ["energy", "openmax"]):
        data = DATA._replace(features=broken, labels=torch.arange(len(broken)) % HEAD.num_classes)
        with pytest.raises(ValueError, match="batch 0, row 6: its features hold NaN or infinity"):
            fdbd.Ensemble(names).fit(data, HEAD)
        with pytest.raises(ValueError, match="batch 0, row 6: its logits hold NaN or infinity"):
            fdbd.Ensemble(names).fit(
                data._replace(features=DATA.features, logits=HEAD(broken)), HEAD
            )


@pytest.mark.parametrize("name", ["knn", "ssd", "mds", "gen", "fdbd"])
def test_graphs_give_up_on_numbers_whose_squares_do_not_fit(name):
    data = Batch(DATA.features.float(), None, torch.arange(len(DATA.features)) % HEAD.num_classes)
    detector = fdbd.create(name, **({"k": 2} if name == "knn" else {})).fit(
        data, Head(HEAD.weight.float())
    )
    rows = data.features[:5].clone()
    rows[1] *= 1e25
    program = torch.export.export(OnFeatures(detector), (rows,))
    scores = program.module()(rows)
    assert scores[1] == -math.inf
    torch.testing.assert_close(
        scores[[0, 2, 3, 4]], detector.score(Batch(rows))[[0, 2, 3, 4]], rtol=1e-4, atol=1e-4
    )


class OnFeatures(torch.nn.Module):
    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, features):
        return self.detector(Batch(features))


@pytest.mark.parametrize(
    ("name", "option"),
    [("knn", "k"), ("nnguide", "k"), ("gen", "top"), ("vim", "dim"), ("neco", "dimension"), ("openmax", "tail"),
     ("ssd", "clusters"), ("ssd", "iterations"), ("fdbd", "nearest")],
)  # fmt: skip
def test_whole_numbers_may_be_numpys_and_nothing_else(name, option):
    detector = fdbd.create(name, **{option: np.int64(3)})
    assert type(getattr(detector, option)) is int
    assert json.dumps(detector.to_config())
    for wrong in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match=f"{option} is {wrong!r}, expected"):
            fdbd.create(name, **{option: wrong})


def test_a_detector_whose_fit_failed_is_not_fitted():
    detector = TwoPasses().fit(DATA, HEAD)
    with pytest.raises(ValueError, match="row 0"):
        detector.fit(Batch(torch.full((2, 4), math.nan)), HEAD)
    assert not detector.is_fitted
    with pytest.raises(NotFittedError):
        detector.score(DATA)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "the training data hold no samples"),
        (
            [Batch(torch.zeros(0, 4), None, torch.zeros(0, dtype=int))],
            ValueError,
            "hold no samples",
        ),
        (
            [DATA, Batch(torch.zeros(2, 5))],
            ValueError,
            r"features of batch 1 have shape \(2, 5\), expected \(N, 4\)",
        ),
        (
            [DATA, Batch(torch.zeros(2, 4))],
            ValueError,
            "ByClass needs labels to fit, batch 1 has none",
        ),
        (
            [DATA._replace(labels=torch.zeros(3))],
            ValueError,
            r"labels of batch 0 have shape \(3,\), expected \(40,\)",
        ),
        (
            [DATA._replace(labels=torch.zeros(40))],
            TypeError,
            "labels of batch 0 are torch.float32, expected integers",
        ),
        (
            [DATA._replace(labels=DATA.labels + 1)],
            ValueError,
            "labels of batch 0 range from 1 to 3, expected 0 to 2",
        ),
        (
            [DATA._replace(labels=DATA.labels - 1)],
            ValueError,
            "labels of batch 0 range from -1 to 1",
        ),
        (
            [DATA._replace(logits=torch.zeros(40, 2))],
            ValueError,
            r"logits of batch 0 have shape \(40, 2\)",
        ),
        (
            [DATA.features],
            TypeError,
            r"expected fdbd.Batch\(features, logits, labels\), got Tensor",
        ),
    ],
)
def test_training_data_that_do_not_fit_are_refused_with_one_clear_sentence(batches, error, message):
    with pytest.raises(error, match=message):
        ByClass().fit(batches, HEAD)


def test_integer_and_half_training_features_are_taken_as_floats():
    whole = torch.arange(24).reshape(6, 4)
    assert TwoPasses().fit(Batch(whole), HEAD).mean.tolist() == [10, 11, 12, 13]
    assert TwoPasses().fit(Batch(whole.half()), HEAD).mean.dtype == torch.float32


def test_fitting_leaves_the_data_the_head_and_the_gradients_alone():
    features = DATA.features.clone().requires_grad_()
    detector = TwoPasses().fit(Batch(features), HEAD)
    assert features.grad is None
    assert not detector.mean.requires_grad
    head = Head(HEAD.weight.clone(), HEAD.bias.clone())
    detector.fit(DATA, head)
    detector.head_weight.zero_()
    # The detector has a copy.
    assert head.weight.abs().sum() > 0


def test_a_head_of_one_class_is_refused():
    head = Head(torch.ones(2, 4))
    head.weight = head.weight[:1]
    head.bias = head.bias[:1]
    with pytest.raises(ValueError, match="at least two classes, the head has 1"):
        TwoPasses().fit(DATA, head)


# Scoring


def test_missing_logits_are_computed_from_the_head():
    detector = MaxLogit().fit(DATA, HEAD)
    torch.testing.assert_close(detector.score(DATA), HEAD(DATA.features).amax(dim=1))
    assert detector.score(Batch(DATA.features, torch.zeros(40, 3))).tolist() == [0] * 40


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_base_class_fails_closed_on_what_a_detector_reads_and_on_nothing_else(bad):
    features = DATA.features.clone()
    logits = HEAD(DATA.features)
    features[3, 1] = bad
    logits[5, 2] = bad
    batch = Batch(features, logits)
    of_features = Norm().fit(DATA, HEAD).score(batch)
    assert (of_features == -math.inf).nonzero().tolist() == [[3]]
    of_logits = MaxLogit().fit(DATA, HEAD).score(batch)
    assert (of_logits == -math.inf).nonzero().tolist() == [[5]]
    computed = MaxLogit().fit(DATA, HEAD).score(Batch(features))
    assert (computed == -math.inf).nonzero().tolist() == [[3]]


def test_a_score_that_comes_out_as_nan_is_closed_too():
    class Odd(Detector):
        def formula(self, batch):
            return torch.where(batch.features[:, 0] > 0, torch.nan, 1.0)

    scores = Odd().fit(DATA, HEAD).score(DATA)
    positive = DATA.features[:, 0] > 0
    assert (scores[positive] == -math.inf).all()
    assert (scores[~positive] == 1).all()


def test_rows_too_large_for_float32_are_scored_in_float64():
    detector = Norm(4).fit(DATA, HEAD)
    features = DATA.features.clone()
    # Its fourth power, 1e36, still fits into float32.
    features[2] = 1e9
    # The fourth power of this one does not, and is finite all the same.
    features[3] = 1e25
    scores = detector.score(Batch(features))
    assert torch.isfinite(scores).all()
    assert scores[2].item() == pytest.approx(-4e36, rel=1e-5)
    assert scores[3] == -torch.finfo(torch.float32).max


def test_unfitted_detectors_say_so():
    for detector in (Norm(), TwoPasses(), MaxLogit()):
        assert not detector.is_fitted
        with pytest.raises(NotFittedError, match="is not fitted"):
            detector.score(DATA)
        with pytest.raises(NotFittedError):
            _ = detector.head


def test_a_detector_without_a_score_is_told_so():
    class Nothing(Detector):
        pass

    with pytest.raises(NotImplementedError, match="Nothing defines no formula"):
        Nothing().fit(DATA, HEAD).score(DATA)


@pytest.mark.parametrize("make", [Norm, TwoPasses, MaxLogit], ids=lambda cls: cls.__name__)
def test_compile_and_export_see_one_graph_that_still_fails_closed(make):
    detector = make().fit(DATA, HEAD)
    features = DATA.features[:6].clone()
    features[1, 1] = math.inf
    expected = detector.score(Batch(features))
    torch._dynamo.reset()
    compiled = torch.compile(detector, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(Batch(features)), expected)

    class Scorer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.detector = detector

        def forward(self, z):
            return self.detector(Batch(z))

    program = torch.export.export(Scorer(), (features,))
    torch.testing.assert_close(program.module()(features), expected)


# Keeping


def test_state_goes_into_an_unfitted_detector_with_every_buffer():
    detector = TwoPasses().fit(DATA, HEAD)
    assert set(detector.state_dict()) == {"head_weight", "head_bias", "mean", "spread"}
    loaded = TwoPasses()
    loaded.load_state_dict(detector.state_dict())
    assert loaded.is_fitted
    assert torch.equal(loaded.score(DATA), detector.score(DATA))
    nested = torch.nn.ModuleDict({"a": Pair(TwoPasses()).fit(DATA, HEAD)})
    # The head is kept by the part.
    assert "a.head_weight" not in nested.state_dict()
    empty = torch.nn.ModuleDict({"a": Pair(TwoPasses())})
    empty.load_state_dict(nested.state_dict())
    assert torch.equal(empty["a"].inner.score(DATA), nested["a"].inner.score(DATA))


def test_copies_and_pickles_score_the_same_and_share_nothing():
    detector = TwoPasses().fit(DATA, HEAD)
    expected = detector.score(DATA)
    for other in (copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        assert torch.equal(other.score(DATA), expected)
        other.mean.zero_()
        assert torch.equal(detector.score(DATA), expected)
    assert not pickle.loads(pickle.dumps(TwoPasses())).is_fitted


def test_moving_to_float64_moves_every_fitted_tensor():
    detector = TwoPasses().fit(DATA, HEAD).double()
    assert {tensor.dtype for tensor in detector.state_dict().values()} == {torch.float64}
    assert detector.score(DATA).dtype == torch.float64


def test_a_configuration_rebuilds_the_detector_from_plain_values():
    pair = Pair(Norm(3), (0.5, 4.0))
    config = pair.to_config()
    assert config == {
        "name": "test-pair",
        "options": {"inner": {"name": "test-norm", "options": {"power": 3}}, "weights": [0.5, 4.0]},
    }
    again = from_config(config)
    assert isinstance(again, Pair)
    assert again.inner.power == 3
    assert again.to_config() == config
    assert registered()["test-norm"] is Norm


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "os.system", "options": {}}, "unknown detector or shaping 'os.system'"),
        ({"name": "test-norm", "options": {"powr": 3}}, "'test-norm' does not take these options"),
        ({"name": "test-norm"}, "not a detector's configuration"),
        (["test-norm"], "not a detector's configuration"),
    ],
)
def test_configurations_from_elsewhere_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        from_config(config)


def test_a_repr_shows_the_options():
    assert repr(Norm(3)) == "Norm(power=3)"


@pytest.mark.parametrize("name", ["klm", "she", "openmax", "nnguide", "tempscale", "gen"])
def test_logits_of_a_large_batch_are_computed_piece_by_piece(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    head = Head(torch.randn(5, 6))
    features = torch.randn(3000, 6)
    batch = Batch(features, None, torch.arange(3000) % 5)
    whole = fdbd.create(name).fit(batch, head)
    monkeypatch.setattr(statistics, "LOGITS_AT_A_TIME", 5)
    pieces = fdbd.create(name).fit(batch, head)
    asked = Batch(torch.randn(20, 6))
    torch.testing.assert_close(pieces.score(asked), whole.score(asked), rtol=1e-5, atol=1e-5)
    logits = head(features)
    logits[2500, 1] = torch.nan
    # GEN learns nothing, and NNGuide learns from features.
    if name not in ("gen", "nnguide"):
        with pytest.raises(ValueError, match="batch 0, row 2500: its logits"):
            fdbd.create(name).fit(batch._replace(logits=logits), head)


def test_a_class_that_overrides_score_still_works_and_is_told_the_new_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"rename it to formula\(batch\)"):

        class Old(fdbd.Energy):
            def score(self, batch):
                return -super().score(batch)

    broken = DATA.features.clone()
    broken[3, 0] = math.nan
    scores = Old().fit(DATA, HEAD).score(Batch(broken))
    expected = -fdbd.Energy().fit(DATA, HEAD).score(Batch(broken))
    assert scores[3] == -math.inf
    rest = torch.arange(len(broken)) != 3
    assert torch.equal(scores[rest], expected[rest])


def test_set_is_a_deprecated_name_of_set_buffers() -> None:
    detector = Norm()
    with pytest.warns(DeprecationWarning, match="set_buffers"):
        detector.set(center=torch.ones(2))
    assert detector.state_dict()["center"].tolist() == [1, 1]


def test_a_detector_shows_what_users_and_authors_need_and_nothing_else() -> None:
    for_users = {"name", "paper", "needs", "label", "options", "to_config", "fit", "score",
                 "is_fitted", "head"}  # fmt: skip
    for_authors = {"passes", "formula", "observe", "example", "set_buffers", "buffer_shape",
                   "fit_dtype", "has_known_direction"}  # fmt: skip
    from_torch = set(dir(torch.nn.Module))
    deprecated = {"set"}
    own = {name for name in dir(Detector) if not name.startswith("_")} - from_torch
    assert own == for_users | for_authors | deprecated


def test_constructing_a_detector_changes_nothing_in_the_process(tmp_path) -> None:
    code = (
        "import os; seen = []\n"
        "import fdbd, torch, fdbd.kernels\n"
        "os.register_at_fork = lambda **hooks: seen.append(hooks)\n"
        "detector = fdbd.FDBD()\n"
        "assert not seen\n"
        "detector.fit(fdbd.Batch(torch.eye(2)), fdbd.Head(torch.eye(2)))\n"
        "assert len(seen) == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
