"""Detectors that need images: ODIN, which moves them along a gradient, and CSI with its rotated views."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fdbd.bench import Benchmark, FeatureSet, Results, Row
from fdbd.core.batch import Batch
from fdbd.data.datasets import Images, load
from fdbd.detectors import CSI, ODIN, Detector, fit_together
from fdbd.metrics import evaluate
from fdbd.networks.classifier import Classifier
from fdbd.paper.experiment import Say
from fdbd.paper.models import EvaluatedModel
from fdbd.results.rows import Latency

_BATCH = 128
_TIMED = 32  # images of a timed batch
Look = Callable[[Tensor], Batch]
"""From preprocessed images to what the detector reads."""


def image_results(
    model: EvaluatedModel, names: list[str], compared: list[Detector | str], limit: int, say: Say
) -> Results:
    """Detectors that need images, beside some that need only features, on the same part of each set.

    Args:
        model: network and data.
        names: "odin" and "csi".
        compared: detectors that need only features.
        limit: at most so many images of each set, and of the training set for CSI.
        say: told what is being done.

    Raises:
        DatasetUnavailable: where the images are not at hand.
    """
    whole = model.benchmark
    steps = {samples.name: -(-len(samples) // limit) for samples in (whole.test, *whole.ood)}
    images = {samples.name: model.images(samples, steps[samples.name]) for samples in (whole.test, *whole.ood)}
    part = _part(whole, steps)
    results = part.run(compared, latency=False, progress=False)
    for name in names:
        detector, look = _detector(model, name, limit, say)
        say(f"{name} on images of {model.title}")
        results.rows.append(_row(name, detector, look, images, model))
    return results


def _part(whole: Benchmark, steps: dict[str, int]) -> Benchmark:
    test, *ood = [
        FeatureSet(samples.name, samples.features[:: steps[samples.name]], _every(samples.labels, steps[samples.name]))
        for samples in (whole.test, *whole.ood)
    ]
    return Benchmark(
        whole.head,
        whole.train,
        test,
        ood,
        groups=whole.groups,
        title=f"{whole.title}, a part of the images",
        statistics=whole.statistics,
        forward=whole.forward,
        positive=whole.positive,
    )


def _every(labels: Tensor | None, step: int) -> Tensor | None:
    return None if labels is None else labels[::step]


def _detector(model: EvaluatedModel, name: str, limit: int, say: Say) -> tuple[Detector, Look]:
    classifier, preprocess = model.network
    if name == "odin":
        odin = ODIN(std=preprocess.std)
        fit_together([odin], [model.benchmark.train.rows(slice(0, 2))], classifier.head.cpu())  # `fit` wants a Guard
        return odin, lambda inputs: odin.observe(inputs, classifier)
    if name != "csi":
        raise ValueError(f"images are for odin and csi, not {name!r}")
    say("rotated training images for CSI")

    def look(inputs: Tensor) -> Batch:
        return rotated(inputs, classifier)

    train = load(model.config.train, "train", limit=limit)
    return CSI().fit(list(_batches(train, model, look)), classifier.head.cpu()), look


@torch.no_grad()
def rotated(inputs: Tensor, classifier: Classifier) -> Batch:
    """The batch of images (N, 3, H, W), with features of its four turns by a right angle as views (4, N, P)."""
    turns: list[Batch] = [classifier(torch.rot90(inputs, turn, (2, 3))) for turn in range(4)]
    return turns[0]._replace(views=torch.stack([turn.features for turn in turns]))


def _batches(images: Images, model: EvaluatedModel, look: Look) -> Iterator[Batch]:
    preprocess = model.network[1]
    for start in range(0, len(images), _BATCH):
        pixels = [images[row] for row in range(start, min(start + _BATCH, len(images)))]
        yield look(preprocess(pixels)).cpu()


def _row(name: str, detector: Detector, look: Look, images: dict[str, Images], model: EvaluatedModel) -> Row:
    scores = {
        title: torch.cat([detector.score(batch).detach() for batch in _batches(part, model, look)])
        for title, part in images.items()
    }
    inside = scores.pop(model.benchmark.test.name)
    evaluations = {
        title: evaluate(inside, outside, positive=model.benchmark.positive) for title, outside in scores.items()
    }
    extra = _extra_seconds(detector, look, next(iter(images.values())), model)
    return Row(name, str(detector.paper), 0.0, evaluations, [Latency(_TIMED, extra, extra)], inside, scores)


def _extra_seconds(detector: Detector, look: Look, images: Images, model: EvaluatedModel, repeats: int = 3) -> float:
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
        detector.score(look(inputs).cpu())
        whole.append(time.perf_counter() - start)
    return max(0.0, min(whole) - min(plain)) / len(inputs)
