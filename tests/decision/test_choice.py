"""Guard(model, "auto"): held-out samples, weights, budget, what becomes of the guard, bad input."""

from __future__ import annotations

import json
import math
import warnings

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fdbd
from fdbd.data.pseudo_ood import make_kinds
from fdbd.decision.choice_rule import POOL, Cost, keep, make_member, weigh
from fdbd.metrics import auroc

SMALL_POOL = ("fdbd", "energy", "knn")


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(3),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.ReLU(),
        nn.Linear(16, 4),
    ).eval()


def make_images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return nn.functional.interpolate(coarse, (16, 16), mode="bilinear")


def loader(count: int, seed: int) -> DataLoader:
    return DataLoader(TensorDataset(make_images(count, seed), torch.zeros(count)), batch_size=64)


class Counting(nn.Module):
    """A model that counts the images that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        return self.model(images)


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    fresh = make_images(300, 2)
    chosen = fdbd.Guard(make_model(), "auto").fit([make_images(300, 1)], held_out=[fresh[:100]])
    return chosen.calibrate([fresh[100:]], alpha=0.05)


def test_the_chosen_detector_is_a_weighted_ensemble_like_any_other(guard) -> None:
    assert isinstance(guard.detector, fdbd.Ensemble)
    assert guard.detector.combine == "fisher"
    shares = {member.name: member.share for member in guard.choice.kept}
    assert math.isclose(sum(shares.values()), 1)
    for member, share in zip(guard.detector.members, guard.detector.shares):
        assert any(math.isclose(share, other) for other in shares.values()), member.label
    assert tuple(member.name for member in guard.choice.members) == POOL
    posters = make_kinds(make_images(50, 3), 50, ["poster"])["poster"]
    assert guard(posters).is_ood.float().mean() > 4 * 0.05


def test_an_explanation_says_which_members_object_and_how_much(guard) -> None:
    images = make_images(6, 4)
    found = guard.explain(images)
    assert len(found.members) == len(guard.detector.members)
    batch = guard.classifier(images)
    torch.testing.assert_close(found.member_p_values, guard.detector.p_values(batch).T)
    torch.testing.assert_close(found.objections.sum(dim=1), torch.ones(6))


def test_a_saved_guard_answers_the_same_and_knows_what_was_chosen(guard, tmp_path) -> None:
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", make_model())
    images = make_images(20, 4)
    assert torch.equal(loaded(images).p_values, guard(images).p_values)
    assert loaded.choice == guard.choice


def test_members_share_one_head_in_memory_and_in_the_file(guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    with safe_open(path, framework="pt") as file:
        heads = [name for name in file.keys() if name.endswith("head_weight")]  # noqa: SIM118
    assert len(heads) == 1
    state = fdbd.load(path).detector.state_dict()
    places = {state[name].data_ptr() for name in state if name.endswith("head_weight")}
    assert len(places) == 1
    # Of one detector there is nothing to share, and older versions can read its file.
    fdbd.Guard(make_model()).fit([make_images(60, 1)]).save(path)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["fdbd"])["format"] == 1


def test_the_network_sees_every_sample_once_and_the_kinds() -> None:
    model = Counting()
    chosen = fdbd.Guard(model, fdbd.Auto(pool=SMALL_POOL, per_kind=10))
    chosen.fit([make_images(200, 1)]).calibrate([make_images(90, 2), make_images(90, 3)])
    # The first call of a classifier may look at a few rows twice to check its head.
    assert 200 + 180 + 80 <= model.seen <= 200 + 180 + 80 + 4


def test_calibration_data_are_set_aside_for_the_weights_and_not_used_twice() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, per_kind=10))
    chosen.fit([make_images(200, 1)]).calibrate([make_images(150, 2), make_images(51, 3)])
    assert chosen.choice.num_held_out == 100
    assert chosen.threshold.count == 101


def test_what_is_set_aside_does_not_depend_on_the_size_of_batches() -> None:
    found = []
    for size in (7, 200):
        chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, per_kind=10))
        chosen.fit([make_images(100, 1)]).calibrate(make_images(200, 2).split(size))
        found.append(chosen.threshold.calibration)
    torch.testing.assert_close(*found)


def test_a_conformal_threshold_keeps_its_promise_after_the_choice() -> None:
    rates = []
    for seed in range(12):
        chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, per_kind=10, seed=seed))
        chosen.fit([make_images(100, 1)]).calibrate([make_images(200, 10 + seed)], alpha=0.1)
        rates.append(chosen(make_images(400, 50 + seed)).is_ood.float().mean().item())
    error = math.sqrt(0.1 * 0.9 * (1 / 400 + 1 / 100) / len(rates))
    assert np.mean(rates) <= 0.1 + 3 * error


def test_weights_follow_from_the_mean_without_the_extreme_kinds() -> None:
    aurocs = np.array([[0.9, 0.8, 0.5], [0.8, 0.9, 1.0], [0.7, 0.85, 0.6], [0.8, 0.1, 0.6]])
    expected = np.exp(0.3 * 100 * np.array([0.8, 0.825, 0.6]))
    np.testing.assert_allclose(weigh(aurocs), expected / expected.sum())
    np.testing.assert_allclose(weigh(aurocs, beta=0), [1 / 3] * 3)
    two = np.array([[0.9, 0.7], [0.7, 0.7]])
    np.testing.assert_allclose(weigh(two)[0] / weigh(two)[1], np.exp(0.3 * 10))


def test_aurocs_in_the_report_are_those_of_the_members(guard) -> None:
    alone = fdbd.Guard(make_model(), "fdbd").fit([make_images(300, 1)])
    held_out = make_images(300, 2)[:100]
    noise = torch.rand(4, 3, 16, 16)
    of_fdbd = next(member for member in guard.choice.members if member.name == "fdbd")
    value, low, high = of_fdbd.aurocs["noise"]
    assert low <= value <= high
    assert auroc(alone.score(held_out), alone.score(noise)) >= low - 0.2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("200us", fdbd.Budget(microseconds=200)),
        ("1.5 MB, no bank", fdbd.Budget(megabytes=1.5, bank=False)),
        ("3µs,10mb", fdbd.Budget(3, 10)),
    ],
)
def test_a_budget_is_read_from_words(text: str, expected: fdbd.Budget) -> None:
    assert fdbd.Budget.parse(text) == expected


@pytest.mark.parametrize("text", ["", "10", "10 GB", "fast", "-1us", "nanus", "infMB"])
def test_a_budget_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="budget"):
        fdbd.Budget.parse(text)


def test_members_stay_by_weight_as_far_as_the_budget_goes() -> None:
    weights = np.array([0.1, 0.5, 0.39, 0.01])
    costs = [Cost(1, 1, False), Cost(10, 50, True), Cost(5, 1, False), Cost(1, 0, False)]
    assert keep(weights, costs, fdbd.Budget()) == [0, 1, 2]
    assert keep(weights, costs, fdbd.Budget(microseconds=11)) == [0, 1]
    assert keep(weights, costs, fdbd.Budget(bank=False)) == [0, 2]
    assert keep(weights, costs, fdbd.Budget(megabytes=0)) == [3]
    assert keep(weights, costs, fdbd.Budget(microseconds=0.1)) == [0]


def test_the_tightest_budget_leaves_fdbd_alone() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, budget="0us", per_kind=5))
    chosen.fit([make_images(100, 1)])
    with pytest.warns(UserWarning, match="budget admits no detector"):
        chosen.calibrate([make_images(100, 2)])
    assert isinstance(chosen.detector, fdbd.FDBD)


def test_no_bank_keeps_no_training_samples() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(budget="no bank", per_kind=5))
    chosen.fit([make_images(100, 1)]).calibrate([make_images(100, 2)])
    assert not any(name.endswith("bank") for name in chosen.state_dict())


def test_a_bank_keeps_some_5000_samples_of_many() -> None:
    detector = make_member("knn", num_samples=1_000_000)
    assert detector.alpha == 0.005
    assert detector.k == 50
    assert make_member("knn", num_samples=60).k == 30


def test_a_pool_that_is_fitted_in_one_pass_knows_how_many_samples_there_are() -> None:
    auto = fdbd.Auto(pool=SMALL_POOL, per_kind=5)
    chosen = fdbd.Guard(make_model(), auto).fit([make_images(60, 1), make_images(60, 2)])
    members = {member.label: member for member in chosen.detector.detectors}
    assert members["knn"].k == 50
    assert len(members["knn"].bank) == 120


def test_features_alone_get_the_equal_ensemble_and_a_warning() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 8, generator=generator).relu()
    head = fdbd.Head(torch.randn(3, 8, generator=generator))
    chosen = fdbd.Guard(head, "auto").fit([fdbd.Batch(features[:200])])
    with pytest.warns(UserWarning, match="no pseudo-OOD samples"):
        chosen.calibrate([fdbd.Batch(features[200:])])
    assert len(set(chosen.detector.shares)) == 1
    assert len(chosen.detector.members) == 6


def test_pseudo_ood_samples_of_the_user_weigh_detectors_of_features() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(400, 8, generator=generator).relu()
    head = fdbd.Head(torch.randn(3, 8, generator=generator))

    def shuffled(held_out: fdbd.Batch) -> dict[str, fdbd.Batch]:
        return {"shuffled": fdbd.Batch(held_out.features.roll(3, dims=1) * 4)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = fdbd.Guard(head, fdbd.Auto(kinds=shuffled, pool=SMALL_POOL))
        chosen.fit([fdbd.Batch(features[:200])]).calibrate([fdbd.Batch(features[200:])], tpr=0.5)
    assert list(chosen.choice.per_kind) == ["shuffled"]


def test_a_model_that_takes_a_dict_of_images_is_weighed_by_them() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model()

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.model(pixel_values)

    chosen = fdbd.Guard(Named(), fdbd.Auto(pool=SMALL_POOL, per_kind=5))
    chosen.fit([{"pixel_values": make_images(100, 1)}])
    chosen.calibrate([{"pixel_values": make_images(100, 2)}])
    assert len(chosen.choice.per_kind) == 8


class OfOneFeature(nn.Module):
    """A classifier by the mean brightness alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean(dim=(1, 2, 3))[:, None])


