"""The page of the rooms is what the code says, and the layers hold."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("grimp", reason="needs import-linter, of the dev extra")

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "architecture.py"))


@pytest.fixture(scope="module")
def rooms() -> list:
    return TOOL["rooms"]()


def test_the_page_and_the_drawing_are_those_of_the_code(rooms: list) -> None:
    assert (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8") == TOOL["page"](rooms), (
        "run make architecture"
    )
    drawing = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert drawing == TOOL["drawing"](rooms), "run make architecture"


def test_a_room_imports_only_from_rooms_below_it(rooms: list) -> None:
    order = [room.name for room in rooms]
    assert len(order) > 15
    for room in rooms:
        assert all(order.index(other) < order.index(room.name) for other in room.imports), room.name


def test_every_room_says_what_is_in_it(rooms: list) -> None:
    assert all(len(room.what) > 10 for room in rooms)
