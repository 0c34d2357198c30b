"""Tables of detectors: models side by side, averages first, then every set; and who beats whom.
Some detectors need images: ODIN and MDS, which move them along a gradient, and CSI with its rotated
views."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from fdbd.bench import FeatureSet, Results, Row
from fdbd.bench.rows import Latency, convention
from fdbd.core.batch import Batch, Inputs
from fdbd.core.perturbation import InputPerturbation
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.decision.guard import Guard
from fdbd.detectors import CSI, MDS, ODIN
from fdbd.metrics import Comparison, as_percent
from fdbd.networks.classifier import Classifier
from fdbd.paper import plot
from fdbd.paper.models import EvaluatedModel, average, load_models
from fdbd.paper.result import Check, Result, difference
from fdbd.util.terminal import one_line

METRICS = ("auroc", "fpr95")


def detector_table(result: Result) -> None:
    """Run the detectors of an experiment on each of its models."""
    settings = result.settings
    found = {model.title: _run(model, result) for model in load_models(result)}
    _averages(found, result)
    for title, parts in found.items():
        for decide, entry in (
            (beats, "better"),
            (beats_everywhere, "better_on_every_set"),
            (levels, "level"),
        ):
            for first, second in settings.get(entry, []):
                for results in _having(parts, first, second)[
                    -1:
                ]:  # on images, both are on the same images
                    result.checks.append(decide(results, first, second, title))
        _cost(parts[0], title, result)
        for name in settings.get("near_chance", []):
            auroc = average(parts[0], name, "auroc")
            statement = f"{name} alone hardly separates: AUROC between 40 and 60 ({title})"
            result.check(statement, 0.4 < auroc < 0.6, f"AUROC {as_percent(auroc)}.")
        result.more += [(results.to_markdown(), results.to_latex()) for results in parts]
    for pairing in settings.get("across_models", []):
        _across(result, found, *pairing)
    result.notes.append(f"{convention('id')}.")
    if any(len(parts) > 1 for parts in found.values()):
        fitted = (
            f"at most {settings['image_fit_limit']:,}" if "image_fit_limit" in settings else "all"
        )
        result.notes.append(
            f"† needs images: at most {settings['image_limit']:,} of each set, fitted on {fitted} training images. "
            "In brackets fdbd on the same images, with which statements compare it. Its time includes the passes "
            "through the network."
        )
    result.notes += [settings["note"]] if "note" in settings else []
    result.data = {
        title: [results.to_dict() for results in parts] for title, parts in found.items()
    }
    _draw(found, result)


def _run(model: EvaluatedModel, result: Result) -> list[Results]:
    """The results of one model: on features, and perhaps of detectors that need images, on a part
    of the samples."""
    settings = result.settings
    specs, wanted = (
        model.settings.get("detectors") or settings["detectors"],
        model.settings.get("images", []),
    )
    result.say(f"{len(specs)} detectors on {model.title}")
    found = [
        model.run(specs, latency="cost_below" in settings)
    ]  # timing takes longer than all else
    if wanted:
        result.say(f"{', '.join(wanted)} on images of {model.title}")
        try:
            found.append(
                image_results(
                    model, wanted, settings["image_limit"], settings.get("image_fit_limit")
                )
            )
        except (DatasetUnavailable, OSError) as error:
            result.missing.append(
                f"{', '.join(wanted)} on {model.title} need images: {one_line(error)}"
            )
    result.missing += [
        f"{row.name} on {model.title} failed: {row.error}" for row in found[0].failures
    ]
    return found


def _entries(parts: Sequence[Results]) -> list[tuple[Results, Row, str]]:
    """The rows of a model, best first, with the mark of those on images; fDBD stands there once."""
    marked = [
        (results, row, mark) for results, mark in zip(parts, ("", " †")) for row in results.ranked()
    ]
    return [entry for entry in marked if not (entry[2] and entry[1].name == "fdbd")]


def _having(parts: Sequence[Results], *names: str) -> list[Results]:
    """Results that have all these detectors."""
    return [results for results in parts if set(names) <= {row.name for row in results.finished}]


def _averages(found: Mapping[str, list[Results]], result: Result) -> None:
    rows, notes = [], []
    for title, parts in found.items():
        setting, best = parts[0].setting, next(iter(parts[0].ranked()), None)
        accuracy = (
            "" if setting.accuracy is None else f", accuracy {as_percent(setting.accuracy)} %"
        )
        sets = f"ID {setting.test[0]}{accuracy}; average over {', '.join(setting.ood)}"
        notes.append(f"{title}: {sets}; fitted on {setting.num_train:,} samples.")
        for results, row, mark in _entries(parts):
            cells = []
            for metric in METRICS:
                beside = f" (fdbd {as_percent(average(results, 'fdbd', metric))})" if mark else ""
                bold = "**" if row is best and metric == "auroc" else ""
                cells.append(
                    f"{bold}{as_percent(average(results, row.name, metric))}{beside}{bold}"
                )
            seconds, forward = (
                row.latencies[-1].median if row.latencies else None,
                setting.forward_seconds,
            )
            cells.append(f"{seconds * 1e6:.3g}" if seconds is not None else "")
            cells.append(f"{seconds / forward:.2%}" if seconds is not None and forward else "")
            rows.append([title, row.name + mark, *cells])
    columns = [
        "model",
        "detector",
        "AUROC ↑",
        "FPR95 ↓",
        "extra µs per sample",
        "of the forward pass",
    ]
    result.table(columns, rows, *notes)


def beats(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector beats another in average AUROC and average FPR95; undecided where the
    difference in AUROC is within its error, or where the two metrics disagree."""
    comparison, text = results.compare(first, second), _both(results, first, second)
    statement = f"{first} separates ID from OOD better than {second} ({title})"
    has_lower_fpr = average(results, first, "fpr95") < average(results, second, "fpr95")
    if comparison.verdict() == ("lower" if has_lower_fpr else "higher"):
        return Check(statement, "undecided", f"{text} The two metrics disagree.")
    return Check.of(statement, comparison, text)


