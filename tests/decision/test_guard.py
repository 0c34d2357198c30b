"""The guard as a whole: fit, calibrate, decide, explain, save, load."""

from __future__ import annotations

import copy
import json
import shutil
import struct
import threading
import warnings
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fdbd
from fdbd.core import artifact
from fdbd.decision.answers import NotCalibratedError


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def make_loader(count: int, seed: int, shift: float = 0.0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 2, 2, generator=generator) + shift
    return DataLoader(TensorDataset(images, torch.arange(count) % 4), batch_size=32)


@pytest.fixture
def guard() -> fdbd.Guard:
    return fdbd.Guard(make_model()).fit(make_loader(200, 1)).calibrate(make_loader(100, 2), tpr=0.9)


def test_a_guarded_model_decides_in_three_lines() -> None:
    model = make_model()
    guard = fdbd.Guard(model)
    guard.fit(make_loader(200, 1)).calibrate(make_loader(100, 2), tpr=0.95)
    decision = guard(torch.randn(7, 3, 2, 2))
    assert decision._fields == ("logits", "labels", "scores", "p_values", "is_ood")
    assert decision.is_ood.dtype == torch.bool
    assert torch.equal(decision.labels, decision.logits.argmax(dim=1))


@pytest.mark.parametrize(
    "name", [name for name in fdbd.list_detectors() if name not in ("odin", "adascale")]
)
def test_mixed_precision_is_for_the_network_not_for_the_score(name: str) -> None:
    head = fdbd.Head(torch.randn(20, 12, generator=torch.Generator().manual_seed(0)))
    features = torch.randn(400, 12, generator=torch.Generator().manual_seed(1)).relu()
    batch = fdbd.Batch(features, None, torch.arange(400) % 20)
    plain = fdbd.create(name).fit(batch, head)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = fdbd.create(name).fit(batch, head)
        scores = mixed.score(fdbd.Batch(features))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, plain.score(fdbd.Batch(features)))


