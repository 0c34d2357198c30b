"""fdbd calibrate: a new threshold from fresh or reviewed data, beside the old one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fdbd.commands import options
from fdbd.commands.options import opt

if TYPE_CHECKING:
    from fdbd.decision.threshold import Threshold
    from fdbd.jobs.refreshing import Fresh, Refreshed
    from fdbd.jobs.review import Alarms, Cost, Review

DATA = "Fresh in-distribution data: scores or features, which need no network; or images."
REVIEWED = (
    "A review of the scores in --data, as the gallery saves it: in-distribution samples set the "
    "threshold, and all say how good the alarms are."
)
REVIEW_COST = (
    "Cost of looking at one alarm; with --miss-cost, shows what each false-alarm rate costs."
)


class _Verdicts(NamedTuple):
    """What a review says."""

    review: Review
    alarms: Alarms
    costs: list[Cost] | None
    """The costs of each false-alarm rate; None if they were not asked for."""


def calibrate(
    guard: Path = options.GUARD,
    data: str = opt(..., DATA),
    out: Path | None = opt(None, "The guard's new file; default: only show what would change."),
    tpr: float | None = opt(None, "Share of the data to accept; default: as before."),
    alpha: float | None = opt(
        None, "Instead of --tpr: the largest share of false alarms (conformal)."
    ),
    per_class: bool | None = opt(
        None,
        "A threshold for each predicted class, or one for all; default: as before.",
        "--per-class/--pooled",
        metavar="",
    ),
    reviewed: Path | None = opt(None, REVIEWED),
    review_cost: float | None = opt(None, REVIEW_COST),
    miss_cost: float | None = opt(None, "Cost of an OOD sample that raises no alarm."),
    ood_share: float | None = opt(
        None, "Share of new samples that are OOD; default: as estimated from the review."
    ),
    text: str | None = opt(None, "The column of texts in a .csv, .jsonl or .parquet file."),
    batch_size: int = options.BATCH_SIZE,
    workers: int | None = options.WORKERS,
    model: str | None = options.MODEL,
    checkpoint: Path | None = options.CHECKPOINT,
    device: str = options.DEVICE,
    trust_model: bool = options.TRUST_MODEL,
    as_json: bool = options.JSON,
) -> None:
    """Set a guard's threshold anew from fresh in-distribution data, and show it beside the old one.

    The old threshold's false alarms on the fresh data come with a 95 % interval: if the promised
    share lies outside, the data have changed since the calibration.

    Examples: `fdbd calibrate guard.safetensors --data fresh.parquet --out new.safetensors`,
    `fdbd calibrate guard.safetensors --data scores.parquet --reviewed review.json`
    """
    from fdbd.decision.recalibration import replace_threshold
    from fdbd.decision.threshold import check_target
    from fdbd.jobs.refreshing import of_rows, read_fresh, refresh
    from fdbd.jobs.review import selection_caution
    from fdbd.jobs.scoring import Engine
    from fdbd.util.files import check_place

    check_target(tpr, alpha)
    _check_costs(reviewed, review_cost, miss_cost, ood_share)
    if out is not None:
        check_place(out)
    engine = Engine(device=device, batch_size=batch_size, workers=workers)
    fresh = read_fresh(
        guard, data, engine, model=model, checkpoint=checkpoint, trust=trust_model, text=text
    )
    cautions = list(fresh.cautions)
    verdicts = None
    described: dict[str, Any] = {"data": "fresh data", "network_saw_them": "not stated"}
    if reviewed is not None:
        review = _review(reviewed, fresh, data)
        verdicts = _judge(review, review_cost, miss_cost, ood_share)
        selection = selection_caution(review)
        cautions.append(selection)
        described["data"] = "reviewed data"
        described["selection"] = selection
        # The threshold is set on what the reviewers called in-distribution.
        fresh = of_rows(fresh, review.in_distribution)
    found = refresh(fresh, tpr, alpha, per_class)
    described["rows"] = found.new.count
    if found.new.caution is not None:
        cautions.append(found.new.caution)
    if out is not None:
        replace_threshold(guard, out, found.new, described)
    if as_json:
        options.answer(_facts(guard, out, fresh, found, verdicts, cautions), True)
        return
    _print_thresholds(found)
    if verdicts is not None:
        _print_verdicts(verdicts, found.new)
    if out is None:
        options.say("Nothing was written: give --out FILE for a guard with the new threshold.")
    else:
        options.say(f"{out}: the guard with the new threshold. {found.new.guarantee}")
    for caution in cautions:
        options.note(f"caution: {caution}")
    if fresh.left_out:
        options.note(f"{fresh.left_out} rows without a finite score were left out")


def _check_costs(
    reviewed: Path | None,
    review_cost: float | None,
    miss_cost: float | None,
    ood_share: float | None,
) -> None:
    """An error if costs are given that cannot be used."""
    given = [cost is not None for cost in (review_cost, miss_cost)]
    if not any(given):
        if ood_share is not None:
            raise ValueError("--ood-share goes with --review-cost and --miss-cost")
        return
    if not all(given):
        raise ValueError("--review-cost and --miss-cost go together: one is weighed by the other")
    if reviewed is None:
        raise ValueError(
            "--review-cost weighs false alarms against misses, which takes OOD samples: give "
            "--reviewed FILE with some"
        )


def _review(path: Path, fresh: Fresh, data: str) -> Review:
    """The verdicts on the scored rows."""
    from fdbd.jobs.review import read_review

    if fresh.rows is None:
        raise ValueError(
            f"--reviewed names rows of scores: give the file of fdbd score as --data, not {data!r}"
        )
    review = read_review(path, fresh.rows)
    if not len(review.in_distribution):
        raise ValueError(f"{str(path)!r} holds no in-distribution sample to calibrate on")
    return review


def _judge(
    review: Review, review_cost: float | None, miss_cost: float | None, ood_share: float | None
) -> _Verdicts:
    """What the review says of the alarms, and of their costs if these were asked for."""
    from fdbd.jobs.review import rate_alarms

    alarms = rate_alarms(review)
    table = None
    if review_cost is not None and miss_cost is not None:
        table = _costs(review, alarms, review_cost, miss_cost, ood_share)
    return _Verdicts(review, alarms, table)


def _costs(
    review: Review,
    alarms: Alarms,
    review_cost: float,
    miss_cost: float,
    ood_share: float | None,
) -> list[Cost]:
    """What each false-alarm rate costs, by the reviewed samples."""
    from fdbd.jobs.review import costs

    share = alarms.ood_share if ood_share is None else ood_share
    if share is None:
        raise ValueError(
            "the review does not say which share of new samples is OOD, since only alarms, or only "
            "rows without an alarm, were reviewed: give --ood-share"
        )
    rows = review.rows
    ood = review.ood
    if not len(ood):
        raise ValueError("the review holds no OOD sample, so misses cannot be estimated")
    inside = review.in_distribution
    inside = inside[rows.is_scored[inside]]
    # An OOD row that could not be scored is always found.
    ood_scores = np.nan_to_num(rows.scores[ood], nan=-np.inf)
    return costs(rows.scores[inside], ood_scores, review_cost, miss_cost, share)


def _facts(
    guard: Path,
    out: Path | None,
    fresh: Fresh,
    found: Refreshed,
    verdicts: _Verdicts | None,
    cautions: list[str],
) -> dict[str, Any]:
    """All that was found, as JSON values."""
    from fdbd.decision.guard_file import load

    written = None
    new_id = None
    if out is not None:
        written = str(out)
        new_id = load(out).id
    facts: dict[str, Any] = {
        "guard": str(guard),
        "id": fresh.guard.id,
        "out": written,
        "new_id": new_id,
        "rows": len(fresh.scores),
        "left_out": fresh.left_out,
        "old": None,
        "new": {**_threshold_facts(found.new), "false_alarms": found.new_false_alarms.to_dict()},
        "cautions": cautions,
    }
    if found.old is not None and found.old_false_alarms is not None:
        facts["old"] = {
            **_threshold_facts(found.old),
            "false_alarms": found.old_false_alarms.to_dict(),
        }
    if verdicts is not None:
        facts["reviewed"] = verdicts.review.counts()
        facts["alarms"] = verdicts.alarms.to_dict()
        if verdicts.costs is not None:
            facts["costs"] = [row._asdict() for row in verdicts.costs]
    return facts


def _threshold_facts(threshold: Threshold) -> dict[str, Any]:
    return {
        **threshold.to_config(),
        "threshold": threshold.value.tolist(),
        "guarantee": threshold.guarantee,
    }


def _print_thresholds(found: Refreshed) -> None:
    """Both thresholds as a table, and what the fresh data say of the old one."""
    new = found.new
    rows = [["new", *_threshold_cells(new), str(found.new_false_alarms)]]
    old = found.old
    rate = found.old_false_alarms
    if old is not None:
        rows.insert(0, ["old", *_threshold_cells(old), str(rate)])
    titles = ["", "threshold", "target", "samples", "false alarms on these data"]
    options.print_table(titles, rows, right=titles[1:])
    if old is None or rate is None:
        return
    promised = old.expected_rate
    if rate.low <= promised <= rate.high:
        verdict = "which agrees with"
    elif promised < rate.low:
        verdict = "more than"
    else:
        verdict = "fewer than"
    options.say(
        f"The old threshold flags {rate} of these data, {verdict} the {100 * promised:.3g} % that "
        "it aims at."
    )


def _threshold_cells(threshold: Threshold) -> list[str]:
    values = threshold.value.tolist()
    shown = f"{values[0]:.4g}"
    if len(values) > 1:
        shown = f"{min(values):.4g} to {max(values):.4g}"
    name = "alpha" if threshold.kind == "conformal" else "tpr"
    return [shown, f"{name} {threshold.target:g}", f"{threshold.count:,}"]


def _print_verdicts(verdicts: _Verdicts, new: Threshold) -> None:
    _print_alarms(verdicts.alarms)
    if verdicts.costs is not None:
        _print_costs(verdicts.costs, new)


def _print_alarms(alarms: Alarms) -> None:
    """Precision and recall in a sentence."""
    words = f"Of the reviewed alarms {alarms.precision} are OOD (precision)"
    if alarms.recall is None:
        words += "; recall is not known, since alarms and other rows must both be reviewed"
    else:
        words += (
            f"; of the OOD samples about {100 * alarms.recall:.1f} % "
            f"({100 * (alarms.recall_low or 0):.1f} to {100 * (alarms.recall_high or 0):.1f} %) "
            "raise an alarm (recall)"
        )
    options.say(f"{words}.")


def _print_costs(table: list[Cost], new: Threshold) -> None:
    """What each rate costs, and the cheapest."""
    titles = ["alpha", "false alarms", "found", "missed", "cost"]
    rows = []
    for row in table:
        numbers = (row.false_alarms, row.found, row.missed, row.cost)
        rows.append([f"{row.alpha:g}", *(f"{number:.4g}" for number in numbers)])
    best = min(table, key=lambda row: row.cost)
    options.print_table(titles, rows, right=titles, caption="Per 1,000 new samples.")
    words = f"Cheapest: alpha {best.alpha:g}, at a cost of {best.cost:.4g}."
    is_new = new.kind == "conformal" and new.target == best.alpha
    if not is_new:
        words += f" The new threshold is for another rate: --alpha {best.alpha:g} sets this one."
    options.say(words)
