"""The pictures of the documentation are those of the present pages, within a tolerance: fonts and
smoothing differ from machine to machine, layouts and colours do not."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "screenshots"
CELL = 20
"""Pixels of a side of the squares that are compared by their mean colour: letters may move a
little inside."""
FAR = 40
"""Grey levels from which on two squares differ."""
MOST = 0.08
"""Share of squares that may differ."""


def squares(path: Path) -> np.ndarray:
    """The mean colour of each square of a picture."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"), np.float64)
    height = pixels.shape[0] // CELL * CELL
    width = pixels.shape[1] // CELL * CELL
    cells = pixels[:height, :width].reshape(height // CELL, CELL, width // CELL, CELL, 3)
    return cells.mean(axis=(1, 3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_committed_screenshots_are_those_of_the_present_pages(tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api")
    tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "screenshots.py")))
    out = tmp_path / "out"
    with tool.chromium() as browser:
        tool.for_documentation(browser, tmp_path, out)
    assert {path.name for path in out.iterdir()} == {path.name for path in COMMITTED.iterdir()}
    for path in sorted(out.iterdir()):
        new = squares(path)
        old = squares(COMMITTED / path.name)
        assert new.shape == old.shape, f"{path.name} has another size"
        differing = (np.abs(new - old).max(axis=2) > FAR).mean()
        assert differing < MOST, f"{path.name} differs in {differing:.0%} of its squares"
