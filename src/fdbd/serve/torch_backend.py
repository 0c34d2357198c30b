"""A guard's own file behind the service: torch, on whatever device there is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from fdbd.core.batch import Batch
from fdbd.data.images import decode
from fdbd.decision.guard_file import OpenedGuard
from fdbd.serve.answers import Answers, Reason


class TorchBackend:
    """An opened guard, with the model that it was fitted on or for features alone."""

    def __init__(self, opened: OpenedGuard) -> None:
        guard = opened.guard
        self._guard, self._preprocess = guard, opened.preprocess
        threshold = guard.threshold
        if threshold is None:
            raise ValueError("the guard has no threshold, so it cannot decide: calibrate it with fdbd fit")
        head = guard.detector.head
        self.input_name = "features" if opened.preprocess is None else "images"
        side = None if opened.preprocess is None else opened.preprocess.size
        self.row_shape: tuple[int, ...] = (head.num_features,) if side is None else (3, side, side)
        self.num_classes = head.num_classes
        self.class_names: tuple[str, ...] = tuple(opened.class_names)
        self.calibration = np.sort(threshold.calibration.double().cpu().numpy())
        self.thresholds = threshold.value.double().flatten().tolist()
        self.expected_rate = threshold.target if threshold.kind == "conformal" else 1 - threshold.target
        self.name = f"{guard.detector.label}, {threshold.kind} threshold at {threshold.target:g}"
        self.promise = threshold.guarantee
        threads, is_here = torch.get_num_threads(), guard.detector.head_weight.device.type == "cpu"
        self.enter: Callable[[int], object] | None = None
        if is_here and threads > 1:
            self.enter = lambda sharing: torch.set_num_threads(max(1, threads // sharing))

    def prepare(self, image: bytes) -> NDArray[np.float32]:
        """One encoded image as the model takes it."""
        if self._preprocess is None:
            raise ValueError("this guard takes features, not images")
        rows = self._preprocess.array([decode(image, name="the image")])
        return rows.reshape(self.row_shape)

    def decide(self, rows: NDArray[np.float32]) -> Answers:
        """The guard's decisions."""
        with torch.inference_mode():
            decision = self._guard(self._inputs(rows))
        logits, labels, scores, p_values, is_ood = (part.cpu() for part in decision)
        return Answers(
            logits.float().numpy(), labels.numpy(), scores.double().numpy(), p_values.double().numpy(), is_ood.numpy()
        )

    def explain(self, rows: NDArray[np.float32], nearest: int) -> list[Reason]:
        """The nearest decision boundaries of each row."""
        with torch.inference_mode():
            why = self._guard.explain(self._inputs(rows))
        order = why.distances.nan_to_num(nan=torch.inf).argsort(dim=1)[:, : min(nearest, self.num_classes - 1)]
        return [
            Reason(labels.tolist(), distances[labels].tolist(), shares[labels].tolist())
            for labels, distances, shares in zip(order.cpu(), why.distances.cpu(), why.shares.cpu())
        ]

    def _inputs(self, rows: NDArray[np.float32]) -> torch.Tensor | Batch:
        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        return Batch(tensor) if self.input_name == "features" else tensor
