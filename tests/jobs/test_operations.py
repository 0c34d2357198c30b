"""calibrate, sample, inspect and compare: what a team does with a guard after the first day."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import beta, binomtest, spearmanr

import fdbd
from fdbd.jobs.review import Review, costs, rate_alarms, selection_caution
from fdbd.jobs.scored import ScoredRows, read_scored

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def values(count: int, seed: int, shift: float = 0.0) -> np.ndarray:
    """Features around three class centres; a shift moves them away from all."""
    generator = np.random.default_rng(seed)
    centres = np.eye(3, dtype=np.float32)[generator.integers(0, 3, count)] * 4
    noise = generator.normal(0, 1 + shift, (count, 3))
    return (centres + noise).astype(np.float32)


@pytest.fixture
def place(tmp_path, monkeypatch, result) -> Path:
    """A folder with a guard at alpha = 0.1, fresh data, and scores of data with outliers."""
    monkeypatch.chdir(tmp_path)
    np.savez("head.npz", weight=np.eye(3, dtype=np.float32), bias=np.zeros(3, np.float32))
    np.savez("train.npz", features=values(500, 0))
    np.savez("known.npz", features=values(400, 1))
    np.savez("fresh.npz", features=values(400, 2))
    np.savez("drifted.npz", features=values(400, 3, shift=1.0))
    mixed = values(300, 4)
    mixed[:60] = np.random.default_rng(5).normal(0, 0.3, (60, 3))
    np.savez("mixed.npz", features=mixed)
    result("fit", "train.npz", "--head", "head.npz", "--calibration", "known.npz", "--alpha", 0.1)
    result("score", "guard.safetensors", "mixed.npz")
    return tmp_path


def test_rows_carry_the_id_of_the_guard(place, result) -> None:
    guard = fdbd.load("guard.safetensors")
    assert set(pq.read_table("scores.parquet")["guard"].to_pylist()) == {guard.id}
    result("score", "guard.safetensors", "mixed.npz", "--out", "scores.csv")
    with open("scores.csv", newline="") as file:
        assert {row["guard"] for row in csv.DictReader(file)} == {guard.id}


@pytest.mark.parametrize("through_scores", [False, True])
def test_a_refreshed_threshold_is_that_of_a_calibration_in_memory(
    place, result, through_scores
) -> None:
    data = "fresh.npz"
    if through_scores:
        result("score", "guard.safetensors", "fresh.npz", "--out", "fresh.parquet")
        data = "fresh.parquet"
    found = result("calibrate", "guard.safetensors", "--data", data, "--out", "new.safetensors")
    guard = fdbd.load("guard.safetensors")
    fresh = fdbd.Batch(torch.from_numpy(values(400, 2)))
    flagged = int(guard.decide(fresh).is_ood.sum())
    low, high = beta.ppf([0.025, 0.975], [flagged, flagged + 1], [401 - flagged, 400 - flagged])
    said = found["old"]["false_alarms"]
    assert (said["count"], said["total"]) == (flagged, 400)
    assert (said["low"], said["high"]) == pytest.approx((low, high))
    old_id = guard.id
    expected = guard.calibrate(fresh, alpha=0.1).threshold
    assert expected is not None
    new = fdbd.load("new.safetensors")
    assert new.threshold is not None
    torch.testing.assert_close(new.threshold.value, expected.value)
    assert new.threshold.target == 0.1
    assert new.threshold.kind == "conformal"
    assert (found["id"], found["new_id"]) == (old_id, new.id)
    assert new.id != old_id
    assert new.version == 2
    for name, tensor in guard.detector.state_dict().items():
        assert torch.equal(new.detector.state_dict()[name], tensor)


def test_data_that_have_changed_show_in_the_false_alarms_of_the_old_threshold(
    place, run, result
) -> None:
    found = result("calibrate", "guard.safetensors", "--data", "drifted.npz")
    assert found["old"]["false_alarms"]["low"] > 0.1
    assert found["out"] is None
    code, out, _ = run("calibrate", "guard.safetensors", "--data", "drifted.npz")
    assert code == 0
    assert "more than the 10 % that it aims at" in out
    assert "Nothing was written" in out
    assert not (place / "new.safetensors").exists()


def test_what_the_sample_cannot_support_is_refused_and_nothing_is_written(place, run) -> None:
    np.savez("few.npz", features=values(30, 9))
    code, _, err = run(
        "calibrate", "guard.safetensors", "--data", "few.npz", "--alpha", 0.01, "--out", "n.safetensors"
    )  # fmt: skip
    assert (code, err.count("\n")) == (2, 1)
    assert "there are 30 calibration samples, alpha=0.01 takes at least 99" in err
    assert not (place / "n.safetensors").exists()


def test_the_data_of_the_fit_draw_a_caution(place, result) -> None:
    found = result("calibrate", "guard.safetensors", "--data", "train.npz")
    assert any("also used for the fit" in caution for caution in found["cautions"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("calibrate", "guard.safetensors", "--data", "nowhere.npz"), "nowhere.npz"),
        (("calibrate", "nowhere", "--data", "fresh.npz"), "no guard at 'nowhere'"),
        (("calibrate", "guard.safetensors", "--data", "fresh.npz", "--reviewed", "r.json"), "--data"),
        (("calibrate", "guard.safetensors", "--data", "scores.parquet", "--reviewed", "r.json"), "no review at"),
        (("calibrate", "guard.safetensors", "--data", "fresh.npz", "--review-cost", 1), "go together"),
        (("calibrate", "guard.safetensors", "--data", "fresh.npz", "--tpr", 0.9, "--alpha", 0.1), "not both"),
        (("sample", "scores.parquet", "--count", 301), "has 300 rows"),
        (("sample", "scores.parquet", "--out", "sample.txt"), "expected a .parquet or .csv"),
        (("sample", "fresh.npz"), "not a readable file of scores"),
        (("inspect", "head.npz"), "head.npz"),
        (("compare", "scores.parquet", "nowhere.parquet"), "no scores at"),
        (("compare", "scores.parquet", "scores.parquet", "--images", "here"), "--images is 'here'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)  # fmt: skip
def test_bad_input_is_one_line(place, run, arguments, sentence) -> None:
    before = sorted(place.rglob("*"))
    code, _, err = run(*arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert sentence in err
    assert sorted(place.rglob("*")) == before


def write_review(path: str, verdicts: dict) -> None:
    Path(path).write_text(json.dumps({"version": 1, "reviews": verdicts}))


def test_a_random_review_sets_the_threshold_and_rates_the_alarms(place, run, result) -> None:
    drawn = result("sample", "scores.parquet", "--count", 200, "--out", "sample.csv", "--seed", 7)
    assert (drawn["rows"], drawn["of"]) == (200, 300)
    sample = read_scored(Path("sample.csv"))
    assert len(set(sample.names)) == 200
    scores = read_scored(Path("scores.parquet"))
    where = scores.places()
    np.testing.assert_allclose(sample.scores, scores.scores[[where[n] for n in sample.names]])
    verdicts = {name: "ood" if int(name) < 60 else "id" for name in sample.names}
    write_review("review.json", verdicts)
    arguments = ["calibrate", "guard.safetensors", "--data", "scores.parquet", "--reviewed"]
    found = result(
        *arguments, "review.json", "--out", "new.safetensors", "--review-cost", 1, "--miss-cost", 20
    )
    inside = [where[name] for name, verdict in verdicts.items() if verdict == "id"]
    new = fdbd.load("new.safetensors").threshold
    assert new is not None
    expected = fdbd.Threshold.conformal(scores.scores[inside].astype(np.float32), 0.1)
    torch.testing.assert_close(new.value.double(), expected.value.double())
    assert found["reviewed"] == {"id": len(inside), "wrong-class": 0, "ood": 200 - len(inside)}
    assert any("drawn at random" in caution for caution in found["cautions"])
    alarms = [name for name in sample.names if scores.is_ood[where[name]]]
    hits = sum(verdicts[name] == "ood" for name in alarms)
    assert found["alarms"]["precision"]["value"] == pytest.approx(hits / len(alarms))
    rated = found["alarms"]
    assert rated["recall_low"] <= rated["recall"] <= rated["recall_high"]
    cheapest = min(found["costs"], key=lambda row: row["cost"])
    for row in found["costs"]:
        assert row["found"] + row["missed"] == pytest.approx(1000 * found["alarms"]["ood_share"])
    code, out, err = run(*arguments, "review.json", "--review-cost", 1, "--miss-cost", 20)
    assert code == 0, err
    assert f"Cheapest: alpha {cheapest['alpha']:g}" in out
    is_asked_for = f"--alpha {cheapest['alpha']:g} sets this one" in out
    assert is_asked_for == (found["new"]["target"] != cheapest["alpha"])
    assert "(precision)" in out


def test_a_review_of_the_most_suspicious_says_that_it_promises_nothing(place, result) -> None:
    scores = read_scored(Path("scores.parquet"))
    lowest = np.argsort(scores.scores)[:150]
    write_review("review.json", {scores.names[n]: "ood" if n < 60 else "id" for n in lowest})
    found = result(
        "calibrate", "guard.safetensors", "--data", "scores.parquet", "--reviewed", "review.json"
    )
    assert any("not a random draw: they have lower scores" in text for text in found["cautions"])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("{}", "holds no verdict"),
        ('{"reviews": {"1": "maybe"}}', "expected id, wrong-class, ood"),
        ('{"reviews": {"9999": "id"}}', "'9999', which"),
        ('[{"verdict": "id"}]', "without a name"),
        ('{"1": "ood"}', "no in-distribution sample"),
        ("3", "is not a review"),
    ],
)
def test_a_review_that_is_none_is_one_line(place, run, content, sentence) -> None:
    Path("review.json").write_text(content)
    code, _, err = run(
        "calibrate", "guard.safetensors", "--data", "scores.parquet", "--reviewed", "review.json"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err


def test_a_review_may_be_a_list_of_rows(place, result) -> None:
    rows = [{"row": n, "verdict": "id"} for n in range(60, 200)]
    Path("review.json").write_text(json.dumps(rows))
    found = result(
        "calibrate", "guard.safetensors", "--data", "scores.parquet", "--reviewed", "review.json"
    )
    assert found["rows"] == 140


def scored(scores: np.ndarray, is_ood: np.ndarray) -> ScoredRows:
    count = len(scores)
    return ScoredRows(
        "scores",
        [str(n) for n in range(count)],
        np.zeros(count, np.int64),
        [None] * count,
        scores,
        np.full(count, 0.5),
        is_ood,
        [None] * count,
    )


def test_recall_weighs_alarms_and_others_by_how_many_there_are() -> None:
    """All ten alarms are reviewed, and every tenth of 990 other rows: each of those stands for
    ten."""
    is_ood = np.arange(1000) < 10
    rows = scored(np.arange(1000.0), is_ood)
    places = np.concatenate([np.arange(10), np.arange(10, 1000, 10)])
    verdicts = ["ood"] * 8 + ["id"] * 2 + ["ood"] * 2 + ["id"] * 97
    found = rate_alarms(Review(rows, places, verdicts))
    assert found.precision.value == 0.8
    assert found.recall == pytest.approx(8 / (8 + 20))
    assert found.ood_share == pytest.approx(28 / 1000)


def test_intervals_of_recall_cover_it() -> None:
    """A simulation: the interval holds the share that all verdicts would give in at least nine of
    ten reviews."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        truth = generator.random(2000) < 0.1
        flagged = np.where(truth, generator.random(2000) < 0.7, generator.random(2000) < 0.05)
        recall = (truth & flagged).sum() / truth.sum()
        places = np.sort(generator.choice(2000, 400, replace=False))
        verdicts = ["ood" if truth[place] else "id" for place in places]
        found = rate_alarms(Review(scored(np.zeros(2000), flagged), places, verdicts))
        assert found.recall_low is not None
        assert found.recall_high is not None
        covered += found.recall_low <= recall <= found.recall_high
    assert covered >= 180


