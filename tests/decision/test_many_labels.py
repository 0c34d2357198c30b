"""Guards around heads that give a sample several labels at once, from a loader to a graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fdbd
from fdbd.pages.explanation import explain_sample

LABELS = 4
WIDTH = 6


def model() -> nn.Module:
    """A feature stands for each of the labels, and its sign decides."""
    head = nn.Linear(WIDTH, LABELS)
    nn.init.zeros_(head.bias)
    head.weight.data = 3 * torch.eye(LABELS, WIDTH)
    body = nn.Linear(WIDTH, WIDTH)
    nn.init.eye_(body.weight)
    nn.init.zeros_(body.bias)
    return nn.Sequential(body, head).eval()


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs far on the right side of each label's boundary, and their multi-hot labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count, LABELS), generator=generator)
    inputs = 0.2 * torch.randn(count, WIDTH, generator=generator)
    inputs[:, :LABELS] += 2.0 * labels - 1
    return inputs, labels


def unlike(count: int, seed: int) -> Tensor:
    """Inputs near all boundaries."""
    generator = torch.Generator().manual_seed(seed)
    inputs = 0.2 * torch.randn(count, WIDTH, generator=generator)
    inputs[:, LABELS:] += 2
    return inputs


@pytest.fixture
def guard() -> fdbd.Guard:
    found = fdbd.Guard(model(), "multilabel-fdbd")
    found.fit([samples(200, 0), samples(200, 1)], progress=False)
    return found.calibrate([samples(400, 2)], alpha=0.05, progress=False)


def test_a_loader_may_give_multi_hot_labels(guard: fdbd.Guard) -> None:
    inputs, labels = samples(500, 3)
    decision = guard(inputs)
    assert torch.equal(decision.label_sets(), labels.bool())
    assert decision.is_ood.double().mean() < 0.1
    assert guard(unlike(500, 4)).is_ood.double().mean() > 0.9


def test_dicts_and_floating_multi_hot_labels_are_taken() -> None:
    inputs, labels = samples(100, 0)
    found = fdbd.Guard(model(), "multilabel-fdbd")
    found.fit([{"image": inputs, "labels": labels.float()}], progress=False)
    again = fdbd.Guard(model(), "multilabel-fdbd").fit([(inputs, labels)], progress=False)
    assert torch.equal(found.score(inputs), again.score(inputs))


def test_a_set_has_the_labels_of_at_least_this_probability(guard: fdbd.Guard) -> None:
    decision = guard(samples(50, 5)[0])
    strict = decision.label_sets(0.99)
    assert torch.equal(strict, decision.logits >= np.log(99))
    with pytest.raises(ValueError, match="between 0 and 1"):
        decision.label_sets(1.0)


def test_file_and_graph_give_the_same_decisions(guard: fdbd.Guard, tmp_path: Path) -> None:
    inputs, _ = samples(50, 6)
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", model())
    assert torch.equal(loaded(inputs).scores, guard(inputs).scores)
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    guard.export_onnx(tmp_path / "guard.onnx", inputs)
    session = runtime.InferenceSession(str(tmp_path / "guard.onnx"))
    logits, is_ood = session.run(["logits", "is_ood"], {"images": inputs.numpy()})
    assert is_ood.tolist() == guard(inputs).is_ood.tolist()
    assert np.array_equal(logits > 0, guard(inputs).label_sets().numpy())


def test_an_explanation_has_the_distances_to_the_labels_own_boundaries(guard: fdbd.Guard) -> None:
    inputs, _ = samples(20, 6)
    why = guard.explain(inputs)
    head = guard.head
    features = guard.classifier(inputs).features.detach()
    for row, point in enumerate(features):
        for label in range(LABELS):
            normal = head.weight[label]
            distance = abs(float(normal @ point + head.bias[label])) / float(normal.norm())
            assert float(why.distances[row, label]) == pytest.approx(distance, rel=1e-4)
    assert torch.equal(why.nearest, why.distances.argmin(dim=1))
    torch.testing.assert_close(why.shares.sum(dim=1), torch.ones(20))


def test_the_explanation_of_a_sample_names_the_set_of_its_labels(guard: fdbd.Guard) -> None:
    names = ["sun", "sea", "tree", "dog"]
    inputs, labels = samples(200, 6)
    sets = labels.tolist()
    both = sets.index([1, 0, 1, 0])
    none = sets.index([0, 0, 0, 0])
    assert explain_sample(guard, inputs[both : both + 1], names).predicted == "sun + tree"
    assert explain_sample(guard, inputs[none : none + 1], names).predicted == "no label"


def test_a_threshold_per_class_is_refused(guard: fdbd.Guard) -> None:
    with pytest.raises(ValueError, match="several labels at once"):
        guard.calibrate([samples(400, 2)], tpr=0.9, per_class=True, progress=False)


def test_a_detector_that_learns_by_class_refuses_multi_hot_labels() -> None:
    with pytest.raises(ValueError, match="multi-hot"):
        fdbd.Guard(model(), "mds").fit([samples(200, 0)], progress=False)


def test_an_ensemble_of_such_detectors_is_for_several_labels_too() -> None:
    detector = fdbd.create("ensemble", detectors=["joint-energy", "multilabel-fdbd"])
    guard = fdbd.Guard(model(), detector)
    guard.fit([samples(200, 0)], progress=False)
    inputs, _ = samples(200, 1)
    guard.detector.calibrate([guard.classifier(inputs)])
    guard.calibrate([samples(400, 2)], alpha=0.05, progress=False)
    own = fdbd.geometry.label_distances(guard.classifier(inputs).features, guard.head)
    torch.testing.assert_close(guard.explain(inputs).distances, own)
    with pytest.raises(ValueError, match="several labels at once"):
        guard.calibrate([samples(400, 2)], tpr=0.9, per_class=True, progress=False)


@pytest.mark.parametrize("labels", [torch.full((10, LABELS), 2), torch.zeros(10, LABELS) + 0.5])
def test_numbers_that_are_not_labels_are_refused_in_one_sentence(labels: Tensor) -> None:
    inputs, _ = samples(10, 0)
    with pytest.raises(ValueError, match=r"zeros and ones \(N, C\) for a head of many labels"):
        fdbd.Guard(model(), "multilabel-fdbd").fit([(inputs, labels)], progress=False)


def test_labels_of_another_number_of_classes_are_one_sentence() -> None:
    inputs, labels = samples(10, 0)
    with pytest.raises(ValueError, match=r"for several labels per sample \(10, 4\)"):
        fdbd.Guard(model(), "multilabel-fdbd").fit([(inputs, labels[:, :3])], progress=False)


def test_files_of_features_may_hold_multi_hot_labels(tmp_path: Path, run) -> None:
    head = fdbd.Classifier(model()).head
    np.savez(tmp_path / "head.npz", weight=head.weight.numpy(), bias=head.bias.numpy())
    for name, seed in (("train", 0), ("fresh", 1)):
        features, labels = samples(200, seed)
        np.savez(tmp_path / f"{name}.npz", features=features.numpy(), y=labels.numpy())
    out = tmp_path / "guard.safetensors"
    options = ("--head", tmp_path / "head.npz", "--calibration", tmp_path / "fresh.npz")
    code, _, errors = run(
        "fit", tmp_path / "train.npz", *options, "--detector", "multilabel-fdbd", "--out", out
    )
    assert code == 0, errors
    assert fdbd.load(out).detector.name == "multilabel-fdbd"
