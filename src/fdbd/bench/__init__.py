"""The benchmark: the feature cache, the runner, its results and the embedded bundle."""

from fdbd.bench.build import benchmark_of
from fdbd.bench.bundle import list_bundles, load_bundle
from fdbd.bench.config import Config
from fdbd.bench.results import Results
from fdbd.bench.rows import Row, Setting
from fdbd.bench.runner import Benchmark, default_detectors
from fdbd.data.features import FeatureSet

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