def beats_everywhere(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector beats another in AUROC on every OOD set; one set where it is worse
    decides against it."""
    tests = {name: results.compare(first, second, name) for name in results.setting.ood}
    text = ", ".join(f"{name} {100 * test.difference:+.2f}" for name, test in tests.items())
    statement = f"{first} separates better than {second} on every OOD set ({title})"
    return Check.of(statement, list(tests.values()), f"Points of AUROC: {text}.")


def levels(results: Results, first: str, second: str, title: str) -> Check:
    """Whether one detector is at most a point of average AUROC below another."""
    statement = (
        f"{first} is level with {second} or better: at most a point of AUROC below ({title})"
    )
    found = results.compare(first, second)
    above = Comparison.of(found.difference + 0.01, found.standard_error)
    return Check.of(statement, above, _both(results, first, second))


def _both(results: Results, first: str, second: str) -> str:
    auroc, fpr = (
        [as_percent(average(results, name, metric)) for name in (first, second)]
        for metric in METRICS
    )
    return f"AUROC {auroc[0]} against {auroc[1]}, FPR95 {fpr[0]} against {fpr[1]}."


def _cost(results: Results, title: str, result: Result) -> None:
    forward, below = results.setting.forward_seconds, result.settings.get("cost_below")
    for row in results.finished:
        if below is not None and forward and row.name == "fdbd":
            seconds = row.latencies[-1].median
            statement = f"fdbd adds less than {below:.0%} to the forward pass ({title})"
            measured = f"{seconds * 1e6:.2g} µs per sample against {forward * 1e3:.2g} ms: {seconds / forward:.3%}."
            result.check(statement, seconds < below * forward, measured)


def _across(
    result: Result,
    found: Mapping[str, list[Results]],
    first: str,
    detector: str,
    second: str,
    other: str,
) -> None:
    """Whether a detector on one model separates better than one on another model, where both are
    there."""
    values = []
    for title, name in ((first, detector), (second, other)):
        values += [
            average(results, name, "auroc") for results in _having(found.get(title, []), name)[:1]
        ]
    if len(values) == 2:
        than = f"on the {second} model" if detector == other else f"{other} on the {second} model"
        measured = f"AUROC {as_percent(values[0])} against {as_percent(values[1])}."
        result.check(
            f"{detector} on the {first} model separates better than {than}",
            difference(*values),
            measured,
        )


def _draw(found: Mapping[str, list[Results]], result: Result) -> None:
    """One horizontal line with a dot per detector, the best on top."""
    height = 0.9 + 0.26 * len(found) * max(len(_entries(parts)) for parts in found.values())
    for line, (title, parts) in zip(result.axes(8.5, height, len(found), 2), found.items()):
        entries = _entries(parts)
        names = [row.name + mark for _, row, mark in entries]
        colours = [
            plot.INSIDE if "fdbd" in name or name == "regDistDB" else plot.GREY for name in names
        ]
        places = np.arange(len(names))[::-1]
        for axis, metric in zip(line, METRICS):
            values = [100 * average(results, row.name, metric) for results, row, _ in entries]
            axis.hlines(places, min(values, default=0), values, color="#cccccc", linewidth=1)
            axis.scatter(values, places, color=colours, zorder=3, s=22)
            axis.set_yticks(places, names if metric == "auroc" else [], fontsize=8)
            axis.set_ylim(-0.6, len(names) - 0.4)
            plot.label(axis, f"{metric.upper()}, percent", title=f"{title} (blue: fDBD)")
            axis.grid(axis="x", color="#eeeeee")


MDS_NOISE = 0.005
"""Step of MDS in [0, 1] pixel units, as the paper gives it."""

_BATCH = 16  # a gradient of large images through a deep network takes about 100 MB per image
_TIMED = 32  # images of a timed batch


class RotatedCSI(CSI):
    """CSI whose views are an image's four turns by a right angle."""

    needs = replace(CSI.needs, network=True)

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """The batch of images (N, 3, H, W), with features of the turns as views (4, N, P)."""
        assert isinstance(images, Tensor)
        turns = [classifier(torch.rot90(images, turn, (2, 3))) for turn in range(4)]
        return turns[0]._replace(views=torch.stack([turn.features for turn in turns]))


def image_results(
    model: EvaluatedModel, names: Sequence[str], limit: int, fit_limit: int | None = None
) -> Results:
    """fDBD, then detectors that need images ("odin", "csi", "mds, layers and noise"), on at most
    `limit` images of each test set; fitted on at most `fit_limit` images, or on all whose features
    the benchmark has."""
    whole = model.benchmark
    images, features = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # of sets smaller than published, said when features were taken
        for samples in model.sets:
            step = -(-len(samples) // limit)
            images[samples.name] = model.images(samples, step)
            labels = None if samples.labels is None else samples.labels[::step]
            features.append(FeatureSet(samples.name, samples.features[::step], labels))
    part = replace(
        whole, test=features[0], ood=features[1:], title=f"{whole.title}, a part of the images"
    )
    results = part.run(["fdbd"], latency=False, progress=False)
    for name in names:
        guard = _guard(model, name)
        train = load(
            model.config.train,
            "train",
            limit=fit_limit or len(whole.train),
            for_size=model.network[1].size,
        )
        batches = _batches(train, model)
        guard.fit(
            islice(batches, 1) if guard.detector.needs.passes == 0 else batches, progress=False
        )
        scores = {
            k: torch.cat([guard.score(b).cpu() for b in _batches(part, model)])
            for k, part in images.items()
        }
        extra = _extra_seconds(guard, images[whole.test.name], model)
        about = {
            "paper": str(guard.detector.paper),
            "fit_seconds": 0.0,
            "latencies": [Latency(_TIMED, extra, extra)],
        }
        results.rows.append(Row.of(name, scores, whole.positive, **about))
    return results


def _guard(model: EvaluatedModel, name: str) -> Guard:
    classifier, preprocess = model.network
    # By what a step in [0, 1] pixel units is divided to be one of the network's inputs.
    std = tuple(preprocess.scale / 255 * part for part in preprocess.std)
    if name == "odin":
        return Guard(classifier, ODIN(std=std))
    if name == "csi":
        return Guard(classifier, RotatedCSI())
    if name != "mds, layers and noise":
        raise ValueError(f"images are for odin, csi and 'mds, layers and noise', not {name!r}")
    layers = model.settings["layers"]
    noise = InputPerturbation(MDS_NOISE, objective="score", std=std)
    return Guard(
        Classifier(classifier.model, model.config.head, layers), MDS(layers, std), perturb=noise
    )


def _batches(images: Images, model: EvaluatedModel) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    for start in range(0, len(images), _BATCH):
        rows = range(start, min(start + _BATCH, len(images)))
        inputs = model.network[1]([images[row] for row in rows])
        yield (
            inputs
            if images.labels is None
            else (inputs, torch.as_tensor(images.labels[start : rows.stop]))
        )


def _extra_seconds(guard: Guard, images: Images, model: EvaluatedModel) -> float:
    """Seconds per sample beyond the plain forward pass: both timed in turns on the same images, the
    fastest of each."""
    classifier, preprocess = model.network
    inputs = preprocess([images[row] for row in range(min(_TIMED, len(images)))])
    times: list[list[float]] = []
    for _ in range(3):
        start = time.perf_counter()
        with torch.inference_mode():
            classifier(inputs)
        middle = time.perf_counter()
        guard.score(inputs)
        times.append([middle - start, time.perf_counter() - middle])
    plain, whole = map(min, zip(*times))
    return float(max(0.0, whole - plain)) / len(inputs)
