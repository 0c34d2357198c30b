"""The benchmark: datasets, the feature cache, the runner, result tables and the embedded bundle."""

from .assemble import benchmark_of
from .bundle import list_bundles, load_bundle
from .config import Config
from .features import FeatureSet
from .results import Results, Row, Setting
from .runner import Benchmark, default_detectors

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
