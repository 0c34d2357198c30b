"""What the study on choosing a detector rests on: for each network, features of training images,
held-out images with their pseudo-OOD kinds, test images and real OOD sets; and the scores of every
candidate detector on them. Both are kept in the cache, so that a run that was stopped continues."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.bench.cache import FeatureCache
from fdbd.core.batch import Head
from fdbd.core.pixels import Pixels
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.data.features import FeatureSet
from fdbd.data.images import spread_evenly
from fdbd.data.pseudo_ood import make_kinds
from fdbd.decision.choice_rule import make_member
from fdbd.networks.by_name import NamedModel, model_by_name
from fdbd.networks.classifier import Classifier
from fdbd.paper.models import MissingData
from fdbd.paper.result import Result
from fdbd.util.files import beside, cache_root, data_roots
from fdbd.util.terminal import one_line

Floats = NDArray[np.float64]


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


def load_networks(result: Result) -> list[StudyScores]:
    """Scores on every network of the study that is available; the result says what is missing."""
    found = []
    for entry in result.settings["models"]:
        try:
            found.append(_scores_of(entry, result))
        except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
            result.missing.append(f"{entry['title']}: {one_line(error)}")
    if not found:
        raise MissingData(
            f"{result.experiment.name} cannot be run here: {'; '.join(result.missing)}"
        )
    return found


def _scores_of(entry: Mapping[str, Any], result: Result) -> StudyScores:
    """From the cache if the network's entry, the candidates and the sizes are the same."""
    settings = result.settings
    asked = {
        "entry": dict(entry),
        "candidates": list(settings["candidates"]),
        "sizes": _sizes(entry, settings),
        "kinds": list(settings["kinds"]),
        "format": 1,
    }
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_root() / "choice" / f"{digest}.npz"
    if path.is_file():
        return _read_scores(path)
    network = _extract(entry, result)
    scores = _score_all(network, settings["candidates"], result)
    _write_scores(path, scores)
    return scores


def _sizes(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, int]:
    """How many images are asked for, with the network's own numbers where it has some."""
    return {**settings["sizes"], **entry.get("sizes", {})}


def _extract(entry: Mapping[str, Any], result: Result) -> StudyNetwork:
    """Run one network over everything that is asked of it."""
    sizes = _sizes(entry, result.settings)
    title = entry["title"]
    named = _network(entry, result)
    own = named.preprocess
    assert own is not None
    classifier = Classifier(named.model)
    head = classifier.head
    side = own.size
    cache = FeatureCache()

    def features(images: Images, preprocess: Preprocess | None = None) -> FeatureSet:
        result.say(f"{title}: {images.name}, {len(images):,} images")
        return cache.features(classifier, images, preprocess or own, batch_size=sizes["batch"])

    def dataset(name: str, split: str, limit: int) -> Images:
        return load(name, split, limit=limit, for_size=side)

    training = dataset(entry["id"], "train", sizes["train"]).as_classes(head.num_classes)
    fresh = load(entry["id"], "test", for_size=side).as_classes(head.num_classes)
    # The held-out images and the test images are different images of the same data.
    held_rows = spread_evenly(sizes["held_out"], len(fresh))
    other_rows = np.setdiff1d(np.arange(len(fresh)), held_rows)
    test_rows = other_rows[spread_evenly(min(sizes["test"], len(other_rows)), len(other_rows))]
    held_out = replace(fresh.subset(held_rows), name=f"{entry['id']}, held out")
    test = replace(fresh.subset(test_rows), name=f"{entry['id']}, test")

    squares = np.stack([own.fit(held_out[row]) for row in range(len(held_out))])
    as_it_is = replace(own, resize=None, crop="none")
    kinds = {
        kind: features(Images(pixels, name=f"kind {kind}"), as_it_is)
        for kind, pixels in kinds_of_pixels(
            squares, result.settings["kinds"], sizes["per_kind"]
        ).items()
    }
    ood = {}
    for name in entry["ood"]:
        try:
            ood[name] = features(dataset(name, "test", sizes["ood"]))
        except (DatasetUnavailable, OSError) as error:
            result.missing.append(f"{title}, {name}: {one_line(error)}")
    return StudyNetwork(
        title,
        entry["group"],
        tuple(entry.get("near", ())),
        head,
        features(training),
        features(held_out),
        kinds,
        features(test),
        ood,
    )


def kinds_of_pixels(squares: Pixels, names: Sequence[str], count: int) -> dict[str, Pixels]:
    """Pseudo-OOD images of each kind, uint8 (count, side, side, 3), of images of that form."""
    images = torch.from_numpy(squares).permute(0, 3, 1, 2).float()
    black = torch.zeros(1, 3, 1, 1)
    made = make_kinds(images, count, names, limits=(black, black + 255))
    return {
        name: kind.round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
        for name, kind in made.items()
    }


def _network(entry: Mapping[str, Any], result: Result) -> NamedModel:
    """The network with its weights: published ones, or those that training gives here."""
    checkpoint = entry.get("checkpoint")
    if checkpoint is not None:
        checkpoint = _find_weights(checkpoint, entry["train_with"])
    return model_by_name(
        entry["model"],
        checkpoint,
        num_classes=entry.get("num_classes"),
        preprocess=entry.get("preprocess"),
        device=result.experiment.device,
    )


def _find_weights(name: str, remedy: str) -> Path:
    """A file as the path stands, below FDBD_DATA, or PACKAGE/FILE in an installed package."""
    places = [Path(name), *(root / name for root in data_roots())]
    package, _, rest = name.partition("/")
    specification = importlib.util.find_spec(package)
    if specification is not None and specification.origin is not None:
        places.append(Path(specification.origin).parent / rest)
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(f"no weights at {name}: {remedy}")


def _score_all(network: StudyNetwork, candidates: Sequence[str], result: Result) -> StudyScores:
    """Fit every candidate on the training features, and score all sets."""
    scores: dict[str, list[Floats]] = {name: [] for name in network.sets}
    fitted: list[str] = []
    failures: dict[str, str] = {}
    for spec in candidates:
        result.say(f"{network.title}: {spec}")
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
