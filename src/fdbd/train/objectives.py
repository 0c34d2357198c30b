"""Objectives of training: the contrastive losses as functions of embeddings; modules that turn
`views` copies of each image into the mean loss of the joint batch and a progress figure; and the
linear head that follows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.data.composites import PARTS, composite_labels, composites
from fdbd.networks.find_head import find_heads
from fdbd.train.distributed import gather
from fdbd.train.presets import Preset


def supcon(embeddings: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """Supervised contrastive loss, the form with the sum outside the logarithm (Khosla et al.,
    2020, eq. 2).

        L = mean_i −1/|P(i)| Σ_{p ∈ P(i)} log( exp(z_i·z_p/τ) / Σ_{a ≠ i} exp(z_i·z_a/τ) )

    where P(i) are the other samples with i's label. A sample without any is left out of the mean.
    If each image has a label of its own, which its two views share, this is SimCLR's NT-Xent.

    Args:
        embeddings: z (M, D) of unit length.
        labels: (M,).
        temperature: τ.

    >>> z = torch.eye(4)[[0, 0, 1, 1]]
    >>> round(float(supcon(z, torch.tensor([0, 0, 1, 1]), temperature=1.0)), 4)
    0.5514
    """
    similarity = embeddings @ embeddings.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=embeddings.device)
    to_others = similarity.masked_fill(itself, float("-inf"))
    log_probability = similarity - to_others.logsumexp(dim=1, keepdim=True)
    positive = (labels[:, None] == labels[None, :]) & ~itself
    count = positive.sum(dim=1)
    anchors = count > 0
    if not bool(anchors.any()):
        raise ValueError(
            "no sample of this batch has a positive: give at least two views or two samples of a "
            "class"
        )
    of_positives = (log_probability * positive).sum(dim=1)
    return (-of_positives[anchors] / count[anchors]).mean()


def nearest_accuracy(embeddings: Tensor, labels: Tensor) -> Tensor:
    """Share of samples whose most similar other sample has the same label: a progress figure,
    fraction, no gradient."""
    with torch.no_grad():
        similarity = embeddings @ embeddings.T
        similarity.fill_diagonal_(float("-inf"))
        return (labels[similarity.argmax(dim=1)] == labels).float().mean()


def rotate(images: Tensor) -> Tensor:
    """The four quarter turns of square images (N, C, S, S), stacked: (4N, C, S, S), all of turn 0
    first."""
    return torch.cat([torch.rot90(images, turn, dims=(2, 3)) for turn in range(4)])


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """Name and module of a model's one linear head."""
    heads = find_heads(model, None)
    if len(heads) > 1:
        raise ValueError(
            f"{type(model).__name__} has {len(heads)} heads, expected one: models with several are "
            "not trained here"
        )
    ((name, head),) = heads.items()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the head {name!r} of {type(model).__name__} is a convolution; training needs an "
            "nn.Linear"
        )
    return name, head


def set_head(model: nn.Module, name: str, head: nn.Module) -> None:
    """Replace the module called `name` by `head`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, head)


class Objective(nn.Module):
    """`forward(images, labels)` gives (loss, accuracy); images (views · B, 3, H, W), all of the
    first view first."""

    views: int = 1
    #: images that become one picture for the network
    joined: int = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def pictures(self, images: Tensor) -> Tensor:
        """The pictures that the network is given for a batch of images."""
        return images

    def share_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """(N,) how much of the network's answer is right, a fraction; labels are the images'."""
        return (logits.argmax(dim=1) == labels).float()


class CrossEntropy(Objective):
    """Softmax cross-entropy, no label smoothing; the accuracy is the batch's."""

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        right = self.share_right(logits.detach(), labels)
        return F.cross_entropy(logits, labels), right.mean()


class SeveralLabels(Objective):
    """Each four images become one composite (`fdbd.data.composites`), whose labels are those of its
    parts: a sigmoid and a binary cross-entropy for each label, summed over labels. The accuracy is
    the share of labels that are rightly said to be there or not."""

    joined = PARTS

    def __init__(self, model: nn.Module, num_classes: int) -> None:
        super().__init__(model)
        self.num_classes = num_classes

    def pictures(self, images: Tensor) -> Tensor:
        return composites(images).contiguous(memory_format=torch.channels_last)

    def share_right(self, logits: Tensor, labels: Tensor) -> Tensor:
        is_there = composite_labels(labels, self.num_classes).bool()
        return ((logits > 0) == is_there).float().mean(dim=1)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(self.pictures(images))
        is_there = composite_labels(labels, self.num_classes).to(logits.dtype)
        losses = F.binary_cross_entropy_with_logits(logits, is_there, reduction="none")
        right = self.share_right(logits.detach(), labels)
        return losses.sum(dim=1).mean(), right.mean()


