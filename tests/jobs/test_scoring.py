"""The scoring engine: rows exactly once, whatever happens to the process."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import fdbd
from fdbd.data.features import RowBatch
from fdbd.data.npz import NpzArray
from fdbd.decision.rows import NOT_FINITE, decide_rows, to_arrow
from fdbd.jobs import scoring
from fdbd.jobs.output import Output

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PACKAGE = str(Path(fdbd.__file__).parents[1])
SLOW_MODEL = """
import time
import torch

class Slow(torch.nn.Sequential):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)

def slow():
    torch.manual_seed(0)
    return Slow(torch.nn.Flatten(), torch.nn.Linear(48, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
"""


def make_guard(width: int = 4, classes: int = 3) -> fdbd.Guard:
    torch.manual_seed(0)
    head = fdbd.Head(torch.randn(classes, width), torch.randn(classes))
    return (
        fdbd.Guard(head)
        .fit(fdbd.Batch(torch.randn(200, width)))
        .calibrate(fdbd.Batch(torch.randn(100, width)))
    )


@pytest.fixture
def slow_job(tmp_path, monkeypatch) -> Path:
    """A folder with 300 images and a guard around a model that takes its time."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scoring, "PART_ROWS", 16)
    (tmp_path / "slowmodel.py").write_text(SLOW_MODEL)
    from fdbd.jobs.fitting import fit_files
    from fdbd.networks.by_name import model_by_name

    folder = tmp_path / "images"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (300, 4, 4, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number:03d}.png")
    (folder / "150.png").write_bytes(b"broken")
    built = model_by_name("slowmodel:slow", preprocess='{"size": 4}')
    engine = scoring.Engine(batch_size=64, workers=1)
    fit_files(built, "images", None, engine, holdout=0.2).guard.save("guard.safetensors")
    return tmp_path


def start(folder: Path, out: str) -> subprocess.Popen[bytes]:
    code = (
        "import fdbd.jobs.scoring as s; s.PART_ROWS = 16; "
        "engine = s.Engine(batch_size=4, workers=1); "
        f"s.score_files('guard.safetensors', 'images', {out!r}, engine, 'slowmodel:slow')"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), PACKAGE]),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=environment)


def kill_when_some_are_done(process: subprocess.Popen[bytes], parts: Path, count: int) -> None:
    while len(list(parts.glob("part-*.parquet"))) < count:
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()


def score(out: str, **options) -> scoring.Summary:
    engine = scoring.Engine(batch_size=4, workers=1)
    return scoring.score_files(
        "guard.safetensors", "images", out, engine, "slowmodel:slow", **options
    )


def test_a_killed_run_goes_on_and_ends_like_one_that_was_left_alone(slow_job) -> None:
    whole = score("whole.parquet")
    assert (whole.rows, whole.computed, whole.unreadable) == (300, 300, 1)
    process = start(slow_job, "killed.parquet")
    parts = slow_job / "killed.parquet.parts"
    kill_when_some_are_done(process, parts, 3)
    assert not (slow_job / "killed.parquet").exists()
    done = len(list(parts.glob("part-*.parquet")))
    stamps = {path: path.stat().st_mtime_ns for path in parts.glob("part-*.parquet")}
    damaged = min(stamps)
    damaged.write_bytes(damaged.read_bytes()[:-20])
    resumed = score("killed.parquet")
    assert resumed.rows == 300
    assert resumed.computed == 300 - 16 * (done - 1)
    killed = pq.read_table("killed.parquet")
    assert killed.equals(pq.read_table("whole.parquet"))
    assert killed["path"].to_pylist() == [f"{number:03d}.png" for number in range(300)]
    assert not parts.exists()


def test_a_folder_as_output_keeps_its_parts_and_is_one_table(slow_job) -> None:
    score("whole.parquet")
    process = start(slow_job, "scores")
    kill_when_some_are_done(process, slow_job / "scores", 2)
    score("scores")
    assert pq.read_table("scores").equals(pq.read_table("whole.parquet"))
    assert score("scores").computed == 0


def test_other_data_do_not_mix_with_what_an_earlier_run_left(slow_job) -> None:
    process = start(slow_job, "scores.parquet")
    kill_when_some_are_done(process, slow_job / "scores.parquet.parts", 1)
    (slow_job / "images" / "299.png").unlink()
    with pytest.raises(ValueError, match="--restart"):
        score("scores.parquet")
    assert score("scores.parquet", restart=True).rows == 299
    assert pq.read_table("scores.parquet").num_rows == 299


