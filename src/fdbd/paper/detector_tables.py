"""Tables of detectors: models side by side, averages first, then every set; and who beats whom."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fdbd.bench import Results, Row
from fdbd.bench.config import detectors_from
from fdbd.bench.figures import Floats
from fdbd.bench.rows import convention
from fdbd.data.datasets import DatasetUnavailable
from fdbd.detectors import KNN
from fdbd.metrics import Comparison, as_percent, fpr_at_tpr
from fdbd.paper import plot
from fdbd.paper.finding import Finding, Statement, difference
from fdbd.paper.image_detectors import image_results
from fdbd.paper.models import EvaluatedModel, average, load_models
from fdbd.paper.settings import DetectorTable
from fdbd.util.terminal import one_line

METRICS = ("auroc", "fpr95")
LEVEL = 0.01
"""Detectors within a point of each other, in AUROC and in FPR95, are called level."""
_RESAMPLES = 300


class ModelResults(NamedTuple):
    """The results of one model: on all features, and perhaps of detectors that need images, on a
    part of the samples."""

    on_features: Results
    on_images: Results | None

    def all(self) -> list[Results]:
        """Both, or the only ones there are."""
        return [results for results in self if results is not None]

    def having_both(self, first: str, second: str) -> Results | None:
        """Results that have two detectors: on all features if neither needs images, else on the
        same images; None if one is missing."""
        for results in self.all():
            if {first, second} <= {row.name for row in results.finished}:
                return results
        return None

    def having(self, name: str) -> Results | None:
        """Results that have a detector, on all features if it does not need images; None if it is
        missing."""
        return self.having_both(name, name)


def detector_table(finding: Finding, settings: DetectorTable) -> None:
    """Run the detectors of an experiment on each of its models."""
    models = load_models(finding)
    found = {model.title: _run(model, settings, finding) for model in models}
    _table_of_averages(found, finding)
    for title, results in found.items():
        _decide_pairs(results, title, settings, finding)
        _decide_cost(results.on_features, title, settings, finding)
        _decide_near_chance(results.on_features, title, settings, finding)
        for part in results.all():
            finding.more.append((part.to_markdown(), part.to_latex()))
    for first, detector, second, other in settings.across_models:
        _decide_across_models(found, (first, detector), (second, other), finding)
    _table_of_the_papers_numbers(models, found, settings, finding)
    _add_notes(models, found, settings, finding)
    finding.data = {}
    for title, results in found.items():
        finding.data[title] = [part.to_dict() for part in results.all()]
    _draw(found, finding)


def _run(model: EvaluatedModel, settings: DetectorTable, finding: Finding) -> ModelResults:
    specs = model.entry.detectors or settings.detectors
    finding.say(f"{len(specs)} detectors on {model.title}")
    # Timing takes longer than all else, so it is done only if a statement asks for it.
    on_features = model.run(specs, latency=settings.cost_below is not None)
    for row in on_features.failures:
        finding.missing.append(f"{row.name} on {model.title} failed: {row.error}")
    wanted = model.entry.images
    on_images = None
    if wanted:
        finding.say(f"{', '.join(wanted)} on images of {model.title}")
        try:
            on_images = image_results(model, wanted, settings.image_limit, settings.image_fit_limit)
        except (DatasetUnavailable, OSError) as error:
            reason = one_line(error)
            finding.missing.append(f"{', '.join(wanted)} on {model.title} need images: {reason}")
    return ModelResults(on_features, on_images)


class _Entry(NamedTuple):
    """A row of the table; `mark` is a dagger if its detector needs images."""

    results: Results
    row: Row
    mark: str


def _entries(results: ModelResults) -> list[_Entry]:
    """The rows of a model, best first, then those on images, without fDBD's second row."""
    found = [_Entry(results.on_features, row, "") for row in results.on_features.ranked()]
    if results.on_images is not None:
        for row in results.on_images.ranked():
            if row.name != "fdbd":
                found.append(_Entry(results.on_images, row, " †"))
    return found


