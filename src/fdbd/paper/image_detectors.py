"""Detectors that need images and not only features: ODIN and MDS, which move the images along a
gradient, and CSI with its rotated views."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from fdbd.bench import FeatureSet, Results, Row
from fdbd.bench.rows import Latency
from fdbd.core.batch import Batch, Inputs
from fdbd.core.perturbation import InputPerturbation
from fdbd.data.datasets import Images, load
from fdbd.decision.guard import Guard
from fdbd.detectors import CSI, MDS, ODIN
from fdbd.networks.classifier import Classifier
from fdbd.paper.models import EvaluatedModel

MDS_NOISE = 0.005
"""Step of MDS in [0, 1] pixel units, as the paper gives it."""

_BATCH = 16
"""Images at a time: a gradient through a deep network takes about 100 MB per large image."""
_TIMED = 32
"""Images of a timed batch."""


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
    images, features = _every_nth_image(model, limit)
    title = f"{whole.title}, a part of the images"
    part = replace(whole, test=features[0], ood=features[1:], title=title)
    # fDBD on the same images is what statements compare these detectors with.
    results = part.run(["fdbd"], latency=False, progress=False)
    for name in names:
        guard = _guard(model, name)
        _fit(guard, model, fit_limit)
        scores: dict[str, Tensor] = {}
        for set_name, pictures in images.items():
            parts = [guard.score(batch).cpu() for batch in _batches(pictures, model)]
            scores[set_name] = torch.cat(parts)
        extra = _extra_seconds(guard, images[whole.test.name], model)
        row = Row.from_scores(
            name,
            scores.pop(whole.test.name),
            scores,
            whole.positive,
            paper=str(guard.detector.paper),
            fit_seconds=0.0,
            latencies=[Latency(_TIMED, extra, extra)],
        )
        results.rows.append(row)
    return results


def _every_nth_image(
    model: EvaluatedModel, limit: int
) -> tuple[dict[str, Images], list[FeatureSet]]:
    """At most `limit` images of each test set by its name, and their features, the ID set first."""
    images: dict[str, Images] = {}
    features: list[FeatureSet] = []
    with warnings.catch_warnings():
        # That a set is smaller than the published one was said when its features were taken.
        warnings.simplefilter("ignore", UserWarning)
        for samples in model.sets:
            step = math.ceil(len(samples) / limit)
            images[samples.name] = model.images(samples, step)
            labels = None if samples.labels is None else samples.labels[::step]
            features.append(FeatureSet(samples.name, samples.features[::step], labels))
    return images, features


def _guard(model: EvaluatedModel, name: str) -> Guard:
    classifier, preprocess = model.network
    # By what a step in [0, 1] pixel units is divided to be one of the network's inputs.
    std = tuple(preprocess.scale / 255 * part for part in preprocess.std)
    if name == "odin":
        return Guard(classifier, ODIN(std=std))
    if name == "csi":
        return Guard(classifier, RotatedCSI())
    if name == "mds, layers and noise":
        layers = model.entry.layers
        noise = InputPerturbation(MDS_NOISE, objective="score", std=std)
        with_layers = Classifier(classifier.model, model.config.head, layers)
        return Guard(with_layers, MDS(layers, std), perturb=noise)
    raise ValueError(f"images are for odin, csi and 'mds, layers and noise', not {name!r}")


def _fit(guard: Guard, model: EvaluatedModel, limit: int | None) -> None:
    _, preprocess = model.network
    count = limit or len(model.benchmark.train)
    train = load(model.config.train, "train", limit=count, for_size=preprocess.longest_side)
    batches = _batches(train, model)
    if guard.detector.needs.passes == 0:
        # Nothing is learnt from the samples: one batch tells the widths of features and logits.
        batches = islice(batches, 1)
    guard.fit(batches, progress=False)


def _batches(images: Images, model: EvaluatedModel) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    _, preprocess = model.network
    for start in range(0, len(images), _BATCH):
        stop = min(start + _BATCH, len(images))
        inputs = preprocess([images[row] for row in range(start, stop)])
        if images.labels is None:
            yield inputs
        else:
            yield inputs, torch.as_tensor(images.labels[start:stop])


def _extra_seconds(guard: Guard, images: Images, model: EvaluatedModel) -> float:
    """Seconds per sample beyond the plain forward pass."""
    classifier, preprocess = model.network
    inputs = preprocess([images[row] for row in range(min(_TIMED, len(images)))])
    plain, whole = time_forward_and_guard(classifier, guard, inputs)
    return max(0.0, whole - plain) / len(inputs)


def time_forward_and_guard(
    classifier: Classifier,
    guard: Guard,
    inputs: Tensor,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Seconds of a forward pass, and of a guard that runs the network itself: both timed in turns
    on the same batch, the fastest of each."""
    plain_times: list[float] = []
    whole_times: list[float] = []
    for _ in range(rounds):
        start = clock()
        with torch.inference_mode():
            classifier(inputs)
        middle = clock()
        guard.score(inputs)
        end = clock()
        plain_times.append(middle - start)
        whole_times.append(end - middle)
    return min(plain_times), min(whole_times)
