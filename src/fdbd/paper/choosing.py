"""The study on choosing a detector without OOD data: ``python -m fdbd.paper.choosing`` runs it and
writes docs/choosing.md.

The rule is fixed on development networks and then tried on others. What is run on each network is
in choosing.toml; what comes of it is kept in the cache, so that a run that was stopped
continues."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fdbd.data.datasets import DatasetUnavailable
from fdbd.data.pseudo_ood import WEIGHING
from fdbd.decision.choice_rule import BETA, EQUAL_POOL, LEAST_SHARE, POOL
from fdbd.metrics import auroc, fpr_at_tpr
from fdbd.paper.choice_features import Floats, NetworkEntry, Protocol, StudyScores, scores_of
from fdbd.util.files import write_text
from fdbd.util.terminal import one_line

NEAR_KINDS = ("negative", "mixture", "quarters", "half-turn")
HOLD_OUT = "class hold-out"
"""The kind that is not made of images: held-out images of classes that were taken away."""
FIXED = ("fdbd", "energy", "msp", "knn", "vim", "react(95)+energy")
"""Fixed choices that the rule is compared with."""
START = Path(__file__).with_name("choosing_start.md")
PROTOCOL_WORDS = Path(__file__).with_name("choosing_protocol.md")
HISTORY = Path(__file__).with_name("choosing_history.md")
END = Path(__file__).with_name("choosing_end.md")
"""What the page says beside the numbers."""
FRESH = "fresh"
"""Networks that were scored once, after the library's rule had been locked."""
GROUPS = ("development", "test", "new", "unseen", FRESH)
"""Groups of networks, as choosing.toml explains them."""


@dataclass(frozen=True)
class Tables:
    """What the rules work with, of one network; candidates are rows."""

    #: (D,) AUROC on each kind
    kinds: dict[str, Floats]
    #: (D, N) log p-values on the test set and on each OOD set
    log_p: dict[str, Floats]
    #: (D,) AUROC on each OOD set
    single: dict[str, Floats]
    #: (D,) FPR95 on each OOD set
    single_fpr: dict[str, Floats]

    @classmethod
    def from_scores(cls, scores: StudyScores) -> Tables:
        """The tables of a network."""
        held_out = scores.sets["held out"]
        test = scores.sets["test"]
        kinds = {}
        for kind in scores.kinds:
            outside = scores.sets[f"kind {kind}"]
            kinds[kind] = np.array([auroc(*pair) for pair in zip(held_out, outside)])
        kinds[HOLD_OUT] = scores.class_hold_out
        log_p = {"test": _log_p_values(held_out, test)}
        single = {}
        single_fpr = {}
        for name in scores.ood:
            outside = scores.sets[f"ood {name}"]
            log_p[name] = _log_p_values(held_out, outside)
            single[name] = np.array([auroc(*pair) for pair in zip(test, outside)])
            single_fpr[name] = np.array([fpr_at_tpr(*pair) for pair in zip(test, outside)])
        return cls(kinds, log_p, single, single_fpr)


def _log_p_values(calibration: Floats, scores: Floats) -> Floats:
    """As `Ensemble.p_values` has them: (1 + #{calibration ≤ s}) / (n + 1), linear in between."""
    rows = []
    for known, values in zip(calibration, scores):
        count = len(known)
        levels = (np.arange(1, count + 1) + 1) / (count + 1)
        rows.append(np.interp(values, np.sort(known), levels, left=1 / (count + 1)))
    logs: Floats = np.log(np.stack(rows))
    return logs


FIRST_POOL = tuple(name for name in POOL if name not in ("optfs", "kpca", "react(90)+vim"))
"""The pool of the first rule."""
SECOND_POOL = (*FIRST_POOL, "optfs")
THIRD_POOL = (*SECOND_POOL, "kpca")


