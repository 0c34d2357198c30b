"""ViM and Residual against their formulas in float64 and pytorch-ood."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from fdbd.core.batch import Batch, Head
from fdbd.detectors.vim import Residual, ViM

CLASSES, WIDTH = 4, 10
OPTIONS = [ViM(), ViM(dim=2), Residual(), Residual(dim=8)]


def training_data(count: int = 300, dtype: torch.dtype = torch.float64) -> tuple[Batch, Head]:
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(3, 0.2, WIDTH, dtype=torch.float64)
    features = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64) * spread + 0.5
    weight = torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(CLASSES, generator=generator, dtype=torch.float64)
    return Batch(features.to(dtype)), Head(weight.to(dtype), bias.to(dtype))


def queries(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (
        3 * torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    ).to(dtype)


def by_definition(
    features: np.ndarray, head: Head, dim: int, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores of Residual and of ViM, by loops."""
    weight = head.weight.double().numpy()
    bias = head.bias.double().numpy()
    origin = -np.linalg.pinv(weight) @ bias
    moment = np.zeros((features.shape[1], features.shape[1]))
    for x in features:
        moment += np.outer(x - origin, x - origin) / len(features)
    values, vectors = np.linalg.eigh(moment)
    residual = vectors[:, np.argsort(-values)[dim:]]

    def norm(x: np.ndarray) -> float:
        return float(np.sqrt(sum(((x - origin) @ r) ** 2 for r in residual.T)))

    alpha = sum((weight @ x + bias).max() for x in features) / sum(norm(x) for x in features)
    residuals = np.array([-norm(x) for x in z])
    energies = np.array([np.log(sum(np.exp(weight @ x + bias))) for x in z])
    return residuals, energies + alpha * residuals


@pytest.mark.parametrize("dim", [1, 2, 5, 8, 9])
def test_scores_are_those_of_the_definition(dim: int) -> None:
    batch, head = training_data()
    residual, vim = by_definition(batch.features.numpy(), head, dim, queries().numpy())
    z = Batch(queries())
    np.testing.assert_allclose(Residual(dim).fit(batch, head).score(z).numpy(), residual, rtol=1e-9)
    np.testing.assert_allclose(ViM(dim).fit(batch, head).score(z).numpy(), vim, rtol=1e-9)


def test_more_classes_than_features_is_the_same_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    batch, _ = training_data()
    head = Head(
        torch.randn(30, WIDTH, generator=generator).double(),
        torch.randn(30, generator=generator).double(),
    )
    _, vim = by_definition(batch.features.numpy(), head, 5, queries().numpy())
    np.testing.assert_allclose(
        ViM().fit(batch, head).score(Batch(queries())).numpy(), vim, rtol=1e-9
    )


def test_given_logits_are_used() -> None:
    batch, head = training_data()
    detector = ViM().fit(batch, head)
    z = queries()
    logits = torch.zeros(40, CLASSES, dtype=torch.float64)
    expected = (
        np.log(CLASSES)
        + float(detector.alpha) * Residual().fit(batch, head).score(Batch(z)).numpy()
    )
    np.testing.assert_allclose(detector.score(Batch(z, logits)).numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("dim", [2, 5])
def test_scores_agree_with_pytorch_ood(dim: int) -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    batch, head = training_data(dtype=torch.float32)
    theirs = peer.ViM(None, dim, head.weight, head.bias).fit_features(
        batch.features, torch.zeros(300).long()
    )
    z = queries(torch.float32)
    scores = ViM(dim).fit(batch, head).score(Batch(z))
    torch.testing.assert_close(scores, -theirs.predict_features(z), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "dim"), [(2048, 1000), (1024, 512), (768, 512), (512, 256), (64, 32), (3, 1)]
)
def test_the_default_dimension_follows_the_width(width: int, dim: int) -> None:
    assert Residual()._dim(width) == dim


def test_training_logits_that_are_not_finite_are_named() -> None:
    batch, head = training_data()
    logits = head(batch.features)
    logits[7, 0] = torch.inf
    with pytest.raises(ValueError, match="batch 0, row 7: its logits"):
        ViM().fit(batch._replace(logits=logits), head)


def test_a_one_shot_iterator_is_refused_since_vim_takes_two_passes() -> None:
    batch, head = training_data()
    with pytest.raises(ValueError, match="ViM needs another pass"):
        ViM().fit(iter([batch]), head)
    Residual().fit(iter([batch]), head)


@pytest.mark.parametrize("detector", OPTIONS, ids=repr)
def test_training_data_of_low_rank_and_fewer_samples_than_features_are_defined(
    detector: ViM,
) -> None:
    batch, head = training_data(count=5, dtype=torch.float32)
    flat = batch.features.clone()
    flat[:, 3:] = 0
    scores = copy.deepcopy(detector).fit(Batch(flat), head).score(Batch(queries(torch.float32)))
    assert torch.isfinite(scores).all()


@pytest.mark.parametrize("dim", [30, 90, 150])
def test_fewer_samples_than_features_give_one_result_whatever_the_split(dim: int) -> None:
    """40 samples leave 140 directions without variance, where rounding would choose the
    eigenvectors."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(40, 180, generator=generator, dtype=torch.float64)
    head = Head(
        torch.randn(4, 180, generator=generator, dtype=torch.float64),
        torch.zeros(4, dtype=torch.float64),
    )
    whole = ViM(dim).fit(Batch(features), head)
    split = ViM(dim).fit([Batch(part) for part in features.flip(0).split(7)], head)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(split.state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
    basis = whole.basis
    torch.testing.assert_close(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64))


def test_a_residual_is_precise_if_it_is_small_against_the_feature() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([1000.0] * 2 + [1e-2] * 8, dtype=torch.float64)
    features = torch.randn(400, WIDTH, generator=generator, dtype=torch.float64) * spread
    head = Head(torch.randn(CLASSES, WIDTH, generator=generator, dtype=torch.float64))
    exact = Residual(2).fit(Batch(features), head).score(Batch(features))
    single = (
        Residual(2)
        .fit(Batch(features.float()), Head(head.weight.float()))
        .score(Batch(features.float()))
    )
    # float32 keeps 1000 · 6e-8 of the feature; squared norms that cancel would keep 1000 · √6e-8 =
    # 0.25.
    assert (single - exact).abs().max() < 1e-3


def test_dimensions_that_leave_no_residual_are_refused() -> None:
    batch, head = training_data()
    for dim in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="expected a number of principal dimensions"):
            ViM(dim)
    with pytest.raises(ValueError, match="dim is 10, expected less than the 10 features"):
        ViM(10).fit(batch, head)


@pytest.mark.parametrize("dim", [6, 40])
def test_a_head_whose_rows_sum_to_zero_has_its_origin_near_the_data(dim: int) -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    torch.manual_seed(0)
    weight = torch.randn(10, 64)
    weight -= weight.mean(dim=0)
    head = Head(weight, torch.ones(10))
    features = torch.randn(500, 64) * torch.linspace(0.2, 2, 64)
    detector = ViM(dim).fit(Batch(features), head)
    assert detector.origin.norm() < 1
    linear = torch.nn.Linear(64, 10)
    linear.weight.data = head.weight
    linear.bias.data = head.bias
    other = peer.ViM(torch.nn.Identity(), dim, linear.weight, linear.bias).fit_features(
        features, torch.zeros(500)
    )
    asked = torch.randn(50, 64)
    torch.testing.assert_close(
        detector.score(Batch(asked)), -other.predict_features(asked), rtol=1e-3, atol=1e-3
    )
