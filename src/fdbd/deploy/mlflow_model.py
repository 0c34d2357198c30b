"""The code of a guard's MLflow model, which MLflow runs when it loads one; see `fdbd.deploy.mlflow`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.data.features import RowBatch
from fdbd.decision.guard_file import open_guard
from fdbd.jobs.output import decide
from fdbd.util.extras import require


def load_context(self: Any, context: Any) -> None:
    """Open the guard's file."""
    self.opened = open_guard(context.artifacts["guard"])


def predict(self: Any, context: Any, model_input: Any, params: Any = None) -> Any:
    """A data frame with label, class, score, p_value and is_ood, one row for each row of the input."""
    rows = torch.from_numpy(np.ascontiguousarray(model_input, dtype=np.float32))
    inputs = Batch(rows) if self.opened.preprocess is None else rows
    columns = decide(self.opened.guard, RowBatch(range(len(rows)), inputs, {}), self.opened.class_names)
    found = {name: np.ma.getdata(columns[name]) for name in ("label", "class", "score", "p_value", "is_ood")}
    return require("pandas", "report").DataFrame({**found, "class": columns["class"].tolist()})


PythonModel = require("mlflow.pyfunc", "mlflow").PythonModel
GuardModel = type("GuardModel", (PythonModel,), {"load_context": load_context, "predict": predict})
require("mlflow.models", "mlflow").set_model(GuardModel())
