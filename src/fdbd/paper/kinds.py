"""The programs behind experiments, by the name that their files give as `kind`; imported when they run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fdbd.paper.experiment import Experiment
from fdbd.paper.finding import Finding

Say = Callable[[str], None]
"""Told what is being done, in a few words."""

KINDS = {
    "detector-table": "tables:detector_table",
    "domain-shift": "shift:domain_shift",
    "overview": "pictures:overview",
    "regularization": "pictures:regularization",
    "deviation": "pictures:deviation",
    "distances": "pictures:distances",
    "nearest-k": "pictures:nearest_k",
    "distance-quality": "quality:distance_quality",
    "theorem": "theorem:theorem",
    "proposition-1": "propositions:proposition_1",
    "proposition-2": "propositions:proposition_2",
    "proposition-kl": "divergence:proposition_kl",
    "complexity": "complexity:complexity",
}


def run_kind(experiment: Experiment, say: Say) -> Finding:
    """Run an experiment."""
    module, function = KINDS[experiment.kind].split(":")
    program: Any = getattr(importlib.import_module(f".{module}", __package__), function)
    finding: Finding = program(experiment, say)
    return finding
