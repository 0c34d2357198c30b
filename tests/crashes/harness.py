"""Crashes at every call: an operation is run once for each call that changes a file, and that call
fails or ends the process.

Run by `tests/crashes/test_crashes.py` in a process with the library of `interposer.c` preloaded:

    LD_PRELOAD=interposer.so python harness.py OPERATION [--every N] [--modes kill,half,fail,full]

Folders are listed in alphabetical order, or with --backwards from its end: file systems list them
in any order, and so they are emptied in any order.

Each try copies the prepared folder, forks, and runs the operation in the child. Then

- what the operation writes is the old version or the new one, whole;
- an error is an OSError, or a sentence on one line, and leaves no draft behind;
- an undisturbed run flushes each file to the disk before its rename, and the folder after it;
- the same operation, run again, succeeds and leaves just the files that an undisturbed run leaves.

What did not hold is printed as JSON, one line each; the last line counts the tries.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MODES = {"kill": 1, "half": 2, "fail": 3, "full": 4}
TRY_SECONDS = 300.0
DRAFT = re.compile(r"^\.[0-9a-f]{8}\.")


class Operation(NamedTuple):
    """Something that writes files.

    Attributes:
        prepare: fills an empty folder with the inputs and an old version of the output.
        run: does the operation in the folder.
        state: what the output says, read as a user would; None if there is none. It raises if the
            output is damaged.
        may_remain: names that a failed run may leave for its next run to continue from.
        may_be_missing: whether a crash may leave no output, if its parts cannot be replaced at once.
        partial: whether a state between old and new is allowed (a folder of finished parts).
    """

    prepare: Callable[[Path], None]
    run: Callable[[Path], None]
    state: Callable[[Path], Any]
    may_remain: Callable[[str], bool] = lambda name: False
    may_be_missing: bool = False
    partial: bool = False


class Interposer:
    """The preloaded library."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "crash_arm"):
            sys.exit("the library of interposer.c is not preloaded")
        self._library.crash_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._library.crash_count.restype = ctypes.c_long
        self._library.crash_name.restype = ctypes.c_char_p
        self._library.crash_name.argtypes = [ctypes.c_long]

    def arm(self, folder: Path, point: int, mode: int) -> None:
        self._library.crash_arm(os.fsencode(folder), point, mode)

    def calls(self) -> list[str]:
        count = self._library.crash_count()
        return [self._library.crash_name(index).decode() for index in range(count)]


class Ended(NamedTuple):
    """How a child ended."""

    signal: int
    code: int
    error: str
    calls: list[str]


def run_in_child(
    operation: Operation, folder: Path, interposer: Interposer, point: int, mode: int
) -> Ended:
    """Runs the operation in a fork, with a fault at one call (mode 0: none)."""
    with tempfile.TemporaryDirectory() as outside:
        report = Path(outside) / "report.json"
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            _be_child(operation, folder, interposer, point, mode, report)
        status = _wait(child)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        found = {"error": "", "calls": []}
        if report.exists():
            found = json.loads(report.read_text())
    if os.WIFSIGNALED(status):
        return Ended(os.WTERMSIG(status), 0, found["error"], found["calls"])
    return Ended(0, os.WEXITSTATUS(status), found["error"], found["calls"])


def _be_child(
    operation: Operation,
    folder: Path,
    interposer: Interposer,
    point: int,
    mode: int,
    report: Path,
) -> None:
    """The child's life: never returns."""
    error = ""
    code = 0
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    captured = os.open(report.with_name("stderr"), os.O_CREAT | os.O_RDWR)
    os.dup2(captured, 2)
    interposer.arm(folder, point, mode)
    try:
        operation.run(folder)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        if code:
            error = "exit: " + report.with_name("stderr").read_text(errors="replace")[-2000:]
    except OSError as failed:
        code = 1
        error = f"OSError: {failed}"
    except BaseException:
        code = 1
        error = "raised: " + traceback.format_exc()[-2000:]
    calls = interposer.calls()
    interposer.arm(Path("/nonexistent"), 0, 0)
    report.write_text(json.dumps({"error": error, "calls": calls}))
    os._exit(min(code, 255))


def _wait(child: int) -> int:
    """The child's status; a child that takes too long is ended."""
    deadline = time.monotonic() + TRY_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)


class _Sorted:
    """`os.scandir` in a fixed order."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Sorted:
        return self

    def __next__(self) -> Any:
        return next(self._entries)

    def __enter__(self) -> _Sorted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def list_in_order(backwards: bool) -> None:
    """From here on this process lists folders alphabetically, or backwards."""
    scandir = os.scandir

    def in_order(*arguments: Any) -> _Sorted:
        with scandir(*arguments) as found:
            return _Sorted(sorted(found, key=lambda entry: str(entry.name), reverse=backwards))

    os.scandir = in_order  # type: ignore[assignment]


def listing(folder: Path) -> list[str]:
    """All files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def unsafe_renames(calls: list[str], files: list[str]) -> list[str]:
    """Files that got their name by a rename, but were not flushed to the disk before it, or whose
    folder was not flushed after it: a power cut may then leave an empty file."""
    unsafe = []
    for place, call in enumerate(calls):
        what, _, path = call.partition(" ")
        if what != "rename" or path.lstrip("/") not in files:
            continue
        folder, _, name = path.rpartition("/")
        draft = re.compile(rf"fsync {re.escape(folder)}/\.[0-9a-f]{{8}}\.{re.escape(name)}$")
        is_flushed = any(draft.match(earlier) for earlier in calls[:place])
        if not is_flushed or f"fsync {folder}" not in calls[place:]:
            unsafe.append(path)
    return unsafe


