"""GradNorm: the size of the gradient that would pull a prediction to uniform."""

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Needs, Paper, positive, required_logits


class GradNorm(Detector):
    """Gradient of the divergence from the uniform distribution, over the head's weights (Huang et
    al., 2021).

        score(z) = ‖∂ KL(u ‖ softmax(logits / T)) / ∂W‖₁ = ‖z‖₁ · Σ_c |softmax(logits / T)_c − 1/C|
        / T

    The gradient is an outer product, so its norm is a product of norms: O(P + C) per sample and no
    backward pass.

    Args:
        temperature: T; 1 is the paper's.

    >>> import fdbd, torch
    >>> detector = fdbd.GradNorm().fit(fdbd.Batch(torch.eye(3)), fdbd.Head(torch.eye(3)))
    >>> detector.score(fdbd.Batch(torch.tensor([[3.0, 0.0, 0.0], [1.0, 1.0, 1.0]])))
    tensor([3.4567, 0.0000])
    """

    name = "gradnorm"
    paper = Paper(
        "On the Importance of Gradients for Detecting Distributional Shifts in the Wild",
        "Huang et al.",
        "NeurIPS",
        2021,
    )
    needs = Needs(logits=True, passes=0)

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)

    def formula(self, batch: Batch) -> Tensor:
        probabilities = (required_logits(batch) / self.temperature).softmax(dim=1)
        uneven = (probabilities - 1 / probabilities.shape[1]).abs().sum(dim=1) / self.temperature
        # Five times as fast as vector_norm(…, 1).
        length = batch.features.abs().sum(dim=1)
        return length * uneven