@dataclass(frozen=True)
class Rule:
    """One way to combine detectors by their AUROCs on the kinds."""

    name: str
    beta: float = 0.5
    #: "trimmed", "mean", "median", "lower" or "upper"
    average: str = "trimmed"
    kinds: tuple[str, ...] = WEIGHING
    pool: tuple[str, ...] = FIRST_POOL
    #: or "harmonic"
    combine: str = "fisher"
    least: float = 0.0

    def weights(self, scores: StudyScores, tables: Tables) -> Floats:
        """(D,) weights of all candidates, 0 for those that are not in the pool."""
        places = [scores.candidates.index(name) for name in self.pool if name in scores.candidates]
        kinds = [kind for kind in self.kinds if kind in tables.kinds]
        if not kinds:
            # Texts have kinds of their own.
            kinds = scores.kinds
        aurocs = np.array([tables.kinds[kind][places] for kind in kinds])
        # A kind that is not there for all of the pool says nothing on this network.
        aurocs = aurocs[~np.isnan(aurocs).any(axis=1)]
        if len(aurocs) == 0:
            # Without any kind all weights are equal.
            aurocs = np.zeros((1, len(places)))
        points = 100 * _averaged(aurocs, self.average)
        raw = np.exp(self.beta * (points - points.max()))
        shares = raw / raw.sum()
        shares[shares < self.least] = 0
        weights = np.zeros(len(scores.candidates))
        weights[places] = shares / shares.sum()
        return weights

    def evaluate(self, scores: StudyScores, tables: Tables) -> dict[str, tuple[float, float]]:
        """AUROC and FPR95 on each OOD set."""
        weights = self.weights(scores, tables)
        combined = {name: self._combined(weights, log_p) for name, log_p in tables.log_p.items()}
        inside = combined["test"]
        found = {}
        for name in scores.ood:
            found[name] = auroc(inside, combined[name]), fpr_at_tpr(inside, combined[name])
        return found

    def _combined(self, weights: Floats, log_p: Floats) -> Floats:
        if self.combine == "fisher":
            return np.asarray(weights @ log_p)
        return np.asarray(-np.log(weights @ np.exp(-log_p)))


def _averaged(aurocs: Floats, how: str) -> Floats:
    """(D,) one number for each detector, of AUROCs (K, D)."""
    if how == "mean":
        return np.asarray(aurocs.mean(axis=0))
    if how == "trimmed":
        if len(aurocs) < 3:
            return np.asarray(aurocs.mean(axis=0))
        return np.asarray(np.sort(aurocs, axis=0)[1:-1].mean(axis=0))
    share = {"median": 0.5, "lower": 0.3, "upper": 0.7}[how]
    return np.asarray(np.quantile(aurocs, share, axis=0))


LOCKED = Rule("the first rule", least=0.02)
FIRST = Rule("median over the kinds, nothing left out", average="median")
"""The rule that the study began with."""
EQUAL = Rule("six detectors, equal, Fisher", beta=0, pool=EQUAL_POOL)
EQUAL_HARMONIC = Rule("six detectors, equal, harmonic", beta=0, pool=EQUAL_POOL, combine="harmonic")
COMPARED = (FIRST, EQUAL, EQUAL_HARMONIC)
TRIED = (
    FIRST,
    *(Rule(f"median, β = {beta}", beta=beta, average="median") for beta in (0.2, 0.3, 0.7, 1.0)),
    Rule("all 17 equal, Fisher", beta=0),
    Rule("all 17 equal, harmonic", beta=0, combine="harmonic"),
    EQUAL,
    EQUAL_HARMONIC,
    Rule("mean over the kinds", average="mean"),
    Rule("30 % quantile over the kinds", average="lower"),
    Rule("70 % quantile over the kinds", average="upper"),
    Rule("median, harmonic", average="median", combine="harmonic"),
    *(
        Rule(f"median, shares from {least:.0%}", average="median", least=least)
        for least in (0.01, 0.02, 0.04, 0.06)
    ),
    Rule(
        "median, with two nearer kinds", average="median", kinds=(*WEIGHING, "mixture", "quarters")
    ),
    Rule("median, the four nearer kinds alone", average="median", kinds=NEAR_KINDS),
    Rule("median, all twelve kinds", average="median", kinds=(*WEIGHING, *NEAR_KINDS)),
    Rule(
        "median, no bank",
        average="median",
        pool=tuple(name for name in FIRST_POOL if name not in ("knn", "nnguide")),
    ),
    Rule("median, with ssd, mds, rmds", average="median", pool=(*FIRST_POOL, "ssd", "mds", "rmds")),
    Rule("trimmed mean, nothing left out"),
    *(Rule(f"trimmed mean, shares from {least:.0%}", least=least) for least in (0.01, 0.03)),
    *(Rule(f"trimmed mean, β = {beta}, from 1 %", beta=beta, least=0.01) for beta in (0.3, 0.7)),
    Rule("trimmed mean, harmonic, from 1 %", combine="harmonic", least=0.01),
)
"""Rules that were tried on the development networks before one was locked."""

