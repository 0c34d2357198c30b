"""A guard as an MLflow model: `log_model`, `save_model`, and `mlflow.pyfunc.load_model` to ask it.

The model is code of this package and the guard's own file: nothing is pickled, and the file runs no code.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fdbd.util.extras import require
from fdbd.util.version import __version__


def save_model(guard: str | os.PathLike[str], path: str | os.PathLike[str], **options: Any) -> None:
    """Write an MLflow model of a guard's file into a folder; `options` are further arguments of
    `mlflow.pyfunc.save_model`. One that names its model takes prepared images (N, 3, H, W), with weights as found by
    `fdbd score`; any other takes features (N, D).

    >>> import fdbd, mlflow, tempfile, torch
    >>> guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit([fdbd.Batch(torch.rand(50, 3))])
    >>> file, folder = Path(tempfile.mkdtemp(), "guard.safetensors"), Path(tempfile.mkdtemp(), "model")
    >>> guard.calibrate([fdbd.Batch(torch.rand(50, 3))], tpr=0.9).save(file)
    >>> save_model(file, folder)
    >>> list(mlflow.pyfunc.load_model(str(folder)).predict(torch.rand(4, 3).numpy()))[:2]
    ['label', 'class']
    """
    require("mlflow", "mlflow").pyfunc.save_model(os.fspath(path), **{**_arguments(guard), **options})


def log_model(guard: str | os.PathLike[str], name: str = "guard", **options: Any) -> Any:
    """Log the same model to the active run of MLflow under a name, and return what MLflow says of it; `options` are
    further arguments of `mlflow.pyfunc.log_model`, such as `registered_model_name`.

    >>> log_model("missing.safetensors")  # `save_model` shows it with a file
    Traceback (most recent call last):
    FileNotFoundError: no guard at 'missing.safetensors': no such file
    """
    return require("mlflow", "mlflow").pyfunc.log_model(name=name, **{**_arguments(guard), **options})


def _arguments(guard: str | os.PathLike[str]) -> dict[str, Any]:
    if not Path(guard).is_file():
        raise FileNotFoundError(f"no guard at {os.fspath(guard)!r}: no such file")
    return {
        "python_model": str(Path(__file__).with_name("mlflow_model.py")),
        "artifacts": {"guard": str(Path(guard).absolute())},
        "pip_requirements": [f"fdbd[mlflow]=={__version__}"],
    }
