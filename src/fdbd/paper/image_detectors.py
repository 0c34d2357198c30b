"""Detectors that need images: ODIN and MDS, which move them along a gradient, and CSI with its rotated views."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from fdbd.bench import FeatureSet, Results, Row
from fdbd.core.batch import Batch, Inputs
from fdbd.core.perturbation import InputPerturbation
from fdbd.data.datasets import Images, load
from fdbd.data.preprocessing import Preprocess
from fdbd.decision.guard import Guard
from fdbd.detectors import CSI, MDS, ODIN, Detector
from fdbd.metrics import evaluate
from fdbd.networks.classifier import Classifier
from fdbd.paper.experiment import Say
from fdbd.paper.models import EvaluatedModel
from fdbd.results.rows import Latency

MDS_NOISE = 0.005
"""Step of MDS in [0, 1] pixel units, as the paper gives it."""

_BATCH = 16  # a gradient of large images through a deep network takes about 100 MB per image
_TIMED = 32  # images of a timed batch


class RotatedCSI(CSI):
    """CSI whose views are an image's four turns by a right angle."""

    needs = replace(CSI.needs, network=True)

    def observe(self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None) -> Batch:
        """The batch of images (N, 3, H, W), with features of the turns as views (4, N, P)."""
        assert isinstance(images, Tensor)
        turns = [classifier(torch.rot90(images, turn, (2, 3))) for turn in range(4)]
        return turns[0]._replace(views=torch.stack([turn.features for turn in turns]))


def image_results(
    model: EvaluatedModel,
    names: list[str],
    compared: list[Detector | str],
    limit: int,
    say: Say,
    fit_limit: int | None = None,
) -> Results:
    """Detectors that need images, beside some that need only features, on the same part of each set.

    Args:
        model: network and data.
        names: "odin", "csi" and "mds, layers and noise".
        compared: detectors that need only features.
        limit: at most so many images of each test set.
        say: told what is being done.
        fit_limit: fit on at most so many images; None: on all whose features the benchmark has.

    Raises:
        DatasetUnavailable: where the images are not at hand.
    """
    whole = model.benchmark
    steps = {samples.name: -(-len(samples) // limit) for samples in (whole.test, *whole.ood)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of sets smaller than published, said when features were taken
        images = {samples.name: model.images(samples, steps[samples.name]) for samples in (whole.test, *whole.ood)}
    test, *ood = [_every(samples, steps[samples.name]) for samples in (whole.test, *whole.ood)]
    part = replace(whole, test=test, ood=ood, title=f"{whole.title}, a part of the images")
    results = part.run(compared, latency=False, progress=False)
    for name in names:
        guard = _guard(model, name)
        say(f"fitting {name} on images of {model.title}")
        train = load(model.config.train, "train", limit=fit_limit or len(whole.train), for_size=model.network[1].size)
        batches = _batches(train, model)
        guard.fit(islice(batches, 1) if guard.detector.needs.passes == 0 else batches, progress=False)
        say(f"{name} on images of {model.title}")
        results.rows.append(_row(name, guard, images, model))
    return results


def _every(samples: FeatureSet, step: int) -> FeatureSet:
    labels = None if samples.labels is None else samples.labels[::step]
    return FeatureSet(samples.name, samples.features[::step], labels)


def _guard(model: EvaluatedModel, name: str) -> Guard:
    classifier, preprocess = model.network
    std = _pixel_std(preprocess)
    if name == "odin":
        return Guard(classifier, ODIN(std=std))
    if name == "csi":
        return Guard(classifier, RotatedCSI())
    if name != "mds, layers and noise":
        raise ValueError(f"images are for odin, csi and 'mds, layers and noise', not {name!r}")
    layers = model.settings["layers"]
    noise = InputPerturbation(MDS_NOISE, objective="score", std=std)
    return Guard(Classifier(classifier.model, model.config.head, layers), MDS(layers, std), perturb=noise)


def _pixel_std(preprocess: Preprocess) -> tuple[float, ...]:
    """By what a step in [0, 1] pixel units is divided to be one of the network's inputs."""
    return tuple(preprocess.scale / 255 * std for std in preprocess.std)


def _batches(images: Images, model: EvaluatedModel) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    preprocess = model.network[1]
    for start in range(0, len(images), _BATCH):
        rows = range(start, min(start + _BATCH, len(images)))
        inputs = preprocess([images[row] for row in rows])
        yield inputs if images.labels is None else (inputs, torch.as_tensor(images.labels[start : rows.stop]))


def _row(name: str, guard: Guard, images: dict[str, Images], model: EvaluatedModel) -> Row:
    scores = {
        title: torch.cat([guard.score(batch).cpu() for batch in _batches(part, model)])
        for title, part in images.items()
    }
    inside = scores.pop(model.benchmark.test.name)
    evaluations = {
        title: evaluate(inside, outside, positive=model.benchmark.positive) for title, outside in scores.items()
    }
    extra = _extra_seconds(guard, next(iter(images.values())), model)
    return Row(name, str(guard.detector.paper), 0.0, evaluations, [Latency(_TIMED, extra, extra)], inside, scores)


def _extra_seconds(guard: Guard, images: Images, model: EvaluatedModel, repeats: int = 3) -> float:
    """Seconds per sample beyond the plain forward pass: both timed in turns on the same images, the fastest of each."""
    classifier, preprocess = model.network
    inputs = preprocess([images[row] for row in range(min(_TIMED, len(images)))])
    plain, whole = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        with torch.inference_mode():
            classifier(inputs)
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        guard.score(inputs)
        whole.append(time.perf_counter() - start)
    return max(0.0, min(whole) - min(plain)) / len(inputs)
