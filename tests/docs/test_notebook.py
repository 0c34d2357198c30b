"""The notebook for Colab, cell by cell, with this package instead of the one that it installs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_minute.ipynb"


def test_the_notebook_runs_and_says_of_each_picture_what_it_claims(tmp_path, monkeypatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict = {}
    for cell in cells:
        code = "".join(cell["source"])
        if cell["cell_type"] == "code" and not code.startswith("%pip"):
            assert cell["outputs"] == [], "the notebook is kept without output"
            exec(compile(code, str(NOTEBOOK), "exec"), names)
    flagged = dict(zip(names["names"], names["decision"].is_ood.tolist()))
    assert [name for name, is_ood in flagged.items() if is_ood] == ["galaxies", "bricks", "chart"]
    assert (tmp_path / "guard.safetensors").is_file()
