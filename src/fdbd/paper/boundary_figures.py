"""The paper's figures: where ID and OOD features lie with respect to the decision boundaries."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from fdbd import geometry
from fdbd.bench import FeatureSet, Results
from fdbd.bench.figures import Floats, Standing, deviation_profile, training_mean
from fdbd.bench.rows import Row
from fdbd.core.batch import Head
from fdbd.metrics import Comparison, Estimate, as_percent, auroc
from fdbd.metrics.comparison import compare, influences, standard_error
from fdbd.paper import plot
from fdbd.paper.finding import Finding, difference, difference_of_means
from fdbd.paper.models import EvaluatedModel, average, load_models
from fdbd.paper.settings import Deviation, Distances, ModelSettings, NearestK

_BLOCK_BYTES = 64 << 20
"""Bytes of a block of distances (samples, classes) in float64."""


def overview(finding: Finding, settings: ModelSettings) -> None:
    """A sketch of the distances, and their average per sample on ID and OOD features."""
    model = load_models(finding)[0]
    distances_of = {name: part.distance for name, part in model.standings().items()}
    name_of_id = model.benchmark.test.name
    inside = distances_of[name_of_id]
    rows = []
    for title, part in distances_of.items():
        finding.data[title] = {"mean": part.mean(), "std": part.std()}
        separation = ""
        if title != name_of_id:
            separation = as_percent(auroc(inside, part))
            finding.decide(
                f"{name_of_id} features lie farther from the boundaries than those of {title}",
                difference_of_means(inside, part),
                f"Mean distance {inside.mean():.3f} against {part.mean():.3f}.",
            )
        rows.append([title, f"{part.mean():.3f}", f"{np.median(part):.3f}", separation])
    finding.table(["set", "mean distance", "median", "AUROC against ID"], rows)
    sketch, axis = finding.axes(9, 3.4, 1, 2)[0]
    _sketch(sketch)
    plot.histograms(axis, distances_of)
    plot.label(axis, "average distance to the decision boundaries", "density", legend=8)


def regularization(finding: Finding, settings: ModelSettings) -> None:
    """Histograms of the average distance, and of the same divided by the deviation from the
    training mean."""
    model = load_models(finding)[0]
    found = model.standings()
    plain = {name: part.distance for name, part in found.items()}
    divided = {name: part.scores for name, part in found.items()}
    name_of_id = model.benchmark.test.name
    outside = [name for name in found if name != name_of_id]
    gains = _table_of_gains(plain, divided, name_of_id, outside, finding)
    influences_before = [influences(plain[name_of_id], plain[title]) for title in outside]
    influences_after = [influences(divided[name_of_id], divided[title]) for title in outside]
    mean_gain = np.mean(list(gains.values()))
    raised = sum(gain > 0 for gain in gains.values())
    finding.decide(
        "Regularisation raises the AUROC on average over the OOD sets",
        compare(influences_after, influences_before),
        f"By {100 * mean_gain:.2f} points; on {raised} of {len(gains)} sets.",
    )
    finding.data = {"gains": gains}
    left, right = finding.axes(9, 3.2, 1, 2)[0]
    plot.histograms(left, plain)
    plot.label(left, "average distance to the boundaries (avgDistDB)", "density", legend=8)
    plot.histograms(right, divided)
    plot.label(right, "… divided by the deviation from the mean (regDistDB)", "density")


def _table_of_gains(
    plain: Mapping[str, Floats],
    divided: Mapping[str, Floats],
    name_of_id: str,
    outside: Sequence[str],
    finding: Finding,
) -> dict[str, float]:
    """AUROC and overlap of each OOD set with the ID set, before and after the division; returns
    what the AUROC gains on each."""
    rows: list[list[str]] = []
    gains: dict[str, float] = {}
    for title in outside:
        before = auroc(plain[name_of_id], plain[title])
        after = auroc(divided[name_of_id], divided[title])
        gains[title] = after - before
        overlap_before = _overlap(plain[name_of_id], plain[title])
        overlap_after = _overlap(divided[name_of_id], divided[title])
        cells = [before, after, overlap_before, overlap_after]
        rows.append([title, *map(as_percent, cells)])
    finding.table(
        [
            "OOD set",
            "AUROC, plain",
            "AUROC, regularised",
            "overlap, plain",
            "overlap, regularised",
        ],
        rows,
        "Overlap: shared area of the two histograms, percent.",
    )
    return gains


def deviation(finding: Finding, settings: Deviation) -> None:
    """Groups of equal deviation from the training mean: mean and spread of the average distance in
    each."""
    model = load_models(finding)[0]
    profile = deviation_profile(model.benchmark, settings.levels)
    finding.data = profile
    rows: list[list[str]] = []
    axis = finding.axes(7, 4)[0, 0]
    for colour, part in zip((plot.INSIDE, *plot.COLOURS), profile["sets"]):
        groups = _large_groups(part)
        for group in groups:
            rows.append([part["name"], *_cells_of_group(group)])
        axis.errorbar(
            [group["deviation"] for group in groups],
            [group["mean"] for group in groups],
            [group["std"] for group in groups],
            color=colour,
            label=part["name"],
            marker="o",
            ms=4,
            lw=1.3,
            capsize=2,
            elinewidth=0.7,
        )
        _decide_growth(part["name"], groups, settings.levels, finding)
    finding.table(["set", "level", "mean deviation", "samples", "mean distance", "variance"], rows)
    plot.label(
        axis,
        "deviation ‖z − μ‖ from the mean of the training features",
        "average distance to the boundaries\n(mean ± standard deviation of the group)",
        legend=8,
        title_fontsize=8,
    )
    axis.get_legend().set_title("first: ID")
    found = model.standings()
    for part in profile["sets"][1:]:
        inside = found[model.benchmark.test.name]
        _decide_separation_within_levels(part, inside, found[part["name"]], finding)


def _large_groups(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The levels of a set that have enough samples for a mean, each with its number from 1 on."""
    groups = []
    for place, deviation_of_group in enumerate(part["deviation"]):
        if deviation_of_group is not None:
            group = {key: part[key][place] for key in ("count", "deviation", "mean", "std")}
            groups.append({"level": place + 1, **group})
    return groups


