"""The page of the packages is what the code says, and the layers hold."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("grimp", reason="needs import-linter, of the dev extra")

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "architecture.py"))


@pytest.fixture(scope="module")
def packages() -> list:
    return TOOL["packages"]()


def test_the_page_and_the_drawing_are_those_of_the_code(packages: list) -> None:
    assert (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8") == TOOL["page"](
        packages
    ), "run make pages"
    drawing = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert drawing == TOOL["drawing"](packages), "run make pages"


def test_a_package_imports_only_from_packages_below_it(packages: list) -> None:
    order = [package.name for package in packages]
    known = {("networks", "data"), ("integrations", "jobs")}
    for package in packages:
        for other in package.imports:
            is_below = order.index(other) < order.index(package.name)
            assert is_below or (package.name, other) in known, f"{package.name} imports {other}"


def test_every_package_says_what_is_in_it(packages: list) -> None:
    assert all(len(package.what) > 10 for package in packages)
