"""What is minimised, as modules: a network (and what it is trained with) in, a loss and a progress figure out.

An objective takes `views` copies of each image and returns the mean loss of the joint batch, so the training loop is
one loop for all of them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.networks.find_head import find_heads
from fdbd.train.distributed import gather
from fdbd.train.losses import nearest_accuracy, rotate, supcon

OBJECTIVES = ("cross_entropy", "supcon", "csi")


def head_of(model: nn.Module) -> tuple[str, nn.Linear]:
    """Name and module of a model's one linear head."""
    heads = find_heads(model, None)
    if len(heads) > 1:
        raise ValueError(f"{type(model).__name__} has {len(heads)} heads, and training knows models with one")
    ((name, head),) = heads.items()
    if not isinstance(head, nn.Linear):
        raise ValueError(f"the head {name!r} of {type(model).__name__} is a convolution; training needs an nn.Linear")
    return name, head


def set_head(model: nn.Module, name: str, head: nn.Module) -> None:
    """Put `head` where the module called `name` stands."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, head)


class Objective(nn.Module):
    """`forward(images, labels)` gives (loss, accuracy); images (views · B, 3, H, W), all of the first view first."""

    views: int = 1

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class CrossEntropy(Objective):
    """Softmax cross-entropy, no label smoothing; the accuracy is the batch's."""

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model(images)
        return F.cross_entropy(logits, labels), (logits.detach().argmax(dim=1) == labels).float().mean()


class Contrastive(Objective):
    """A headless backbone under a two-layer projection on the unit sphere (Chen et al., 2020; Khosla et al., 2020)."""

    views = 2

    def __init__(self, model: nn.Module, temperature: float = 0.1, projection: int = 128) -> None:
        super().__init__(model)
        self.temperature = temperature
        name, head = head_of(model)
        width = head.in_features
        set_head(model, name, nn.Identity())
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, projection))

    def embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Penultimate features (N, P) and unit embeddings (N, D), the latter in float32 whatever the autocast."""
        features: Tensor = self.model(images)
        return features, F.normalize(self.projector(features).float(), dim=1)


class SupCon(Contrastive):
    """Supervised contrastive learning (Khosla et al., 2020); all processes' embeddings are each other's negatives."""

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        _, embeddings = self.embed(images)
        joint, joint_labels = gather(embeddings), gather(labels.repeat(self.views))
        return supcon(joint, joint_labels, self.temperature), nearest_accuracy(joint, joint_labels)


class CSI(Contrastive):
    """Contrasting shifted instances (Tack et al., 2020): a quarter turn of an image is another instance, not a view.

    The loss is NT-Xent over both views of all four turns, positives being the two views of one turn of one image, plus
    the cross-entropy of telling the turn. With `labelled`, positives share class and turn (the paper's sup-CSI).
    """

    def __init__(
        self, model: nn.Module, temperature: float = 0.5, projection: int = 128, labelled: bool = False
    ) -> None:
        super().__init__(model, temperature, projection)
        self.labelled = labelled
        first = self.projector[0]
        assert isinstance(first, nn.Linear)
        self.turn = nn.Linear(first.in_features, 4)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        count = len(images)
        turns = torch.arange(4, device=images.device).repeat_interleave(count)
        features, embeddings = self.embed(rotate(images).contiguous(memory_format=torch.channels_last))
        told = self.turn(features)
        joint, joint_turns = gather(embeddings), gather(turns)
        if self.labelled:
            identity = gather(labels.repeat(self.views * 4))
        else:
            # Which image: its place in the joint batch; the same for both views and all turns.
            batch = len(labels)
            own = torch.arange(batch, device=images.device).repeat(self.views * 4)
            identity = gather(own) + batch * (torch.arange(len(joint), device=images.device) // len(own))
        loss = supcon(joint, identity * 4 + joint_turns, self.temperature) + F.cross_entropy(told, turns)
        return loss, (told.detach().argmax(dim=1) == turns).float().mean()
