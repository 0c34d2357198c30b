"""All pages have the same colours. The service's pages stand alone, so they repeat those of the
shared style."""

from __future__ import annotations

import re
from importlib import resources

import pytest

SAME = {
    "ground": "paper",
    "text": "ink",
    "soft": "soft",
    "line": "line",
    "panel": "panel",
    "in": "in-text",
    "out": "out-text",
    "mark": "accent",
}
"""Names of colours in the service's pages, and in the shared style."""


def of_the_shared_style() -> dict[str, tuple[str, str]]:
    """Light and dark colour of each name."""
    text = resources.files("fdbd.util").joinpath("assets/style.css").read_text(encoding="utf-8")
    found = re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", text)
    return {name: (light, dark) for name, light, dark in found}


def of_a_page_of_the_service(name: str) -> dict[str, tuple[str, str]]:
    text = resources.files("fdbd.serve").joinpath("assets", name).read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", each)) for each in colours_in(text))
    return {each: (light[each], dark[each]) for each in light}


def colours_in(text: str) -> list[str]:
    """The light and the dark declarations of a page, in this order."""
    found = re.findall(r":root \{([^}]+)\}", text)
    assert len(found) == 2
    return found


@pytest.mark.parametrize("name", ["page.html", "docs.html"])
def test_the_services_pages_have_the_colours_of_all_pages(name: str) -> None:
    shared = of_the_shared_style()
    own = of_a_page_of_the_service(name)
    assert own
    for each, colours in own.items():
        assert colours == shared[SAME[each]], each
