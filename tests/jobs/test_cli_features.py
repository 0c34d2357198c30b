"""fit, score and export on Parquet and NPZ features with a head, through the program itself."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fdbd
from fdbd.pages.gallery import read_scores

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

CLASSES, WIDTH = 4, 6


def features(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def fixed(values: np.ndarray):
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


def write(path: Path, group: int = 1000, **columns) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=group)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a head, training features, and a guard fitted on them."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(9)
    weight = generator.standard_normal((CLASSES, WIDTH)).astype(np.float32)
    np.savez(tmp_path / "head.npz", weight=weight, bias=np.arange(CLASSES, dtype=np.float32))
    train = features(500)
    write(tmp_path / "train.parquet", features=fixed(train), y=pa.array(np.arange(500) % CLASSES))
    return tmp_path


@pytest.fixture
def guard(place, result) -> fdbd.Guard:
    result("fit", "train.parquet", "--head", "head.npz", "--network-never-saw-data")
    return fdbd.load("guard.safetensors")


def assert_equals(table, decision: fdbd.Decision) -> None:
    assert table["row"].to_pylist() == list(range(len(decision.scores)))
    assert table["label"].to_pylist() == decision.labels.tolist()
    assert table["is_ood"].to_pylist() == decision.is_ood.tolist()
    np.testing.assert_allclose(table["score"].to_numpy(), decision.scores.numpy(), rtol=1e-5)
    np.testing.assert_allclose(table["p_value"].to_numpy(), decision.p_values.numpy(), rtol=1e-6)


def test_the_fit_equals_one_in_memory_on_the_rows_that_were_not_held_out(place, result) -> None:
    found = result(
        "fit",
        "train.parquet",
        "--head",
        "head.npz",
        "--detector",
        "mds",
        "--network-never-saw-data",
    )
    assert (found["fit_rows"], found["calibration_rows"]) == (400, 100)
    held = np.random.default_rng(0).permutation(500) < 100
    arrays = np.load("head.npz")
    train = torch.from_numpy(features(500))
    labels = torch.arange(500) % CLASSES
    expected = fdbd.Guard(fdbd.Head(arrays["weight"], arrays["bias"]), "mds")
    expected.fit(fdbd.Batch(train[~held], None, labels[~held])).calibrate(fdbd.Batch(train[held]))
    fresh = fdbd.Batch(torch.from_numpy(features(50, seed=3)))
    torch.testing.assert_close(
        fdbd.load("guard.safetensors").decide(fresh).scores, expected.decide(fresh).scores
    )
    assert found["threshold"] == pytest.approx(expected.threshold.value.tolist())


@pytest.mark.parametrize(
    "form", ["fixed", "list", "large list", "float64", "many groups", "npz", "compressed npz"]
)
def test_every_form_of_the_same_features_gives_the_guards_own_decisions(
    form, guard, place, result
) -> None:
    values = features(300, seed=1)
    path = place / "new.parquet"
    if form == "npz":
        path = place / "new.npz"
        np.savez(path, features=values)
    elif form == "compressed npz":
        path = place / "new.npz"
        np.savez_compressed(path, features=values)
    elif form == "fixed":
        write(path, features=fixed(values))
    elif form == "many groups":
        write(path, 7, features=fixed(values), name=pa.array(["x"] * 300))
    elif form == "float64":
        write(path, features=fixed(values.astype(np.float64)))
    else:
        kind = pa.list_(pa.float32()) if form == "list" else pa.large_list(pa.float32())
        write(path, features=pa.array(values.tolist(), kind))
    summary = result("score", "guard.safetensors", path, "--out", "scores.parquet")
    assert (summary["rows"], summary["computed"], summary["unreadable"]) == (300, 300, 0)
    decision = guard.decide(fdbd.Batch(torch.from_numpy(values)))
    assert_equals(pq.read_table("scores.parquet"), decision)
    assert summary["ood"] == int(decision.is_ood.sum())


def test_logits_in_the_file_are_the_ones_that_count(guard, place, result) -> None:
    values = features(40, seed=1)
    logits = np.random.default_rng(2).standard_normal((40, CLASSES)).astype(np.float32)
    write(place / "new.parquet", features=fixed(values), logits=fixed(logits))
    result("score", "guard.safetensors", "new.parquet")
    decision = guard.decide(fdbd.Batch(torch.from_numpy(values), torch.from_numpy(logits)))
    assert_equals(pq.read_table("scores.parquet"), decision)


@pytest.mark.parametrize("is_fixed", [True, False])
def test_null_and_non_finite_rows_are_out_of_distribution_and_leave_the_others_alone(
    is_fixed, guard, place, result
) -> None:
    values = features(20, seed=1)
    rows: list = values.tolist()
    rows[3] = None
    rows[5][2] = float("nan")
    rows[6][0] = float("inf")
    rows[7][1] = None
    bad = {3, 5, 6, 7}
    if not is_fixed:
        rows[9] = rows[9][:4]
        bad |= {9}
    kind = pa.list_(pa.float32(), WIDTH) if is_fixed else pa.list_(pa.float32())
    try:
        write(place / "new.parquet", features=pa.array(rows, kind))
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this version of pyarrow writes no null lists of fixed size: {error}")
    try:
        pq.read_table(place / "new.parquet")
    except pa.ArrowInvalid as error:
        # 25.0, the last one for Python 3.10.
        pytest.skip(f"this version of pyarrow does not read what it has written: {error}")
    summary = result("score", "guard.safetensors", "new.parquet")
    assert summary["unreadable"] == len(bad)
    table = pq.read_table("scores.parquet").to_pylist()
    decision = guard.decide(fdbd.Batch(torch.from_numpy(values)))
    for number, row in enumerate(table):
        assert row["row"] == number
        if number in bad:
            assert row["is_ood"]
            assert row["label"] is None
            assert row["error"]
        else:
            assert row["error"] is None
            assert row["label"] == int(decision.labels[number])
            assert row["score"] == pytest.approx(float(decision.scores[number]), rel=1e-5)
    assert table[3]["error"] == "its features are null"


def test_a_file_without_rows_gives_a_table_without_rows(guard, place, result) -> None:
    write(place / "new.parquet", features=fixed(features(0)))
    assert result("score", "guard.safetensors", "new.parquet")["rows"] == 0
    assert pq.read_table("scores.parquet").num_rows == 0


def test_a_guard_of_features_becomes_a_graph_of_features(guard, place, result) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result("export", "guard.safetensors", "--example", "train.parquet")
    session = onnxruntime.InferenceSession("guard.onnx", providers=["CPUExecutionProvider"])
    values = features(30, seed=1)
    score = session.run(["score"], {"features": values})[0]
    np.testing.assert_allclose(
        score, guard.decide(fdbd.Batch(torch.from_numpy(values))).scores, rtol=1e-4, atol=1e-4
    )


def test_a_head_may_lie_in_safetensors_and_lack_a_bias(place, result) -> None:
    save_file({"weight": torch.from_numpy(np.load("head.npz")["weight"])}, "head.safetensors")
    assert (
        result("fit", "train.parquet", "--head", "head.safetensors", "--network-never-saw-data")[
            "fit_rows"
        ]
        == 400
    )
    assert fdbd.load("guard.safetensors").detector.head_bias.abs().sum() == 0


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"vectors": fixed(features(3))}, "no column 'features'"),
        ({"features": pa.array([1.0, 2.0])}, "expected lists of numbers"),
        ({"features": pa.array([["a"], ["b"]])}, "expected lists of numbers"),
        ({"features": fixed(features(3)[:, :5].copy())}, "5 features per row"),
        ({"features": fixed(features(3)), "logits": fixed(features(3))}, "6 logits per row"),
    ],
)
def test_a_file_of_another_shape_is_one_clear_sentence(columns, words, guard, place, run) -> None:
    write(place / "new.parquet", **columns)
    for arguments in (
        ("score", "guard.safetensors", "new.parquet"),
        ("fit", "new.parquet", "--head", "head.npz", "--network-never-saw-data"),
    ):
        code, _, err = run(*arguments)
        assert code == 2
        assert words in err
        assert len(err.strip().splitlines()) == 1
    assert not list(place.glob("scores*"))


def test_damaged_files_and_other_mistakes_are_one_clear_sentence(guard, place, run) -> None:
    whole = (place / "train.parquet").read_bytes()
    (place / "cut.parquet").write_bytes(whole[:-100])
    (place / "junk.npz").write_bytes(b"PK\x03\x04 junk")
    np.savez(place / "images.npz", x=np.zeros((2, 8, 8, 3), np.uint8))
    np.savez(place / "nothing.npz", y=np.zeros(3))
    np.savez(place / "objects.npz", features=np.array([[{}]]))
    for arguments, words in [
        (("score", "guard.safetensors", "cut.parquet"), "not a readable Parquet file"),
        (("score", "guard.safetensors", "nowhere.parquet"), "no such file"),
        (("score", "guard.safetensors", "junk.npz"), "not a readable NPZ file"),
        (("score", "guard.safetensors", "nothing.npz"), "expected images under 'x', or 'features'"),
        (("score", "guard.safetensors", "objects.npz"), "expected numbers"),
        (("score", "guard.safetensors", "images.npz"), "takes features"),
        (("score", "guard.safetensors", "train.parquet", "--batch-size", 0), "at least 1"),
        (("score", "guard.safetensors", "train.parquet", "--address", "auto"), "--engine ray"),
        (
            ("score", "guard.safetensors", "train.parquet", "--out", "no/where.csv"),
            "does not exist",
        ),
        (("explain", "guard.safetensors", "train.parquet"), "features"),
        (("fit", "cifar10-ce", "train.parquet", "--head", "head.npz"), "there is no model"),
        (("fit", "train.parquet", "--head", "guard.npz"), "no head"),
        (("fit", "images.npz", "--head", "head.npz", "--network-never-saw-data"), "images"),
        (
            (
                "fit",
                "train.parquet",
                "--head",
                "head.npz",
                "--holdout",
                "1",
                "--network-never-saw-data",
            ),
            "between 0 and 1",
        ),
        (
            (
                "fit",
                "train.parquet",
                "--head",
                "head.npz",
                "--tpr",
                "0.9",
                "--alpha",
                "0.1",
                "--network-never-saw-data",
            ),
            "not both",
        ),
    ]:
        code, _, err = run(*arguments)
        assert code == 2, arguments
        assert words in err, (arguments, err)
        assert len(err.strip().splitlines()) == 1, err


def test_a_row_of_another_width_is_named_wherever_it_stands(guard, place, result, run) -> None:
    values = features(8, seed=1)
    logits = (values @ np.load("head.npz")["weight"].T).tolist()
    rows: list = values.tolist()
    rows[0] = []
    rows[1] = rows[1] + [0.0]
    logits[2] = logits[2][:3]
    logits[3] = None
    lists = pa.list_(pa.float32())
    write(place / "new.parquet", features=pa.array(rows, lists), logits=pa.array(logits, lists))
    assert result("score", "guard.safetensors", "new.parquet")["unreadable"] == 4
    table = pq.read_table("scores.parquet")
    assert table["error"].to_pylist()[:5] == [
        "it has 0 features, expected 6",
        "it has 7 features, expected 6",
        "it has 3 logits, expected 4",
        "its logits are null",
        None,
    ]
    decision = guard.decide(fdbd.Batch(torch.from_numpy(values[4:]), torch.tensor(logits[4:])))
    np.testing.assert_allclose(table["score"].to_numpy()[4:], decision.scores, rtol=1e-5)

    write(
        place / "none.parquet", features=pa.array(values.tolist(), lists), logits=pa.nulls(8, lists)
    )
    assert result("score", "guard.safetensors", "none.parquet")["unreadable"] == 8
    write(place / "short.parquet", features=pa.array([[1.0, 2.0]] * 5, lists))
    assert result("score", "guard.safetensors", "short.parquet")["unreadable"] == 5
    code, _, err = run("fit", "short.parquet", "--head", "head.npz", "--network-never-saw-data")
    assert code == 2
    assert "no row that can be read; the first: row 0: it has 2 features, expected 6" in err


@pytest.mark.parametrize("form", ["parquet", "npz"])
def test_labels_that_are_text_trouble_only_a_fit(form, guard, place, result, run) -> None:
    values = features(20, seed=1)
    names = np.array(["ant", "bee"] * 10)
    if form == "npz":
        column = "y"
        np.savez(place / "new.npz", features=values, y=names)
    else:
        column = "label"
        write(place / "new.parquet", features=fixed(values), label=pa.array(names))
    result("score", "guard.safetensors", f"new.{form}")
    assert_equals(
        pq.read_table("scores.parquet"), guard.decide(fdbd.Batch(torch.from_numpy(values)))
    )
    code, _, err = run("fit", f"new.{form}", "--head", "head.npz", "--network-never-saw-data")
    assert code == 2
    assert f"the column {column!r} is" in err
    assert len(err.strip().splitlines()) == 1


def test_rows_that_would_not_fit_in_memory_are_refused_by_the_footer(
    guard, place, run, monkeypatch
) -> None:
    lists = pa.list_(pa.float32())
    write(place / "long.parquet", features=pa.array([[0.0] * 500, [0.0] * 6], lists))
    write(place / "many.parquet", 200_000, features=pa.nulls(200_000, lists))
    monkeypatch.setattr("fdbd.data.features.SPARE_VALUES", 100)
    monkeypatch.setattr("fdbd.data.features.FREE_ROWS", 1000)
    for arguments in (
        ("score", "guard.safetensors"),
        ("fit", "--head", "head.npz", "--network-never-saw-data"),
    ):
        code, _, err = run(*arguments, "long.parquet")
        assert (code, err.count("\n")) == (2, 1)
        assert "506 features are far more than 6 per row" in err
        code, _, err = run(*arguments, "many.parquet")
        assert (code, err.count("\n")) == (2, 1)
        assert "claims 200,000 rows in" in err


def test_a_lack_of_memory_is_one_clear_sentence(run, monkeypatch) -> None:
    def score_files(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 9 PiB")

    monkeypatch.setattr("fdbd.jobs.scoring.score_files", score_files)
    code, _, err = run("score", "guard.safetensors", "new.parquet")
    assert code == 2
    assert err.startswith(
        "fdbd: there is not enough memory (Unable to allocate 9 PiB): give a smaller --batch-size"
    )


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_nearest_boundaries_and_discoveries_are_columns_if_asked_for(
    ending, guard, place, result, run
) -> None:
    values = features(300, seed=1)
    many = torch.from_numpy(features(5000, seed=2))
    # The most suspicious.
    values[:40] = many[guard.score(fdbd.Batch(many)).argsort()[:40]]
    values[7] = np.nan
    write(place / "new.parquet", group=40, features=fixed(values))
    found = result(
        "score",
        "guard.safetensors",
        "new.parquet",
        "--out",
        f"s.{ending}",
        "--nearest",
        "--fdr",
        "0.2",
    )
    why = guard.explain(fdbd.Batch(torch.from_numpy(values)))
    expected = why.decision.discoveries(0.2)
    assert 0 < expected.sum() < 300
    assert found["discoveries"] == expected.sum()
    if ending == "csv":
        rows = list(csv.DictReader(Path("s.csv").read_text(encoding="utf-8").splitlines()))
        nearest = [row["nearest"] or None for row in rows]
        named = [row["discovery"] == "true" for row in rows]
    else:
        table = pq.read_table("s.parquet")
        nearest = table["nearest"].to_pylist()
        named = table["discovery"].to_pylist()
    assert nearest == [
        None if row == 7 else str(label) for row, label in enumerate(why.nearest.tolist())
    ]
    assert named == expected.tolist()
    gallery = read_scores(place / f"s.{ending}")
    assert {row["name"]: row["nearest"] for row in gallery} == {
        str(row): label for row, label in enumerate(nearest)
    }
    result("score", "guard.safetensors", "new.parquet", "--out", "plain.parquet")
    assert {"nearest", "discovery"}.isdisjoint(pq.read_schema("plain.parquet").names)
    code, _, err = run(
        "score", "guard.safetensors", "new.parquet", "--out", "folder", "--fdr", "0.2"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "not a folder" in err
