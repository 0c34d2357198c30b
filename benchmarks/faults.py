"""A test with injected faults: kills, swapped inputs, forged files, hostile names, full disks,
forks, Ctrl-C, clusters.

Run ``python benchmarks/faults.py`` (about twenty minutes) or ``--quick`` (two); it prints a table
and, without ``--quick``, writes its rows to docs/reliability.md. Each fault is a function. Each try
has its own folder and seeded random generator, and raises `Broken` if a promise does not hold.
Commands run in forks of this process, which computes nothing itself and starts no thread: a fork
costs almost nothing, a new interpreter seconds. Clusters come last.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import fdbd
from fdbd.cli import main as fdbd_main
from fdbd.core import artifact
from fdbd.jobs import scoring
from fdbd.jobs.output import Output

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
MARKS = ("<!-- the trial's table begins -->", "<!-- the trial's table ends -->")
TITLE = ("| fault | tried | result |", "|---|---|---|")
ROWS, WIDTH, CLASSES = 20_000, 8, 4
HANG_SECONDS = 120.0
PARTS_AFTER_CTRL_C = 2
"""Parts that were in work when the signal came may be finished."""


class Broken(Exception):
    """A promise that did not hold."""


class TooLate(Exception):
    """The command was over before the fault happened to it, so the try says nothing."""


TRIES_TOO_LATE = 5
"""How often a try that came too late is repeated before it counts as a failure."""


class Fault(NamedTuple):
    name: str
    trial: Callable[[Path, random.Random], str | None]
    tries: int
    quick: int


FAULTS: list[Fault] = []


def fault(name: str, tries: int, quick: int = 1) -> Callable[[Any], Any]:
    """Adds a function to the test, with its number of tries."""

    def add(trial: Callable[[Path, random.Random], str | None]) -> Any:
        FAULTS.append(Fault(name, trial, tries, quick))
        return trial

    return add


def expect(holds: Any, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)


# ── processes
# ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Run(NamedTuple):
    code: int
    """Exit code, or minus the signal."""
    text: str
    """Standard output and error."""
    seconds: float


class Child:
    """A fork of this process that does something in a folder, in a new session."""

    def __init__(self, folder: Path, work: Callable[[], Any]) -> None:
        self.log = folder / f"log-{time.monotonic_ns()}"
        self.start = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                os.setsid()
                os.chdir(folder)
                output = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                for stream in (1, 2):
                    os.dup2(output, stream)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                work()
                code = 0
            except SystemExit as left:
                code = left.code if isinstance(left.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self, seconds: float = HANG_SECONDS) -> Run:
        """Waits for its end; a process that hangs is killed, and the promise is broken."""
        while self.is_alive():
            if time.monotonic() - self.start > seconds:
                self.kill()
                raise Broken(f"it hung for {seconds:.0f} s: {self.text()[-200:]}")
            time.sleep(0.01)
        seconds = time.monotonic() - self.start
        return Run(os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.text(), seconds)

    def text(self) -> str:
        return self.log.read_text(errors="surrogateescape") if self.log.exists() else ""

    def kill(self) -> None:
        """Sends SIGKILL to it and to all processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def slow_down() -> None:
    """Small parts and a slow disk, so that faults happen in the middle of the work."""
    scoring.FEATURE_PART_ROWS = 200
    scoring.PART_ROWS = 4
    write = Output.write

    def write_slowly(output: Output, number: int, tables: Any) -> None:
        time.sleep(0.02)
        write(output, number, tables)

    Output.write = write_slowly  # type: ignore[method-assign]


def start_command(folder: Path, *words: object, before: Callable[[], Any] = lambda: None) -> Child:
    """A command of fdbd, in a fork."""

    def work() -> None:
        slow_down()
        before()
        fdbd_main([str(word) for word in words])

    return Child(folder, work)


def command(folder: Path, *words: object, **options: Any) -> Run:
    """Runs a command to its end, which must not be a traceback."""
    run = start_command(folder, *words, **options).wait()
    expect(
        "Traceback" not in run.text and run.code >= 0, f"exit code {run.code}: {run.text[-300:]}"
    )
    return run


def aside(folder: Path, work: Callable[[], Any], seconds: float = HANG_SECONDS) -> str:
    """Does something that would start threads in a fork instead of this process; returns what it
    printed."""

    def told() -> None:
        try:
            work()
        except Broken as broken:
            print(broken)
            sys.exit(3)

    run = Child(folder, told).wait(seconds)
    expect(
        run.code == 0,
        (
            run.text.strip().splitlines()[-1]
            if run.code == 3
            else f"code {run.code}: {run.text[-300:]}"
        ),
    )
    return run.text.strip()


# ── what is worked on
# ──────────────────────────────────────────────────────────────────────────────────────────────

SCORE = ("score", "guard.safetensors", "today.parquet", "--out", "scores.parquet")


def features(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return torch.randn(rows, WIDTH, generator=generator) + labels[:, None], labels


def head() -> fdbd.Head:
    return fdbd.Head(
        torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0)),
        torch.zeros(CLASSES),
    )