SECOND = Rule("the second rule", beta=0.3, least=0.02, pool=SECOND_POOL)
"""Locked on the development networks after the first one's results on the test networks were
known."""
THIRD = Rule("the third rule", beta=0.3, least=0.02, pool=THIRD_POOL)
"""Locked on four networks, on all of which earlier rules had been scored."""
THIRD_TRIED = 19
"""Variants that were tried before the third rule was locked."""
FOURTH = Rule("the fourth rule", beta=BETA, least=LEAST_SHARE, pool=POOL)
"""Locked on all networks but the fresh ones; the library follows it."""


def _last_rules() -> list[Rule]:
    """The fourth round: what joins the third rule's pool, how AUROCs are averaged and over which
    kinds, and β."""
    pools: list[tuple[str, ...]] = [
        (),
        ("react(90)+vim",),
        ("mds++",),
        ("react(90)+vim", "mds++"),
        ("react(90)+vim", "react(90)+gen", "residual"),
    ]
    kinds: list[tuple[str, ...]] = [(), ("half-turn",), ("negative",)]
    rules = []
    for joined in pools:
        for nearer in kinds:
            for average in ("trimmed", "mean"):
                for beta in (0.2, 0.3, 0.5):
                    words = ", ".join((*joined, *nearer, average, f"β = {beta}"))
                    rule = Rule(
                        words,
                        beta=beta,
                        average=average,
                        kinds=(*WEIGHING, *nearer),
                        pool=(*THIRD_POOL, *joined),
                        least=LEAST_SHARE,
                    )
                    rules.append(rule)
    return rules


LAST = tuple(_last_rules())
"""Rules that were tried before the fourth one was locked; it and the third one are among them."""


def _near_rules() -> list[Rule]:
    """The second round: kinds that are nearer, and other detectors and weights beside them."""
    turned = (*WEIGHING, "half-turn")
    deprived = (*WEIGHING, HOLD_OUT)
    both = (*deprived, "half-turn")
    pool = (*FIRST_POOL, "mds++", "kpca")
    return [
        Rule("with half-turn", kinds=turned, least=LEAST_SHARE),
        Rule("with class hold-out", kinds=deprived, least=LEAST_SHARE),
        Rule("with class hold-out, half-turn", kinds=both, least=LEAST_SHARE),
        Rule(
            "with class hold-out, half-turn, mixture", kinds=(*both, "mixture"), least=LEAST_SHARE
        ),
        Rule(
            "median, with class hold-out, half-turn",
            average="median",
            kinds=both,
            least=LEAST_SHARE,
        ),
        Rule("class hold-out alone", average="mean", kinds=(HOLD_OUT,), least=LEAST_SHARE),
        Rule(
            "class hold-out and half-turn alone",
            average="mean",
            kinds=(HOLD_OUT, "half-turn"),
            least=LEAST_SHARE,
        ),
        Rule("trimmed mean, β = 0.3, from 2 %", beta=0.3, least=LEAST_SHARE),
        Rule("trimmed mean, β = 0.2, from 2 %", beta=0.2, least=LEAST_SHARE),
        Rule("with mds++", pool=(*FIRST_POOL, "mds++"), least=LEAST_SHARE),
        Rule("with mds++, optfs, kpca", pool=(*pool, "optfs"), least=LEAST_SHARE),
        Rule("with ssd, mds++, kpca", pool=(*pool, "ssd"), least=LEAST_SHARE),
        Rule(
            "with class hold-out, half-turn, mds++, kpca", kinds=both, pool=pool, least=LEAST_SHARE
        ),
        Rule("with class hold-out, half-turn, β = 0.3", kinds=both, beta=0.3, least=LEAST_SHARE),
        Rule(
            "with class hold-out, half-turn, harmonic",
            kinds=both,
            combine="harmonic",
            least=LEAST_SHARE,
        ),
    ]


