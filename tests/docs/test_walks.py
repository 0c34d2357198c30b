"""The tool that shows which modules an operation crosses runs the real commands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="writes Parquet")
pytest.importorskip("PIL", reason="reads images")

TOOL = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "walks.py"))


@pytest.mark.parametrize(
    ("title", "first", "among"),
    [
        ("A batch to its score", "fdbd.decision.guard", "fdbd.detectors.fdbd"),
        pytest.param(
            "An image to its row", "fdbd.cli", "fdbd.data.decoding", marks=pytest.mark.slow
        ),
        pytest.param(
            "A config to its report", "fdbd.cli", "fdbd.bench.page", marks=pytest.mark.slow
        ),
    ],
)
def test_a_walk_starts_at_its_entry_and_passes_the_modules_that_do_the_work(
    title: str, first: str, among: str, tmp_path: Path
) -> None:
    found = TOOL["WALKS"][title](tmp_path)
    assert found[0] == first
    assert among in found
