"""What differs between networks: neural collapse, and sweeps over all of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from fdbd.bench import Benchmark, FeatureSet
from fdbd.core.batch import Head
from fdbd.paper import across_networks, models
from fdbd.paper.across_networks import collapse
from fdbd.paper.experiment import Experiment
from fdbd.paper.finding import Finding
from fdbd.paper.settings import ModelEntry, ModelSettings, Percentiles, Sweep


def classes(per_class: int, within: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """200 classes with means of variance 1 and samples of variance `within` around them, in 20
    dimensions."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(200), per_class)
    z = random.standard_normal((200, 20))[labels] + within**0.5 * random.standard_normal(
        (len(labels), 20)
    )
    return torch.from_numpy(z), torch.from_numpy(labels)


@pytest.mark.parametrize("per_class", [2, 5, 40])
@pytest.mark.parametrize("within", [0.1, 1.0, 3.0])
def test_collapse_does_not_depend_on_the_number_of_samples_per_class(
    per_class: int, within: float
) -> None:
    assert collapse(*classes(per_class, within)) == pytest.approx(within, rel=0.15)


def test_collapse_is_zero_for_one_point_per_class_and_infinite_without_classes() -> None:
    z, labels = classes(4, 0.0)
    assert collapse(z, labels) == pytest.approx(0, abs=1e-12)
    noise = torch.ones(400, 1) * torch.tensor([1.0, -1.0]).repeat(200)[:, None]
    assert collapse(noise, torch.arange(400) // 2) == float("inf")


def test_one_sample_per_class_says_nothing_on_collapse() -> None:
    with pytest.raises(ValueError, match="expected two classes, with several each"):
        collapse(torch.eye(5), torch.arange(5))


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(4, 12, generator=generator), torch.zeros(4))

    def features(count: int, strength: float) -> torch.Tensor:
        return (
            strength * head.weight[torch.arange(count) % 4]
            + torch.randn(count, 12, generator=generator)
        ).relu()

    labels = torch.arange(80) % 4
    benchmark = Benchmark(
        head,
        FeatureSet("fit", features(80, 2), labels),
        FeatureSet("id", features(60, 2), labels[:60]),
        [FeatureSet("ood", features(50, 0.3))],
    )
    monkeypatch.setattr(models, "load_bundle", lambda name: benchmark)
    monkeypatch.setattr(models, "list_bundles", lambda: ["a bundle"])


MODELS = tuple(ModelEntry(title=title, bundle="a bundle") for title in ("one", "two", "three"))


def finding(settings: ModelSettings) -> Finding:
    return Finding(
        Experiment("own", "percentiles", "a title", "", "a claim", "small", settings, "")
    )


def test_a_sweep_has_a_row_for_each_network_and_shaping_and_names_the_best_percentile(
    small_model: None,
) -> None:
    settings = Percentiles(models=MODELS, percentiles=(80, 90), shapings={"react": 80, "scale": 90})
    result = finding(settings)
    across_networks.percentiles(result, settings)
    assert len(result.tables[0].rows) == len(result.statements) == 6
    curves = result.data["one"]["curves"]["react"]
    best = max(zip(curves["shaped"], (80, 90)))
    assert result.tables[0].rows[0][4] == f"{100 * best[0]:.2f} ({best[1]})"


def test_the_gain_is_set_against_dispersion_and_collapse(small_model: None) -> None:
    settings = ModelSettings(models=MODELS)
    result = finding(settings)
    across_networks.regularization_gain(result, settings)
    found = result.data["networks"]["one"]
    assert found["gain"] == pytest.approx(found["regDistDB"] - found["avgDistDB"])
    assert 0 < found["dispersion"] < 1
    assert found["collapse"] > 0
    # All networks are the same.
    assert [item.verdict for item in result.statements[-2:]] == ["undecided", "undecided"]
    assert all(item.ours for item in result.statements[-2:])


@pytest.mark.parametrize(("size", "chance"), [(3, 1 / 3), (4, 2 / 24), (5, 2 / 120)])
def test_a_perfect_rank_correlation_of_few_networks_has_the_p_value_of_its_permutations(
    size: int, chance: float
) -> None:
    gains = [float(number**2) for number in range(size)]
    for sign in (1, -1):
        correlation, p_value = across_networks.rank_correlation(
            [sign * number for number in range(size)], gains
        )
        assert correlation == pytest.approx(sign)
        assert p_value == pytest.approx(chance)


def test_the_p_value_of_a_rank_correlation_counts_all_orders() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0, 5.0], [2.0, 1.0, 4.0, 3.0, 5.0]
    correlation, p_value = across_networks.rank_correlation(first, second)
    orders = list(itertools.permutations(first))
    values = [np.corrcoef(order, second)[0, 1] for order in orders]
    expected = np.mean(np.abs(values) >= correlation - 1e-9)
    assert correlation == pytest.approx(np.corrcoef(first, second)[0, 1])
    assert p_value == pytest.approx(expected)


def test_a_sweep_over_an_option_has_the_value_of_the_detectors_paper_and_the_best(
    small_model: None,
) -> None:
    sweep = Sweep(detector="dice", option="percentile", values=(50.0, 90.0), paper=90.0)
    settings = Percentiles(
        models=MODELS, percentiles=(80,), shapings={"react": 80}, sweeps=(sweep,)
    )
    result = finding(settings)
    across_networks.percentiles(result, settings)
    row = result.tables[1].rows[0]
    values = result.data["sweeps"]["one"]["dice"]
    assert row[2] == f"{100 * values[1]:.2f} (90)"
    assert row[3].startswith(f"{100 * max(values):.2f}")
