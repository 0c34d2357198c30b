"""The runner and its results: numbers, isolation of failures, marks, and every format."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch

import fdbd
from fdbd.bench import Benchmark, FeatureSet, default_detectors
from fdbd.bench.rows import Latency
from fdbd.bench.timing import choose_batch_size
from fdbd.fitting.statistics import ClassMoments


def cluster_data(
    seed: int = 0, classes: int = 4, width: int = 12
) -> tuple[fdbd.Head, FeatureSet, FeatureSet, list]:
    """Classes along the axes, OOD features that are mixtures (near) or noise (far)."""
    generator = torch.Generator().manual_seed(seed)
    centers = 4 * torch.eye(classes, width)

    def draw(count: int, name: str) -> FeatureSet:
        labels = torch.arange(count) % classes
        return FeatureSet(
            name, (centers[labels] + torch.randn(count, width, generator=generator)).relu(), labels
        )

    near = (
        0.5 * (centers[:1] + centers[1:2]) + torch.randn(150, width, generator=generator)
    ).relu()
    far = torch.randn(120, width, generator=generator).relu()
    return (
        fdbd.Head(centers),
        draw(400, "train"),
        draw(200, "test"),
        [FeatureSet("near", near), FeatureSet("far", far)],
    )


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    head, train, test, ood = cluster_data()
    heldout = cluster_data(seed=1)[2]
    return Benchmark(
        head,
        train,
        test,
        ood,
        groups={"hard": ["near"]},
        title="A <title> & more",
        notes=["made up"],
        validation=heldout,
        forward=lambda size: Latency(size, 1e-3, 2e-3),
    )


def test_a_run_agrees_with_fitting_and_scoring_by_hand(benchmark: Benchmark) -> None:
    results = benchmark.run(["energy", "mds"], latency=False)
    detector = fdbd.MDS().fit(benchmark.train.rows(slice(None)), benchmark.head)
    inside, outside = (
        detector.score(s.rows(slice(None))) for s in (benchmark.test, benchmark.ood[0])
    )
    expected = fdbd.metrics.evaluate(inside, outside)
    assert results.row("mds").evaluations["near"].auroc == pytest.approx(float(expected.auroc))
    assert results.row("mds").evaluations["near"].fpr95 == pytest.approx(float(expected.fpr95))
    accuracy = (
        (benchmark.head(benchmark.test.features).argmax(dim=1) == benchmark.test.labels)
        .double()
        .mean()
    )
    assert results.setting.accuracy == pytest.approx(float(accuracy))


def test_averages_are_means_over_the_sets_of_a_group(benchmark: Benchmark) -> None:
    results = benchmark.run(["energy"], latency=False)
    row = results.row("energy")
    parts = [float(row.evaluations[name].auroc) for name in ("near", "far")]
    assert results.value(row, "average", "auroc") == pytest.approx(sum(parts) / 2)
    assert results.value(row, "hard", "auroc") == pytest.approx(parts[0])


def test_the_failure_of_one_detector_leaves_the_others(benchmark: Benchmark) -> None:
    results = benchmark.run(["energy", fdbd.KNN(k=10_000), "msp"], latency=False)
    assert [row.name for row in results.finished] == ["energy", "msp"]
    assert "10000" in str(results.failures[0].error)
    assert "k=10000" in results.failures[0].name


def test_every_default_detector_finishes_on_plain_features(benchmark: Benchmark) -> None:
    names = default_detectors()
    assert {"fdbd", "knn", "vim", "openmax", "react+energy", "scale+fdbd"} <= set(names)
    assert not {"odin", "adascale", "lts+fdbd"} & set(names)
    results = benchmark.run(names, latency=False)
    assert {row.name: row.error for row in results.failures} == {}
    for row in results.finished:
        assert torch.isfinite(row.id_scores).all(), row.name


def test_two_runs_give_the_same_numbers(benchmark: Benchmark) -> None:
    first, second = (benchmark.run(["fdbd", "knn", "vim", "ssd"], latency=False) for _ in range(2))
    for one, other in zip(first.records(), second.records()):
        assert one["auroc"] == pytest.approx(other["auroc"], abs=1e-6)
        assert one["fpr95"] == pytest.approx(other["fpr95"], abs=1e-6)


def test_full_statistics_stand_in_for_those_of_a_part() -> None:
    head, train, test, ood = cluster_data()
    full = ClassMoments(head.num_classes, head.num_features)
    full.update(train.rows(slice(None)))
    part = FeatureSet("part", train.features[:80], train.labels[:80])
    whole = Benchmark(head, train, test, ood).run(["fdbd", "mds"], latency=False)
    patched = Benchmark(head, part, test, ood, statistics=full).run(["fdbd", "mds"], latency=False)
    for name in ("fdbd", "mds"):
        torch.testing.assert_close(patched.row(name).id_scores, whole.row(name).id_scores)
    assert patched.setting.num_train == 400


def test_the_best_is_marked_and_a_copy_of_it_is_tied(benchmark: Benchmark) -> None:
    results = benchmark.run(["energy", fdbd.Energy(temperature=1.0001), "residual"], latency=False)
    marks = results.standing("far", "auroc")
    assert sorted(marks.values()) == ["best", "tied"]
    assert "residual" not in marks


def test_latency_is_measured_at_both_batch_sizes(benchmark: Benchmark) -> None:
    row = benchmark.run(["fdbd"]).row("fdbd")
    assert [timing.batch_size for timing in row.latencies] == [1, 256]
    assert all(0 < timing.median <= timing.p95 for timing in row.latencies)


def test_json_csv_and_pandas_hold_the_same_values(benchmark: Benchmark, tmp_path) -> None:
    results = benchmark.run(["fdbd", "msp", fdbd.KNN(k=10_000)], latency=False)
    loaded = json.loads(results.to_json(tmp_path / "r.json").read_text())
    by_name = {entry["name"]: entry for entry in loaded["detectors"]}
    auroc = float(results.row("fdbd").evaluations["far"].auroc)
    assert by_name["fdbd"]["datasets"]["far"]["auroc"]["value"] == auroc
    assert by_name["fdbd"]["groups"]["average"]["auroc"]["low"] <= auroc <= 1
    assert "ID positive" in loaded["setting"]["convention"]
    assert any("error" in entry for entry in loaded["detectors"])
    with results.to_csv(tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4
    assert (
        float(next(r for r in rows if (r["detector"], r["dataset"]) == ("fdbd", "far"))["auroc"])
        == auroc
    )
    frame = pytest.importorskip("pandas") and results.to_pandas()
    assert frame.set_index(["detector", "dataset"]).loc[("fdbd", "far"), "auroc"] == auroc
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.csv", "r.json"]


def test_tables_name_the_convention_and_bold_the_best(benchmark: Benchmark, tmp_path) -> None:
    results = benchmark.run(["fdbd", "residual"], latency=False)
    best = results.ranked()[0].name
    markdown = results.to_markdown(tmp_path / "r.md")
    latex = results.to_latex(tmp_path / "r.tex")
    assert (tmp_path / "r.md").read_text() == markdown
    assert "ID positive" in markdown
    assert "made up" in markdown
    assert f"| {best} | **" in markdown
    assert r"\toprule" in latex
    assert r"A <title> \& more" in latex
    assert latex.count(r"\textbf{") >= 8
    assert best in str(results)
    benchmark_ood = Benchmark(
        benchmark.head, benchmark.train, benchmark.test, benchmark.ood, positive="ood"
    )
    assert "OOD positive" in benchmark_ood.run(["fdbd"], latency=False).to_markdown()


def test_bad_benchmarks_are_refused_with_a_reason() -> None:
    head, train, test, ood = cluster_data()
    with pytest.raises(ValueError, match="at least one"):
        Benchmark(head, train, test, [])
    with pytest.raises(ValueError, match="names of their own"):
        Benchmark(head, train, test, [ood[0], ood[0]])
    with pytest.raises(ValueError, match="not among the OOD sets"):
        Benchmark(head, train, test, ood, groups={"near": ["nowhere"]})
    with pytest.raises(ValueError, match=r"\(5, 3\)"):
        Benchmark(head, train, test, [FeatureSet("odd", torch.zeros(5, 3))])
    with pytest.raises(KeyError, match="no detector 'vim'"):
        Benchmark(head, train, test, ood).run(["msp"], latency=False).row("vim")


def test_auto_is_a_row_with_what_it_keeps_and_what_it_costs(benchmark: Benchmark, tmp_path) -> None:
    results = benchmark.run(["fdbd", "auto"], latency=False)
    row = results.row("auto")
    assert row.error is None
    # Without images its six members have equal weights, and the row says so.
    assert "fdbd 17 %" in row.chosen
    assert "µs per sample" in row.chosen
    assert any("equal weights" in text for text in row.warnings)
    assert row.chosen in results.to_markdown()
    again = fdbd.bench.Results.from_json(results.to_json(tmp_path / "results.json"))
    assert again.row("auto").chosen == row.chosen


def test_auto_is_weighed_on_kinds_that_the_benchmark_makes(benchmark: Benchmark) -> None:
    noise = cluster_data(seed=2)[3][1]
    with_kinds = replace(benchmark, kinds=lambda auto: {"noise": noise})
    auto = fdbd.Auto(pool=("fdbd", "energy", "knn"))
    row = with_kinds.run({"mine": auto}, latency=False).row("mine")
    assert row.error is None
    assert not any("equal weights" in text for text in row.warnings)
    assert "33 %" not in row.chosen


def test_auto_without_validation_data_says_what_to_give(benchmark: Benchmark) -> None:
    without = replace(benchmark, validation=None)
    assert "validation" in without.run(["auto"], latency=False).row("auto").error
    results = without.run(latency=False)
    assert "auto" in results.setting.notes[-1]
    assert "auto" not in [row.name for row in results.rows]


@pytest.mark.parametrize(("most", "limit"), [(5, 0), (12, 8), (40, 32)])
def test_no_batch_is_tried_that_no_pass_will_fill(most: int, limit: int) -> None:
    class Pooling(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            sizes.append(len(images))
            return images.mean(dim=(2, 3))

    sizes: list[int] = []
    model = torch.nn.Sequential(Pooling(), torch.nn.Linear(3, 2)).eval()
    classifier = fdbd.Classifier(model)
    sizes.clear()
    assert choose_batch_size(classifier, (3, 8, 8), most) <= max(8, limit)
    assert max(sizes, default=0) <= limit
