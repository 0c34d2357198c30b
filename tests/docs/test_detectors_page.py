"""docs/detectors.md says what the classes say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import fdbd
from fdbd.core.configuration import registered

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "catalog.py"))
PAGE = ROOT / "docs" / "detectors.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == TOOL["render"](), "run make pages"


def test_the_reference_lists_every_detector_and_shaping() -> None:
    for name, text in TOOL["reference"]().items():
        page = ROOT / "docs" / "api" / name
        assert page.read_text(encoding="utf-8") == text, "run make pages"


def test_every_name_has_a_row_with_a_paper_and_a_section() -> None:
    page = TOOL["render"]()
    headings = re.findall(r"^## (\S+): (\w+)$", page, flags=re.MULTILINE)
    # Other tests add detectors of their own.
    registry = registered()
    ours = [name for name in fdbd.list_detectors() if registry[name].__module__.startswith("fdbd.")]
    assert sorted(name for name, _ in headings) == ours
    for name, kind in headings:
        row = re.search(
            rf"^\| \[`{re.escape(name)}`\]\(#(\S+)\) \| (.+) \|$", page, flags=re.MULTILINE
        )
        assert row, name
        assert row[1] == re.sub(r"[^a-z0-9-]", "", f"{name}-{kind}".lower())
        assert re.search(r"\d{4}$", row[2]), f"{name} has no paper"
        assert "O(" in row[2].split(" | ")[1] or "the network" in row[2], f"{name} states no cost"


def test_options_are_listed_with_their_defaults() -> None:
    section = TOOL["render"]().split("## gen: GEN\n")[1].split("\n## ")[0]
    assert "- `gamma` (`0.1`): exponent" in section
    assert "- `top` (`100`): number" in section
    assert "```text\nscore = −Σ" in section


def test_the_page_is_written_where_it_is_asked_for(tmp_path: Path, monkeypatch: object) -> None:
    target = tmp_path / "new" / "page.md"
    monkeypatch.setattr("sys.argv", ["catalog", str(target)])  # type: ignore[attr-defined]
    TOOL["main"]()
    assert target.read_text(encoding="utf-8") == TOOL["render"]()
