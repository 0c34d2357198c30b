"""Tables and figures on the bundle: the statements they make, and what they say when data are
missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import fdbd
from fdbd import FDBD, metrics
from fdbd.bench import Benchmark, Config, FeatureSet, Results, load_bundle
from fdbd.bench.rows import Latency
from fdbd.networks.classifier import Classifier
from fdbd.paper import MissingData, find, models
from fdbd.paper.detector_tables import ModelResults, beats, fpr_difference, levels
from fdbd.paper.image_detectors import RotatedCSI, image_results
from fdbd.paper.models import EvaluatedModel
from fdbd.paper.settings import ModelEntry, NotComparable


@pytest.fixture
def small_bundle(monkeypatch):
    """The package's features, a tenth of them, and no second model."""
    whole = load_bundle("cifar10-ce")

    def part(samples: FeatureSet, step: int = 10) -> FeatureSet:
        return FeatureSet(
            samples.name,
            samples.features[::step],
            None if samples.labels is None else samples.labels[::step],
        )

    small = Benchmark(
        whole.head,
        part(whole.train, 5),
        part(whole.test),
        [part(samples, 5) for samples in whole.ood],
        title=whole.title,
        statistics=whole.statistics,
        forward=lambda size: Latency(size, 1e-3, 1e-3),
    )
    monkeypatch.setattr(models, "load_bundle", lambda name: small)
    monkeypatch.setattr(models, "list_bundles", lambda: ["cifar10-ce"])
    return small


def test_regularisation_raises_auroc_and_lowers_fpr_on_the_bundle() -> None:
    bundle = load_bundle("cifar10-ce")
    plain, divided = (
        FDBD(normalizer=n).fit(bundle.train.rows(slice(None)), bundle.head)
        for n in (None, "deviation")
    )
    inside = bundle.test.rows(slice(None))
    auroc, fpr = [], []
    for samples in bundle.ood:
        outside = samples.rows(slice(None))
        pairs = [(detector.score(inside), detector.score(outside)) for detector in (divided, plain)]
        auroc.append([metrics.auroc(*pair) for pair in pairs])
        fpr.append([metrics.fpr_at_tpr(*pair) for pair in pairs])
    assert np.diff(np.mean(auroc, axis=0)) < 0
    assert np.diff(np.mean(fpr, axis=0)) > 0


def test_the_regularisation_table_weighs_the_gain_against_its_error(
    small_bundle, tiny, verdicts
) -> None:
    found = verdicts(tiny("table-regularization"))
    assert found["regDistDB separates ID from OOD better than avgDistDB (cross-entropy)"] in (
        "holds",
        "undecided",
    )


def test_a_bundle_that_the_package_lacks_is_one_line_that_says_how_to_write_it(
    small_bundle, tiny
) -> None:
    result = tiny("table-regularization")
    assert len(result.missing) == 2
    assert (
        "no cifar10-supcon; `python tools/make_bundle.py` in the repository writes it"
        in result.missing[1]
    )
    assert {row[0] for row in result.tables[0].rows} == {"cross-entropy"}


def test_without_images_odin_says_so_and_the_other_rows_are_there(
    small_bundle, tiny, nowhere
) -> None:
    result = tiny("table-cifar10")
    assert any("odin on cross-entropy need images: cifar10" in line for line in result.missing)
    assert {row[1] for row in result.tables[0].rows} == {
        "msp",
        "energy",
        "mds",
        "knn",
        "vim",
        "fdbd",
    }
    assert any(item.statement.startswith("fdbd adds less than 1%") for item in result.statements)


def test_shaped_rows_have_both_definitions_of_the_mean(small_bundle, tiny) -> None:
    rows = {row[1]: row[2] for row in tiny("table-shaping").tables[0].rows}
    assert len(rows) == 11
    for shaping in ("ash", "scale"):
        assert rows[f"{shaping} + fdbd, shaped mean"] != rows[f"{shaping} + fdbd, mean of shaped"]


