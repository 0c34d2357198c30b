"""Shared by all benchmark scripts: interleaved timing, the description of the machine, and sections
of RESULTS.md with their plots.

A script calls ``interleaved({...})`` for its measurements and ``write_section("Title", markdown)``
for its results.
"""

from __future__ import annotations

import html
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("RESULTS.md")
ONE_RUN = "FDBD_BENCHMARK_RESULTS"
"""The variable that names the page which `everything.py` writes."""
COMMIT = "FDBD_BENCHMARK_COMMIT"
"""The variable with the commit that `everything.py` measures."""
QUICK = "FDBD_BENCHMARK_QUICK"
"""The variable that is set if `everything.py` runs the scripts in their quick form."""
LOAD_AT_START = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
PLOTTED = {
    "Score and fit": "pytorch-ood / logits",
    "Guarded models": "extra",
    "One sample": "CPU time",
    "Cold start": "warm cache",
    "A million rows": "score, reads of the file",
    "Extraction": "share",
    "Detectors against pytorch-ood": "score",
    "CPU time against pytorch-ood": "× faster",
    "Detectors that need the network, against pytorch-ood": "score",
    "Nearest neighbours against faiss": "time over faiss's",
    "Memory of a streaming fit": "MB for 80,000 samples",
    "Scoring files": "of the bare model",
    "Ray": "images/s",
    "ONNX": "CPU time",
    "Analysis": "measured",
    "Serving": "measured",
    "Guard with auto": "of a forward pass of ResNet-50",
}
"""The column of each section's tables that its plot shows."""
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


def writes(is_quick: bool) -> bool:
    """Whether a script writes its section: always if `everything.py` runs it, else only the whole
    measurement."""
    return not is_quick or ONE_RUN in os.environ


def write_section(name: str, markdown: str, path: Path | None = None) -> None:
    """Put `markdown` under the heading ``## name`` of RESULTS.md, replacing that section and
    leaving the others, with the commit and the machine's load, and draw its plot."""
    if path is None:
        path = Path(os.environ.get(ONE_RUN, RESULTS))
    text = path.read_text(encoding="utf-8") if path.exists() else _TITLE
    opening, *sections = text.split("\n## ")
    titles = [section.split("\n", 1)[0] for section in sections]
    parts = [name, _origin()]
    drawn = bars(name, markdown)
    if drawn is not None:
        plot = path.parent / "plots" / f"{_file_name(name)}.svg"
        plot.parent.mkdir(exist_ok=True)
        plot.write_text(drawn, encoding="utf-8")
        parts.append(f"![{PLOTTED[name]}](plots/{plot.name})")
    section = "\n\n".join([*parts, markdown.strip()]) + "\n"
    if name in titles:
        sections[titles.index(name)] = section
    else:
        sections.append(section)
    beside = path.with_suffix(".md.new")
    written = [part.rstrip() + "\n" for part in (opening, *sections)]
    beside.write_text("\n## ".join(written), encoding="utf-8")
    beside.replace(path)


def commit() -> str:
    """The commit that is measured; with "+" if files were changed since."""
    if COMMIT in os.environ:
        return os.environ[COMMIT]
    git = ["git", "-C", str(RESULTS.parent)]
    revision = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True)
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", "../src"], capture_output=True
    )
    if revision.returncode:
        return "unknown"
    return revision.stdout.decode().strip() + ("+" if changed.stdout.strip() else "")


def _origin() -> str:
    """One line on what was measured, and how busy the machine was."""
    line = f"Commit {commit()}, load average {LOAD_AT_START:.1f} at the start of the script"
    if os.environ.get(QUICK):
        line += ", in its quick form: fewer rounds and smaller data, which say less"
    return line + "."


def _file_name(section: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")


def bars(section: str, markdown: str) -> str | None:
    """An SVG with a bar for each row of the tables that have the section's plotted column; None if
    there is none."""
    if section not in PLOTTED:
        return None
    rows = _column(markdown, PLOTTED[section])
    if not rows:
        return None
    largest = max(abs(value) for _, _, value in rows) or 1.0
    height = 22 * len(rows) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{html.escape(section)}: {html.escape(PLOTTED[section])}</title>",
        f'<rect width="720" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="18" font-weight="bold">{html.escape(PLOTTED[section])}</text>',
    ]
    for number, (label, shown, value) in enumerate(rows):
        y = 30 + 22 * number
        width = max(1.0, 300 * abs(value) / largest)
        lines += [
            f'<text x="310" y="{y + 13}" text-anchor="end">{html.escape(label[:46])}</text>',
            f'<rect x="318" y="{y}" width="{width:.1f}" height="16" fill="#31688e"/>',
            f'<text x="{324 + width:.1f}" y="{y + 13}">{html.escape(shown)}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _column(markdown: str, column: str) -> list[tuple[str, str, float]]:
    """(label, cell, number) of each row of the tables that have this column; times in seconds."""
    rows = []
    header: list[str] = []
    first_unit = ""
    for line in markdown.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not header:
            header = cells
            continue
        if column not in header or set(line) <= set("|-: "):
            continue
        place = header.index(column)
        number = re.match(r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?", cells[place])
        if number is None:
            continue
        unit = cells[place][number.end() :].strip().split(" ")[0]
        scale = {"µs": 1e-6, "ms": 1e-3}.get(unit, 1.0)
        # A plot has one scale: that of the first row.
        unit = "s" if unit in ("µs", "ms", "s") else unit
        first_unit = first_unit or unit
        if unit != first_unit:
            continue
        label = cells[0]
        if place > 1 and not cells[1][:1].isdigit():
            label = f"{cells[0]}, {cells[1]}"
        rows.append((label, cells[place], scale * float(number.group().replace(",", ""))))
    return rows