def _table_of_averages(found: Mapping[str, ModelResults], finding: Finding) -> None:
    rows: list[list[str]] = []
    notes: list[str] = []
    for title, results in found.items():
        notes.append(_note_on_sets(title, results.on_features))
        entries = _entries(results)
        for entry in entries:
            is_best = entry is entries[0] and not entry.mark
            cells = [_average_cell(entry, "auroc", is_best), _average_cell(entry, "fpr95", False)]
            rows.append([title, entry.row.name + entry.mark, *cells, *_cost_cells(entry, results)])
    columns = [
        "model",
        "detector",
        "AUROC ↑",
        "FPR95 ↓",
        "extra µs per sample",
        "of the forward pass",
    ]
    finding.table(columns, rows, *notes)


def _note_on_sets(title: str, results: Results) -> str:
    setting = results.setting
    accuracy = ""
    if setting.accuracy is not None:
        accuracy = f", accuracy {as_percent(setting.accuracy)} %"
    return (
        f"{title}: ID {setting.test[0]}{accuracy}; average over {', '.join(setting.ood)}; "
        f"fitted on {setting.num_train:,} samples."
    )


def _average_cell(entry: _Entry, metric: str, is_bold: bool) -> str:
    text = as_percent(average(entry.results, entry.row.name, metric))
    if entry.mark:
        text += f" (fdbd {as_percent(average(entry.results, 'fdbd', metric))})"
    return f"**{text}**" if is_bold else text


def _cost_cells(entry: _Entry, results: ModelResults) -> list[str]:
    """Microseconds per sample, and their share of the forward pass; empty if nothing was timed."""
    if not entry.row.latencies:
        return ["", ""]
    seconds = entry.row.latencies[-1].median
    forward = results.on_features.setting.forward_seconds
    share = f"{seconds / forward:.2%}" if forward else ""
    return [f"{seconds * 1e6:.3g}", share]


def _decide_pairs(
    results: ModelResults, title: str, settings: DetectorTable, finding: Finding
) -> None:
    """Who is said to beat whom, on one model."""
    kinds = (
        (settings.better, beats),
        (settings.better_on_every_set, beats_everywhere),
        (settings.level, levels),
    )
    for pairs, decide in kinds:
        for first, second in pairs:
            part = results.having_both(first, second)
            if part is None:
                continue
            decided = decide(part, first, second, title)
            why = _why_not_comparable(title, second, settings)
            if why:
                text = f"{decided.measured} Not comparable: {why}"
                decided = Statement(decided.statement, "not tested", text)
            finding.statements.append(decided)


def _why_not_comparable(title: str, detector: str, settings: DetectorTable) -> str:
    """Why a detector's row on a model says nothing about the paper's; empty if it does."""
    for entry in settings.not_comparable:
        if title in entry.models and detector in entry.detectors:
            return entry.why
    return ""


def beats(results: Results, first: str, second: str, title: str) -> Statement:
    """Whether one detector beats another in average AUROC and average FPR95; undecided if the
    difference in AUROC is within its error, or if the two metrics disagree."""
    statement = f"{first} separates ID from OOD better than {second} ({title})"
    comparison = results.compare(first, second)
    text = _both_metrics(results, first, second)
    has_lower_fpr = average(results, first, "fpr95") < average(results, second, "fpr95")
    disagreeing_verdict = "lower" if has_lower_fpr else "higher"
    if comparison.verdict() == disagreeing_verdict:
        return Statement(statement, "undecided", f"{text} The two metrics disagree.")
    return Statement.from_outcome(statement, comparison, text)


def beats_everywhere(results: Results, first: str, second: str, title: str) -> Statement:
    """Whether one detector beats another in AUROC on every OOD set; one set on which it is worse
    decides against it."""
    statement = f"{first} separates better than {second} on every OOD set ({title})"
    tests = {name: results.compare(first, second, name) for name in results.setting.ood}
    differences = [f"{name} {100 * test.difference:+.2f}" for name, test in tests.items()]
    text = f"Points of AUROC: {', '.join(differences)}."
    return Statement.from_outcome(statement, list(tests.values()), text)


