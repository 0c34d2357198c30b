"""What a table is about: a model with its features on an ID set and OOD sets, and its images where they are at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd import networks as models
from fdbd.bench import Benchmark, Config, FeatureSet, benchmark_of, list_bundles, load_bundle
from fdbd.bench.assemble import model_of
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.data.preprocessing import Preprocess
from fdbd.networks.classifier import Classifier
from fdbd.paper.experiment import Experiment
from fdbd.paper.kinds import Say

_OWN = ("title", "train_with", "bundle", "detectors", "images", "stand_in")  # entries of a model that Config has not


class MissingData(RuntimeError):
    """Nothing of an experiment can be run here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Subject:
    """One model of an experiment; `settings` is its entry in the file."""

    title: str
    benchmark: Benchmark
    settings: Mapping[str, Any]
    config: Config

    @cached_property
    def network(self) -> tuple[Classifier, Preprocess]:
        """The network and what prepares its images."""
        model, preprocess, _ = model_of(self.config)
        if preprocess is None:
            from fdbd.data.datasets import info

            preprocess = Preprocess.preset(info(self.config.id).preprocess)
        return Classifier(model, self.config.head), preprocess

    def images(self, features: FeatureSet, step: int) -> Images:
        """Every step-th image of a test set; row i belongs to row i · step of its features."""
        limit = len(features) if self.config.limit is None else self.config.limit
        names = (self.config.id, *self.config.ood)
        name = next(each for each in names if features.name in (each, Path(each).stem))
        return load(name, "test", limit=limit).subset(np.arange(0, len(features), step))

    def mean(self) -> Tensor:
        """(P,) float64 mean of the training features."""
        full = self.benchmark.statistics
        return self.benchmark.train.features.double().mean(dim=0) if full is None else full.mean()


def subjects(experiment: Experiment, say: Say) -> tuple[list[Subject], list[str]]:
    """The models of an experiment that can be had, and a line for each thing that cannot.

    Raises:
        MissingData: when there is no model at all.
    """
    found: list[Subject] = []
    missing: list[str] = []
    for entry in experiment.settings["models"]:
        say(f"loading {entry['title']}")
        subject = _subject(entry, missing)
        if subject is not None:
            found.append(subject)
    if not found:
        raise MissingData(f"{experiment.name} cannot be run here: {'; '.join(missing)}")
    return found, missing


def main_subject(experiment: Experiment, say: Say) -> tuple[Subject, list[str]]:
    """The first model that can be had."""
    found, missing = subjects(experiment, say)
    return found[0], missing


def _subject(entry: Mapping[str, Any], missing: list[str]) -> Subject | None:
    title = entry["title"]
    bundle = entry.get("bundle")
    if bundle is not None:
        if bundle not in list_bundles() or bundle not in models.list_zoo():
            missing.append(
                f"{title}: the package has no {bundle}; `{entry['train_with']}` trains such a model, and "
                "`python -m fdbd.bench.make_bundle` writes the features of a model in the zoo"
            )
            return None
        benchmark = load_bundle(bundle)
        config = Config.from_dict({"model": f"zoo:{bundle}", "id": "cifar10", "ood": [s.name for s in benchmark.ood]})
        return Subject(title, benchmark, entry, config)
    config = Config.from_dict({key: value for key, value in entry.items() if key not in _OWN}, title)
    if config.checkpoint is not None and not Path(config.checkpoint).is_file():
        missing.append(f"{title}: no weights at {config.checkpoint}; run: {entry['train_with']}")
        return None
    try:
        benchmark = benchmark_of(config, say=missing.append)
    except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
        missing.append(f"{title}: {' '.join(str(error).split())}")
        return None
    return Subject(title, benchmark, entry, config)


def stand_ins(found: Sequence[Subject]) -> list[str]:
    """What stands for the paper's models and data, one sentence each."""
    return [f"Stand-in: {subject.settings['stand_in']}" for subject in found if "stand_in" in subject.settings]


def standing(subject: Subject) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Of each set, the ID set first: average boundary distance and deviation from the training mean, (N,) each."""
    from fdbd.core import geometry

    benchmark, mean = subject.benchmark, subject.mean()
    folded = geometry.Folded(benchmark.head, normalizer=None, dtype=torch.float64)
    found = {}
    for samples in (benchmark.test, *benchmark.ood):
        z = samples.rows(slice(None)).features.double()
        predicted = benchmark.head(z).argmax(dim=1)
        deviation = torch.linalg.vector_norm(z - mean, dim=1)
        found[samples.name] = (folded.score(z, predicted).numpy(), deviation.numpy())
    return found
