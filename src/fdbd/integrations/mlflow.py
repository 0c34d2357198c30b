"""A guard as an MLflow model: `log_model`, `save_model`, and `mlflow.pyfunc.load_model` to ask it.

The model is this module and the guard's own file: nothing is pickled, and the file runs no code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.data.features import RowBatch
from fdbd.decision.guard_file import open_guard
from fdbd.decision.rows import decide_rows
from fdbd.util.extras import require
from fdbd.util.version import __version__


def save_model(guard: str | os.PathLike[str], path: str | os.PathLike[str], **options: Any) -> None:
    """Write an MLflow model of a guard's file into a folder; `options` are further arguments of
    `mlflow.pyfunc.save_model`. One that names its model takes prepared images (N, 3, H, W), with
    weights as found by `fdbd score`; any other takes features (N, D).

    >>> import fdbd, mlflow, tempfile, torch
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> file = Path(tempfile.mkdtemp(), "guard.safetensors")
    >>> folder = Path(tempfile.mkdtemp(), "model")
    >>> guard.calibrate([fdbd.Batch(torch.rand(50, 3))], tpr=0.9).save(file)
    >>> save_model(file, folder)
    >>> list(mlflow.pyfunc.load_model(str(folder)).predict(torch.rand(4, 3).numpy()))[:2]
    ['label', 'class']
    """
    require("mlflow", "mlflow").pyfunc.save_model(
        os.fspath(path), **{**_arguments(guard), **options}
    )


def log_model(guard: str | os.PathLike[str], name: str = "guard", **options: Any) -> Any:
    """Log the same model to the active run of MLflow under a name, and return what MLflow says of
    it; `options` are further arguments of `mlflow.pyfunc.log_model`, such as
    `registered_model_name`.

    >>> log_model("missing.safetensors")  # `save_model` shows it with a file
    Traceback (most recent call last):
    FileNotFoundError: no guard at 'missing.safetensors': no such file
    """
    return require("mlflow", "mlflow").pyfunc.log_model(
        name=name, **{**_arguments(guard), **options}
    )


def _arguments(guard: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(guard).is_file():
        raise FileNotFoundError(f"no guard at {os.fspath(guard)!r}: no such file")
    requirements = [f"fdbd[mlflow]=={__version__}"]
    return {
        "loader_module": __name__,
        "data_path": str(Path(guard).absolute()),
        "pip_requirements": requirements,
    }


def _load_pyfunc(path: str) -> _Model:
    """What MLflow calls to load a model."""
    return _Model(path)


class _Model:
    def __init__(self, path: str) -> None:
        self.opened = open_guard(path)

    def predict(self, rows: Any, params: Any = None) -> Any:
        """A data frame with label, class, score, p_value and is_ood, one row for each row of the
        input."""
        inputs = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.float32))
        takes_features = self.opened.preprocess is None
        taken = Batch(inputs) if takes_features else inputs
        batch = RowBatch(range(len(inputs)), taken, {})
        decided = decide_rows(self.opened.guard, batch, self.opened.class_names)
        frame = {
            "label": np.ma.getdata(decided["label"]),
            # As a list, a class that is not known is None.
            "class": decided["class"].tolist(),
            "score": np.ma.getdata(decided["score"]),
            "p_value": np.ma.getdata(decided["p_value"]),
            "is_ood": np.ma.getdata(decided["is_ood"]),
        }
        return require("pandas", "report").DataFrame(frame)
