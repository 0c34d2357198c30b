"""The data of the study on choosing a detector: for each network, features of training samples,
held-out samples with their pseudo-OOD kinds, test samples and real OOD sets; and the scores of
every candidate detector on them. Both are kept in the cache, so that a run that was stopped
continues."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.bench.cache import FeatureCache
from fdbd.core.batch import Batch, Head
from fdbd.core.preprocessing import Preprocess
from fdbd.core.tables import read_toml
from fdbd.data.datasets import Images, load
from fdbd.data.features import FeatureSet
from fdbd.data.images import spread_evenly
from fdbd.data.pseudo_ood import kinds_of_pixels
from fdbd.data.pseudo_text import text_kinds
from fdbd.data.text import Texts, load_clinc150, load_newsgroups20, with_ood
from fdbd.decision.choice_rule import POOL, make_member
from fdbd.jobs.sentences import fit_head
from fdbd.metrics import auroc
from fdbd.networks.by_name import model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.networks.sentence_model import sentence_transformer
from fdbd.util.devices import choose_device
from fdbd.util.files import beside, cache_root, data_roots
from fdbd.util.terminal import one_line

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Say = Callable[[str], None]
PROTOCOL = Path(__file__).with_name("choosing.toml")
BATCH = 32
TEXTS = "clinc150"
"""The ID set that is of texts; all others are of images."""
HELD_OUT_CLASSES = (*POOL, "mds++")
"""Candidates that are also tried on classes that were held out, on development networks."""


@dataclass(frozen=True)
class StudyNetwork:
    """One network of the study, with all that is asked of it."""

    title: str
    #: "development", "test", "new", "unseen" or "fresh", as choosing.toml explains
    group: str
    #: names of its near OOD sets; the others are far
    near: tuple[str, ...]
    head: Head
    train: FeatureSet
    held_out: FeatureSet
    #: pseudo-OOD images, made of the held-out ones
    kinds: Mapping[str, FeatureSet]
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
    #: by the names of `StudyNetwork.sets`, (candidates, N) each
    sets: Mapping[str, Floats]
    #: why a candidate has no scores
    failures: Mapping[str, str]
    class_hold_out: Floats
    """(candidates,) AUROC between held-out images and those of classes that were left out of the
    fit and of the head; NaN if it was not computed."""

    @property
    def ood(self) -> list[str]:
        """Names of the real OOD sets."""
        return [name[4:] for name in self.sets if name.startswith("ood ")]

    @property
    def kinds(self) -> list[str]:
        """Names of the pseudo-OOD kinds."""
        return [name[5:] for name in self.sets if name.startswith("kind ")]

    def with_others(self, others: StudyScores) -> StudyScores:
        """These scores and those of other candidates on the same sets."""
        sets = {}
        for name, values in self.sets.items():
            sets[name] = np.concatenate([values, others.sets[name]])
        return replace(
            self,
            candidates=(*self.candidates, *others.candidates),
            sets=sets,
            failures={**self.failures, **others.failures},
            class_hold_out=np.concatenate([self.class_hold_out, others.class_hold_out]),
        )

    def restricted_to(self, candidates: Sequence[str]) -> StudyScores:
        """The scores of these candidates alone, in this order."""
        names = [name for name in candidates if name in self.candidates]
        places = [self.candidates.index(name) for name in names]
        return replace(
            self,
            candidates=tuple(names),
            sets={name: values[places] for name, values in self.sets.items()},
            failures={name: why for name, why in self.failures.items() if name in candidates},
            class_hold_out=self.class_hold_out[places],
        )


@dataclass(frozen=True)
class NetworkEntry:
    """A network as the study's file names it."""

    title: str
    group: str
    model: str
    id: str
    checkpoint: str | None = None
    #: how to get the checkpoint
    remedy: str = ""
    preprocess: str | None = None


@dataclass(frozen=True)
class Sizes:
    """Numbers of images."""

    train: int
    held_out: int
    per_kind: int
    test: int
    ood: int


