"""Detectors and guards inside other libraries: scikit-learn estimators, MLflow models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules=["mlflow", "sklearn"])
