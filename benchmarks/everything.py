"""All benchmarks in one run, as `make benchmarks` starts it: RESULTS.md and its plots are written
anew, with the same commit in every section.

    python benchmarks/everything.py [--quick] [--only NAME …] [--allow-load 0.5]

What is not measured in this run, or fails, is not on the page; the page then says so, and the exit
code is 1. The quick form takes some 25 minutes on two cores, the whole one some two hours. Run
nothing beside it: if the machine is busy at the start, it says so and stops.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from _common import COMMIT, LOAD_AT_START, ONE_RUN, QUICK, RESULTS, commit, machine


class Script(NamedTuple):
    """A script with its arguments in the whole and in the quick form."""

    name: str
    whole: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    quick_only: bool = True
    """Whether the quick form is less than the whole one."""
    needs_data: bool = False
    """Whether it cannot run without the files that FDBD_DATA names."""


SCRIPTS = [
    Script("score", quick=(), quick_only=False),
    Script("batch_one", quick=("--seconds", "0.3")),
    Script("cold_start", quick=("--repeat", "3")),
    Script(
        "scale",
        whole=("--growth", "--ray"),
        quick=("--rows", "100000", "--detectors", "fdbd", "mds", "energy"),
    ),
    Script("scoring"),
    Script("extraction"),
    Script("detectors"),
    Script("networks"),
    Script("choice"),
    Script("onnx_overhead", quick=(), quick_only=False),
    Script("analysis"),
    Script("ray_scaling", quick=("--images", "4000", "--rounds", "1")),
    Script("serving", quick=("--seconds", "2", "--rounds", "2")),
    # Quality, which no other load on the machine changes.
    Script("bundle_codes", quick=(), quick_only=False, needs_data=True),
    Script("segmentation", quick=("--images", "40"), needs_data=True),
    Script("many_labels", needs_data=True),
    Script("cosine_head", needs_data=True),
]
LIMIT = 3 * 3600
"""Seconds after which a script is ended."""


def run(script: Script, is_quick: bool, page: Path) -> str | None:
    """Run one script; why it failed, or None."""
    arguments = script.quick if is_quick else script.whole
    environment = {**os.environ, ONE_RUN: str(page), COMMIT: commit()}
    environment.pop(QUICK, None)
    if is_quick and script.quick_only:
        environment[QUICK] = "1"
    path = Path(__file__).with_name(f"{script.name}.py")
    command = [sys.executable, "-W", "ignore", str(path), *arguments]
    print(f"\n── {script.name} {' '.join(arguments)}", flush=True)
    try:
        done = subprocess.run(command, env=environment, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMIT // 3600} hours"
    if done.returncode:
        return f"it ended with code {done.returncode}"
    return None


def introduction(is_quick: bool, failed: dict[str, str], wanted: list[str], minutes: float) -> str:
    """The first lines of the page."""
    command = "make benchmarks QUICK=1" if is_quick else "make benchmarks"
    day = datetime.now(timezone.utc).date().isoformat()
    lines = [
        "# Benchmark results",
        f"Written by one run of `{command}` on {day}, in {minutes:.0f} minutes, at commit "
        f"{commit()}, with a load average of {LOAD_AT_START:.1f} before it started. "
        "Ratios are of times in the same run. Each section names its script, which renews that "
        "section alone.",
        machine(),
    ]
    left_out = []
    without_data = []
    for script in SCRIPTS:
        if script.name in wanted:
            continue
        if script.needs_data and "FDBD_DATA" not in os.environ:
            without_data.append(script.name)
        else:
            left_out.append(script.name)
    if left_out:
        lines.append(f"Not measured in this run: {', '.join(left_out)}.")
    if without_data:
        lines.append(f"Not measured, since FDBD_DATA names no data: {', '.join(without_data)}.")
    for name, why in failed.items():
        lines.append(f"`benchmarks/{name}.py` failed: {why}.")
    return "\n\n".join(lines) + "\n"


def main() -> None:
    names = [script.name for script in SCRIPTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--allow-load", type=float, default=0.5, help="load average up to which it starts"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="the page")
    options = parser.parse_args()
    if options.allow_load < LOAD_AT_START:
        sys.exit(
            f"the machine is busy (load average {LOAD_AT_START:.1f}): wait until it is idle, or "
            f"say --allow-load {LOAD_AT_START + 0.5:.1f}, and the page will tell"
        )
    wanted = []
    for script in SCRIPTS:
        has_data = "FDBD_DATA" in os.environ or not script.needs_data
        if script.name in options.only and has_data:
            wanted.append(script.name)
        elif script.name in options.only:
            print(f"{script.name} is left out: it needs the data that FDBD_DATA names", flush=True)
    failed: dict[str, str] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fdbd-benchmarks-") as folder:
        page = Path(folder) / "RESULTS.md"
        for script in SCRIPTS:
            if script.name not in wanted:
                continue
            why = run(script, options.quick, page)
            if why is not None:
                failed[script.name] = why
                print(f"{script.name} failed: {why}", flush=True)
        if not page.exists():
            sys.exit("no script has written a section: the page stays as it was")
        text = page.read_text(encoding="utf-8")
        sections = text[text.index("\n## ") :]
        minutes = (time.monotonic() - started) / 60
        opening = introduction(options.quick, failed, wanted, minutes)
        page.write_text(opening + sections, encoding="utf-8")
        plots = options.out.parent / "plots"
        shutil.rmtree(plots, ignore_errors=True)
        if (page.parent / "plots").exists():
            shutil.copytree(page.parent / "plots", plots)
        shutil.copyfile(page, options.out)
    print(f"\n{options.out}: {minutes:.0f} minutes, {len(failed)} scripts failed")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
