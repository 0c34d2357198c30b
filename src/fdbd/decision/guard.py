"""Guard: all stages as one module that is fitted, calibrated, asked, saved and loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from fdbd.core import artifact, geometry
from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import NotFittedError, from_config
from fdbd.core.perturbation import InputPerturbation
from fdbd.core.precision import full_precision
from fdbd.data.labels import Agreement
from fdbd.decision.threshold import Threshold
from fdbd.detectors import Detector, Shaped, as_detector, create_shaping
from fdbd.fitting import distributed
from fdbd.fitting.driver import as_batch, fit_together
from fdbd.fitting.overlap import Sketch
from fdbd.fitting.spool import Spool
from fdbd.kernels.threads import run_apart
from fdbd.networks.classifier import Classifier, split_batch
from fdbd.shaping import Shaping
from fdbd.util.progress import track


class Decision(NamedTuple):
    """What a guard says of N samples. Logits and labels are always the untouched model's."""

    logits: Tensor
    """(N, C)."""
    labels: Tensor
    """(N,) predicted classes."""
    scores: Tensor
    """(N,) higher is more in-distribution; −inf where a number was not finite."""
    p_values: Tensor
    """(N,) share of calibration scores at or below, (1 + #)/(n + 1)."""
    is_ood: Tensor
    """(N,) bool."""


class Explanation(NamedTuple):
    """Where N samples stand among the decision boundaries."""

    decision: Decision
    distances: Tensor
    """(N, C) closed-form distance to each class's boundary; NaN at the predicted class, +inf where there is none."""
    nearest: Tensor
    """(N,) class behind the nearest boundary."""
    nearest_distance: Tensor
    """(N,)."""
    shares: Tensor
    """(N, C) each class's share of the average distance, which is fDBD's numerator; rows sum to 1, 0 where no boundary
    is."""
    standing: Tensor
    """(N,) fraction of the calibration scores below the sample's score."""


class NotCalibratedError(RuntimeError):
    """A guard was asked for a decision before it had a threshold."""