def _cells_of_group(group: Mapping[str, Any]) -> list[str]:
    variance = group["std"] ** 2
    return [
        f"{group['level']}",
        f"{group['deviation']:.3g}",
        f"{group['count']}",
        f"{group['mean']:.3g}",
        f"{variance:.3g}",
    ]


def _decide_growth(
    name: str, groups: Sequence[Mapping[str, Any]], levels: int, finding: Finding
) -> None:
    means = [group["mean"] for group in groups]
    if len(means) < 2:
        finding.missing.append(f"{name} has too few samples for {levels} levels")
        return
    steps = len(means) - 1
    rising = sum(after > before for before, after in pairwise(means))
    finding.decide(
        f"The average distance grows with the deviation ({name})",
        means[-1] > means[0] and 2 * rising > steps,
        f"Rises in {rising} of {steps} steps, from {means[0]:.3g} to {means[-1]:.3g}.",
    )


def _decide_separation_within_levels(
    part: Mapping[str, Any], inside: Standing, outside: Standing, finding: Finding
) -> None:
    overall = part["auroc"]
    within = part["auroc_by_level"]
    # A set that shares no level with the ID set has no such AUROC.
    if not within:
        return
    error_over_all = standard_error([influences(inside.distance, outside.distance)])
    values = f"{as_percent(within)} within levels, {as_percent(overall)} over all"
    finding.decide(
        f"{part['name']} is better told from ID among samples of equal deviation",
        Comparison.from_difference(within - overall, error_over_all),
        f"AUROC of the average distance {values}.",
    )


