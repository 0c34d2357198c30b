"""The paper's figures: where ID and OOD features lie with respect to the decision boundaries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.bench import FeatureSet, Results
from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.metrics import Estimate, auroc, evaluate
from fdbd.metrics.comparison import Comparison, compare, placements, standard_error
from fdbd.paper import plot
from fdbd.paper.detector_tables import average
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.models import EvaluatedModel, load_models
from fdbd.paper.plot import Floats
from fdbd.paper.result import (
    Check,
    Result,
    Verdict,
    check,
    check_difference,
    difference,
    difference_of_means,
)
from fdbd.paper.table import Table, percent
from fdbd.report.figures import deviation_profile
from fdbd.results.rows import Row

_BLOCK_BYTES = 64 << 20  # of a block of distances (samples, classes) in float64


def overview(experiment: Experiment, say: Say) -> Result:
    """A sketch of the distances, and their average per sample on ID and OOD features."""
    (model, *_), result = load_models(experiment, say)
    say("distances to decision boundaries")
    values = {name: distance for name, (distance, _) in model.distances_and_deviations().items()}
    (name, inside), *outside = values.items()
    rows = [
        [title, f"{part.mean():.3f}", f"{np.median(part):.3f}", "" if title == name else percent(auroc(inside, part))]
        for title, part in values.items()
    ]
    result.tables = [Table(experiment.title, ["set", "mean distance", "median", "AUROC against ID"], rows)]
    for title, part in outside:
        statement = f"{name} features lie farther from the boundaries than those of {title}"
        measured = f"Mean distance {inside.mean():.3f} against {part.mean():.3f}."
        result.checks.append(check_difference(statement, difference_of_means(inside, part), measured))
    result.figure, axes = plot.figure(9, 3.4, 1, 2)
    _sketch(axes[0, 0])
    plot.histograms(axes[0, 1], values)
    plot.label(axes[0, 1], "average distance to the decision boundaries", "density", legend=8)
    result.data = {title: {"mean": part.mean(), "std": part.std()} for title, part in values.items()}
    return result


def regularization(experiment: Experiment, say: Say) -> Result:
    """Histograms of the average distance, and of the same divided by the deviation from the training mean."""
    (model, *_), result = load_models(experiment, say)
    say("plain and regularised distances")
    found = model.distances_and_deviations()
    plain = {name: distance for name, (distance, _) in found.items()}
    divided = {name: distance / deviation for name, (distance, deviation) in found.items()}
    name, *outside = found
    rows, gains = [], []
    sides = [[placements(part[name], part[title]) for title in outside] for part in (divided, plain)]
    for title in outside:
        before, after = (auroc(part[name], part[title]) for part in (plain, divided))
        overlaps = [_overlap(part[name], part[title]) for part in (plain, divided)]
        rows.append([title, *map(percent, (before, after, *overlaps))])
        gains.append(after - before)
    columns = ["OOD set", "AUROC, plain", "AUROC, regularised", "overlap, plain", "overlap, regularised"]
    result.tables = [Table(experiment.title, columns, rows, ["Overlap: shared area of the two histograms, percent."])]
    statement = "Regularisation raises the AUROC on average over the OOD sets"
    measured = f"By {100 * np.mean(gains):.2f} points; on {sum(g > 0 for g in gains)} of {len(gains)} sets."
    result.checks = [check_difference(statement, compare(*sides), measured)]
    result.figure, axes = plot.figure(9, 3.2, 1, 2)
    labels = ("average distance to the boundaries (avgDistDB)", "… divided by the deviation from the mean (regDistDB)")
    for axis, values, label in zip(axes[0], (plain, divided), labels):
        plot.histograms(axis, values)
        plot.label(axis, label, "density")
    plot.label(axes[0, 0], legend=8)
    result.data = {"gains": dict(zip(outside, gains))}
    return result


def deviation(experiment: Experiment, say: Say) -> Result:
    """Groups of equal deviation from the training mean: mean and spread of the average distance in each."""
    (model, *_), result = load_models(experiment, say)
    say("groups of equal deviation")
    profile = result.data = deviation_profile(model.benchmark, experiment.settings["levels"])
    rows = []
    for part in profile["sets"]:
        groups = zip(*(part[key] for key in ("count", "deviation", "mean", "std")))
        for level, (count, where, mean, std) in enumerate(groups, start=1):
            if mean is not None:
                rows.append([part["name"], str(level), f"{where:.3g}", str(count), f"{mean:.3g}", f"{std**2:.3g}"])
    columns = ["set", "level", "mean deviation", "samples", "mean distance", "variance"]
    result.tables = [Table(experiment.title, columns, rows)]
    for part in profile["sets"]:
        means = [mean for mean in part["mean"] if mean is not None]
        if len(means) < 2:
            result.missing.append(f"{part['name']} has too few samples for {experiment.settings['levels']} levels")
            continue
        steps = sum(b > a for a, b in pairwise(means))
        statement = f"The average distance grows with the deviation ({part['name']})"
        measured = f"Rises in {steps} of {len(means) - 1} steps, from {means[0]:.3g} to {means[-1]:.3g}."
        result.checks.append(check(statement, means[-1] > means[0] and 2 * steps > len(means) - 1, measured))
    found = model.distances_and_deviations()
    inside = found[model.benchmark.test.name][0]
    for part in profile["sets"][1:]:
        overall, within = part["auroc"], part["auroc_by_level"]
        if within:
            error = standard_error([placements(inside, found[part["name"]][0])])  # of the AUROC over all
            statement = f"{part['name']} is better told from ID among samples of equal deviation"
            measured = f"AUROC of the average distance {percent(within)} within levels, {percent(overall)} over all."
            result.checks.append(check_difference(statement, Comparison.of(within - overall, error), measured))
    result.figure, axes = plot.figure(7, 4)
    axis = axes[0, 0]
    for colour, part in zip((plot.INSIDE, *plot.COLOURS), profile["sets"]):
        kept = [k for k, mean in enumerate(part["mean"]) if mean is not None]
        x, y, spread = ([part[key][k] for k in kept] for key in ("deviation", "mean", "std"))
        look = {"marker": "o", "ms": 4, "lw": 1.3, "capsize": 2, "elinewidth": 0.7}
        axis.errorbar(x, y, spread, color=colour, label=part["name"], **look)
    vertical = "average distance to the boundaries\n(mean ± standard deviation of the group)"
    plot.label(axis, "deviation ‖z − μ‖ from the mean of the training features", vertical)
    plot.label(axis, legend=8, title_fontsize=8)
    axis.get_legend().set_title("first: ID")
    return result


def distances(experiment: Experiment, say: Say) -> Result:
    """For each model, a histogram of the distance to the nearest boundary, to the second nearest, and so on."""
    models, result = load_models(experiment, say)
    panels: list[tuple[str, dict[str, Floats]]] = []
    for model in models:
        say(f"ranked distances of {model.title}")
        benchmark = model.benchmark
        width = benchmark.head.num_classes - 1
        ranks = list(range(0, width, model.settings.get("every", experiment.settings["every"])))
        ranked = {s.name: _distances_at(ranks, s, benchmark.head) for s in (benchmark.test, *benchmark.ood)}
        name = benchmark.test.name
        rows: list[list[str]] = []
        wrong: list[str] = []
        verdicts = set()
        for place, rank in enumerate(ranks):
            rows.append([str(rank + 1), *(f"{values[:, place].mean():.3f}" for values in ranked.values())])
            panels.append((f"{model.title}, rank {rank + 1} of {width}", {k: v[:, place] for k, v in ranked.items()}))
            for title in list(ranked)[1:]:
                comparison = difference_of_means(ranked[name][:, place], ranked[title][:, place])
                verdicts.add(comparison.verdict())
                wrong += [f"{title} at rank {rank + 1}"] * (comparison.difference <= 0)
        columns = ["rank", *(f"mean, {title}" for title in ranked)]
        result.tables.append(Table(f"{experiment.title}: {model.title}", columns, rows))
        total = len(ranks) * (len(ranked) - 1)
        statement = (
            f"At every rank ID features lie farther from the boundary than OOD features, on average ({model.title})"
        )
        exceptions = f" Not {', '.join(wrong)}." if wrong else ""
        measured = f"In {total - len(wrong)} of {total} pairs of rank and set.{exceptions}"
        verdict: Verdict = "does not hold" if "lower" in verdicts else "undecided" if len(verdicts) > 1 else "holds"
        result.checks.append(Check(statement, verdict, measured))
    lines = -(-len(panels) // 3)
    result.figure, axes = plot.figure(9.5, 0.6 + 2.1 * lines, lines, 3)
    for place, axis in enumerate(axes.flat):
        axis.set_visible(place < len(panels))
        if place < len(panels):
            plot.histograms(axis, panels[place][1], bins=30)
            plot.label(axis, title=panels[place][0])
    for axis in axes[-1]:
        plot.label(axis, "distance to the boundary")
    plot.label(axes[0, 0], legend=7)
    return result


def _distances_at(ranks: list[int], samples: FeatureSet, head: Head) -> Floats:
    """(N, ranks) distances of a set, nearest first, at some ranks; in blocks, since all would be (N, C)."""
    rows = max(1, _BLOCK_BYTES // (8 * head.num_classes))
    parts = []
    for start in range(0, len(samples), rows):
        z = samples.rows(slice(start, start + rows)).features
        parts.append(geometry.distances(z, head).nan_to_num(torch.inf).sort(dim=1).values[:, ranks].double())
    return torch.cat(parts).numpy()


def nearest_k(experiment: Experiment, say: Say) -> Result:
    """FPR95 and AUROC of fDBD when only the k nearest boundaries are averaged, for each model."""
    models, result = load_models(experiment, say)
    result.figure, axes = plot.figure(8.5, 0.4 + 2.8 * len(models), len(models), 2)
    rows: list[list[str]] = []
    for model, line in zip(models, axes):
        last = model.benchmark.head.num_classes - 1
        chosen = experiment.settings.get("ks") or list(range(1, last + 1))
        ks = sorted({min(k, last) for k in chosen} | {last})
        say(f"fdbd with {len(ks)} numbers of distances on {model.title}")
        results = _results_of_nearest(model, ks)
        values = {metric: [average(results, row.name, metric) for row in results.rows] for metric in ("auroc", "fpr95")}
        result.data[model.title] = {"k": ks, **values}
        rows += [[model.title, str(k), percent(a), percent(f)] for k, a, f in zip(ks, *values.values())]
        result.checks += _nearest_checks(results, ks, values, model.title)
        for axis, metric, label in zip(line, values, ("average AUROC, percent", "average FPR95, percent")):
            axis.plot(ks, [100 * value for value in values[metric]], color=plot.INSIDE, marker="o", ms=4)
            plot.label(axis, "k, the number of nearest boundaries averaged", label, model.title)
            axis.grid(color="#eeeeee")
            if last > 100:
                axis.set_xscale("log")
    result.tables = [Table(experiment.title, ["model", "k", "average AUROC ↑", "average FPR95 ↓"], rows)]
    return result


def _nearest_checks(results: Results, ks: list[int], values: dict[str, list[Estimate]], title: str) -> list[Check]:
    names = [row.name for row in results.rows]
    tests = {
        "auroc": results.compare(names[-1], names[0]),
        "fpr95": difference(values["fpr95"][0], values["fpr95"][-1]),
    }
    checks = []
    for metric, sign, label in (("auroc", 1, "AUROC"), ("fpr95", -1, "FPR95")):
        better = sum(sign * b > sign * a for a, b in pairwise(values[metric]))
        first, end, steps = values[metric][0], values[metric][-1], f"better in {better} of {len(ks) - 1} steps"
        measured = f"{percent(first)} at k = {ks[0]}, {percent(end)} at k = {ks[-1]}; {steps}."
        statement = f"{label} is better with all distances than with the nearest alone ({title})"
        checks.append(check_difference(statement, tests[metric], measured))
    best = int(np.argmax(values["auroc"]))
    statement = f"All distances are the best choice of k, in AUROC ({title})"
    measured = f"Best at k = {ks[best]}: {percent(values['auroc'][best])} against {percent(values['auroc'][-1])}."
    if best == len(ks) - 1:
        return [*checks, check(statement, True, measured)]
    return [*checks, check_difference(statement, results.compare(names[-1], names[best]), measured)]


def _results_of_nearest(model: EvaluatedModel, ks: list[int]) -> Results:
    """One row per k, all from one pass over the features in blocks: a detector per k would hold ten tables (C, C)."""
    benchmark, mean = model.benchmark, model.training_mean().float()
    norms = geometry.pairwise_norms(benchmark.head)
    scores: list[dict[str, Tensor]] = [{} for _ in ks]
    for samples in (benchmark.test, *benchmark.ood):
        found = []
        for batch in samples.batches(max(1, _BLOCK_BYTES // (64 * benchmark.head.num_classes))):
            distances = geometry.distances(batch.features, benchmark.head, norms=norms)
            deviation = torch.linalg.vector_norm(batch.features - mean, dim=1)
            found.append(torch.stack([geometry.mean_of_nearest(distances, k) / deviation for k in ks]))
        for part, values in zip(scores, torch.cat(found, dim=1)):
            part[samples.name] = values
    rows = []
    for k, part in zip(ks, scores):
        inside = part.pop(benchmark.test.name)
        evaluations = {name: evaluate(inside, outside, positive=benchmark.positive) for name, outside in part.items()}
        rows.append(Row(f"k = {k}", evaluations=evaluations, id_scores=inside, ood_scores=part))
    return Results(benchmark.setting(), rows)


def _overlap(first: Floats, second: Floats, bins: int = 60) -> float:
    """Area that two histograms share."""
    edges = np.histogram_bin_edges(np.concatenate([first, second]), bins)
    counts = [np.histogram(part, edges)[0] / len(part) for part in (first, second)]
    return float(np.minimum(*counts).sum())


def _sketch(axis: Any) -> None:
    """Three classes in the plane, a feature, and how far it must move to be classified as each of the others."""
    head = Head(torch.tensor([[1.0, 0.2], [-0.7, 0.8], [-0.2, -1.0]]), torch.tensor([0.0, 0.1, 0.0]))
    side = np.linspace(-2.4, 2.4, 150)
    grid = torch.from_numpy(np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)).float()
    region = head(grid).argmax(dim=1).reshape(150, 150).numpy()
    axis.contourf(side, side, region, levels=[-0.5, 0.5, 1.5, 2.5], colors=["#dbe7f5", "#f7e3e6", "#e3efe8"])
    axis.contour(side, side, region, levels=[0.5, 1.5], colors="#555555", linewidths=1)
    z = torch.tensor([[1.3, 0.1]])
    distance = geometry.distances(z, head)[0]
    for c, place in ((1, (0.28, 0.78)), (2, (0.66, -0.95))):
        normal = head.weight[c] - head.weight[0]
        foot = z[0] + distance[c] * normal / normal.norm()
        axis.annotate("", foot.tolist(), z[0].tolist(), arrowprops={"arrowstyle": "->", "color": "#333333"})
        axis.text(*place, f"$D_f(z, {c + 1})$", fontsize=9)
    axis.plot(*z[0].tolist(), "o", color=plot.INSIDE)
    axis.text(1.4, 0.15, "z", fontsize=10)
    for c, place in enumerate(((1.5, 1.6), (-1.9, 1.6), (-1.0, -2.0))):
        axis.text(*place, f"class {c + 1}", fontsize=9, color="#555555")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_aspect("equal")
    plot.label(axis, "feature space")
