"""How guards and decisions look in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """A small table, one row per fact, in the colours of the page around it. A fact that says its
    name, such as "5 classes", does not say it twice.

    >>> html_table("Guard", {"detector": "<b>"})
    '<table><caption>Guard</caption><tr><th>detector</th><td>&lt;b&gt;</td></tr></table>'
    >>> html_table("Decision", {"classes": "5 classes"})
    '<table><caption>Decision</caption><tr><th>classes</th><td>5</td></tr></table>'
    """
    rows = []
    for name, value in facts.items():
        shown = value.removeprefix(f"{name} ").removesuffix(f" {name}")
        rows.append(f"<tr><th>{escape(name)}</th><td>{escape(shown)}</td></tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(rows)}</table>"
