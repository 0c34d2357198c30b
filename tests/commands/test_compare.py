"""fdbd compare: paired where the samples agree, and what is said where two results have nothing in
common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fdbd
from fdbd import cli
from fdbd.bench import Benchmark, FeatureSet
from fdbd.bench.merging import compare_results
from fdbd.core.batch import Head
from fdbd.metrics import delong_test


def make(noise: float, samples: str = "", names: tuple[str, ...] = ("one", "two")) -> fdbd.Results:
    """The same samples under a model that is more or less noisy."""
    generator = torch.Generator().manual_seed(7)

    def draw(name: str, count: int, strength: float) -> FeatureSet:
        clean = strength * torch.eye(4, 6)[torch.arange(count) % 4] + torch.randn(
            count, 6, generator=generator
        )
        other = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
        return FeatureSet(name, clean + noise * other, samples=samples and f"{samples} {name}")

    sets = [
        draw(name, count, strength) for name, count, strength in zip(names, (90, 70), (1.0, 0.5))
    ]
    return Benchmark(Head(torch.eye(4, 6)), draw("train", 80, 3), draw("id", 120, 3), sets).run(
        ["msp", "energy"], latency=False, progress=False
    )


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_two_models_on_the_same_images_are_compared_in_pairs(tmp_path: Path, capsys) -> None:
    first = make(0.0, "images")
    second = make(1.5, "images")
    sets, found = compare_results(first, second)
    assert sets == ["one", "two"]
    assert all(each.paired for each in found)
    msp = next(each for each in found if each.detector == "msp")
    mean = [
        float(results.value(results.row("msp"), "average", "auroc")) for results in (first, second)
    ]
    assert msp.comparison.difference == pytest.approx(mean[1] - mean[0])
    assert msp.comparison.verdict() == "lower"
    code, out, _ = run(
        capsys, "compare", first.to_json(tmp_path / "a.json"), second.to_json(tmp_path / "b.json")
    )
    assert code == 0
    assert "the samples are the same" in " ".join(out.split())
    code, out, _ = run(capsys, "compare", tmp_path / "a.json", tmp_path / "b.json", "--json")
    assert json.loads(out)["detectors"][0]["paired"] is True


def test_one_common_set_gives_delongs_own_test() -> None:
    first = make(0.0, "images", ("one", "two"))
    second = make(0.5, "images", ("one", "three"))
    sets, found = compare_results(first, second)
    assert sets == ["one"]
    energy = next(each for each in found if each.detector == "energy")
    a = first.row("energy")
    b = second.row("energy")
    expected = delong_test(b.id_scores, b.ood_scores["one"], a.id_scores, a.ood_scores["one"])
    assert energy.comparison == pytest.approx(expected)


def test_other_samples_count_as_independent_and_tell_less_apart() -> None:
    paired = compare_results(make(0.0, "images"), make(0.5, "images"))[1][0]
    apart = compare_results(make(0.0, "images"), make(0.5, "others"))[1][0]
    assert not apart.paired
    assert apart.comparison.difference == pytest.approx(paired.comparison.difference)
    assert apart.comparison.standard_error > paired.comparison.standard_error


def test_results_without_scores_are_compared_by_their_intervals() -> None:
    results = make(0.0)
    rows = [replace(row, id_scores=torch.zeros(0), ood_scores={}) for row in results.rows]
    found = compare_results(fdbd.Results(results.setting, rows), results)[1]
    assert not any(each.paired for each in found)
    assert all(each.comparison.verdict() == "undecided" for each in found)
    assert compare_results(results, results)[1][0].comparison.p_value == 1


def test_results_with_nothing_in_common_are_refused_in_one_line(tmp_path: Path, capsys) -> None:
    paths = [
        make(0.0, names=names).to_json(tmp_path / f"{names[0]}.json")
        for names in (("a", "b"), ("c", "d"))
    ]
    code, _, err = run(capsys, "compare", *paths)
    assert code == 2
    assert "no OOD set in common: a, b against c, d" in err
    code, _, err = run(capsys, "compare", paths[0], tmp_path / "nothing.json")
    assert code == 2
    assert len(err.splitlines()) == 1
