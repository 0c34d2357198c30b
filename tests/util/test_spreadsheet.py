"""Text that a spreadsheet would run is kept from it, and read back as it was."""

from __future__ import annotations

import pytest

from fdbd.util.spreadsheet import guarded, unguarded


@pytest.mark.parametrize(
    "text", ["", "plain", "=1+1", "-1", "@name", "\ttab", "'=1", "''+2", "'quoted'", "''twice", "'"]
)
def test_a_text_comes_back_and_its_cell_is_not_a_formula(text: str) -> None:
    cell = guarded(text)
    assert unguarded(cell) == text
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