def _pool_rules() -> list[Rule]:
    """The second round: newer detectors in the pool, by average, β and least share."""
    first: list[tuple[str, ...]] = [("mds++",), ("mds++", "kpca"), ("mds++", "ssd")]
    last: list[tuple[str, ...]] = [("optfs",), ("mds++", "optfs"), ("mds++", "optfs", "kpca")]
    rules = []
    for others in first:
        for average in ("trimmed", "median"):
            for beta in (0.2, 0.3, 0.5):
                for least in (0.0, 0.01, 0.02):
                    rules.append(_pool_rule(others, average, beta, least))
    for others in last:
        for average in ("trimmed", "median"):
            for beta in (0.3, 0.5):
                if (others, average, beta) == (("optfs",), "trimmed", SECOND.beta):
                    # That is the one that was taken.
                    continue
                rules.append(_pool_rule(others, average, beta, LEAST_SHARE))
    return rules


def _pool_rule(others: tuple[str, ...], average: str, beta: float, least: float) -> Rule:
    words = f"{average}, β = {beta}, from {least:.0%}, with {', '.join(others)}"
    return Rule(words, beta=beta, average=average, least=least, pool=(*FIRST_POOL, *others))


LATER = (*_near_rules(), *_pool_rules())
"""Rules that were tried before the second one was locked."""
SHOWN = 12
"""Rules of the second round that the page shows: the best, in order."""


@dataclass(frozen=True)
class Regrets:
    """Regrets of one rule or fixed choice over networks, in points of AUROC."""

    name: str
    all_sets: Floats
    far: Floats
    #: of the networks that have near sets
    near: Floats
    #: mean FPR95 over all sets, percent, of each network
    fpr: Floats

    def row(self) -> list[str]:
        """Cells of a table."""
        parts = [_with_interval(values) for values in (self.all_sets, self.far, self.near)]
        worst = f"{self.all_sets.max():.2f}"
        return [self.name, parts[0], worst, parts[1], parts[2], f"{self.fpr.mean():.1f}"]


Networks = list[tuple[StudyScores, Tables]]
COLUMNS = ("", "mean regret", "worst", "far", "near", "mean FPR95, %")


def regrets_of(rule: Rule, networks: Sequence[tuple[StudyScores, Tables]]) -> Regrets:
    """Regrets of a rule's weighted ensemble."""

    def found(scores: StudyScores, tables: Tables) -> dict[str, tuple[float, float]]:
        return rule.evaluate(scores, tables)

    return _regrets(rule.name, found, networks)


def regrets_of_single(name: str, networks: Sequence[tuple[StudyScores, Tables]]) -> Regrets:
    """Regrets of one detector, if it is used on all networks."""

    def found(scores: StudyScores, tables: Tables) -> dict[str, tuple[float, float]]:
        place = scores.candidates.index(name)
        return {
            each: (tables.single[each][place], tables.single_fpr[each][place])
            for each in scores.ood
        }

    return _regrets(f"always {name}", found, networks)


def _regrets(
    name: str,
    evaluate: Callable[[StudyScores, Tables], dict[str, tuple[float, float]]],
    networks: Sequence[tuple[StudyScores, Tables]],
) -> Regrets:
    everything = []
    far = []
    near = []
    fpr = []
    for scores, tables in networks:
        found = evaluate(scores, tables)
        everything.append(_regret(found, tables, scores.ood))
        far_sets = [each for each in scores.ood if each not in scores.near]
        far.append(_regret(found, tables, far_sets))
        if scores.near:
            near.append(_regret(found, tables, list(scores.near)))
        fpr.append(100 * float(np.mean([rate for _, rate in found.values()])))
    return Regrets(name, np.array(everything), np.array(far), np.array(near), np.array(fpr))