def test_a_member_that_cannot_be_fitted_is_left_out() -> None:
    chosen = fdbd.Guard(OfOneFeature(), fdbd.Auto(pool=["fdbd", "vim", "energy"], per_kind=5))
    chosen.fit([make_images(100, 1)])
    with pytest.warns(UserWarning, match="vim was left out: .* residual"):
        chosen.calibrate([make_images(100, 2)])
    assert [member.name for member in chosen.choice.members] == ["fdbd", "energy"]
    assert len(chosen.choice.notes) == 1


def test_the_first_of_the_pool_has_to_be_fitted() -> None:
    chosen = fdbd.Guard(OfOneFeature(), fdbd.Auto(pool=["vim", "fdbd", "energy"], per_kind=5))
    with pytest.raises(ValueError, match="residual"):
        chosen.fit([make_images(100, 1)])


def test_a_member_whose_scores_are_not_finite_is_left_out() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, per_kind=5))
    chosen.fit([make_images(100, 1)])
    chosen.detector.members[2].bank.fill_(math.nan)
    with pytest.warns(UserWarning, match="knn was left out: it scores held-out sample 0 -inf"):
        chosen.calibrate([make_images(100, 2)])
    assert [member.name for member in chosen.choice.members] == ["fdbd", "energy"]


class WithMask(nn.Module):
    """A model of images with channels last, of which a mask leaves something out."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, pixels: Tensor, mask: Tensor) -> Tensor:
        return self.model((pixels * mask[..., None]).permute(0, 3, 1, 2))


def test_images_with_channels_last_and_other_inputs_are_weighed_by_kinds() -> None:
    def batch(count: int, seed: int) -> dict[str, Tensor]:
        pixels = make_images(count, seed).permute(0, 2, 3, 1)
        return {"pixels": pixels, "mask": torch.ones(count, 16, 16)}

    advice = fdbd.choose(
        WithMask(), [batch(100, 1)], [batch(60, 2)], auto=fdbd.Auto(pool=SMALL_POOL, per_kind=5)
    )
    assert len(advice.choice.per_kind) == 8
    assert {tuple(picture.shape) for picture in advice.pictures.values()} == {(3, 16, 16)}


class WritesToItsInputs(nn.Module):
    """A model that normalises images in place."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.sub_(0.5))


