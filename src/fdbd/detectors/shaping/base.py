"""The base class of shapings, which clip, prune or scale features (or logits) before a detector
looks at them.

Percentiles are in percent, each with the meaning that its own paper gives it: of all training
activations, of each feature's training activations, or of the sample's own.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from fdbd.core.batch import Batch, Head, Inputs
from fdbd.core.configuration import Configured, Needs, NotFittedError, Passes, expect


class Shaping(Configured):
    """A change of a sample's features before it is scored: never in place, and each row by itself.

    A subclass writes `forward` and, if it learns something from the training data, `passes` and the
    number of passes in its `needs`.

    >>> import fdbd
    >>> class Root(fdbd.Shaping):
    ...     def forward(self, features):
    ...         return features.sign() * features.abs().sqrt()
    >>> Root()(torch.tensor([[4.0, -9.0]]))
    tensor([[ 2., -3.]])
    """

    needs = Needs(passes=0)
    touches: Literal["features", "logits"] = "features"
    """What `shape` changes: "features", from which logits follow, or the "logits" alone."""

    def passes(self, head: Head) -> Passes:
        """Ask for statistics of the raw training features, like `Detector.passes`."""
        return
        yield

    def forward(self, features: Tensor) -> Tensor:
        """Shaped features (N, P) of features (N, P)."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")

    def shape(self, batch: Batch) -> Batch:
        """The shaped batch. Its logits are None if features changed: the detector computes them
        from the head."""
        shaped = batch._replace(features=self(batch.features), logits=None)
        if batch.views is not None:
            shaped = shaped._replace(views=torch.stack([self(view) for view in batch.views]))
        if batch.perturbed is not None:
            shaped = shaped._replace(perturbed=self(batch.perturbed))
        return shaped

    def observe(self, images: Inputs, classifier: Callable[[Inputs], Batch]) -> Batch:
        """Called by a Guard in place of the classifier if the shaping needs the network; see
        `Detector.observe`."""
        return classifier(images)

    def fitted(self, name: str) -> Tensor:
        """A buffer that `passes` has set, or an error that says how to fit it."""
        tensor = self._buffers.get(name)
        if tensor is None:
            kind = type(self).__name__
            raise NotFittedError(
                f"{kind} has seen no training data: fit Shaped({kind}(), detector)"
            )
        return tensor


def percent(name: str, value: float) -> float:
    """The option as percent, or an error that says what was expected."""
    return float(expect(name, value, 0 <= value < 100, "percent from 0 to below 100 (90, not 0.9)"))
