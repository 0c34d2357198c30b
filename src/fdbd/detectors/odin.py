"""ODIN: temperature and a small step of the input, seen through the whole network."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fdbd.core.perturbation import InputPerturbation
from fdbd.detectors.base import Batch, Inputs, Needs, Paper, required_perturbed
from fdbd.detectors.msp import MSP
from fdbd.detectors.softmax import largest_probability


class ODIN(MSP):
    """Softmax at a high temperature of an image that was moved to raise it (Liang et al., 2018):

        max_c softmax(f(x') / T)_c,   x' = x + ε · sign ∇ₓ log softmax_ŷ(f(x) / T)

    The fDBD paper prints the step with the other sign, which would lower the softmax. Works only in
    a Guard, which lets `observe` run the network: two forward passes and a backward one. The same
    as ``Guard(model, MSP(1000), perturb=InputPerturbation(0.0014))``.

    Args:
        temperature: T.
        epsilon: ε in [0, 1] pixel units.
        std: the per-channel std by which images were normalised, or one number; ε is divided by it.
            None: images are in pixel units.

    >>> import fdbd
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    ... )
    >>> guard = fdbd.Guard(model, fdbd.ODIN(epsilon=0.01)).fit([torch.rand(32, 3, 2, 2)])
    >>> guard.score(torch.rand(5, 3, 2, 2)).shape
    torch.Size([5])
    """

    name = "odin"
    paper = Paper(
        "Enhancing The Reliability of Out-of-distribution Image Detection in Neural Networks",
        "Liang et al.",
        "ICLR",
        2018,
    )
    needs = Needs(features=False, perturbed=True, network=True, passes=0)

    def __init__(
        self,
        temperature: float = 1000.0,
        epsilon: float = 0.0014,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__(temperature)
        self._perturbation = InputPerturbation(epsilon, temperature=temperature, std=std)
        self.epsilon = self._perturbation.epsilon
        self.std = self._perturbation.std

    def observe(
        self, images: Inputs, classifier: Callable[[Inputs], Batch], labels: Tensor | None = None
    ) -> Batch:
        """The model's batch of the images, and the features of the moved images."""
        with torch.no_grad():
            plain, moved = self._perturbation.seen_and_moved(images, classifier)
            return plain._replace(perturbed=classifier(moved).features)

    def formula(self, batch: Batch) -> Tensor:
        logits = self.head(required_perturbed(batch))
        return largest_probability(logits / self.temperature)
