"""Several runs in one table, two results side by side, features shared with others, and what the
selective measures are in results."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd import cli
from fdbd.bench import Benchmark, FeatureSet, Results, load_bundle
from fdbd.bench.cache import FeatureCache
from fdbd.bench.collapse import collapse, collapse_ratio
from fdbd.bench.measures import Spread
from fdbd.bench.merging import compare_results
from fdbd.bench.rows import Row
from fdbd.bench.sharing import load_shared, run_folder, share
from fdbd.bench.text import share_text
from fdbd.core.batch import Head
from fdbd.fitting.statistics import ClassMoments
from fdbd.util.files import lock

GOLDEN = (
    Path(__file__).parents[3] / "shared" / "data" / "openood_scores" / "scale_cifar10_resnet18.npz"
)


def make(seed: int = 0, **options: object) -> Benchmark:
    """Four classes; the network is wrong on some of the ID samples."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, count: int, strength: float, has_labels: bool = True) -> FeatureSet:
        labels = torch.arange(count) % 4
        features = strength * torch.eye(4, 6)[labels] + torch.randn(count, 6, generator=generator)
        return FeatureSet(name, features, labels if has_labels else None)

    sets = {
        "shifted": [draw("shifted", 60, 1.5)],
        "validation": draw("validation", 80, 2.0),
        "ood_validation": FeatureSet("ood validation", torch.randn(70, 6, generator=generator)),
    }
    return Benchmark(
        Head(torch.eye(4, 6), torch.zeros(4)),
        draw("train", 200, 2.0),
        draw("id", 150, 2.0),
        [draw("near", 90, 1.0, False), draw("far", 110, 0.2, False)],
        groups={"easy": ["far"]},
        title="made up",
        **{**sets, **options},  # type: ignore[arg-type]
    )


def numbers(results: Results) -> list[dict[str, object]]:
    """The records without the time that the fit took."""
    return [
        {key: value for key, value in record.items() if key != "fit_seconds"}
        for record in results.records()
    ]


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def results() -> Results:
    return make().run(["msp", "energy"], latency=False, progress=False)


def test_selective_measures_are_those_of_the_scores(results: Results) -> None:
    row = results.row("msp")
    correct = list(results.setting.correct)
    assert 0.5 < sum(correct) / len(correct) < 1
    near = row.ood_scores["near"]
    expected = fdbd.metrics.aurc(row.id_scores, correct, near)
    assert results.value(row, "near", "aurc") == pytest.approx(float(expected))
    joint = fdbd.metrics.evaluate_joint(row.id_scores, correct, near)
    assert results.value(row, "near", "joint_auroc") == pytest.approx(float(joint.auroc))
    full = fdbd.metrics.evaluate_full_spectrum(row.id_scores, row.shifted_scores["shifted"], near)
    assert results.value(row, "near", "full_fpr95") == pytest.approx(float(full.fpr95))
    accepted = fdbd.metrics.accuracy_at_coverage(row.id_scores, correct, 0.8)
    assert results.value(row, "id", "accuracy80") == pytest.approx(float(accepted))
    parts = [float(results.value(row, name, "augrc")) for name in ("near", "far")]
    assert results.value(row, "average", "augrc") == pytest.approx(sum(parts) / 2)


def test_selective_measures_come_back_from_a_file_with_or_without_its_scores(
    results: Results, tmp_path: Path
) -> None:
    path = results.to_json(tmp_path / "r.json")
    again = Results.from_json(path)
    assert again.metrics == results.metrics
    assert again.records() == results.records()
    values = json.loads(path.read_text())
    for entry in values["detectors"]:
        del entry["scores"]
    path.write_text(json.dumps(values))
    bare = Results.from_json(path)
    assert bare.records() == results.records()
    assert bare.id_metrics == results.id_metrics


def test_without_labels_there_are_no_selective_measures() -> None:
    benchmark = make(shifted=())
    benchmark.test = FeatureSet("id", benchmark.test.features)
    found = benchmark.run(["msp"], latency=False, progress=False)
    assert found.metrics == ["auroc", "fpr95", "aupr_in", "aupr_out"]
    assert found.id_metrics == []


def test_merged_runs_are_means_with_their_deviation_in_every_format(tmp_path: Path) -> None:
    runs = [make(seed).run(["msp", "energy"], latency=False) for seed in range(3)]
    found = Results.merge(runs)
    singles = [float(each.value(each.row("msp"), "average", "auroc")) for each in runs]
    value = found.value(found.row("msp"), "average", "auroc")
    assert isinstance(value, Spread)
    assert value == pytest.approx(np.mean(singles))
    assert value.std == pytest.approx(np.std(singles))
    assert value.low < value < value.high
    shown = f"{100 * np.mean(singles):.2f} ± {100 * np.std(singles):.2f}"
    assert shown in str(found)
    assert shown in found.to_markdown()
    assert shown.replace("±", r"$\pm$") in found.to_latex()
    found.to_csv(tmp_path / "r.csv")
    assert "auroc_std" in (tmp_path / "r.csv").read_text()
    assert shown in found.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    again = Results.from_json(found.to_json(tmp_path / "r.json"))
    assert again.records() == found.records()
    assert again.setting.runs == 3
    # Merged results are compared as independent ones.
    assert not compare_results(found, again)[1][0].paired


