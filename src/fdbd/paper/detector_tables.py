"""Tables of detectors: models side by side, averages first, then every set; and who beats whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fdbd.bench import Results, Row
from fdbd.data.datasets import DatasetUnavailable
from fdbd.detectors import create
from fdbd.metrics.comparison import Comparison
from fdbd.metrics.evaluation import Estimate
from fdbd.paper import plot
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.image_detectors import image_results
from fdbd.paper.models import EvaluatedModel, MissingData, load_models
from fdbd.paper.result import Check, Result, Verdict, check, check_difference, difference
from fdbd.paper.table import Table, percent
from fdbd.results.rows import convention


@dataclass(frozen=True)
class Part:
    """The results of one model; `from_images` are those of detectors that need images, on a part of the samples."""

    model: EvaluatedModel
    results: Results
    from_images: Results | None

    def all(self) -> list[Results]:
        return [self.results] if self.from_images is None else [self.results, self.from_images]

    def entries(self) -> list[tuple[Results, Row, str]]:
        """The rows, best first, with the mark of those on images; fDBD stands there once."""
        marked = zip(self.all(), ("", " †"))
        found = [(results, row, mark) for results, mark in marked for row in results.ranked()]
        return [entry for entry in found if not (entry[2] and entry[1].name == "fdbd")]


def detector_table(experiment: Experiment, say: Say) -> Result:
    """Run the detectors of an experiment on each of its models."""
    settings = experiment.settings
    models, result = load_models(experiment, say)
    parts = [_run(model, settings, say, result.missing) for model in models]
    result.tables.append(_averages(parts, experiment))
    for part in parts:
        for decide, entry in ((beats, "better"), (beats_everywhere, "better_on_every_set"), (levels, "level")):
            for pair in settings.get(entry, []):
                results = _results_with(part, pair)
                if results is not None:
                    result.checks.append(decide(results, pair[0], pair[1], part.model.title))
        result.checks += _cost(part, settings.get("cost_below"))
        result.checks += _chance(part, settings.get("near_chance", []))
        result.more += [(results.to_markdown(), results.to_latex()) for results in part.all()]
    for pairing in settings.get("across_models", []):
        result.checks += _across(parts, *pairing)
    result.notes.append(f"{convention('id')}.")
    if any(part.from_images for part in parts):
        fitted = f"at most {settings['image_fit_limit']:,}" if "image_fit_limit" in settings else "all"
        result.notes.append(
            f"† needs images: at most {settings['image_limit']:,} of each set, fitted on {fitted} training images. "
            "In brackets fdbd on the same images, with which statements compare it. Its time includes the passes "
            "through the network."
        )
    result.notes += [settings["note"]] if "note" in settings else []
    result.data = {part.model.title: [results.to_dict() for results in part.all()] for part in parts}
    result.figure = _figure(parts)
    return result


def _run(model: EvaluatedModel, settings: Mapping[str, Any], say: Say, missing: list[str]) -> Part:
    specs = model.settings.get("detectors") or settings["detectors"]
    say(f"{len(specs)} detectors on {model.title}")
    results = run_named(model, specs, latency="cost_below" in settings)  # timing takes longer than all else
    wanted = model.settings.get("images", [])
    from_images = None
    if wanted:
        try:
            limits = settings["image_limit"], say, settings.get("image_fit_limit")
            from_images = image_results(model, wanted, ["fdbd"], *limits)
        except (DatasetUnavailable, OSError) as error:
            reason = " ".join(str(error).split())
            missing.append(f"{', '.join(wanted)} on {model.title} need images: {reason}")
    for row in results.failures:
        missing.append(f"{row.name} on {model.title} failed: {row.error}")
    return Part(model, results, from_images)


def run_named(model: EvaluatedModel, specs: Sequence[Any], latency: bool = True) -> Results:
    """Results of detectors given by name, or by a table of name, options and the title of the row."""
    titles, detectors = [], []
    for spec in specs:
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        name = options.pop("name")
        titles.append(options.pop("title", name))
        # TOML has no None.
        detectors.append(create(name, **{key: None if value == "none" else value for key, value in options.items()}))
    results = model.benchmark.run(detectors, latency=latency, progress=False)
    rows = [replace(row, name=title) for row, title in zip(results.rows, titles)]
    return Results(results.setting, rows, results.figures)


def average(results: Results, name: str, metric: str) -> Estimate:
    """A metric of a detector, averaged over all OOD sets, with its joint interval.

    Raises:
        MissingData: where the detector failed.
    """
    row = results.row(name)
    if row.error:
        raise MissingData(f"{name} on {results.setting.title} failed: {row.error}")
    return results.value(row, results.main_column, metric)


def _averages(parts: Sequence[Part], experiment: Experiment) -> Table:
    columns = ["model", "detector", "AUROC ↑", "FPR95 ↓", "extra µs per sample", "of the forward pass"]
    rows, notes = [], []
    for part in parts:
        setting = part.results.setting
        accuracy = "" if setting.accuracy is None else f", accuracy {percent(setting.accuracy)} %"
        notes.append(
            f"{part.model.title}: ID {setting.test[0]}{accuracy}; average over {', '.join(setting.ood)}; "
            f"fitted on {setting.num_train:,} samples."
        )
        for results, row, mark in part.entries():
            auroc, fpr = (_cell(results, row.name, metric, bool(mark)) for metric in ("auroc", "fpr95"))
            auroc = f"**{auroc}**" if row is part.results.ranked()[0] else auroc
            times = ["", ""]
            if row.latencies:
                seconds, forward = row.latencies[-1].median, setting.forward_seconds
                times = [f"{seconds * 1e6:.3g}", f"{seconds / forward:.2%}" if forward else ""]
            rows.append([part.model.title, row.name + mark, auroc, fpr, *times])
    return Table(experiment.title, columns, rows, notes)


def _cell(results: Results, name: str, metric: str, beside_fdbd: bool) -> str:
    value = percent(average(results, name, metric))
    return f"{value} (fdbd {percent(average(results, 'fdbd', metric))})" if beside_fdbd else value


def _results_with(part: Part, pair: Sequence[str]) -> Results | None:
    for results in reversed(part.all()):  # those from images first: both detectors on the same images
        if set(pair) <= {row.name for row in results.finished}:
            return results
    return None


def beats(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector beats another in average AUROC and average FPR95; undecided where the difference in AUROC
    is within its error, or where the two metrics disagree."""
    comparison, text = results.compare(first, second), _both(results, first, second)
    statement = f"{first} separates ID from OOD better than {second} ({title})"
    has_lower_fpr = average(results, first, "fpr95") < average(results, second, "fpr95")
    if comparison.verdict() == ("lower" if has_lower_fpr else "higher"):
        return Check(statement, "undecided", f"{text} The two metrics disagree.")
    return check_difference(statement, comparison, text)


