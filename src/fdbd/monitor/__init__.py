"""Watching a stream of decisions for drift. `stream` and `drift` need neither a guard nor torch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "drift": ["DriftTest"],
        "features": ["FeatureDrift", "WindowResult"],
        "monitor": ["Monitor"],
        "stream": ["Snapshot", "StreamMonitor"],
    },
)