class WritesNothing(WritesToItsInputs):
    """The same, in memory of its own."""

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images - 0.5)


def test_kinds_are_made_of_the_images_as_they_were_given() -> None:
    found = []
    for kind in (WritesToItsInputs, WritesNothing):
        fresh = make_images(60, 2)
        auto = fdbd.Auto(pool=SMALL_POOL, per_kind=5)
        advice = fdbd.choose(kind(), [make_images(100, 1)], [fresh], auto=auto)
        found.append(advice)
    first, second = found
    for one, other in zip(first.choice.members, second.choice.members):
        assert one.aurocs == other.aurocs
    torch.testing.assert_close(first.pictures, second.pictures)


def test_images_of_many_channels_are_weighed_by_kinds() -> None:
    model = nn.Sequential(nn.Conv2d(13, 3, 1), make_model())
    images = torch.rand(160, 13, 12, 20)
    chosen = fdbd.Guard(model, fdbd.Auto(pool=SMALL_POOL, per_kind=5))
    chosen.fit([images[:100]], held_out=[images[100:]])
    assert len(chosen.choice.per_kind) == 8


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.rand(3, 1, 16, 16), "the kind 'mine' is not what the model takes: .*channels"),
        (torch.rand(0, 3, 16, 16), "the kind 'mine' has no samples"),
    ],
)
def test_an_error_names_the_kind_that_cannot_be_used(given: Tensor, message: str) -> None:
    auto = fdbd.Auto(kinds={"mine": given}, pool=SMALL_POOL)
    chosen = fdbd.Guard(make_model(), auto).fit([make_images(100, 1)])
    with pytest.raises(ValueError, match=message):
        chosen.calibrate([make_images(100, 2)])


