"""From a config to a benchmark: the model is made, the data are found, and the network runs once over each set."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fdbd.bench.cache import FeatureCache
from fdbd.bench.config import Config
from fdbd.bench.latency import measure_forward
from fdbd.bench.runner import Benchmark
from fdbd.data.datasets import DatasetUnavailable, Images, Preprocess, info, load
from fdbd.data.feature_set import FeatureSet
from fdbd.networks.classifier import Classifier
from fdbd.util.files import data_roots
from fdbd.util.progress import Bar


def benchmark_of(
    config: Config, cache: FeatureCache | None = None, say: Callable[[str], None] | None = None
) -> Benchmark:
    """The benchmark that a config describes.

    Features come from the cache, or from one forward pass that fills it. An OOD set that cannot be had is left out with
    one line that says how to get it; without training data, test data or any OOD set it is an error.

    Args:
        config: what to compare.
        cache: where features are kept; default: the user's cache folder.
        say: called with one line for each thing worth knowing; default: prints to standard error.
    """
    say = say or (lambda line: print(f"fdbd: {line}", file=sys.stderr))
    cache = cache or FeatureCache()
    model, preprocess, about = model_of(config)
    classifier = Classifier(model, config.head)
    num_classes = classifier.head.num_classes
    train, test = _fitted_and_scored(config)
    train, test = train.as_classes(num_classes), test.as_classes(num_classes)
    preprocess = preprocess or _usual_preprocess(config.id)
    sets = []
    for name in config.ood:
        try:
            sets.append(load(name, "test", limit=config.limit))
        except DatasetUnavailable as error:
            say(f"{name} is left out: {error}")
    if not sets:
        raise ValueError("none of the OOD sets can be had here; the lines above say how to get them")
    groups = {
        group: members
        for group, names in config.groups.items()
        if (members := [name for name in names if name in {images.name for images in sets}])
    }

    def features_of(images: Images, title: str) -> FeatureSet:
        with Bar(title, len(images)) as bar:
            found = cache.features(
                classifier, images, preprocess, batch_size=config.batch_size, progress=lambda done, _: bar.update(done)
            )
        if found.failures:
            say(f"{len(found.failures)} images of {images.name} could not be read, the first: {found.failures[0]}")
        return FeatureSet(images.name, found.features, found.labels)

    fitted = features_of(train, f"{train.name} (train)")
    return Benchmark(
        classifier.head,
        fitted,
        features_of(test, test.name),
        [features_of(images, images.name) for images in sets],
        groups=groups,
        title=config.title or f"{config.model} on {config.id}",
        notes=[f"Model: {about}.", f"Data: {', '.join(f'{i.name} from {i.source}' for i in (test, *sets))}."],
        forward=lambda size: measure_forward(classifier, (3, preprocess.size, preprocess.size), size),
        positive=config.positive,  # type: ignore[arg-type]
    )


def _fitted_and_scored(config: Config) -> tuple[Images, Images]:
    """The training and the test images; with a holdout, two parts of the same set that share no image."""
    if config.holdout is None:
        return load(config.train, "train", limit=config.train_limit), load(config.id, "test", limit=config.limit)
    images = load(config.id, "test", limit=config.limit)
    # Every image whose place passes another multiple of 1/holdout: spread evenly, the same in every run.
    scored = np.diff(np.floor(np.arange(len(images) + 1) * config.holdout)) > 0
    if not 0 < scored.sum() < len(images):
        raise ValueError(f"a holdout of {config.holdout} of {len(images)} images of {images.name} leaves a part empty")
    return images.subset(np.flatnonzero(~scored)).limited(config.train_limit), images.subset(np.flatnonzero(scored))


def _find_checkpoint(path: str) -> str:
    """A checkpoint's path, as it stands or below one of the user's data folders."""
    places = [Path(path), *(root / path for root in data_roots())]
    return next((str(place) for place in places if place.is_file()), path)


def model_of(config: Config) -> tuple[torch.nn.Module, Preprocess | None, str]:
    """The model in eval mode, its preprocessing where the config or the zoo says, and a line about its weights."""
    from fdbd import networks as models

    preprocess = None if config.preprocess is None else preprocess_of(config.preprocess)
    if config.model.startswith("zoo:"):
        name = config.model.removeprefix("zoo:")
        card = models.zoo_card(name)
        own = card.preprocess
        return models.zoo(name), preprocess or own, f"{name} of the zoo ({card.recipe}, seed {card.seed})"
    options: dict[str, Any] = {} if config.num_classes is None else {"num_classes": config.num_classes}
    checkpoint = None if config.checkpoint is None else _find_checkpoint(config.checkpoint)
    model = models.create(config.model, checkpoint=checkpoint, **options)
    weights = "as its factory makes it" if config.checkpoint is None else f"weights {config.checkpoint}"
    return model.eval(), preprocess, f"{config.model}, {weights}"


def preprocess_of(value: Any) -> Preprocess:
    """A preset by name, or a preprocessing from its fields."""
    if isinstance(value, str):
        return Preprocess.preset(value)
    if isinstance(value, dict):
        return Preprocess.from_dict(value)
    raise ValueError(f"'preprocess' is {value!r}, expected the name of a preset or its fields")


def _usual_preprocess(name: str) -> Preprocess:
    try:
        return Preprocess.preset(info(name).preprocess)
    except ValueError:
        raise ValueError(
            f"how are images of {name!r} to be prepared? give 'preprocess', a preset or its fields"
        ) from None
