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
from fdbd.decision.guard import Guard
from fdbd.detectors import CSI, MDS, ODIN, Detector
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
    fit_limit: int | None = None,
    say: Say = lambda text: None,
) -> Results:
    """Detectors that need images, beside some that need only features, on the same part of each set.

    Args:
        model: network and data.
        names: "odin", "csi" and "mds, layers and noise".
        compared: detectors that need only features.
        limit: at most so many images of each test set.
        fit_limit: fit on at most so many images; None: on all whose features the benchmark has.
        say: told what is being done.

    Raises:
        DatasetUnavailable: where the images are not at hand.
    """
    whole = model.benchmark
    images, features = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of sets smaller than published, said when features were taken
        for samples in model.sets:
            step = -(-len(samples) // limit)
            images[samples.name] = model.images(samples, step)
            labels = None if samples.labels is None else samples.labels[::step]
            features.append(FeatureSet(samples.name, samples.features[::step], labels))
    part = replace(whole, test=features[0], ood=features[1:], title=f"{whole.title}, a part of the images")
    results = part.run(compared, latency=False, progress=False)
    for name in names:
        guard = _guard(model, name)
        say(f"fitting {name} on images of {model.title}")
        train = load(model.config.train, "train", limit=fit_limit or len(whole.train), for_size=model.network[1].size)
        batches = _batches(train, model)
        guard.fit(islice(batches, 1) if guard.detector.needs.passes == 0 else batches, progress=False)
        say(f"{name} on images of {model.title}")
        scores = {k: torch.cat([guard.score(b).cpu() for b in _batches(part, model)]) for k, part in images.items()}
        extra = _extra_seconds(guard, images[whole.test.name], model)
        about = {"paper": str(guard.detector.paper), "fit_seconds": 0.0, "latencies": [Latency(_TIMED, extra, extra)]}
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
    return Guard(Classifier(classifier.model, model.config.head, layers), MDS(layers, std), perturb=noise)


def _batches(images: Images, model: EvaluatedModel) -> Iterator[tuple[Tensor, Tensor] | Tensor]:
    for start in range(0, len(images), _BATCH):
        rows = range(start, min(start + _BATCH, len(images)))
        inputs = model.network[1]([images[row] for row in rows])
        yield inputs if images.labels is None else (inputs, torch.as_tensor(images.labels[start : rows.stop]))


def _extra_seconds(guard: Guard, images: Images, model: EvaluatedModel, repeats: int = 3) -> float:
    """Seconds per sample beyond the plain forward pass: both timed in turns on the same images, the fastest of each."""
    classifier, preprocess = model.network
    inputs = preprocess([images[row] for row in range(min(_TIMED, len(images)))])
    times: list[list[float]] = []
    for _ in range(repeats):
        start = time.perf_counter()
        with torch.inference_mode():
            classifier(inputs)
        middle = time.perf_counter()
        guard.score(inputs)
        times.append([middle - start, time.perf_counter() - middle])
    plain, whole = map(min, zip(*times))
    return float(max(0.0, whole - plain)) / len(inputs)