def beats_everywhere(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector beats another in AUROC on every OOD set; one set where it is worse decides against it."""
    tests = {name: results.compare(first, second, name) for name in results.setting.ood}
    verdicts = {test.verdict() for test in tests.values()}
    text = ", ".join(f"{name} {100 * test.difference:+.2f}" for name, test in tests.items())
    verdict: Verdict = "does not hold" if "lower" in verdicts else "undecided" if len(verdicts) > 1 else "holds"
    statement = f"{first} separates better than {second} on every OOD set ({title})"
    return Check(statement, "undecided" if verdicts == {"undecided"} else verdict, f"Points of AUROC: {text}.")


def levels(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector is at most a point of average AUROC below another."""
    statement = f"{first} is level with {second} or better: at most a point of AUROC below ({title})"
    found = results.compare(first, second)
    above = Comparison.of(found.difference + 0.01, found.standard_error)
    return check_difference(statement, above, _both(results, first, second))


def _both(results: Results, first: str, second: str) -> str:
    values = [[percent(average(results, name, metric)) for name in (first, second)] for metric in ("auroc", "fpr95")]
    return f"AUROC {values[0][0]} against {values[0][1]}, FPR95 {values[1][0]} against {values[1][1]}."


def _cost(part: Part, below: float | None) -> list[Check]:
    forward = part.results.setting.forward_seconds
    row = next((row for row in part.results.finished if row.name == "fdbd"), None)
    if below is None or not forward or row is None or not row.latencies:
        return []
    seconds = row.latencies[-1].median
    statement = f"fdbd adds less than {below:.0%} to the forward pass ({part.model.title})"
    measured = f"{seconds * 1e6:.2g} µs per sample against {forward * 1e3:.2g} ms: {seconds / forward:.3%}."
    return [check(statement, seconds < below * forward, measured)]


def _chance(part: Part, names: Sequence[str]) -> list[Check]:
    checks = []
    for name in names:
        auroc = average(part.results, name, "auroc")
        statement = f"{name} alone hardly separates: AUROC between 40 and 60 ({part.model.title})"
        checks.append(check(statement, 0.4 < auroc < 0.6, f"AUROC {percent(auroc)}."))
    return checks


def _across(parts: Sequence[Part], first: str, detector: str, second: str, other: str) -> list[Check]:
    """Whether a detector on one model separates better than one on another model, where both are there."""
    found = {
        (part.model.title, row.name): results
        for part in parts
        for results in reversed(part.all())
        for row in results.finished
    }
    if (first, detector) not in found or (second, other) not in found:
        return []
    values = [average(found[key], key[1], "auroc") for key in ((first, detector), (second, other))]
    than = f"on the {second} model" if detector == other else f"{other} on the {second} model"
    statement = f"{detector} on the {first} model separates better than {than}"
    measured = f"AUROC {percent(values[0])} against {percent(values[1])}."
    return [check_difference(statement, difference(*values), measured)]


def _figure(parts: Sequence[Part]) -> Any:
    count = max(len(part.entries()) for part in parts)
    drawn, axes = plot.figure(8.5, 0.9 + 0.26 * count * len(parts), len(parts), 2)
    for line, part in zip(axes, parts):
        entries = part.entries()
        names = [row.name + mark for _, row, mark in entries]
        marks = ["fdbd" in name or name == "regDistDB" for name in names]
        for axis, metric, label in zip(line, ("auroc", "fpr95"), ("AUROC, percent", "FPR95, percent")):
            values = [100 * average(results, row.name, metric) for results, row, _ in entries]
            plot.dots(axis, names, values, label, marks)
            axis.set_title(f"{part.model.title} (blue: fDBD)", fontsize=9, loc="left")
        line[1].set_yticks(line[1].get_yticks(), [])
    return drawn
