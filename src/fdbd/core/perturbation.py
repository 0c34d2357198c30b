"""Input perturbation: one signed gradient step of images towards a higher score (ODIN, the noise of
the Mahalanobis detector) or a higher loss (adversarial samples)."""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Inputs, as_tensor, required_logits
from fdbd.core.configuration import expect, one_of, positive

Network = Callable[[Tensor], Batch]
Objective = Callable[[Batch], Tensor]
Std = tuple[float, ...] | None


class InputPerturbation(nn.Module):
    """Moves each image a small step that raises its score; in-distribution images gain more from
    it.

        x' = x + ε · sign ∇ₓ objective(x)

    With ``objective="msp"`` it is the step of ODIN (Liang et al., 2018): log softmax of the
    predicted class at `temperature`. With ``objective="score"`` it is the noise of the Mahalanobis
    detector (Lee et al., 2018): the caller gives a detector's score. Costs a forward and a backward
    pass. Images are not clipped, as in both papers.

    Args:
        epsilon: step in [0, 1] pixel units; 0 leaves images as they are.
        objective: "msp", or "score" for one that is given with each call.
        temperature: T of the softmax, for "msp".
        std: by which the images were normalised, one number or one per channel (dimension 1); the
            step is divided by it. None: images are in pixel units.

    >>> from fdbd.networks.classifier import Classifier
    >>> images = torch.rand(2, 3, 2, 2)
    >>> classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    >>> moved = InputPerturbation(0.0014)(images, classifier)
    >>> bool(((moved - images).abs() < 0.0015).all())
    True
    """

    def __init__(
        self,
        epsilon: float,
        objective: Literal["msp", "score"] = "msp",
        temperature: float = 1000.0,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        expected = "a number from 0, in pixel units of [0, 1]"
        self.epsilon = float(expect("epsilon", epsilon, 0 <= epsilon < math.inf, expected))
        self.objective = one_of("objective", objective, "msp", "score")
        self.temperature = float(positive("temperature", temperature))
        self.std = checked_std(std)

    def forward(
        self, images: Inputs, classifier: Network, score: Objective | None = None
    ) -> Tensor:
        """Floating-point images (N, C, …), moved. `score`, Batch to (N,), is higher if a sample
        is more in-distribution and depends on that sample alone; None: log softmax of the predicted
        class."""
        return self.seen_and_moved(images, classifier, score)[1]

    def seen_and_moved(
        self, images: Inputs, classifier: Network, score: Objective | None = None
    ) -> tuple[Batch, Tensor]:
        """The classifier's batch of the images as they are, and the moved images, from one forward
        pass."""
        if score is None and self.objective == "score":
            raise ValueError(
                "this perturbation follows a detector's score; pass score=detector.score"
            )
        return _step(images, classifier, score or self._log_softmax, self.epsilon, self.std)

    def _log_softmax(self, batch: Batch) -> Tensor:
        # The factor T does not change the sign, and keeps gradients from underflow in half
        # precision.
        log_softmax = (_logits(batch) / self.temperature).log_softmax(dim=1)
        return self.temperature * log_softmax.max(dim=1).values

    def to_config(self) -> dict[str, object]:
        """The arguments of the constructor, as JSON values.

        >>> InputPerturbation(**InputPerturbation(0.0014, std=0.5).to_config())
        InputPerturbation(epsilon=0.0014, objective='msp', temperature=1000.0, std=[0.5])
        """
        std = None if self.std is None else list(self.std)
        return {
            "epsilon": self.epsilon,
            "objective": self.objective,
            "temperature": self.temperature,
            "std": std,
        }

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.to_config().items())


def adversarial(
    images: Inputs, labels: Tensor, classifier: Network, epsilon: float, std: Std = None
) -> Tensor:
    """Images moved by one step that raises the cross-entropy of their `labels` (N,): x' = x + ε ·
    sign ∇ₓ CE.

    The fast gradient sign method (Goodfellow et al., 2015), with which Lee et al. (2018) make
    out-of-distribution samples to weight layers by. `epsilon` and `std`, one number per channel,
    are those of `InputPerturbation`.
    """
    labels = as_tensor(labels)
    if labels.shape != (len(images),) or labels.is_floating_point():
        given = f"shape {tuple(labels.shape)} and dtype {labels.dtype}"
        raise ValueError(f"labels have {given}, expected class indices ({len(images)},)")

    def cross_entropy(batch: Batch) -> Tensor:
        logits = _logits(batch)
        return nn.functional.cross_entropy(
            logits, labels.to(logits.device, torch.int64), reduction="none"
        )

    return _step(images, classifier, cross_entropy, epsilon, std)[1]


def _step(
    images: Inputs, classifier: Network, objective: Objective, epsilon: float, std: Std
) -> tuple[Batch, Tensor]:
    """The batch of the images as they are, without gradients, and the images moved by one step."""
    images = _differentiable(images)
    if std is not None and len(std) not in (1, images.shape[1]):
        raise ValueError(
            f"std has {len(std)} entries, expected one for each of the {images.shape[1]} channels"
        )
    if epsilon == 0 or not len(images):
        return classifier(images).detach(), images
    # Independent of the caller's grad mode; only the input's gradient is computed, so that
    # parameters collect none.
    with torch.inference_mode(False), torch.enable_grad():
        moved = images.detach().clone().requires_grad_()
        seen = classifier(moved)
        if seen.grid is not None:
            raise ValueError(
                "images are perturbed by the gradient of one prediction per image, and the model "
                "predicts maps: use a detector that reads features, such as fdbd, without perturb"
            )
        score = objective(seen)
        _check_objective(score, len(images))
        (gradient,) = torch.autograd.grad(score.sum(), moved)
        direction = gradient.sign()
        if std is not None:
            # One number per channel, which is dimension 1.
            shape = [1, len(std)] + [1] * (images.ndim - 2)
            direction = direction / direction.new_tensor(std).view(shape)
        return seen.detach(), moved.detach() + epsilon * direction


def _logits(batch: Batch) -> Tensor:
    logits = required_logits(batch)
    return logits if logits.dtype == torch.float64 else logits.float()


def checked_std(std: float | Sequence[float] | None) -> Std:
    """The std per channel, or one for all, as a tuple; ValueError if one is not positive."""
    if std is None:
        return None
    values = tuple(torch.as_tensor(std, dtype=torch.float64, device="cpu").flatten().tolist())
    is_right = len(values) > 0 and all(0 < value < math.inf for value in values)
    return expect("std", values, is_right, "positive numbers, one per channel")


def _differentiable(images: Inputs) -> Tensor:
    """The images, if they can have a gradient; else a TypeError."""
    if isinstance(images, Tensor) and images.is_floating_point():
        return images
    given = f"a {type(images).__name__}"
    if isinstance(images, Tensor):
        given = f"a tensor of {images.dtype}"
    raise TypeError(
        f"input perturbation got {given}, expected one floating-point tensor (N, C, …): token ids "
        "and dicts have no gradient"
    )


def _check_objective(score: Tensor, count: int) -> None:
    """ValueError unless there is one number per sample, and a gradient."""
    if score.shape != (count,):
        raise ValueError(
            f"the objective has shape {tuple(score.shape)}, expected ({count},), one per sample"
        )
    if not score.requires_grad:
        raise ValueError(
            "the objective has no gradient with respect to the images; use a differentiable score"
        )