def test_two_runs_do_not_write_the_same_output(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("fdbd.jobs.output.PATIENCE_SECONDS", 0.0)
    first, second = (Output(tmp_path / "out.parquet", range(0)) for _ in range(2))
    with first.hold({}), pytest.raises(RuntimeError, match="another run"), second.hold({}):
        pass


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("deaths", range(6))
def test_a_kill_while_the_parts_are_removed_blocks_no_later_run(
    tmp_path, monkeypatch, ending, deaths
) -> None:
    """The n-th removal of a file is the last thing that the run does; then another guard's run, and
    one of the same guard, write the same output."""
    guard = make_guard()
    out = tmp_path / f"scores.{ending}"
    before = Path.unlink
    left = [deaths]

    def dying_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name.endswith(".parts") and out.exists():
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        before(path, missing_ok)

    def write(identity: str) -> None:
        output = Output(out, range(0))
        with output.hold({"guard": identity}):
            for number in range(3):
                rows = RowBatch(range(number, number + 1), fdbd.Batch(torch.ones(1, 4)), {})
                decided = {**decide_rows(guard, rows), "guard": np.array(["00ff"])}
                output.write(number, [decided])
            assert output.finish(3, 3).rows == 3

    monkeypatch.setattr(Path, "unlink", dying_unlink)
    with contextlib.suppress(KeyboardInterrupt):
        write("first")
    assert out.exists()
    monkeypatch.setattr(Path, "unlink", before)
    write("second")
    write("second")
    assert sorted(path.name for path in tmp_path.iterdir()) == [out.name]


def test_drafts_of_a_killed_run_are_removed_and_other_files_stay(tmp_path) -> None:
    out = tmp_path / "out.parquet"
    drafts = [
        tmp_path / ".0badcafe.out.parquet",
        tmp_path / "out.parquet.parts" / ".0badcafe.part-000001.parquet",
    ]
    others = [
        tmp_path / ".0badcafe.other.parquet",
        tmp_path / ".my.out.parquet",
        tmp_path / "0badcafe.out.parquet",
    ]
    (tmp_path / "out.parquet.parts").mkdir()
    for path in (*drafts, *others):
        path.touch()
    with Output(out, range(0)).hold({}):
        assert [path.exists() for path in (*drafts, *others)] == [False, False, True, True, True]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["fine", "unread", "nan"]), max_size=12), st.booleans())
def test_each_row_has_its_own_decision_whatever_its_neighbours_are(
    kinds: list[str], has_names: bool
) -> None:
    guard = GUARD
    values = torch.randn(len(kinds), 4, generator=torch.Generator().manual_seed(1))
    values[[kind == "nan" for kind in kinds]] = float("nan")
    errors = {place: f"broken {place}" for place, kind in enumerate(kinds) if kind == "unread"}
    read = [place for place, kind in enumerate(kinds) if kind != "unread"]
    column = "row"
    names = range(5, 5 + len(kinds))
    if has_names:
        column = "path"
        names = [f"n{place}" for place in range(len(kinds))]
    table = decide_rows(guard, RowBatch(names, fdbd.Batch(values[read]), errors), ["a", "b", "c"])
    table = to_arrow(table).to_pylist()
    assert [row[column] for row in table] == list(names)
    for place, (kind, row) in enumerate(zip(kinds, table)):
        if kind == "fine":
            alone = guard.decide(fdbd.Batch(values[place : place + 1]))
            assert row["score"] == pytest.approx(float(alone.scores[0]), rel=1e-5)
            assert (row["label"], row["is_ood"]) == (int(alone.labels[0]), bool(alone.is_ood[0]))
            assert row["class"] == "abc"[row["label"]]
            assert row["error"] is None
        else:
            assert row["is_ood"]
            assert row["label"] is row["class"] is None
            expected = NOT_FINITE if kind == "nan" else f"broken {place}"
            assert row["error"] == expected


GUARD = make_guard()


@settings(max_examples=20)
@given(
    dtype=st.sampled_from([np.float32, np.float64, np.uint8, np.int64]),
    rest=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    count=st.integers(0, 20),
    compress=st.booleans(),
    cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=5),
)
def test_slices_of_an_array_in_npz_are_those_of_the_array(
    tmp_path_factory, dtype, rest, count, compress, cuts
) -> None:
    array = np.random.default_rng(0).integers(0, 100, (count, *rest)).astype(dtype)
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    save = np.savez_compressed if compress else np.savez
    save(path, other=np.zeros(3), a=array)
    stream = pickle.loads(pickle.dumps(NpzArray(path, "a")))
    assert (len(stream), stream.shape, stream.dtype) == (count, array.shape, array.dtype)
    for start, stop in cuts:
        np.testing.assert_array_equal(stream[start:stop], array[start:stop])


def test_an_npz_that_claims_more_than_it_holds_is_refused_before_memory_is_asked_for(
    tmp_path,
) -> None:
    import io
    import zipfile

    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (10**12, 10**6)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("features.npy", header.getvalue() + b"\0" * 64)
    with pytest.raises(ValueError, match="not what its header says"):
        NpzArray(tmp_path / "a.npz", "features")


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(),
    reason="the peak of a process is read from Linux's /proc",
)
def test_memory_is_the_same_for_ten_times_the_images(slow_job) -> None:
    # Not ru_maxrss, which starts at the peak of the process that started it: this one's.
    code = """
import json, sys
from fdbd.jobs.scoring import Engine, score_files
summary = score_files("guard.safetensors", *sys.argv[1:3], Engine(workers=1), "fastmodel:fast")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([summary.rows, int(peak)]))
"""
    (slow_job / "fastmodel.py").write_text(
        SLOW_MODEL.replace("time.sleep(0.02)", "pass").replace("slow()", "fast()")
    )
    peaks = {}
    for count in (2_000, 20_000):
        pixels = np.random.default_rng(0).integers(0, 255, (count, 32, 32, 3), np.uint8)
        np.savez(slow_job / f"{count}.npz", x=pixels)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(slow_job), PACKAGE]),
            "OMP_NUM_THREADS": "1",
        }
        run = subprocess.run(
            [sys.executable, "-c", code, f"{count}.npz", f"{count}.parquet"],
            cwd=slow_job, env=environment, capture_output=True, check=True,
        )  # fmt: skip
        rows, peaks[count] = json.loads(run.stdout)
        assert rows == count
    assert peaks[20_000] < 1.1 * peaks[2_000]