def read_state(operation: Operation, folder: Path) -> tuple[Any, str]:
    """The state, or the reason why it cannot be read."""
    try:
        return operation.state(folder), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def age_drafts(folder: Path) -> None:
    """Makes drafts two hours old: a later run may take them for those of a killed one."""
    then = time.time() - 7200
    for path in folder.rglob("*"):
        if DRAFT.match(path.name):
            os.utime(path, (then, then))


class Trial:
    """All tries of one operation."""

    def __init__(self, name: str, operation: Operation, place: Path) -> None:
        self.name = name
        self.operation = operation
        self.place = place
        self.interposer = Interposer()
        self.findings: list[dict[str, Any]] = []
        self.tries = 0
        self.prepared = place / "prepared"
        self.prepared.mkdir()
        operation.prepare(self.prepared)
        self.old = operation.state(self.prepared)
        whole = self._copy()
        ended = run_in_child(operation, whole, self.interposer, 0, 0)
        if ended.code or ended.signal:
            sys.exit(f"the undisturbed operation {name} failed: {ended}")
        self.new = operation.state(whole)
        self.allowed = [self.old, self.new]
        if operation.may_be_missing:
            self.allowed.append(None)
        self.files = listing(whole)
        self.calls = ended.calls
        for name in unsafe_renames(self.calls, self.files):
            note = {
                "operation": name,
                "what": "renamed without a flush to the disk before or after",
            }
            self.findings.append(note)
        if self.new == self.old:
            sys.exit(f"the operation {name} changes nothing: the trial would prove nothing")

    def run(self, modes: list[str], every: int, offset: int) -> None:
        for mode in modes:
            for point in range(1 + offset, len(self.calls) + 1, every):
                call = self.calls[point - 1]
                if mode == "half" and not re.match(r"p?write|fwrite", call):
                    continue
                self._try(mode, point, call)

    def _copy(self) -> Path:
        folder = self.place / "try"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.prepared, folder)
        return folder

    def _try(self, mode: str, point: int, call: str) -> None:
        self.tries += 1
        folder = self._copy()
        ended = run_in_child(self.operation, folder, self.interposer, point, MODES[mode])

        def note(what: str) -> None:
            finding = {"operation": self.name, "mode": mode, "point": point, "call": call}
            self.findings.append({**finding, "what": what})

        state, problem = read_state(self.operation, folder)
        if problem:
            note(f"the output is damaged: {problem}")
        elif state not in self.allowed and not self.operation.partial:
            note("the output is neither the old nor the new one")
        if mode in ("fail", "full"):
            self._check_error(ended, folder, call, state, note)
        age_drafts(folder)
        again = run_in_child(self.operation, folder, self.interposer, 0, 0)
        if again.signal or again.code:
            note(f"the same operation fails afterwards: {again.error.strip()[-400:]}")
            return
        state, problem = read_state(self.operation, folder)
        if problem or state != self.new:
            note(f"the same operation ends with another output afterwards {problem}")
        left = set(listing(folder)) ^ set(self.files)
        if left:
            note(f"other files than after an undisturbed run: {sorted(left)}")

    def _check_error(
        self, ended: Ended, folder: Path, call: str, state: Any, note: Callable[[str], None]
    ) -> None:
        """A failed call is reported, or does not matter; and drafts are removed."""
        if ended.signal:
            note(f"ended by signal {ended.signal}")
            return
        if ended.code == 0 and state != self.new and not self.operation.partial:
            note("ended well, without the new output")
        if ended.error.startswith("raised:"):
            note(f"another error than OSError: {ended.error[-400:]}")
        if ended.error.startswith("exit:") and "Traceback" in ended.error:
            note(f"a traceback: {ended.error[-400:]}")
        known = {*self.files, *listing(self.prepared)}
        could_not_remove = call.startswith(("unlink", "rmdir"))
        drafts = [
            name
            for name in listing(folder)
            if name not in known and not self.operation.may_remain(name)
        ]
        if drafts and not could_not_remove:
            note(f"left behind after an error: {drafts}")


def main() -> None:
    from operations import OPERATIONS, UNSAFE

    known = {**OPERATIONS, **UNSAFE}

    parser = argparse.ArgumentParser()
    parser.add_argument("operation", choices=sorted(known))
    parser.add_argument("--every", type=int, default=1, help="try every N-th call")
    parser.add_argument("--offset", type=int, default=0, help="begin so many calls later")
    parser.add_argument("--backwards", action="store_true", help="list folders from the end")
    parser.add_argument("--modes", default="kill,half,fail,full")
    options = parser.parse_args()
    list_in_order(options.backwards)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "home"
        home.mkdir()
        trial = Trial(options.operation, known[options.operation](), Path(place).resolve())
        trial.run(options.modes.split(","), options.every, options.offset)
    for finding in trial.findings:
        print(json.dumps(finding))
    print(json.dumps({"operation": trial.name, "calls": len(trial.calls), "tries": trial.tries}))


if __name__ == "__main__":
    main()