@pytest.mark.parametrize("name", ["fdbd", "energy", "mds", "knn", "nnguide", "vim", "react+energy"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_a_gpu_is_guarded_there(name: str) -> None:
    guard = (
        fdbd.Guard(make_model().cuda(), name)
        .fit(make_loader(200, 1))
        .calibrate(make_loader(100, 2))
    )
    images = torch.randn(9, 3, 2, 2)
    here = fdbd.Guard(make_model(), name).fit(make_loader(200, 1)).score(images)
    assert guard(images.cuda()).scores.is_cuda
    torch.testing.assert_close(guard.score(images.cuda()).cpu(), here, rtol=1e-3, atol=1e-4)


def test_decision_logits_are_the_models_own(guard: fdbd.Guard) -> None:
    images = torch.randn(9, 3, 2, 2)
    assert torch.equal(guard(images).logits, make_model()(images))


def test_the_score_is_the_detectors_score_on_the_heads_input(guard: fdbd.Guard) -> None:
    model = make_model()
    images = torch.randn(9, 3, 2, 2)
    train = torch.cat([x for x, _ in make_loader(200, 1)])
    head = fdbd.Head.from_linear(model[3])
    expected = (
        fdbd.FDBD().fit(fdbd.Batch(model[:3](train)), head).score(fdbd.Batch(model[:3](images)))
    )
    torch.testing.assert_close(guard(images).scores, expected.detach())
    torch.testing.assert_close(guard.score(images), expected.detach())


def test_calibration_accepts_the_share_asked_for() -> None:
    guard = fdbd.Guard(make_model()).fit(make_loader(500, 1))
    calibration = make_loader(400, 2)
    for tpr in (0.5, 0.9, 0.99):
        guard.calibrate(calibration, tpr=tpr)
        accepted = torch.cat([~guard(images).is_ood for images, _ in calibration]).double().mean()
        assert tpr <= accepted <= tpr + 0.02


def test_conformal_false_alarms_stay_below_alpha_on_average() -> None:
    guard = fdbd.Guard(make_model()).fit(make_loader(500, 1))
    rates = []
    for seed in range(30):
        guard.calibrate(make_loader(99, 100 + seed), alpha=0.1)
        rates.append(
            guard(torch.cat([x for x, _ in make_loader(200, 200 + seed)])).is_ood.double().mean()
        )
    assert torch.stack(rates).mean() <= 0.1 + 0.02


def test_per_class_thresholds_hold_for_each_predicted_class() -> None:
    guard = fdbd.Guard(make_model()).fit(make_loader(500, 1))
    calibration = make_loader(800, 2)
    guard.calibrate(calibration, tpr=0.9, per_class=True)
    decisions = [guard(images) for images, _ in calibration]
    labels = torch.cat([d.labels for d in decisions])
    is_ood = torch.cat([d.is_ood for d in decisions])
    for label in labels.unique():
        assert (~is_ood[labels == label]).double().mean() >= 0.9


def test_features_alone_give_the_same_decision(guard: fdbd.Guard) -> None:
    images = torch.randn(5, 3, 2, 2)
    from_images = guard(images)
    from_features = guard.decide(fdbd.Batch(make_model()[:3](images)))
    for ours, theirs in zip(from_images, from_features):
        torch.testing.assert_close(ours, theirs)


def test_fitting_on_batches_of_features_needs_no_network() -> None:
    model = make_model()
    batches = [fdbd.Batch(model[:3](images).detach()) for images, _ in make_loader(200, 1)]
    by_features = fdbd.Guard(fdbd.Head.from_linear(model[3])).fit(batches)
    by_images = fdbd.Guard(model).fit(make_loader(200, 1))
    torch.testing.assert_close(by_features.detector.center, by_images.detector.center)


def test_a_detector_of_several_passes_runs_the_network_once() -> None:
    model = make_model()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    loader = make_loader(200, 1)
    guard = fdbd.Guard(model, "vim").fit(loader)
    assert len(calls) == len(loader)
    features = torch.cat([make_model()[:3](images) for images, _ in loader]).detach()
    expected = (
        fdbd.create("vim")
        .fit(fdbd.Batch(features), fdbd.Head.from_linear(model[3]))
        .score(fdbd.Batch(features))
    )
    torch.testing.assert_close(guard.detector.score(fdbd.Batch(features)), expected)


def test_a_generator_is_enough_for_a_detector_of_several_passes() -> None:
    guard = fdbd.Guard(make_model(), "vim").fit(item for item in make_loader(200, 1))
    assert guard.detector.is_fitted


@pytest.mark.parametrize("name", ["fdbd", "energy"])
def test_calibrating_on_the_data_of_the_fit_warns(name: str) -> None:
    loader = make_loader(200, 1)
    guard = fdbd.Guard(make_model(), name).fit(loader)
    with pytest.warns(UserWarning, match="also used for the fit"):
        guard.calibrate(loader)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*also used for the fit")
        guard.calibrate(make_loader(200, 2))


def test_nothing_to_fit_on_is_an_error_also_for_a_detector_that_learns_nothing() -> None:
    for name in ("fdbd", "energy"):
        with pytest.raises(ValueError, match="hold no samples"):
            fdbd.Guard(make_model(), name).fit([])


def test_guards_that_read_more_than_features_are_loaded(tmp_path) -> None:
    head = fdbd.Head(torch.randn(3, 5))
    path = tmp_path / "guard.safetensors"
    views = fdbd.Batch(torch.randn(30, 5), views=torch.randn(2, 30, 5))
    guard = fdbd.Guard(head, "csi").fit([views])
    guard.save(path)
    torch.testing.assert_close(fdbd.load(path).score(views), guard.score(views))
    fdbd.Guard(head, fdbd.Ensemble(["energy", "fdbd"])).fit([fdbd.Batch(torch.randn(30, 5))]).save(
        path
    )
    with pytest.raises(RuntimeError, match="not calibrated"):
        fdbd.load(path).score(fdbd.Batch(torch.randn(2, 5)))


def test_where_all_boundaries_meet_they_have_equal_shares() -> None:
    guard = fdbd.Guard(fdbd.Head(torch.randn(4, 5))).fit([fdbd.Batch(torch.randn(30, 5))])
    guard.calibrate([fdbd.Batch(torch.randn(30, 5))])
    explanation = guard.explain(fdbd.Batch(torch.zeros(1, 5)))
    assert sorted(explanation.shares[0].tolist()) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


def test_an_explanation_of_many_samples_prints_as_one_line() -> None:
    guard = fdbd.Guard(fdbd.Head(torch.eye(4))).fit([fdbd.Batch(torch.randn(30, 4))])
    guard.calibrate([fdbd.Batch(torch.randn(30, 4))])
    why = guard.explain(fdbd.Batch(torch.randn(500, 4)))
    text = repr(why)
    assert len(text) < 200
    assert "500 samples, 4 classes" in text
    assert f"class {int(why.nearest[0])} at {float(why.nearest_distance[0]):.4g}" in text
    assert "500 samples" not in guard.decide(fdbd.Batch(torch.randn(500, 4)))._repr_html_()


def test_the_warning_survives_saving(tmp_path) -> None:
    fdbd.Guard(make_model()).fit(make_loader(200, 1)).save(tmp_path / "guard.safetensors")
    guard = fdbd.load(tmp_path / "guard.safetensors", make_model())
    with pytest.warns(UserWarning, match="also used for the fit"):
        guard.calibrate(make_loader(200, 1))


class Saturating(nn.Module):
    """Turns any input into finite features, as ReLU6, tanh and the like do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 4)

    def forward(
        self,
        pixels: torch.Tensor,
        extra: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ):
        pixels = pixels if extra is None else pixels + extra.view_as(pixels)
        return self.fc(pixels.nan_to_num(0.0).tanh().flatten(1))


CALIBRATED_ON_THE_FIT = pytest.mark.filterwarnings(
    "ignore:the calibration data were also used for the fit:UserWarning"
)
"""For tests that only need some threshold."""


@CALIBRATED_ON_THE_FIT
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["pixels", "extra", "tensor", "channels_last"])
def test_non_finite_inputs_are_ood_even_if_the_network_hides_them(bad: float, part: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(100, 3, 2, 2)
    inputs = {
        "pixels": images,
        "extra": torch.randn(100, 12).half(),
        "mask": torch.full((100, 4), -torch.inf),
    }
    given = inputs if part in inputs else images
    guard = fdbd.Guard(Saturating()).fit([given]).calibrate([given], alpha=0.02)
    spoilt = copy.deepcopy(given)
    if part == "channels_last":
        spoilt = spoilt.to(memory_format=torch.channels_last)
    tensor = spoilt[part] if part in inputs else spoilt
    row = tensor[1]
    # The last number of the second sample.
    row[(-1,) * row.ndim] = bad
    decision = guard(spoilt)
    clean = guard(given)
    assert (decision.scores[1], bool(decision.is_ood[1])) == (-torch.inf, True)
    assert guard.score(spoilt)[1] == -torch.inf
    others = torch.arange(100) != 1
    assert torch.equal(decision.scores[others], clean.scores[others])
    with pytest.raises(ValueError, match="row 1 of a training batch holds NaN or infinity"):
        fdbd.Guard(Saturating()).fit([spoilt])
    with pytest.raises(ValueError, match="calibration scores are not finite"):
        guard.calibrate([spoilt])


def test_huge_but_finite_inputs_are_not_taken_for_infinite_ones() -> None:
    guard = fdbd.Guard(Saturating()).fit([torch.randn(100, 3, 2, 2)])
    with pytest.warns(UserWarning, match="outside of the inputs of the fit"):
        scores = guard.score(torch.full((2, 3, 2, 2), 3e38))
    assert torch.isfinite(scores).all()


class Boundless(fdbd.Detector):
    """Has no name of its own, so that no list has it."""

    def formula(self, batch: fdbd.Batch) -> torch.Tensor:
        return batch.features[:, 0] * torch.inf


def test_a_score_of_plus_infinity_is_ood() -> None:
    guard = fdbd.Guard(fdbd.Head(torch.randn(3, 2)), Boundless()).fit(fdbd.Batch(torch.ones(5, 2)))
    guard.set_threshold(torch.arange(100.0))
    decision = guard.decide(fdbd.Batch(torch.ones(2, 2)))
    assert decision.is_ood.all()
    assert not (decision.scores >= 0).any()


@CALIBRATED_ON_THE_FIT
def test_one_labelled_batch_and_numpy_arrays_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    images = torch.randn(100, 3, 2, 2)
    labels = torch.arange(100) % 4
    expected = (
        fdbd.Guard(make_model(), "mds").fit([(images, labels)]).calibrate([images])(images[:5])
    )
    arrays = images.double().numpy(), labels.numpy()
    for data in ((images, labels), [images, labels], arrays, [arrays]):
        guard = fdbd.Guard(make_model(), "mds").fit(data).calibrate(images.numpy())
        torch.testing.assert_close(guard(images[:5].numpy()).scores, expected.scores)
    two_batches = fdbd.Guard(make_model()).fit((images, images))
    assert two_batches.score(images).shape == (100,)


def test_a_batch_has_one_label_per_sample() -> None:
    with pytest.raises(ValueError, match="6 samples and 5 labels"):
        fdbd.Guard(make_model()).fit([(torch.randn(6, 3, 2, 2), torch.zeros(5, dtype=torch.int64))])


def test_raw_pixels_are_refused_in_one_sentence() -> None:
    pixels = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"takes no images of torch.uint8 .*: prepare them first"):
        fdbd.Guard(make_model()).fit([pixels])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (fdbd.Batch(torch.zeros(2, 3)), r"features have shape \(2, 3\), expected \(N, 16\)"),
        (fdbd.Batch(torch.zeros(16)), r"features have shape \(16,\), expected \(N, 16\)"),
        (
            fdbd.Batch(torch.zeros(2, 16), torch.zeros(2, 3)),
            r"logits have shape \(2, 3\), expected \(N, 4\)",
        ),
    ],
)
def test_features_of_another_width_are_one_sentence(
    guard: fdbd.Guard, batch: fdbd.Batch, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        guard.decide(batch)
    with pytest.raises(ValueError, match=message):
        fdbd.Guard(make_model()).fit([batch])


def test_the_file_says_how_the_guard_was_calibrated(guard: fdbd.Guard, tmp_path) -> None:
    guard.save(tmp_path / "guard.safetensors")
    found = fdbd.load(tmp_path / "guard.safetensors").about["calibration"]
    assert (found["kind"], found["target"], found["count"]) == ("quantile", 0.9, 100)


def test_few_calibration_samples_draw_a_caution() -> None:
    guard = fdbd.Guard(make_model()).fit(make_loader(64, 1))
    with pytest.warns(UserWarning, match="only 12 calibration samples"):
        guard.calibrate(make_loader(12, 2))


def test_asking_before_calibrating_says_what_to_do() -> None:
    guard = fdbd.Guard(make_model()).fit(make_loader(64, 1))
    with pytest.raises(NotCalibratedError, match="call calibrate"):
        guard(torch.randn(1, 3, 2, 2))
    assert guard.score(torch.randn(2, 3, 2, 2)).shape == (2,)


def test_asking_before_fitting_says_what_to_do() -> None:
    for ask in (fdbd.Guard.calibrate, fdbd.Guard.score, fdbd.Guard.explain, fdbd.Guard.__call__):
        with pytest.raises(
            fdbd.NotFittedError, match=r"the guard is not fitted: call guard.fit\(loader\)"
        ):
            ask(fdbd.Guard(make_model()), torch.randn(3, 3, 2, 2))


def test_both_targets_at_once_are_refused(guard: fdbd.Guard) -> None:
    with pytest.raises(ValueError, match="not both"):
        guard.calibrate(make_loader(64, 1), tpr=0.9, alpha=0.1)


def test_fitting_anew_forgets_the_threshold(guard: fdbd.Guard) -> None:
    guard.fit(make_loader(64, 5))
    assert guard.threshold is None


def test_explanations_agree_with_a_loop_over_the_boundaries(guard: fdbd.Guard) -> None:
    images = torch.randn(6, 3, 2, 2)
    model = make_model()
    explanation = guard.explain(images)
    features = model[:3](images).double()
    weight = model[3].weight.double()
    bias = model[3].bias.double()
    calibration = torch.cat([guard.score(x) for x, _ in make_loader(100, 2)])
    for i in range(6):
        logits = weight @ features[i] + bias
        k = int(logits.argmax())
        distance = torch.stack(
            [(logits[k] - logits[c]) / (weight[k] - weight[c]).norm() for c in range(4) if c != k]
        ).detach()
        others = [c for c in range(4) if c != k]
        assert explanation.distances[i, k].isnan()
        torch.testing.assert_close(
            explanation.distances[i, others].double(), distance, rtol=1e-4, atol=1e-5
        )
        assert int(explanation.nearest[i]) == others[int(distance.argmin())]
        torch.testing.assert_close(
            explanation.nearest_distance[i].double(), distance.min(), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            explanation.shares[i, others].double(), distance / distance.sum(), rtol=1e-4, atol=1e-5
        )
        below = (calibration < explanation.decision.scores[i]).double().mean()
        assert float(explanation.standing[i]) == pytest.approx(float(below))
    torch.testing.assert_close(explanation.shares.sum(dim=1), torch.ones(6))


def test_a_saved_guard_decides_the_same(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    images = torch.randn(8, 3, 2, 2)
    guard.save(path)
    assert list(tmp_path.iterdir()) == [path]
    for ours, theirs in zip(guard(images), fdbd.load(path, make_model())(images)):
        assert torch.equal(ours, theirs)
    features = fdbd.Batch(make_model()[:3](images).detach())
    for ours, theirs in zip(guard.decide(features), fdbd.load(path).decide(features)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("kind", [{"tpr": 0.8}, {"alpha": 0.2}])
@pytest.mark.parametrize("name", ["fdbd", "react+energy", "mds", "vim", "knn", "ash-s+fdbd"])
def test_every_kind_of_guard_survives_saving(
    name: str, kind: dict, per_class: bool, tmp_path
) -> None:
    options = {"k": 5} if name == "knn" else {}
    guard = fdbd.Guard(make_model(), fdbd.create(name, **options)).fit(make_loader(300, 1))
    guard.calibrate(make_loader(400, 2), **kind, per_class=per_class)
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", make_model())
    images = torch.randn(8, 3, 2, 2)
    for ours, theirs in zip(guard(images), loaded(images)):
        assert torch.equal(ours, theirs)


def test_a_model_with_another_head_is_refused_with_both_fingerprints(
    guard: fdbd.Guard, tmp_path
) -> None:
    guard.save(tmp_path / "guard.safetensors")
    other = make_model(seed=9)
    with pytest.raises(artifact.ArtifactError) as error:
        fdbd.load(tmp_path / "guard.safetensors", other)
    assert fdbd.Head.from_linear(make_model()[3]).fingerprint()[:16] in str(error.value)
    assert fdbd.Head.from_linear(other[3]).fingerprint()[:16] in str(error.value)


def test_every_truncation_of_the_file_is_refused(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(artifact.ArtifactError, match=r"truncated|corrupted"):
            fdbd.load(path)


def test_every_flipped_byte_is_noticed(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    content = path.read_bytes()
    for position in range(0, len(content), 61):
        damaged = bytearray(content)
        damaged[position] ^= 0x10
        path.write_bytes(bytes(damaged))
        with pytest.raises(artifact.ArtifactError):
            fdbd.load(path)


def test_a_newer_format_is_refused(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    description, tensors = artifact.read(path)
    artifact.write(path, {**description, "format": artifact.FORMAT + 1}, tensors)
    with pytest.raises(artifact.ArtifactError, match="upgrade fdbd"):
        fdbd.load(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(artifact.ArtifactError, match="not a guard"):
        fdbd.load(tmp_path / "x.safetensors")
    (tmp_path / "huge").write_bytes(struct.pack("<Q", 1 << 60) + json.dumps({}).encode())
    with pytest.raises(artifact.ArtifactError, match="truncated"):
        fdbd.load(tmp_path / "huge")


def test_a_file_that_names_an_unknown_detector_is_refused(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    description, tensors = artifact.read(path)
    for detector in (
        {"name": "os.system", "options": {}},
        "fdbd",
        {"name": "fdbd", "options": {"surprise": 1}},
        None,
    ):
        artifact.write(path, {**description, "detector": detector}, tensors)
        with pytest.raises(artifact.ArtifactError):
            fdbd.load(path)


def test_a_file_with_missing_or_misshapen_tensors_is_refused(guard: fdbd.Guard, tmp_path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    description, tensors = artifact.read(path)
    for name in [name for name in tensors if name.startswith("detector.")]:
        artifact.write(
            path, description, {key: value for key, value in tensors.items() if key != name}
        )
        with pytest.raises(artifact.ArtifactError):
            fdbd.load(path)
        artifact.write(path, description, {**tensors, name: torch.zeros(3, 5, 7)})
        with pytest.raises(artifact.ArtifactError):
            fdbd.load(path)


def test_saving_into_a_missing_folder_says_so(guard: fdbd.Guard, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        guard.save(tmp_path / "nowhere" / "guard.safetensors")


def test_a_failed_write_leaves_the_old_file(guard: fdbd.Guard, tmp_path, monkeypatch) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(artifact, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        guard.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_eight_threads_get_their_own_answers(guard: fdbd.Guard) -> None:
    inputs = [torch.randn(4, 3, 2, 2) for _ in range(64)]
    expected = [guard(images).scores for images in inputs]
    results: dict[int, torch.Tensor] = {}

    def work(start: int) -> None:
        for _ in range(10):
            for index in range(start, 64, 8):
                results[index] = guard(inputs[index]).scores

    threads = [threading.Thread(target=work, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(64):
        torch.testing.assert_close(results[index], expected[index])


THRESHOLDS = [{"tpr": 0.9}, {"alpha": 0.1}, {"alpha": 0.2, "per_class": True}]


def assert_same_decision(found: tuple, expected: fdbd.Decision) -> None:
    for name, one, other in zip(fdbd.Decision._fields, found, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True, msg=name)


def guard_and_images(name: str, threshold: dict) -> tuple[fdbd.Guard, torch.Tensor]:
    guard = (
        fdbd.Guard(make_model(), name)
        .fit(make_loader(200, 1))
        .calibrate(make_loader(400, 2), **threshold)
    )
    images = torch.randn(6, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    images[4, 0, 0, 0] = float("nan")
    return guard, images


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
@pytest.mark.parametrize("name", ["fdbd", "react+fdbd", "energy", "mds"])
def test_a_guard_compiles_as_a_full_graph_and_exports(name: str, threshold: dict) -> None:
    # Compiled guards of other tests count against the limit of one function.
    torch._dynamo.reset()
    guard, images = guard_and_images(name, threshold)
    compiled = torch.compile(guard, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(
        guard, (images,), dynamic_shapes=({0: torch.export.Dim("n")},)
    ).module()
    for count in (6, 1, 3):
        expected = guard(images[:count])
        assert_same_decision(compiled(images[:count]), expected)
        assert_same_decision(exported(images[:count]), expected)


@pytest.mark.slow
@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))),
    reason="torch.compile needs a C++ compiler",
)
@pytest.mark.parametrize("threshold", THRESHOLDS, ids=str)
def test_the_compiled_machine_code_decides_the_same(threshold: dict) -> None:
    torch._dynamo.reset()
    guard, images = guard_and_images("react+fdbd", threshold)
    compiled = torch.compile(guard, fullgraph=True, dynamic=True)
    for count in (6, 1, 3):
        assert_same_decision(compiled(images[:count]), guard(images[:count]))


def test_perturbation_touches_the_score_alone() -> None:
    perturb = fdbd.InputPerturbation(0.01)
    plain = fdbd.Guard(make_model(), "msp").fit(make_loader(64, 1)).calibrate(make_loader(64, 2))
    noisy = (
        fdbd.Guard(make_model(), "msp", perturb=perturb)
        .fit(make_loader(64, 1))
        .calibrate(make_loader(64, 2))
    )
    images = torch.randn(5, 3, 2, 2)
    assert torch.equal(plain(images).logits, noisy(images).logits)
    assert (noisy(images).scores > plain(images).scores).all()
    with pytest.raises(ValueError, match="needs the images"):
        noisy.decide(fdbd.Batch(torch.randn(2, 16)))


def test_mahalanobis_noise_raises_the_mahalanobis_score() -> None:
    perturb = fdbd.InputPerturbation(0.005, objective="score")
    plain = fdbd.Guard(make_model(), "mds").fit(make_loader(200, 1))
    noisy = fdbd.Guard(make_model(), "mds", perturb=perturb).fit(make_loader(200, 1))
    images = torch.randn(5, 3, 2, 2)
    assert (noisy.score(images) > plain.score(images)).all()


def test_odin_by_name_is_perturbation_and_msp_at_a_high_temperature() -> None:
    named = fdbd.Guard(make_model(), "odin").fit(make_loader(64, 1))
    composed = fdbd.Guard(
        make_model(), fdbd.MSP(temperature=1000), perturb=fdbd.InputPerturbation(0.0014)
    ).fit(make_loader(64, 1))
    images = torch.randn(5, 3, 2, 2)
    torch.testing.assert_close(named.score(images), composed.score(images))


@pytest.mark.filterwarnings("ignore:this batch lies outside of the inputs of the fit:UserWarning")
def test_a_copied_guard_is_independent(guard: fdbd.Guard) -> None:
    images = torch.randn(3, 3, 2, 2)
    before = guard(images)
    clone = copy.deepcopy(guard)
    clone.fit(make_loader(64, 7, shift=3))
    assert not torch.equal(clone.score(images), before.scores)
    for now, then in zip(guard(images), before):
        assert torch.equal(now, then)


def test_things_that_are_not_a_model_or_detector_are_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        fdbd.Guard("resnet18")
    with pytest.raises(TypeError, match="expected an fdbd detector"):
        fdbd.Guard(make_model(), 3)
    with pytest.raises(ValueError, match="no model"):
        fdbd.Guard(fdbd.Head(torch.eye(3))).fit([torch.randn(2, 3)])


def test_an_explanation_is_about_the_class_that_was_predicted() -> None:
    head = fdbd.Head(torch.randn(30, 6))
    features = torch.randn(300, 6)
    # Many samples have two largest logits now.
    rounded = head(features).bfloat16()
    guard = (
        fdbd.Guard(head).fit([fdbd.Batch(features)]).calibrate([fdbd.Batch(torch.randn(300, 6))])
    )
    assert (rounded.argmax(dim=1) != head(features).argmax(dim=1)).any()
    why = guard.explain(fdbd.Batch(features, rounded))
    assert torch.equal(why.distances.isnan().int().argmax(dim=1), why.decision.labels)
    assert (why.nearest != why.decision.labels).all()


def test_arrays_are_as_good_as_tensors() -> None:
    head = fdbd.Head(torch.randn(4, 6))
    features = torch.randn(80, 6)
    more = torch.randn(40, 6)
    labels = torch.arange(80) % 4
    for name in ("fdbd", "mds"):
        given = (
            fdbd.Guard(head, name)
            .fit([fdbd.Batch(features, None, labels)])
            .calibrate([fdbd.Batch(more)])
        )
        arrays = fdbd.Guard(head, name).fit([fdbd.Batch(features.numpy(), None, labels.numpy())])
        arrays.calibrate([fdbd.Batch(more.numpy(), head(more).numpy())])
        asked = torch.randn(9, 6)
        decided = arrays.decide(fdbd.Batch(asked.numpy(), head(asked).numpy()))
        for ours, theirs in zip(decided, given.decide(fdbd.Batch(asked, head(asked)))):
            assert torch.equal(ours, theirs)
    with pytest.warns(UserWarning, match="also used for the fit"):
        fdbd.Guard(head).fit([fdbd.Batch(features.numpy())]).calibrate(
            [fdbd.Batch(features.numpy())]
        )


def test_one_batch_in_a_mapping_is_one_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.fc(values)

    data = UserDict(values=torch.randn(50, 6))
    guard = fdbd.Guard(Model()).fit(data).calibrate(UserDict(values=torch.randn(50, 6)))
    assert guard(data).is_ood.shape == (50,)


def test_a_quantised_copy_of_a_guarded_model_still_runs(guard: fdbd.Guard) -> None:
    with warnings.catch_warnings():
        # torch moves quantisation to another package.
        warnings.simplefilter("ignore")
        smaller = torch.ao.quantization.quantize_dynamic(guard.classifier.model, {nn.Linear})
    assert smaller(torch.randn(2, 3, 2, 2)).shape == (2, 4)


@pytest.mark.parametrize(
    "name", [name for name in fdbd.list_detectors() if name not in ("odin", "adascale")]
)
def test_the_default_device_of_the_program_does_not_matter(name: str) -> None:
    model = make_model()
    images = torch.randn(9, 3, 2, 2)
    fit = list(make_loader(200, 1))
    known = list(make_loader(100, 2))
    expected = fdbd.Guard(model, name).fit(fit).calibrate(known)(images)
    with torch.device("meta"):
        found = fdbd.Guard(model, name).fit(fit).calibrate(known)(images)
    for ours, theirs in zip(found, expected):
        assert torch.equal(ours, theirs)


def test_parts_with_other_numbers_of_rows_are_refused() -> None:
    head = fdbd.Head(torch.randn(4, 6))
    features = torch.randn(80, 6)
    labels = torch.arange(80) % 4
    with pytest.raises(ValueError, match="batch 0 has 80 rows of features but 40 rows of logits"):
        fdbd.create("klm").fit(fdbd.Batch(features, head(features[:40]), labels), head)
    guard = (
        fdbd.Guard(head, fdbd.KNN(3))
        .fit([fdbd.Batch(features)])
        .calibrate([fdbd.Batch(torch.randn(80, 6))])
    )
    with pytest.raises(ValueError, match="80 rows of features but 70 rows of logits"):
        guard.decide(fdbd.Batch(features, head(features[:70])))
    with pytest.raises(ValueError, match="batch 0 has 80 rows of features but 9 rows of logits"):
        fdbd.Guard(head, "vim").fit([fdbd.Batch(features, head(features[:9]))])


def test_a_fit_of_several_passes_computes_logits_if_a_batch_has_none() -> None:
    head = fdbd.Head(torch.randn(4, 6))
    features = torch.randn(80, 6)
    mixed = [fdbd.Batch(features[:30]), fdbd.Batch(features[30:], head(features[30:]))]
    plain, found = (
        fdbd.Guard(head, "vim").fit(data).detector for data in ([fdbd.Batch(features)], mixed)
    )
    torch.testing.assert_close(found.alpha, plain.alpha)


def test_a_detector_without_a_name_of_its_own_is_not_saved(tmp_path) -> None:
    class Mine(fdbd.KNN):
        def formula(self, batch: fdbd.Batch) -> torch.Tensor:
            return 2 * super().formula(batch)

    guard = fdbd.Guard(fdbd.Head(torch.randn(4, 6)), Mine(3)).fit([fdbd.Batch(torch.randn(50, 6))])
    with pytest.raises(ValueError, match=r"Mine has no name of its own.*name = 'mine'"):
        guard.save(tmp_path / "guard.safetensors")
    assert not list(tmp_path.iterdir())


def test_compiled_and_exported_guards_fail_closed_on_rows_too_large_for_float32() -> None:
    head = fdbd.Head(torch.randn(4, 6))
    guard = (
        fdbd.Guard(head)
        .fit([fdbd.Batch(torch.randn(50, 6))])
        .calibrate([fdbd.Batch(torch.randn(50, 6))])
    )
    features = torch.randn(3, 6)
    features[1, 2] = 1e17
    assert torch.isfinite(guard.score(fdbd.Batch(features))).all()
    torch._dynamo.reset()
    compiled = torch.compile(guard.detector.score, backend="eager", fullgraph=True)(
        fdbd.Batch(features)
    )
    assert compiled[1] == -torch.inf
    torch.testing.assert_close(compiled[[0, 2]], guard.score(fdbd.Batch(features))[[0, 2]])
