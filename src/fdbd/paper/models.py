"""The models that an experiment evaluates: a network with its features on an ID set and on OOD sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.bench import Benchmark, Config, FeatureSet, benchmark_of, list_bundles, load_bundle
from fdbd.bench.bundle import bundle_model
from fdbd.bench.from_config import network_of
from fdbd.core import geometry
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.data.preprocessing import Preprocess
from fdbd.networks.classifier import Classifier
from fdbd.paper.experiment import Experiment, Say
from fdbd.paper.plot import Floats
from fdbd.paper.result import Result
from fdbd.util.files import cache_root, data_roots

_NOT_OF_CONFIG = ("title", "train_with", "bundle", "detectors", "images", "stand_in", "every", "layers")


class MissingData(RuntimeError):
    """Nothing of an experiment can be run here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model of an experiment; `settings` is its entry in the experiment's file."""

    title: str
    benchmark: Benchmark
    settings: Mapping[str, Any]
    config: Config
    device: str = "auto"

    @cached_property
    def network(self) -> tuple[Classifier, Preprocess]:
        """The network and the preprocessing of its images."""
        named, preprocess = network_of(self.config, device=self.device)
        return Classifier(named.model, self.config.head), preprocess

    def images(self, features: FeatureSet, step: int) -> Images:
        """Every step-th image of a test set: row i belongs to row i · step of its features."""
        limit = len(features) if self.config.limit is None else self.config.limit
        names = (self.config.id, *self.config.ood)
        name = next(each for each in names if features.name in (each, Path(each).stem))
        return load(name, "test", limit=limit, for_size=self.network[1].size).subset(np.arange(0, len(features), step))

    def training_mean(self) -> Tensor:
        """(P,) float64 mean of the training features."""
        full, train = self.benchmark.statistics, self.benchmark.train
        if full is not None:
            return full.mean()
        total = torch.stack([batch.features.double().sum(dim=0) for batch in train.batches()]).sum(dim=0)
        return total / len(train)

    def distances_and_deviations(self) -> dict[str, tuple[Floats, Floats]]:
        """For each set, the ID set first: average boundary distance and deviation from the training mean, (N,) each."""
        benchmark, mean = self.benchmark, self.training_mean()
        folded = geometry.Folded(benchmark.head, normalizer=None, dtype=torch.float64)
        found = {}
        for samples in (benchmark.test, *benchmark.ood):
            parts = []
            for batch in samples.batches():
                z = batch.features.double()
                deviation = torch.linalg.vector_norm(z - mean, dim=1)
                parts.append(torch.stack([folded.score(z, benchmark.head(z).argmax(dim=1)), deviation]))
            distance, deviation = torch.cat(parts, dim=1).numpy()
            found[samples.name] = (distance, deviation)
        return found


def load_models(experiment: Experiment, say: Say) -> tuple[list[EvaluatedModel], Result]:
    """The available models of an experiment, and a result that says what stands in for what and what is missing.

    Raises:
        MissingData: when no model is available.
    """
    if untested := experiment.settings.get("untested"):
        raise MissingData(f"not tested: {untested}")
    models: list[EvaluatedModel] = []
    result = Result()
    for entry in experiment.settings["models"]:
        say(f"loading {entry['title']}")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            model = _load(entry, experiment.device, say, result.missing)
        if model is not None:
            models.append(model)
            result.notes += [f"Stand-in: {entry['stand_in']}"] if "stand_in" in entry else []
        result.notes += [f"{entry['title']}: {warning.message}" for warning in caught]
    if not models:
        raise MissingData(f"{experiment.name} cannot be run here: {'; '.join(result.missing)}")
    return models, result


def _load(entry: Mapping[str, Any], device: str, say: Say, missing: list[str]) -> EvaluatedModel | None:
    title, bundle = entry["title"], entry.get("bundle")
    if bundle is not None:
        if bundle not in list_bundles():
            missing.append(f"{title}: the package has no {bundle}; `python -m fdbd.bench.make_bundle` writes it")
            return None
        benchmark = load_bundle(bundle)
        ood = [samples.name for samples in benchmark.ood]
        config = Config.from_dict({"model": bundle_model(bundle), "id": benchmark.test.name, "ood": ood})
        return EvaluatedModel(title, benchmark, entry, config, device)
    config = Config.from_dict({key: value for key, value in entry.items() if key not in _NOT_OF_CONFIG}, title)
    if config.checkpoint is not None and not Path(config.checkpoint).is_file():
        missing.append(f"{title}: no weights at {config.checkpoint}; run: {entry['train_with']}")
        return None
    try:
        benchmark = _benchmark(config, device, say, missing)
    except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
        missing.append(f"{title}: {' '.join(str(error).split())}")
        return None
    return EvaluatedModel(title, benchmark, entry, config, device)


_benchmarks: dict[str, tuple[Benchmark, list[str]]] = {}


def _benchmark(config: Config, device: str, say: Say, missing: list[str]) -> Benchmark:
    """The benchmark of a config, made once per process: several experiments ask for the same one."""
    key = f"{config} {device} {data_roots()} {cache_root()}"
    if key not in _benchmarks:
        lines: list[str] = []
        _benchmarks[key] = benchmark_of(config, say=lines.append, stage=say, device=device), lines
    benchmark, lines = _benchmarks[key]
    missing += lines
    return benchmark
