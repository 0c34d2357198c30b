"""Tables at any width, files that are read back, and rows that say what they were fitted on."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import fdbd
from fdbd.bench import Benchmark, FeatureSet, load_bundle
from fdbd.bench.rows import Latency
from fdbd.core.batch import Head
from fdbd.fitting.statistics import ClassMoments

OLD = Path(__file__).parents[1] / "artifacts" / "0.1.0" / "results.json"


class Nothing(fdbd.Shaping):
    """Leaves features as they are."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return features.clone()


def data(seed: int, count: int, name: str = "train", strength: float = 3.0) -> FeatureSet:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 4
    noise = torch.randn(count, 8, generator=generator)
    return FeatureSet(name, (strength * torch.eye(4, 8)[labels] + noise).relu(), labels)


@pytest.fixture(scope="module")
def part() -> Benchmark:
    """A benchmark whose training samples are a bank of 100, with the moments of 600."""
    full = data(0, 600)
    head = Head(torch.eye(4, 8))
    moments = ClassMoments(4, 8)
    moments.update(full.rows(slice(None)))
    bank = FeatureSet("train", full.features[:100], full.labels[:100])
    ood = [
        data(2, 90, "near", 1.0),
        data(3, 80, "far away", 0.0),
        data(4, 70, "a/rather-long_name", 0.5),
    ]
    return Benchmark(
        head,
        bank,
        data(1, 150, "test"),
        ood,
        groups={"hard": ["near"]},
        statistics=moments,
        validation=data(5, 120, "held out"),
        forward=lambda size: Latency(size, 1e-3, 2e-3, 0.9e-3, 1.1e-3),
        title="A title",
    )


@pytest.fixture(scope="module")
def results(part: Benchmark) -> fdbd.Results:
    return part.run(["fdbd", "knn", "react+energy", "energy", "tempscale", "msp"])


def test_sets_without_a_key_are_known_by_their_features() -> None:
    first = FeatureSet("first", torch.zeros(4, 2))
    assert first.key == FeatureSet("renamed", torch.zeros(4, 2)).key
    assert first.key != FeatureSet("first", torch.ones(4, 2)).key


@pytest.mark.parametrize("name", ["fdbd", "mds", "vim", "neco"])
def test_a_detector_behind_an_identity_shaping_is_that_detector(part: Benchmark, name: str) -> None:
    plain, shaped = (
        part.run([d], latency=False).rows[0]
        for d in (name, fdbd.Shaped(Nothing(), fdbd.create(name)))
    )
    torch.testing.assert_close(shaped.id_scores, plain.id_scores)
    assert shaped.from_bank == plain.from_bank


def test_members_of_an_ensemble_rest_on_the_same_statistics_as_alone(part: Benchmark) -> None:
    ensemble = fdbd.Ensemble(["fdbd", "mds"])
    row = part.run([ensemble], latency=False).rows[0]
    assert row.error is None
    assert not row.from_bank
    for member, name in zip(ensemble.members, ("fdbd", "mds")):
        alone = part.run([name], latency=False).rows[0]
        torch.testing.assert_close(member.score(part.test.rows(slice(None))), alone.id_scores)


def test_rows_that_rest_on_the_bank_say_so(results: fdbd.Results) -> None:
    assert {row.name for row in results.finished if row.from_bank} == {"knn", "react+energy"}
    text = str(results)
    assert "knn †" in text
    assert "the 100 of these samples" in " ".join(text.split())


def test_a_temperature_comes_from_held_out_data_or_not_at_all(
    part: Benchmark, results: fdbd.Results
) -> None:
    detector = fdbd.TemperatureScaling().fit(part.validation.rows(slice(None)), part.head)
    torch.testing.assert_close(
        results.row("tempscale").id_scores, detector.score(part.test.rows(slice(None)))
    )
    without = Benchmark(part.head, part.train, part.test, part.ood)
    assert "validation" in str(without.run(["tempscale"], latency=False).row("tempscale").error)
    full = without.run(latency=False, progress=False)
    assert "tempscale" not in {row.name for row in full.rows}
    assert any("tempscale" in note for note in full.setting.notes)


def test_temperature_scaling_is_above_msp_on_the_features_in_the_package() -> None:
    found = load_bundle("cifar10-ce").run(["msp", "tempscale"], latency=False, progress=False)
    assert found.compare("tempscale", "msp").verdict() == "higher"