def test_corrupted_images_that_are_missing_end_the_experiment_with_the_way_to_get_them(
    small_bundle, tiny, nowhere
) -> None:
    with pytest.raises(MissingData, match=r"severity 1: cifar10 .* To get it"):
        tiny("table-domain-shift")


@pytest.mark.parametrize(
    ("name", "statements"),
    [
        ("figure-overview", 5),
        ("figure-regularization", 1),
        ("figure-deviation", 11),
        ("figure-distances", 1),
        ("figure-nearest-k", 3),
    ],
)
def test_figures_come_with_a_table_and_decided_statements(
    name: str, statements: int, small_bundle, tiny
) -> None:
    result = tiny(name)
    assert len(result.statements) == statements
    assert result.tables[0].rows
    for axis in result.figure.axes:
        if (
            axis.get_visible()
            and axis.has_data()
            and not (axis.get_title() or axis.get_title("left"))
        ):
            assert axis.get_xlabel()


def test_all_distances_give_the_score_of_fdbd(small_bundle, tiny) -> None:
    last = tiny("figure-nearest-k").tables[0].rows[-1][1:]
    results = small_bundle.run(["fdbd"], latency=False, progress=False)
    expected = results.value(results.row("fdbd"), "average", "auroc")
    assert last[1] == f"{100 * float(expected):.2f}"


def test_the_k_nearest_distances_give_the_score_of_that_detector(small_bundle, tiny) -> None:
    found = tiny("figure-nearest-k", ks=[1, 4]).data["cross-entropy"]
    results = small_bundle.run([FDBD(nearest=k) for k in (1, 4)], latency=False, progress=False)
    expected = [float(results.value(row, results.main_column, "auroc")) for row in results.rows]
    assert found["k"] == [1, 4, 9]
    assert found["auroc"][:2] == pytest.approx(expected, abs=1e-5)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(192, 6), torch.nn.Tanh()
        )
        self.head = torch.nn.Linear(6, 3)

    def forward(self, images):
        return self.head(self.body(images))


