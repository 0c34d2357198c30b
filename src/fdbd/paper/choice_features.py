"""What the study on choosing a detector rests on: for each network, features of training images,
held-out images with their pseudo-OOD kinds, test images and real OOD sets; and the scores of every
candidate detector on them. Both are kept in the cache, so that a run that was stopped continues."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.bench.cache import FeatureCache
from fdbd.core.batch import Head
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import Images, load
from fdbd.data.features import FeatureSet
from fdbd.data.images import spread_evenly
from fdbd.data.pseudo_ood import kinds_of_pixels
from fdbd.decision.choice_rule import make_member
from fdbd.networks.by_name import model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.util.files import beside, cache_root, data_roots, parse_toml
from fdbd.util.terminal import one_line

Floats = NDArray[np.float64]
Say = Callable[[str], None]
PROTOCOL = Path(__file__).with_name("choosing.toml")
BATCH = 32


@dataclass(frozen=True)
class StudyNetwork:
    """One network of the study, with all that is asked of it."""

    title: str
    group: str  #: "development" or "test"
    near: tuple[str, ...]  #: names of its near OOD sets; the others are far
    head: Head
    train: FeatureSet
    held_out: FeatureSet
    kinds: Mapping[str, FeatureSet]  #: pseudo-OOD images, made of the held-out ones
    test: FeatureSet
    ood: Mapping[str, FeatureSet]

    @property
    def sets(self) -> dict[str, FeatureSet]:
        """All sets that detectors score, by a name that tells what they are."""
        named = {"held out": self.held_out, "test": self.test}
        for kind, features in self.kinds.items():
            named[f"kind {kind}"] = features
        for name, features in self.ood.items():
            named[f"ood {name}"] = features
        return named


@dataclass(frozen=True)
class StudyScores:
    """Scores of every candidate on every set of one network."""

    title: str
    group: str
    near: tuple[str, ...]
    candidates: tuple[str, ...]
    sets: Mapping[str, Floats]  #: by the names of `StudyNetwork.sets`, (candidates, N) each
    failures: Mapping[str, str]  #: why a candidate has no scores

    @property
    def ood(self) -> list[str]:
        """Names of the real OOD sets."""
        return [name[4:] for name in self.sets if name.startswith("ood ")]

    @property
    def kinds(self) -> list[str]:
        """Names of the pseudo-OOD kinds."""
        return [name[5:] for name in self.sets if name.startswith("kind ")]


@dataclass(frozen=True)
class NetworkEntry:
    """A network as the study's file names it."""

    title: str
    group: str
    model: str
    id: str
    checkpoint: str | None = None
    remedy: str = ""  #: how to get the checkpoint
    preprocess: str | None = None


@dataclass(frozen=True)
class Sizes:
    """How many images are used."""

    train: int
    held_out: int
    per_kind: int
    test: int
    ood: int


@dataclass(frozen=True)
class Protocol:
    """What is asked of each network: the study's file."""

    kinds: tuple[str, ...]
    candidates: tuple[str, ...]
    sizes: Mapping[str, Sizes]
    ood: Mapping[str, tuple[str, ...]]  #: by the name of the ID set
    near: Mapping[str, tuple[str, ...]]
    networks: tuple[NetworkEntry, ...]

    @classmethod
    def read(cls, path: Path = PROTOCOL) -> Protocol:
        """The protocol in a file."""
        values: Any = parse_toml(path.read_text(encoding="utf-8"))
        return cls(
            tuple(values["kinds"]),
            tuple(values["candidates"]),
            {name: Sizes(**numbers) for name, numbers in values["sizes"].items()},
            {name: tuple(sets) for name, sets in values["ood"].items()},
            {name: tuple(sets) for name, sets in values["near"].items()},
            tuple(NetworkEntry(**entry) for entry in values["networks"]),
        )

    def sizes_of(self, entry: NetworkEntry) -> Sizes:
        """Those of ImageNet networks, or of the others."""
        return self.sizes["imagenet" if entry.id == "imagenet-sample" else "cifar"]


