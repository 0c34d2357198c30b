"""ODIN: temperature and a small step of the input, seen through the whole network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fdbd.core.batch import Batch
from fdbd.detectors.base import Paper
from fdbd.detectors.msp import MSP
from fdbd.networks.perturbation import InputPerturbation


class ODIN(MSP):
    """Softmax at a high temperature of an image that was moved to raise it (Liang et al., 2018):

        max_c softmax(f(x') / T)_c,   x' = x + ε · sign ∇ₓ log softmax_ŷ(f(x) / T)

    The fDBD paper prints the step with the other sign, which would lower the softmax. Works only in a Guard, which lets
    `network_batch` run the network: two forward passes and a backward one. The same as
    ``Guard(model, MSP(1000), perturb=InputPerturbation(0.0014))``.

    Args:
        temperature: T.
        epsilon: ε in [0, 1] pixel units.
        std: the per-channel std by which images were normalised, or one number; ε is divided by it. None: images are in
            pixel units.
    """

    name = "odin"
    paper = Paper(
        "Enhancing The Reliability of Out-of-distribution Image Detection in Neural Networks",
        "Liang et al.",
        "ICLR",
        2018,
    )
    needs_network = True

    def __init__(
        self, temperature: float = 1000.0, epsilon: float = 0.0014, std: float | Sequence[float] | None = None
    ) -> None:
        super().__init__(temperature)
        self._perturbation = InputPerturbation(epsilon, temperature=temperature, std=std)
        self.epsilon, self.std = self._perturbation.epsilon, self._perturbation.std

    def network_batch(self, images: Any, classifier: Callable[[Any], Batch]) -> Batch:
        """The model's batch of the images, and as its one view (1, N, P) the features of the moved images."""
        with torch.no_grad():
            plain, moved = self._perturbation.seen_and_moved(images, classifier)
            return plain._replace(views=classifier(moved).features[None])

    def prepare(self, batch: Batch) -> Batch:
        if batch.views is None:
            raise ValueError(
                "odin moves the images along the network's gradient, so features are not enough: use it as "
                "fdbd.Guard(model, 'odin') and call guard(images)"
            )
        return super().prepare(Batch(batch.views[0]))
