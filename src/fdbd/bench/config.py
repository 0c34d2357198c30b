"""Benchmarks as small files that read like the sentence "this model, this ID set, these OOD sets,
these detectors", and the benchmark that such a config becomes when the network has run once over
each set."""

import difflib
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache as once
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self

from fdbd.bench.cache import FeatureCache
from fdbd.bench.runner import Benchmark, choose_batch_size, measure_forward
from fdbd.data.datasets import DatasetUnavailable, Images, Preprocess, info, load
from fdbd.data.features import FeatureSet
from fdbd.data.labels import Agreement
from fdbd.detectors import Detector, create
from fdbd.networks.by_name import NamedModel, model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.util.extras import import_object
from fdbd.util.files import parse_toml
from fdbd.util.progress import Bar
from fdbd.util.terminal import one_line

Say = Callable[[str], None]
Spec = str | Mapping[str, Any]
"""A name such as "react+fdbd" or "package.module:Class", or a table with `name`, options and
perhaps a `title`."""
EXAMPLE = Path(__file__).with_name("example.toml")  # the file that `fdbd bench --init` copies
_EXPECTED: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    str: ("a text", lambda value: isinstance(value, str)),
    int: ("a positive whole number", lambda value: type(value) is int and value >= 1),
    float: (
        "a share of the ID images, in (0, 1)",
        lambda value: isinstance(value, float) and 0 < value < 1,
    ),
    Literal["id", "ood"]: ("'id' or 'ood'", lambda value: value in ("id", "ood")),
}
"""What an entry of each type in `Config` is to be; entries of other types are checked one by
one."""