def scores_of(entry: NetworkEntry, protocol: Protocol, say: Say, device: str) -> StudyScores:
    """Scores on one network: from the cache if the network's entry, the candidates and the sizes
    are the same."""
    asked = {
        "entry": asdict(entry),
        "candidates": protocol.candidates,
        "sizes": asdict(protocol.sizes_of(entry)),
        "kinds": protocol.kinds,
        "ood": protocol.ood[entry.id],
        "near": protocol.near.get(entry.id, ()),
        "format": 1,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_root() / "choice" / f"{digest}.npz"
    if path.is_file():
        return _read_scores(path)
    network = _extract(entry, protocol, say, device)
    scores = _score_all(network, protocol.candidates, say)
    _write_scores(path, scores)
    return scores


def _extract(entry: NetworkEntry, protocol: Protocol, say: Say, device: str) -> StudyNetwork:
    """Run one network over everything that is asked of it."""
    sizes = protocol.sizes_of(entry)
    checkpoint = None
    if entry.checkpoint is not None:
        checkpoint = _find_weights(entry.checkpoint, entry.remedy)
    named = model_by_name(entry.model, checkpoint, preprocess=entry.preprocess, device=device)
    own = named.preprocess
    assert own is not None
    classifier = Classifier(named.model)
    head = classifier.head
    # A run that is stopped loses one shard at most: few of the images that take long.
    cache = FeatureCache(shard_rows=256 if own.size > 64 else 2048)

    def features(images: Images, preprocess: Preprocess = own) -> FeatureSet:
        say(f"{entry.title}: {images.name}, {len(images):,} images")
        return cache.features(classifier, images, preprocess, batch_size=BATCH)

    def dataset(name: str, split: str, limit: int | None = None) -> Images:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* has .* of .* images")
            return load(name, split, limit=limit, for_size=own.size)

    training = dataset(entry.id, "train", sizes.train).as_classes(head.num_classes)
    fresh = dataset(entry.id, "test").as_classes(head.num_classes)
    # The held-out images and the test images are different images of the same data.
    held_rows = spread_evenly(sizes.held_out, len(fresh))
    other_rows = np.setdiff1d(np.arange(len(fresh)), held_rows)
    test_rows = other_rows[spread_evenly(min(sizes.test, len(other_rows)), len(other_rows))]
    held_out = replace(fresh.subset(held_rows), name=f"{entry.id}, held out")
    test = replace(fresh.subset(test_rows), name=f"{entry.id}, test")

    squares = np.stack([own.fit(held_out[row]) for row in range(len(held_out))])
    made = kinds_of_pixels(squares, protocol.kinds, sizes.per_kind)
    as_it_is = replace(own, resize=None, crop="none")
    kinds = {}
    for kind, pixels in made.items():
        kinds[kind] = features(Images(pixels, name=f"kind {kind}"), as_it_is)
    return StudyNetwork(
        title=entry.title,
        group=entry.group,
        near=protocol.near.get(entry.id, ()),
        head=head,
        train=features(training),
        held_out=features(held_out),
        kinds=kinds,
        test=features(test),
        ood={name: features(dataset(name, "test", sizes.ood)) for name in protocol.ood[entry.id]},
    )


def _find_weights(name: str, remedy: str) -> Path:
    """A file as the path stands, or below FDBD_DATA."""
    places = [Path(name), *(root / name for root in data_roots())]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"no weights at {name}: {remedy}")


def _score_all(network: StudyNetwork, candidates: Sequence[str], say: Say) -> StudyScores:
    """Fit every candidate on the training features, and score all sets."""
    scores: dict[str, list[Floats]] = {name: [] for name in network.sets}
    fitted: list[str] = []
    failures: dict[str, str] = {}
    for spec in candidates:
        say(f"{network.title}: {spec}")
        try:
            of_sets = _score_one(spec, network)
        except (ValueError, RuntimeError, ImportError) as error:
            failures[spec] = one_line(error)
            continue
        fitted.append(spec)
        for name, values in of_sets.items():
            scores[name].append(values)
    return StudyScores(
        network.title,
        network.group,
        network.near,
        tuple(fitted),
        {name: np.stack(rows) for name, rows in scores.items()},
        failures,
    )


def _score_one(spec: str, network: StudyNetwork) -> dict[str, Floats]:
    detector = make_member(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detector.fit(network.train, network.head)
    found = {}
    with torch.no_grad():
        for name, features in network.sets.items():
            parts = [detector.score(batch) for batch in features.batches(1024)]
            found[name] = torch.cat(parts).double().cpu().numpy()
    return found


def _write_scores(path: Path, scores: StudyScores) -> None:
    about = {
        "title": scores.title,
        "group": scores.group,
        "near": scores.near,
        "candidates": scores.candidates,
        "failures": dict(scores.failures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as draft, open(draft, "wb") as file:
        arrays: Any = {"about": np.array(json.dumps(about)), **scores.sets}
        np.savez_compressed(file, **arrays)


def _read_scores(path: Path) -> StudyScores:
    with np.load(path, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        sets = {name: arrays[name] for name in arrays.files if name != "about"}
    return StudyScores(
        about["title"],
        about["group"],
        tuple(about["near"]),
        tuple(about["candidates"]),
        sets,
        about["failures"],
    )