def _regret(found: dict[str, tuple[float, float]], tables: Tables, sets: Sequence[str]) -> float:
    best = np.mean([tables.single[name] for name in sets], axis=0).max()
    return 100 * float(best - np.mean([found[name][0] for name in sets]))


def best_fixed(networks: Sequence[tuple[StudyScores, Tables]], among: set[str]) -> str:
    """The one of these candidates with the least mean regret on these networks."""
    return min(sorted(among), key=lambda name: regrets_of_single(name, networks).all_sets.mean())


def _with_interval(values: Floats) -> str:
    """The mean with Student's 95 % interval."""
    if len(values) == 0:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * values.std(ddof=1) / math.sqrt(len(values))
    return f"{values.mean():.2f} ± {half:.2f}"


def report(networks: Sequence[StudyScores], missing: Sequence[str], protocol: Protocol) -> str:
    """The page: what the library does and how well, then the protocol, the limits and, last, how
    the rule came about."""
    everything = [(scores, Tables.from_scores(scores)) for scores in networks]
    groups: dict[str, Networks] = {group: [] for group in GROUPS}
    for scores, tables in everything:
        groups[scores.group].append((scores, tables))
    fixed = _fixed_choices(everything, groups["development"])
    lines = [
        START.read_text(encoding="utf-8").format(
            pool=len(POOL),
            kinds=", ".join(WEIGHING),
            beta=BETA,
            least=LEAST_SHARE,
            equal=", ".join(EQUAL_POOL),
        ),
        *_results(everything, fixed),
        PROTOCOL_WORDS.read_text(encoding="utf-8").format(
            candidates=len(protocol.candidates), **_numbers_tried()
        ),
        END.read_text(encoding="utf-8"),
        *_history(groups),
        *_tried(groups["development"]),
        "",
        *_what_was_run(networks, missing),
    ]
    return "\n".join(lines) + "\n"


def _numbers_tried() -> dict[str, int]:
    """How many rules were tried before each of the four was locked."""
    return {
        "first": len(TRIED) + 1,
        "second": len(LATER) + 1,
        "third": THIRD_TRIED,
        "fourth": len(LAST),
    }


def _fixed_choices(networks: Networks, development: Networks) -> list[str]:
    """Detectors that are compared with the rule, the best on the development networks first."""
    fixed = list(FIXED)
    if development:
        # A detector that failed on another network cannot be compared with there.
        known = set.intersection(*(set(scores.candidates) for scores, _ in networks))
        fixed.insert(0, best_fixed(development, known))
    return list(dict.fromkeys(fixed))


def _results(networks: Networks, fixed: Sequence[str]) -> list[str]:
    """What the library's rule reached: on the networks that were scored after it had been locked,
    then on those that it was chosen by."""
    fresh: Networks = []
    chosen_by: Networks = []
    for scores, tables in networks:
        group = fresh if scores.group == FRESH else chosen_by
        group.append((scores, tables))
    compared = (FOURTH, THIRD, EQUAL, EQUAL_HARMONIC)
    lines = ["## How well it does", "", _how_to_read()]
    if fresh:
        lines += ["", "### On networks that were scored once, after it had been fixed", ""]
        lines += _verdicts(FOURTH, fresh, fixed)
        lines += ["", *_by_network(FOURTH, fresh)]
        lines += ["", *_comparison(fresh, compared, fixed)]
    if chosen_by:
        lines += ["", "### On the networks that it was chosen by", ""]
        if len(chosen_by) > 1:
            lines += [_words_on_left_out(left_out(LAST, chosen_by)), ""]
        lines += _by_network(FOURTH, chosen_by)
        lines += ["", *_comparison(chosen_by, compared, fixed)]
    return [*lines, ""]