class Guard(nn.Module):
    """A classifier that knows what it does not know.

    Args:
        model: any ``nn.Module`` with a linear head, a `Classifier`, or a bare `Head` for features without a network.
        detector: a detector or its name, as in `fdbd.create`.
        shaping: an activation shaping or its name, put before the detector.
        perturb: an `InputPerturbation`, applied to images before they are scored; None: none.
        head: name of the model's linear head, where it is not found by itself.
        layers: names of inner layers whose pooled features the detector reads (multi-layer MDS).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> guard = Guard(model).fit([torch.randn(64, 4)]).calibrate([torch.randn(64, 4)], tpr=0.95)
    >>> decision = guard(torch.randn(5, 4))
    >>> decision.is_ood.shape, decision.logits.shape
    (torch.Size([5]), torch.Size([5, 3]))
    """

    def __init__(
        self,
        model: nn.Module | Head | None = None,
        detector: Detector | str = "fdbd",
        *,
        shaping: Shaping | str | None = None,
        perturb: InputPerturbation | None = None,
        head: Any = None,
        layers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        detector = as_detector(detector)
        if shaping is not None:
            detector = Shaped(create_shaping(shaping, before=type(detector)), detector)
        if perturb is not None and detector.needs.network:
            raise ValueError(f"{detector.label} perturbs the images by itself: leave perturb out")
        if perturb is not None and detector.needs.calibration:
            raise ValueError("an ensemble's p-values are those of plain images: leave perturb out")
        self.detector: Detector = detector
        self.perturb = perturb
        self.threshold: Threshold | None = None
        self._head = model if isinstance(model, Head) else None
        self.classifier: Classifier | None = None
        if isinstance(model, Classifier):
            self.classifier = model
        elif isinstance(model, nn.Module):
            self.classifier = Classifier(model, head, layers or detector.needs.layers)
        elif model is not None and not isinstance(model, Head):
            raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module or an fdbd.Head")
        self.about: dict[str, Any] = {}
        """What else the file should say, as JSON values: where the model comes from, class names. Saved and loaded."""
        self.agreement: dict[str, Agreement] = {}
        """How often given labels are the model's own predictions, for ``"fit"`` and ``"calibration"``."""
        self._seen: Sketch | None = None

    # ── fit and calibrate ──────────────────────────────────────────────────────────────────────────────────────────

    def fit(self, data: Any, *, progress: bool = True) -> Self:
        """Show the guard its training data once.

        Args:
            data: what a data loader yields: tensors, (inputs, labels) or dicts, or `Batch`es of features. One streaming
                pass of the network; a detector that needs several passes gets the features from a temporary file.
                Under torchrun each process gives its shard, and all end with the same detector.
            progress: show a bar when it takes more than two seconds.
        """
        self._seen = Sketch()
        self.threshold = None
        self.agreement = {}
        combine = distributed.combine if distributed.is_active() else None
        head = self._find_head()
        with torch.no_grad(), Spool() as spool:
            items = iter(track(_items(data), "fitting", enabled=progress))
            stream = self._training_batches(items)
            if self.detector.needs.passes in (0, 1):
                fit_together([self.detector], stream, head, combine)
                for item in items:  # left where nothing is learnt: the network need not look, but `calibrate` will ask
                    self._seen.add(item.features if isinstance(item, Batch) else split_batch(item)[0])
            else:
                for batch in stream:
                    spool.append(batch)
                fit_together([self.detector], spool, head, combine)
        if combine is not None:
            self._seen = combine(self._seen)
        self._warn_of_labels("fit")
        return self

    def calibrate(
        self,
        data: Any,
        *,
        tpr: float | None = None,
        alpha: float | None = None,
        per_class: bool = False,
        progress: bool = True,
    ) -> Self:
        """Set the threshold from in-distribution data that the fit has not seen. Data that it has draw a warning; where
        the fit saw many more than 4,096 samples that is an estimate, which a small calibration set can escape.

        Args:
            data: as for `fit`.
            tpr: fraction of in-distribution samples to accept; 0.95 where neither is given.
            alpha: instead, the largest fraction of false alarms: a conformal threshold, whose promise holds on average
                over the draw of the calibration data.
            per_class: a threshold for each predicted class.
            progress: show a bar when it takes more than two seconds.
        """
        if tpr is not None and alpha is not None:
            raise ValueError("give tpr (share of in-distribution samples to accept) or alpha (false alarms), not both")
        self.detector.require_fitted()
        known = Sketch()
        self.agreement.pop("calibration", None)
        scores, labels = [], []
        with torch.no_grad():
            for item in track(_items(data), "calibrating", enabled=progress):
                plain, scored = self._observe(item)
                known.add(item.features if isinstance(item, Batch) else split_batch(item)[0])
                scores.append(self.detector.score(scored))
                labels.append(self._logits(plain).argmax(dim=1))
                self._compare(
                    "calibration", item.labels if isinstance(item, Batch) else split_batch(item)[1], labels[-1]
                )
        if not scores:
            raise ValueError("the calibration data hold no samples; give at least one non-empty batch")
        self._warn_if_seen(known)
        self._warn_of_labels("calibration")
        self.set_threshold(torch.cat(scores), torch.cat(labels), tpr=tpr, alpha=alpha, per_class=per_class)
        return self

    def _compare(self, stage: str, labels: Tensor | None, predicted: Tensor) -> None:
        """Count where given labels and predictions agree."""
        if labels is not None and labels.ndim == 1 and not labels.is_floating_point():
            num_classes = self._find_head().num_classes
            self.agreement.setdefault(stage, Agreement(num_classes)).add(labels, predicted)

    def _compare_features(self, batch: Batch) -> None:
        head, logits = self._find_head(), batch.logits
        if logits is None and "fit" not in self.agreement and batch.features.shape[1:] == head.weight.shape[1:]:
            # A product that the fit itself may not need: the first batch is enough.
            logits = head(batch.features.to(head.weight))
        if logits is not None and len(logits):
            self._compare("fit", batch.labels, logits.argmax(dim=1))

    def _warn_of_labels(self, stage: str) -> None:
        names = self.about.get("class_names") or ()
        if stage in self.agreement and (text := self.agreement[stage].warning(f"the {stage} data", names)):
            warnings.warn(text, stacklevel=3)

    def _warn_if_seen(self, calibration: Sketch) -> None:
        if self._seen is not None and calibration.overlap(self._seen) > 0.5:
            warnings.warn(
                "the calibration data were also used for the fit: scores on them are too good, and the threshold will "
                "raise more false alarms than asked for; calibrate on data apart from the fit",
                stacklevel=3,
            )

    def set_threshold(
        self,
        scores: Tensor,
        labels: Tensor | None = None,
        *,
        tpr: float | None = None,
        alpha: float | None = None,
        per_class: bool = False,
    ) -> None:
        """Calibrate on in-distribution scores (N,) that are already there; labels (N,) are predicted classes."""
        num_classes = self.detector.head_weight.shape[0] if per_class else None
        if alpha is not None:
            self.threshold = Threshold.conformal(
                scores, alpha, labels=labels, per_class=per_class, num_classes=num_classes
            )
        else:
            self.threshold = Threshold.quantile(
                scores, 0.95 if tpr is None else tpr, labels=labels, per_class=per_class, num_classes=num_classes
            )

    # ── ask ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, images: Any) -> Decision:
        """The decision on a batch of whatever the model takes."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._forward(images)
        with torch.no_grad():
            return self._forward(images)

    def _forward(self, images: Any) -> Decision:
        plain, scored = self._observe(images)
        return self._decide(self._logits(plain), self.detector.score(scored))

    def decide(self, batch: Batch) -> Decision:
        """The same decision from features, without the network."""
        decision: Decision = self(as_batch(batch))
        return decision

    def score(self, images: Any) -> Tensor:
        """(N,) scores alone; needs no calibration."""
        with torch.no_grad():
            return self.detector.score(self._observe(images)[1])

    def explain(self, images: Any) -> Explanation:
        """Where the samples stand: images, or a `Batch` of features.

        Distances are those of the features that the detector scores, so after shaping where there is one.
        """
        with torch.no_grad():
            plain, scored = self._observe(images)
            decision = self._decide(self._logits(plain), self.detector.score(scored))
            with full_precision():
                distances = self._distances(scored)
            nearest_distance, nearest = geometry.nearest_boundary(distances)
            is_there = torch.isfinite(distances)
            reachable = torch.where(is_there, distances, 0)
            # On a point where all boundaries meet, all have an equal share in a distance of zero.
            reachable = torch.where(reachable.sum(dim=1, keepdim=True) > 0, reachable, is_there.to(reachable))
            shares = reachable / reachable.sum(dim=1, keepdim=True)
            assert self.threshold is not None
            standing = self.threshold.standing(decision.scores, decision.labels)
            return Explanation(decision, distances, nearest, nearest_distance, shares, standing)

    def _distances(self, batch: Batch) -> Tensor:
        """(N, C) from the features as they are scored; the predicted class is that of the score."""
        detector, head = self.detector, self.detector.head
        batch = detector.prepare(batch)
        while isinstance(detector, Shaped):
            batch, detector = detector.shape(batch), detector.detector
        logits = batch.logits
        return geometry.distances(
            batch.features, head, logits=None if logits is None else logits.to(batch.features.dtype)
        )

    def _decide(self, logits: Tensor, scores: Tensor) -> Decision:
        if self.threshold is None:
            raise NotCalibratedError(
                "the guard has no threshold: call calibrate(loader, tpr=0.95) on in-distribution data, or use score()"
            )
        labels = logits.argmax(dim=1)
        predicted = labels if self.threshold.per_class else None
        return Decision(logits, labels, scores, *self.threshold.decide(scores, predicted))

    # ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _observe(self, images: Any) -> tuple[Batch, Batch]:
        """What the model says of the images, and what the detector scores: the same unless images are perturbed.
        A Batch of features stands for itself."""
        if isinstance(images, Batch):
            batch = self._features_alone(images)
            return batch, batch
        classifier, detector = self._require_classifier(), self.detector
        if self.perturb is None:
            plain = detector.observe(split_batch(images)[0] if detector.needs.network else images, classifier)
            return plain, plain
        score = detector.score if self.perturb.needs_score else None
        plain, moved = self.perturb.seen_and_moved(split_batch(images)[0], classifier, score)
        return plain, classifier(moved)

    def _training_batches(self, items: Iterator[Any]) -> Iterator[Batch]:
        """Batches that the detector learns from. Noise that follows a score can only be added once there is one, so
        images are plain here."""
        assert self._seen is not None
        for item in items:
            if isinstance(item, Batch):
                batch = self._features_alone(item)
                self._seen.add(batch.features)
                self._compare_features(batch)
                yield batch
                continue
            inputs, labels = split_batch(item)
            self._seen.add(inputs)
            batch = self._training_batch(inputs, labels)
            if batch.logits is not None:
                self._compare("fit", batch.labels, batch.logits.argmax(dim=1))
            yield batch

    def _training_batch(self, inputs: Any, labels: Tensor | None) -> Batch:
        """What the detector learns from one batch of inputs."""
        batch = self.detector.observe(inputs, self._require_classifier(), labels)
        return batch if labels is None else batch._replace(labels=labels.to(batch.features.device))

    def _logits(self, batch: Batch) -> Tensor:
        if batch.logits is not None:
            return batch.logits
        return self.detector.head(batch.features.to(self.detector.head_weight.dtype))

    def _features_alone(self, batch: Batch) -> Batch:
        lacks_layers = self.detector.needs.layers and batch.layers is None
        if self.detector.needs.network or self.perturb is not None or lacks_layers:
            name = self.detector.label if self.perturb is None else "a guard with input perturbation"
            raise ValueError(f"{name} needs the images and the network, features are not enough: call guard(images)")
        if not self.detector.is_fitted:
            return batch
        classes, width = self.detector.head_weight.shape
        for part, name, expected in ((batch.features, "features", width), (batch.logits, "logits", classes)):
            if part is not None and part.shape[1:] != (expected,):
                raise ValueError(f"{name} have shape {tuple(part.shape)}, expected (N, {expected}), as in the fit")
        return batch.to(self.detector.head_weight.device)

    def _find_head(self) -> Head:
        if self.classifier is not None:
            return self.classifier.head
        if self._head is not None:
            return self._head
        if self.detector.is_fitted:
            return self.detector.head
        raise ValueError("the guard has neither a model nor a head: give Guard(model) or Guard(Head(weight, bias))")

    def _require_classifier(self) -> Classifier:
        classifier = self.classifier
        if classifier is None:
            raise ValueError(
                "the guard has no model, so it takes features: call decide(fdbd.Batch(features)), or give the model to "
                "fdbd.Guard(model) or fdbd.load(path, model)"
            )
        return classifier

    # ── save and load ──────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write detector, threshold and the head's fingerprint as one safetensors file; the model is not in it."""
        self.detector.require_fitted()
        self.detector.require_name()
        from fdbd.util.version import __version__

        tensors = {f"detector.{name}": tensor for name, tensor in self.detector.state_dict().items()}
        if self.threshold is not None:
            tensors.update({f"threshold.{name}": tensor for name, tensor in self.threshold.state_dict().items()})
        if self._seen is not None:
            tensors["seen"] = self._seen.hashes
        description = {
            "version": __version__,
            "head": self.detector.head.fingerprint(),
            "head_name": None if self.classifier is None else self.classifier.head_name,
            "layers": [] if self.classifier is None else list(self.classifier.layer_names),
            "detector": self.detector.to_config(),
            "threshold": None if self.threshold is None else self.threshold.to_config(),
            "perturb": None if self.perturb is None else self.perturb.to_config(),
            "about": self.about,
        }
        artifact.write(path, description, tensors)

    def export_onnx(self, path: str | os.PathLike[str], example: Any, **options: Any) -> None:
        """Write one ONNX graph: images (or features) in; logits, label, score, p_value, is_ood out."""
        from fdbd.deploy.onnx import export

        export(self, path, example, **options)


def load(path: str | os.PathLike[str], model: nn.Module | Head | None = None, *, head: Any = None) -> Guard:
    """The guard in a file, around a model; without one it takes features.

    Raises ArtifactError when the file is damaged, too new, or was made for another head. Loading compiles nothing and
    leaves no threads behind, so a process may load a guard and then fork.
    """
    return run_apart(lambda: _load(path, model, head))


def _load(path: str | os.PathLike[str], model: nn.Module | Head | None, head: Any) -> Guard:
    description, tensors = artifact.read(path)
    try:
        detector = from_config(description["detector"])
        if not isinstance(detector, Detector):
            raise ValueError(f"{description['detector']!r} is no detector")
        detector.load_state_dict(_under("detector.", tensors))
        perturb = description["perturb"] and InputPerturbation.from_config(description["perturb"])
        classes = detector.head.num_classes
        if description["threshold"] and description["threshold"]["num_classes"] not in (None, classes):
            raise ValueError(f"its threshold is not for the {classes} classes of the head")
        threshold = description["threshold"] and Threshold.from_state(
            description["threshold"], _under("threshold.", tensors)
        )
        layers, saved_head, head_name = description["layers"], description["head"], description["head_name"]
        seen = Sketch(tensors.get("seen"))
        _check_names(layers, saved_head, head_name)
        _try(detector, perturb or None, threshold or None)
    except Exception as error:  # a forged file can make any of this raise nearly anything
        reason = (" ".join(str(error).split()) or type(error).__name__)[:500]
        raise artifact.ArtifactError(f"{os.fspath(path)!r} does not hold a working guard: {reason}") from None
    if model is not None and not isinstance(model, Head):
        head = head or (head_name.split("+") if isinstance(head_name, str) else None)
    guard = Guard(model, detector, perturb=perturb or None, head=head, layers=layers)
    guard.threshold = threshold or None
    about = description.get("about")
    guard.about = about if isinstance(about, dict) else {}
    guard._seen = seen if "seen" in tensors else None
    if model is not None:
        present = guard._find_head().fingerprint()
        if present != saved_head:
            raise artifact.ArtifactError(
                f"{os.fspath(path)!r} was fitted with the head {saved_head[:16]}…, this model has {present[:16]}…: "
                "load it with the model that it was fitted on, or fit a new guard"
            )
        if guard.classifier is not None:
            guard.to(next(guard.classifier.parameters()).device)
    return guard


def _items(data: Any) -> Any:
    """What to iterate over: a loader as it is, one batch as a list of one."""
    if isinstance(data, (Tensor, Batch, Mapping)):
        return [data]
    if not isinstance(data, Iterable):
        raise TypeError(f"data are a {type(data).__name__}, expected a data loader or another iterable of batches")
    return data


def _try(detector: Detector, perturb: InputPerturbation | None, threshold: Threshold | None) -> None:
    """Ask about two rows, so that a file whose parts do not fit each other fails at load and not in service."""
    if detector.needs.network or perturb is not None:
        return
    batch = detector.example()
    try:
        answers = [detector.score(batch), detector.head(batch.features).argmax(dim=1)]
    except NotFittedError:  # an ensemble that is not calibrated yet
        return
    if threshold is not None:
        answers += threshold.decide(answers[0], answers[1].new_tensor([0, detector.head.num_classes - 1]))
    if any(answer.shape != (2,) for answer in answers):
        raise ValueError(f"answers on two samples have the shapes {[tuple(answer.shape) for answer in answers]}")


def _check_names(layers: Any, head: Any, head_name: Any) -> None:
    if not isinstance(layers, list) or not all(isinstance(name, str) for name in [*layers, head, head_name or ""]):
        raise ValueError("its head and layers are not named by texts")


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
