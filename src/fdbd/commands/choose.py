"""fdbd choose: compare detectors on a model and its data, without OOD data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fdbd.commands import model_and_data, options
from fdbd.commands.options import answer, note, opt, print_table, say

if TYPE_CHECKING:
    from fdbd.decision.advice import Advice
    from fdbd.decision.choice import Member

HELD_OUT = (
    "In-distribution data that neither the network's training nor DATA hold; some 300 samples. "
    "Default: a fifth of DATA, with a caution."
)
OOD = "Real OOD data, if you have some: a table on them is added. May be given several times."
BUDGET = "What the chosen detectors may cost together, such as '200us, 10MB, no bank'."


def choose(
    sources: list[str] = model_and_data.SOURCES_TO_CHOOSE,
    held_out: str | None = opt(None, HELD_OUT),
    ood: list[str] = opt([], OOD),
    budget: str | None = opt(None, BUDGET),
    out: Path | None = opt(None, "Also write a page (.html) with pictures of the kinds."),
    checkpoint: Path | None = model_and_data.CHECKPOINT,
    num_classes: int | None = model_and_data.NUM_CLASSES,
    head: str | None = model_and_data.HEAD,
    preprocess: str | None = model_and_data.PREPROCESS,
    batch_size: int = options.BATCH_SIZE,
    workers: int | None = options.WORKERS,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = options.JSON,
) -> None:
    """Compare detectors on your model and data, without OOD data: how well each finds pseudo-OOD
    images that are made from held-out ones, what it costs, and how "auto" weighs it (experimental).

    Examples: `fdbd choose timm:resnet50 ./train --held-out ./val --out choice.html`,
    `fdbd choose cifar10-ce ./train --held-out ./fresh --ood ./other --budget "100us, no bank"`
    """
    from fdbd.decision.choice import Auto
    from fdbd.jobs.choosing import choose_files
    from fdbd.jobs.scoring import Engine
    from fdbd.pages.choosing import write_choice
    from fdbd.util.extras import require
    from fdbd.util.files import check_place

    auto = Auto(budget=budget)
    if out is not None:
        require("jinja2", "report")
        check_place(out)
    where = Engine(device=device, batch_size=batch_size, workers=workers)
    given = model_and_data.read(
        "choose",
        sources,
        checkpoint,
        num_classes=num_classes,
        head=head,
        preprocess=preprocess,
        trust=trust_model,
        device=where.home,
    )
    advice = choose_files(given.source, given.data, held_out, ood, auto, where, head=given.layer)
    if out is not None:
        write_choice(advice, out, f"{given.name} on {given.data}")
    if as_json:
        answer({**advice.to_dict(), "page": None if out is None else str(out)}, as_json)
    else:
        _show(advice, out)
    for caution in advice.cautions:
        note(f"caution: {caution}")


def _show(advice: Advice, out: Path | None) -> None:
    """The tables and the advice on the terminal."""
    _show_detectors(advice)
    _show_kinds(advice)
    _show_ood(advice)
    say(f"auto: {advice.choice.summary}.")
    say(advice.sentence)
    if out is not None:
        say(str(out))


def _show_detectors(advice: Advice) -> None:
    """Weight, quality and cost of each detector."""
    from fdbd.decision.advice import COST_NOTE, describe_cost

    front = {member.name for member in advice.pareto}
    rows = []
    for member in _by_weight(advice):
        name = member.name
        if name in front:
            name += "*"
        share = ""
        if member.share:
            share = f"{100 * member.share:.0f} %"
        auroc = ""
        if member.auroc is not None:
            auroc = f"{100 * member.auroc:.1f}"
        time = describe_cost(member.cost.microseconds)
        rows.append([name, share, auroc, time, f"{member.cost.megabytes:.3g}"])
    titles = ["detector", "share", "AUROC", "time", "MB"]
    print_table(
        titles,
        rows,
        right=titles[1:],
        title="Detectors, by their weight",
        caption="AUROC of held-out samples against pseudo-OOD ones, percent: the mean over the "
        f"kinds without the highest and the lowest; time {COST_NOTE}; * no other is both cheaper "
        "and weightier",
    )


def _show_kinds(advice: Advice) -> None:
    """The best and the worst detector on each kind of pseudo-OOD samples."""
    rows = []
    for kind, number in advice.choice.per_kind.items():
        found = [(100 * member.aurocs[kind][0], member.name) for member in _by_weight(advice)]
        # Detectors come by weight, so that of equals the one with the larger weight is named.
        best = max(found, key=lambda pair: pair[0])
        worst = sorted(found, key=lambda pair: -pair[0])[-1]
        rows.append([kind, str(number), f"{best[0]:.1f} {best[1]}", f"{worst[0]:.1f} {worst[1]}"])
    if rows:
        print_table(["kind", "samples", "best", "worst"], rows, right=["samples"])


def _show_ood(advice: Advice) -> None:
    """Each detector on the user's own OOD data, if there are any."""
    if not advice.ood:
        return
    sets = list(advice.ood)
    detectors = list(advice.ood[sets[0]])
    rows = []
    for detector in detectors:
        row = [detector]
        for name in sets:
            auroc, low, high = advice.ood[name][detector]
            row.append(f"{100 * auroc:.1f} ({100 * low:.1f}–{100 * high:.1f})")
        rows.append(row)
    title = "AUROC on your OOD data, percent, 95 %"
    print_table(["detector", *sets], rows, right=sets, title=title)


def _by_weight(advice: Advice) -> list[Member]:
    return sorted(advice.choice.members, key=lambda member: -member.weight)