def levels(results: Results, first: str, second: str, title: str) -> Statement:
    """Whether one detector is at most a point worse than another, in average AUROC and in average
    FPR95."""
    statement = (
        f"{first} is level with {second} or better: at most a point of AUROC below and a point of "
        f"FPR95 above ({title})"
    )
    auroc = results.compare(first, second)
    above_margin = Comparison.from_difference(auroc.difference + LEVEL, auroc.standard_error)
    fpr = fpr_difference(results, second, first)
    below_margin = Comparison.from_difference(fpr.difference + LEVEL, fpr.standard_error)
    text = _both_metrics(results, first, second)
    return Statement.from_outcome(statement, [above_margin, below_margin], text)


def fpr_difference(results: Results, first: str, second: str, seed: int = 0) -> Comparison:
    """Average FPR95 of the first detector minus that of the second, on the same samples; the error
    is that of a paired bootstrap, which draws the same ID and OOD samples for both."""
    # (2, N) each: the scores of both detectors.
    inside = _scores_of_both(results, first, second)
    outside = [_scores_of_both(results, first, second, name) for name in results.setting.ood]
    random = np.random.default_rng(seed)
    differences = np.zeros(_RESAMPLES)
    for number in range(_RESAMPLES):
        # All OOD sets share their ID samples, so these are drawn once.
        drawn_id = inside[:, random.integers(inside.shape[1], size=inside.shape[1])]
        for of_set in outside:
            drawn_ood = of_set[:, random.integers(of_set.shape[1], size=of_set.shape[1])]
            rate_of_first = fpr_at_tpr(drawn_id[0], drawn_ood[0])
            rate_of_second = fpr_at_tpr(drawn_id[1], drawn_ood[1])
            differences[number] += (rate_of_first - rate_of_second) / len(outside)
    measured = float(average(results, first, "fpr95")) - float(average(results, second, "fpr95"))
    return Comparison.from_difference(measured, float(differences.std(ddof=1)))


def _scores_of_both(results: Results, first: str, second: str, ood: str | None = None) -> Floats:
    """(2, N) scores of two detectors on an OOD set, None: on the ID set."""
    scores = []
    for row in (results.row(first), results.row(second)):
        values = row.id_scores if ood is None else row.ood_scores[ood]
        scores.append(values.double().numpy())
    return np.stack(scores)


def _both_metrics(results: Results, first: str, second: str) -> str:
    auroc = _first_against_second(results, first, second, "auroc")
    fpr = _first_against_second(results, first, second, "fpr95")
    return f"AUROC {auroc}, FPR95 {fpr}."


def _first_against_second(results: Results, first: str, second: str, metric: str) -> str:
    of_first = as_percent(average(results, first, metric))
    of_second = as_percent(average(results, second, metric))
    return f"{of_first} against {of_second}"


def _decide_cost(results: Results, title: str, settings: DetectorTable, finding: Finding) -> None:
    forward = results.setting.forward_seconds
    if settings.cost_below is None or not forward:
        return
    for row in results.finished:
        if row.name == "fdbd":
            seconds = row.latencies[-1].median
            share = seconds / forward
            limit = f"{settings.cost_below:.0%}"
            times = f"{seconds * 1e6:.2g} µs per sample against {forward * 1e3:.2g} ms"
            finding.decide(
                f"fdbd adds less than {limit} to the forward pass ({title})",
                share < settings.cost_below,
                f"{times}: {share:.3%}.",
            )


def _decide_near_chance(
    results: Results, title: str, settings: DetectorTable, finding: Finding
) -> None:
    for name in settings.near_chance:
        auroc = average(results, name, "auroc")
        finding.decide(
            f"{name} alone hardly separates: AUROC between 40 and 60 ({title})",
            0.4 < auroc < 0.6,
            f"AUROC {as_percent(auroc)}.",
        )


def _decide_across_models(
    found: Mapping[str, ModelResults],
    better: tuple[str, str],
    worse: tuple[str, str],
    finding: Finding,
) -> None:
    """Whether one (model, detector) separates better than another, if both are there."""
    values = []
    for title, name in (better, worse):
        results = found[title].having(name) if title in found else None
        if results is None:
            return
        values.append(average(results, name, "auroc"))
    first, detector = better
    second, other = worse
    than = f"on the {second} model"
    if detector != other:
        than = f"{other} {than}"
    finding.decide(
        f"{detector} on the {first} model separates better than {than}",
        difference(*values),
        f"AUROC {as_percent(values[0])} against {as_percent(values[1])}.",
    )


