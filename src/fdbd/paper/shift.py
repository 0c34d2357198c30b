"""fDBD when the ID samples themselves are moderately corrupted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from fdbd.bench import Benchmark, FeatureSet
from fdbd.bench.cache import FeatureCache
from fdbd.data.datasets import DatasetUnavailable, load
from fdbd.paper import plot
from fdbd.paper.experiment import Experiment
from fdbd.paper.finding import Finding, Table, check, percent
from fdbd.paper.kinds import Say
from fdbd.paper.subject import MissingData, Subject, main_subject, stand_ins
from fdbd.paper.tables import average


def domain_shift(experiment: Experiment, say: Say) -> Finding:
    """AUROC of fDBD with the clean ID set, then with each severity of corruption as ID."""
    subject, missing = main_subject(experiment, say)
    settings, whole = experiment.settings, subject.benchmark
    rows: list[dict[str, Any]] = [_measure(whole, "clean", whole.test)]
    for severity in settings["severities"]:
        say(f"corruption of severity {severity}")
        try:
            corrupted = _corrupted(subject, severity, settings["limit"], say)
        except (DatasetUnavailable, OSError) as error:
            missing.append(f"severity {severity}: {' '.join(str(error).split())}")
            continue
        rows.append(_measure(whole, f"severity {severity}", corrupted))
    if len(rows) == 1:
        raise MissingData(f"{experiment.name} needs corrupted images: {'; '.join(missing)}")
    finding = Finding(missing=missing, notes=stand_ins([subject]), data={"rows": rows})
    cells = [
        [row["name"], f"{row['count']:,}", *(percent(row[key]) for key in ("accuracy", "auroc", "fpr95"))]
        for row in rows
    ]
    columns = ["ID samples", "images", "accuracy", "average AUROC ↑", "average FPR95 ↓"]
    note = f"{subject.title}; OOD: {', '.join(samples.name for samples in whole.ood)}; fDBD, percent."
    finding.tables = [Table(experiment.title, columns, cells, [note])]
    values = [row["auroc"] for row in rows]
    text = f"AUROC {', '.join(percent(value) for value in values)}."
    ordered = all(a > b for a, b in pairwise(values))
    finding.checks = [
        check("AUROC falls as the corruption grows", ordered, text),
        check(
            f"It falls slightly: at most {settings['slight']} points from clean to the strongest corruption",
            100 * (values[0] - values[-1]) <= settings["slight"],
            f"{100 * (values[0] - values[-1]):.2f} points.",
        ),
    ]
    finding.figure = _figure(rows)
    return finding


def _corrupted(subject: Subject, severity: int, limit: int, say: Say) -> FeatureSet:
    """All four families of corruption in equal parts."""
    images = load(f"cifar10-c:mixed:{severity}", "test", limit=limit)
    classifier, preprocess = subject.network

    def tell(done: int, total: int) -> None:
        say(f"severity {severity}: {done:,} of {total:,} images")

    found = FeatureCache().features(classifier, images, preprocess, progress=tell)
    return FeatureSet(images.name, found.features, found.labels)


def _measure(whole: Benchmark, name: str, test: FeatureSet) -> dict[str, Any]:
    part = Benchmark(
        whole.head, whole.train, test, whole.ood, statistics=whole.statistics, positive=whole.positive, title=name
    )
    results = part.run(["fdbd"], latency=False, progress=False)
    metrics = {metric: average(results, "fdbd", metric) for metric in ("auroc", "fpr95")}
    sets = {key: float(value.auroc) for key, value in results.row("fdbd").evaluations.items()}
    return {"name": name, "count": len(test), "accuracy": results.setting.accuracy or 0.0, **metrics, "sets": sets}


def _figure(rows: list[dict[str, Any]]) -> Any:
    drawn, axes = plot.figure(6, 3.4)
    axis, names = axes[0, 0], [row["name"] for row in rows]
    for colour, title in zip(plot.COLOURS, rows[0]["sets"]):
        axis.plot(names, [100 * row["sets"][title] for row in rows], marker="o", color=colour, lw=1, ms=4, label=title)
    axis.plot(names, [100 * row["auroc"] for row in rows], marker="o", color=plot.INSIDE, lw=2.5, label="average")
    axis.plot(
        names, [100 * row["accuracy"] for row in rows], color="#888888", ls=":", label="accuracy of the classifier"
    )
    axis.set_ylabel("AUROC of fDBD, percent", fontsize=9)
    axis.set_xlabel("ID samples", fontsize=9)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn
