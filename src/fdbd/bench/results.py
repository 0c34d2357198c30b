"""Results: what `Benchmark.run` returns, with the HTML report."""

from __future__ import annotations

from pathlib import Path

from fdbd.report import html
from fdbd.results.table import PathLike, ResultTable
from fdbd.util.files import write_text


class Results(ResultTable):
    """Rows in the order they were run, with their common setting.

    ``print(results)`` shows the table; `table` gives it for rich, `to_json`, `to_csv`, `to_markdown`, `to_latex` and
    `to_html` write files, `from_json` reads one, `to_pandas` gives one line per detector and dataset, and `compare`
    tells whether two detectors differ.

    >>> from fdbd.bench import load_bundle
    >>> results = load_bundle("cifar10-ce").run(["fdbd", "msp"], latency=False)
    >>> results.compare("fdbd", "msp").verdict()
    'higher'
    """

    def to_html(self, path: PathLike) -> Path:
        """The report, one self-contained page."""
        return write_text(path, html(self))
