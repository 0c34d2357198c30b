"""Check a built site: every internal link leads somewhere, and no page loads anything from
elsewhere.

`python tools/check_site.py docs/_build/html`
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
}
NOT_LOADED = {"next", "prev", "index", "search", "canonical", "author"}
"""Kinds of `<link>` that a browser does not follow by itself."""


class Page(HTMLParser):
    """Anchors, links and loaded addresses of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        for name, value in found.items():
            if (tag, name) == ("a", "href"):
                self.links.append(value)
            elif (tag, name) in LOADED and not (tag == "link" and found.get("rel") in NOT_LOADED):
                self.loaded.append(value)


def faults_of(folder: Path) -> list[str]:
    """One sentence for each link without a target and each address that is loaded from outside."""
    pages = {}
    for path in sorted(folder.rglob("*.html")):
        # Those in _static are the theme's own.
        if "_static" not in path.parts:
            pages[path] = Page(path.read_text(encoding="utf-8"))
    faults = [] if pages else [f"{folder} holds no pages: build the site first"]
    for path, page in pages.items():
        place = path.relative_to(folder)
        for address in [*page.links, *page.loaded]:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if address in page.loaded and parts.scheme != "data":
                    faults.append(f"{place} loads {address}, which is not in the site")
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.exists():
                faults.append(f"{place} links to {address}, which does not exist")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                faults.append(f"{place} links to {address}, which has no such anchor")
    return faults


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    found = faults_of(folder)
    if found:
        sys.exit("\n".join(found))
    print(
        f"{folder / 'index.html'}: every internal link has its target, nothing is loaded from"
        " outside"
    )


if __name__ == "__main__":
    main()
