"""Why networks disagree: what shaping does at each percentile, and what the gain of the regularisation goes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.metrics import Comparison
from fdbd.paper import plot
from fdbd.paper.detector_tables import average, run_named
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.result import Check, Result, Verdict, check, check_difference
from fdbd.paper.table import Table, percent

MEANS = {"shaped": "shaped mean", "of_shaped": "mean of shaped"}
Curves = dict[str, list[float]]
"""Average AUROC by percentile: of fDBD under each way to take the mean, and of Energy."""


def percentiles(experiment: Experiment, say: Say) -> Result:
    """AUROC of fDBD and Energy after ReAct, ASH and SCALE at many percentiles, for each network."""
    settings = experiment.settings
    grid, shapings = settings["percentiles"], settings["shapings"]
    models, result = load_models(experiment, say)
    rows, found = [], {}
    for model in models:
        say(f"{len(shapings)} shapings at {len(grid)} percentiles on {model.title}")
        plain = run_named(model, ["fdbd", "energy"], latency=False)
        base = {name: average(plain, name, "auroc") for name in ("fdbd", "energy")}
        curves = {shaping: _curves(model, shaping, grid) for shaping in shapings}
        found[model.title] = {"plain": base, "curves": curves}
        for shaping, chosen in shapings.items():
            rows.append([model.title, shaping, percent(base["fdbd"]), *_cells(curves[shaping], grid, chosen, base)])
            best = max(max(curves[shaping][mean]) for mean in MEANS)
            result.checks.append(
                check(
                    f"Some percentile of {shaping} raises the AUROC of fDBD by half a point or more ({model.title})",
                    best - base["fdbd"] >= 0.005,
                    f"{percent(base['fdbd'])} without, {percent(best)} at best.",
                )
            )
    columns = ["network", "shaping", "fdbd", "at the paper's percentile", *(f"best, {mean}" for mean in MEANS.values())]
    notes = [
        "Average AUROC over the OOD sets, percent; in brackets the percentile. The percentile of the best is chosen on "
        "the OOD sets themselves: it bounds what tuning could reach, and is no result."
    ]
    result.tables = [Table(experiment.title, [*columns, "energy", "best, energy"], rows, notes)]
    result.data = {"percentiles": grid, **found}
    result.figure = _percentile_figure(found, grid, list(shapings))
    return result


def _curves(model: EvaluatedModel, shaping: str, grid: Sequence[float]) -> Curves:
    kinds: dict[str, dict[str, str]] = {mean: {"name": f"{shaping}+fdbd", "mean": mean} for mean in MEANS}
    kinds["energy"] = {"name": f"{shaping}+energy"}
    specs = [
        {**spec, "percentile": value, "title": f"{kind} {value}"} for kind, spec in kinds.items() for value in grid
    ]
    results = run_named(model, specs, latency=False)
    return {kind: [average(results, f"{kind} {value}", "auroc") for value in grid] for kind in kinds}


def _cells(curves: Curves, grid: Sequence[float], chosen: float, base: Mapping[str, float]) -> list[str]:
    def best(values: Sequence[float]) -> str:
        place = int(np.argmax(values))
        return f"{percent(values[place])} ({grid[place]})"

    given = f"{percent(curves['shaped'][grid.index(chosen)])} ({chosen})"
    return [given, *(best(curves[mean]) for mean in MEANS), percent(base["energy"]), best(curves["energy"])]


def _percentile_figure(found: Mapping[str, Any], grid: Sequence[float], shapings: Sequence[str]) -> Any:
    drawn, axes = plot.figure(9.5, 0.4 + 2.0 * len(found), len(found), len(shapings))
    looks = {"shaped": (plot.INSIDE, "-"), "of_shaped": (plot.INSIDE, ":"), "energy": (plot.OUTSIDE, "-")}
    names = {"shaped": "fdbd, shaped mean", "of_shaped": "fdbd, mean of shaped", "energy": "energy"}
    for line, (title, part) in zip(axes, found.items()):
        for axis, shaping in zip(line, shapings):
            for kind, (colour, style) in looks.items():
                values = [100 * value for value in part["curves"][shaping][kind]]
                axis.plot(grid, values, color=colour, ls=style, marker="o", ms=3, label=names[kind])
            for kind, colour in (("fdbd", plot.INSIDE), ("energy", plot.OUTSIDE)):
                axis.axhline(100 * part["plain"][kind], color=colour, lw=0.8, alpha=0.5)
            plot.label(axis, "percentile", "average AUROC", f"{title}: {shaping}")
    plot.label(axes[0, 0], legend=7)
    return drawn


def regularization_gain(experiment: Experiment, say: Say) -> Result:
    """What the division by the deviation gains on each network, against the spread of the deviation and the degree of
    neural collapse."""
    models, result = load_models(experiment, say)
    found = {}
    for model in models:
        say(f"distances and class statistics of {model.title}")
        found[model.title] = _gain(model)
    columns = ["network", "features", "classes", "avgDistDB", "regDistDB", "gain", "dispersion", "collapse"]
    rows = [
        [
            title,
            *(f"{part[key]:,}" for key in ("features", "classes")),
            *(percent(part[key]) for key in ("avgDistDB", "regDistDB", "gain")),
            *(f"{part[key]:.3f}" for key in ("dispersion", "collapse")),
        ]
        for title, part in found.items()
    ]
    notes = [
        "AUROC averaged over the OOD sets and its gain, percent. Dispersion: standard deviation over mean of the "
        "deviation ‖z − μ‖, ID and OOD samples together. Collapse: within-class over between-class variance of the "
        "fitted features, without bias; 0 is complete collapse."
    ]
    correlations = {key: _rank_correlation(found, key) for key in ("dispersion", "collapse")}
    result.tables = [Table(experiment.title, columns, rows, notes)]
    for title, part in found.items():
        measured = f"AUROC {percent(part['avgDistDB'])} without, {percent(part['regDistDB'])} with."
        test = Comparison.of(part["gain"], part["error"])
        result.checks.append(check_difference(f"The regularisation raises the average AUROC ({title})", test, measured))
    for key, statement in (
        ("dispersion", "The gain is larger where the deviation is more dispersed"),
        ("collapse", "The gain is larger where classes are less collapsed"),
    ):
        correlation, chance = correlations[key]
        text = f"Rank correlation {correlation:+.2f} over {len(found)} networks, p = {chance:.2f}."
        verdict: Verdict = "undecided"
        if chance <= 0.05:  # not where it is NaN
            verdict = "holds" if correlation > 0 else "does not hold"
        result.checks.append(Check(statement, verdict, text))
    result.data = {"networks": found, "rank correlation": correlations}
    result.figure = _gain_figure(found)
    return result


def _gain(model: EvaluatedModel) -> dict[str, float]:
    specs = [
        {"name": "fdbd", "title": "regDistDB"},
        {"name": "fdbd", "normalizer": "none", "title": "avgDistDB"},
    ]
    results = run_named(model, specs, latency=False)
    values = {name: average(results, name, "auroc") for name in ("avgDistDB", "regDistDB")}
    sets = model.distances_and_deviations().values()
    # Each side has the same weight, whatever its number of samples.
    (_, inside), *outside = sets
    away = np.concatenate([deviation for _, deviation in outside])
    mean = (inside.mean() + away.mean()) / 2
    variance = (((inside - mean) ** 2).mean() + ((away - mean) ** 2).mean()) / 2
    head, train = model.benchmark.head, model.benchmark.train
    assert train.labels is not None
    return {
        "features": head.num_features,
        "classes": head.num_classes,
        **values,
        "gain": values["regDistDB"] - values["avgDistDB"],
        "error": results.compare("regDistDB", "avgDistDB").standard_error,
        "dispersion": float(variance**0.5 / mean),
        "collapse": collapse(train.features.double(), train.labels),
    }


def collapse(features: Tensor, labels: Tensor) -> float:
    """Within-class over between-class variance of features (N, P) with labels (N,): the traces of both covariances.

    Both are without bias for any number of samples per class from two on (the components of a one-way analysis of
    variance), so that networks fitted on two photographs per class and on thousands can be compared.
    """
    classes, places, counts = labels.unique(return_inverse=True, return_counts=True)
    if len(classes) < 2 or len(features) <= len(classes):
        raise ValueError(f"{len(features)} samples of {len(classes)} classes: expected two classes, with several each")
    means = torch.zeros(len(classes), features.shape[1], dtype=features.dtype).index_add_(0, places, features)
    means /= counts[:, None]
    within = float(((features - means[places]) ** 2).sum()) / (len(features) - len(classes))
    spread = float((counts[:, None] * (means - features.mean(dim=0)) ** 2).sum()) / (len(classes) - 1)
    typical = (len(features) - float((counts.double() ** 2).sum()) / len(features)) / (len(classes) - 1)
    between = (spread - within) / typical
    return within / between if between > 0 else float("inf")


def _rank_correlation(found: Mapping[str, Mapping[str, float]], key: str) -> tuple[float, float]:
    """Spearman's correlation of the gain with a quantity, and its p-value."""
    from scipy.stats import spearmanr

    values, gains = ([part[name] for part in found.values()] for name in (key, "gain"))
    if len(set(values)) < 3 or len(set(gains)) < 3:
        return float("nan"), float("nan")
    outcome = spearmanr(values, gains)
    return float(outcome.statistic), float(outcome.pvalue)


def _gain_figure(found: Mapping[str, Mapping[str, float]]) -> Any:
    drawn, axes = plot.figure(9, 3.4, 1, 2)
    for axis, key, title in zip(axes[0], ("dispersion", "collapse"), ("dispersion of ‖z − μ‖", "within / between")):
        for name, part in found.items():
            axis.scatter(part[key], 100 * part["gain"], s=24, color=plot.INSIDE)
            axis.annotate(name, (part[key], 100 * part["gain"]), fontsize=7, xytext=(4, 2), textcoords="offset points")
        axis.axhline(0, color="#888888", lw=0.8)
        plot.label(axis, title, "gain in AUROC, points")
    return drawn