def distances(finding: Finding, settings: Distances) -> None:
    """For each model, a histogram of the distance to the nearest boundary, to the second nearest,
    and so on."""
    panels: list[_Panel] = []
    for model in load_models(finding):
        finding.say(f"ranked distances of {model.title}")
        boundaries = model.benchmark.head.num_classes - 1
        ranks = list(range(0, boundaries, model.entry.every or settings.every))
        ranked = {
            part.name: _distances_at(ranks, part, model.benchmark.head) for part in model.sets
        }
        _table_of_ranks(ranks, ranked, model, finding)
        _decide_order_at_every_rank(ranks, ranked, model, finding)
        for place, rank in enumerate(ranks):
            title = f"{model.title}, rank {rank + 1} of {boundaries}"
            values = {name: values_of_set[:, place] for name, values_of_set in ranked.items()}
            panels.append((title, values))
    _draw_panels(panels, finding)


_Panel = tuple[str, dict[str, Floats]]
"""Title and values by set of one histogram."""


def _table_of_ranks(
    ranks: Sequence[int], ranked: Mapping[str, Floats], model: EvaluatedModel, finding: Finding
) -> None:
    rows = []
    for place, rank in enumerate(ranks):
        means = [f"{values[:, place].mean():.3f}" for values in ranked.values()]
        rows.append([f"{rank + 1}", *means])
    columns = ["rank", *(f"mean, {name}" for name in ranked)]
    finding.table(columns, rows, title=f"{finding.experiment.title}: {model.title}")


def _decide_order_at_every_rank(
    ranks: Sequence[int], ranked: Mapping[str, Floats], model: EvaluatedModel, finding: Finding
) -> None:
    """Whether the ID set has the larger mean distance than each OOD set, at each rank."""
    inside = ranked[model.benchmark.test.name]
    tests: list[Comparison] = []
    exceptions: list[str] = []
    for place, rank in enumerate(ranks):
        for samples in model.benchmark.ood:
            outside = ranked[samples.name]
            test = difference_of_means(inside[:, place], outside[:, place])
            tests.append(test)
            if test.difference <= 0:
                exceptions.append(f"{samples.name} at rank {rank + 1}")
    held = len(tests) - len(exceptions)
    measured = f"In {held} of {len(tests)} pairs of rank and set."
    if exceptions:
        measured += f" Not {', '.join(exceptions)}."
    finding.decide(
        "At every rank ID features lie farther from the boundary than OOD features, on average "
        f"({model.title})",
        tests,
        measured,
    )


def _draw_panels(panels: Sequence[_Panel], finding: Finding) -> None:
    """Three histograms per line."""
    lines = math.ceil(len(panels) / 3)
    axes = finding.axes(9.5, 0.6 + 2.1 * lines, lines, 3)
    for axis, (title, values) in zip(axes.flat, panels):
        plot.histograms(axis, values, bins=30)
        plot.label(axis, title=title)
    for unused in axes.flat[len(panels) :]:
        unused.set_visible(False)
    for axis in axes[-1]:
        plot.label(axis, "distance to the boundary")
    plot.label(axes[0, 0], legend=7)


