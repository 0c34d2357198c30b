"""Why networks disagree: shaping at each percentile, what the gain of the regularisation goes with,
and corruptions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from fdbd.bench import FeatureSet
from fdbd.bench.cache import FeatureCache
from fdbd.bench.collapse import collapse
from fdbd.data.datasets import DatasetUnavailable, load
from fdbd.metrics import Comparison, as_percent
from fdbd.paper import plot
from fdbd.paper.finding import Finding, difference
from fdbd.paper.models import EvaluatedModel, MissingData, average, load_models
from fdbd.paper.settings import DomainShift, ModelSettings, Percentiles, Sweep
from fdbd.util.terminal import one_line

MEANS = {"shaped": "shaped mean", "of_shaped": "mean of shaped"}
"""Ways to take the mean of shaped features, which fDBD needs."""
CAUSES = {
    "dispersion": ("the deviation is more dispersed", "dispersion of ‖z − μ‖"),
    "collapse": ("classes are less collapsed", "within / between"),
}
"""Where the regularisation may gain more, in words and as the label of an axis."""
_MOST_PERMUTATIONS = math.factorial(8)

Curves = dict[str, list[float]]
"""Average AUROC at each percentile: of fDBD under each way to take the mean, and of Energy."""


def percentiles(finding: Finding, settings: Percentiles) -> None:
    """AUROC of fDBD and Energy after ReAct, ASH and SCALE at many percentiles, for each network;
    and of further detectors over an option of theirs."""
    grid = settings.percentiles
    models = load_models(finding)
    finding.data = {"percentiles": grid}
    axes = finding.axes(9.5, 0.4 + 2.0 * len(models), len(models), len(settings.shapings))
    rows: list[list[str]] = []
    for model, line in zip(models, axes):
        finding.say(
            f"{len(settings.shapings)} shapings at {len(grid)} percentiles on {model.title}"
        )
        unshaped = model.run(["fdbd", "energy"])
        plain = {name: float(average(unshaped, name, "auroc")) for name in ("fdbd", "energy")}
        all_curves: dict[str, Curves] = {}
        for axis, (shaping, chosen) in zip(line, settings.shapings.items()):
            curves = _curves(model, shaping, grid)
            all_curves[shaping] = curves
            rows.append([model.title, shaping, *_sweep_cells(curves, plain, grid, chosen)])
            _decide_gain_of_shaping(curves, plain, f"{shaping} raises", model.title, finding)
            _draw_curves(axis, curves, plain, grid)
            plot.label(axis, "percentile", "average AUROC", f"{model.title}: {shaping}")
        finding.data[model.title] = {"plain": plain, "curves": all_curves}
    plot.label(axes[0, 0], legend=7)
    finding.table(
        [
            "network",
            "shaping",
            "fdbd",
            "at the paper's percentile",
            *(f"best, {name}" for name in MEANS.values()),
            "energy",
            "best, energy",
        ],
        rows,
        "Average AUROC over the OOD sets, percent; in brackets the percentile. The percentile of "
        "the best is chosen on the OOD sets themselves: it bounds what tuning could reach, and is "
        "no result.",
    )
    if settings.sweeps:
        _table_of_sweeps(models, settings.sweeps, finding)


def _curves(model: EvaluatedModel, shaping: str, grid: Sequence[float]) -> Curves:
    specs_of: dict[str, dict[str, Any]] = {}
    for mean in MEANS:
        specs_of[mean] = {"name": f"{shaping}+fdbd", "mean": mean}
    specs_of["energy"] = {"name": f"{shaping}+energy"}
    specs = []
    for kind, spec in specs_of.items():
        for percentile in grid:
            title = f"{kind} {percentile}"
            specs.append({**spec, "percentile": percentile, "title": title})
    results = model.run(specs)
    curves: Curves = {}
    for kind in specs_of:
        curves[kind] = [float(average(results, f"{kind} {p}", "auroc")) for p in grid]
    return curves


def _sweep_cells(
    curves: Curves, plain: Mapping[str, float], grid: Sequence[float], chosen: float
) -> list[str]:
    """fDBD without shaping, at the paper's percentile and at the best ones; then Energy's."""
    at_chosen = curves["shaped"][grid.index(chosen)]
    cells = [as_percent(plain["fdbd"]), f"{as_percent(at_chosen)} ({chosen:g})"]
    for mean in MEANS:
        cells.append(_best_cell(curves[mean], grid))
    return [*cells, as_percent(plain["energy"]), _best_cell(curves["energy"], grid)]


def _best_cell(values: Sequence[float], grid: Sequence[float]) -> str:
    best = int(np.argmax(values))
    return f"{as_percent(values[best])} ({grid[best]:g})"


def _decide_gain_of_shaping(
    curves: Curves, plain: Mapping[str, float], what: str, title: str, finding: Finding
) -> None:
    best = max(max(curves[mean]) for mean in MEANS)
    finding.decide(
        f"Some percentile of {what} the AUROC of fDBD by half a point or more ({title})",
        best - plain["fdbd"] >= 0.005,
        f"{as_percent(plain['fdbd'])} without, {as_percent(best)} at best.",
        ours=True,
    )


def _draw_curves(
    axis: plot.Axes, curves: Curves, plain: Mapping[str, float], grid: Sequence[float]
) -> None:
    styles = {"shaped": "-", "of_shaped": ":", "energy": "-"}
    for kind, values in curves.items():
        colour = plot.INSIDE if kind in MEANS else plot.OUTSIDE
        name = f"fdbd, {MEANS[kind]}" if kind in MEANS else kind
        shown = [100 * value for value in values]
        axis.plot(grid, shown, color=colour, ls=styles[kind], marker="o", ms=3, label=name)
    for kind, colour in (("fdbd", plot.INSIDE), ("energy", plot.OUTSIDE)):
        axis.axhline(100 * plain[kind], color=colour, lw=0.8, alpha=0.5)


def _table_of_sweeps(
    models: Sequence[EvaluatedModel], sweeps: Sequence[Sweep], finding: Finding
) -> None:
    """Detectors over an option of theirs, on each network."""
    rows: list[list[str]] = []
    sweep_data: dict[str, Any] = {}
    for model in models:
        sweep_data[model.title] = {}
        for sweep in sweeps:
            finding.say(f"{sweep.detector} at {len(sweep.values)} values on {model.title}")
            values = _sweep(model, sweep)
            sweep_data[model.title][sweep.detector] = values
            at_default = values[sweep.values.index(sweep.paper)]
            rows.append(
                [
                    model.title,
                    f"{sweep.detector}, {sweep.option}",
                    f"{as_percent(at_default)} ({sweep.paper:g})",
                    _best_cell(values, sweep.values),
                    as_percent(min(values)),
                ]
            )
    finding.data["sweeps"] = sweep_data
    finding.table(
        ["network", "detector and option", "at its paper's value", "best", "worst"],
        rows,
        "Average AUROC over the OOD sets, percent; in brackets the value. As above, the best is "
        "chosen on the OOD sets themselves.",
        title="Other detectors over an option of theirs",
    )


def _sweep(model: EvaluatedModel, sweep: Sweep) -> list[float]:
    specs = []
    for value in sweep.values:
        # TOML and the schema make 80 a float; an option that counts something takes an integer.
        plain = int(value) if value.is_integer() else value
        specs.append({"name": sweep.detector, sweep.option: plain, "title": f"{value:g}"})
    results = model.run(specs)
    return [float(average(results, f"{value:g}", "auroc")) for value in sweep.values]


def regularization_gain(finding: Finding, settings: ModelSettings) -> None:
    """What the division by the deviation gains on each network, against the spread of the deviation
    and the degree of neural collapse."""
    found: dict[str, dict[str, float]] = {}
    rows: list[list[str]] = []
    for model in load_models(finding):
        finding.say(f"distances and class statistics of {model.title}")
        part = _gain(model)
        found[model.title] = part
        before = as_percent(part["avgDistDB"])
        after = as_percent(part["regDistDB"])
        sizes = [f"{part['features']:,}", f"{part['classes']:,}"]
        causes = [f"{part[cause]:.3f}" for cause in CAUSES]
        rows.append([model.title, *sizes, before, after, as_percent(part["gain"]), *causes])
        finding.decide(
            f"The regularisation raises the average AUROC ({model.title})",
            Comparison.from_difference(part["gain"], part["error"]),
            f"AUROC {before} without, {after} with.",
        )
    finding.table(
        ["network", "features", "classes", "avgDistDB", "regDistDB", "gain", *CAUSES],
        rows,
        "AUROC averaged over the OOD sets and its gain, percent. Dispersion: standard deviation "
        "over mean of the deviation ‖z − μ‖, ID and OOD samples together. Collapse: within-class "
        "over between-class variance of the fitted features, without bias; 0 is complete collapse.",
    )
    finding.data = {"networks": found, "rank correlation": {}}
    axes = finding.axes(9, 3.4, 1, 2)[0]
    for axis, (cause, (where, label)) in zip(axes, CAUSES.items()):
        _decide_on_cause(cause, where, found, finding)
        _draw_gain_over_cause(axis, cause, found)
        plot.label(axis, label, "gain in AUROC, points")


def _draw_gain_over_cause(
    axis: plot.Axes, cause: str, found: Mapping[str, Mapping[str, float]]
) -> None:
    for name, part in found.items():
        x = part[cause]
        y = 100 * part["gain"]
        axis.scatter(x, y, s=24, color=plot.INSIDE)
        axis.annotate(name, (x, y), fontsize=7, xytext=(4, 2), textcoords="offset points")
    axis.axhline(0, color=plot.GREY, lw=0.8)


def _decide_on_cause(
    cause: str, where: str, found: Mapping[str, Mapping[str, float]], finding: Finding
) -> None:
    """Whether the gain of the networks goes with one of the causes."""
    values = [part[cause] for part in found.values()]
    gains = [part["gain"] for part in found.values()]
    correlation, chance = rank_correlation(values, gains)
    finding.data["rank correlation"][cause] = correlation, chance
    networks = "network" if len(found) == 1 else "networks"
    finding.decide(
        f"The gain is larger where {where}",
        [Comparison(correlation, math.nan, chance)],
        f"Rank correlation {correlation:+.2f} over {len(found)} {networks}, p = {chance:.2f} "
        "(exact permutation).",
        ours=True,
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Spearman's rank correlation and its two-sided p-value over all orders of the second sequence,
    exact for up to eight values (a random sample of the orders beyond that). With fewer than three
    distinct values in one of the two there is nothing to see: (nan, 1).

    >>> rank_correlation([1, 2, 3], [10, 20, 30])
    (1.0, 0.3333333333333333)
    """
    # Imported here, since it takes half a second.
    from scipy.stats import permutation_test, rankdata

    if min(len(set(first)), len(set(second))) < 3:
        return math.nan, 1.0
    ranks_of_second = rankdata(second)

    def correlation(ranks: Any) -> float:
        return float(np.corrcoef(ranks, ranks_of_second)[0, 1])

    ranks_of_first = rankdata(first)
    test = permutation_test(
        (ranks_of_first,),
        correlation,
        permutation_type="pairings",
        n_resamples=_MOST_PERMUTATIONS,
        rng=np.random.default_rng(0),
    )
    return float(test.statistic), float(test.pvalue)


