"""A guard's own file behind the service: torch, on whatever device there is."""

from __future__ import annotations

import numpy as np
import torch

from fdbd.core.batch import Batch
from fdbd.decision.guard_file import OpenedGuard
from fdbd.decision.maps import MapDecision
from fdbd.serve.backend import MAP_BATCH_SIZE, Answers, Backend, Reason, Rows


class TorchBackend(Backend):
    """An opened guard, with the model that it was fitted on or for features alone."""

    def __init__(self, opened: OpenedGuard) -> None:
        self._guard = opened.guard
        self.preprocess = opened.preprocess
        detector = opened.guard.detector
        map_threshold = opened.guard.map_threshold
        self.is_of_maps = map_threshold is not None
        threshold = opened.guard.threshold
        if map_threshold is not None:
            # Of maps, the service watches the images as a whole.
            threshold = map_threshold.image_threshold
        if threshold is None:
            raise ValueError(
                "the guard has no threshold, so it cannot decide: calibrate it with fdbd fit"
            )
        self.promise = threshold.guarantee
        if map_threshold is not None:
            self.promise = map_threshold.guarantee
        tokenizer = opened.tokenizer
        if tokenizer is not None:
            self.take_texts(tokenizer)
        elif self.preprocess is None:
            self.input_name = "features"
            self.row_shape = (detector.head.num_features,)
        else:
            self.input_name = "images"
            self.row_shape = self.preprocess.shape
        self.num_classes = detector.head.num_classes
        self.class_names = tuple(opened.class_names)
        self.calibration = np.sort(threshold.calibration.double().cpu().numpy())
        self.thresholds = threshold.value.double().flatten().tolist()
        self.expected_rate = threshold.expected_rate
        self.name = f"{detector.label}, {threshold.kind} threshold at {threshold.target:g}"
        self.id = opened.guard.id
        self.version = str(opened.guard.version)
        input_range = opened.guard.stages.record.inputs
        if input_range is not None and tokenizer is None:
            low, high = input_range
            self.usual_value = (low + high) / 2
        threads = torch.get_num_threads()
        if threads > 1 and detector.head.weight.device.type == "cpu":
            self.enter = lambda sharing: torch.set_num_threads(max(1, threads // sharing))

    def decide(self, rows: Rows) -> Answers:
        """The guard's decisions."""
        if self.is_of_maps:
            pieces = []
            for start in range(0, len(rows), MAP_BATCH_SIZE):
                pieces.append(self._decide_maps(rows[start : start + MAP_BATCH_SIZE]))
            return Answers.joined(pieces)
        with torch.inference_mode():
            decision = self._guard(self._inputs(rows))
        logits, labels, scores, p_values, is_ood = (part.cpu() for part in decision)
        return Answers(
            logits.float().numpy(),
            labels.numpy(),
            scores.double().numpy(),
            p_values.double().numpy(),
            is_ood.numpy(),
        )

    def _decide_maps(self, rows: Rows) -> Answers:
        with torch.inference_mode():
            decision = self._guard(self._inputs(rows))
        assert isinstance(decision, MapDecision)
        return Answers(
            logits=np.zeros((len(rows), 0), np.float32),
            labels=decision.image_labels().cpu().numpy(),
            scores=decision.image_scores.double().cpu().numpy(),
            p_values=decision.image_p_values.double().cpu().numpy(),
            is_ood=decision.image_is_ood.cpu().numpy(),
            ood_shares=decision.ood_share.double().cpu().numpy(),
            masks=decision.is_ood.cpu().numpy(),
        )

    def explain(self, rows: Rows, nearest: int) -> list[Reason]:
        """The nearest decision boundaries of each row."""
        with torch.inference_mode():
            why = self._guard.explain(self._inputs(rows))
        count = min(nearest, self.num_classes - 1)
        order = why.distances.nan_to_num(nan=torch.inf).argsort(dim=1)[:, :count]
        distances = why.distances.gather(1, order)
        shares = why.shares.gather(1, order)
        return list(zip(order.tolist(), distances.tolist(), shares.tolist()))

    def _inputs(self, rows: Rows) -> torch.Tensor | Batch | dict[str, torch.Tensor]:
        if self.encoder is not None:
            arrays = self.encoder.inputs_of(rows)
            return {name: torch.from_numpy(array) for name, array in arrays.items()}
        tensor = torch.from_numpy(np.ascontiguousarray(rows))
        return Batch(tensor) if self.input_name == "features" else tensor