def _distances_at(ranks: list[int], samples: FeatureSet, head: Head) -> Floats:
    """(N, ranks) distances of a set, nearest first, at some ranks; in blocks, since all would be
    (N, C)."""
    rows_per_block = max(1, _BLOCK_BYTES // (8 * head.num_classes))
    parts = []
    for batch in samples.batches(rows_per_block):
        # The predicted class has no boundary with itself: NaN becomes the last rank.
        of_block = geometry.distances(batch.features, head).nan_to_num(torch.inf)
        nearest_first = of_block.sort(dim=1).values
        parts.append(nearest_first[:, ranks].double())
    return torch.cat(parts).numpy()


def nearest_k(finding: Finding, settings: NearestK) -> None:
    """FPR95 and AUROC of fDBD when only the k nearest boundaries are averaged, for each model."""
    models = load_models(finding)
    rows: list[list[str]] = []
    axes = finding.axes(8.5, 0.4 + 2.8 * len(models), len(models), 2)
    for model, (left, right) in zip(models, axes):
        title = model.title
        ks = _numbers_of_boundaries(settings.ks, model.benchmark.head.num_classes - 1)
        finding.say(f"fdbd with {len(ks)} numbers of distances on {title}")
        results = _results_of_nearest(model, ks)
        aurocs = [average(results, row.name, "auroc") for row in results.rows]
        fprs = [average(results, row.name, "fpr95") for row in results.rows]
        finding.data[title] = {"k": ks, "auroc": aurocs, "fpr95": fprs}
        for k, of_auroc, of_fpr in zip(ks, aurocs, fprs):
            rows.append([title, f"{k}", as_percent(of_auroc), as_percent(of_fpr)])
        _decide_on_nearest(results, ks, aurocs, fprs, title, finding)
        _draw_over_k(left, "AUROC", aurocs, ks, title)
        _draw_over_k(right, "FPR95", fprs, ks, title)
    finding.table(["model", "k", "average AUROC ↑", "average FPR95 ↓"], rows)


def _decide_on_nearest(
    results: Results,
    ks: Sequence[int],
    aurocs: Sequence[Estimate],
    fprs: Sequence[Estimate],
    title: str,
    finding: Finding,
) -> None:
    """Whether all distances are better than the nearest alone, and better than any other number."""
    higher_auroc = results.compare(results.rows[-1].name, results.rows[0].name)
    lower_fpr = difference(fprs[0], fprs[-1])
    _decide_all_against_nearest("AUROC", aurocs, ks, higher_auroc, title, finding)
    _decide_all_against_nearest("FPR95", fprs, ks, lower_fpr, title, finding)
    _decide_best_is_all(aurocs, ks, results, title, finding)


def _draw_over_k(
    axis: plot.Axes, metric: str, values: Sequence[float], ks: Sequence[int], title: str
) -> None:
    shown = [100 * value for value in values]
    plot.curves(axis, ks, {"": shown}, size=4)
    plot.label(
        axis,
        "k, the number of nearest boundaries averaged",
        f"average {metric}, percent",
        title,
        log="x" if ks[-1] > 100 else "",
    )
    axis.grid(color="#eeeeee")


def _numbers_of_boundaries(wanted: Sequence[int], last: int) -> list[int]:
    """The numbers of boundaries to try, up to `last`, which is always among them."""
    if not wanted:
        return list(range(1, last + 1))
    return sorted({min(k, last) for k in wanted} | {last})


def _decide_all_against_nearest(
    metric: str,
    values: Sequence[float],
    ks: Sequence[int],
    test: Comparison,
    title: str,
    finding: Finding,
) -> None:
    if metric == "AUROC":
        better = sum(after > before for before, after in pairwise(values))
    else:
        better = sum(after < before for before, after in pairwise(values))
    at_first = f"{as_percent(values[0])} at k = {ks[0]}"
    at_last = f"{as_percent(values[-1])} at k = {ks[-1]}"
    finding.decide(
        f"{metric} is better with all distances than with the nearest alone ({title})",
        test,
        f"{at_first}, {at_last}; better in {better} of {len(ks) - 1} steps.",
    )


def _decide_best_is_all(
    aurocs: Sequence[float], ks: Sequence[int], results: Results, title: str, finding: Finding
) -> None:
    best = int(np.argmax(aurocs))
    last = len(ks) - 1
    all_are_best: bool | Comparison = True
    if best != last:
        all_are_best = results.compare(results.rows[last].name, results.rows[best].name)
    at_best = as_percent(aurocs[best])
    finding.decide(
        f"All distances are the best choice of k, in AUROC ({title})",
        all_are_best,
        f"Best at k = {ks[best]}: {at_best} against {as_percent(aurocs[last])}.",
    )


def _results_of_nearest(model: EvaluatedModel, ks: list[int]) -> Results:
    """One row per k, all from one pass over the features: a detector per k would compute the same
    distances again."""
    benchmark = model.benchmark
    mean = training_mean(benchmark).float()
    norms = geometry.pairwise_norms(benchmark.head)
    scores: dict[str, torch.Tensor] = {}
    for samples in model.sets:
        scores[samples.name] = _scores_of_nearest(samples, ks, benchmark.head, mean, norms)
    rows = []
    for place, k in enumerate(ks):
        of_k = {name: values[place] for name, values in scores.items()}
        id_scores = of_k.pop(benchmark.test.name)
        rows.append(Row.from_scores(f"k = {k}", id_scores, of_k, benchmark.positive))
    return Results(benchmark.setting(), rows)


def _scores_of_nearest(
    samples: FeatureSet, ks: list[int], head: Head, mean: torch.Tensor, norms: torch.Tensor
) -> torch.Tensor:
    """(K, N) fDBD's scores of N samples from the k nearest boundaries, for each of K numbers k."""
    rows_per_block = max(1, _BLOCK_BYTES // (64 * head.num_classes))
    blocks = []
    for batch in samples.batches(rows_per_block):
        distances = geometry.distances(batch.features, head, norms=norms)
        deviations = torch.linalg.vector_norm(batch.features - mean, dim=1)
        scores = [geometry.mean_of_nearest(distances, k) / deviations for k in ks]
        blocks.append(torch.stack(scores))
    return torch.cat(blocks, dim=1)


def _overlap(first: Floats, second: Floats, bins: int = 60) -> float:
    """Area that two histograms share."""
    edges = np.histogram_bin_edges(np.concatenate([first, second]), bins)
    share_of_first = np.histogram(first, edges)[0] / len(first)
    share_of_second = np.histogram(second, edges)[0] / len(second)
    return float(np.minimum(share_of_first, share_of_second).sum())


def _sketch(axis: plot.Axes) -> None:
    """Three classes in the plane, a feature, and how far it must move to be classified as each of
    the others."""
    weight = torch.tensor([[1.0, 0.2], [-0.7, 0.8], [-0.2, -1.0]])
    head = Head(weight, torch.tensor([0.0, 0.1, 0.0]))
    _draw_regions(axis, head)
    z = torch.tensor([[1.3, 0.1]])
    distance = geometry.distances(z, head)[0]
    for c, place in ((1, (0.28, 0.78)), (2, (0.66, -0.95))):
        normal = head.weight[c] - head.weight[0]
        foot = z[0] + distance[c] * normal / normal.norm()
        arrow = {"arrowstyle": "->", "color": "#333333"}
        axis.annotate("", foot.tolist(), z[0].tolist(), arrowprops=arrow)
        axis.text(*place, f"$D_f(z, {c + 1})$", fontsize=9)
    axis.plot(*z[0].tolist(), "o", color=plot.INSIDE)
    axis.text(1.4, 0.15, "z", fontsize=10)
    for c, place in enumerate(((1.5, 1.6), (-1.9, 1.6), (-1.0, -2.0))):
        axis.text(*place, f"class {c + 1}", fontsize=9, color="#555555")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_aspect("equal")
    plot.label(axis, "feature space")


def _draw_regions(axis: plot.Axes, head: Head) -> None:
    """The decision regions of three classes in the plane, and the boundaries between them."""
    side = np.linspace(-2.4, 2.4, 150)
    corners = np.stack(np.meshgrid(side, side), axis=-1)
    grid = torch.from_numpy(corners.reshape(-1, 2)).float()
    region = head(grid).argmax(dim=1).reshape(150, 150).numpy()
    pale = ["#dbe7f5", "#f7e3e6", "#e3efe8"]
    axis.contourf(side, side, region, levels=[-0.5, 0.5, 1.5, 2.5], colors=pale)
    axis.contour(side, side, region, levels=[0.5, 1.5], colors="#555555", linewidths=1)
