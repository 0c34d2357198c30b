"""Why networks disagree: shaping at each percentile, what the gain of the regularisation goes with, and corruptions."""

from __future__ import annotations

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
from fdbd.paper.result import Result, Verdict, difference
from fdbd.util.terminal import one_line

MEANS = {"shaped": "shaped mean", "of_shaped": "mean of shaped"}
"""Ways to take the mean of shaped features, which fDBD needs."""


def percentiles(result: Result) -> None:
    """AUROC of fDBD and Energy after ReAct, ASH and SCALE at many percentiles, for each network."""
    grid, shapings = result.settings["percentiles"], result.settings["shapings"]
    models = load_models(result)
    records, found = [], {}
    axes = result.axes(9.5, 0.4 + 2.0 * len(models), len(models), len(shapings))
    for model, line in zip(models, axes):
        result.say(f"{len(shapings)} shapings at {len(grid)} percentiles on {model.title}")
        plain = model.run(["fdbd", "energy"])
        base = {name: average(plain, name, "auroc") for name in ("fdbd", "energy")}
        curves = {shaping: _curves(model, shaping, grid) for shaping in shapings}
        found[model.title] = {"plain": base, "curves": curves}
        for axis, (shaping, chosen) in zip(line, shapings.items()):
            values = curves[shaping]
            bests = {kind: f"{as_percent(max(part))} ({grid[np.argmax(part)]})" for kind, part in values.items()}
            given = f"{as_percent(values['shaped'][grid.index(chosen)])} ({chosen})"
            records.append({"model": model.title, "shaping": shaping, "given": given, "best": bests, **base})
            best = max(max(values[mean]) for mean in MEANS)
            statement = f"Some percentile of {shaping} raises the AUROC of fDBD by half a point or more ({model.title})"
            measured = f"{as_percent(base['fdbd'])} without, {as_percent(best)} at best."
            result.check(statement, best - base["fdbd"] >= 0.005, measured)
            for (kind, part), style in zip(values.items(), "-:-"):
                colour, name = (plot.INSIDE, f"fdbd, {MEANS[kind]}") if kind in MEANS else (plot.OUTSIDE, kind)
                shown = [100 * value for value in part]
                axis.plot(grid, shown, color=colour, ls=style, marker="o", ms=3, label=name)
            for kind, colour in (("fdbd", plot.INSIDE), ("energy", plot.OUTSIDE)):
                axis.axhline(100 * base[kind], color=colour, lw=0.8, alpha=0.5)
            plot.label(axis, "percentile", "average AUROC", f"{model.title}: {shaping}")
    plot.label(axes[0, 0], legend=7)
    columns = {"network": "{model}", "shaping": "{shaping}", "fdbd": "{fdbd!p}", "at the paper's percentile": "{given}"}
    columns |= {f"best, {name}": f"{{best[{mean}]}}" for mean, name in MEANS.items()}
    result.table(
        {**columns, "energy": "{energy!p}", "best, energy": "{best[energy]}"},
        records,
        "Average AUROC over the OOD sets, percent; in brackets the percentile. The percentile of the best is chosen on "
        "the OOD sets themselves: it bounds what tuning could reach, and is no result.",
    )
    result.data = {"percentiles": grid, **found}


def _curves(model: EvaluatedModel, shaping: str, grid: Sequence[float]) -> dict[str, list[float]]:
    """Average AUROC by percentile: of fDBD under each way to take the mean, and of Energy."""
    kinds: dict[str, dict[str, Any]] = {mean: {"name": f"{shaping}+fdbd", "mean": mean} for mean in MEANS}
    kinds["energy"] = {"name": f"{shaping}+energy"}
    specs = [{**spec, "percentile": p, "title": f"{kind} {p}"} for kind, spec in kinds.items() for p in grid]
    results = model.run(specs)
    return {kind: [average(results, f"{kind} {p}", "auroc") for p in grid] for kind in kinds}