def _gain(model: EvaluatedModel) -> dict[str, float]:
    specs = [
        {"name": "fdbd", "title": "regDistDB"},
        {"name": "fdbd", "normalizer": "none", "title": "avgDistDB"},
    ]
    results = model.run(specs)
    before = float(average(results, "avgDistDB", "auroc"))
    after = float(average(results, "regDistDB", "auroc"))
    head = model.benchmark.head
    train = model.benchmark.train
    assert train.labels is not None
    return {
        "features": head.num_features,
        "classes": head.num_classes,
        "avgDistDB": before,
        "regDistDB": after,
        "gain": after - before,
        "error": results.compare("regDistDB", "avgDistDB").standard_error,
        "dispersion": _dispersion(model),
        "collapse": collapse(train.features.double(), train.labels),
    }


def _dispersion(model: EvaluatedModel) -> float:
    """Standard deviation over mean of the deviation. The ID side and the OOD side have the same
    weight, whatever their numbers of samples."""
    # The ID set comes first.
    deviations = [part.deviation for part in model.standings().values()]
    sides = (deviations[0], np.concatenate(deviations[1:]))
    mean = sum(float(side.mean()) for side in sides) / 2
    variance = sum(float(((side - mean) ** 2).mean()) for side in sides) / 2
    return math.sqrt(variance) / mean


