"""Shared by all benchmark scripts: interleaved timing, the description of the machine, and sections
of RESULTS.md.

A script calls ``interleaved({...})`` for its measurements and ``write_section("Title", markdown)``
for its results.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
_TITLE = (
    "# Benchmark results\n\nEach section is written by the script that it names; run that script to"
    " renew it.\n"
)


class Timings:
    """Seconds per call, by contender and round."""

    def __init__(self, rounds: dict[str, list[float]]) -> None:
        self.rounds = rounds

    def seconds(self, name: str) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times as long `name` takes as `base`: the median over rounds of the ratio within
        a round, so that a slow moment of the machine hits both sides alike."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[base]))


def verdict(missed: Sequence[str]) -> str:
    """The end of a section: the missed targets, one sentence each."""
    if not missed:
        return "All targets reached."
    return "\n".join(["**Targets missed:**", "", *(f"- {line}" for line in missed)])


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    calls: int = 4,
    dropped: int = 1,
) -> Timings:
    """Time zero-argument functions against each other.

    In each round every contender runs `dropped` + `calls` times in a row; the first call, which
    finds the caches full of another contender's data and another library's threads awake, is
    dropped, and the round counts the median of the others. Contenders change places from round to
    round.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            function = contenders[name]
            samples = []
            for _ in range(dropped + calls):
                start = time.perf_counter()
                function()
                samples.append(time.perf_counter() - start)
            times[name].append(statistics.median(samples[dropped:]))
    return Timings(times)


def in_own_process(code: str) -> tuple[float, int]:
    """Run Python `code` in a separate process and return the two numbers that it prints last:
    seconds and bytes.

    The code may call ``reset_peak()``, which resets the peak of resident memory, and ``peak()``,
    the bytes by which the peak rose since (Linux only)."""
    run = subprocess.run(
        [sys.executable, "-c", _PROBE + code], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise RuntimeError(f"the measured process failed:\n{run.stderr}")
    value, extra = run.stdout.split()[-2:]
    return float(value), int(extra)


_PROBE = """
import gc, time
def _status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
def reset_peak():
    global _base
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    _base = _status("VmRSS")
def peak():
    return _status("VmHWM") - _base
"""


def machine(packages: Sequence[str] = ("torch", "numpy", "numba")) -> str:
    """One line on the machine and the versions: no host name, no path."""
    import torch

    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return (
        f"{_cpu()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, "
        f"{_memory_gb()} GB memory, {platform.system()} {platform.machine()}; "
        f"Python {platform.python_version()}, {versions}"
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def seconds_text(seconds: float) -> str:
    """Three digits with a unit: 123 µs, 4.56 ms, 7.89 s."""
    for unit, scale in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def write_section(name: str, markdown: str, path: Path = RESULTS) -> None:
    """Put `markdown` under the heading ``## name`` of RESULTS.md, replacing that section and
    leaving the others."""
    text = path.read_text(encoding="utf-8") if path.exists() else _TITLE
    opening, *sections = text.split("\n## ")
    titles = [section.split("\n", 1)[0] for section in sections]
    section = f"{name}\n\n{markdown.strip()}\n"
    if name in titles:
        sections[titles.index(name)] = section
    else:
        sections.append(section)
    beside = path.with_suffix(".md.new")
    parts = [part.rstrip() + "\n" for part in (opening, *sections)]
    beside.write_text("\n## ".join(parts), encoding="utf-8")
    beside.replace(path)
