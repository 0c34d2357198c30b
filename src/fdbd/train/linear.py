"""The linear head that follows contrastive training: multinomial logistic regression on frozen features."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.train.data import Images, normalise, to_float


@torch.no_grad()
def features_of(
    model: nn.Module,
    images: Images,
    indices: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    flip: bool = False,
    tick: Callable[[int], None] = lambda count: None,
) -> Tensor:
    """What a model in evaluation mode says of some images, (N, …) on the CPU in float32; `tick` hears of each batch."""
    model.eval()
    device = next(model.parameters()).device
    out = []
    for part in torch.split(indices, 500):
        batch = normalise(to_float(images.batch(part)[0].to(device)), mean, std)
        out.append(model(batch.flip(3) if flip else batch).float().cpu())
        tick(len(part))
    return torch.cat(out)


def fit_linear(
    features: Tensor, labels: Tensor, num_classes: int, *, epochs: int, lr: float, weight_decay: float, seed: int
) -> nn.Linear:
    """A linear head on features (N, P) by mini-batch SGD with a cosine schedule; the features stay as they are.

    Standardising makes the problem well conditioned; it is folded into the weights afterwards, so the head applies to
    raw features: W x' + b with x' = (x − m)/s is (W/s) x + (b − W m/s).
    """
    mean, std = features.mean(dim=0), features.std(dim=0).clamp_min(1e-6)
    x = (features - mean) / std
    head = nn.Linear(x.shape[1], num_classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    batch = min(1024, len(x))
    steps = epochs * (len(x) // batch)
    optimizer = torch.optim.SGD(head.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for part in torch.split(order[: len(x) // batch * batch], batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(head(x[part]), labels[part])
            loss.backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        head.weight.div_(std)
        head.bias.sub_(head.weight @ mean)
    return head
