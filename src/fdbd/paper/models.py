"""The models that an experiment evaluates: a network with its features on an ID set and on OOD
sets."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
from fdbd.bench.bundle import bundle_model
from fdbd.bench.config import Spec, detectors_from, network_of
from fdbd.bench.figures import Standing, standings
from fdbd.core.preprocessing import Preprocess
from fdbd.data.datasets import DatasetUnavailable, Images, load
from fdbd.metrics import Estimate
from fdbd.networks.classifier import Classifier
from fdbd.paper.result import Result
from fdbd.util.files import cache_root, data_roots
from fdbd.util.terminal import one_line

_NOT_OF_CONFIG = (
    "title",
    "train_with",
    "bundle",
    "detectors",
    "images",
    "stand_in",
    "every",
    "layers",
)
_benchmarks: dict[str, tuple[Benchmark, list[str]]] = {}


class MissingData(RuntimeError):
    """Nothing of an experiment can be run here. The message says what is missing and how to get
    it."""


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

    @property
    def sets(self) -> list[FeatureSet]:
        """The ID set, then each OOD set."""
        return [self.benchmark.test, *self.benchmark.ood]

    def images(self, features: FeatureSet, step: int) -> Images:
        """Every step-th image of a test set: row i belongs to row i · step of its features."""
        limit = len(features) if self.config.limit is None else self.config.limit
        source = {self.benchmark.test.name: self.config.id, **self.config.ood}[features.name]
        images = load(source, "test", limit=limit, for_size=self.network[1].size)
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
        MissingData: where the detector failed.
    """
    row = results.row(name)
    if row.error:
        raise MissingData(f"{name} on {results.setting.title} failed: {row.error}")
    return results.value(row, results.main_column, metric)


def load_models(result: Result) -> list[EvaluatedModel]:
    """The available models of an experiment; the result then says what stands in for what and what
    is missing.

    Raises:
        MissingData: when no model is available.
    """
    if untested := result.settings.get("untested"):
        raise MissingData(f"not tested: {untested}")
    models: list[EvaluatedModel] = []
    for entry in result.settings["models"]:
        result.say(f"loading {entry['title']}")
        values = {key: value for key, value in entry.items() if key not in _NOT_OF_CONFIG}
        config = None if "bundle" in entry else Config.from_dict(values, entry["title"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            try:
                config, benchmark = _load(entry, config, result)
                models.append(
                    EvaluatedModel(
                        entry["title"], benchmark, entry, config, result.experiment.device
                    )
                )
                result.notes += [f"Stand-in: {entry['stand_in']}"] if "stand_in" in entry else []
            except (DatasetUnavailable, OSError, ValueError, RuntimeError, ImportError) as error:
                result.missing.append(f"{entry['title']}: {one_line(error)}")
        result.notes += [f"{entry['title']}: {warning.message}" for warning in caught]
    if not models:
        raise MissingData(
            f"{result.experiment.name} cannot be run here: {'; '.join(result.missing)}"
        )
    return models


def _load(
    entry: Mapping[str, Any], config: Config | None, result: Result
) -> tuple[Config, Benchmark]:
    """The benchmark of a bundle, with a config of its network; or that of a config, made once per
    process."""
    if config is None:
        if (bundle := entry["bundle"]) not in list_bundles():
            raise ValueError(
                f"the package has no {bundle}; `python tools/make_bundle.py` in the repository writes it"
            )
        benchmark = load_bundle(bundle)
        ood = [samples.name for samples in benchmark.ood]
        return Config.from_dict(
            {"model": bundle_model(bundle), "id": benchmark.test.name, "ood": ood}
        ), benchmark
    if config.checkpoint is not None and not Path(config.checkpoint).is_file():
        raise FileNotFoundError(f"no weights at {config.checkpoint}; run: {entry['train_with']}")
    device = result.experiment.device
    key = f"{config} {device} {data_roots()} {cache_root()}"
    if key not in _benchmarks:
        lines: list[str] = []
        _benchmarks[key] = (
            benchmark_of(config, say=lines.append, stage=result.say, device=device),
            lines,
        )
    benchmark, lines = _benchmarks[key]
    result.missing += lines
    return config, benchmark