def test_kinds_for_a_guard_without_a_model_are_batches_of_features() -> None:
    auto = fdbd.Auto(kinds={"mine": torch.rand(5, 8)}, pool=SMALL_POOL)
    chosen = fdbd.Guard(fdbd.Head(torch.eye(8)[:3]), auto).fit([fdbd.Batch(torch.rand(100, 8))])
    with pytest.raises(ValueError, match="the kind 'mine' is a Tensor, and the guard has no model"):
        chosen.calibrate([fdbd.Batch(torch.rand(100, 8))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": 3}, "kinds is 3, expected a function"),
        ({"pool": "fdbd"}, "expected a list of names"),
        ({"pool": ["fdbd"]}, "fewer than two"),
        ({"pool": ["fdbd", "knn", "fdbd"]}, "'fdbd' more than once"),
        ({"held_out": 29}, "at least 30"),
        ({"held_out": 50.5}, "held_out is 50.5"),
        ({"per_kind": 0}, "per_kind is 0"),
        ({"beta": -1}, "beta"),
    ],
)
def test_options_that_mean_nothing_are_refused_at_once(options, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fdbd.Auto(**options)


def test_auto_says_what_is_missing() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL))
    with pytest.raises(fdbd.NotFittedError, match=r"guard\.fit"):
        chosen.calibrate([make_images(100, 1)])
    chosen.fit([make_images(100, 1)])
    with pytest.raises(fdbd.NotFittedError, match="has not chosen"):
        chosen.score(make_images(2, 1))
    with pytest.raises(fdbd.NotFittedError, match="has not chosen"):
        chosen.save("nowhere.safetensors")
    with pytest.raises(ValueError, match="25 of 50 samples can be held out"):
        chosen.calibrate([make_images(50, 2)])
    with pytest.raises(ValueError, match="leave it out"):
        fdbd.Guard(make_model()).fit([make_images(9, 1)], held_out=[make_images(9, 2)])
    with pytest.raises(ValueError, match="leave shaping out"):
        fdbd.Guard(make_model(), "auto", shaping="react")
    with pytest.raises(ValueError, match="unknown detector"):
        fdbd.Guard(make_model(), fdbd.Auto(pool=["fdbd", "nothing"]))
    with pytest.raises(ValueError, match=r"react\(95\)"):
        fdbd.Guard(make_model(), fdbd.Auto(pool=["fdbd", "react(most)+energy"]))


def test_a_second_fit_starts_anew() -> None:
    chosen = fdbd.Guard(make_model(), fdbd.Auto(pool=SMALL_POOL, per_kind=5))
    chosen.fit([make_images(100, 1)], held_out=[make_images(60, 2)])
    assert chosen.choice is not None
    chosen.fit([make_images(100, 3)])
    assert chosen.choice is None
    assert len(chosen.detector.members) == 3


def test_the_graph_of_a_chosen_guard_decides_the_same(guard, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    images = torch.cat([make_images(40, 5), torch.rand(24, 3, 16, 16)])
    guard.export_onnx(tmp_path / "guard.onnx", images[:2])
    session = onnxruntime.InferenceSession(tmp_path / "guard.onnx")
    names = [output.name for output in session.get_outputs()]
    answers = dict(zip(names, session.run(None, {session.get_inputs()[0].name: images.numpy()})))
    expected = guard(images)
    assert np.array_equal(answers["is_ood"], expected.is_ood.numpy())
    # A member's p-value may jump between two calibration scores that are nearly the same.
    np.testing.assert_allclose(answers["p_value"], expected.p_values.numpy(), atol=0.02)
