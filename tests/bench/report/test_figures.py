"""The figures against definitions written with loops, in float64."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fdbd.bench.figures import deviation_profile, figures, sample_standings
from fdbd.bench.runner import Benchmark
from fdbd.core.batch import Head
from fdbd.data.features import FeatureSet
from fdbd.fitting.statistics import ClassMoments


def boundary_distances(z: list[float], head: Head) -> dict[int, float]:
    """D̃(z, c) of the paper for every class c but the predicted one."""
    weight = head.weight.double().tolist()
    bias = head.bias.double().tolist()
    logits = [sum(w * x for w, x in zip(row, z)) + b for row, b in zip(weight, bias)]
    k = max(range(len(logits)), key=logits.__getitem__)
    return {
        c: (logits[k] - logits[c]) / math.dist(weight[k], weight[c])
        for c in range(len(logits))
        if c != k
    }


def deviation_and_distance(benchmark: Benchmark, samples: FeatureSet) -> list[tuple[float, float]]:
    train = benchmark.train.features.double().tolist()
    mean = [sum(column) / len(train) for column in zip(*train)]
    found = []
    for z in samples.features.double().tolist():
        distances = boundary_distances(z, benchmark.head).values()
        found.append((math.dist(z, mean), sum(distances) / len(distances)))
    return found


def test_groups_have_the_mean_and_spread_of_their_samples(benchmark_: Benchmark) -> None:
    profile = deviation_profile(benchmark_, levels=4)
    assert [entry["name"] for entry in profile["sets"]] == [
        "inside",
        *(part.name for part in benchmark_.ood),
    ]
    inner = profile["edges"][1:-1]
    for entry, samples in zip(profile["sets"], [benchmark_.test, *benchmark_.ood]):
        groups: list[list[float]] = [[] for _ in range(4)]
        for deviation, distance in deviation_and_distance(benchmark_, samples):
            groups[sum(deviation >= edge for edge in inner)].append(distance)
        assert sum(entry["count"]) == len(samples)
        for level, group in enumerate(groups):
            # Edges are kept with five digits, so that a sample next to one may change sides.
            assert abs(entry["count"][level] - len(group)) <= 1
            if len(group) > 20:
                mean = sum(group) / len(group)
                spread = math.sqrt(sum((d - mean) ** 2 for d in group) / (len(group) - 1))
                assert entry["mean"][level] == pytest.approx(mean, rel=0.05)
                assert entry["std"][level] == pytest.approx(spread, rel=0.15)


def test_one_level_holds_every_sample_and_compares_all_pairs(benchmark_: Benchmark) -> None:
    profile = deviation_profile(benchmark_, levels=1)
    inside = [distance for _, distance in deviation_and_distance(benchmark_, benchmark_.test)]
    assert profile["sets"][0]["mean"][0] == pytest.approx(sum(inside) / len(inside), rel=1e-4)
    for entry, samples in zip(profile["sets"][1:], benchmark_.ood):
        outside = [distance for _, distance in deviation_and_distance(benchmark_, samples)]
        pairs = sum(a > b for a in inside for b in outside) / len(inside) / len(outside)
        assert entry["auroc"] == entry["auroc_by_level"] == pytest.approx(pairs, abs=1e-4)


def test_a_level_without_samples_has_no_mean(benchmark_: Benchmark) -> None:
    features = benchmark_.test.features
    far = FeatureSet("far away", features * 100)
    profile = deviation_profile(
        Benchmark(benchmark_.head, benchmark_.train, benchmark_.test, [far]), levels=2
    )
    inside, outside = profile["sets"]
    assert inside["mean"][1] is None
    assert outside["mean"][0] is None
    assert outside["auroc_by_level"] is None


def test_bars_of_a_sample_are_its_boundary_distances_and_average_to_its_score(
    benchmark_: Benchmark,
) -> None:
    standing = sample_standings(benchmark_)
    reference = sorted(d / r for r, d in deviation_and_distance(benchmark_, benchmark_.test))
    assert sum(standing["counts"]) == len(benchmark_.test)
    assert [len(entry["samples"]) for entry in standing["sets"]] == [3, 3, 3, 3]
    for entry, samples in zip(standing["sets"], [benchmark_.test, *benchmark_.ood]):
        every = deviation_and_distance(benchmark_, samples)
        for sample in entry["samples"]:
            deviation, distance = every[sample["row"]]
            expected = boundary_distances(samples.features[sample["row"]].tolist(), benchmark_.head)
            shown = dict(map(tuple, sample["boundaries"]))
            assert shown == pytest.approx(
                {c: d / deviation for c, d in expected.items()}, rel=1e-3, abs=1e-5
            )
            assert list(shown.values()) == sorted(shown.values())
            assert sample["score"] == pytest.approx(distance / deviation, rel=1e-3)
            assert sample["score"] == pytest.approx(sum(shown.values()) / len(shown), rel=1e-3)
            below = sum(score < distance / deviation for score in reference) / len(reference)
            assert sample["rank"] == pytest.approx(below, abs=1.5 / len(reference))
            if samples.labels is None:
                assert sample["label"] is None
            else:
                assert sample["label"] == int(samples.labels[sample["row"]])


def test_many_classes_show_the_nearest_and_count_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    head = Head(torch.randn(30, 5, generator=generator), torch.zeros(30))
    samples = [
        FeatureSet(name, torch.randn(40, 5, generator=generator))
        for name in ("train", "inside", "outside")
    ]
    found = sample_standings(Benchmark(head, samples[0], samples[1], samples[2:]))
    for entry in found["sets"]:
        for sample in entry["samples"]:
            assert len(sample["boundaries"]) == 9
            assert sample["others"] == 20


def test_rows_that_are_not_finite_stand_nowhere(benchmark_: Benchmark) -> None:
    broken = benchmark_.ood[0].features.clone()
    broken[3, 2] = torch.nan
    broken[7, 0] = torch.inf
    broken[9] = 3e38
    benchmark = Benchmark(
        benchmark_.head, benchmark_.train, benchmark_.test, [FeatureSet("broken", broken)]
    )
    found = figures(benchmark)
    json.dumps(found, allow_nan=False)
    assert sum(found["deviation"]["sets"][1]["count"]) in (len(broken) - 2, len(broken) - 3)


def test_the_mean_of_the_full_training_set_is_preferred(benchmark_: Benchmark) -> None:
    moments = ClassMoments(4, 6)
    for batch in benchmark_.train:
        moments.update(batch)
    part = FeatureSet("part", benchmark_.train.features[:10], benchmark_.train.labels[:10])  # type: ignore[index]
    whole = deviation_profile(benchmark_)
    again = deviation_profile(
        Benchmark(benchmark_.head, part, benchmark_.test, benchmark_.ood, statistics=moments)
    )
    assert again["edges"] == pytest.approx(whole["edges"], rel=1e-4)


def test_a_figure_that_cannot_be_drawn_leaves_the_results() -> None:
    # No boundary: all classes have the same weights.
    head = Head(torch.ones(3, 4), torch.tensor([0.0, 1.0, 2.0]))
    samples = [FeatureSet(name, torch.randn(30, 4)) for name in ("train", "inside", "outside")]
    results = Benchmark(head, samples[0], samples[1], samples[2:]).run(
        ["energy", "msp"], latency=False, progress=False
    )
    assert len(results.finished) == 2
    assert "fewer than two distinct classes" in results.figures["deviation"]["error"]
