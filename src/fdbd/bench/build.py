"""From a config to a benchmark: the sets are opened, the network runs once over each, and its
features are kept in the cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from fdbd.bench.cache import CachedFeatures, FeatureCache
from fdbd.bench.config import Config
from fdbd.bench.rows import Published
from fdbd.bench.runner import Benchmark
from fdbd.bench.timing import choose_batch_size, measure_forward
from fdbd.core.batch import Head
from fdbd.core.pixels import ImageError
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import DatasetUnavailable, Images, info, load
from fdbd.data.features import FeatureSet
from fdbd.data.images import spread_evenly
from fdbd.data.labels import Agreement
from fdbd.data.pseudo_ood import WEIGHING, kinds_of_pixels
from fdbd.decision.choice import Auto
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
    """The benchmark that a config describes, from cached features or one forward pass that fills
    the cache.

    An OOD set that is not available is left out with one line that says how to get it; without
    training data, test data or any OOD set it is an error. All sets are opened before the network
    runs over the first.

    Args:
        config, cache: what to compare, and where features are kept (default: the user's cache
            folder).
        say: called with one line for each thing worth knowing; default: prints to standard error.
        stage: called with one line before each pass of the network; default: `say`, off a terminal.
        device: where the network runs; "auto": a GPU if there is one.
        trust: the user confirms that a model named in the config's file may run code.
        autocast: as for `Classifier`.

    >>> import pathlib, tempfile
    >>> folder, rng = pathlib.Path(tempfile.mkdtemp()), np.random.default_rng(0)
    >>> for name in ("train", "test", "noise"):
    ...     images = rng.integers(0, 255, (20, 32, 32, 3), np.uint8)
    ...     np.savez(folder / name, x=images, y=np.arange(20) % 10)
    >>> paths = {name: str(folder / f"{name}.npz") for name in ("train", "test", "noise")}
    >>> ood = {"noise": paths["noise"]}
    >>> config = Config("cifar10-ce", id=paths["test"], ood=ood, train=paths["train"])
    >>> benchmark = benchmark_of(config, FeatureCache(folder / "cache"), lambda line: None)
    >>> benchmark.test.features.shape
    torch.Size([20, 128])
    """
    if config.seeds:
        raise ValueError("the config has several seeds: give one of them, config.for_seed(0)")
    say = say or _print_line
    named, preprocess = network_of(config, device=device, trust=trust)
    classifier = Classifier(named.model, config.head, autocast=autocast)
    head = classifier.head.cpu()
    opened = open_sets(config, preprocess.longest_side, say).with_classes(head, named)
    passes = _Passes(
        classifier,
        preprocess,
        cache or FeatureCache(),
        config,
        say,
        stage,
        most_images=opened.most_images,
    )
    train = passes.features(opened.train, f"{opened.train.name} (train)")
    test = passes.features(opened.test, f"{opened.test.name} (test)")
    validation = passes.features_if_any(opened.validation, "validation")
    ood_validation = passes.features_if_any(opened.ood_validation, "OOD validation")
    kinds = None
    if opened.validation is not None:
        kinds = partial(passes.kinds, opened.validation)
    notes = [f"Model: {named.weights}.", _data_note(opened)]
    for caution in _label_cautions([train, test], head, named.class_names):
        say(caution)
        notes.append(f"Caution: {caution}.")
    ood = [passes.features(images, name) for name, images in opened.ood.items()]
    shifted = [passes.features(images, name) for name, images in opened.shifted.items()]
    return Benchmark(
        head,
        train,
        test,
        ood,
        validation=validation,
        groups=_available_groups(config, opened.ood, say),
        title=config.title or f"{config.model} on {config.id}",
        notes=notes,
        forward=lambda size: measure_forward(classifier, preprocess.shape, size),
        positive=config.positive,
        warnings=_warnings_of(config, named),
        class_names=named.class_names or opened.test.classes,
        shifted=shifted,
        ood_validation=ood_validation,
        grids=config.tune,
        kinds=kinds,
        published=_published(config, opened),
    )


def _warnings_of(config: Config, named: NamedModel) -> list[str]:
    """Sentences that stand in front of every table."""
    if not named.untrained:
        return []
    return [
        f"UNTRAINED WEIGHTS: {config.model} has random weights, and every number below is noise."
    ]


def _print_line(line: str) -> None:
    print(f"fdbd: {line}", file=sys.stderr, flush=True)


def network_of(
    config: Config, *, device: str | torch.device | None = "auto", trust: bool = False
) -> tuple[NamedModel, Preprocess]:
    """The network of a config, and how images are prepared for it: as the config says, as the
    model's weights ask, or as is usual for the ID set. A factory that the config names is imported
    only if `trust` says so."""
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
    if named.preprocess is not None:
        return named, named.preprocess
    try:
        return named, Preprocess.preset(info(config.id).preprocess)
    except ValueError:
        raise ValueError(
            f"how are images of {config.id!r} to be prepared? give 'preprocess', a preset or its "
            "fields"
        ) from None


@dataclass(frozen=True)
class OpenedSets:
    """The images of a benchmark; nothing is decoded yet."""

    train: Images
    test: Images
    validation: Images | None
    ood: Mapping[str, Images]
    ood_validation: Images | None = None
    shifted: Mapping[str, Images] = field(default_factory=dict)
    is_whole: bool = True
    """Whether every set of the config is there."""

    @property
    def most_images(self) -> int:
        """Images of the largest set."""
        sets = [self.train, self.test, *self.ood.values(), *self.shifted.values()]
        return max(len(images) for images in sets)

    def with_classes(self, head: Head, named: NamedModel) -> OpenedSets:
        """The same with labels of ID sets as class indices of the model."""

        def as_classes(images: Images) -> Images:
            return images.as_classes(head.num_classes, named.class_names)

        validation = None if self.validation is None else as_classes(self.validation)
        return replace(
            self, train=as_classes(self.train), test=as_classes(self.test), validation=validation
        )


def open_sets(config: Config, size: int, say: Say) -> OpenedSets:
    """Open every set of the config for a network of `size` pixels. Those of `ood` and `shifted`
    that are not available are left out, with a line that says how to get them."""
    train, test, validation = open_id_sets(config, size)
    if test.name in config.ood:
        raise ValueError(
            f"two sets are called {test.name!r}: give OOD sets names of their own in a table, [ood]"
        )
    limit = config.ood_limit or config.limit
    ood = _open_available(config.ood, limit, size, say)
    if not ood:
        raise ValueError("none of the OOD sets is available; the lines above say how to get them")
    shifted = _open_available(config.shifted, limit, size, say)
    ood_validation = None
    if config.ood_validation is not None:
        ood_validation = load(config.ood_validation, "test", limit=limit, for_size=size)
    return OpenedSets(
        train=train,
        test=test,
        validation=validation,
        ood=ood,
        ood_validation=ood_validation,
        shifted=shifted,
        is_whole=len(ood) == len(config.ood),
    )


def open_id_sets(config: Config, size: int) -> tuple[Images, Images, Images | None]:
    """The training and the test images, and those for validation; no two share an image."""
    test = load(config.id, "test", limit=config.limit, for_size=size)
    if config.holdout is None:
        train = load(config.train, "train", limit=config.train_limit, for_size=size)
    else:
        train, test = _split(test, config.holdout, "holdout")
        train = train.limited(config.train_limit)
    if isinstance(config.validation, str):
        return train, test, load(config.validation, "test", limit=config.limit, for_size=size)
    if config.validation is not None:
        test, validation = _split(test, config.validation, "validation")
        return train, test, validation
    return train, test, None


def _split(images: Images, share: float, what: str) -> tuple[Images, Images]:
    """Two parts of the images: the rest, and a chosen `share` that is spread evenly over the set
    and is the same in every run."""
    # How many of the first 0, 1, 2, … images are chosen. An image at which the number grows is one
    # of them.
    num_chosen = np.floor(np.arange(len(images) + 1) * share)
    is_chosen = np.diff(num_chosen) > 0
    if is_chosen.all() or not is_chosen.any():
        raise ValueError(
            f"a {what} of {share} of {len(images)} images of {images.name} leaves a part empty"
        )
    rest = images.subset(np.flatnonzero(~is_chosen))
    chosen = images.subset(np.flatnonzero(is_chosen))
    return rest, chosen


def _open_available(
    sets: Mapping[str, str], limit: int | None, size: int, say: Say
) -> dict[str, Images]:
    found: dict[str, Images] = {}
    for name, data in sets.items():
        try:
            images = load(data, "test", limit=limit, for_size=size)
        except DatasetUnavailable as error:
            say(f"{name} is left out: {error}")
            continue
        images.name = name
        found[name] = images
    return found


def _available_groups(
    config: Config, ood: Mapping[str, Images], say: Say
) -> dict[str, tuple[str, ...]]:
    """The groups with the sets that are available; those without any are left out."""
    groups = {}
    for group, members in config.groups.items():
        present = tuple(name for name in members if name in ood)
        if len(present) < len(members):
            missing = len(members) - len(present)
            say(f"group {group}: {missing} of {len(members)} sets are not available")
        if present:
            groups[group] = present
    return groups


class _Passes:
    """The network's passes over the sets, each through the cache and under a progress bar."""

    def __init__(
        self,
        classifier: Classifier,
        preprocess: Preprocess,
        cache: FeatureCache,
        config: Config,
        say: Say,
        stage: Say | None,
        most_images: int,
    ) -> None:
        self.classifier = classifier
        self.preprocess = preprocess
        self.cache = cache
        self.config = config
        self.say = say
        self.stage = stage
        self.most_images = most_images
        self._batch_size = config.batch_size

    def batch_size(self) -> int:
        """The batch size of the config, or the one that a short trial found best."""
        if self._batch_size is None:
            shape = self.preprocess.shape
            self._batch_size = choose_batch_size(self.classifier, shape, self.most_images)
        return self._batch_size

    def features(self, images: Images, title: str) -> CachedFeatures:
        """The features of a set."""
        if self.stage is not None:
            self.stage(f"{title}: {len(images):,} images")
        elif not sys.stderr.isatty():
            # On a terminal the bar says it.
            self.say(f"{title}: {len(images):,} images")
        preprocess = self._preprocess_for(images)
        with Bar(title, len(images)) as bar:
            found = self.cache.features(
                self.classifier,
                images,
                preprocess,
                batch_size=self.batch_size,
                progress=lambda done, _: bar.update(done),
                waiting=self.say,
            )
        if found.failures:
            self.say(
                f"{len(found.failures)} images of {images.name} could not be read, the first: "
                f"{found.failures[0]}"
            )
        return found

    def features_if_any(self, images: Images | None, part: str) -> CachedFeatures | None:
        """The features of a set for validation; None if there is no such set."""
        if images is None:
            return None
        return self.features(images, f"{images.name} ({part})")

    def _preprocess_for(self, images: Images) -> Preprocess:
        """How images of this set are prepared."""
        if images.name in self.config.unresized:
            return replace(self.preprocess, resize=None)
        return self.preprocess

    def kinds(self, held_out: Images, auto: Auto) -> dict[str, FeatureSet]:
        """The features of pseudo-OOD images, by kind. They are made of held-out images that are
        already resized and cropped for the network."""
        preprocess = self._preprocess_for(held_out)
        fitted = []
        for row in spread_evenly(min(auto.held_out, len(held_out)), len(held_out)):
            # What cannot be read was reported when the features of these images were made.
            with contextlib.suppress(ImageError):
                fitted.append(preprocess.fit(held_out[int(row)]))
        made = kinds_of_pixels(np.stack(fitted), WEIGHING, auto.per_kind, auto.seed)
        without_resizing = replace(preprocess, resize=None, crop="none")
        found: dict[str, FeatureSet] = {}
        for kind, pixels in made.items():
            images = Images(pixels, name=f"kind {kind}")
            found[kind] = self.cache.features(
                self.classifier,
                images,
                without_resizing,
                batch_size=self.batch_size,
                waiting=self.say,
            )
        return found


def _data_note(opened: OpenedSets) -> str:
    sources = []
    for images in (opened.test, *opened.ood.values()):
        sources.append(f"{images.name} from {images.source}")
    return f"Data: {', '.join(sources)}."


def _label_cautions(
    sets: Sequence[FeatureSet], head: Head, class_names: tuple[str, ...]
) -> list[str]:
    """A sentence for each set whose labels agree with the predictions no better than by chance."""
    cautions = []
    for samples in sets:
        agreement = Agreement(head.num_classes)
        for batch in samples:
            assert batch.labels is not None
            agreement.add(batch.labels, head(batch.features).argmax(dim=1))
        caution = agreement.warning(samples.name, class_names)
        if caution:
            cautions.append(caution)
    return cautions


def _published(config: Config, opened: OpenedSets) -> Published | None:
    """The published numbers, if this is all of the protocol: every set, every image."""
    table = config.published
    has_limit = any((config.limit, config.train_limit, config.ood_limit))
    if table is None or has_limit or not opened.is_whole:
        return None
    auroc = {}
    for detector, values in table.auroc.items():
        fractions = [value / 100 for value in values]
        auroc[detector] = dict(zip(table.groups, fractions))
    return Published(source=table.source, date=table.date, auroc=auroc, note=table.note)