def test_a_random_draw_is_rarely_taken_for_a_selection() -> None:
    generator = np.random.default_rng(0)
    accused = 0
    for _ in range(200):
        rows = scored(generator.normal(size=500), np.zeros(500, bool))
        places = np.sort(generator.choice(500, 100, replace=False))
        text = selection_caution(Review(rows, places, ["id"] * 100))
        accused += "not a random draw" in text
    assert accused <= 8


def test_costs_count_alarms_and_misses_per_thousand() -> None:
    inside = np.arange(1, 100.0)
    outside = np.array([0.5, 4.5, 50.0, 200.0])
    found = {row.alpha: row for row in costs(inside, outside, 2.0, 10.0, 0.1)}
    five = found[0.05]
    assert five.false_alarms == pytest.approx(900 * 5 / 100)
    assert five.found == pytest.approx(100 * 2 / 4)
    assert five.missed == pytest.approx(50)
    assert five.cost == pytest.approx(2 * (45 + 50) + 10 * 50)
    assert 0.001 not in found


def test_each_row_has_the_same_chance_to_be_drawn(place, result) -> None:
    counts = np.zeros(300)
    for seed in range(60):
        result("sample", "scores.parquet", "--count", 50, "--seed", seed)
        counts[[int(name) for name in read_scored(Path("sample.parquet")).names]] += 1
    # 60 draws at a sixth each: 10 ± 2.9; the scores of those drawn often are like the others'.
    assert counts.max() < 25
    scores = read_scored(Path("scores.parquet")).scores
    assert abs(spearmanr(counts, scores).statistic) < 0.2


