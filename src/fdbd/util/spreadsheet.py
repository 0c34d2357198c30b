"""Text in CSV that spreadsheets would run as a formula: how it is written, and read back."""

import re

_FORMULA = re.compile(r"'*[=+\-@\t\r]")
_GUARDED = re.compile(r"'+[=+\-@\t\r]")


def guarded(text: str) -> str:
    """The text as a cell of CSV: one apostrophe more before what a spreadsheet would take for a
    formula, or before such text that has apostrophes already.

    >>> guarded("=sum.png"), guarded("'=sum.png"), guarded("'quoted.png")
    ("'=sum.png", "''=sum.png", "'quoted.png")
    """
    if _FORMULA.match(text):
        return f"'{text}"
    return text


def unguarded(cell: str) -> str:
    """The text that `guarded` turned into this cell.

    >>> unguarded("'=sum.png"), unguarded("''=sum.png"), unguarded("'quoted.png")
    ('=sum.png', "'=sum.png", "'quoted.png")
    """
    if _GUARDED.match(cell):
        return cell[1:]
    return cell