class Contrastive(Objective):
    """A headless backbone under a two-layer projection on the unit sphere (Chen et al., 2020;
    Khosla et al., 2020)."""

    views = 2

    def __init__(self, model: nn.Module, temperature: float = 0.1, projection: int = 128) -> None:
        super().__init__(model)
        self.temperature = temperature
        name, head = head_of(model)
        self.width = head.in_features
        set_head(model, name, nn.Identity())
        self.projector = nn.Sequential(
            nn.Linear(self.width, self.width),
            nn.ReLU(inplace=True),
            nn.Linear(self.width, projection),
        )

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Penultimate features (N, P) and unit embeddings (N, D), the latter in float32 whatever
        the autocast."""
        features: Tensor = self.model(images)
        return features, F.normalize(self.projector(features).float(), dim=1)


class SupCon(Contrastive):
    """Supervised contrastive learning (Khosla et al., 2020); all processes' embeddings are each
    other's negatives."""

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        _, embeddings = self.embed(images)
        joint = gather(embeddings)
        joint_labels = gather(labels.repeat(self.views))
        loss = supcon(joint, joint_labels, self.temperature)
        return loss, nearest_accuracy(joint, joint_labels)


class CSI(Contrastive):
    """Contrasting shifted instances (Tack et al., 2020): a quarter turn of an image is another
    instance, not a view.

    The loss is NT-Xent over both views of all four turns, positives being the two views of one turn
    of one image, plus the cross-entropy of telling the turn. With `labelled`, positives share class
    and turn (the paper's sup-CSI)."""

    def __init__(
        self,
        model: nn.Module,
        temperature: float = 0.5,
        projection: int = 128,
        labelled: bool = False,
    ) -> None:
        super().__init__(model, temperature, projection)
        self.labelled = labelled
        self.turn = nn.Linear(self.width, 4)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        turns = torch.arange(4, device=images.device).repeat_interleave(len(images))
        turned = rotate(images).contiguous(memory_format=torch.channels_last)
        features, embeddings = self.embed(turned)
        told = self.turn(features)
        joint = gather(embeddings)
        joint_turns = gather(turns)
        identity = self._identity(labels, len(joint))
        contrast = supcon(joint, identity * 4 + joint_turns, self.temperature)
        accuracy = (told.detach().argmax(dim=1) == turns).float().mean()
        return contrast + F.cross_entropy(told, turns), accuracy

    def _identity(self, labels: Tensor, joint_count: int) -> Tensor:
        """(M,) a number for each sample of the joint batch: that of its class, or of its image.
        Positives have the same number and the same turn."""
        copies = self.views * 4
        if self.labelled:
            return gather(labels.repeat(copies))
        # Which image: its place in the joint batch; the same for both views and all turns.
        count = len(labels)
        own = torch.arange(count, device=labels.device).repeat(copies)
        process = torch.arange(joint_count, device=labels.device) // len(own)
        return gather(own) + count * process


OBJECTIVES: dict[str, Callable[[nn.Module, Preset], Objective]] = {
    "cross_entropy": lambda model, config: CrossEntropy(model),
    "several_labels": lambda model, config: SeveralLabels(model, config.num_classes),
    "supcon": lambda model, config: SupCon(model, config.temperature, config.projection),
    "csi": lambda model, config: CSI(
        model, config.temperature, config.projection, config.csi_labelled
    ),
}


def fit_linear(features: Tensor, labels: Tensor, config: Preset, seed: int) -> nn.Linear:
    """A linear head on frozen features (N, P), multinomial logistic regression by mini-batch SGD
    with a cosine schedule.

    Standardising makes the problem well conditioned; it is folded into the weights afterwards, so
    the head applies to raw features: W x' + b with x' = (x − m)/s is (W/s) x + (b − W m/s)."""
    mean = features.mean(dim=0)
    std = features.std(dim=0).clamp_min(1e-6)
    x = (features - mean) / std
    head = nn.Linear(x.shape[1], config.num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    batch = min(1024, len(x))
    optimizer = torch.optim.SGD(
        head.parameters(),
        lr=config.linear_lr,
        momentum=0.9,
        weight_decay=config.linear_weight_decay,
        nesterov=True,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config.linear_epochs * (len(x) // batch)
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(config.linear_epochs):
        order = torch.randperm(len(x), generator=generator)
        whole_batches = order[: len(x) // batch * batch]
        for part in torch.split(whole_batches, batch):
            optimizer.zero_grad()
            F.cross_entropy(head(x[part]), labels[part]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        head.weight.div_(std)
        head.bias.sub_(head.weight @ mean)
    return head
