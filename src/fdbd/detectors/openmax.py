"""OpenMax: logits revised by how extreme their distance from the class's mean is."""

from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from fdbd.core.linear_algebra import in_blocks
from fdbd.detectors.base import (
    Batch,
    Detector,
    Head,
    Needs,
    Paper,
    Passes,
    at_least_one,
    required_labels,
    required_logits,
)
from fdbd.detectors.softmax import logsumexp
from fdbd.fitting.sample_size import warn_of_few_samples
from fdbd.fitting.statistics import ClassMeans, in_float64, with_logits
from fdbd.fitting.weibull import Tails, fit_weibull


class OpenMax(Detector):
    """Odds of the known classes against an unknown one that extreme-value theory adds (Bendale &
    Boult, 2016).

        score = log Σ_c exp(v_c − m_c) − Σ_c m_c = log P(known) − log P(unknown)
        m_c = v_c · F_c(‖v − μ_c‖) · (α − r_c)/α

    v are the logits, μ_c the mean logits of the training samples correctly predicted as c, F_c the
    Weibull law of the largest distances among them, r_c = 0, 1, … the rank of c; the m_c of all but
    the α largest logits are 0. The odds rank like 1 − P(unknown) without rounding to 1. O(αC) per
    sample; fitting keeps `tail` distances per class.

    Distances are Euclidean, as in the paper's formula; the authors' code adds a share of the cosine
    distance. A class without a correctly predicted training sample is extreme at any distance (F_c
    = 1). As published, logits are multiplied, which assumes that large ones are positive.

    Args:
        tail: number of largest distances to which each Weibull law is fitted.
        alpha: number of largest logits that are revised; all if there are fewer.

    >>> features = 4 * torch.eye(3).repeat(20, 1) + torch.rand(60, 3)
    >>> labels = torch.arange(3).repeat(20)
    >>> detector = OpenMax().fit(Batch(features, None, labels), Head(torch.eye(3)))
    >>> known_and_unknown = Batch(torch.tensor([[4.5, 0.5, 0.5], [1.5, 1.5, 1.5]]))
    >>> detector.score(known_and_unknown).argmax()
    tensor(0)
    """

    name = "openmax"
    paper = Paper("Towards Open Set Deep Networks", "Bendale and Boult", "CVPR", 2016)
    needs = Needs(features=False, logits=True, labels=True, passes=2)
    centers: Annotated[Tensor, "C C"]
    laws: Annotated[Tensor, "C 3"]
    seen: Annotated[Tensor, "C"]

    def __init__(self, tail: int = 20, alpha: int = 10) -> None:
        # The defaults are those of the authors' code.
        super().__init__()
        self.tail = at_least_one("tail", tail, "a number of at least 1")
        self.alpha = at_least_one("alpha", alpha, "a number of at least 1")

    def passes(self, head: Head) -> Passes:
        classes = head.num_classes
        means = yield from with_logits(ClassMeans(classes, classes, right_logits), head)
        seen = means.counts > 0
        if not seen.any():
            raise ValueError(
                "no training sample is predicted as its label, so OpenMax has no class to model: "
                "check that labels and head count the classes in the same order"
            )
        fewest = int(means.counts[seen].min())
        tail = f"a tail of {self.tail} distances in each class"
        warn_of_few_samples(f"{self.label}'s smallest class", tail, fewest, self.tail)
        centers = torch.where(seen[:, None], means.means(), 0)
        distances = partial(distances_to_own, centers=centers)
        tails = yield from with_logits(Tails(classes, self.tail, distances), head)
        location, scale, shape = fit_weibull(tails.largest[seen], self._rounding(centers))
        laws = torch.zeros(classes, 3, dtype=torch.float64)
        laws[seen] = torch.stack([location, scale.reciprocal(), shape], dim=1)
        self.set_buffers(centers=centers, laws=laws, seen=seen)

    def _rounding(self, centers: Tensor) -> float:
        """The most by which distances of equal samples may differ: logits are computed in the dtype
        of the fit, and a batch of one is multiplied in another order than a large one."""
        longest = torch.linalg.vector_norm(centers, dim=1).amax().item()
        return float(256 * torch.finfo(self.fit_dtype).eps * longest)

    def formula(self, batch: Batch) -> Tensor:
        logits = required_logits(batch)
        table = min(self.alpha, logits.shape[1]) * logits.shape[1]
        return in_blocks(self._odds, logits, table)

    def _odds(self, logits: Tensor) -> Tensor:
        """(N,) log-odds of the known classes against the unknown one."""
        top = logits.topk(min(self.alpha, logits.shape[1]), dim=1)
        extreme = self._extreme(logits, top.indices)
        ranks = torch.arange(top.values.shape[1], device=logits.device, dtype=logits.dtype)
        moved = top.values * extreme * (1 - ranks / top.values.shape[1])
        revised = logits.scatter(1, top.indices, top.values - moved)
        return logsumexp(revised) - moved.sum(dim=1)

    def _extreme(self, logits: Tensor, classes: Tensor) -> Tensor:
        """(N, α) F_c(‖v − μ_c‖) for these classes (N, α): how extreme the distance from each is."""
        finfo = torch.finfo(logits.dtype)
        # By subtraction: a matrix product would cancel, and in another way in a batch of one.
        differences = logits.unsqueeze(1) - self.centers[classes]
        squared = differences.square().sum(dim=2)
        distance = squared.clamp_min(finfo.tiny).sqrt()
        location, inverse_scale, shape = self.laws[classes].unbind(dim=2)
        relative = ((distance - location) * inverse_scale).clamp(finfo.eps - 1, 1e3)
        # log(1 + relative), whose small values ONNX would round away.
        log = 2 * torch.atanh(relative / (2 + relative))
        # exp(−exp(20)) is 0 in float64.
        extreme = 1 - (-(shape * log).clamp_max(20).exp()).exp()
        return torch.where(self.seen[classes], extreme, 1.0)


def right_logits(batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits and classes of those samples of a batch whose predicted class is their label."""
    logits = required_logits(batch)
    labels = required_labels(batch)
    right = logits.argmax(dim=1).cpu() == labels
    return logits[right.to(logits.device)], labels[right]


def distances_to_own(batch: Batch, centers: Tensor) -> tuple[Tensor, Tensor]:
    """Distances (M,) of the correctly predicted samples from their class's center, in float64, and
    the classes (M,)."""
    logits, classes = right_logits(batch)
    rows = max(1, (1 << 20) // centers.shape[1])
    distances = [torch.zeros(0, dtype=torch.float64)]
    for piece, own in zip(in_float64(logits, rows), torch.split(classes, rows)):
        distances.append(torch.linalg.vector_norm(piece - centers[own], dim=1))
    return torch.cat(distances), classes