def write_table(path: Path, values: torch.Tensor, labels: torch.Tensor) -> None:
    column = pa.FixedSizeListArray.from_arrays(values.numpy().ravel(), WIDTH)
    pq.write_table(
        pa.table({"features": column, "label": labels.numpy()}), path, row_group_size=200
    )


def make_base(base: Path) -> None:
    """Inputs, guards, and the expected output."""
    values, labels = features(2000, 1)
    guard = fdbd.Guard(head(), "fdbd").fit([fdbd.Batch(values)], progress=False)
    guard.calibrate([fdbd.Batch(features(500, 2)[0])], progress=False)
    guard.save(base / "guard.safetensors")
    write_table(base / "train.parquet", values, labels)
    write_table(base / "calibration.parquet", *features(500, 2))
    np.savez(base / "head.npz", weight=head().weight.numpy(), bias=head().bias.numpy())
    for name, seed in (("today", 3), ("other", 4)):
        values, labels = features(ROWS, seed)
        write_table(base / f"{name}.parquet", values, labels)
        np.save(base / f"{name}.npy", guard.decide(fdbd.Batch(values)).scores.numpy())
    draw = np.random.default_rng(0)
    for folder, count in (("photos", 24), ("known", 40)):
        for number in range(count):
            path = base / folder / "ab"[number % 2] / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)


def copy_base(base: Path, place: Path, *names: str) -> None:
    for name in names or ("guard.safetensors", "today.parquet"):
        (shutil.copytree if (base / name).is_dir() else shutil.copy2)(base / name, place / name)


def check_scores(place: Path, *names: str, out: str = "scores.parquet") -> None:
    """The output has each row once, with the scores of one of these inputs."""

    def check() -> None:
        table = pq.read_table(place / out)
        expect(table["row"].to_pylist() == list(range(ROWS)), f"{out} does not have each row once")
        scores = table["score"].to_numpy()
        known = [np.load(BASE / f"{name}.npy") for name in names]
        expect(
            any(np.allclose(scores, each, rtol=1e-5, atol=1e-6) for each in known),
            f"{out} has other scores",
        )

    aside(place, check)


def wait_for_parts(place: Path, child: Child, count: int) -> None:
    """Waits until that many parts of the output exist; TooLate if the command ended earlier."""
    while child.is_alive():
        if len(list(place.glob("scores.parquet.parts/part-*.parquet"))) >= count:
            return
        expect(time.monotonic() - child.start < HANG_SECONDS, "it makes no parts")
        time.sleep(0.001)
    raise TooLate(f"it ended before {count} parts were there: {child.text()[-200:]}")


BASE = Path()

# ── kills and signals
# ──────────────────────────────────────────────────────────────────────────────────────────────


