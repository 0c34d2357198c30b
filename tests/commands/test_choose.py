"""fdbd choose, fdbd fit --detector auto, and the page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fdbd
from fdbd.decision.advice import pareto
from fdbd.decision.choice import Member
from fdbd.decision.choice_rule import POOL, Cost


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """In-distribution images for the fit and held out, and OOD images."""
    folder = tmp_path_factory.mktemp("choose")
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (210, 4, 4, 3), dtype=np.uint8)
    images = coarse.repeat(8, axis=1).repeat(8, axis=2)
    np.savez(folder / "train.npz", x=images[:80])
    np.savez(folder / "fresh.npz", x=images[80:160])
    np.savez(folder / "other.npz", x=images[160:])
    np.savez(folder / "ood.npz", x=generator.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8))
    return folder


def test_choose_reports_kinds_weights_costs_and_real_ood_data(folder, result) -> None:
    page = folder / "choice.html"
    found = result(
        *("choose", "cifar10-ce", folder / "train.npz", "--held-out", folder / "fresh.npz"),
        *("--ood", folder / "ood.npz", "--out", page, "--device", "cpu"),
    )
    assert [member["name"] for member in found["members"]] == list(POOL)
    assert sum(member["weight"] for member in found["members"]) == pytest.approx(1)
    assert len(found["per_kind"]) == 8
    assert found["num_held_out"] == 40
    assert set(found["ood"]["ood"]) == {*POOL, "auto"}
    assert "not a measurement on your OOD data" in found["advice"]
    text = page.read_text(encoding="utf-8")
    assert text.count("<img") == 8
    assert "scale(85)+fdbd" in text


def test_without_held_out_data_a_part_is_taken_with_a_caution(folder, run) -> None:
    code, _, err = run(
        *("choose", "cifar10-ce", folder / "fresh.npz", "--device", "cpu"),
        *("--budget", "no bank"),
    )
    assert code == 2
    assert "16 of 16 samples can be held out" in err


def test_fit_takes_auto_with_a_budget_and_reports_the_choice(folder, result) -> None:
    found = result(
        *("fit", "cifar10-ce", folder / "train.npz", "--calibration", folder / "fresh.npz"),
        *("--detector", "auto", "--budget", "no bank", "--out", folder / "guard.safetensors"),
        *("--device", "cpu"),
    )
    assert found["choice"]["num_held_out"] == 40
    assert not any(member["cost"]["has_bank"] for member in found["choice"]["members"])
    guard = fdbd.load(folder / "guard.safetensors")
    assert guard.threshold is not None
    assert guard.threshold.count == 40


def test_fit_weighs_by_held_out_data_and_calibrates_on_all_of_the_others(folder, result) -> None:
    found = result(
        *("fit", "cifar10-ce", folder / "train.npz", "--calibration", folder / "other.npz"),
        *("--detector", "auto", "--held-out", folder / "fresh.npz", "--device", "cpu"),
        *("--out", folder / "held-out.safetensors"),
    )
    assert found["choice"]["num_held_out"] == 80
    assert found["calibration_rows"] == 50


def test_held_out_data_are_for_auto_alone(folder, run) -> None:
    code, _, err = run(
        *("fit", "cifar10-ce", folder / "train.npz", "--calibration", folder / "fresh.npz"),
        *("--held-out", folder / "other.npz"),
    )
    assert code == 2
    assert "--detector auto" in err


def test_held_out_data_of_another_kind_are_refused(folder, run) -> None:
    np.savez(folder / "features.npz", features=np.zeros((40, 128), np.float32))
    code, _, err = run(
        *("fit", "cifar10-ce", folder / "train.npz", "--calibration", folder / "fresh.npz"),
        *("--detector", "auto", "--held-out", folder / "features.npz", "--device", "cpu"),
    )
    assert code == 2
    assert "expected images" in err


def test_a_model_of_texts_is_refused_with_what_to_do_instead(intents_folder, tmp_path, run) -> None:
    texts = tmp_path / "train.csv"
    texts.write_text("query,intent\nplay a song,music\n")
    code, _, err = run("choose", f"hf:{intents_folder}", texts, "--held-out", texts)
    assert code == 2
    assert "the model takes texts" in err
    assert "fdbd.data.token_kinds" in err


def test_auto_is_no_single_detector() -> None:
    with pytest.raises(ValueError, match=r"Guard\(model, 'auto'\)"):
        fdbd.create("auto")


def test_a_budget_is_for_auto_alone(folder, run) -> None:
    code, _, err = run(
        *("fit", "cifar10-ce", folder / "train.npz", "--calibration", folder / "fresh.npz"),
        *("--budget", "10us"),
    )
    assert code == 2
    assert "--detector auto" in err


def test_the_front_holds_what_nothing_beats_in_time_and_weight() -> None:
    def member(name: str, weight: float, time: float) -> Member:
        return Member(name, weight, 0.0, Cost(time, 0.0, False), {})

    members = [member("a", 0.1, 1), member("b", 0.1, 2), member("c", 0.5, 3), member("d", 0.3, 3)]
    assert [each.name for each in pareto(members)] == ["a", "c"]


def test_choose_takes_features_with_kinds_of_the_user() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(300, 8, generator=generator).relu()
    head = fdbd.Head(torch.randn(3, 8, generator=generator))
    kinds = {"louder": fdbd.Batch(3 * features[:40])}
    found = fdbd.choose(
        head,
        [fdbd.Batch(features[:100])],
        [fdbd.Batch(features[100:200])],
        ood={"other": [fdbd.Batch(-features[200:])]},
        auto=fdbd.Auto(kinds=kinds, pool=("fdbd", "energy")),
    )
    assert list(found.choice.members[0].aurocs) == ["louder"]
    assert set(found.ood["other"]) == {"fdbd", "energy", "auto"}
    assert found.pictures == {}


def test_the_advice_claims_no_weights_if_nothing_was_weighed() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 8, generator=generator).relu()
    head = fdbd.Head(torch.randn(3, 8, generator=generator))
    with pytest.warns(UserWarning, match="no pseudo-OOD samples"):
        advice = fdbd.choose(head, [fdbd.Batch(rows[:100])], [fdbd.Batch(rows[100:])])
    assert "6 detectors with equal weights" in advice.sentence
    assert "most weight" not in advice.sentence
    assert "kinds=" in advice.sentence
    one = fdbd.Auto(budget="0us")
    with pytest.warns(UserWarning, match="budget"):
        advice = fdbd.choose(head, [fdbd.Batch(rows[:100])], [fdbd.Batch(rows[100:])], auto=one)
    assert "nothing has weighed it" in advice.sentence
