"""Writes docs/results.md: what `fdbd bench` says of each config in configs/, on the data that FDBD_DATA holds.

FDBD_DATA=FOLDER python benchmarks/results_page.py
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from fdbd.bench import Benchmark, Config, Results, benchmark_of, load_bundle
from fdbd.networks import list_zoo
from fdbd.util.files import write_text

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
INTRODUCTION = """\
# Results

Measured by the commands below on the data and weights that each section names, by `python benchmarks/results_page.py`.
Percent; ID samples are the positive ones; **bold** is the best, ~ marks what cannot be told from it at the 5 % level.
The last columns are the score stage's microseconds a sample, and that as a share of the network's forward pass.
`fdbd bench --format html` draws the same results as a page with histograms and curves.
"""


def section(command: str, results: Results, seconds: float) -> str:
    """One benchmark as Markdown."""
    title, _, table = _without_paths(results.to_markdown()).partition("\n")
    count = len(results.finished)
    return (
        f"## {title.strip('*')}\n\n    {command}\n{table}\n{count} detectors in {seconds:.0f} s on cached features.\n"
    )


def _without_paths(text: str) -> str:
    """Names of files instead of one machine's paths."""
    return re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", text)


def benchmarks() -> Iterator[tuple[str, Benchmark, tuple[str, ...] | None]]:
    """Command, benchmark and detectors (None: all), the package's own features first."""
    for name in list_zoo():
        yield f"fdbd bench --model {name}", load_bundle(name), None
    for path in sorted((ROOT / "configs").glob("*.toml")):
        config = Config.from_file(path)
        yield f"FDBD_DATA=FOLDER fdbd bench configs/{path.name}", benchmark_of(config), config.detectors


def main() -> None:
    sections = [INTRODUCTION]
    for command, benchmark, detectors in benchmarks():
        started = time.perf_counter()
        results = benchmark.run(detectors)
        sections.append(section(command, results, time.perf_counter() - started))
        print(sections[-1], flush=True)
    write_text(PAGE, "\n".join(sections))


if __name__ == "__main__":
    main()
