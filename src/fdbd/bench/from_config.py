"""From a config to a benchmark: the model is made, the data are found, and the network runs once over each set."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache as once
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fdbd.bench.cache import FeatureCache
from fdbd.bench.config import Config
from fdbd.bench.runner import Benchmark, choose_batch_size, measure_forward
from fdbd.data.datasets import DatasetUnavailable, Images, Preprocess, info, load
from fdbd.data.feature_set import FeatureSet
from fdbd.data.labels import Agreement
from fdbd.networks.by_name import NamedModel, model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.util.progress import Bar

Say = Callable[[str], None]


def benchmark_of(
    config: Config,
    cache: FeatureCache | None = None,
    say: Say | None = None,
    *,
    stage: Say | None = None,
    device: str | torch.device | None = "auto",
    trust: bool = False,
    autocast: torch.dtype | None = None,
) -> Benchmark:
    """The benchmark that a config describes, from cached features or one forward pass that fills the cache.

    An OOD set that is not available is left out with one line that says how to get it; without training data, test data
    or any OOD set it is an error. All sets are opened before the network runs over the first.

    Args:
        config, cache: what to compare, and where features are kept (default: the user's cache folder).
        say: called with one line for each thing worth knowing; default: prints to standard error.
        stage: called with one line before each pass of the network; default: `say`, off a terminal.
        device: where the network runs; "auto": a GPU where there is one.
        trust: the user's word that a model that the config's file names may run code.
        autocast: as for `Classifier`.

    >>> import pathlib, tempfile
    >>> folder, rng = pathlib.Path(tempfile.mkdtemp()), np.random.default_rng(0)
    >>> for name in ("train", "test", "noise"):
    ...     np.savez(folder / name, x=rng.integers(0, 255, (20, 32, 32, 3), np.uint8), y=np.arange(20) % 10)
    >>> train, test, noise = (str(folder / f"{name}.npz") for name in ("train", "test", "noise"))
    >>> config = Config("cifar10-ce", id=test, ood={"noise": noise}, train=train)
    >>> benchmark_of(config, FeatureCache(folder / "cache"), lambda line: None).test.features.shape
    torch.Size([20, 128])
    """
    say = say or (lambda line: print(f"fdbd: {line}", file=sys.stderr, flush=True))
    cache = cache or FeatureCache()
    named, preprocess = network_of(config, device=device, trust=trust)
    classifier = Classifier(named.model, config.head, autocast=autocast)
    head, opened = classifier.head.cpu(), _id_images(config, preprocess.size)
    parts = {part: images.as_classes(head.num_classes, named.class_names) for part, images in opened.items()}
    test = parts["test"]
    ood = _ood_images(config, preprocess.size, test.name, say)
    groups = _groups(config, ood, say)

    @once
    def batch_size() -> int:
        return config.batch_size or choose_batch_size(classifier, preprocess.size)

    def features_of(images: Images, title: str) -> FeatureSet:
        if stage is not None or not sys.stderr.isatty():
            (stage or say)(f"{title}: {len(images):,} images")
        with Bar(title, len(images)) as bar:
            found = cache.features(
                classifier, images, preprocess, batch_size=batch_size, progress=lambda done, _: bar.update(done)
            )
        if found.failures:
            say(f"{len(found.failures)} images of {images.name} could not be read, the first: {found.failures[0]}")
        return found

    id_sets = {part: features_of(images, f"{images.name} ({part})") for part, images in parts.items()}
    sources = ", ".join(f"{images.name} from {images.source}" for images in (test, *ood.values()))
    notes = [f"Model: {named.weights}.", f"Data: {sources}."]
    warnings = [f"UNTRAINED WEIGHTS: {config.model} has random weights, and every number below is noise."]
    for samples in (id_sets["train"], id_sets["test"]):
        agreement = Agreement(head.num_classes)
        for batch in samples.batches() if samples.labels is not None else ():
            agreement.add(cast(Tensor, batch.labels), head(batch.features).argmax(dim=1))
        if text := agreement.warning(samples.name, named.class_names):
            say(text)
            notes.append(f"Caution: {text}.")
    return Benchmark(
        head,
        id_sets["train"],
        id_sets["test"],
        [features_of(images, images.name) for images in ood.values()],
        validation=id_sets.get("validation"),
        groups=groups,
        title=config.title or f"{config.model} on {config.id}",
        notes=notes,
        forward=lambda size: measure_forward(classifier, preprocess.size, size),
        positive=config.positive,
        warnings=warnings if named.untrained else (),
        class_names=named.class_names or test.classes,
    )


def network_of(
    config: Config, *, device: str | torch.device | None = "auto", trust: bool = False
) -> tuple[NamedModel, Preprocess]:
    """The network of a config; a factory that the config's file names takes the user's word. And how images are
    prepared: as the config says, as the model's weights ask, or as is usual for the ID set."""
    named = model_by_name(
        config.model,
        config.checkpoint,
        num_classes=config.num_classes,
        preprocess=config.preprocess,
        device=device,
        trust=trust,
        named_by=config.source,
        allow_untrained=True,
    )
    try:
        return named, named.preprocess or Preprocess.preset(info(config.id).preprocess)
    except ValueError:
        raise ValueError(
            f"how are images of {config.id!r} to be prepared? give 'preprocess', a preset or its fields"
        ) from None


def _id_images(config: Config, size: int) -> dict[str, Images]:
    """The training and the test images, and those set aside for validation; no two share an image."""
    test = load(config.id, "test", limit=config.limit, for_size=size)
    if config.holdout is None:
        train = load(config.train, "train", limit=config.train_limit, for_size=size)
    else:
        train, test = _split(test, config.holdout, "holdout")
        train = train.limited(config.train_limit)
    if config.validation is None:
        return {"train": train, "test": test}
    test, validation = _split(test, config.validation, "validation")
    return {"train": train, "test": test, "validation": validation}


def _split(images: Images, share: float, what: str) -> tuple[Images, Images]:
    """The images without a share of them, and that share: every image whose place passes another multiple of 1/share,
    hence spread evenly, and the same in every run."""
    is_chosen = np.diff(np.floor(np.arange(len(images) + 1) * share)) > 0
    if is_chosen.all() or not is_chosen.any():
        raise ValueError(f"a {what} of {share} of {len(images)} images of {images.name} leaves a part empty")
    return images.subset(np.flatnonzero(~is_chosen)), images.subset(np.flatnonzero(is_chosen))


def _ood_images(config: Config, size: int, id_name: str, say: Say) -> dict[str, Images]:
    """The OOD sets that are available, by the config's key, each with a name of its own."""
    found: dict[str, Images] = {}
    for key, data in config.ood.items():
        try:
            images = load(data, "test", limit=config.ood_limit or config.limit, for_size=size)
        except DatasetUnavailable as error:
            say(f"{key} is left out: {error}")
            continue
        images.name = images.name if key == data else key
        if images.name in (id_name, *(other.name for other in found.values())):
            raise ValueError(f"two sets are called {images.name!r}: give OOD sets names of their own in a table, [ood]")
        found[key] = images
    if not found:
        raise ValueError("none of the OOD sets is available; the lines above say how to get them")
    return found


def _groups(config: Config, ood: Mapping[str, Images], say: Say) -> dict[str, tuple[str, ...]]:
    """Names of the available members of each group."""
    groups = {}
    for group, members in config.groups.items():
        present = [ood[key].name for key in members if key in ood]
        if len(present) < len(members):
            say(f"group {group}: {len(members) - len(present)} of {len(members)} sets are not available")
        if present:
            groups[group] = tuple(present)
    return groups
