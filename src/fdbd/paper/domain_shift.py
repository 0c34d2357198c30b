"""fDBD when the ID samples themselves are moderately corrupted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from fdbd.bench import Benchmark, FeatureSet
from fdbd.bench.cache import FeatureCache
from fdbd.data.datasets import DatasetUnavailable, load
from fdbd.metrics.comparison import Comparison
from fdbd.paper import plot
from fdbd.paper.detector_tables import average
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.models import EvaluatedModel, MissingData, load_models
from fdbd.paper.result import Result, check, check_difference, difference
from fdbd.paper.table import Table, percent


def domain_shift(experiment: Experiment, say: Say) -> Result:
    """AUROC of fDBD with the clean ID set, then with each severity of corruption as ID."""
    (model, *_), result = load_models(experiment, say)
    settings, whole = experiment.settings, model.benchmark
    rows = [_measure(whole, "clean", whole.test)]
    for severity in settings["severities"]:
        say(f"corruption of severity {severity}")
        try:
            corrupted = _corrupted(model, severity, settings["limit"], say)
        except (DatasetUnavailable, OSError) as error:
            result.missing.append(f"severity {severity}: {' '.join(str(error).split())}")
            continue
        rows.append(_measure(whole, f"severity {severity}", corrupted))
    if len(rows) == 1:
        raise MissingData(f"{experiment.name} needs corrupted images: {'; '.join(result.missing)}")
    cells = [
        [row["name"], f"{row['count']:,}", *(percent(row[key]) for key in ("accuracy", "auroc", "fpr95"))]
        for row in rows
    ]
    columns = ["ID samples", "images", "accuracy", "average AUROC ↑", "average FPR95 ↓"]
    note = f"{model.title}; OOD: {', '.join(samples.name for samples in whole.ood)}; fDBD, percent."
    result.tables = [Table(experiment.title, columns, cells, [note])]
    values = [row["auroc"] for row in rows]
    fall = difference(values[0], values[-1])
    result.checks = [
        check(
            "AUROC falls as the corruption grows",
            all(a > b for a, b in pairwise(values)),
            f"AUROC {', '.join(percent(value) for value in values)}.",
        ),
        check_difference(
            f"It falls slightly: at most {settings['slight']} points from clean to the strongest corruption",
            Comparison.of(settings["slight"] / 100 - fall.difference, fall.standard_error),
            f"{100 * fall.difference:.2f} points.",
        ),
    ]
    result.data, result.figure = {"rows": rows}, _figure(rows)
    return result


def _corrupted(model: EvaluatedModel, severity: int, limit: int, say: Say) -> FeatureSet:
    """Features of images from all four families of corruption in equal parts."""
    images = load(f"cifar10-c:mixed:{severity}", "test", limit=limit)
    classifier, preprocess = model.network

    def progress(done: int, total: int) -> None:
        say(f"severity {severity}: {done:,} of {total:,} images")

    found = FeatureCache().features(classifier, images, preprocess, progress=progress)
    return FeatureSet(images.name, found.features, found.labels)


def _measure(whole: Benchmark, name: str, test: FeatureSet) -> dict[str, Any]:
    results = replace(whole, test=test, title=name).run(["fdbd"], latency=False, progress=False)
    metrics = {metric: average(results, "fdbd", metric) for metric in ("auroc", "fpr95")}
    sets = {key: float(value.auroc) for key, value in results.row("fdbd").evaluations.items()}
    return {"name": name, "count": len(test), "accuracy": results.setting.accuracy or 0.0, **metrics, "sets": sets}


def _figure(rows: list[dict[str, Any]]) -> Any:
    drawn, axes = plot.figure(6, 3.4)
    axis, names = axes[0, 0], [row["name"] for row in rows]
    for colour, title in zip(plot.COLOURS, rows[0]["sets"]):
        axis.plot(names, [100 * row["sets"][title] for row in rows], marker="o", color=colour, lw=1, ms=4, label=title)
    axis.plot(names, [100 * row["auroc"] for row in rows], marker="o", color=plot.INSIDE, lw=2.5, label="average")
    accuracy = [100 * row["accuracy"] for row in rows]
    axis.plot(names, accuracy, color="#888888", ls=":", label="accuracy of the classifier")
    plot.label(axis, "ID samples", "AUROC of fDBD, percent", legend=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn
