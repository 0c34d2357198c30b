"""The models that an experiment evaluates: a network with its features on an ID set and on OOD
sets."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fdbd.bench import (
    Benchmark,
    Config,
    FeatureSet,
    Results,
    benchmark_of,
    list_bundles,
    load_bundle,
)
from fdbd.bench.build import network_of
from fdbd.bench.bundle import bundle_model
from fdbd.bench.config import Spec, detectors_from
from fdbd.bench.figures import Standing, standings
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.metrics import Estimate
from fdbd.networks.classifier import Classifier
from fdbd.paper.finding import Finding
from fdbd.paper.settings import ModelEntry
from fdbd.util.files import cache_root, data_roots
from fdbd.util.terminal import one_line

_benchmarks: dict[str, tuple[Benchmark, list[str]]] = {}


class MissingData(RuntimeError):
    """Nothing of an experiment can be run here. The message says what is missing and how to get
    it."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model of an experiment; `entry` is what the experiment's file says of it."""

    title: str
    benchmark: Benchmark
    entry: ModelEntry
    config: Config
    device: str = "auto"

    @cached_property
    def network(self) -> tuple[Classifier, Preprocess]:
        """The network and the preprocessing of its images."""
        named, preprocess = network_of(self.config, device=self.device)
        return Classifier(named.model, self.config.head), preprocess

    @property
    def sets(self) -> list[FeatureSet]:
        """The ID set, then each OOD set."""
        return [self.benchmark.test, *self.benchmark.ood]

    def images(self, features: FeatureSet, step: int) -> Images:
        """Every step-th image of a test set: row i belongs to row i · step of its features."""
        limit = len(features) if self.config.limit is None else self.config.limit
        sources = {self.benchmark.test.name: self.config.id, **self.config.ood}
        _, preprocess = self.network
        images = load(sources[features.name], "test", limit=limit, for_size=preprocess.longest_side)
        return images.subset(np.arange(0, len(features), step))

    def standings(self) -> dict[str, Standing]:
        """Average boundary distance and deviation from the training mean on each set, the ID set
        first."""
        return {part.samples.name: part for part in standings(self.benchmark, torch.float64)}

    def run(self, specs: Sequence[Spec], latency: bool = False) -> Results:
        """Results of detectors, as an experiment's file names them."""
        return self.benchmark.run(detectors_from(specs), latency=latency, progress=False)


def average(results: Results, name: str, metric: str) -> Estimate:
    """A metric of a detector, averaged over all OOD sets, with its joint interval.

    Raises:
        MissingData: if the detector failed.
    """
    row = results.row(name)
    if row.error:
        raise MissingData(f"{name} on {results.setting.title} failed: {row.error}")
    return results.value(row, results.main_column, metric)


def load_models(finding: Finding) -> list[EvaluatedModel]:
    """The available models of an experiment; the finding then says what stands in for what and what
    is missing.

    Raises:
        MissingData: if no model is available.
    """
    settings = finding.experiment.settings
    if settings.untested:
        raise MissingData(f"not tested: {settings.untested}")
    models: list[EvaluatedModel] = []
    for entry in settings.models:
        finding.say(f"loading {entry.title}")
        model = _load_noting_warnings(entry, finding)
        if model is not None:
            models.append(model)
    if not models:
        name = finding.experiment.name
        raise MissingData(f"{name} cannot be run here: {'; '.join(finding.missing)}")
    return models


def _load_noting_warnings(entry: ModelEntry, finding: Finding) -> EvaluatedModel | None:
    """One model, or None with a line in `finding.missing`; warnings become notes."""
    model = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            model = _load(entry, finding)
        except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
            finding.missing.append(f"{entry.title}: {one_line(error)}")
    if model is not None and entry.stand_in:
        finding.notes.append(f"Stand-in: {entry.stand_in}")
    for warning in caught:
        finding.notes.append(f"{entry.title}: {warning.message}")
    return model


def _load(entry: ModelEntry, finding: Finding) -> EvaluatedModel:
    device = finding.experiment.device
    if entry.bundle:
        benchmark = _load_bundle(entry.bundle)
        config = _config_of_bundle(entry.bundle, benchmark)
        return EvaluatedModel(entry.title, benchmark, entry, config, device)
    config = _config(entry)
    if config.checkpoint is not None and not Path(config.checkpoint).is_file():
        raise FileNotFoundError(f"no weights at {config.checkpoint}; run: {entry.train_with}")
    benchmark = _benchmark(config, finding)
    return EvaluatedModel(entry.title, benchmark, entry, config, device)


def _load_bundle(bundle: str) -> Benchmark:
    if bundle not in list_bundles():
        raise ValueError(
            f"the package has no {bundle}; `python tools/make_bundle.py` in the repository writes "
            "it"
        )
    return load_bundle(bundle)


def _config_of_bundle(bundle: str, benchmark: Benchmark) -> Config:
    """The config whose network has made a bundle's features, for detectors that need images."""
    ood = [samples.name for samples in benchmark.ood]
    values = {"model": bundle_model(bundle), "id": benchmark.test.name, "ood": ood}
    return Config.from_dict(values)


def _config(entry: ModelEntry) -> Config:
    """The part of an entry that `fdbd bench` would read from a config."""
    ood = list(entry.ood) if isinstance(entry.ood, tuple) else entry.ood
    values = {
        "model": entry.model,
        "id": entry.id,
        "ood": ood,
        "train": entry.train,
        "checkpoint": entry.checkpoint,
        "num_classes": entry.num_classes,
        "preprocess": entry.preprocess,
        "limit": entry.limit,
        "train_limit": entry.train_limit,
        "batch_size": entry.batch_size,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return Config.from_dict(given, entry.title)


def _benchmark(config: Config, finding: Finding) -> Benchmark:
    """The benchmark of a config, made once per process, since experiments share networks."""
    device = finding.experiment.device
    key = f"{config} {device} {data_roots()} {cache_root()}"
    if key not in _benchmarks:
        lines: list[str] = []
        benchmark = benchmark_of(config, say=lines.append, stage=finding.say, device=device)
        _benchmarks[key] = (benchmark, lines)
    benchmark, lines = _benchmarks[key]
    finding.missing += lines
    return benchmark
