"""The paper's figures: where ID and OOD features lie with respect to the decision boundaries."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fdbd import geometry
from fdbd.bench import FeatureSet, Results
from fdbd.bench.figures import Floats, deviation_profile, training_mean
from fdbd.bench.rows import Row
from fdbd.core.batch import Head
from fdbd.metrics import Comparison, as_percent, auroc
from fdbd.metrics.comparison import compare, influences, standard_error
from fdbd.paper import plot
from fdbd.paper.models import EvaluatedModel, average, load_models
from fdbd.paper.result import Result, difference, difference_of_means

_BLOCK_BYTES = 64 << 20  # of a block of distances (samples, classes) in float64


def overview(result: Result) -> None:
    """A sketch of the distances, and their average per sample on ID and OOD features."""
    values = {name: part.distance for name, part in load_models(result)[0].standings().items()}
    (name, inside), *outside = values.items()
    result.data = {
        title: {"mean": part.mean(), "std": part.std()} for title, part in values.items()
    }
    separations = ["", *(as_percent(auroc(inside, part)) for _, part in outside)]
    averages = [
        [title, f"{part.mean():.3f}", f"{np.median(part):.3f}"] for title, part in values.items()
    ]
    rows = [[*cells, separation] for cells, separation in zip(averages, separations)]
    result.table(["set", "mean distance", "median", "AUROC against ID"], rows)
    for title, part in outside:
        statement = f"{name} features lie farther from the boundaries than those of {title}"
        measured = f"Mean distance {inside.mean():.3f} against {part.mean():.3f}."
        result.check(statement, difference_of_means(inside, part), measured)
    sketch, axis = result.axes(9, 3.4, 1, 2)[0]
    _sketch(sketch)
    plot.histograms(axis, values)
    plot.label(axis, "average distance to the decision boundaries", "density", legend=8)


def regularization(result: Result) -> None:
    """Histograms of the average distance, and of the same divided by the deviation from the
    training mean."""
    found = load_models(result)[0].standings()
    scores = [
        {name: getattr(part, kind) for name, part in found.items()}
        for kind in ("distance", "scores")
    ]
    name, *outside = found
    rows, gains = [], {}
    for title in outside:
        before, after = (auroc(part[name], part[title]) for part in scores)
        gains[title] = after - before
        overlaps = (_overlap(part[name], part[title]) for part in scores)
        rows.append([title, *map(as_percent, (before, after, *overlaps))])
    columns = [
        "OOD set",
        "AUROC, plain",
        "AUROC, regularised",
        "overlap, plain",
        "overlap, regularised",
    ]
    result.table(columns, rows, "Overlap: shared area of the two histograms, percent.")
    plain, divided = ([influences(part[name], part[title]) for title in outside] for part in scores)
    raised = sum(gain > 0 for gain in gains.values())
    measured = (
        f"By {100 * np.mean(list(gains.values())):.2f} points; on {raised} of {len(gains)} sets."
    )
    statement = "Regularisation raises the AUROC on average over the OOD sets"
    result.check(statement, compare(divided, plain), measured)
    result.data = {"gains": gains}
    axes = result.axes(9, 3.2, 1, 2)[0]
    labels = (
        "average distance to the boundaries (avgDistDB)",
        "… divided by the deviation from the mean (regDistDB)",
    )
    for axis, values, label in zip(axes, scores, labels):
        plot.histograms(axis, values)
        plot.label(axis, label, "density")
    plot.label(axes[0], legend=8)


def deviation(result: Result) -> None:
    """Groups of equal deviation from the training mean: mean and spread of the average distance in
    each."""
    model, levels = load_models(result)[0], result.settings["levels"]
    profile = result.data = deviation_profile(model.benchmark, levels)
    rows: list[list[str]] = []
    axis = result.axes(7, 4)[0, 0]
    look = {"marker": "o", "ms": 4, "lw": 1.3, "capsize": 2, "elinewidth": 0.7}
    for colour, part in zip((plot.INSIDE, *plot.COLOURS), profile["sets"]):
        name = part["name"]
        numbered = enumerate(
            zip(part["count"], part["deviation"], part["mean"], part["std"]), start=1
        )
        groups = [(level, *values) for level, values in numbered if values[1] is not None]
        for level, count, x, mean, spread in groups:
            rows.append(
                [name, f"{level}", f"{x:.3g}", f"{count}", f"{mean:.3g}", f"{spread**2:.3g}"]
            )
        _, _, x, means, spreads = zip(*groups) if groups else ((),) * 5
        axis.errorbar(x, means, spreads, color=colour, label=name, **look)
        if len(means) < 2:
            result.missing.append(f"{name} has too few samples for {levels} levels")
            continue
        steps = sum(b > a for a, b in pairwise(means))
        measured = (
            f"Rises in {steps} of {len(means) - 1} steps, from {means[0]:.3g} to {means[-1]:.3g}."
        )
        rises = means[-1] > means[0] and 2 * steps > len(means) - 1
        result.check(f"The average distance grows with the deviation ({name})", rises, measured)
    result.table(["set", "level", "mean deviation", "samples", "mean distance", "variance"], rows)
    vertical = "average distance to the boundaries\n(mean ± standard deviation of the group)"
    plot.label(
        axis,
        "deviation ‖z − μ‖ from the mean of the training features",
        vertical,
        legend=8,
        title_fontsize=8,
    )
    axis.get_legend().set_title("first: ID")
    found = model.standings()
    inside = found[model.benchmark.test.name].distance
    for part in profile["sets"][1:]:
        name, overall, within = part["name"], part["auroc"], part["auroc_by_level"]
        if within:
            error = standard_error(
                [influences(inside, found[name].distance)]
            )  # of the AUROC over all
            statement = f"{name} is better told from ID among samples of equal deviation"
            values = f"{as_percent(within)} within levels, {as_percent(overall)} over all"
            test = Comparison.of(within - overall, error)
            result.check(statement, test, f"AUROC of the average distance {values}.")


def distances(result: Result) -> None:
    """For each model, a histogram of the distance to the nearest boundary, to the second nearest,
    and so on."""
    panels: list[tuple[str, dict[str, Floats]]] = []
    for model in load_models(result):
        result.say(f"ranked distances of {model.title}")
        width = model.benchmark.head.num_classes - 1
        ranks = list(range(0, width, model.settings.get("every", result.settings["every"])))
        ranked = {
            part.name: _distances_at(ranks, part, model.benchmark.head) for part in model.sets
        }
        tests, wrong, rows = [], [], []
        for place, rank in enumerate(ranks):
            (_, inside), *outside = at_rank = [
                (name, values[:, place]) for name, values in ranked.items()
            ]
            panels.append((f"{model.title}, rank {rank + 1} of {width}", dict(at_rank)))
            rows.append([f"{rank + 1}", *(f"{values.mean():.3f}" for _, values in at_rank)])
            for title, values in outside:
                tests.append(difference_of_means(inside, values))
                wrong += [f"{title} at rank {rank + 1}"] * (tests[-1].difference <= 0)
        columns = ["rank", *(f"mean, {name}" for name in ranked)]
        result.table(columns, rows, title=f"{result.experiment.title}: {model.title}")
        statement = (
            "At every rank ID features lie farther from the boundary than OOD features, on average"
        )
        exceptions = f" Not {', '.join(wrong)}." if wrong else ""
        measured = (
            f"In {len(tests) - len(wrong)} of {len(tests)} pairs of rank and set.{exceptions}"
        )
        result.check(f"{statement} ({model.title})", tests, measured)
    lines = -(-len(panels) // 3)
    axes = result.axes(9.5, 0.6 + 2.1 * lines, lines, 3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (title, panel) in zip(axes.flat, panels):
        plot.histograms(axis, panel, bins=30)
        plot.label(axis, title=title)
    for axis in axes[-1]:
        plot.label(axis, "distance to the boundary")
    plot.label(axes[0, 0], legend=7)


def _distances_at(ranks: list[int], samples: FeatureSet, head: Head) -> Floats:
    """(N, ranks) distances of a set, nearest first, at some ranks; in blocks, since all would be
    (N, C)."""
    blocks = samples.batches(max(1, _BLOCK_BYTES // (8 * head.num_classes)))
    found = (geometry.distances(batch.features, head).nan_to_num(torch.inf) for batch in blocks)
    return torch.cat([part.sort(dim=1).values[:, ranks].double() for part in found]).numpy()


def nearest_k(result: Result) -> None:
    """FPR95 and AUROC of fDBD when only the k nearest boundaries are averaged, for each model."""
    models, rows = load_models(result), []
    axes = result.axes(8.5, 0.4 + 2.8 * len(models), len(models), 2)
    for model, line in zip(models, axes):
        last = model.benchmark.head.num_classes - 1
        ks = sorted(
            {min(k, last) for k in result.settings.get("ks") or range(1, last + 1)} | {last}
        )
        result.say(f"fdbd with {len(ks)} numbers of distances on {model.title}")
        results = _results_of_nearest(model, ks)
        names = [row.name for row in results.rows]
        values = {
            metric: [average(results, name, metric) for name in names]
            for metric in ("auroc", "fpr95")
        }
        result.data[model.title] = {"k": ks, **values}
        rows += [
            [model.title, f"{k}", *map(as_percent, both)] for k, *both in zip(ks, *values.values())
        ]
        tests = (
            results.compare(names[-1], names[0]),
            difference(values["fpr95"][0], values["fpr95"][-1]),
        )
        for axis, (metric, found), test, sign in zip(line, values.items(), tests, (1, -1)):
            better = sum(sign * b > sign * a for a, b in pairwise(found))
            ends = f"{as_percent(found[0])} at k = {ks[0]}, {as_percent(found[-1])} at k = {ks[-1]}"
            statement = f"{metric.upper()} is better with all distances than with the nearest alone ({model.title})"
            result.check(statement, test, f"{ends}; better in {better} of {len(ks) - 1} steps.")
            plot.curves(axis, ks, {"": [100 * value for value in found]}, size=4)
            x, y = (
                "k, the number of nearest boundaries averaged",
                f"average {metric.upper()}, percent",
            )
            plot.label(axis, x, y, model.title, log="x" * (last > 100))
            axis.grid(color="#eeeeee")
        found = values["auroc"]
        best = int(np.argmax(found))
        is_best = best == len(ks) - 1 or results.compare(names[-1], names[best])
        measured = (
            f"Best at k = {ks[best]}: {as_percent(found[best])} against {as_percent(found[-1])}."
        )
        result.check(
            f"All distances are the best choice of k, in AUROC ({model.title})", is_best, measured
        )
    result.table(["model", "k", "average AUROC ↑", "average FPR95 ↓"], rows)


def _results_of_nearest(model: EvaluatedModel, ks: list[int]) -> Results:
    """One row per k, all from one pass over the features: a detector per k would compute the same
    distances again."""
    benchmark, mean = model.benchmark, training_mean(model.benchmark).float()
    norms = geometry.pairwise_norms(benchmark.head)
    scores: list[dict[str, torch.Tensor]] = [{} for _ in ks]
    for samples in model.sets:
        parts = []
        for batch in samples.batches(max(1, _BLOCK_BYTES // (64 * benchmark.head.num_classes))):
            distances = geometry.distances(batch.features, benchmark.head, norms=norms)
            deviation = torch.linalg.vector_norm(batch.features - mean, dim=1)
            parts.append(
                torch.stack([geometry.mean_of_nearest(distances, k) / deviation for k in ks])
            )
        for found, values in zip(scores, torch.cat(parts, dim=1)):
            found[samples.name] = values
    rows = [Row.of(f"k = {k}", found, benchmark.positive) for k, found in zip(ks, scores)]
    return Results(benchmark.setting(), rows)


def _overlap(first: Floats, second: Floats, bins: int = 60) -> float:
    """Area that two histograms share."""
    edges = np.histogram_bin_edges(np.concatenate([first, second]), bins)
    counts = [np.histogram(part, edges)[0] / len(part) for part in (first, second)]
    return float(np.minimum(*counts).sum())


def _sketch(axis: Any) -> None:
    """Three classes in the plane, a feature, and how far it must move to be classified as each of
    the others."""
    head = Head(
        torch.tensor([[1.0, 0.2], [-0.7, 0.8], [-0.2, -1.0]]), torch.tensor([0.0, 0.1, 0.0])
    )
    side = np.linspace(-2.4, 2.4, 150)
    grid = torch.from_numpy(np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)).float()
    region = head(grid).argmax(dim=1).reshape(150, 150).numpy()
    axis.contourf(
        side, side, region, levels=[-0.5, 0.5, 1.5, 2.5], colors=["#dbe7f5", "#f7e3e6", "#e3efe8"]
    )
    axis.contour(side, side, region, levels=[0.5, 1.5], colors="#555555", linewidths=1)
    z = torch.tensor([[1.3, 0.1]])
    distance = geometry.distances(z, head)[0]
    for c, place in ((1, (0.28, 0.78)), (2, (0.66, -0.95))):
        normal = head.weight[c] - head.weight[0]
        foot = z[0] + distance[c] * normal / normal.norm()
        axis.annotate(
            "", foot.tolist(), z[0].tolist(), arrowprops={"arrowstyle": "->", "color": "#333333"}
        )
        axis.text(*place, f"$D_f(z, {c + 1})$", fontsize=9)
    axis.plot(*z[0].tolist(), "o", color=plot.INSIDE)
    axis.text(1.4, 0.15, "z", fontsize=10)
    for c, place in enumerate(((1.5, 1.6), (-1.9, 1.6), (-1.0, -2.0))):
        axis.text(*place, f"class {c + 1}", fontsize=9, color="#555555")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_aspect("equal")
    plot.label(axis, "feature space")