def domain_shift(finding: Finding, settings: DomainShift) -> None:
    """AUROC of fDBD with the clean ID set, then with each severity of corruption as ID."""
    model = load_models(finding)[0]
    found = _measure_severities(model, settings, finding)
    rows = []
    for part in found:
        values = [as_percent(part[key]) for key in ("accuracy", "auroc", "fpr95")]
        rows.append([part["name"], f"{part['count']:,}", *values])
    outside = ", ".join(samples.name for samples in model.benchmark.ood)
    finding.table(
        ["ID samples", "images", "accuracy", "average AUROC ↑", "average FPR95 ↓"],
        rows,
        f"{model.title}; OOD: {outside}; fDBD, percent.",
    )
    aurocs = [part["auroc"] for part in found]
    finding.decide(
        "AUROC falls as the corruption grows",
        all(before > after for before, after in pairwise(aurocs)),
        f"AUROC {', '.join(as_percent(auroc) for auroc in aurocs)}.",
    )
    fall = difference(aurocs[0], aurocs[-1])
    finding.decide(
        f"It falls slightly: at most {settings.slight:g} points from clean to the strongest "
        "corruption",
        Comparison.from_difference(settings.slight / 100 - fall.difference, fall.standard_error),
        f"{100 * fall.difference:.2f} points.",
    )
    finding.data = {"rows": found}
    _draw_severities(found, finding)


