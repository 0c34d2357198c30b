"""Whether the trial of faults and the crash harness notice what they are there to notice.

Each mutation takes one safeguard out of a copy of the package: a file is written in place, a
checksum is not compared, a row is dropped. The rows of `faults.py` and the operations of
`tests/crashes/harness.py` that should notice are then run on that copy; a mutation that none of
them notices is a row that cannot fail. Before that they run on an unchanged copy, where each of
them has to hold.

Run ``python benchmarks/fault_mutations.py`` (about twenty minutes, Linux, a C compiler); it prints
a table and writes its rows to docs/reliability.md. ``--only`` tries some.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

# Imported once, for all forks: the package itself is imported by each of them.
import numpy  # noqa: F401
import PIL.Image  # noqa: F401
import pyarrow.parquet  # noqa: F401
import torch  # noqa: F401

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
MARKS = ("<!-- the table of mutations begins -->", "<!-- the table of mutations ends -->")
FAULTS = ROOT / "benchmarks" / "faults.py"
HARNESS = ROOT / "tests" / "crashes" / "harness.py"
INTERPOSER = ROOT / "tests" / "crashes" / "interposer.c"
SECONDS = 1200.0
"""How long one check may take."""


class Edit(NamedTuple):
    """A text of one file of the package, and what stands there instead."""

    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A safeguard that is taken away.

    Attributes:
        name: what the package does now.
        edits: how.
        rows: functions of `faults.py` that should notice, with the number of tries.
        operations: operations of the crash harness that should notice.
    """

    name: str
    edits: tuple[Edit, ...]
    rows: tuple[tuple[str, int], ...] = ()
    operations: tuple[str, ...] = ()


