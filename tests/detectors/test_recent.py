"""MDS++, RMDS++, OptFS, kernel PCA, WeiPer, ActSub, GROOD, NAC, MCM and the multi-label detectors, each against its
formula written a second time in float64 numpy, on random inputs."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd import Batch, Head

CLASSES, WIDTH = 5, 7


def data(rows: int, seed: int) -> Batch:
    """Features of a softmax network in float64, with labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    centers = 3 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(77))
    noise = torch.randn(rows, WIDTH, generator=generator)
    return Batch((centers[labels] + noise).double(), None, labels)


def head() -> Head:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(CLASSES, WIDTH, generator=generator).double()
    return Head(weight, torch.randn(CLASSES, generator=generator).double())


TRAIN = data(300, 1)
ASKED = data(40, 2)
HEAD = head()
Z = TRAIN.features.numpy()
Q = ASKED.features.numpy()
W = HEAD.weight.numpy()
B = HEAD.bias.numpy()


def scores_of(name: str, **options: object) -> np.ndarray:
    return fdbd.create(name, **options).fit(TRAIN, HEAD).score(ASKED._replace(labels=None)).numpy()


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def mahalanobis_by_definition(train: np.ndarray, asked: np.ndarray) -> tuple[np.ndarray, ...]:
    """Distances to each class (N, C), and to all data (N,)."""
    labels = TRAIN.labels.numpy()
    means = np.stack([train[labels == c].mean(axis=0) for c in range(CLASSES)])
    within = np.linalg.inv(np.cov((train - means[labels]).T, bias=True))
    overall = np.linalg.inv(np.cov(train.T, bias=True))
    to_classes = np.empty((len(asked), CLASSES))
    for i, z in enumerate(asked):
        for c, mean in enumerate(means):
            to_classes[i, c] = (z - mean) @ within @ (z - mean)
    centred = asked - train.mean(axis=0)
    return to_classes, np.einsum("ni,ij,nj->n", centred, overall, centred)


def test_mds_plus_plus_is_mds_of_normalised_features() -> None:
    to_classes, _ = mahalanobis_by_definition(unit(Z), unit(Q))
    np.testing.assert_allclose(scores_of("mds++"), -to_classes.min(axis=1), rtol=1e-8)


def test_mds_plus_plus_is_ssd_with_a_shared_covariance() -> None:
    np.testing.assert_allclose(scores_of("mds++"), scores_of("ssd", shrinkage=1.0), rtol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_beta_lies_between_the_distance_of_features_and_that_of_directions(beta: float) -> None:
    def scaled(rows: np.ndarray) -> np.ndarray:
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) ** beta

    to_classes, _ = mahalanobis_by_definition(scaled(Z), scaled(Q))
    np.testing.assert_allclose(scores_of("mds++", beta=beta), -to_classes.min(axis=1), rtol=1e-8)


def test_rmds_plus_plus_is_rmds_of_normalised_features() -> None:
    to_classes, to_all = mahalanobis_by_definition(unit(Z), unit(Q))
    expected = -(to_classes - to_all[:, None]).min(axis=1)
    np.testing.assert_allclose(scores_of("rmds++"), expected, rtol=1e-7, atol=1e-8)