def left_out(rules: Sequence[Rule], networks: Networks) -> Floats:
    """Regrets on each network of the rule that has the least mean regret on all the others."""
    regrets = np.stack([regrets_of(rule, networks).all_sets for rule in rules])
    found = []
    for place in range(len(networks)):
        of_others = np.delete(regrets, place, axis=1).mean(axis=1)
        found.append(regrets[of_others.argmin(), place])
    return np.array(found)


def _words_on_left_out(regrets: Floats) -> str:
    return (
        "The numbers of these tables are too good, since the rule was chosen by them. How much so, "
        f"leaving one network out shows: if the best of the {len(LAST)} rules that were tried is "
        "chosen by all of these networks but one, its mean regret on the one left out is "
        f"{regrets.mean():.2f}, and the worst {regrets.max():.2f}."
    )


def _how_to_read() -> str:
    return (
        "**Regret** is how many points of AUROC the rule is below the single detector that is best "
        "*in hindsight* on the same network, on the mean over its real OOD sets; below zero it is "
        "better than every single detector. Far and near are regrets over the far and the near "
        "sets alone. The targets were set before the study: a mean regret of at most 0.5, at most "
        "2 on any network, and an FPR95 no worse than that of the best fixed choice."
    )


def _history(groups: dict[str, Networks]) -> list[str]:
    """All rules that were locked, on all groups of networks."""
    present = [group for group in GROUPS if groups[group]]
    rows = []
    for rule in (LOCKED, SECOND, THIRD, FOURTH):
        row = [rule.name]
        for group in present:
            regrets = regrets_of(rule, groups[group]).all_sets
            row.append(f"{regrets.mean():.2f} ({regrets.max():.2f})")
        rows.append(row)
    titles = [f"{group} ({len(groups[group])})" for group in present]
    words = HISTORY.read_text(encoding="utf-8").format(**_numbers_tried())
    lines = ["## How the rule came about", "", words]
    lines += ["Mean regret, and in brackets the worst, by group of networks (and how many):", ""]
    return [*lines, *_table(["", *titles], rows), ""]


def _tried(networks: Networks) -> list[str]:
    """Tables of what was tried before the first and the second rule were locked."""
    if not networks:
        return []
    lines = ["## Rules that were tried", ""]
    lines += [
        "On the development networks. With networks this few, the differences between most of "
        "these rules are within their errors.",
        "",
        f"Before the first rule was locked, {len(TRIED) + 1} rules were tried:",
        "",
    ]
    lines += _table(COLUMNS, _rows_in_order((LOCKED, *TRIED), networks))
    lines += [
        "",
        f"Before the second one, {len(LATER) + 1} more; the {SHOWN} best of them, with the two "
        "locked ones:",
        "",
    ]
    return [
        *lines,
        *_table(COLUMNS, _rows_in_order((LOCKED, SECOND, *LATER), networks, SHOWN)),
    ]


def _what_was_run(networks: Sequence[StudyScores], missing: Sequence[str]) -> list[str]:
    """How the page was made, and of which networks."""
    titles = "; ".join(scores.title for scores in networks)
    lines = [
        "## How this page was made",
        "",
        f"`python -m fdbd.paper.choosing` ran the study and wrote every number, on {len(networks)} "
        f"networks: {titles}. [Datasets](datasets.md) says where the data come from; weights and "
        "presets are named in `src/fdbd/paper/choosing.toml`.",
    ]
    if missing:
        lines += ["", "Not run:", "", *(f"- {line}" for line in missing)]
    return lines


def _rows_in_order(
    rules: Sequence[Rule], networks: Sequence[tuple[StudyScores, Tables]], most: int | None = None
) -> list[list[str]]:
    """Rows of a table, the least regret first: all, or the first `most` and the locked ones."""
    found = sorted(
        (regrets_of(rule, networks) for rule in rules), key=lambda each: each.all_sets.mean()
    )
    locked = (LOCKED.name, SECOND.name)
    rows = []
    for place, regrets in enumerate(found):
        if most is None or place < most or regrets.name in locked:
            rows.append(regrets.row())
    return rows