def _table_of_the_papers_numbers(
    models: Sequence[EvaluatedModel],
    found: Mapping[str, ModelResults],
    settings: DetectorTable,
    finding: Finding,
) -> None:
    """Numbers that the paper's text gives, beside ours: figures and no verdicts, unless network and
    data are the paper's."""
    rows: list[list[str]] = []
    for model in models:
        accuracy = found[model.title].on_features.setting.accuracy
        if model.entry.paper_accuracy is not None and accuracy is not None:
            paper = f"{model.entry.paper_accuracy:.2f}"
            rows.append(["accuracy, percent", model.title, paper, as_percent(accuracy)])
    for cut in settings.cuts:
        for title, results in found.items():
            part = results.having_both(cut.first, cut.second)
            if part is None:
                continue
            first = average(part, cut.first, "fpr95")
            second = average(part, cut.second, "fpr95")
            here = 100 * (1 - float(first) / float(second))
            what = f"FPR95 of {cut.first} below that of {cut.second}, percent of the latter"
            rows.append([what, title, f"{cut.paper:.2f}", f"{here:.2f}"])
    if rows:
        finding.table(
            ["number", "model", "the paper", "here"],
            rows,
            "The paper's numbers are of its own networks and OOD sets.",
            title="Numbers of the paper's text",
        )


def _add_notes(
    models: Sequence[EvaluatedModel],
    found: Mapping[str, ModelResults],
    settings: DetectorTable,
    finding: Finding,
) -> None:
    finding.notes.append(f"{convention('id')}.")
    neighbours = _neighbours(models, settings)
    if neighbours:
        finding.notes.append(f"Neighbours: {', '.join(neighbours)}.")
    if any(results.on_images is not None for results in found.values()):
        fitted = "all"
        if settings.image_fit_limit is not None:
            fitted = f"at most {settings.image_fit_limit:,}"
        finding.notes.append(
            f"† needs images: at most {settings.image_limit:,} of each set, fitted on {fitted} "
            "training images. In brackets fdbd on the same images, with which statements compare "
            "it. Its time includes the passes through the network."
        )
    if settings.note:
        finding.notes.append(settings.note)


def _neighbours(models: Sequence[EvaluatedModel], settings: DetectorTable) -> list[str]:
    """The number of neighbours of each KNN detector, such as "knn k = 50"."""
    found: list[str] = []
    for model in models:
        detectors = detectors_from(model.entry.detectors or settings.detectors)
        for title, detector in detectors.items():
            if isinstance(detector, KNN):
                text = f"{title} k = {detector.k}"
                if text not in found:
                    found.append(text)
    return found


def _colour_of_detector(name: str) -> str:
    """fDBD's own colour for fDBD and its variants, grey for all others."""
    is_fdbd = "fdbd" in name or name == "regDistDB"
    return plot.INSIDE if is_fdbd else plot.GREY


def _draw(found: Mapping[str, ModelResults], finding: Finding) -> None:
    """One horizontal line with a dot per detector, the best on top."""
    longest = max(len(_entries(results)) for results in found.values())
    height = 0.9 + 0.26 * len(found) * longest
    axes = finding.axes(8.5, height, len(found), 2)
    for line, (title, results) in zip(axes, found.items()):
        entries = _entries(results)
        names = [entry.row.name + entry.mark for entry in entries]
        colours = [_colour_of_detector(name) for name in names]
        places = np.arange(len(names))[::-1]
        for axis, metric in zip(line, METRICS):
            values = [100 * average(entry.results, entry.row.name, metric) for entry in entries]
            axis.hlines(places, min(values, default=0), values, color="#cccccc", linewidth=1)
            axis.scatter(values, places, color=colours, zorder=3, s=22)
            # The names stand once per line, at the first metric.
            shown_names = names if metric == "auroc" else []
            axis.set_yticks(places, shown_names, fontsize=8)
            axis.set_ylim(-0.6, len(names) - 0.4)
            plot.label(axis, f"{metric.upper()}, percent", title=f"{title} (blue: fDBD)")
            axis.grid(axis="x", color="#eeeeee")