def test_inspect_says_what_is_in_the_file(place, run, result) -> None:
    found = result("inspect", "guard.safetensors")
    guard = fdbd.load("guard.safetensors")
    assert guard.threshold is not None
    assert found["Guard"]["id"] == guard.id
    assert found["Guard"]["bytes"] == Path("guard.safetensors").stat().st_size
    assert found["Detector"]["name"] == "fdbd"
    assert (found["Detector"]["classes"], found["Detector"]["features"]) == (3, 3)
    assert found["Threshold"]["promise"] == guard.threshold.guarantee
    assert found["Threshold"]["value"] == pytest.approx(float(guard.threshold.value))
    assert found["Calibration"]["rows"] == 400
    assert set(found["Tensors"]) >= {"threshold.calibration"}
    code, out, _ = run("inspect", "guard.safetensors")
    assert code == 0
    assert guard.id in out
    assert guard.threshold.guarantee in out


def test_inspect_reads_an_exported_graph(place, run, result) -> None:
    pytest.importorskip("onnxruntime")
    guard = fdbd.load("guard.safetensors")
    assert guard.threshold is not None
    result("export", "guard.safetensors", "--out", "guard.onnx")
    found = result("inspect", "guard.onnx")
    assert found["Guard"]["id"] == guard.id
    assert found["Threshold"]["value"] == pytest.approx(guard.threshold.value.tolist())
    assert found["Threshold"]["promise"] == guard.threshold.guarantee
    assert found["Calibration"]["scores"] == guard.threshold.count
    code, out, _ = run("inspect", "guard.onnx")
    assert code == 0
    assert guard.id in out
    code, _, err = run("score", "guard.onnx", "fresh.npz", "--out", "new.csv")
    assert code == 2
    assert "is an exported graph" in err