def test_optfs_weighs_bins_by_their_mean_contribution_to_the_predicted_logit() -> None:
    low, high = np.quantile(Z, [0.001, 0.999])
    detector = fdbd.create("optfs", bins=10).fit(TRAIN, HEAD)
    # Quantiles come from a histogram, right to 5e-4; the rest is exact given them.
    assert abs(detector.low.item() - low) < 1e-3 * abs(low)
    low = detector.low.item()
    width = 1 / detector.bins_per_unit.item()
    assert abs(low + 10 * width - high) < 2e-3 * abs(high)

    def contributions(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predicted = (rows @ W.T + B).argmax(axis=1)
        return W[predicted] * rows, np.floor((rows - low) / width).astype(int)

    gains, bins = contributions(Z)
    theta = np.array([(gains * (bins == b)).sum(axis=1).mean() for b in range(10)])
    theta *= 1000 / np.linalg.norm(theta)
    gains, bins = contributions(Q)
    expected = np.zeros(len(Q))
    for b in range(10):
        expected += theta[b] * (gains * (bins == b)).sum(axis=1)
    np.testing.assert_allclose(detector.score(ASKED).numpy(), expected, rtol=1e-9)


def test_optfs_takes_the_class_from_given_logits() -> None:
    detector = fdbd.create("optfs").fit(TRAIN, HEAD)
    swapped = HEAD(ASKED.features).flip(1)
    assert not torch.allclose(detector.score(ASKED._replace(logits=swapped)), detector.score(ASKED))


@pytest.mark.parametrize("value", [0.0, 1.0, 2.5])
def test_optfs_of_features_that_are_all_the_same_says_so(value: float) -> None:
    constant = Batch(torch.full((50, WIDTH), value))
    with pytest.raises(ValueError, match=r"all about .*, expected features that differ"):
        fdbd.OptFS().fit(constant, Head(W, B))


def test_kernel_pca_is_the_reconstruction_error_of_random_fourier_features() -> None:
    detector = fdbd.create("kpca", components=24, gamma=0.7, explained=0.6).fit(TRAIN, HEAD)
    frequencies = detector.frequencies.numpy()
    phases = detector.phases.numpy()

    def mapped(rows: np.ndarray) -> np.ndarray:
        return math.sqrt(2 / 24) * np.cos(unit(rows) @ frequencies.T + phases)

    center = mapped(Z).mean(axis=0)
    _, singular, directions = np.linalg.svd(mapped(Z) - center, full_matrices=False)
    shares = np.cumsum(singular**2) / (singular**2).sum()
    count = int(np.argmax(shares >= 0.6)) + 1
    kept = directions[:count]
    rest = mapped(Q) - center
    rest = rest - rest @ kept.T @ kept
    assert detector.basis.shape == (24, count)
    np.testing.assert_allclose(
        detector.score(ASKED).numpy(), -np.linalg.norm(rest, axis=1), rtol=1e-8
    )


def test_the_random_features_are_those_of_the_gaussian_kernel() -> None:
    detector = fdbd.create("kpca", components=20_000, gamma=0.5)
    program = detector._start_fit(HEAD, torch.float64)
    next(program)
    mapped = detector._mapped(ASKED.features)
    directions = torch.nn.functional.normalize(ASKED.features)
    kernel = (-0.5 * torch.cdist(directions, directions).square()).exp()
    torch.testing.assert_close(mapped @ mapped.T, kernel, rtol=0, atol=0.05)


def test_weiper_is_the_divergence_of_smoothed_histograms() -> None:
    options = {"copies": 3, "bins": 12, "smoothing": 4, "smoothing_logits": 3,
               "weight_logits": 0.5, "weight_msp": 2.0}  # fmt: skip
    detector = fdbd.create("weiper", **options).fit(TRAIN, HEAD)
    weight = detector.perturbed_weight.numpy()
    bias = detector.perturbed_bias.numpy()

    def histograms(rows: np.ndarray, of_train: np.ndarray) -> np.ndarray:
        gap = (of_train.max() - of_train.min()) / len(of_train)
        edges = np.linspace(of_train.min() - gap, of_train.max() + gap, 13)
        return np.stack([np.histogram(row, edges)[0] / len(row) for row in rows])

    def smoothed(row: np.ndarray, size: int) -> np.ndarray:
        before = (size - 1) // 2
        padded = np.pad(row, (before, size - 1 - before), mode="edge")
        return np.convolve(padded, np.ones(size) / size, mode="valid")

    def divergence(asked: np.ndarray, of_train: np.ndarray, size: int, floor: float) -> np.ndarray:
        p = histograms(of_train, of_train).mean(axis=0) + floor
        p /= p.sum()
        found = []
        for row in histograms(asked, of_train):
            q = smoothed(row, size) + floor
            q /= q.sum()
            found.append((p * np.log(p / q)).sum() + (q * np.log(q / p)).sum())
        return np.array(found)

    of_features = divergence(Q, Z, 4, 0.01)
    of_logits = divergence(Q @ weight.T + bias, Z @ weight.T + bias, 3, 0.025)
    by_copy = np.exp(Q @ weight.T + bias).reshape(len(Q), 3, CLASSES)
    confidence = (by_copy.max(axis=2) / by_copy.sum(axis=2)).mean(axis=1)
    expected = 2.0 * confidence - of_features - 0.5 * of_logits
    np.testing.assert_allclose(detector.score(ASKED).numpy(), expected, rtol=1e-7, atol=1e-9)


def test_weiper_moves_each_row_of_the_head_by_its_distance() -> None:
    detector = fdbd.create("weiper", copies=4, distance=0.3).fit(TRAIN, HEAD)
    copies = detector.perturbed_weight.unflatten(0, (4, CLASSES))
    moved = (copies - HEAD.weight).norm(dim=2) / HEAD.weight.norm(dim=1)
    torch.testing.assert_close(moved, torch.full_like(moved, 0.3))
    assert (copies[0] - copies[1]).abs().max() > 0


def test_weiper_gives_the_same_for_few_samples_and_few_copies_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = scores_of("weiper", copies=5)
    monkeypatch.setattr(fdbd.detectors.weiper, "LOGITS_AT_A_TIME", 7 * 4 * CLASSES)
    np.testing.assert_allclose(scores_of("weiper", copies=5), whole, rtol=1e-12)
    # Two copies, two and one.
    monkeypatch.setattr(fdbd.detectors.weiper, "_LOGITS_OF_A_SAMPLE", 2 * CLASSES + 1)
    np.testing.assert_allclose(scores_of("weiper", copies=5), whole, rtol=1e-12)
    monkeypatch.setattr(fdbd.detectors.weiper, "_LOGITS_OF_A_SAMPLE", 1)
    np.testing.assert_allclose(scores_of("weiper", copies=5), whole, rtol=1e-12)


PEAK_OF_A_FIT = """
import torch
import fdbd
torch.set_num_threads(1)
head = fdbd.Head(torch.randn(200, 2048), torch.zeros(200))
batch = fdbd.Batch(torch.rand(4, 2048))
fdbd.create("weiper", copies=2).fit(batch, head)

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = peak()
fdbd.create("weiper").fit(batch, head)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_weiper_makes_its_copies_of_the_head_one_at_a_time() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PEAK_OF_A_FIT], capture_output=True, text=True, check=True
    )
    kept_kib = 100 * 200 * 2048 * 4 / 1024
    # The copies, and once more when they become a buffer; all of them in float64 take six times as
    # much.
    assert int(found.stdout) < 3.5 * kept_kib


def split_by_definition(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Projections on the `count` leading right singular vectors of the head, and on the others."""
    _, _, directions = np.linalg.svd(W)
    leading = directions[:count]
    others = directions[count:]
    return leading.T @ leading, others.T @ others


def actsub_by_definition(percentile: float, power: float, k: int) -> np.ndarray:
    gaps = []
    for count in range(CLASSES + 1):
        leading, others = split_by_definition(count)
        of_leading = np.linalg.norm(Z @ leading, axis=1).mean()
        of_others = np.linalg.norm(Z @ others, axis=1).mean()
        gaps.append(abs(of_leading - of_others))
    leading, others = split_by_definition(int(np.argmin(gaps)))
    decisive = Q @ leading
    kept = WIDTH - round(WIDTH * percentile / 100)
    top = np.sort(decisive, axis=1)[:, -kept:]
    scaled = decisive * np.exp(decisive.sum(axis=1) / top.sum(axis=1))[:, None]
    energy = np.log(np.exp(scaled @ W.T + B).sum(axis=1))
    cosines = np.sort(unit(Q @ others) @ unit(Z @ others).T, axis=1)[:, -k:]
    return energy * (-np.log(1 - cosines.mean(axis=1))) ** power


@pytest.mark.parametrize("power", [0.5, 2.0])
def test_actsub_multiplies_the_energy_of_one_part_by_the_similarity_of_the_rest(
    power: float,
) -> None:
    expected = actsub_by_definition(70, power, 10)
    found = scores_of("actsub", percentile=70, power=power)
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_actsub_splits_within_the_row_space_of_the_head() -> None:
    # Features far outside of what the head reads: no leading direction can balance them.
    outside = torch.linalg.svd(HEAD.weight).Vh[-1]
    train = Batch(TRAIN.features + 100 * outside)
    detector = fdbd.ActSub().fit(train, HEAD)
    assert detector.decisive.shape == (WIDTH, CLASSES)
    assert detector.rest.shape == (WIDTH, WIDTH - CLASSES)


def test_actsub_of_a_training_sample_is_finite() -> None:
    detector = fdbd.ActSub(k=1).fit(TRAIN, HEAD)
    assert torch.isfinite(detector.score(TRAIN)).all()


def test_actsub_of_one_feature_says_how_many_it_takes() -> None:
    one = Batch(TRAIN.features[:, :1])
    with pytest.raises(ValueError, match="head has 1 feature, expected at least 2"):
        fdbd.ActSub().fit(one, Head(W[:, :1], B))


@pytest.mark.parametrize("prototype", [None, "own"])
def test_grood_is_the_distance_between_gradients_of_the_nearest_mean_loss(
    prototype: str | None,
) -> None:
    labels = TRAIN.labels
    means = torch.stack([TRAIN.features[labels == c].mean(dim=0) for c in range(CLASSES)])
    outlier = means.mean(dim=0) if prototype is None else torch.arange(WIDTH).double()

    def gradients(rows: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        found = []
        for z, label in zip(rows, predicted):
            moving = outlier.clone().requires_grad_()
            logits = -(z - torch.cat([means, moving[None]])).norm(dim=1)
            loss = torch.nn.functional.cross_entropy(logits[None], label[None])
            found.append(torch.autograd.grad(loss, moving)[0])
        return torch.stack(found)

    of_train = HEAD(TRAIN.features).argmax(dim=1)
    is_right = of_train == labels
    assert 0 < is_right.sum() < len(labels)
    kept = gradients(TRAIN.features[is_right], of_train[is_right])
    asked = gradients(ASKED.features, HEAD(ASKED.features).argmax(dim=1))
    expected = -torch.cdist(asked, kept).square().amin(dim=1)
    options = {} if prototype is None else {"prototype": outlier.tolist()}
    np.testing.assert_allclose(scores_of("grood", **options), expected.numpy(), rtol=1e-7)


def test_grood_of_features_far_from_zero_is_that_of_features_near_it() -> None:
    # Powers of two, so that moving the features rounds none of them.
    near = TRAIN._replace(features=(TRAIN.features * 256).round() / 256)
    far = near._replace(features=(near.features + 1024).float())
    weight = HEAD.weight.float()
    # The same logits, so that the same training samples are predicted right.
    logits = HEAD(near.features).float()
    asked = (ASKED.features * 256).round() / 256
    expected = fdbd.GROOD().fit(near._replace(logits=logits.double()), HEAD).score(Batch(asked))
    detector = fdbd.GROOD().fit(far._replace(logits=logits), Head(weight))
    found = detector.score(Batch((asked + 1024).float()))
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-5)


def test_grood_says_which_width_its_prototype_must_have() -> None:
    with pytest.raises(ValueError, match=f"prototype has 2 numbers, expected .* {WIDTH}"):
        fdbd.GROOD(prototype=[0.0, 1.0]).fit(TRAIN, HEAD)


def test_nac_looks_up_how_many_training_samples_share_each_state() -> None:
    edge_count, alpha, fill = 8, 2.0, 0.1

    def states(rows: np.ndarray) -> np.ndarray:
        found = []
        for row in rows:
            z = torch.tensor(row, requires_grad=True)
            log_softmax = HEAD(z[None]).log_softmax(dim=1)
            loss = -log_softmax.mean()
            found.append(torch.autograd.grad(loss, z)[0].numpy() * row)
        return 1 / (1 + np.exp(-alpha * np.array(found)))

    lower = np.emath.logn(1000.0, np.linspace(1, np.sqrt(1000.0), edge_count // 2))
    edges = np.append(np.concatenate([lower[:-1], (1 - lower)[::-1]]), 1.2)
    edges[-2] += 0.01
    of_train = states(Z)
    of_asked = states(Q)
    expected = np.zeros(len(Q))
    for low, high in itertools.pairwise(edges):
        filled = ((of_train >= low) & (of_train < high)).sum(axis=0) / (fill * len(Z))
        is_here = (of_asked >= low) & (of_asked < high)
        expected += (is_here * np.minimum(filled, 1)).mean(axis=1)
    found = scores_of("nac", bins=edge_count, steepness=alpha, fill=fill)
    assert len(np.unique(found)) > 10
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def small_network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(4, 6, 3),
        torch.nn.ReLU(inplace=True),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(6, 3),
    ).double()


def test_nac_of_several_layers_is_the_mean_of_their_coverages() -> None:
    edge_count = 20
    # Of the penultimate layer, then of the two named ones.
    steepness = (30.0, 3000.0, 2000.0)
    fill = 0.5
    network = small_network().eval()
    images = torch.randn(60, 2, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    train = images[:40]
    asked = images[40:]

    def influences(images: torch.Tensor) -> list[np.ndarray]:
        # Autograd through the parts of the network, whose outputs are held here.
        early = network[1](network[0](images))
        late = network[3](network[2](early))
        features = network[5](network[4](late))
        loss = -network[6](features).log_softmax(dim=1).mean(dim=1).sum()
        found = []
        gradients = torch.autograd.grad(loss, [features, early, late])
        for output, gradient in zip([features, early, late], gradients):
            if output.ndim == 4:
                output = output.mean(dim=(2, 3))
                gradient = gradient.mean(dim=(2, 3))
            found.append((output * gradient).detach().numpy())
        return found

    # The edges of the authors' code: spaced by a logarithm from 0 to 0.5, mirrored from there to 1,
    # and the last ones moved above all states.
    lower = np.emath.logn(1000.0, np.linspace(1, np.sqrt(1000.0), edge_count // 2))
    upper = (1 - lower)[::-1]
    edges = np.concatenate([lower[:-1], upper, [1.2]])
    edges[-2] += 0.01
    expected = np.zeros(len(asked))
    for alpha, known, new in zip(steepness, influences(train), influences(asked)):
        of_train = 1 / (1 + np.exp(-alpha * known))
        of_asked = 1 / (1 + np.exp(-alpha * new))
        for low, high in itertools.pairwise(edges):
            filled = ((of_train >= low) & (of_train < high)).sum(axis=0) / (fill * len(train))
            is_here = (of_asked >= low) & (of_asked < high)
            expected += (is_here * np.minimum(filled, 1)).mean(axis=1) / 3
    detector = fdbd.NAC(edge_count, fill, steepness, layers=["1", "3"])
    guard = fdbd.Guard(network, detector).fit(train.split(16))
    assert len(np.unique(expected.round(6))) > 10
    np.testing.assert_allclose(guard.score(asked).numpy(), expected, rtol=1e-9)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_nac_of_several_layers_is_saved_with_its_guard(tmp_path) -> None:
    images = torch.randn(60, 2, 6, 6, generator=torch.Generator().manual_seed(1)).double()
    network = small_network().eval().requires_grad_(False)
    guard = fdbd.Guard(network, fdbd.NAC(layers=["0"])).fit([images[:40]])
    guard.calibrate([images[40:]], tpr=0.5)
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", network)
    assert torch.equal(loaded.score(images), guard.score(images))
    with pytest.raises(ValueError, match="features are not enough"):
        guard.score(Batch(torch.zeros(2, 6).double()))


def test_nac_says_what_is_wrong_with_its_layers() -> None:
    with pytest.raises(ValueError, match="steepness has 3 numbers, expected one, or 2"):
        fdbd.NAC(steepness=[1.0, 2.0, 3.0], layers=["1"])
    with pytest.raises(ValueError, match="each name once"):
        fdbd.NAC(layers=["1", "1"])
    with pytest.raises(ValueError, match="needs the network and cannot be in an ensemble"):
        fdbd.Ensemble([fdbd.NAC(layers=["1"]), "fdbd"])


def test_mcm_is_the_softmax_of_cosines_whatever_the_scale_of_the_head() -> None:
    cosines = unit(Q) @ unit(W).T
    exponentials = np.exp(cosines / 0.5)
    expected = exponentials.max(axis=1) / exponentials.sum(axis=1)
    np.testing.assert_allclose(scores_of("mcm", temperature=0.5), expected, rtol=1e-12)
    scaled = Head.cosine(HEAD.weight, scale=40.0)
    detector = fdbd.MCM(temperature=0.5).fit(TRAIN, scaled)
    np.testing.assert_allclose(detector.score(ASKED).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("combine", ["sum", "mean", "max"])
def test_joint_energy_combines_the_energies_of_labels(combine: str) -> None:
    energies = np.log1p(np.exp(Q @ W.T + B))
    expected = getattr(energies, combine)(axis=1)
    np.testing.assert_allclose(scores_of("joint-energy", combine=combine), expected, rtol=1e-12)


def test_joint_energy_of_large_logits_is_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 0.0, 0.0]], dtype=torch.float64)
    scores = fdbd.JointEnergy().fit(TRAIN, HEAD).score(Batch(ASKED.features[:1], logits))
    assert scores.item() == pytest.approx(1e4 + 3 * math.log(2))


def test_multi_label_distances_are_those_to_each_labels_own_hyperplane() -> None:
    expected = []
    for z in Q:
        distances = [abs(w @ z + b) / np.linalg.norm(w) for w, b in zip(W, B)]
        expected.append(np.mean(distances) / np.linalg.norm(z - Z.mean(axis=0)))
    np.testing.assert_allclose(scores_of("multilabel-fdbd"), expected, rtol=1e-10)


def test_multi_hot_labels_are_taken_by_detectors_that_do_not_learn_by_class() -> None:
    hot = torch.zeros(300, CLASSES, dtype=torch.int64)
    hot[torch.arange(300), TRAIN.labels] = 1
    hot[:, 0] = 1
    multi = TRAIN._replace(labels=hot)
    for name in ("multilabel-fdbd", "joint-energy", "fdbd"):
        plain = fdbd.create(name).fit(TRAIN, HEAD).score(ASKED)
        assert torch.equal(fdbd.create(name).fit(multi, HEAD).score(ASKED), plain)
    with pytest.raises(ValueError, match=r"multi-hot, \(300, 5\), and MDS learns by class"):
        fdbd.MDS().fit(multi, HEAD)
    with pytest.raises(ValueError, match="expected only 0 and 1"):
        fdbd.FDBD().fit(TRAIN._replace(labels=2 * hot), HEAD)


# Cosine heads


def test_a_cosine_head_scores_directions_alone() -> None:
    cosine = Head.cosine(HEAD.weight, scale=16.0)
    logits = cosine(ASKED.features)
    np.testing.assert_allclose(logits.numpy(), 16 * unit(Q) @ unit(W).T, rtol=1e-12)
    for name in ("fdbd", "energy", "mds", "vim", "react+energy", "knn", "she"):
        options = {"k": 3} if name == "knn" else {}
        detector = fdbd.create(name, **options).fit(TRAIN, cosine)
        scores = detector.score(ASKED)
        longer = ASKED._replace(features=3.5 * ASKED.features)
        torch.testing.assert_close(detector.score(longer), scores)
        loaded = fdbd.create(name, **options)
        loaded.load_state_dict(detector.state_dict())
        assert torch.equal(loaded.score(ASKED), scores)


def test_a_cosine_head_is_a_plain_head_on_normalised_features() -> None:
    cosine = Head.cosine(HEAD.weight, scale=16.0)
    plain = Head(16 * torch.nn.functional.normalize(HEAD.weight))
    on_sphere = TRAIN._replace(features=torch.nn.functional.normalize(TRAIN.features))
    asked = Batch(torch.nn.functional.normalize(ASKED.features))
    for name in ("fdbd", "mds", "vim", "scale+fdbd", "ash-b+energy"):
        expected = fdbd.create(name).fit(on_sphere, plain).score(asked)
        if "+" in name:
            # The head normalises what a shaping made of the features, too.
            continue
        torch.testing.assert_close(fdbd.create(name).fit(TRAIN, cosine).score(ASKED), expected)


def test_huge_features_keep_their_direction_before_a_cosine_head() -> None:
    cosine = Head.cosine(HEAD.weight.float())
    detector = fdbd.FDBD().fit(TRAIN._replace(features=TRAIN.features.float()), cosine)
    asked = ASKED.features.float()
    huge = detector.score(Batch(1e30 * asked))
    torch.testing.assert_close(huge, detector.score(Batch(asked)), rtol=1e-4, atol=1e-5)
    broken = asked.clone()
    broken[3, 1] = torch.inf
    scores = detector.score(Batch(broken))
    assert scores[3] == -torch.inf
    assert torch.isfinite(scores[:3]).all()


def test_bad_cosine_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="scale is 0, expected a positive number"):
        Head.cosine(torch.eye(2), scale=0)
    with pytest.raises(ValueError, match="the weight 0, which has no direction"):
        Head.cosine(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        Head.cosine(torch.ones(1, 3))


# Few samples


@pytest.mark.parametrize(
    ("name", "needed"),
    [("vim", 8), ("residual", 8), ("neco", 8), ("mds", 7 + 5), ("mds++", 12), ("rmds", 12),
     ("ssd", 12)],
)  # fmt: skip
def test_a_fit_with_too_few_samples_says_how_many_there_were_and_how_many_it_takes(
    name: str, needed: int
) -> None:
    from fdbd.fitting.sample_size import FewSamplesWarning

    few = TRAIN.rows(slice(0, needed - 1))
    with pytest.warns(FewSamplesWarning, match=rf"{needed - 1} samples; .* at least {needed}\."):
        fdbd.create(name).fit(few, HEAD)


def test_enough_samples_draw_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    for name in ("vim", "mds", "rmds++", "neco"):
        fdbd.create(name).fit(TRAIN, Head(W, B))
    assert not [w for w in recwarn if "was fitted on" in str(w.message)]


def test_openmax_warns_of_classes_smaller_than_its_tail() -> None:
    with pytest.warns(UserWarning, match=r"smallest class .* a tail of 500 distances"):
        fdbd.create("openmax", tail=500).fit(TRAIN, HEAD)


@pytest.mark.parametrize("seed", range(4))
def test_openmax_of_constant_features_does_not_depend_on_the_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 64, generator=generator)
    one_head = Head(weight, torch.randn(5, generator=generator))
    same = (2 * weight[1]).expand(200, -1)
    detector = fdbd.OpenMax().fit(Batch(same, None, torch.ones(200, dtype=torch.int64)), one_head)
    together = detector.score(Batch(same))
    alone = detector.score(Batch(same[:1]))
    torch.testing.assert_close(together, alone.expand(200), rtol=1e-2, atol=1e-2)