def _comparison(
    networks: Sequence[tuple[StudyScores, Tables]], rules: Sequence[Rule], fixed: Sequence[str]
) -> list[str]:
    rows = [regrets_of(rule, networks).row() for rule in rules]
    for name in dict.fromkeys(fixed):
        rows.append(regrets_of_single(name, networks).row())
    return _table(COLUMNS, rows)


def _verdicts(
    rule: Rule, networks: Sequence[tuple[StudyScores, Tables]], fixed: Sequence[str]
) -> list[str]:
    """What was to be reached, and what was."""
    locked = regrets_of(rule, networks)
    names = list(dict.fromkeys(fixed))
    rates = {name: regrets_of_single(name, networks).fpr.mean() for name in names}
    least = min(rates, key=lambda name: rates[name])

    def mark(is_reached: bool) -> str:
        return "reached" if is_reached else "**not reached**"

    mean = locked.all_sets.mean()
    worst = locked.all_sets.max()
    rate = locked.fpr.mean()
    return [
        f"- Mean regret at most 0.5 points: {mean:.2f}, {mark(mean <= 0.5)}.",
        f"- Worst regret at most 2 points: {worst:.2f}, {mark(worst <= 2)}.",
        f"- FPR95 no worse than the best of these fixed choices ({least}, {rates[least]:.1f} %): "
        f"{rate:.1f} %, {mark(rate <= rates[least])}.",
    ]


def _by_network(rule: Rule, networks: Sequence[tuple[StudyScores, Tables]]) -> list[str]:
    rows = []
    for scores, tables in networks:
        found = rule.evaluate(scores, tables)
        means = np.mean([tables.single[name] for name in scores.ood], axis=0)
        best = int(means.argmax())
        weights = rule.weights(scores, tables)
        heaviest = int(weights.argmax())
        own = float(np.mean([value for value, _ in found.values()]))
        far_sets = [each for each in scores.ood if each not in scores.near]
        far = near = ""
        if far_sets:
            far = f"{_regret(found, tables, far_sets):.2f}"
        if scores.near:
            near = f"{_regret(found, tables, list(scores.near)):.2f}"
        fpr = np.mean([rate for _, rate in found.values()])
        rows.append(
            [
                scores.title,
                f"{100 * own:.2f}",
                f"{scores.candidates[best]} {100 * means[best]:.2f}",
                f"{100 * (means[best] - own):.2f}",
                far,
                near,
                f"{100 * fpr:.1f}",
                f"{100 * means[scores.candidates.index('fdbd')]:.2f}",
                f"{int((weights > 0).sum())}",
                f"{scores.candidates[heaviest]} {100 * weights[heaviest]:.0f} %",
            ]
        )
    titles = (
        "network",
        "auto, AUROC",
        "best single in hindsight",
        "regret",
        "far",
        "near",
        "auto, FPR95",
        "fdbd, AUROC",
        "members",
        "heaviest",
    )
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def run(
    protocol: Protocol, entries: Sequence[NetworkEntry], device: str = "auto"
) -> tuple[list[StudyScores], list[str]]:
    """Scores on all networks that are available here, and why others are not."""
    found = []
    missing = []
    for entry in entries:
        try:
            found.append(scores_of(entry, protocol, _say, device))
        except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
            missing.append(f"{entry.title}: {one_line(error)}")
    return found, missing


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m fdbd.paper.choosing", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/choosing.md"), help="the page")
    parser.add_argument("--networks", nargs="*", help="titles of networks; default: all")
    parser.add_argument("--device", default="auto", help="where networks run")
    options = parser.parse_args(arguments)
    protocol = Protocol.read()
    entries = protocol.networks
    missing = []
    if options.networks is not None:
        entries = tuple(entry for entry in entries if entry.title in options.networks)
        left_out = [entry.title for entry in protocol.networks if entry not in entries]
        missing = [f"{title}: not asked for" for title in left_out]
    found, failed = run(protocol, entries, options.device)
    if not found:
        raise SystemExit("no network of the study is available here: " + "; ".join(failed))
    write_text(options.out, report(found, [*missing, *failed], protocol))
    print(options.out)


if __name__ == "__main__":
    main()