@dataclass(frozen=True)
class Config:
    """One benchmark, as its file says it.

    Attributes:
        ood: what to load, by name; a set that was given without one has the name of its dataset,
            file or folder.
        groups: names of groups with the names of their OOD sets.
        limit, train_limit, ood_limit: the largest number of images of the ID set, of the training
            set and of each OOD set; an `ood_limit` that is not given is `limit`.
        holdout: the share of the ID set that is scored while the rest is fitted on, where no
            training set is at hand.
        validation: the share of the scored ID images that is set aside for what must be learnt from
            data that the network has not seen: a temperature, or the p-values of an ensemble.
        batch_size: images per forward pass; None: chosen by a short trial.
        source: the file, where it came from one; a file does not choose what code runs.

    >>> config = Config.from_dict({"model": "cifar10-ce", "id": "cifar10", "ood": ["mnist"], "limit": 100})
    >>> config.train, config.ood
    ('cifar10', {'mnist': 'mnist'})
    """

    model: str
    id: str
    ood: Mapping[str, str]
    train: str = ""
    title: str = ""
    checkpoint: str | None = None
    num_classes: int | None = None
    head: str | None = None
    preprocess: str | Mapping[str, Any] | None = None
    detectors: tuple[Spec, ...] | None = None
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positive: Literal["id", "ood"] = "id"
    limit: int | None = None
    train_limit: int | None = None
    ood_limit: int | None = None
    holdout: float | None = None
    validation: float | None = None
    batch_size: int | None = None
    source: Path | None = None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a .toml file."""
        source = Path(path)
        if source.suffix != ".toml":
            raise ValueError(f"{str(source)!r} is no config: expected a .toml file")
        if not source.is_file():
            raise FileNotFoundError(
                f"no config at {str(source)!r}; `fdbd bench --init {source.name}` writes one"
            )
        try:
            values = parse_toml(source.read_text(encoding="utf-8"))
        except (
            ValueError,
            RecursionError,
        ) as error:  # those of TOML and of text encodings are ValueErrors
            raise ValueError(f"{source} is no valid TOML: {one_line(error)}") from None
        return replace(cls.from_dict(values, source), source=source)

    @classmethod
    def from_dict(cls, values: Any, source: str | os.PathLike[str] = "config") -> Self:
        """Check all that can be checked before any work: names and kinds of the entries, groups,
        detectors and their options, and the preprocessing.

        Raises:
            ValueError: for the first entry that is wrong, in one sentence that starts with
                `source`.
        """
        try:
            return cls(**_checked(values))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: {error}") from None


def _checked(values: Any) -> dict[str, Any]:
    """The entries as `Config` keeps them."""
    if not isinstance(values, dict):
        raise ValueError(f"expected entries such as model, id and ood, got {type(values).__name__}")
    hints = get_type_hints(Config)
    del hints["source"]
    for name, value in values.items():
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(hints))}"
            )
            raise ValueError(f"unknown entry {_short(name)}; {hint}")
        for kind, (expected, fits) in _EXPECTED.items():
            if hints[name] in (kind, kind | None) and not fits(value):
                raise ValueError(f"{name!r} is {_short(value)}, expected {expected}")
    for name in ("model", "id", "ood"):
        if not values.get(name):
            raise ValueError(f"{name!r} is missing; `fdbd bench --init` writes an example")
    if "holdout" in values and values.get("train"):
        raise ValueError("'holdout' fits on a part of 'id'; leave out 'train', or 'holdout'")
    if "preprocess" in values:
        Preprocess.parse(values["preprocess"])
    checked = {**values, "ood": _ood(values["ood"]), "train": values.get("train") or values["id"]}
    checked["groups"] = _groups(values.get("groups", {}), checked["ood"])
    if "detectors" in values:
        specs = values["detectors"]
        specs = [specs] if isinstance(specs, (str, dict)) else specs
        if not isinstance(specs, list) or not specs:
            raise ValueError(
                f"'detectors' is {_short(specs)}, expected a list of names, or of tables with options"
            )
        detectors_from(
            [spec for spec in specs if not runs_code(spec)]
        )  # code waits for the user's word
        checked["detectors"] = tuple(specs)
    return checked


def _ood(value: Any) -> dict[str, str]:
    value = [value] if isinstance(value, str) else value
    texts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"'ood' is {_short(value)}, expected a list of names, or a table of names and what to load"
        )
    if isinstance(value, dict):
        return value
    found: dict[str, str] = {}
    for item in value:
        if (name := _name_of(item)) in found:
            raise ValueError(
                f"two OOD sets would both be called {name!r}: give them names of their own in a table, "
                f'[ood] with lines such as "first {name}" = "path"'
            )
        found[name] = item
    return found


def _name_of(item: str) -> str:
    """The name of a dataset, or that of a file or folder."""
    try:
        return info(item).name
    except ValueError:
        path = Path(item)
        return path.stem if path.suffix.lower() in (".npz", ".txt") else path.name


def _groups(value: Any, ood: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The OOD sets of each group, which a file may also call by what is loaded."""
    if not isinstance(value, dict):
        raise ValueError(f"'groups' is {_short(value)}, expected names with lists of OOD sets")
    found = {}
    for group, members in value.items():
        if (
            not isinstance(members, list)
            or not members
            or not all(isinstance(item, str) for item in members)
        ):
            raise ValueError(f"'groups.{group}' is {_short(members)}, expected a list of OOD sets")
        names = {member: member if member in ood else _name_of(member) for member in members}
        if unknown := [member for member, name in names.items() if name not in ood]:
            raise ValueError(
                f"group {group!r} has {unknown[0]!r}, which is not among the OOD sets {', '.join(ood)}"
            )
        found[str(group)] = tuple(name for name in ood if name in names.values())
    return found


