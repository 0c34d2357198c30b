"""The page of `fdbd stress`: a picture of each kind with the share that the guard flags, and a
table of corruptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fdbd.core.pixels import thumbnail
from fdbd.data.corruptions import SEVERITIES
from fdbd.data.pseudo_ood import KINDS
from fdbd.decision.stress import CAUTION, StressCard, Stressed
from fdbd.util.files import write_text
from fdbd.util.pages import render, with_fading_edges

PICTURE_SIDE = 160


def write_stress(card: StressCard, out: Path, title: str) -> None:
    """Write the page, one self-contained .html file."""
    clean = card.clean
    weakest = card.weakest
    interval = f"95 %: {100 * clean.low:.1f} to {100 * clean.high:.1f}"
    weakest_share = f"{100 * weakest.flagged.share:.0f} %"
    facts = [
        ("false alarms", f"{100 * clean.share:.1f} %", interval),
        ("asked of the threshold", f"{100 * card.expected:.3g} %", card.guarantee),
        ("weakest far kind", weakest_share, KINDS[weakest.name].summary),
        ("guard", card.guard_id, card.detector),
    ]
    verdict = (
        f"{clean.flagged} of {clean.total} clean images are flagged. Of the far kinds, "
        f"{weakest.name!r} is flagged least: {weakest_share}."
    )
    first = {
        "name": "clean",
        "summary": "as it is",
        "share": f"{100 * clean.share:.0f}",
        "interval": interval,
        "missed": "",
        "picture": thumbnail(card.clean_picture, PICTURE_SIDE),
    }
    page = render(
        "stress.html",
        with_fading_edges(),
        card.to_dict(),
        images="; img-src data:",
        title=f"{title} on {Path(card.data).name}",
        verdict=verdict,
        caution=CAUTION,
        facts=facts,
        kinds=[first, *(_kind(kind) for kind in card.kinds)],
        severities=SEVERITIES,
        corruptions=_corruptions(card),
    )
    write_text(out, page)


def _kind(kind: Stressed) -> dict[str, str]:
    flagged = kind.flagged
    return {
        "name": kind.name,
        "summary": KINDS[kind.name].summary,
        "share": f"{100 * flagged.share:.0f}",
        "interval": f"95 %: {100 * flagged.low:.0f} to {100 * flagged.high:.0f}",
        "missed": f"{100 * kind.missed:.0f} % changed class without an alarm",
        "picture": thumbnail(kind.picture, PICTURE_SIDE),
    }


def _corruptions(card: StressCard) -> list[dict[str, Any]]:
    rows: dict[str, list[dict[str, str]]] = {}
    for corruption in card.corruptions:
        share = corruption.flagged.share
        cell = {
            "value": f"{100 * share:.0f}",
            "missed": f"{100 * corruption.missed:.0f} missed",
            "heat": f"{share:.3f}",
        }
        rows.setdefault(corruption.name, []).append(cell)
    return [{"name": name, "cells": cells} for name, cells in rows.items()]