def _measure_severities(
    model: EvaluatedModel, settings: DomainShift, finding: Finding
) -> list[dict[str, Any]]:
    found = [_measure(model, "clean", model.benchmark.test)]
    for severity in settings.severities:
        try:
            corrupted = _corrupted(model, severity, settings.limit, finding)
        except (DatasetUnavailable, OSError) as error:
            finding.missing.append(f"severity {severity}: {one_line(error)}")
            continue
        found.append(_measure(model, f"severity {severity}", corrupted))
    if len(found) == 1:
        name = finding.experiment.name
        raise MissingData(f"{name} needs corrupted images: {'; '.join(finding.missing)}")
    return found


def _corrupted(model: EvaluatedModel, severity: int, limit: int, finding: Finding) -> FeatureSet:
    """Features of corrupted test images, of all four families."""
    classifier, preprocess = model.network
    images = load(f"cifar10-c:mixed:{severity}", "test", limit=limit)

    def progress(done: int, total: int) -> None:
        finding.say(f"severity {severity}: {done:,} of {total:,} images")

    return FeatureCache().features(classifier, images, preprocess, progress=progress)


def _measure(model: EvaluatedModel, name: str, test: FeatureSet) -> dict[str, Any]:
    benchmark = replace(model.benchmark, test=test, title=name)
    results = benchmark.run(["fdbd"], latency=False, progress=False)
    evaluations = results.row("fdbd").evaluations
    return {
        "name": name,
        "count": len(test),
        "accuracy": results.setting.accuracy or 0.0,
        "auroc": average(results, "fdbd", "auroc"),
        "fpr95": average(results, "fdbd", "fpr95"),
        "sets": {key: float(value.auroc) for key, value in evaluations.items()},
    }


def _draw_severities(found: Sequence[dict[str, Any]], finding: Finding) -> None:
    axis = finding.axes(6, 3.4)[0, 0]
    names = [part["name"] for part in found]
    for colour, title in zip(plot.COLOURS, found[0]["sets"]):
        aurocs = [100 * part["sets"][title] for part in found]
        axis.plot(names, aurocs, marker="o", color=colour, lw=1, ms=4, label=title)
    averages = [100 * part["auroc"] for part in found]
    axis.plot(names, averages, marker="o", color=plot.INSIDE, lw=2.5, label="average")
    accuracy = [100 * part["accuracy"] for part in found]
    axis.plot(names, accuracy, color=plot.GREY, ls=":", label="accuracy of the classifier")
    # The legend stands to the right of the plot.
    plot.label(
        axis,
        "ID samples",
        "AUROC of fDBD, percent",
        legend=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )
