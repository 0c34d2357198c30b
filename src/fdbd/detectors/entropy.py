"""The entropy of the predicted distribution."""

from torch import Tensor

from fdbd.detectors.base import Batch, Detector, Needs, Paper, required_logits


class Entropy(Detector):
    """Negative Shannon entropy of the softmax, in nats (Chan et al., 2021): Σ_c p_c log p_c. O(C)
    per sample.

    0 for a certain prediction, −log C for one that says nothing.

    >>> import fdbd, torch
    >>> detector = Entropy().fit(Batch(torch.eye(2)), fdbd.Head(torch.eye(2)))
    >>> detector.score(Batch(torch.zeros(1, 2)))
    tensor([-0.6931])
    """

    name = "entropy"
    paper = Paper(
        "Entropy Maximization and Meta Classification for Out-of-Distribution Detection in Semantic"
        " Segmentation",
        "Chan et al.",
        "ICCV",
        2021,
    )
    needs = Needs(features=False, logits=True, passes=0)

    def formula(self, batch: Batch) -> Tensor:
        log_p = required_logits(batch).log_softmax(dim=1)
        return (log_p.exp() * log_p).sum(dim=1)
