"""Why networks disagree: shaping at each percentile, what the gain of the regularisation goes with,
and corruptions."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.bench import FeatureSet
from fdbd.bench.cache import FeatureCache
from fdbd.data.datasets import DatasetUnavailable, load
from fdbd.metrics import Comparison, as_percent
from fdbd.paper import plot
from fdbd.paper.models import EvaluatedModel, MissingData, average, load_models
from fdbd.paper.result import Result, difference
from fdbd.util.terminal import one_line

MEANS = {"shaped": "shaped mean", "of_shaped": "mean of shaped"}
"""Ways to take the mean of shaped features, which fDBD needs."""
CAUSES = {
    "dispersion": ("the deviation is more dispersed", "dispersion of ‖z − μ‖"),
    "collapse": ("classes are less collapsed", "within / between"),
}
"""Where the regularisation may gain more, in words and as the label of an axis."""


def percentiles(result: Result) -> None:
    """AUROC of fDBD and Energy after ReAct, ASH and SCALE at many percentiles, for each network."""
    grid, shapings = result.settings["percentiles"], result.settings["shapings"]
    models = load_models(result)
    rows: list[list[str]] = []
    result.data = {"percentiles": grid}
    axes = result.axes(9.5, 0.4 + 2.0 * len(models), len(models), len(shapings))
    for model, line in zip(models, axes):
        result.say(f"{len(shapings)} shapings at {len(grid)} percentiles on {model.title}")
        plain = model.run(["fdbd", "energy"])
        base = {name: average(plain, name, "auroc") for name in ("fdbd", "energy")}
        curves = {shaping: _curves(model, shaping, grid) for shaping in shapings}
        result.data[model.title] = {"plain": base, "curves": curves}
        for axis, (shaping, chosen) in zip(line, shapings.items()):
            values, without = curves[shaping], as_percent(base["fdbd"])
            bests = {
                kind: f"{as_percent(max(part))} ({grid[np.argmax(part)]})"
                for kind, part in values.items()
            }
            given = f"{as_percent(values['shaped'][grid.index(chosen)])} ({chosen})"
            own = [bests[mean] for mean in MEANS]
            rows.append(
                [
                    model.title,
                    shaping,
                    without,
                    given,
                    *own,
                    as_percent(base["energy"]),
                    bests["energy"],
                ]
            )
            best = max(max(values[mean]) for mean in MEANS)
            statement = f"Some percentile of {shaping} raises the AUROC of fDBD by half a point or more ({model.title})"
            result.check(
                statement,
                best - base["fdbd"] >= 0.005,
                f"{without} without, {as_percent(best)} at best.",
            )
            for (kind, part), style in zip(values.items(), "-:-"):
                colour, name = (
                    (plot.INSIDE, f"fdbd, {MEANS[kind]}") if kind in MEANS else (plot.OUTSIDE, kind)
                )
                shown = [100 * value for value in part]
                axis.plot(grid, shown, color=colour, ls=style, marker="o", ms=3, label=name)
            for kind, colour in (("fdbd", plot.INSIDE), ("energy", plot.OUTSIDE)):
                axis.axhline(100 * base[kind], color=colour, lw=0.8, alpha=0.5)
            plot.label(axis, "percentile", "average AUROC", f"{model.title}: {shaping}")
    plot.label(axes[0, 0], legend=7)
    best_by_mean = [f"best, {name}" for name in MEANS.values()]
    result.table(
        [
            "network",
            "shaping",
            "fdbd",
            "at the paper's percentile",
            *best_by_mean,
            "energy",
            "best, energy",
        ],
        rows,
        "Average AUROC over the OOD sets, percent; in brackets the percentile. The percentile of the best is chosen on "
        "the OOD sets themselves: it bounds what tuning could reach, and is no result.",
    )


def _curves(model: EvaluatedModel, shaping: str, grid: Sequence[float]) -> dict[str, list[float]]:
    """Average AUROC by percentile: of fDBD under each way to take the mean, and of Energy."""
    kinds: dict[str, dict[str, Any]] = {
        mean: {"name": f"{shaping}+fdbd", "mean": mean} for mean in MEANS
    }
    kinds["energy"] = {"name": f"{shaping}+energy"}
    specs = [
        {**spec, "percentile": p, "title": f"{kind} {p}"}
        for kind, spec in kinds.items()
        for p in grid
    ]
    results = model.run(specs)
    return {kind: [average(results, f"{kind} {p}", "auroc") for p in grid] for kind in kinds}


def regularization_gain(result: Result) -> None:
    """What the division by the deviation gains on each network, against the spread of the deviation
    and the degree of neural collapse."""
    from scipy.stats import spearmanr  # takes half a second to import

    found, rows = {}, []
    for model in load_models(result):
        result.say(f"distances and class statistics of {model.title}")
        part = found[model.title] = _gain(model)
        before, after, gain = (as_percent(part[key]) for key in ("avgDistDB", "regDistDB", "gain"))
        sizes, causes = (
            (f"{part[key]:,}" for key in ("features", "classes")),
            (f"{part[key]:.3f}" for key in CAUSES),
        )
        rows.append([model.title, *sizes, before, after, gain, *causes])
        test = Comparison.of(part["gain"], part["error"])
        statement = f"The regularisation raises the average AUROC ({model.title})"
        result.check(statement, test, f"AUROC {before} without, {after} with.")
    result.table(
        ["network", "features", "classes", "avgDistDB", "regDistDB", "gain", *CAUSES],
        rows,
        "AUROC averaged over the OOD sets and its gain, percent. Dispersion: standard deviation over mean of the "
        "deviation ‖z − μ‖, ID and OOD samples together. Collapse: within-class over between-class variance of the "
        "fitted features, without bias; 0 is complete collapse.",
    )
    result.data = {"networks": found, "rank correlation": {}}
    for axis, (key, (where, label)) in zip(result.axes(9, 3.4, 1, 2)[0], CAUSES.items()):
        values, gains = ([part[name] for part in found.values()] for name in (key, "gain"))
        correlation, chance = math.nan, 1.0
        if len(set(values)) >= 3 and len(set(gains)) >= 3:
            correlation, chance = map(float, spearmanr(values, gains))
        result.data["rank correlation"][key] = correlation, chance
        text = f"Rank correlation {correlation:+.2f} over {len(found)} networks, p = {chance:.2f}."
        result.check(
            f"The gain is larger where {where}", [Comparison(correlation, math.nan, chance)], text
        )
        for name, part in found.items():
            place = part[key], 100 * part["gain"]
            axis.scatter(*place, s=24, color=plot.INSIDE)
            axis.annotate(name, place, fontsize=7, xytext=(4, 2), textcoords="offset points")
        axis.axhline(0, color=plot.GREY, lw=0.8)
        plot.label(axis, label, "gain in AUROC, points")


def _gain(model: EvaluatedModel) -> dict[str, float]:
    specs = [
        {"name": "fdbd", "title": "regDistDB"},
        {"name": "fdbd", "normalizer": "none", "title": "avgDistDB"},
    ]
    results = model.run(specs)
    values = {name: average(results, name, "auroc") for name in ("avgDistDB", "regDistDB")}
    # Each side has the same weight, whatever its number of samples.
    inside, *outside = (part.deviation for part in model.standings().values())
    sides = inside, np.concatenate(outside)
    mean = sum(part.mean() for part in sides) / 2
    variance = sum(((part - mean) ** 2).mean() for part in sides) / 2
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
    """Within-class over between-class variance of features (N, P) with labels (N,): the traces of
    both covariances.

    Both are without bias for any number of samples per class from two on (the components of a
    one-way analysis of variance), so that networks fitted on two photographs per class and on
    thousands can be compared.
    """
    classes, places, counts = labels.unique(return_inverse=True, return_counts=True)
    total, groups = len(features), len(classes)
    if groups < 2 or total <= groups:
        raise ValueError(
            f"{total} samples of {groups} classes: expected two classes, with several each"
        )
    means = torch.zeros(groups, features.shape[1], dtype=features.dtype).index_add_(
        0, places, features
    )
    means /= counts[:, None]
    within = float(((features - means[places]) ** 2).sum()) / (total - groups)
    spread = float((counts[:, None] * (means - features.mean(dim=0)) ** 2).sum()) / (groups - 1)
    typical = (total - float((counts.double() ** 2).sum()) / total) / (groups - 1)
    return within * typical / (spread - within) if spread > within else math.inf


def domain_shift(result: Result) -> None:
    """AUROC of fDBD with the clean ID set, then with each severity of corruption as ID."""
    model, slight = load_models(result)[0], result.settings["slight"]
    found = [_measure(model, "clean", model.benchmark.test)]
    for severity in result.settings["severities"]:
        try:
            found.append(
                _measure(model, f"severity {severity}", _corrupted(model, severity, result))
            )
        except (DatasetUnavailable, OSError) as error:
            result.missing.append(f"severity {severity}: {one_line(error)}")
    if len(found) == 1:
        raise MissingData(
            f"{result.experiment.name} needs corrupted images: {'; '.join(result.missing)}"
        )
    metrics = ("accuracy", "auroc", "fpr95")
    result.table(
        ["ID samples", "images", "accuracy", "average AUROC ↑", "average FPR95 ↓"],
        [
            [part["name"], f"{part['count']:,}", *(as_percent(part[key]) for key in metrics)]
            for part in found
        ],
        f"{model.title}; OOD: {', '.join(samples.name for samples in model.benchmark.ood)}; fDBD, percent.",
    )
    values = [part["auroc"] for part in found]
    falls, measured = (
        all(a > b for a, b in pairwise(values)),
        f"AUROC {', '.join(map(as_percent, values))}.",
    )
    result.check("AUROC falls as the corruption grows", falls, measured)
    fall = difference(values[0], values[-1])
    statement = f"It falls slightly: at most {slight} points from clean to the strongest corruption"
    test = Comparison.of(slight / 100 - fall.difference, fall.standard_error)
    result.check(statement, test, f"{100 * fall.difference:.2f} points.")
    result.data = {"rows": found}
    axis, names = result.axes(6, 3.4)[0, 0], [part["name"] for part in found]
    for colour, title in zip(plot.COLOURS, found[0]["sets"]):
        aurocs = [100 * part["sets"][title] for part in found]
        axis.plot(names, aurocs, marker="o", color=colour, lw=1, ms=4, label=title)
    axis.plot(
        names,
        [100 * value for value in values],
        marker="o",
        color=plot.INSIDE,
        lw=2.5,
        label="average",
    )
    accuracy = [100 * part["accuracy"] for part in found]
    axis.plot(names, accuracy, color=plot.GREY, ls=":", label="accuracy of the classifier")
    plot.label(
        axis,
        "ID samples",
        "AUROC of fDBD, percent",
        legend=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
    )


def _corrupted(model: EvaluatedModel, severity: int, result: Result) -> FeatureSet:
    classifier, preprocess = model.network
    images = load(
        f"cifar10-c:mixed:{severity}", "test", limit=result.settings["limit"]
    )  # all four families

    def progress(done: int, total: int) -> None:
        result.say(f"severity {severity}: {done:,} of {total:,} images")

    return FeatureCache().features(classifier, images, preprocess, progress=progress)


def _measure(model: EvaluatedModel, name: str, test: FeatureSet) -> dict[str, Any]:
    results = replace(model.benchmark, test=test, title=name).run(
        ["fdbd"], latency=False, progress=False
    )
    metrics = {metric: average(results, "fdbd", metric) for metric in ("auroc", "fpr95")}
    sets = {key: float(value.auroc) for key, value in results.row("fdbd").evaluations.items()}
    return {
        "name": name,
        "count": len(test),
        "accuracy": results.setting.accuracy or 0.0,
        **metrics,
        "sets": sets,
    }