def test_only_runs_of_one_benchmark_are_merged(results: Results) -> None:
    with pytest.raises(ValueError, match="no results"):
        Results.merge([])
    with pytest.raises(ValueError, match="other sets"):
        Results.merge([results, load_bundle("cifar10-ce").run(["msp"], latency=False)])
    other = Results(replace(results.setting, positive="ood"), results.rows)
    with pytest.raises(ValueError, match="FPR conventions"):
        Results.merge([results, other])
    failed = Results(results.setting, [results.rows[0], Row("energy", error="no memory")])
    assert Results.merge([results, failed]).row("energy").error == "no memory"


def test_means_are_not_merged_again(results: Results) -> None:
    pair = Results.merge([results, results])
    with pytest.raises(ValueError, match="a mean over 2 runs, expected single runs"):
        Results.merge([pair, results])
    assert Results.merge([pair]) is pair


@pytest.mark.skipif(not GOLDEN.exists(), reason="needs shared/data/openood_scores")
@pytest.mark.parametrize(
    ("ood", "auroc", "fpr95", "aupr_in", "aupr_out"),
    [
        ("texture", (83.94, 0.35), (80.39, 3.93), (84.19, 0.78), (80.27, 0.46)),
        ("cifar100", (81.27, 0.74), (81.78, 3.98), (75.68, 2.01), (83.24, 0.06)),
    ],
)
def test_three_seeds_give_the_published_means_and_deviations(
    ood: str,
    auroc: tuple[float, float],
    fpr95: tuple[float, float],
    aupr_in: tuple[float, float],
    aupr_out: tuple[float, float],
) -> None:
    """SCALE's authors' own table for OpenOOD's CIFAR-10 network, from their scores."""
    scores = np.load(GOLDEN)
    setting = make().run(["msp"], latency=False, progress=False).setting
    runs = []
    for seed in range(3):
        inside = torch.from_numpy(scores[f"id_s{seed}"].astype(np.float64))
        outside = torch.from_numpy(scores[f"{ood}_s{seed}"].astype(np.float64))
        own = replace(
            setting, positive="ood", test=("cifar10", len(inside)), ood={ood: len(outside)},
            groups={}, correct=None, shifted={},
        )  # fmt: skip
        row = Row.from_scores("scale", inside, {ood: outside}, "ood")
        runs.append(Results(own, [row]))
    found = Results.merge(runs)
    for metric, expected in {
        "auroc": auroc, "fpr95": fpr95, "aupr_in": aupr_in, "aupr_out": aupr_out,
    }.items():  # fmt: skip
        value = found.value(found.row("scale"), ood, metric)
        assert 100 * value == pytest.approx(expected[0], abs=0.06), metric
        assert 100 * value.std == pytest.approx(expected[1], abs=0.06), metric


def test_results_of_other_fpr_conventions_are_compared_in_auroc(
    results: Results, tmp_path: Path, capsys
) -> None:
    benchmark = make()
    benchmark.positive = "ood"
    other = benchmark.run(["msp", "energy"], latency=False, progress=False)
    found = compare_results(results, other)[1]
    assert {each.comparison.difference for each in found} == {0.0}
    paths = [results.to_json(tmp_path / "a.json"), other.to_json(tmp_path / "b.json")]
    code, out, _ = run(capsys, "compare", *paths)
    assert code == 0
    assert "paired" in " ".join(out.split())


def test_risk_is_compared_in_pairs_as_well(results: Results, tmp_path: Path, capsys) -> None:
    other = make()
    noise = torch.randn(other.test.features.shape, generator=torch.Generator().manual_seed(9))
    worse = replace(other.test, features=other.test.features, samples=results.setting.samples["id"])
    other.test = worse
    found = compare_results(results, other.run(["energy"], latency=False), "augrc")[1][0]
    assert found.paired
    assert found.comparison.difference == pytest.approx(0.0)
    other.test = replace(worse, features=worse.features + 1.5 * noise)
    found = compare_results(results, other.run(["energy"], latency=False), "augrc")[1][0]
    assert found.paired
    assert found.comparison.difference > 0
    assert found.comparison.verdict() == "higher"
    paths = [results.to_json(tmp_path / "a.json"), results.to_json(tmp_path / "b.json")]
    code, out, _ = run(capsys, "compare", *paths, "--metric", "aurc")
    assert code == 0
    assert "Mean AURC" in " ".join(out.split())


