"""The quick version of the trial of faults holds; `make faults` runs the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="the trial forks, and looks at /proc")
def test_what_is_promised_holds_in_a_short_trial():
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--quick"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_page_has_a_place_for_the_table():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert (
        page.count("<!-- the trial's table begins -->")
        == page.count("<!-- the trial's table ends -->")
        == 1
    )
