"""The paper's figures: where ID and OOD features lie with respect to the decision boundaries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core import geometry
from fdbd.core.batch import Head
from fdbd.detectors import FDBD
from fdbd.metrics import auroc
from fdbd.paper import plot
from fdbd.paper.experiment import Experiment
from fdbd.paper.finding import Finding, Table, check, percent
from fdbd.paper.kinds import Say
from fdbd.paper.subject import Subject, main_subject, stand_ins, standing
from fdbd.paper.tables import average
from fdbd.report.figures import deviation_profile

Floats = NDArray[np.float64]


def overview(experiment: Experiment, say: Say) -> Finding:
    """The sketch of the distances, and their per-sample average on ID and OOD features."""
    subject, missing = main_subject(experiment, say)
    say("distances to decision boundaries")
    values = {name: distance for name, (distance, _) in standing(subject).items()}
    (name, inside), outside = _split(values)
    finding = Finding(missing=missing, notes=stand_ins([subject]))
    rows = [
        [title, f"{part.mean():.3f}", f"{np.median(part):.3f}", "" if title == name else percent(auroc(inside, part))]
        for title, part in values.items()
    ]
    finding.tables = [Table(experiment.title, ["set", "mean distance", "median", "AUROC against ID"], rows)]
    for title, part in outside.items():
        statement = f"{name} features lie farther from the boundaries than those of {title}"
        measured = f"Mean distance {inside.mean():.3f} against {part.mean():.3f}."
        finding.checks.append(check(statement, bool(inside.mean() > part.mean()), measured))
    drawn, axes = plot.figure(9, 3.4, 1, 2)
    _sketch(axes[0, 0])
    plot.histograms(axes[0, 1], (name, inside), outside)
    axes[0, 1].set_xlabel("average distance to the decision boundaries", fontsize=9)
    axes[0, 1].set_ylabel("density", fontsize=9)
    axes[0, 1].legend(fontsize=8, frameon=False)
    finding.figure = drawn
    finding.data = {title: {"mean": part.mean(), "std": part.std()} for title, part in values.items()}
    return finding


def regularization(experiment: Experiment, say: Say) -> Finding:
    """Histograms of the average distance, and of the same divided by the deviation from the training mean."""
    subject, missing = main_subject(experiment, say)
    say("plain and regularised distances")
    found = standing(subject)
    plain = {name: distance for name, (distance, _) in found.items()}
    divided = {name: distance / deviation for name, (distance, deviation) in found.items()}
    rows, gains = [], []
    (name, inside), outside = _split(plain)
    for title in outside:
        before, after = auroc(inside, plain[title]), auroc(divided[name], divided[title])
        overlaps = [_overlap(part[name], part[title]) for part in (plain, divided)]
        rows.append([title, percent(before), percent(after), *(percent(share) for share in overlaps)])
        gains.append(after - before)
    finding = Finding(missing=missing, notes=stand_ins([subject]))
    columns = ["OOD set", "AUROC, plain", "AUROC, regularised", "overlap, plain", "overlap, regularised"]
    finding.tables = [Table(experiment.title, columns, rows, ["Overlap: shared area of the two histograms, percent."])]
    statement = "Regularisation raises the AUROC on average over the OOD sets"
    measured = f"By {100 * np.mean(gains):.2f} points; on {sum(g > 0 for g in gains)} of {len(gains)} sets."
    finding.checks = [check(statement, bool(np.mean(gains) > 0), measured)]
    drawn, axes = plot.figure(9, 3.2, 1, 2)
    labels = ("average distance to the boundaries (avgDistDB)", "… divided by the deviation from the mean (regDistDB)")
    for axis, values, label in zip(axes[0], (plain, divided), labels):
        plot.histograms(axis, *_split(values))
        axis.set_xlabel(label, fontsize=9)
        axis.set_ylabel("density", fontsize=9)
    axes[0, 0].legend(fontsize=8, frameon=False)
    finding.figure, finding.data = drawn, {"gains": dict(zip(outside, gains))}
    return finding


def deviation(experiment: Experiment, say: Say) -> Finding:
    """Groups of equal deviation from the training mean: mean and spread of the average distance in each."""
    subject, missing = main_subject(experiment, say)
    say("groups of equal deviation")
    profile = deviation_profile(subject.benchmark, experiment.settings["levels"])
    finding = Finding(missing=missing, notes=stand_ins([subject]), data=profile)
    rows = []
    for part in profile["sets"]:
        for level, (count, where, mean, std) in enumerate(
            zip(*(part[k] for k in ("count", "deviation", "mean", "std")))
        ):
            if mean is not None:
                cells = [f"{where:.3g}", str(count), f"{mean:.3g}", f"{std**2:.3g}"]
                rows.append([part["name"], str(level + 1), *cells])
    columns = ["set", "level", "mean deviation", "samples", "mean distance", "variance"]
    finding.tables = [Table(experiment.title, columns, rows)]
    for part in profile["sets"]:
        means = [mean for mean in part["mean"] if mean is not None]
        steps = sum(b > a for a, b in pairwise(means))
        statement = f"The average distance grows with the deviation ({part['name']})"
        measured = f"Rises in {steps} of {len(means) - 1} steps, from {means[0]:.3g} to {means[-1]:.3g}."
        finding.checks.append(check(statement, means[-1] > means[0] and 2 * steps > len(means) - 1, measured))
    separated = [(p["name"], p["auroc"], p["auroc_by_level"]) for p in profile["sets"][1:] if p["auroc_by_level"]]
    for name, overall, within in separated:
        statement = f"{name} is better told from ID among samples of equal deviation"
        measured = f"AUROC of the average distance {percent(within)} within levels, {percent(overall)} over all."
        finding.checks.append(check(statement, within > overall, measured))
    drawn, axes = plot.figure(7, 4)
    axis = axes[0, 0]
    for colour, part in zip((plot.INSIDE, *plot.COLOURS), profile["sets"]):
        kept = [k for k, mean in enumerate(part["mean"]) if mean is not None]
        x, y, spread = ([part[key][k] for k in kept] for key in ("deviation", "mean", "std"))
        axis.errorbar(
            x, y, spread, color=colour, marker="o", ms=4, lw=1.3, capsize=2, elinewidth=0.7, label=part["name"]
        )
    axis.set_xlabel("deviation ‖z − μ‖ from the mean of the training features", fontsize=9)
    axis.set_ylabel("average distance to the boundaries\n(mean ± standard deviation of the group)", fontsize=9)
    axis.legend(fontsize=8, frameon=False, title="first: ID", title_fontsize=8)
    finding.figure = drawn
    return finding


def distances(experiment: Experiment, say: Say) -> Finding:
    """The nearest distance, the second nearest, … : a histogram for each rank, or for every so many ranks."""
    subject, missing = main_subject(experiment, say)
    say("ranked distances")
    ranked = _ranked(subject)
    name = subject.benchmark.test.name
    width = ranked[name].shape[1]
    every = experiment.settings["every"]
    ranks = list(range(0, width, every))
    finding = Finding(missing=missing, notes=stand_ins([subject]))
    rows, wrong = [], []
    for rank in ranks:
        means = {title: values[:, rank].mean() for title, values in ranked.items()}
        rows.append([str(rank + 1), *(f"{mean:.3f}" for mean in means.values())])
        wrong += [f"{title} at rank {rank + 1}" for title, mean in means.items() if mean > means[name]]
    finding.tables = [Table(experiment.title, ["rank", *(f"mean, {title}" for title in ranked)], rows)]
    total = len(ranks) * (len(ranked) - 1)
    statement = f"At every rank {name} features lie farther from the boundary than OOD features, on average"
    measured = f"In {total - len(wrong)} of {total} pairs of rank and set." + (
        f" Not {', '.join(wrong)}." if wrong else ""
    )
    finding.checks = [check(statement, not wrong, measured)]
    columns = 3 if len(ranks) > 4 else len(ranks)
    lines = -(-len(ranks) // columns)
    drawn, axes = plot.figure(9.5, 0.6 + 2.1 * lines, lines, columns)
    for axis, rank in zip(axes.flat, ranks):
        plot.histograms(axis, *_split({title: values[:, rank] for title, values in ranked.items()}), bins=30)
        axis.set_title(f"rank {rank + 1} of {width}", fontsize=9)
    for axis in list(axes.flat)[len(ranks) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("distance to the boundary", fontsize=9)
    for axis in axes[:, 0]:
        axis.set_ylabel("density", fontsize=9)
    axes[0, 0].legend(fontsize=7, frameon=False)
    finding.figure = drawn
    return finding


def nearest_k(experiment: Experiment, say: Say) -> Finding:
    """FPR95 and AUROC of fDBD when only the k nearest boundaries are averaged."""
    subject, missing = main_subject(experiment, say)
    last = subject.benchmark.head.num_classes - 1
    chosen = experiment.settings.get("ks") or list(range(1, last + 1))
    ks = sorted({min(k, last) for k in chosen} | {last})
    say(f"fdbd with {len(ks)} numbers of distances")
    results = subject.benchmark.run([FDBD(nearest=k) for k in ks], latency=False, progress=False)
    values = {metric: [average(results, row.name, metric) for row in results.rows] for metric in ("auroc", "fpr95")}
    finding = Finding(missing=missing, notes=stand_ins([subject]), data={"k": ks, **values})
    rows = [[str(k), percent(a), percent(f)] for k, a, f in zip(ks, values["auroc"], values["fpr95"])]
    finding.tables = [Table(experiment.title, ["k", "average AUROC ↑", "average FPR95 ↓"], rows)]
    best = ks[int(np.argmax(values["auroc"]))]
    for metric, sign, label in (("auroc", 1, "AUROC"), ("fpr95", -1, "FPR95")):
        first, end = values[metric][0], values[metric][-1]
        better = sum(sign * b > sign * a for a, b in pairwise(values[metric]))
        measured = (
            f"{percent(first)} at k = 1, {percent(end)} at k = {last}; better in {better} of {len(ks) - 1} steps."
        )
        statement = f"{label} is better with all distances than with the nearest alone"
        finding.checks.append(check(statement, sign * end > sign * first, measured))
    statement = "All distances are the best choice of k, in AUROC"
    measured = f"Best at k = {best}: {percent(max(values['auroc']))} against {percent(values['auroc'][-1])}."
    finding.checks.append(check(statement, best == last, measured))
    drawn, axes = plot.figure(8.5, 3.2, 1, 2)
    for axis, metric, label in zip(axes[0], ("auroc", "fpr95"), ("average AUROC, percent", "average FPR95, percent")):
        axis.plot(ks, [100 * value for value in values[metric]], color=plot.INSIDE, marker="o", ms=4)
        axis.set_xlabel("k, the number of nearest boundaries averaged", fontsize=9)
        axis.set_ylabel(label, fontsize=9)
        axis.grid(color="#eeeeee")
        if last > 100:
            axis.set_xscale("log")
    finding.figure = drawn
    return finding


def _split(values: dict[str, Floats]) -> tuple[tuple[str, Floats], dict[str, Floats]]:
    """The ID set, and the others."""
    name = next(iter(values))
    return (name, values[name]), {title: part for title, part in values.items() if title != name}


def _overlap(first: Floats, second: Floats, bins: int = 60) -> float:
    """Area that two histograms share."""
    edges = np.histogram_bin_edges(np.concatenate([first, second]), bins)
    counts = [np.histogram(part, edges)[0] / len(part) for part in (first, second)]
    return float(np.minimum(*counts).sum())


def _ranked(subject: Subject) -> dict[str, Floats]:
    """(N, C − 1) closed-form distances of each set, nearest first."""
    head = subject.benchmark.head
    found = {}
    for samples in (subject.benchmark.test, *subject.benchmark.ood):
        z = samples.rows(slice(None)).features
        found[samples.name] = (
            geometry.distances(z, head).nan_to_num(torch.inf).sort(dim=1).values[:, :-1].double().numpy()
        )
    return found


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
    axis.set_xlabel("feature space", fontsize=9)
