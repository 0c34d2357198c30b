"""fdbd stress: how often a guard flags pseudo-OOD kinds and corruptions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fdbd.commands import options
from fdbd.commands.options import answer, arg, note, opt, print_table, say

if TYPE_CHECKING:
    from fdbd.decision.stress import StressCard

DATA = (
    "In-distribution images: a folder, an .npz or the name of a dataset; ideally not those that "
    "the threshold was set on."
)
FAIL_UNDER = (
    "Exit with code 1 if the share of a far kind that is flagged is less than this, from 0 to 1."
)


def stress(
    guard: Path = options.GUARD,
    data: str = arg(..., DATA),
    count: int = opt(50, "Images of each kind, and of each corruption and severity.", min=1),
    clean: int = opt(500, "Images that are scored as they are, at most.", min=1),
    out: Path | None = opt(None, "Also write a page (.html) with a picture of each kind."),
    fail_under: float | None = opt(None, FAIL_UNDER, min=0.0, max=1.0),
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    batch_size: int = options.BATCH_SIZE,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = options.JSON,
) -> None:
    """Show how often a guard, at its own threshold, flags pseudo-OOD images of each kind and each
    corruption at severities 1 to 5, and its false alarms on the clean images.

    Examples: `fdbd stress guard.safetensors ./fresh --out stress.html`,
    `fdbd stress guard.safetensors ./fresh --json --fail-under 0.5`
    """
    from fdbd.decision.guard_file import open_guard
    from fdbd.decision.stress import stress_files
    from fdbd.pages.stress import write_stress
    from fdbd.util.extras import require
    from fdbd.util.files import check_place

    if out is not None:
        require("jinja2", "report")
        check_place(out)
    opened = open_guard(guard, model=model, checkpoint=checkpoint, trust=trust_model, device=device)
    card = stress_files(opened, data, count, clean, batch_size=batch_size)
    if out is not None:
        write_stress(card, out, guard.name)
    has_failed = fail_under is not None and card.weakest.flagged.share < fail_under
    if as_json:
        answer({**card.to_dict(), "fail_under": fail_under, "failed": has_failed}, as_json)
    else:
        _show(card, out)
    if card.errors:
        note(f"{len(card.errors)} images were left out, the first: {card.errors[0]}")
    if has_failed:
        weakest = card.weakest
        note(
            f"failed: {weakest.flagged.share:.0%} of the kind {weakest.name!r} are flagged, less "
            f"than --fail-under {fail_under:g}"
        )
        raise typer.Exit(1)


def _show(card: StressCard, out: Path | None) -> None:
    """The card on the terminal."""
    from fdbd.data.corruptions import SEVERITIES
    from fdbd.decision.stress import CAUTION

    rows = []
    for kind in card.kinds:
        flagged = kind.flagged
        interval = f"{100 * flagged.low:.0f}–{100 * flagged.high:.0f}"
        rows.append(
            [kind.name, f"{100 * flagged.share:.0f} %", interval, f"{100 * kind.missed:.0f} %"]
        )
    titles = ["kind", "flagged", "95 %", "other class, not flagged"]
    print_table(titles, rows, right=titles[1:], title=f"Pseudo-OOD images of {card.data}")
    by_name: dict[str, list[str]] = {}
    for corruption in card.corruptions:
        by_name.setdefault(corruption.name, []).append(f"{100 * corruption.flagged.share:.0f}")
    severities = [str(severity) for severity in SEVERITIES]
    print_table(
        ["corruption", *severities],
        [[name, *shares] for name, shares in by_name.items()],
        right=severities,
        title="Corrupted images that are flagged, percent, by severity",
    )
    clean = card.clean
    say(
        f"{card.detector}: {clean.flagged} of {clean.total} clean images are flagged, "
        f"{clean.share:.1%} ({clean.low:.1%} to {clean.high:.1%}); the threshold is to reject "
        f"{card.expected:.1%}."
    )
    say(CAUTION)
    if out is not None:
        say(str(out))
