"""How guards and decisions look in a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def html_table(title: str, facts: Mapping[str, str]) -> str:
    """A small table, one row per fact, in the colours of the page around it.

    >>> html_table("Guard", {"detector": "<b>"})
    '<table><caption>Guard</caption><tr><th>detector</th><td>&lt;b&gt;</td></tr></table>'
    """
    rows = []
    for name, value in facts.items():
        rows.append(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>")
    return f"<table><caption>{escape(title)}</caption>{''.join(rows)}</table>"