def test_shared_features_give_the_same_results(tmp_path: Path, results: Results) -> None:
    folder = share(make(), tmp_path / "shared")
    again = load_shared(folder).run(["msp", "energy"], latency=False, progress=False)
    assert numbers(again) == numbers(results)
    assert again.setting.samples == results.setting.samples
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "ood: near" in card
    with np.load(folder / "head.npz") as head, np.load(folder / "test.npz") as test:
        logits = test["features"] @ head["weight"].T + head["bias"]
        right = (logits.argmax(axis=1) == test["y"]).mean()
    assert right == pytest.approx(results.setting.accuracy)


def test_shared_features_of_several_runs_give_one_table(tmp_path: Path, capsys) -> None:
    shared = tmp_path / "shared"
    first = make()
    # Another network on the same samples.
    second = make()
    second.head = Head(torch.eye(4, 6), torch.tensor([0.5, 0.0, 0.0, 0.0]))
    runs = []
    for number, benchmark in enumerate([first, second]):
        share(benchmark, run_folder(shared, number, 2))
        runs.append(benchmark.run(["msp"], latency=False, progress=False))
    code, _, err = run(
        capsys, "bench", shared, "--detectors", "msp", "--no-latency", "--out", tmp_path / "out"
    )
    assert code == 0, err
    found = Results.from_json(tmp_path / "out" / "results.json")
    assert numbers(found) == numbers(Results.merge(runs))
    assert found.setting.runs == 2


def test_runs_are_not_shared_into_a_folder_with_others(tmp_path: Path) -> None:
    several = tmp_path / "several"
    for number in range(3):
        share(make(), run_folder(several, number, 3))
    # Again the same runs.
    assert run_folder(several, 0, 3) == several / "run0"
    with pytest.raises(FileExistsError, match="holds features of other runs"):
        run_folder(several, 0, 2)
    one = share(make(), tmp_path / "one")
    with pytest.raises(FileExistsError, match="holds features of other runs"):
        run_folder(one, 0, 2)


def test_the_card_of_shared_features_names_every_file(tmp_path: Path) -> None:
    folder = share(make(), tmp_path / "shared")
    card = (folder / "README.md").read_text(encoding="utf-8")
    names = [file.name for file in folder.glob("*.npz")]
    assert "validation.npz" in names
    assert "ood-validation.npz" in names
    assert all(f"`{name}`" in card for name in names)


def test_metrics_that_the_data_do_not_allow_give_way_to_the_usual_ones(
    tmp_path: Path, capsys
) -> None:
    folder = share(make(shifted=[]), tmp_path / "shared")
    code, out, err = run(
        capsys, "bench", folder, "--detectors", "msp", "--metrics", "full_auroc", "--no-latency",
        "--out", tmp_path / "out", "--format", "json",
    )  # fmt: skip
    assert code == 0, err
    assert "full_auroc cannot be given" in err
    assert "AUROC" in out.partition("┡")[0].partition("┏")[2]


def test_moments_and_grids_are_shared_too(tmp_path: Path) -> None:
    moments = ClassMoments(4, 6)
    whole = make()
    for batch in whole.train:
        moments.update(batch)
    part = make(statistics=moments, grids={"knn": {"k": [1, 3]}})
    part.train = FeatureSet("part", whole.train.features[:40], whole.train.labels[:40])
    again = load_shared(share(part, tmp_path / "shared"))
    first = part.run(["mds", "knn"], latency=False, progress=False, tuned=True)
    second = again.run(["mds", "knn"], latency=False, progress=False, tuned=True)
    assert numbers(first) == numbers(second)
    assert second.row("knn").tuned.startswith("k=")


def test_a_shared_folder_that_was_changed_is_refused(tmp_path: Path) -> None:
    folder = share(make(), tmp_path / "shared")
    data = (folder / "ood-0.npz").read_bytes()
    (folder / "ood-0.npz").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ValueError, match="has changed since it was shared"):
        load_shared(folder)
    (folder / "ood-0.npz").unlink()
    with pytest.raises(ValueError, match="is missing"):
        load_shared(folder)
    with pytest.raises(ValueError, match=r"holds no benchmark\.json"):
        load_shared(tmp_path)
    with pytest.raises(FileExistsError, match="a folder of its own"):
        share(make(), tmp_path)