FILES = "util/files.py"
OUTPUT = "jobs/output.py"
MUTATIONS = [
    Mutation(
        "files are written in place, not beside it and renamed",
        (
            Edit(FILES, "    draft.touch()\n    usual", "    draft = target\n    usual"),
            Edit(
                FILES,
                "    usual = draft.stat().st_mode\n",
                "    draft.touch()\n    usual = 0o644\n",
            ),
            Edit(FILES, "        draft.unlink(missing_ok=True)\n\n\n@", "        pass\n\n\n@"),
        ),
        (("kill_fit", 3), ("kill_monitor", 3)),
        ("save", "report"),
    ),
    Mutation(
        "files are not flushed to the disk before the rename",
        (Edit(FILES, "        _to_disk(draft)\n", ""),),
        (),
        ("save", "report"),
    ),
    Mutation(
        "the folder is not flushed to the disk after the rename",
        (
            Edit(
                FILES,
                "        os.replace(draft, target)\n        _to_disk(target.parent)",
                "        os.replace(draft, target)",
            ),
        ),
        (),
        ("save", "report"),
    ),
    Mutation(
        "a draft stays if writing it fails",
        (Edit(FILES, "        draft.unlink(missing_ok=True)\n\n\n@", "        pass\n\n\n@"),),
        (),
        ("save", "monitor"),
    ),
    Mutation(
        "drafts of killed runs are not removed",
        (
            Edit(
                FILES,
                "            if time.time() - path.stat().st_mtime >= older_than:",
                "            if False:",
            ),
        ),
        (("kill_monitor", 6),),
        ("save",),
    ),
    Mutation(
        "the checksum is not compared",
        (
            Edit(
                "core/artifact.py",
                '    if _digest(metadata["fdbd"], tensors) != metadata["sha256"]:',
                "    if False:",
            ),
        ),
        (("flipped_bits", 12),),
    ),
    Mutation(
        "an output may be an input",
        (Edit(FILES, "        if is_same:\n", "        if False:\n"),),
        (("out_is_input", 8),),
    ),
    Mutation(
        "the last row of each part is dropped, and not counted",
        (
            Edit(
                OUTPUT,
                "self._format.write(draft, map(self._format.table, tables), self.columns)",
                "self._format.write(draft, (self._format.table(each)[:-1] for each in tables), self.columns)",
            ),
            Edit(OUTPUT, "        return len(facts.is_ood) == len(rows)", "        return True"),
            Edit(OUTPUT, "        if totals.rows != expected:", "        if False:"),
        ),
        (("kill_scoring", 1),),
        ("score_parquet",),
    ),
    Mutation(
        "finished parts are scored again and written twice",
        (
            Edit(
                OUTPUT,
                "        for path in paths:\n            table = self._format.read(path)\n            facts",
                "        for path in [*paths, paths[-1]]:\n            table = self._format.read(path)\n            facts",
            ),
            Edit(OUTPUT, "        if totals.rows != expected:", "        if False:"),
        ),
        (("kill_scoring", 1),),
        ("score_csv",),
    ),
    Mutation(
        "parts of another input are taken over (no key)",
        (Edit("jobs/scoring.py", '            "data": self.rows.key,', '            "data": "",'),),
        (("swap_between", 3),),
    ),
    Mutation(
        "a changed input is not noticed",
        (
            Edit(
                FILES,
                '    if now != before:\n        raise ValueError(\n            f"{os.fspath(path)} was changed',
                '    if False:\n        raise ValueError(\n            f"{os.fspath(path)} was changed',
            ),
        ),
        (("swap_input", 6),),
    ),
    Mutation(
        "a replaced image is not noticed",
        (Edit("data/images.py", "        return now != before\n", "        return False\n"),),
        (("swap_images", 2),),
    ),
    Mutation(
        "two runs hold the lock at once",
        (Edit(FILES, "        file_lock.acquire(blocking=wait)\n", "        pass\n"),),
        (("two_runs", 6),),
    ),
    Mutation(
        "parts of a finished output are removed before they are marked as done with",
        (
            Edit(OUTPUT, "        write_json(about, _FINISHED)\n", "        about.unlink()\n"),
            Edit(
                OUTPUT,
                "            part.unlink()\n        about.unlink()\n",
                "            part.unlink()\n",
            ),
        ),
        (),
        ("score_parquet", "score_csv"),
    ),
    Mutation(
        "an error while a part is written is ignored",
        (
            Edit(
                OUTPUT,
                "        with beside(self.path(number)) as draft:",
                "        with contextlib.suppress(OSError), beside(self.path(number)) as draft:",
            ),
            Edit(
                OUTPUT,
                "        paths = [self.path(number) for number in range(count)]",
                "        paths = [path for number in range(count) if (path := self.path(number)).exists()]",
            ),
            Edit(OUTPUT, "        if totals.rows != expected:", "        if False:"),
        ),
        (("disk_full", 6),),
        ("score_parquet",),
    ),
    Mutation(
        "OpenVINO's old model stays while its weights are replaced",
        (Edit("export/openvino.py", "            remove(target)\n", ""),),
        (),
        ("export_openvino",),
    ),
    Mutation(
        "Ctrl-C is not answered",
        (
            Edit(
                "cli.py",
                "            with answer_interrupts(STOPPING):",
                "            signal.signal(signal.SIGINT, signal.SIG_IGN)\n            with contextlib.nullcontext():",
            ),
            Edit("cli.py", "import os\n", "import contextlib\nimport os\n"),
        ),
        (("interrupt", 1),),
    ),
    Mutation(
        "decoding processes do not end with the run that started them",
        (Edit("data/decoder_process.py", "        os._exit(1)", "        pass"),),
        (("kill_images", 3),),
    ),
    Mutation(
        "a score that is not finite is accepted",
        (
            Edit(
                "decision/stages.py",
                "        is_trusted = scores < torch.inf\n",
                "        is_trusted = torch.ones_like(scores, dtype=torch.bool)\n        scores = scores.nan_to_num(1e9, 1e9, 1e9)\n",
            ),
        ),
        (("not_finite", 1), ("forged_guards", 1)),
    ),
    Mutation(
        "pixels that are not finite are accepted",
        (
            Edit(
                "decision/stages.py",
                "            finite = rows_finite(inputs)\n            self._warn",
                "            self._warn",
            ),
        ),
        (("infinite_pixels", 4),),
    ),
    Mutation(
        "a guard's file is not tried when it is loaded",
        (
            Edit(
                "decision/guard_file.py",
                "    detector = saved.detector\n    if detector.needs",
                "    return\n    detector = saved.detector\n    if detector.needs",
            ),
        ),
        (("forged_guards", 4),),
    ),
    Mutation(
        "control characters reach the terminal",
        (
            Edit(
                "util/terminal.py", "    if text.isascii() and text.isprintable():", "    if True:"
            ),
        ),
        (("hostile_names", 1),),
    ),
    Mutation(
        "a cell of a CSV file may be a formula",
        (
            Edit(
                "jobs/formats.py",
                "    if isinstance(value, str) and _FORMULA.match(value):",
                "    if False:",
            ),
        ),
        (("hostile_names", 1),),
    ),
    Mutation(
        "FIFOs and devices are read",
        (
            Edit(
                "data/images.py",
                '    return kind if stat.S_ISREG(mode) else "neither a file nor a folder"',
                "    return kind",
            ),
        ),
        (("odd_files", 1),),
    ),
    Mutation(
        "a damaged image is a traceback",
        (
            Edit(
                "data/decoder_process.py",
                "        except ImageError as error:\n            failures.append(Failure(row, str(error)))\n",
                "",
            ),
        ),
        (("garble", 8), ("hostile_names", 1)),
    ),
    Mutation(
        "loading a guard starts threads",
        (
            Edit(
                "decision/guard_file.py",
                "    guard = run_apart(assemble)\n",
                "    guard = assemble()\n    torch.ones(1 << 22).mul_(2).sum()\n    (torch.ones(2048, 2048) @ torch.ones(2048, 2048)).sum()\n",
            ),
        ),
        (("fork_after_load", 5),),
    ),
]


class Outcome(NamedTuple):
    """What a check on one copy of the package said."""

    held: bool
    words: str


def copy_package(place: Path, edits: Iterable[Edit] = ()) -> Path:
    """A folder for PYTHONPATH with the package, changed by these edits."""
    copy = place / "src"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place / "whole" / "fdbd", copy / "fdbd")
    for edit in edits:
        path = copy / "fdbd" / edit.file
        text = path.read_text(encoding="utf-8")
        count = text.count(edit.old)
        if count != 1:
            raise SystemExit(f"{edit.file} has {count} times, expected once: {edit.old!r}")
        path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return copy


def run_faults(place: Path, copy: Path, row: str, tries: int) -> str:
    """What `faults.py` says of one row on a copy of the package, in a fork of this process, which
    has imported what takes long."""
    log = place / "log"
    log.write_bytes(b"")
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 3
        try:
            os.environ["PYTHONPATH"] = str(copy)
            sys.path[:0] = [str(copy), str(FAULTS.parent)]
            sys.argv[0] = str(FAULTS)
            import faults

            words = ["--only", f"^{row}$", "--tries", str(tries), "--base", str(place / "base")]
            code = faults.main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.waitpid(child, 0)
    return log.read_text(errors="replace")


def run_row(place: Path, copy: Path, row: str, tries: int) -> Outcome:
    """One row of `faults.py` on a copy of the package."""
    said = run_faults(place, copy, row, tries)
    failed = re.search(r"\*\*(\d+ of \d+) failed\*\*: (.*?) \|", said)
    if failed:
        return Outcome(False, f"{failed[1]} tries: {failed[2]}")
    if "held" not in said:
        # The trial could not even be prepared, which is no notice of any promise.
        raise SystemExit(f"{row} did not run: {said[-1500:]}")
    return Outcome(True, "held")