def _short(value: Any) -> str:
    """For a message: at most a hundred characters of a value."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def detectors_from(specs: Iterable[Spec], *, trust: bool = False) -> dict[str, Detector]:
    """Unfitted detectors by the title of their row.

    Args:
        specs: names, or tables of a name and options. The text "none" stands for None, which TOML
            lacks.
        trust: the user's word that ``package.module:Class`` may be imported, which runs code.

    >>> list(detectors_from(["fdbd", {"name": "react+energy", "percentile": 80}]))
    ['fdbd', 'react+energy (percentile=80)']
    """
    found: dict[str, Detector] = {}
    for spec in specs:
        options = {"name": spec} if isinstance(spec, str) else dict(spec)
        name, title = options.pop("name", None), options.pop("title", None)
        if not isinstance(name, str):
            raise ValueError(
                f"a detector is {spec!r}, expected a name, or a table with name and options"
            )
        options = {key: None if value == "none" else value for key, value in options.items()}
        if runs_code(name) and not trust:
            raise ValueError(
                f"the detector {name} is code to run: say that you trust it with --trust-model"
            )
        detector = _own_detector(name, options) if runs_code(name) else create(name, **options)
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        title = title or (f"{name} ({shown})" if shown else name)
        if title in found:
            raise ValueError(
                f"two detectors would both be called {title!r}: give them titles of their own"
            )
        found[title] = detector
    return found


def runs_code(spec: Spec) -> bool:
    """Whether a detector is a class that has to be imported."""
    name = spec if isinstance(spec, str) else spec.get("name")
    return isinstance(name, str) and ":" in name


def _own_detector(name: str, options: Mapping[str, Any]) -> Detector:
    make: Any = import_object(name, "detector")
    try:
        detector = make(**options)
    except TypeError as error:
        raise ValueError(f"{name} does not make a detector with these options: {error}") from None
    if not isinstance(detector, Detector):
        raise ValueError(f"{name} makes a {type(detector).__name__}, expected an fdbd detector")
    return detector


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
    parts = {
        part: images.as_classes(head.num_classes, named.class_names)
        for part, images in opened.items()
    }
    test = parts["test"]
    if test.name in config.ood:
        raise ValueError(
            f"two sets are called {test.name!r}: give OOD sets names of their own in a table, [ood]"
        )
    ood = _ood_images(config, preprocess.size, say)
    groups: dict[str, tuple[str, ...]] = {}
    for group, members in config.groups.items():
        present = tuple(name for name in members if name in ood)
        if len(present) < len(members):
            say(
                f"group {group}: {len(members) - len(present)} of {len(members)} sets are not available"
            )
        groups |= {group: present} if present else {}

    @once
    def batch_size() -> int:
        return config.batch_size or choose_batch_size(classifier, preprocess.size)

    def features_of(images: Images, title: str) -> FeatureSet:
        if stage is not None or not sys.stderr.isatty():
            (stage or say)(f"{title}: {len(images):,} images")
        with Bar(title, len(images)) as bar:
            found = cache.features(
                classifier,
                images,
                preprocess,
                batch_size=batch_size,
                progress=lambda done, _: bar.update(done),
            )
        if found.failures:
            say(
                f"{len(found.failures)} images of {images.name} could not be read, the first: {found.failures[0]}"
            )
        return found

    id_sets = {
        part: features_of(images, f"{images.name} ({part})") for part, images in parts.items()
    }
    sources = ", ".join(f"{images.name} from {images.source}" for images in (test, *ood.values()))
    notes = [f"Model: {named.weights}.", f"Data: {sources}."]
    warnings = [
        f"UNTRAINED WEIGHTS: {config.model} has random weights, and every number below is noise."
    ]
    for samples in (id_sets["train"], id_sets["test"]):
        agreement = Agreement(head.num_classes)
        for batch in samples:
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
    try:
        return named, named.preprocess or Preprocess.preset(info(config.id).preprocess)
    except ValueError:
        raise ValueError(
            f"how are images of {config.id!r} to be prepared? give 'preprocess', a preset or its fields"
        ) from None


def _id_images(config: Config, size: int) -> dict[str, Images]:
    """The training and the test images, and those set aside for validation; no two share an
    image."""
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
    """The images without a share of them, and that share: every image whose place passes another
    multiple of 1/share, hence spread evenly, and the same in every run."""
    is_chosen = np.diff(np.floor(np.arange(len(images) + 1) * share)) > 0
    if is_chosen.all() or not is_chosen.any():
        raise ValueError(
            f"a {what} of {share} of {len(images)} images of {images.name} leaves a part empty"
        )
    return images.subset(np.flatnonzero(~is_chosen)), images.subset(np.flatnonzero(is_chosen))


def _ood_images(config: Config, size: int, say: Say) -> dict[str, Images]:
    """The OOD sets that are available, by name."""
    found: dict[str, Images] = {}
    for name, data in config.ood.items():
        try:
            found[name] = load(data, "test", limit=config.ood_limit or config.limit, for_size=size)
            found[name].name = name
        except DatasetUnavailable as error:
            say(f"{name} is left out: {error}")
    if not found:
        raise ValueError("none of the OOD sets is available; the lines above say how to get them")
    return found