def regularization_gain(result: Result) -> None:
    """What the division by the deviation gains on each network, against the spread of the deviation and the degree of
    neural collapse."""
    from scipy.stats import spearmanr  # takes half a second to import

    found = {}
    for model in load_models(result):
        result.say(f"distances and class statistics of {model.title}")
        found[model.title] = _gain(model)
    columns = {"network": "{title}", "features": "{features:,}", "classes": "{classes:,}"}
    columns |= {key: f"{{{key}!p}}" for key in ("avgDistDB", "regDistDB", "gain")}
    result.table(
        columns | {"dispersion": "{dispersion:.3f}", "collapse": "{collapse:.3f}"},
        ({"title": title, **part} for title, part in found.items()),
        "AUROC averaged over the OOD sets and its gain, percent. Dispersion: standard deviation over mean of the "
        "deviation ‖z − μ‖, ID and OOD samples together. Collapse: within-class over between-class variance of the "
        "fitted features, without bias; 0 is complete collapse.",
    )
    for title, part in found.items():
        measured = f"AUROC {as_percent(part['avgDistDB'])} without, {as_percent(part['regDistDB'])} with."
        test = Comparison.of(part["gain"], part["error"])
        result.check(f"The regularisation raises the average AUROC ({title})", test, measured)
    result.data = {"networks": found, "rank correlation": {}}
    causes = {
        "dispersion": ("the deviation is more dispersed", "dispersion of ‖z − μ‖"),
        "collapse": ("classes are less collapsed", "within / between"),
    }
    for axis, (key, (where, label)) in zip(result.axes(9, 3.4, 1, 2)[0], causes.items()):
        values, gains = ([part[name] for part in found.values()] for name in (key, "gain"))
        correlation = chance = math.nan
        if len(set(values)) >= 3 and len(set(gains)) >= 3:
            correlation, chance = map(float, spearmanr(values, gains))
        result.data["rank correlation"][key] = correlation, chance
        verdict: Verdict = "undecided"
        if chance <= 0.05:  # not where it is NaN
            verdict = "holds" if correlation > 0 else "does not hold"
        text = f"Rank correlation {correlation:+.2f} over {len(found)} networks, p = {chance:.2f}."
        result.check(f"The gain is larger where {where}", verdict, text)
        for name, part in found.items():
            place = part[key], 100 * part["gain"]
            axis.scatter(*place, s=24, color=plot.INSIDE)
            axis.annotate(name, place, fontsize=7, xytext=(4, 2), textcoords="offset points")
        axis.axhline(0, color=plot.GREY, lw=0.8)
        plot.label(axis, label, "gain in AUROC, points")


def _gain(model: EvaluatedModel) -> dict[str, float]:
    specs = [{"name": "fdbd", "title": "regDistDB"}, {"name": "fdbd", "normalizer": "none", "title": "avgDistDB"}]
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


def domain_shift(result: Result) -> None:
    """AUROC of fDBD with the clean ID set, then with each severity of corruption as ID."""
    model, slight = load_models(result)[0], result.settings["slight"]
    rows = [_measure(model, "clean", model.benchmark.test)]
    for severity in result.settings["severities"]:

        def progress(done: int, total: int, severity: int = severity) -> None:
            result.say(f"severity {severity}: {done:,} of {total:,} images")

        result.say(f"corruption of severity {severity}")
        try:
            classifier, preprocess = model.network
            images = load(f"cifar10-c:mixed:{severity}", "test", limit=result.settings["limit"])  # all four families
            features = FeatureCache().features(classifier, images, preprocess, progress=progress)
            rows.append(_measure(model, f"severity {severity}", features))
        except (DatasetUnavailable, OSError) as error:
            result.missing.append(f"severity {severity}: {one_line(error)}")
    if len(rows) == 1:
        raise MissingData(f"{result.experiment.name} needs corrupted images: {'; '.join(result.missing)}")
    columns = {"ID samples": "{name}", "images": "{count:,}", "accuracy": "{accuracy!p}"}
    note = f"{model.title}; OOD: {', '.join(samples.name for samples in model.benchmark.ood)}; fDBD, percent."
    result.table({**columns, "average AUROC ↑": "{auroc!p}", "average FPR95 ↓": "{fpr95!p}"}, rows, note)
    values = [row["auroc"] for row in rows]
    falls, measured = all(a > b for a, b in pairwise(values)), f"AUROC {', '.join(map(as_percent, values))}."
    result.check("AUROC falls as the corruption grows", falls, measured)
    fall = difference(values[0], values[-1])
    statement = f"It falls slightly: at most {slight} points from clean to the strongest corruption"
    test = Comparison.of(slight / 100 - fall.difference, fall.standard_error)
    result.check(statement, test, f"{100 * fall.difference:.2f} points.")
    result.data = {"rows": rows}
    axis, names = result.axes(6, 3.4)[0, 0], [row["name"] for row in rows]
    for colour, title in zip(plot.COLOURS, rows[0]["sets"]):
        axis.plot(names, [100 * row["sets"][title] for row in rows], marker="o", color=colour, lw=1, ms=4, label=title)
    axis.plot(names, [100 * value for value in values], marker="o", color=plot.INSIDE, lw=2.5, label="average")
    accuracy = [100 * row["accuracy"] for row in rows]
    axis.plot(names, accuracy, color=plot.GREY, ls=":", label="accuracy of the classifier")
    plot.label(axis, "ID samples", "AUROC of fDBD, percent", legend=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _measure(model: EvaluatedModel, name: str, test: FeatureSet) -> dict[str, Any]:
    results = replace(model.benchmark, test=test, title=name).run(["fdbd"], latency=False, progress=False)
    metrics = {metric: average(results, "fdbd", metric) for metric in ("auroc", "fpr95")}
    sets = {key: float(value.auroc) for key, value in results.row("fdbd").evaluations.items()}
    return {"name": name, "count": len(test), "accuracy": results.setting.accuracy or 0.0, **metrics, "sets": sets}
