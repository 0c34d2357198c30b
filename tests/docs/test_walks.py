"""Work crosses the modules that CONTRIBUTING.md names, and an image on its way to its row at most
twelve."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="writes Parquet")
pytest.importorskip("PIL", reason="reads images")

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "walks.py"))


def crossed(title: str, folder: Path) -> set[str]:
    return {name.removeprefix("fdbd.") for name in TOOL["WALKS"][title](folder)}


def described(title: str) -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return set(re.findall(r"`([\w.]+)`", text.split(f"**{title}**")[1].split("\n")[0]))


def test_an_image_crosses_at_most_twelve_modules_to_its_row(tmp_path: Path) -> None:
    found = crossed("An image to its row", tmp_path)
    assert len(found) <= 12
    assert found == described("An image to its row")


@pytest.mark.parametrize(
    "title",
    ["A batch to its score", pytest.param("A config to its report", marks=pytest.mark.slow)],
)
def test_the_other_walks_are_those_of_the_page(title: str, tmp_path: Path) -> None:
    assert crossed(title, tmp_path) == described(title)
