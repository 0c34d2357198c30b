"""The code of a guard's MLflow model, which MLflow runs when it loads one; see `fdbd.deploy.mlflow`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.decision.guard_file import open_guard
from fdbd.util.extras import require

pyfunc = require("mlflow.pyfunc", "mlflow")


def load_context(self: Any, context: Any) -> None:
    """Open the guard's file."""
    self.opened = open_guard(context.artifacts["guard"])


def predict(self: Any, context: Any, model_input: Any, params: Any = None) -> Any:
    """A data frame with label, class, score, p_value and is_ood, one row for each row of the input."""
    pandas = require("pandas", "report")
    rows = torch.from_numpy(np.ascontiguousarray(model_input, dtype=np.float32))
    with torch.inference_mode():
        decision = self.opened.guard(Batch(rows) if self.opened.preprocess is None else rows)
    labels, names = decision.labels.tolist(), self.opened.class_names
    return pandas.DataFrame(
        {
            "label": labels,
            "class": [names[label] if names else None for label in labels],
            "score": decision.scores.cpu().numpy(),
            "p_value": decision.p_values.cpu().numpy(),
            "is_ood": decision.is_ood.cpu().numpy(),
        }
    )


GuardModel = type("GuardModel", (pyfunc.PythonModel,), {"load_context": load_context, "predict": predict})
require("mlflow.models", "mlflow").set_model(GuardModel())