def rendered(results: fdbd.Results, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(results.table(width=width))
    return text.getvalue()


@pytest.mark.parametrize("width", [24, 36, 50, 64, 80, 100, 120, 160, 300])
def test_at_any_width_each_column_is_whole_or_named_as_left_out(
    results: fdbd.Results, width: int
) -> None:
    text = rendered(results, width)
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == 6
    head = " ".join(line for line in lines if line.startswith("┃"))
    caption = " ".join(" ".join(line for line in lines if not line.startswith(("│", "┃"))).split())
    for row in rows:
        assert all(cell.strip() and "…" not in cell for cell in row.strip("│").split("│"))
    left_out = caption.partition("Left out at this width: ")[2]
    for name in ("average", "hard", "near", "far away", "a/rather-long_name", "µs per sample"):
        assert name in head or name in left_out or name in left_out.replace(" ", "")
    named = left_out.partition(".")[0]
    # Which of the two it is.
    assert named.count("µs per sample") == named.count("µs per sample at batch ")


def test_results_come_back_from_their_file(results: fdbd.Results, tmp_path: Path) -> None:
    again = fdbd.Results.from_json(results.to_json(tmp_path / "r.json"))
    assert again.setting == results.setting
    assert again.records() == results.records()
    torch.testing.assert_close(
        again.row("fdbd").ood_scores["near"], results.row("fdbd").ood_scores["near"]
    )
    assert again.compare("fdbd", "msp") == results.compare("fdbd", "msp")
    assert again.to_markdown() == results.to_markdown()
    again.to_html(tmp_path / "again.html")


def test_results_of_version_0_1_0_load_and_show_their_numbers(tmp_path: Path) -> None:
    old = json.loads(OLD.read_text())
    results = fdbd.Results.from_json(OLD)
    entry = next(entry for entry in old["detectors"] if "error" not in entry)
    value = results.value(results.row(entry["name"]), "average", "auroc")
    assert value.to_dict() == entry["groups"]["average"]["auroc"]
    assert results.to_html(tmp_path / "old.html").stat().st_size > 10_000
    with pytest.raises(ValueError, match=r"scores of .* are not in these results"):
        results.compare(results.rows[0].name, results.rows[1].name)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"setting": {}, "detectors": [3]}', '{"detectors": []', "[" * 9999]
)
def test_other_files_are_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"is not a results\.json"):
        fdbd.Results.from_json(tmp_path / "r.json")


def test_scores_of_other_samples_are_refused(results: fdbd.Results, tmp_path: Path) -> None:
    values = json.loads(results.to_json(tmp_path / "r.json").read_text())
    values["setting"]["test"]["count"] -= 1
    values["setting"]["correct"] = None
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="are not those of the sets"):
        fdbd.Results.from_json(tmp_path / "r.json")


def _another_convention(values: dict[str, Any]) -> None:
    values["setting"]["positive"] = "both"


def _one_detector_twice(values: dict[str, Any]) -> None:
    values["detectors"].append(values["detectors"][0])


def _one_set_not_evaluated(values: dict[str, Any]) -> None:
    del values["detectors"][0]["datasets"]["near"]


def _a_group_of_an_unknown_set(values: dict[str, Any]) -> None:
    values["setting"]["groups"]["far"] = ["elsewhere"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_a_group_of_an_unknown_set, "'far' names 'elsewhere', which is not an OOD set"),
        (_another_convention, "'positive' is 'both', expected 'id' or 'ood'"),
        (_one_detector_twice, "two detectors have the same name"),
        (_one_set_not_evaluated, "was not evaluated on every OOD set"),
    ],
)
def test_results_changed_by_hand_are_refused(
    change: Callable[[dict[str, Any]], None], message: str, results: fdbd.Results, tmp_path: Path
) -> None:
    values = json.loads(results.to_json(tmp_path / "r.json").read_text())
    change(values)
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        fdbd.Results.from_json(tmp_path / "r.json")


def test_latex_tables_have_few_columns_each_and_escape_what_tex_reads(
    results: fdbd.Results,
) -> None:
    text = results.to_latex()
    assert text.count(r"\begin{table}") == 2
    assert max(line.count(" & ") for line in text.splitlines()) <= 6
    assert r"a/rather-long\_name" in text


def test_the_interval_of_a_median_holds_it() -> None:
    timing = Latency.from_calls(1, [5.0, 1.0, 3.0, 2.0, 4.0])
    assert (timing.low, timing.median, timing.high) == (1.0, 3.0, 5.0)
    many = Latency.from_calls(1, list(range(10_001)))
    assert many.median - 150 < many.low < many.median < many.high < many.median + 150