# As on the page docs/openood.md.
def test_the_command_shares_and_reads_what_was_shared(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "features"
    common = ("--detectors", "msp,fdbd", "--no-latency", "--format", "json")
    code, _, err = run(
        capsys,
        "bench",
        "--model",
        "cifar10-ce",
        "--share",
        folder,
        "--out",
        tmp_path / "a",
        *common,
    )
    assert code == 0, err
    code, _, err = run(capsys, "bench", folder, "--out", tmp_path / "b", *common)
    assert code == 0, err
    first = Results.from_json(tmp_path / "a" / "results.json")
    second = Results.from_json(tmp_path / "b" / "results.json")
    for mine, theirs in zip(first.rows, second.rows):
        torch.testing.assert_close(mine.id_scores, theirs.id_scores)


def test_the_grid_is_searched_on_validation_data_alone() -> None:
    benchmark = make(grids={"knn": {"k": [1, 5, 50]}})
    chosen = benchmark.run(["knn", "msp"], latency=False, tuned=True)
    best = {}
    for k in (1, 5, 50):
        detector = fdbd.KNN(k=k).fit(benchmark.train, benchmark.head)
        inside = detector.score(benchmark.validation.rows(slice(None)))
        outside = detector.score(benchmark.ood_validation.rows(slice(None)))
        best[k] = fdbd.metrics.auroc(inside, outside)
    expected = max(best, key=lambda k: best[k])
    assert chosen.row("knn").tuned == f"k={expected}"
    assert "‡: knn: tuned on OOD validation data" in chosen.to_markdown()
    assert "‡" in str(chosen)
    with pytest.raises(ValueError, match="takes ID and OOD validation sets"):
        make(ood_validation=None).run(["knn"], tuned=True)


def test_options_that_the_data_do_not_suffice_for_are_left_out_of_the_search() -> None:
    alone = make(grids={"knn": {"k": [5]}}).run(["knn"], latency=False, tuned=True)
    with_more = make(grids={"knn": {"k": [5, 1000]}}).run(["knn"], latency=False, tuned=True)
    assert with_more.row("knn").tuned == "k=5"
    assert numbers(with_more) == numbers(alone)
    none = make(grids={"knn": {"k": [1000, 2000]}}).run(["knn", "msp"], latency=False, tuned=True)
    assert "k is 1000, but only 200 training samples" in str(none.row("knn").error)


def test_collapse_is_the_ratio_of_the_components_of_variance() -> None:
    """Classes of equal size: the mean squares within and between of a one-way analysis."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 5
    means = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    features = means[labels] + 0.5 * torch.randn(60, 7, generator=generator, dtype=torch.float64)
    within = sum(features[labels == c].var(dim=0, unbiased=True).sum() for c in range(5)) / 5
    centres = torch.stack([features[labels == c].mean(dim=0) for c in range(5)])
    between = centres.var(dim=0, unbiased=True).sum() - within / 12
    assert collapse(features, labels) == pytest.approx(float(within / between))
    samples = FeatureSet("x", features, labels)
    moments = ClassMoments(5, 7)
    for batch in samples:
        moments.update(batch)
    assert collapse_ratio(samples, moments) == pytest.approx(collapse(features, labels))
    assert collapse_ratio(FeatureSet("x", features)) is None


def test_warnings_of_a_fit_stand_in_the_row_and_below_the_table() -> None:
    class Doubtful(fdbd.MSP):
        name = ""

        def passes(self, head):  # type: ignore[no-untyped-def]
            import warnings

            warnings.warn("2 samples are too few. ", UserWarning, stacklevel=2)
            yield from super().passes(head)

    found = make().run({"doubtful": Doubtful()}, latency=False, progress=False)
    assert found.failures == []
    assert found.row("doubtful").warnings == ("2 samples are too few",)
    text = found.to_markdown()
    assert "doubtful !" in text
    assert "!: doubtful: 2 samples are too few." in text


def test_another_run_that_computes_the_same_features_is_waited_for_and_said(
    tmp_path: Path,
) -> None:
    from fdbd.core.preprocessing import Preprocess
    from fdbd.data.images import Images
    from fdbd.networks import zoo
    from fdbd.networks.classifier import Classifier

    cache = FeatureCache(tmp_path)
    images = Images(np.zeros((4, 32, 32, 3), np.uint8), name="black")
    classifier = Classifier(zoo("cifar10-ce"))
    cache.features(classifier, images, Preprocess(32), batch_size=4)
    (entry,) = cache.list()
    said: list[str] = []
    finished = threading.Event()

    def second() -> None:
        cache.features(classifier, images, Preprocess(32), batch_size=4, waiting=said.append)
        finished.set()

    with lock(cache._lock_path(entry.key)) as is_held:
        if is_held is None:
            pytest.skip("there are no locks here")
        thread = threading.Thread(target=second)
        thread.start()
        assert not finished.wait(0.7)
    thread.join(30)
    assert finished.is_set()
    assert said == ["another run is computing the features of black; waiting for it"]


def test_a_share_too_small_for_two_decimals_is_said_in_words() -> None:
    assert share_text(0.0) == share_text(0.00004) == "under 0.01%"
    assert share_text(0.0001) == "0.01%"
