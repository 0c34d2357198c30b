"""The benchmark: datasets, the feature cache, the runner, result tables and the embedded bundle."""

from fdbd.bench.assemble import benchmark_of
from fdbd.bench.bundle import list_bundles, load_bundle
from fdbd.bench.config import Config
from fdbd.bench.features import FeatureSet
from fdbd.bench.results import Results, Row, Setting
from fdbd.bench.runner import Benchmark, default_detectors

__all__ = [
    "Benchmark",
    "Config",
    "FeatureSet",
    "Results",
    "Row",
    "Setting",
    "benchmark_of",
    "default_detectors",
    "list_bundles",
    "load_bundle",
]