def run_operation(copy: Path, operation: str, library: Path) -> Outcome:
    """One operation of the crash harness on a copy of the package; every seventh call of one that
    takes long."""
    every = "7" if operation.startswith(("export", "score")) else "1"
    words = [str(HARNESS), operation, "--every", every]
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "LD_PRELOAD": str(library),
            "OMP_NUM_THREADS": "1",
            "FDBD_CACHE": home,
        }
        done = subprocess.run(
            [sys.executable, *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"operation')]
    findings = [json.loads(line) for line in lines if "what" in line]
    if findings:
        return Outcome(False, f"{len(findings)} findings: {findings[0]['what']}")
    if not lines:
        raise SystemExit(f"{operation} did not run: {(done.stdout + done.stderr)[-1500:]}")
    return Outcome(True, "held")


def shown(words: str) -> str:
    """What a check said, on one line of a table."""
    one_line = " ".join(words.split()).replace("|", "/").replace("<", "‹").replace(">", "›")
    return re.sub(r"/\S*/", "…/", one_line)[:110]


class Check(NamedTuple):
    """A row of faults, or an operation of the crash harness."""

    name: str
    run: Callable[[Path], Outcome]
    """On a copy of the package."""


def checks_of(mutation: Mutation, place: Path, library: Path) -> list[Check]:
    """What should notice a mutation, rows first."""
    checks = []
    for row, tries in mutation.rows:
        checks.append(Check(row, partial(_row_on, place, row, tries)))
    for operation in mutation.operations:
        checks.append(Check(f"crashes: {operation}", partial(_operation_on, operation, library)))
    return checks


def _row_on(place: Path, row: str, tries: int, copy: Path) -> Outcome:
    return run_row(place, copy, row, tries)


def _operation_on(operation: str, library: Path, copy: Path) -> Outcome:
    return run_operation(copy, operation, library)


def try_mutation(mutation: Mutation, place: Path, library: Path) -> tuple[bool, str]:
    """Whether a mutation was noticed, and its line of the table. Checks are run until one of them
    notices."""
    copy = copy_package(place, mutation.edits)
    held = []
    for check in checks_of(mutation, place, library):
        outcome = check.run(copy)
        if not outcome.held:
            words = shown(outcome.words)
            return True, f"| {mutation.name} | `{check.name}` | {words} |"
        held.append(f"`{check.name}`")
    return False, f"| {mutation.name} | **nothing** | not by {', '.join(held)} |"


def try_unchanged(mutations: list[Mutation], place: Path, library: Path) -> None:
    """SystemExit if a check fails on the unchanged package: its notice would prove nothing."""
    copy = copy_package(place)
    done = set()
    for mutation in mutations:
        for check in checks_of(mutation, place, library):
            if check.name in done:
                continue
            done.add(check.name)
            outcome = check.run(copy)
            print(f"unchanged: {check.name}: {outcome.words}", file=sys.stderr, flush=True)
            if not outcome.held:
                raise SystemExit(f"{check.name} fails on the unchanged package: {outcome.words}")


def write_page(lines: dict[str, str]) -> None:
    """Puts these lines, by the names of their mutations, into the table of the page, and leaves
    those of other mutations."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    known = {line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines()}
    known.update(lines)
    rows = [known[mutation.name] for mutation in MUTATIONS if mutation.name in known]
    noticed = sum("**nothing**" not in row for row in rows)
    told = f"{noticed} of {len(rows)} noticed, the last of them on {time.strftime('%Y-%m-%d')}."
    title = ["| what the changed package does | noticed by | in these words |", "|---|---|---|"]
    page = "\n".join([MARKS[0], "", *title, *rows, "", told, "", MARKS[1]])
    PAGE.write_text(before + page + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="mutations whose name matches this expression")
    parser.add_argument("--no-baseline", action="store_true", help="skip the unchanged package")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if re.search(options.only, mutation.name)]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("the crash harness needs a C compiler")
    lines: dict[str, str] = {}
    all_noticed = True
    with tempfile.TemporaryDirectory(prefix="fdbd-mutations-") as name:
        place = Path(name)
        library = place / "interposer.so"
        words = [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            "-o",
            library,
            INTERPOSER,
            "-ldl",
            "-lpthread",
        ]
        subprocess.run(words, check=True)
        # The package as it is now, whatever is edited meanwhile.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "fdbd", place / "whole" / "fdbd", ignore=ignored)
        run_faults(place, copy_package(place), "of no name", 1)
        if not options.no_baseline:
            try_unchanged(chosen, place, library)
        for mutation in chosen:
            start = time.monotonic()
            is_noticed, line = try_mutation(mutation, place, library)
            all_noticed = all_noticed and is_noticed
            lines[mutation.name] = line
            print(f"{line}  {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    print("\n".join(lines.values()))
    write_page(lines)
    return 0 if all_noticed else 1


if __name__ == "__main__":
    sys.exit(main())