def test_inspect_shows_a_guard_without_a_threshold_and_one_with_a_model(tmp_path, run) -> None:
    path = tmp_path / "guard.safetensors"
    fdbd.Guard(fdbd.Head(torch.eye(3))).fit(fdbd.Batch(torch.rand(9, 3))).save(path)
    code, out, _ = run("inspect", path)
    assert code == 0
    assert "not calibrated" in out


def test_two_guards_are_compared_row_by_row(place, run, result) -> None:
    arguments = ["train.npz", "--head", "head.npz", "--calibration", "known.npz", "--alpha", 0.1]
    result("fit", *arguments, "--detector", "msp", "--out", "msp.safetensors")
    result("score", "msp.safetensors", "mixed.npz", "--out", "msp.csv")
    found = result("compare", "scores.parquet", "msp.csv", "--out", "page.html")
    one = read_scored(Path("scores.parquet"))
    two = read_scored(Path("msp.csv"))
    first = one.is_ood
    second = two.is_ood
    assert found["flagged"] == {
        "both": int((first & second).sum()),
        "first": int((first & ~second).sum()),
        "second": int((~first & second).sum()),
        "neither": int((~first & ~second).sum()),
    }
    assert found["agreement"]["value"] == pytest.approx((first == second).mean())
    assert found["same_label"]["value"] == 1.0
    difference = found["alarm_rate_difference"]
    assert difference["value"] == pytest.approx(second.mean() - first.mean())
    by_first = found["flagged"]["first"]
    by_second = found["flagged"]["second"]
    expected = 1.0
    if by_first + by_second:
        expected = binomtest(by_first, by_first + by_second).pvalue
    assert difference["p_value"] == pytest.approx(expected)
    assert found["rank_correlation"] == pytest.approx(spearmanr(one.scores, two.scores).statistic)
    differing = {one.names[n] for n in np.flatnonzero(first != second)}
    assert set(found["disagreements"]) == differing
    page = Path("page.html").read_text()
    assert all(f"<strong>{name}</strong>" in page for name in differing)
    assert found["guards"] == [fdbd.load(p).id for p in ("guard.safetensors", "msp.safetensors")]
    code, out, _ = run("compare", "scores.parquet", "msp.csv")
    assert code == 0
    assert "McNemar" in out
    assert result("compare", "msp.csv", "msp.csv")["agreement"]["value"] == 1.0


def test_scores_of_other_rows_have_nothing_to_compare(place, run, result) -> None:
    names = [f"{n}.png" for n in range(300)]
    table = pq.read_table("scores.parquet")
    pq.write_table(table.set_column(0, "path", pa.array(names)), "other.parquet")
    code, _, err = run("compare", "scores.parquet", "other.parquet")
    assert (code, err.count("\n")) == (2, 1)
    assert "no row in common" in err


def test_a_page_of_disagreements_shows_the_images_and_names_stay_text(tmp_path, run) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    name = "<script>alert(1)<.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(folder / "a.png")
    columns = {
        "path": ["a.png", name],
        "label": [0, 1],
        "class": ["ant", "<b>"],
        "score": [1.0, 2.0],
        "p_value": [0.5, 0.6],
        "is_ood": [False, True],
        "error": pa.array([None, None], pa.string()),
    }
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    pq.write_table(pa.table({**columns, "is_ood": [True, False]}), tmp_path / "two.parquet")
    page = tmp_path / "page.html"
    code, _, err = run(
        "compare", tmp_path / "one.parquet", tmp_path / "two.parquet", "--out", page, "--images", folder
    )  # fmt: skip
    assert code == 0, err
    text = page.read_text()
    assert text.count("data:image/") == 1
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
