"""Experiments at a scale that tests can afford."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fdbd.paper import find
from fdbd.paper.finding import Finding
from fdbd.paper.runner import PROGRAMS


@pytest.fixture
def tiny():
    """Run an experiment with some settings changed."""

    def run(name: str, **changes: Any) -> Finding:
        experiment = find(name)
        settings = replace(experiment.settings, **changes)
        finding = Finding(replace(experiment, settings=settings))
        PROGRAMS[experiment.kind](finding, settings)
        return finding

    return run


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No datasets: empty folders and no downloads."""
    monkeypatch.setenv("FDBD_DATA", str(tmp_path / "no-data"))
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "no-cache"))
    monkeypatch.setenv("FDBD_OFFLINE", "1")


@pytest.fixture
def verdicts():
    """The verdict of each statement of a finding."""

    def of(finding: Finding) -> dict[str, str]:
        return {item.statement: item.verdict for item in finding.statements}

    return of