@dataclass(frozen=True)
class Protocol:
    """The study's file: what is run on which networks."""

    kinds: tuple[str, ...]
    candidates: tuple[str, ...]
    sizes: Mapping[str, Sizes]
    #: by the name of the ID set
    ood: Mapping[str, tuple[str, ...]]
    near: Mapping[str, tuple[str, ...]]
    networks: tuple[NetworkEntry, ...]

    @classmethod
    def read(cls, path: Path = PROTOCOL) -> Protocol:
        """The protocol in a file; ValueError for a key that it does not know."""
        return read_toml(path, cls)

    def sizes_of(self, entry: NetworkEntry) -> Sizes:
        """Those of ImageNet networks, of texts, or of the others."""
        kind = {"imagenet-sample": "imagenet", TEXTS: "texts"}.get(entry.id, "cifar")
        return self.sizes[kind]


def scores_of(entry: NetworkEntry, protocol: Protocol, say: Say, device: str) -> StudyScores:
    """Scores on one network: from the cache if the network's entry and the sizes are the same;
    candidates that are not there yet are added."""
    asked = {
        "entry": asdict(entry),
        "sizes": asdict(protocol.sizes_of(entry)),
        "kinds": protocol.kinds,
        "ood": protocol.ood[entry.id],
        "near": protocol.near.get(entry.id, ()),
        "format": 2,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_root() / "choice" / f"{digest}.npz"
    known = _read_scores(path) if path.is_file() else None
    missing = list(protocol.candidates)
    if known is not None:
        missing = [name for name in missing if name not in {*known.candidates, *known.failures}]
    if missing:
        extract = _extract_texts if entry.id == TEXTS else _extract
        network = extract(entry, protocol, say, device)
        found = _score_all(network, missing, say)
        known = found if known is None else known.with_others(found)
        _write_scores(path, known)
    assert known is not None
    return known.restricted_to(protocol.candidates)


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
    cache = FeatureCache(shard_rows=256 if own.longest_side > 64 else 2048)

    def features(images: Images, preprocess: Preprocess = own) -> FeatureSet:
        say(f"{entry.title}: {images.name}, {len(images):,} images")
        return cache.features(classifier, images, preprocess, batch_size=BATCH)

    def dataset(name: str, split: str, limit: int | None = None) -> Images:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* has .* of .* images")
            return load(name, split, limit=limit, for_size=own.longest_side)

    training = dataset(entry.id, "train", sizes.train).as_classes(head.num_classes)
    fresh = dataset(entry.id, "test").as_classes(head.num_classes)
    held_out, test = _split(fresh, entry.id, sizes)

    squares = np.stack([own.fit(held_out[row]) for row in range(len(held_out))])
    made = kinds_of_pixels(squares, protocol.kinds, sizes.per_kind)
    # The squares have the network's size already.
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


def _extract_texts(entry: NetworkEntry, protocol: Protocol, say: Say, device: str) -> StudyNetwork:
    """Embed texts by a sentence encoder, and fit a logistic head on the training texts: together
    they are the network. The kinds are those that `text_kinds` makes."""
    sizes = protocol.sizes_of(entry)
    encoder = sentence_transformer(entry.model.removeprefix("sentences:"))
    sets = with_ood(load_clinc150(), "newsgroups", load_newsgroups20().test)
    assert sets.train.labels is not None
    assert sets.test.labels is not None

    def features(name: str, texts: Sequence[str], labels: Any = None) -> FeatureSet:
        say(f"{entry.title}: {name}, {len(texts):,} texts")
        known = None if labels is None else torch.from_numpy(labels)
        return FeatureSet(name, encoder.embed(texts, device=choose_device(device)), known)

    def chosen(texts: Texts, rows: Any) -> list[str]:
        return [texts.texts[row] for row in rows]

    train_rows = spread_evenly(sizes.train, len(sets.train))
    train = features("train", chosen(sets.train, train_rows), sets.train.labels[train_rows])
    assert train.labels is not None
    held_rows, test_rows = _split_rows(len(sets.test), sizes)
    held_out = chosen(sets.test, held_rows)
    kinds = {}
    for kind, changed in text_kinds(held_out, sizes.per_kind, language="en").items():
        kinds[kind] = features(f"kind {kind}", changed)
    ood = {}
    for name in protocol.ood[entry.id]:
        outside = sets.ood[name]
        rows = spread_evenly(min(sizes.ood, len(outside)), len(outside))
        ood[name] = features(name, chosen(outside, rows))
    return StudyNetwork(
        title=entry.title,
        group=entry.group,
        near=protocol.near.get(entry.id, ()),
        head=fit_head(train.features, train.labels),
        train=train,
        held_out=features("held out", held_out, sets.test.labels[held_rows]),
        kinds=kinds,
        test=features("test", chosen(sets.test, test_rows), sets.test.labels[test_rows]),
        ood=ood,
    )


def _split(fresh: Images, name: str, sizes: Sizes) -> tuple[Images, Images]:
    """Held-out images and test images: different images of the same data."""
    held_rows, test_rows = _split_rows(len(fresh), sizes)
    held_out = replace(fresh.subset(held_rows), name=f"{name}, held out")
    test = replace(fresh.subset(test_rows), name=f"{name}, test")
    return held_out, test


def _split_rows(count: int, sizes: Sizes) -> tuple[Rows, Rows]:
    """Rows of held-out samples and rows of test samples."""
    held_rows = spread_evenly(sizes.held_out, count)
    other_rows = np.setdiff1d(np.arange(count), held_rows)
    num_test = min(sizes.test, len(other_rows))
    return held_rows, other_rows[spread_evenly(num_test, len(other_rows))]


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
    hold_out: list[float] = []
    for spec in candidates:
        say(f"{network.title}: {spec}")
        try:
            of_sets = _score_one(spec, network)
        except (ValueError, RuntimeError, ImportError) as error:
            failures[spec] = one_line(error)
            continue
        fitted.append(spec)
        hold_out.append(_class_hold_out(spec, network))
        for name, values in of_sets.items():
            scores[name].append(values)
    return StudyScores(
        network.title,
        network.group,
        network.near,
        tuple(fitted),
        {name: np.stack(rows) for name, rows in scores.items()},
        failures,
        np.array(hold_out),
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


def _class_hold_out(spec: str, network: StudyNetwork) -> float:
    """The mean AUROC over five groups of classes: the detector is fitted without the group, to a
    head without its rows, and tells held-out images of other classes from those of the group."""
    if network.group != "development" or spec not in HELD_OUT_CLASSES:
        return math.nan
    num_classes = network.head.num_classes
    order = torch.randperm(num_classes, generator=torch.Generator().manual_seed(0))
    found = []
    for group in order.chunk(5):
        is_kept = torch.ones(num_classes, dtype=torch.bool)
        is_kept[group] = False
        try:
            found.append(_auroc_of_left_out(spec, network, is_kept))
        except ValueError:
            return math.nan
    return float(np.mean(found))


def _auroc_of_left_out(spec: str, network: StudyNetwork, is_kept: torch.Tensor) -> float:
    """How well a detector that knows only some classes, (C,), tells held-out images of these from
    those of the others; by predicted class."""
    head = network.head
    smaller = Head(head.weight[is_kept], head.bias[is_kept])
    detector = make_member(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detector.fit(_training_on(is_kept, network, smaller), smaller)
    held_out = network.held_out.rows(slice(None)).features
    is_inside = is_kept[head(held_out).argmax(dim=1)].numpy()
    with torch.no_grad():
        scores = detector.score(Batch(held_out, logits=smaller(held_out))).double().numpy()
    return float(auroc(scores[is_inside], scores[~is_inside]))


def _training_on(is_kept: torch.Tensor, network: StudyNetwork, smaller: Head) -> Batch:
    """The training samples that are predicted to be, and are, of the classes that are kept."""
    training = network.train.rows(slice(None))
    rows = is_kept[network.head(training.features).argmax(dim=1)]
    labels = None
    if training.labels is not None:
        rows = rows & is_kept[training.labels]
        # Labels are the places of their classes among those that are kept.
        place = torch.cumsum(is_kept.long(), 0) - 1
        labels = place[training.labels[rows]]
    features = training.features[rows]
    return Batch(features, logits=smaller(features), labels=labels)


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
        arrays: Any = {
            "about": np.array(json.dumps(about)),
            "class hold-out": scores.class_hold_out,
            **scores.sets,
        }
        np.savez_compressed(file, **arrays)


def _read_scores(path: Path) -> StudyScores:
    with np.load(path, allow_pickle=False) as arrays:
        about = json.loads(str(arrays["about"]))
        hold_out = arrays["class hold-out"]
        others = ("about", "class hold-out")
        sets = {name: arrays[name] for name in arrays.files if name not in others}
    return StudyScores(
        about["title"],
        about["group"],
        tuple(about["near"]),
        tuple(about["candidates"]),
        sets,
        about["failures"],
        hold_out,
    )
