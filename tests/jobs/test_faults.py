"""What goes wrong around a job: inputs that change, outputs that are inputs, files that are not
what they seem."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.core import artifact
from fdbd.data import features, npz
from fdbd.decision.rows import decide_rows
from fdbd.jobs import output, scoring
from fdbd.util import files

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WIDTH = 5
BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from fdbd.cli import main
main(sys.argv[2:])
"""


def values(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def write_parquet(path: Path, array: np.ndarray, **more: object) -> Path:
    column = pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    pq.write_table(pa.table({"features": column, **more}), path, row_group_size=100)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a guard of features."""
    monkeypatch.chdir(tmp_path)
    head = fdbd.Head(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0)))
    guard = fdbd.Guard(head).fit(fdbd.Batch(torch.from_numpy(values(200, 1))))
    guard.calibrate(fdbd.Batch(torch.from_numpy(values(100, 2)))).save("guard.safetensors")
    return tmp_path


@pytest.mark.parametrize("form", ["parquet", "npz"])
@pytest.mark.parametrize("how", ["renamed", "rewritten"])
def test_an_input_that_is_replaced_during_a_run_is_an_error_and_no_mixture(
    form, how, place, run, monkeypatch
) -> None:
    monkeypatch.setattr(scoring, "FEATURE_PART_ROWS", 100)
    monkeypatch.setattr(scoring, "FEATURE_THREADS", 1)

    def write(path: Path, seed: int) -> None:
        if form == "parquet":
            write_parquet(path, values(1000, seed))
        else:
            np.savez(path, features=values(1000, seed))

    target = place / f"today.{form}"
    other = place / f"other.{form}"
    write(target, 3)
    original = output.Output.write

    def swap(self: output.Output, number: int, tables: object) -> None:
        original(self, number, tables)
        if number == 2:
            if how == "renamed":
                write(other, 4)
                other.rename(target)
            else:
                write(target, 4)

    monkeypatch.setattr(output.Output, "write", swap)
    code, _, err = run("score", "guard.safetensors", target)
    assert (code, err.count("\n")) == (2, 1)
    assert "was changed or replaced" in err
    assert not (place / "scores.parquet").exists()
    monkeypatch.setattr(output.Output, "write", original)
    code, _, err = run("score", "guard.safetensors", target)
    assert (code, "--restart" in err) == (2, True)
    assert run("score", "guard.safetensors", target, "--restart")[0] == 0


@pytest.mark.parametrize("link", [None, "symbolic", "hard"])
@pytest.mark.parametrize("lost", ["guard.safetensors", "today.parquet"])
def test_an_output_that_is_an_input_is_refused_before_any_work(link, lost, place, run) -> None:
    write_parquet(place / "today.parquet", values(10))
    content = (place / lost).read_bytes()
    out = place / lost
    if link == "symbolic":
        out = place / "link.parquet"
        out.symlink_to(place / lost)
    elif link == "hard":
        out = place / "link.parquet"
        out.hardlink_to(place / lost)
    code, _, err = run("score", "guard.safetensors", "today.parquet", "--out", out)
    assert (code, err.count("\n")) == (2, 1)
    assert "is also an input" in err
    code, _, err = run(
        "fit",
        "today.parquet",
        "--head",
        "guard.safetensors",
        "--calibration",
        "today.parquet",
        "--out",
        out,
    )
    assert (code, "is also an input" in err) == (2, True)
    assert (place / lost).read_bytes() == content


def test_a_folder_or_a_device_in_place_of_the_output_is_one_sentence(place, run) -> None:
    write_parquet(place / "today.parquet", values(10))
    (place / "folder.csv").mkdir()
    os.mkfifo(place / "pipe.csv")
    (place / "file").touch()
    for out, words in (
        ("folder.csv", "is a folder"),
        ("pipe.csv", "not a regular file"),
        ("file", "expected a folder"),
    ):
        code, _, err = run("score", "guard.safetensors", "today.parquet", "--out", out)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
    code, _, err = run("score", "guard.safetensors", "pipe.parquet")
    assert (code, "no such file" in err) == (2, True)


def test_csv_and_parquet_say_the_same_and_csv_starts_no_formula(tmp_path) -> None:
    names = [
        "=1+1.png",
        "+a",
        "-b",
        "@c",
        "'=d",
        "'e",
        "plain, with comma",
        "caf\udce9",
        "two\nlines",
        "x",
    ]
    guard = (
        fdbd.Guard(fdbd.Head(torch.eye(3)))
        .fit(fdbd.Batch(torch.randn(50, 3)))
        .calibrate(fdbd.Batch(torch.randn(50, 3)))
    )
    inputs = torch.randn(9, 3)
    inputs[2] = float("nan")
    batch = features.RowBatch(names, fdbd.Batch(inputs), {9: "=broken"})
    table = {**decide_rows(guard, batch, ["-a", "b", "c"]), "guard": np.array(["00ff"] * 10)}
    for name in ("a.csv", "a.parquet"):
        out = output.Output(tmp_path / name, names)
        with out.hold({}):
            out.write(0, [table])
            assert out.has(0, range(10))
            assert not out.has(0, range(9))
            assert not out.has(1, range(10))
            totals = out.finish(10, 1)
        assert (totals.rows, totals.unreadable) == (10, 2)
    with open(tmp_path / "a.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    arrow = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["path"] for row in arrow] == [*names[:7], r"caf\udce9", *names[8:]]
    for row, expected in zip(rows, arrow):
        for column, value in expected.items():
            cell = row[column]
            if isinstance(value, str):
                assert not cell.startswith(("=", "+", "-", "@"))
                # What looks like a formula has one apostrophe more.
                if re.match(r"''*[=+@-]", cell):
                    cell = cell[1:]
                assert cell == value
            elif isinstance(value, float):
                assert float(cell) == value
            elif value is None:
                assert cell == ""
            else:
                assert cell == str(value).lower()


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_part_whose_cells_are_damaged_or_missing_is_not_taken_for_one(
    tmp_path, name: str
) -> None:
    out = output.Output(tmp_path / name, range(1))
    with out.hold({}):
        for columns, cells in (
            (out.columns, ["0", "1", "", "0.5", "a half", "true", ""]),
            (["row"], ["0"]),
        ):
            if name == "a.csv":
                out.path(0).write_text(f"{','.join(columns)}\n{','.join(cells)}\n")
            else:
                pq.write_table(pa.table({"row": [0]}), out.path(0))
            assert not out.has(0, range(1))


def test_an_output_of_no_rows_is_a_header(tmp_path) -> None:
    guard = (
        fdbd.Guard(fdbd.Head(torch.eye(3)))
        .fit(fdbd.Batch(torch.rand(9, 3)))
        .calibrate(fdbd.Batch(torch.rand(9, 3)))
    )
    out = output.Output(tmp_path / "a.csv", range(0), fdr=0.1)
    with out.hold({}):
        out.write(
            0, [decide_rows(guard, features.RowBatch(range(0), fdbd.Batch(torch.rand(0, 3)), {}))]
        )
        assert out.finish(0, 1) == output.Totals(0, 0, 0, 0)
    assert (tmp_path / "a.csv").read_text().split() == [
        "row,label,class,score,p_value,is_ood,error,guard,discovery"
    ]


def test_an_engine_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="engine is 'spark', expected 'local' or 'ray'"):
        scoring.Engine("spark")


def test_a_killed_run_to_csv_goes_on(place, run, result, monkeypatch) -> None:
    monkeypatch.setattr(scoring, "FEATURE_PART_ROWS", 100)
    np.savez(place / "today.npz", features=values(1000, 3))
    original = output.Output.write

    def fail(self: output.Output, number: int, tables: object) -> None:
        if number == 4:
            raise OSError("the disk is full")
        original(self, number, tables)

    monkeypatch.setattr(output.Output, "write", fail)
    assert run("score", "guard.safetensors", "today.npz", "--out", "s.csv")[0] == 2
    monkeypatch.setattr(output.Output, "write", original)
    damaged = place / "s.csv.parts" / "part-000001.csv"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    assert result("score", "guard.safetensors", "today.npz", "--out", "s.csv")["computed"] == 700
    result("score", "guard.safetensors", "today.npz", "--out", "whole.csv")
    assert (place / "s.csv").read_bytes() == (place / "whole.csv").read_bytes()


def test_a_compressed_array_is_unpacked_once_whatever_the_number_of_parts(
    place, result, monkeypatch
) -> None:
    monkeypatch.setattr(scoring, "FEATURE_PART_ROWS", 50)
    np.savez_compressed(place / "today.npz", features=values(2000, 3))
    np.savez(place / "plain.npz", features=values(2000, 3))
    opened: list[str] = []
    original = npz.NpzArray.__init__

    def note(self: npz.NpzArray, path: str, *more: object) -> None:
        opened.append(os.path.basename(path))
        original(self, path, *more)

    monkeypatch.setattr(npz.NpzArray, "__init__", note)
    result("score", "guard.safetensors", "today.npz", "--out", "a.parquet")
    # To look at its header, to check it, and to read it.
    assert opened.count("today.npz") <= 4
    result("score", "guard.safetensors", "plain.npz", "--out", "b.parquet")
    assert pq.read_table("a.parquet").equals(pq.read_table("b.parquet"))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([["a"] * WIDTH]), "expected numbers"),
        (np.zeros((3, WIDTH), np.longdouble), "expected numbers"),
        (np.zeros((3, WIDTH), np.complex64), "expected numbers"),
        (np.zeros((3, WIDTH + 1), np.float32), "6 features per row"),
    ],
)
def test_arrays_of_other_kinds_are_one_sentence(array, words, place, run) -> None:
    np.savez(place / "today.npz", features=array)
    code, _, err = run("score", "guard.safetensors", "today.npz")
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_integers_are_read_exactly_if_float32_cannot_hold_them(place, result) -> None:
    numbers = np.random.default_rng(0).integers(-(2**40), 2**40, (50, WIDTH))
    expected = fdbd.load("guard.safetensors").decide(
        fdbd.Batch(torch.from_numpy(numbers.astype(np.float64)))
    )
    write_parquet(place / "a.parquet", numbers)
    np.savez(place / "b.npz", features=numbers, logits=np.zeros((50, 3), ">i2"))
    result("score", "guard.safetensors", "a.parquet", "--out", "a.out.parquet")
    table = pq.read_table("a.out.parquet")
    np.testing.assert_allclose(table["score"].to_numpy(), expected.scores, rtol=1e-6)
    assert result("score", "guard.safetensors", "b.npz", "--out", "b.csv")["unreadable"] == 0


def test_doubled_columns_and_too_few_class_names_are_one_sentence(place, run) -> None:
    column = pa.FixedSizeListArray.from_arrays(pa.array(values(10).reshape(-1)), WIDTH)
    pq.write_table(
        pa.Table.from_arrays([column, column], names=["features", "features"]),
        place / "twice.parquet",
    )
    code, _, err = run("score", "guard.safetensors", "twice.parquet")
    assert (code, "several columns called 'features'" in err) == (2, True)
    guard = fdbd.load("guard.safetensors")
    guard.about["class_names"] = ["ant", "bee"]
    guard.save("guard.safetensors")
    write_parquet(place / "today.parquet", values(10))
    code, _, err = run("score", "guard.safetensors", "today.parquet")
    assert (code, "names 2 classes, and its head has 3" in err) == (2, True)


@pytest.mark.parametrize(
    "batch", [fdbd.Batch(torch.randn(3, 7)), fdbd.Batch(torch.randn(3, WIDTH), torch.randn(3, 7))]
)
def test_features_and_logits_of_another_width_are_one_sentence_in_decide(batch, place) -> None:
    with pytest.raises(ValueError, match="have shape"):
        fdbd.load("guard.safetensors").decide(batch)


@pytest.mark.parametrize(
    ("missing", "arguments", "expected"),
    [
        ("pyarrow", ("score", "guard.safetensors", "today.npz", "--out", "s.csv"), None),
        ("pyarrow", ("score", "guard.safetensors", "today.npz"), ("pyarrow", "report")),
        ("PIL", ("fit", "cifar10-ce", "photos", "--calibration", "photos"), ("Pillow", "vision")),
    ],
)  # fmt: skip
def test_a_missing_extra_is_one_sentence_and_csv_needs_none(
    missing, arguments, expected, place
) -> None:
    np.savez(place / "today.npz", features=values(10))
    (place / "photos").mkdir()
    (place / "photos" / "a.png").write_bytes(b"")
    environment = {**os.environ, "PYTHONPATH": str(Path(fdbd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, missing, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if expected is None:
        assert done.returncode == 0, done.stderr
        assert len((place / "s.csv").read_text().splitlines()) == 11
    else:
        package, extra = expected
        sentence = f"fdbd: {package} is not installed; run: pip install 'fdbd[{extra}]'\n"
        assert (done.returncode, done.stderr) == (2, sentence)


def test_control_characters_in_names_do_not_reach_the_terminal(place, run) -> None:
    np.savez(place / "\x1b[31m.npz", other=np.zeros(3))
    code, out, err = run("score", "guard.safetensors", "\x1b[31m.npz")
    assert code == 2
    assert "\x1b" not in out + err
    assert r"\x1b[31m.npz" in err
    write_parquet(place / "\x1b[32m.parquet", values(10))
    code, out, err = run("score", "guard.safetensors", "\x1b[32m.parquet", "--out", "\x1b[33m.csv")
    assert (code, "\x1b" in out + err) == (0, False)
    code, out, _ = run(
        "score", "guard.safetensors", "\x1b[32m.parquet", "--out", "\x1b[33m.csv", "--json"
    )
    assert json.loads(out)["out"] == "\x1b[33m.csv"


def test_the_guards_file_is_read_once(place, result, monkeypatch) -> None:
    write_parquet(place / "today.parquet", values(10))
    opened: list[object] = []
    original = artifact.safe_open
    monkeypatch.setattr(
        artifact,
        "safe_open",
        lambda *given, **more: opened.append(given) or original(*given, **more),
    )
    monkeypatch.setattr(files, "hash_file", opened.append)
    result("score", "guard.safetensors", "today.parquet")
    assert len(opened) == 1


def test_saving_removes_what_killed_saves_left(place) -> None:
    draft = place / ".0badcafe.guard.safetensors"
    young = place / ".1badcafe.guard.safetensors"
    draft.touch()
    young.touch()
    os.utime(draft, (0, 0))
    fdbd.load("guard.safetensors").save("guard.safetensors")
    assert (draft.exists(), young.exists()) == (False, True)