def test_odin_mds_and_csi_run_on_images_beside_the_same_samples_of_fdbd(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("fdbd.paper.test_tiny_model", Tiny, raising=False)
    generator = np.random.default_rng(0)
    preprocess = {"size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}
    classifier = Classifier(Tiny().eval())
    sets, labels = {}, {}
    for name, count in (("inside", 40), ("outside", 30)):
        pixels = generator.integers(0, 255, (count, 8, 8, 3), np.uint8)
        sets[name] = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 * 2 - 1
        labels[name] = classifier(sets[name]).logits.argmax(dim=1)
        np.savez(tmp_path / f"{name}.npz", x=pixels, y=labels[name].numpy())
    features = {name: classifier(inputs).features.detach() for name, inputs in sets.items()}
    inside = FeatureSet("inside", features["inside"], labels["inside"])
    benchmark = Benchmark(
        classifier.head, inside, inside, [FeatureSet("outside", features["outside"])]
    )
    config = Config.from_dict(
        {
            "model": "fdbd.paper:test_tiny_model",
            "id": str(tmp_path / "inside.npz"),
            "ood": [str(tmp_path / "outside.npz")],
            "preprocess": preprocess,
        }
    )
    model = EvaluatedModel("tiny", benchmark, ModelEntry(title="tiny", layers=("body.1",)), config)
    names = ["odin", "csi", "mds, layers and noise"]
    results = image_results(model, names, limit=20)
    assert [row.name for row in results.rows] == ["fdbd", *names]
    assert {len(row.id_scores) for row in results.rows} == {20}
    assert {len(row.ood_scores["outside"]) for row in results.rows} == {15}
    views = RotatedCSI().observe(sets["inside"][:20:2], classifier).views
    assert views is not None
    turned = classifier(torch.rot90(sets["inside"][:20:2], 2, (2, 3))).features
    assert torch.allclose(views[2], turned, atol=1e-6)
    images = sets["inside"]
    csi = fdbd.CSI().fit(RotatedCSI().observe(images, classifier).detach(), classifier.head)
    expected = csi.score(RotatedCSI().observe(images[::2], classifier)).detach()
    assert torch.allclose(results.row("csi").id_scores, expected, atol=1e-4), (
        "CSI is fitted and asked on its own views"
    )
    noisy = fdbd.Guard(
        Classifier(Tiny().eval(), layers=["body.1"]),
        fdbd.MDS(["body.1"], std=0.5),
        perturb=fdbd.InputPerturbation(0.005, objective="score", std=0.5),
    ).fit([(images, labels["inside"])])
    assert torch.allclose(
        results.row("mds, layers and noise").id_scores, noisy.score(images[::2]), atol=1e-3
    )
    moved = results.row("odin").id_scores
    assert torch.allclose(moved, torch.full_like(moved, 1 / 3), atol=0.01), (
        "at T = 1000 the softmax is nearly flat"
    )


def test_a_detector_beats_another_only_if_both_metrics_say_so() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(2000, 1, generator=generator)
    head = fdbd.Head(torch.tensor([[1.0], [-1.0]]), torch.zeros(2))
    outside = FeatureSet("outside", torch.randn(2000, 1, generator=generator) - 3)
    results = Benchmark(
        head, FeatureSet("inside", inside), FeatureSet("inside", inside), [outside]
    ).run(["msp", "energy"], latency=False, progress=False)
    good, bad = results.rows
    scores = torch.randn(2000, generator=generator)
    # One detector separates most samples but lets a tenth of the OOD samples in; the other is a bit
    # worse everywhere.
    leaky = torch.where(torch.arange(2000) % 10 == 0, scores + 9.0, scores - 9.0)
    rows = {
        "leaky": (scores, leaky),
        "steady": (scores + 2.4, scores.roll(7)),
        "useless": (scores, scores.roll(11)),
    }
    made = [
        replace(good if name == "leaky" else bad, name=name, id_scores=a, ood_scores={"outside": b})
        for name, (a, b) in rows.items()
    ]
    made = [
        replace(
            row, evaluations={"outside": metrics.evaluate(row.id_scores, row.ood_scores["outside"])}
        )
        for row in made
    ]
    results = Results(results.setting, made)
    assert beats(results, "steady", "useless", "t").verdict == "holds"
    assert beats(results, "useless", "steady", "t").verdict == "does not hold"
    assert beats(results, "steady", "steady", "t").verdict == "undecided"
    mixed = beats(results, "steady", "leaky", "t")
    assert mixed.verdict == "undecided"
    assert "disagree" in mixed.measured


def two_detectors(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> Results:
    """Results whose rows "first" and "second" have these ID and OOD scores."""
    head = fdbd.Head(torch.tensor([[1.0], [-1.0]]), torch.zeros(2))
    inside = FeatureSet("inside", first[0][:, None])
    outside = FeatureSet("outside", first[1][:, None])
    benchmark = Benchmark(head, inside, inside, [outside])
    template = benchmark.run(["msp"], latency=False, progress=False)
    rows = []
    for name, (of_id, of_ood) in (("first", first), ("second", second)):
        rows.append(
            replace(
                template.rows[0],
                name=name,
                id_scores=of_id,
                ood_scores={"outside": of_ood},
                evaluations={"outside": metrics.evaluate(of_id, of_ood)},
            )
        )
    return Results(template.setting, rows)


def test_level_takes_both_metrics_and_not_auroc_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(4000, generator=generator)
    outside = torch.randn(4000, generator=generator) - 3
    # Every 25th OOD sample is accepted without doubt: a little less AUROC, and more FPR95.
    leaky = torch.where(torch.arange(4000) % 25 == 0, 9.0, outside - 9.0)
    results = two_detectors((inside, leaky), (inside, outside))
    leaks = levels(results, "first", "second", "t")
    auroc = results.compare("first", "second")
    assert auroc.difference > -0.03
    assert levels(results, "first", "first", "t").verdict == "holds"
    assert leaks.verdict == "does not hold"


def test_a_detector_with_the_same_auroc_and_a_higher_fpr_is_not_level() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(4000, generator=generator)
    narrow = torch.randn(4000, generator=generator) - 2.5
    # One ID sample in 14 is lost among the OOD samples, and the others are far from them.
    wide_id = torch.where(torch.arange(4000) % 14 == 0, inside - 3.0, inside + 3.0)
    results = two_detectors((wide_id, narrow), (inside, narrow))
    assert abs(results.compare("first", "second").difference) < 0.01
    assert float(fpr_difference(results, "first", "second").difference) > 0.02
    assert levels(results, "first", "second", "t").verdict == "does not hold"


def test_the_error_of_a_difference_in_fpr_is_that_of_paired_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(2, 3000, generator=generator)
    same = two_detectors((inside, outside - 2), (inside, outside - 2))
    assert fpr_difference(same, "first", "second") == (0.0, 0.0, 1.0)
    # Unrelated scores with the same distributions: the error is that of two independent rates,
    # whose spread over fresh samples is known.
    draws = []
    for _ in range(200):
        a, b, c, d = torch.randn(4, 3000, generator=generator)
        rates = metrics.fpr_at_tpr(a, b - 2), metrics.fpr_at_tpr(c, d - 2)
        draws.append(rates[0] - rates[1])
    a, b, c, d = torch.randn(4, 3000, generator=generator)
    unrelated = two_detectors((a, b - 2), (c, d - 2))
    found = fpr_difference(unrelated, "first", "second").standard_error
    assert found == pytest.approx(np.std(draws), rel=0.25)


def cross_entropy() -> ModelEntry:
    """The first model of table-cifar10, without the detectors that need images."""
    return replace(find("table-cifar10").settings.models[0], images=())


def test_statements_on_rows_that_are_not_comparable_are_not_tested(small_bundle, tiny) -> None:
    entry = NotComparable(models=("cross-entropy",), detectors=("knn",), why="too few samples.")
    changes = {
        "not_comparable": (entry,),
        "cost_below": None,
        "better": (("fdbd", "knn"), ("fdbd", "msp")),
        "level": (),
    }
    result = tiny("table-cifar10", models=(cross_entropy(),), **changes)
    by_statement = {item.statement: item for item in result.statements}
    on_knn = by_statement["fdbd separates ID from OOD better than knn (cross-entropy)"]
    assert on_knn.verdict == "not tested"
    assert on_knn.measured.endswith("Not comparable: too few samples.")
    on_msp = by_statement["fdbd separates ID from OOD better than msp (cross-entropy)"]
    assert on_msp.verdict != "not tested"
    assert "knn" in {row[1] for row in result.tables[0].rows}, "the row stays in the table"


def test_numbers_of_the_papers_text_stand_beside_ours(small_bundle, tiny) -> None:
    result = tiny("table-cifar10", models=(cross_entropy(),), cost_below=None)
    rows = {row[0]: row[1:] for row in result.tables[1].rows}
    assert rows["accuracy, percent"][1] == "94.21"
    model, paper, here = rows["FPR95 of fdbd below that of msp, percent of the latter"]
    assert (model, paper) == ("cross-entropy", "48.85")
    rates = {row[1]: float(row[3].strip("*")) for row in result.tables[0].rows}
    assert float(here) == pytest.approx(100 * (1 - rates["fdbd"] / rates["msp"]), abs=0.05)
    assert any("knn k = 50" in note for note in result.notes)


def test_a_detector_is_read_from_all_features_and_a_pair_from_the_images_only_if_it_must() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 2, 100, generator=generator)
    on_features = two_detectors(tuple(first), tuple(second))
    on_images = two_detectors(tuple(first[:, :50]), tuple(second[:, :50]))
    on_images.rows[1] = replace(on_images.rows[1], name="odin")
    both = ModelResults(on_features, on_images)
    assert both.having("first") is on_features
    assert both.having_both("first", "second") is on_features
    assert both.having("odin") is on_images
    assert both.having_both("first", "odin") is on_images
    assert both.having_both("second", "odin") is None
    assert ModelResults(on_features, None).having("odin") is None
