"""On stored features of real networks, AUROCs equal those of plain numpy and of pytorch-ood to 0.1
points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import fdbd
from fdbd import Batch, Head

FILES = sorted((Path(__file__).parent / "real").glob("*.safetensors"))
Floats = NDArray[np.float64]


class Sample(NamedTuple):
    """Features of one network: (N, P) each, and its head."""

    weight: Tensor
    bias: Tensor
    fit: Tensor
    inside: Tensor
    outside: Tensor

    def numpy(self) -> list[Floats]:
        return [part.double().numpy() for part in self]


def samples() -> list[pytest.param]:
    found = []
    for path in FILES:
        tensors = {key: value.float() for key, value in load_file(path).items()}
        common = [tensors[key] for key in ("weight", "bias", "fit", "inside")]
        for key, value in tensors.items():
            if key.startswith("outside "):
                title = f"{path.stem}-{key.removeprefix('outside ')}"
                found.append(pytest.param(Sample(*common, value), id=title))
    return found


def separation(inside: object, outside: object) -> float:
    """AUROC of in-distribution scores (positive) against others, by scikit-learn."""
    positive = np.asarray(inside, float)
    negative = np.asarray(outside, float)
    truth = np.repeat([1, 0], [len(positive), len(negative)])
    return float(roc_auc_score(truth, np.concatenate([positive, negative])))


def ours(name: str, sample: Sample, **options: object) -> float:
    head = Head(sample.weight, sample.bias)
    labels = head(sample.fit).argmax(dim=1)
    detector = fdbd.create(name, **options).fit(Batch(sample.fit, None, labels), head)
    inside = detector.score(Batch(sample.inside))
    outside = detector.score(Batch(sample.outside))
    return separation(inside, outside)


# The same scores from their definitions, in numpy.


def boundary_score(z: Floats, weight: Floats, bias: Floats, mean: Floats) -> Floats:
    """The paper's regDistDB, one class at a time."""
    scores = []
    for row in z:
        logits = weight @ row + bias
        k = int(logits.argmax())
        others = [c for c in range(len(bias)) if c != k]
        distances = [
            (logits[k] - logits[c]) / np.linalg.norm(weight[k] - weight[c]) for c in others
        ]
        scores.append(np.mean(distances) / np.linalg.norm(row - mean))
    return np.array(scores)


def energy(z: Floats, weight: Floats, bias: Floats) -> Floats:
    logits = z @ weight.T + bias
    top = logits.max(axis=1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(axis=1, keepdims=True)))[:, 0]


def ash(z: Floats, percentile: float = 90) -> Floats:
    kept = z.shape[1] - round(z.shape[1] * percentile / 100)
    shaped = np.zeros_like(z)
    for row, new in zip(z, shaped):
        largest = np.argsort(-row, kind="stable")[:kept]
        new[largest] = row[largest] * np.exp(row.sum() / row[largest].sum())
    return shaped


def unit_rows(z: Floats) -> Floats:
    return z / np.linalg.norm(z, axis=1, keepdims=True)


def by_numpy(name: str, sample: Sample) -> float:
    weight, bias, fit, inside, outside = sample.numpy()
    mean = fit.mean(axis=0)
    clip = np.quantile(fit, 0.8)

    def neighbour(z: Floats) -> Floats:
        distances = np.linalg.norm(unit_rows(z)[:, None] - unit_rows(fit)[None], axis=2)
        # The fifth nearest: k = 5.
        return -np.sort(distances, axis=1)[:, 4]

    def msp(z: Floats) -> Floats:
        largest_logit = (z @ weight.T + bias).max(axis=1)
        probability = np.exp(largest_logit - energy(z, weight, bias))
        # In float32 many probabilities are 1, and equal.
        return probability.astype(np.float32)

    scores: dict[str, Callable[[Floats], Floats]] = {
        "fdbd": lambda z: boundary_score(z, weight, bias, mean),
        "react+fdbd": lambda z: boundary_score(
            np.minimum(z, clip), weight, bias, np.minimum(mean, clip)
        ),
        "ash-s+fdbd": lambda z: boundary_score(ash(z), weight, bias, ash(mean[None])[0]),
        "energy": lambda z: energy(z, weight, bias),
        "react+energy": lambda z: energy(np.minimum(z, clip), weight, bias),
        "msp": msp,
        "maxlogit": lambda z: (z @ weight.T + bias).max(axis=1),
        "knn": neighbour,
    }
    return separation(scores[name](inside), scores[name](outside))


OPTIONS: dict[str, dict[str, object]] = {
    "react+fdbd": {"percentile": 80, "mean": "shaped"},
    "ash-s+fdbd": {"percentile": 90, "mean": "shaped"},
    "react+energy": {"percentile": 80},
    "knn": {"k": 5},
}
NAMES = ("fdbd", "react+fdbd", "ash-s+fdbd", "energy", "react+energy", "msp", "maxlogit", "knn")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sample", samples())
def test_the_auroc_is_that_of_the_definition_in_numpy(name: str, sample: Sample) -> None:
    assert ours(name, sample, **OPTIONS.get(name, {})) == pytest.approx(
        by_numpy(name, sample), abs=1e-3
    )


def untied(z: Tensor) -> Tensor:
    """Features of which no two in a row are equal.

    Stored features are rounded to float16, so that two may tie for the last place that ASH keeps.
    Ours keeps the lower index, torch's topk keeps either, and neither the paper nor its code says
    which is right."""
    return z - 1e-5 * torch.linspace(0, 1, z.shape[1])


@pytest.mark.parametrize("sample", samples())
def test_the_auroc_is_that_of_pytorch_ood(sample: Sample) -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    sample = sample._replace(inside=untied(sample.inside), outside=untied(sample.outside))
    linear = nn.Linear(sample.weight.shape[1], len(sample.weight))
    linear.load_state_dict({"weight": sample.weight, "bias": sample.bias})
    labels = torch.zeros(len(sample.fit)).long()

    def as_maps(z: Tensor) -> Tensor:
        """Features as maps of 1 × 1, in memory of their own, since theirs writes to its input."""
        return z.clone()[:, :, None, None]

    def logits_of_maps(maps: Tensor) -> Tensor:
        return linear(maps.flatten(1))

    ash = peer.ASH(None, logits_of_maps, "ash-s", 0.9)
    scale = peer.SCALE(None, logits_of_maps, 0.85)
    theirs = {
        "fdbd": peer.fDBD(None, linear).fit_features(sample.fit, labels).predict_features,
        "energy": lambda z: peer.EnergyBased(None).predict_logits(linear(z)),
        "msp": lambda z: peer.MaxSoftmax(None).predict_logits(linear(z)),
        "knn": peer.KNN(None, k=5).fit_features(sample.fit, labels).predict_features,
        "ash-s+energy": lambda z: ash.predict_feature_maps(as_maps(z)),
        "scale+energy": lambda z: scale.predict_feature_maps(as_maps(z)),
    }
    options = {
        "knn": {"k": 5},
        "ash-s+energy": {"percentile": 90},
        "scale+energy": {"percentile": 85},
    }
    for name, score in theirs.items():
        with torch.no_grad():
            # Theirs are outlier scores.
            expected = separation(-score(sample.inside).numpy(), -score(sample.outside).numpy())
        assert ours(name, sample, **options.get(name, {})) == pytest.approx(expected, abs=1e-3), (
            name
        )