@fault("kill −9 while features are scored, then the same command again", 30, 2)
def kill_scoring(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)
    for count in sorted(chance.sample(range(ROWS // 200), chance.randrange(1, 4))):
        child = start_command(place, *SCORE)
        wait_for_parts(place, child, count)
        child.kill()
    run = command(place, *SCORE)
    expect(run.code == 0, f"the second run: {run.text[-300:]}")
    check_scores(place, "today")
    left = []
    for path in place.iterdir():
        if ".parts" in path.name or path.name.startswith("."):
            left.append(path.name)
    expect(not left, f"drafts are left: {left}")


@fault("kill −9 while images are decoded and scored, then again", 5)
def kill_images(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place, "photos", "images.safetensors")
    words = ("score", "images.safetensors", "photos", "--out", "scores.parquet", "--workers", 2)
    child = start_command(place, *words)
    wait_for_parts(place, child, chance.randrange(1, 6))
    # Only this process: its decoders are to notice.
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + 20
    left = session(child.pid)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = session(child.pid)
    expect(not left, f"processes of the killed command are left: {left}")
    run = command(place, *words)
    expect(run.code == 0, f"the second run: {run.text[-300:]}")
    aside(
        place,
        lambda: expect(
            len(pq.read_table(place / "scores.parquet")) == 24, "rows are lost or doubled"
        ),
    )


def session(leader: int) -> list[int]:
    """Processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, number = path.read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


@fault("kill −9 while a guard is fitted over an older one", 15)
def kill_fit(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place, "guard.safetensors", "train.parquet", "calibration.parquet", "head.npz")
    words = (
        "fit",
        "train.parquet",
        "--head",
        "head.npz",
        "--calibration",
        "calibration.parquet",
        "--detector",
        "mds",
    )
    old = (place / "guard.safetensors").read_bytes()
    os.link(place / "guard.safetensors", place / "link")
    child = start_command(place, *words, "--out", "guard.safetensors")
    time.sleep(chance.uniform(0, 2.5))
    child.kill()
    aside(
        place, lambda: fdbd.load(place / "guard.safetensors").decide(fdbd.Batch(features(5, 3)[0]))
    )
    run = command(place, *words, "--out", "guard.safetensors")
    expect(run.code == 0, f"the second run: {run.text[-300:]}")
    expect((place / "guard.safetensors").read_bytes() != old, "no new guard was written")
    expect((place / "link").read_bytes() == old, "the old guard's file was written to")


@fault("bits of a guard or a monitor are flipped, and nothing else", 30, 6)
def flipped_bits(place: Path, chance: random.Random) -> None:
    """A checksum is there to notice what no other check does."""
    name = chance.choice([*(f"{each}.safetensors" for each in DETECTORS), "monitor.safetensors"])
    copy_base(BASE, place, name, "fdbd.safetensors")
    content = bytearray((place / name).read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    content[chance.randrange(header, len(content))] ^= 1 << chance.randrange(8)
    (place / name).write_bytes(content)

    def load() -> None:
        try:
            if name.startswith("monitor"):
                fdbd.Monitor.load(place / name, fdbd.load(BASE / "fdbd.safetensors"))
            else:
                fdbd.load(place / name)
        except ValueError:
            return
        raise Broken(f"{name} loads with a flipped bit")

    aside(place, load)


@fault("kill −9 while a monitor is saved", 15)
def kill_monitor(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)

    def save_for_ever() -> None:
        guard = fdbd.load("guard.safetensors")
        monitor = fdbd.Monitor(guard)
        values, _ = features(5, 3)
        while True:
            monitor.update(guard.decide(fdbd.Batch(values)))
            monitor.save("monitor.json")

    child = Child(place, save_for_ever)
    while not (place / "monitor.json").exists():
        expect(child.is_alive(), f"no monitor: {child.text()[-300:]}")
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.3))
    child.kill()

    for draft in place.glob(".*.monitor.json"):
        # A younger draft might be another process's.
        os.utime(draft, (0, 0))

    def load_and_save() -> None:
        monitor = fdbd.Monitor.load("monitor.json", fdbd.load("guard.safetensors"))
        monitor.save("monitor.json")

    aside(place, load_and_save)
    left = [path.name for path in place.iterdir() if path.name.startswith(".")]
    expect(not left, f"drafts are left: {left}")


def parts_of(place: Path) -> int:
    """Finished parts of the output."""
    return len(list(place.glob("scores.parquet.parts/part-*.parquet")))


@fault("Ctrl-C while scoring, once or twice, then the same command again", 10)
def interrupt(place: Path, chance: random.Random) -> str:
    copy_base(BASE, place)
    code = "import faults; faults.slow_down(); faults.fdbd_main()"
    here = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    twice = chance.random() < 0.5
    with open(place / "log", "wb") as log:
        words = [sys.executable, "-c", code, *SCORE]
        environment = {**os.environ, "PYTHONPATH": here}
        process = subprocess.Popen(words, cwd=place, env=environment, stdout=log, stderr=log)
        while process.poll() is None and parts_of(place) == 0:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        before = parts_of(place)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        if twice:
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise Broken("it does not stop") from None
    seconds = time.monotonic() - start
    text = (place / "log").read_text()
    if (place / "scores.parquet").exists():
        raise TooLate("it was over before the signal came")
    # The second signal ends it at once, and leaves no core behind.
    ends = (130, -signal.SIGINT) if twice else (130,)
    expect(process.returncode in ends, f"exit code {process.returncode}: {text[-300:]}")
    expect("stopping" in text, f"no word about it: {text[-300:]}")
    expect("Traceback" not in text, f"a traceback: {text[-300:]}")
    begun = parts_of(place) - before
    expect(begun <= PARTS_AFTER_CTRL_C, f"{begun} more parts were written before it stopped")
    expect(command(place, *SCORE).code == 0, "the second run fails")
    check_scores(place, "today")
    return f"stopped within {seconds:.1f} s"


@fault("two commands write one output at once", 8)
def two_runs(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)
    children = [start_command(place, *SCORE) for _ in range(2)]
    runs = [child.wait() for child in children]
    expect(any(run.code == 0 for run in runs), f"none of the two ends well: {runs[0].text[-200:]}")
    expect(
        all(run.code in (0, 2) and "Traceback" not in run.text for run in runs),
        str([run.text for run in runs]),
    )
    for run in runs:
        # Without the lock one of them misses parts that the other has removed.
        is_told = run.code == 0 or "another run is writing" in run.text
        expect(is_told, f"one disturbed the other: {run.text[-200:]}")
    check_scores(place, "today")


# ── inputs and outputs
# ─────────────────────────────────────────────────────────────────────────────────────────────


@fault("the input is replaced by rename while it is scored", 15, 2)
def swap_input(place: Path, chance: random.Random) -> str:
    copy_base(BASE, place, "guard.safetensors", "today.parquet", "other.parquet")
    child = start_command(place, *SCORE)
    wait_for_parts(place, child, chance.randrange(1, ROWS // 250))
    os.replace(place / "other.parquet", place / "today.parquet")
    run = child.wait()
    expect("Traceback" not in run.text, run.text[-300:])
    if run.code:
        expect(not (place / "scores.parquet").exists(), "an error, and yet an output")
        return "refused"
    check_scores(place, "today", "other")
    return "scored as it was"


def same_sized_images(folder: Path, count: int, seed: int) -> list[Path]:
    """Images of noise whose files all have one size and one time."""
    draw = np.random.default_rng(seed)
    folder.mkdir()
    paths = []
    for number in range(count):
        path = folder / f"{number:03}.png"
        Image.fromarray(draw.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
        # No decoder reads what stands behind the image.
        path.write_bytes(path.read_bytes().ljust(5000, b"\0"))
        os.utime(path, (1e9, 1e9))
        paths.append(path)
    return paths


@fault("images are replaced by rename while a folder is scored: same size, same times", 8)
def swap_images(place: Path, chance: random.Random) -> None:
    """Rows without an error are those of the old images."""
    copy_base(BASE, place, "images.safetensors")
    paths = same_sized_images(place / "photos", 120, seed=chance.randrange(1000))
    others = same_sized_images(place / "others", 120, seed=chance.randrange(1000, 2000))
    words = ("score", "images.safetensors", "photos", "--workers", 1, "--out")
    expect(command(place, *words, "before.parquet").code == 0, "it cannot score them undisturbed")
    child = start_command(place, *words, "scores.parquet")
    wait_for_parts(place, child, chance.randrange(1, 4))
    for path, other in zip(paths, others):
        os.replace(other, path)
    run = child.wait()
    expect("Traceback" not in run.text, run.text[-300:])

    def check() -> None:
        expected = pq.read_table(place / "before.parquet")["score"].to_pylist()
        found = pq.read_table(place / "scores.parquet")
        errors = found["error"].to_pylist()
        expect(any(errors), "no row says that its image was replaced")
        for before, score, error in zip(expected, found["score"].to_pylist(), errors):
            is_old = error or abs(score - before) < 1e-4 * abs(before) + 1e-6
            expect(is_old, "a row is that of a new image")

    if run.code == 0:
        aside(place, check)


@fault("the input is replaced between a kill and the next run", 8)
def swap_between(place: Path, chance: random.Random) -> str:
    copy_base(BASE, place, "guard.safetensors", "today.parquet", "other.parquet")
    child = start_command(place, *SCORE)
    wait_for_parts(place, child, chance.randrange(1, ROWS // 250))
    child.kill()
    os.replace(place / "other.parquet", place / "today.parquet")
    run = command(place, *SCORE)
    if not run.code:
        check_scores(place, "other")
    return "refused" if run.code else "scored anew"


@fault("--out names an input: the same path, a link, the guard, a folder", 8, 4)
def out_is_input(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)
    os.symlink("today.parquet", place / "link.parquet")
    os.link(place / "today.parquet", place / "hard.parquet")
    (place / "folder.parquet").mkdir()
    shutil.copy2(place / "guard.safetensors", place / "guard.parquet")
    before = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
    out = ["today.parquet", "link.parquet", "hard.parquet", "folder.parquet", "guard.parquet"][
        chance.randrange(5)
    ]
    guard = "guard.parquet" if out == "guard.parquet" else "guard.safetensors"
    run = command(place, "score", guard, "today.parquet", "--out", out)
    expect(run.code == 2, f"--out {out}: exit code {run.code}")
    for name, content in before.items():
        expect((place / name).read_bytes() == content, f"--out {out}: {name} was changed")


@fault("bytes of an input are changed or cut off: Parquet, NPZ, images", 40, 4)
def garble(place: Path, chance: random.Random) -> str:
    kind = chance.choice(["parquet", "npz", "png"])
    if kind == "png":
        copy_base(BASE, place, "photos", "images.safetensors")
        guard = "images.safetensors"
        data = "photos"
        path = place / "photos" / "a" / "02.png"
    else:
        copy_base(BASE, place)
        guard = "guard.safetensors"
        data = f"today.{kind}"
        path = place / data
        if kind == "npz":
            rows = np.random.default_rng(0).standard_normal((500, WIDTH), dtype=np.float32)
            np.savez(path, features=rows)
    content = bytearray(path.read_bytes())
    for _ in range(chance.randrange(1, 30)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    is_cut = chance.random() < 0.3
    if is_cut:
        content = content[: chance.randrange(len(content))]
    path.write_bytes(content)
    run = command(place, "score", guard, data, "--out", "scores.parquet")
    expect(run.code in (0, 2), f"exit code {run.code}: {run.text[-300:]}")
    expect(len(run.text) < 2000, f"{len(run.text)} letters of complaint: {run.text[:300]}")
    return "refused in a sentence" if run.code else "scored, damaged rows with an error"


@fault("hostile names: control characters, formulas, no UTF-8, 250 letters", 4)
def hostile_names(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place, "photos", "images.safetensors")
    odd = b"\x1b[2J a\nb \x07 =1+1 @SUM(A1) -x +x \xff\xfe \xe2\x80\xae a,b\"c' %s{} <b> \r \t"
    names = [name + b".png" for name in [*odd.split(b" "), b"x" * 246]]
    for name in names:
        (place / "photos" / "a" / os.fsdecode(name)).write_bytes(
            (place / "photos" / "a" / "00.png").read_bytes()
        )
    (place / "photos" / "a" / "\x1b[31mbroken.png").write_bytes(b"no image")
    os.rename(place / "photos" / "b", place / "photos" / "=b\x1b[0m")
    for out in ("scores.parquet", "scores.csv"):
        run = command(place, "score", "images.safetensors", "photos", "--out", out)
        expect(run.code == 0, run.text[-300:])
        bad = {letter for letter in run.text if ord(letter) < 32 and letter not in "\n"}
        expect(not bad, f"control characters {bad} reach the terminal")
    run = command(
        place, "score", "images.safetensors", "photos/a", "--out", "missing/\x1b[2J.parquet"
    )
    expect("\x1b" not in run.text, "control characters of an option reach the terminal")

    def check() -> None:
        import csv

        with open(place / "scores.csv", newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        expect(len(rows) == 24 + len(names) + 1, f"{len(rows)} rows in CSV")
        cells = [row["path"] for row in rows]
        expect(
            not any(cell[0] in "=+-@\t\r" for cell in cells), "a cell of the CSV starts a formula"
        )
        paths = pq.read_table(place / "scores.parquet")["path"].to_pylist()
        expect(len(set(paths)) == len(rows), "paths in Parquet are not told apart")

    aside(place, check)


@fault("FIFOs, sockets, devices, loops of links and 1,200 nested folders among the images", 3)
def odd_files(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place, "photos", "images.safetensors")
    folder = place / "photos" / "a"
    os.mkfifo(folder / "fifo.png")
    # The path may be too long for a socket.
    with contextlib.suppress(OSError):
        socket.socket(socket.AF_UNIX).bind(os.path.relpath(folder / "socket.png"))
    with contextlib.suppress(PermissionError):
        os.mknod(folder / "zero.png", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    os.symlink("..", folder / "loop")
    os.symlink("nowhere.png", folder / "dangling.png")
    os.symlink(place / "photos" / "b", place / "photos" / "linked")
    here = os.getcwd()
    os.chdir(folder)
    for _ in range(1200):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    run = command(place, "score", "images.safetensors", "photos", "--out", "scores.parquet")
    expect(run.code == 0, run.text[-300:])
    subprocess.run(["rm", "-rf", str(folder)], check=True)

    def check() -> None:
        paths = pq.read_table(place / "scores.parquet")["path"].to_pylist()
        expect(
            24 <= len(paths) <= 37 and len(set(paths)) == len(paths),
            f"{len(paths)} rows for 24 images",
        )
        expect(
            not any("fifo" in path or "zero" in path or "socket" in path for path in paths),
            "a device is a row",
        )

    aside(place, check)
    expect("skipped" in run.text, f"no word about what was skipped: {run.text[-300:]}")


@fault("the disk is full while scores are written, then has room again", 12)
def disk_full(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)
    limit = chance.randrange(5_000, 400_000)

    def no_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    run = command(place, *SCORE, before=no_room)
    if run.code:
        expect(not (place / "scores.parquet").exists(), "an error, and yet an output")
        expect(command(place, *SCORE).code == 0, "the second run fails")
    check_scores(place, "today")


# ── numbers and files that lie
# ─────────────────────────────────────────────────────────────────────────────────────

DETECTORS = ("fdbd", "knn", "mds", "vim", "she", "energy", "react+energy", "deviation")


def forge(place: Path, chance: random.Random) -> None:
    """A guard whose file was changed, with a matching checksum, is refused or does not trust what
    is not finite."""
    description, tensors = artifact.read(BASE / f"{chance.choice(DETECTORS)}.safetensors")
    kind = chance.randrange(6)
    if kind < 4:
        name = chance.choice(sorted(tensors))
        tensor = tensors[name].clone()
        flat = tensor.reshape(-1)
        if kind < 2 and tensor.is_floating_point() and len(flat):
            flat[chance.randrange(len(flat))] = chance.choice(
                [float("nan"), float("inf"), -float("inf")]
            )
        elif kind == 2:
            tensor = flat[: chance.randrange(len(flat) + 1)].clone()
        else:
            tensor = chance.choice(
                [tensor.double(), tensor.to(torch.int64), tensor[None], torch.cat([flat, flat])]
            )
        tensors[name] = tensor
    else:
        values = [
            10**9,
            -1,
            0,
            float("nan"),
            float("inf"),
            "x",
            None,
            [],
            {},
            1e308,
            True,
            ["fdbd"] * 1000,
        ]
        place_in = description
        while True:
            inner = [value for value in place_in.values() if isinstance(value, dict) and value]
            if not inner:
                break
            goes_deeper = chance.random() < 0.7
            if not goes_deeper and place_in is not description:
                break
            place_in = chance.choice(inner)
        place_in[chance.choice(sorted(place_in))] = chance.choice(values)
    path = place / "forged.safetensors"
    artifact.write(path, description, tensors)
    # A file that takes longer ends the process.
    signal.alarm(20)
    try:
        guard = fdbd.load(path)
    except ValueError:
        return
    finally:
        signal.alarm(0)
    values, _ = features(16, 5)
    values[3, 2] = float("nan")
    values[7, 1] = float("inf")
    values[11] = -float("inf")
    try:
        decision = guard.decide(fdbd.Batch(values))
    except (ValueError, RuntimeError) as error:
        raise Broken(f"a forged guard loads and then cannot decide: {error}") from None
    trusted = ~decision.is_ood
    expect(not trusted[[3, 7, 11]].any(), "a forged guard accepts a sample that is not finite")
    expect(
        decision.scores[trusted].isfinite().all(),
        "a forged guard accepts a score that is not finite",
    )


@fault("forged guards with right checksums: numbers, lengths, types, options (100 per try)", 15, 1)
def forged_guards(place: Path, chance: random.Random) -> None:
    def many() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(100):
            try:
                forge(place, chance)
            except Broken:
                raise
            except Exception as error:
                raise Broken(f"forgery {number}: {type(error).__name__}: {error}") from None
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        expect(grown < 1500, f"loading took {grown:.0f} MB")

    aside(place, many)


@fault("NaN, infinity and 1e38 in features and logits of every detector (100 per try)", 10)
def not_finite(place: Path, chance: random.Random) -> None:
    def many() -> None:
        guards = [fdbd.load(BASE / f"{name}.safetensors") for name in DETECTORS]
        for _ in range(100 // len(guards) + 1):
            values, _ = features(32, chance.randrange(10**6))
            rows = chance.sample(range(32), 8)
            for row in rows:
                column = chance.randrange(WIDTH)
                values[row, column] = chance.choice([float("nan"), float("inf"), -float("inf")])
            huge = next(row for row in range(32) if row not in rows)
            values[huge] *= chance.choice([1e30, 1e38, 1e-38])
            for name, guard in zip(DETECTORS, guards):
                decision = guard.decide(fdbd.Batch(values))
                expect(decision.is_ood[rows].all(), f"{name} accepts a sample that is not finite")
                expect(not decision.scores.isnan().any(), f"{name} scores NaN")

    aside(place, many)


@fault("infinite and NaN pixels into networks that saturate (ReLU6, tanh, sigmoid, hard-swish)", 8)
def infinite_pixels(place: Path, chance: random.Random) -> None:
    def ask() -> None:
        activation = chance.choice(
            [torch.nn.ReLU6(), torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.Hardswish()]
        )
        layers = [
            torch.nn.Conv2d(3, 6, 3),
            activation,
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
        ]
        model = torch.nn.Sequential(*layers, torch.nn.ReLU6(), torch.nn.Linear(6, 3)).eval()
        images = torch.rand(200, 3, 8, 8)
        guard = fdbd.Guard(model).fit([images[:100]], progress=False)
        guard.calibrate([images[100:]], progress=False)
        bad = torch.rand(20, 3, 8, 8)
        for image in bad:
            image.view(-1)[chance.randrange(192)] = chance.choice(
                [float("nan"), float("inf"), -float("inf")]
            )
        expect(
            guard(bad).is_ood.all(),
            f"{type(activation).__name__}: an image that is not finite is accepted",
        )

    aside(place, ask)


# ── forks
# ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@fault("a guard is loaded, then the process forks or spawns workers that ask it", 8, 2)
def fork_after_load(place: Path, chance: random.Random) -> None:
    copy_base(BASE, place)
    how = chance.choice(["fork", "spawn", "forkserver", "loader", "fork"])
    # In a new interpreter: what is to be shown is that loading starts no threads.
    run = subprocess.run(
        [sys.executable, __file__, "--fork", how],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    expect(run.returncode == 0, f"{how}: {(run.stderr or run.stdout)[-300:]}")


def ask_in_worker(guard: fdbd.Guard, values: torch.Tensor) -> int:
    return int(guard.decide(fdbd.Batch(values)).is_ood.sum())


class Asking(torch.utils.data.Dataset[int]):
    """A dataset whose samples are a guard's decisions."""

    def __init__(self, guard: fdbd.Guard, values: torch.Tensor) -> None:
        self.guard = guard
        self.values = values

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return ask_in_worker(self.guard, self.values)


def fork_and_ask(how: str) -> None:
    import multiprocessing

    guard = fdbd.load("guard.safetensors")
    values, _ = features(5000, 7)
    if how == "loader":
        found = []
        for batch in torch.utils.data.DataLoader(Asking(guard, values), num_workers=2):
            found += batch.tolist()
    else:
        with multiprocessing.get_context(how).Pool(2) as pool:
            found = pool.starmap(ask_in_worker, [(guard, values)] * 4)
    assert set(found) == {ask_in_worker(guard, values)}


# ── a cluster
# ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Nodes:
    """A Ray cluster of two nodes with two CPUs each, on this machine, with other work on its
    cores."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        size = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
        death = {
            "health_check_period_ms": 500,
            "health_check_timeout_ms": 2000,
            "health_check_failure_threshold": 3,
        }
        death |= {
            "grpc_client_keepalive_time_ms": 10_000,
            "grpc_client_keepalive_timeout_ms": 5_000,
        }
        self.size = size
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={**size, "include_dashboard": False, "_system_config": death},
        )
        self.cluster.add_node(**size)
        ray.init(address=self.cluster.address, logging_level="ERROR", log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        self.load = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(max(1, (os.cpu_count() or 2) - 1))
        ]

    def close(self) -> None:
        import ray

        for process in self.load:
            process.kill()
            process.wait()
        ray.shutdown()
        self.cluster.shutdown()


NODES: list[Nodes] = []


def the_cluster() -> Nodes:
    if not NODES:
        NODES.append(Nodes())
    return NODES[0]


def on_cluster(
    place: Path, jobs: int, meanwhile: Callable[[], Any] = lambda: None, **workers: Any
) -> None:
    """Several jobs at once, alternately over files and over a Dataset; each returns every row
    once."""
    import ray

    from fdbd.jobs import ray as on_ray

    the_cluster()
    copy_base(BASE, place)
    failures: list[str] = []
    guard = fdbd.load(place / "guard.safetensors")
    expected = np.sort(np.load(BASE / "today.npy"))
    pool = on_ray.Workers(**{"batch_size": 500, "patience": 60.0, **workers})

    def score_dataset() -> list[float]:
        # Ray's own reading does not survive every loss of a node.
        table = pq.read_table(place / "today.parquet")
        blocks = [table.slice(start, 2500) for start in range(0, ROWS, 2500)]
        scored = on_ray.score(guard, ray.data.from_arrow(blocks), workers=pool)
        return [row["score"] for row in scored.iter_rows()]

    def score_file() -> list[float]:
        opened = scoring.open_guard(place / "guard.safetensors")
        rows = scoring.open_rows(str(place / "today.parquet"))
        parts = list(enumerate(rows.spans(1000)))
        found = []
        for _, tables in pool.run(opened.guard, scoring.Scoring(opened, rows).part, parts):
            for table in tables:
                found += table["score"].tolist()
        return found

    def job(number: int) -> None:
        try:
            found = score_dataset() if number % 2 else score_file()
            expect(len(found) == ROWS, f"{len(found)} rows of {ROWS}")
            is_same = np.allclose(np.sort(found), expected, rtol=1e-5, atol=1e-6)
            expect(is_same, "other scores")
        except BaseException as error:
            failures.append(f"{type(error).__name__}: {str(error)[:300]}")

    threads = [threading.Thread(target=job, args=(number,), daemon=True) for number in range(jobs)]
    for thread in threads:
        thread.start()
    meanwhile()
    deadline = time.monotonic() + HANG_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    expect(not any(thread.is_alive() for thread in threads), f"a job hung for {HANG_SECONDS:.0f} s")
    expect(not failures, "; ".join(failures))


@fault("Ray under load: a job over files", 10)
def ray_files(place: Path, chance: random.Random) -> None:
    on_cluster(place, 1)


@fault("Ray under load: two jobs at once", 15)
def ray_two_jobs(place: Path, chance: random.Random) -> None:
    on_cluster(place, 2, count=chance.choice([None, 2, 4]))


@fault("Ray under load: fractional CPUs, two jobs at once", 10)
def ray_fractions(place: Path, chance: random.Random) -> None:
    on_cluster(place, 2, count=2, cpus=chance.choice([0.5, 0.7, 1.5]))


@fault("Ray under load: a foreign job holds three of four CPUs", 5)
def ray_foreign(place: Path, chance: random.Random) -> None:
    import ray

    the_cluster()
    holder = ray.remote(num_cpus=1.5)(type("Holder", (), {"ready": lambda self: True}))
    holders = [holder.remote() for _ in range(2)]
    ray.get([each.ready.remote() for each in holders])
    try:
        on_cluster(place, 1, cpus=0.5)
        told = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                on_cluster(place, 1, cpus=1.0, patience=2.0)
        except Broken as broken:
            told = str(broken)
        expect(told, "a task got CPUs that are not free")
        expect("hung" not in told, told)
        expect("TimeoutError" in told and "CPU" in told, f"it does not say what it needs: {told}")
    finally:
        for each in holders:
            ray.kill(each)


@fault("Ray under load: a node is killed", 5)
def ray_killed_node(place: Path, chance: random.Random) -> None:
    lose_node(place, chance, signal.SIGKILL)


@fault("Ray under load: a node is stopped", 5)
def ray_stopped_node(place: Path, chance: random.Random) -> None:
    lose_node(place, chance, signal.SIGSTOP)


def lose_node(place: Path, chance: random.Random, how: signal.Signals) -> None:
    """Two jobs, while a third node with its workers gets a signal."""
    nodes = the_cluster()
    node = nodes.cluster.add_node(**nodes.size)
    nodes.cluster.wait_for_nodes()

    def lose() -> None:
        time.sleep(chance.uniform(0.5, 3.0))
        [raylet] = [each.process.pid for each in node.all_processes["raylet"]]
        workers = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(raylet)], capture_output=True, text=True, check=False
        )
        for process in (raylet, *map(int, workers.stdout.split())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, how)

    try:
        on_cluster(place, 2, lose)
    finally:
        nodes.cluster.remove_node(node, allow_graceful=False)


# ── the trial
# ──────────────────────────────────────────────────────────────────────────────────────────────────────


def try_fault(each: Fault, tries: int, folder: Path) -> tuple[str, bool]:
    """The outcome of the tries of one fault, and whether the promise held."""
    failures: list[str] = []
    answers: dict[str, int] = {}
    for number in range(tries):
        try:
            answer = try_once(each, folder, number)
        except (Broken, TooLate) as broken:
            failures.append(" ".join(str(broken).split()))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        else:
            if answer is not None:
                answers[answer] = answers.get(answer, 0) + 1
    if failures:
        first = failures[0][:300].replace("|", "/")
        return f"**{len(failures)} of {tries} failed**: {first}", False
    if answers and all(answer.startswith("stopped within") for answer in answers):
        return f"held; {max(answers)}", True
    if not answers:
        return "held", True
    told = ", ".join(f"{count} {answer}" for answer, count in sorted(answers.items()))
    return f"held: {told}", True


def try_once(each: Fault, folder: Path, number: int) -> str | None:
    """One try, in a folder of its own; repeated a few times if the fault came too late."""
    attempt = 0
    while True:
        place = folder / f"{each.trial.__name__}-{number}-{attempt}"
        place.mkdir()
        try:
            return each.trial(place, random.Random(number + 1000 * attempt))
        except TooLate:
            attempt += 1
            if attempt == TRIES_TOO_LATE:
                raise
        finally:
            subprocess.run(["rm", "-rf", str(place)], check=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few tries of each fault, and no cluster; writes no page",
    )
    parser.add_argument("--only", default="", help="functions whose name matches this expression")
    parser.add_argument("--tries", type=int, help="of each fault; writes no page")
    parser.add_argument("--base", type=Path, help="a folder that keeps the data of all faults")
    parser.add_argument("--fork", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    # A shell that starts this in the background has Ctrl-C ignored by it and by what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.fork:
        fork_and_ask(options.fork)
        return 0
    rows: dict[str, str] = {}
    held = True
    with tempfile.TemporaryDirectory(prefix="fdbd-faults-") as name:
        folder = Path(name)
        prepare(options.base or folder / "base")
        for each in FAULTS:
            is_cluster = each.trial.__name__.startswith("ray_")
            if not re.search(options.only, each.trial.__name__) or (options.quick and is_cluster):
                continue
            tries = each.quick if options.quick else each.tries
            tries = options.tries or tries
            start = time.monotonic()
            result, holds = try_fault(each, tries, folder)
            held = held and holds
            rows[each.name] = f"| {each.name} | {tries} | {result} |"
            print(
                f"{rows[each.name]}  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True
            )
        for nodes in NODES:
            nodes.close()
    print("\n".join([*TITLE, *rows.values()]))
    if not options.quick and not options.tries:
        write_page(rows)
    return 0 if held else 1


def write_page(rows: dict[str, str]) -> None:
    """Puts these rows into the table of the page and leaves the rows of other faults."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    old = {
        line.split(" | ")[0].removeprefix("| "): line
        for line in table.splitlines()
        if line.startswith("| ")
    }
    lines = []
    for each in FAULTS:
        line = rows.get(each.name, old.get(each.name))
        if line:
            lines.append(line)
    tried = sum(int(line.split(" | ")[1]) for line in lines)
    told = (
        f"{tried:,} tries; the last of them on {time.strftime('%Y-%m-%d')}, with fdbd"
        f" {fdbd.__version__}."
    )
    page = "\n".join([MARKS[0], "", *TITLE, *lines, "", told, "", MARKS[1]])
    PAGE.write_text(before + page + after, encoding="utf-8")


def prepare(base: Path) -> None:
    """The data that all faults use, unless the folder has them."""
    global BASE
    BASE = base.resolve()
    if (BASE / "whole").exists():
        return
    BASE.mkdir()

    def make() -> None:
        make_base(BASE)
        values, labels = features(500, 1)
        calibration, _ = features(200, 2)
        for name in DETECTORS:
            guard = fdbd.Guard(head(), name).fit([fdbd.Batch(values, None, labels)], progress=False)
            guard.calibrate([fdbd.Batch(calibration)], progress=False)
            guard.save(BASE / f"{name}.safetensors")
        fdbd.Monitor(fdbd.load(BASE / "fdbd.safetensors")).save(BASE / "monitor.safetensors")

    aside(BASE, make)
    run = command(
        BASE, "fit", "cifar10-ce", "known", "--calibration", "photos", "--out", "images.safetensors"
    )
    expect(run.code == 0, run.text)
    (BASE / "whole").touch()


if __name__ == "__main__":
    sys.exit(main())
