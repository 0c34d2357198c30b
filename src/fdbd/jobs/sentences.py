"""Fit a guard on texts by a sentence encoder, in one go: the texts become vectors, a logistic
regression on them is the classifier, and the guard is fitted on the same vectors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.data.columns import TextRows
from fdbd.data.inputs import Rows, open_rows
from fdbd.decision.choice import Auto
from fdbd.decision.guard import Guard
from fdbd.decision.threshold import FewCalibrationSamplesWarning, Target, check_target
from fdbd.fitting.overlap import Sketch
from fdbd.jobs.fitting import (
    HOLDOUT,
    Fitted,
    Loader,
    cautions_of,
    describe,
    match_rows,
    open_calibration,
)
from fdbd.jobs.scoring import Engine
from fdbd.networks.by_name import NamedModel
from fdbd.networks.sentence_model import SentenceClassifier, SentenceTransformer, embed
from fdbd.networks.wrapped import weights_hash
from fdbd.util.devices import choose_device
from fdbd.util.progress import track

WEIGHT_OF_LOSS = 100.0
"""The inverse strength of the head's L2 penalty. Sentence vectors have length 1, so that a
classifier that is sure of itself needs large weights."""
_CHUNK = 8192


class _Embedded(NamedTuple):
    """The texts of the fit as a guard's features."""

    features: Tensor
    labels: Tensor
    seen: Sketch

    def batches(self) -> Iterator[Batch]:
        for start in range(0, len(self.labels), _CHUNK):
            rows = slice(start, start + _CHUNK)
            yield Batch(self.features[rows], labels=self.labels[rows])


def fit_sentences(
    encoder: SentenceTransformer,
    data: str,
    calibration: str | None = None,
    engine: Engine = Engine(),  # noqa: B008 - it never changes
    *,
    holdout: float | None = None,
    detector: str | Auto = "fdbd",
    text: str | None = None,
    label: str | None = None,
    **target: Unpack[Target],
) -> Fitted:
    """Fit classifier and guard on labelled texts, and calibrate the guard on others.

    Args:
        encoder: what turns texts into vectors; it is not trained.
        data: a file of texts, as for `open_rows`.
        calibration: other texts; they may do without labels. None: a random part of `data` is kept
            from the classifier and from the guard's fit.
        engine: on which device the encoder runs, and in which batches.
        holdout: without `calibration`, that part, as a share; None: 0.2.
        detector: as for `Guard`.
        text, label: the columns of the texts and of their classes.
        target: `tpr`, `alpha` and `per_class` of `Guard.calibrate`.
    """
    check_target(target.get("tpr"), target.get("alpha"))
    _check_request(detector, engine)
    if text is None or label is None:
        raise ValueError(
            "a classifier of sentences is fitted on labelled texts: name their columns with --text "
            "and --label"
        )
    rows = open_rows(data, "train", text, label)
    assert isinstance(rows, TextRows)
    assert rows.labels is not None
    held_out = None
    if calibration is None:
        held_out = _held_out(len(rows), holdout)
    training = Loader(rows, None, encoder.tokenizer, engine, rows.labels)
    if held_out is not None:
        training.choose(~held_out)
    _check_classes(rows, training.chosen)

    transformer = encoder.load().to(choose_device(engine.home))
    embedded = _embed(transformer, encoder, training, engine.progress)
    head = fit_head(embedded.features, embedded.labels)
    source = _with_head(transformer, encoder, head, rows.classes)

    guard = Guard(source.model, detector)
    guard.about = {"class_names": list(rows.classes)}
    guard.fit(list(embedded.batches()), progress=engine.progress)
    guard.stages.record.seen = embedded.seen

    match = match_rows(rows, len(rows.classes), rows.classes, None)
    calibration_rows: Rows = rows
    if calibration is not None:
        calibration_rows = open_calibration(calibration, text, label)
        match = match_rows(calibration_rows, len(rows.classes), rows.classes, match)
    calibrating = Loader(calibration_rows, head, encoder.tokenizer, engine, match.labels)
    if held_out is not None:
        calibrating.choose(held_out)
    with warnings.catch_warnings():
        # `cautions_of` says it, with what else there is to know.
        warnings.simplefilter("ignore", FewCalibrationSamplesWarning)
        guard.calibrate(calibrating, **target, progress=engine.progress)
    describe(guard, source, encoder.tokenizer, calibrating, held_out is not None)
    if held_out is not None:
        described: Any = guard.about["calibration"]
        described["network_saw_them"] = "no, the classifier was fitted without them"
    cautions = [*match.cautions, *cautions_of(guard, data, False)]
    return Fitted(guard, training, calibrating, cautions)


def _check_request(detector: str | Auto, engine: Engine) -> None:
    """An error for what is not possible with texts."""
    if isinstance(detector, Auto) or detector == "auto":
        raise ValueError('"auto" makes pseudo-OOD images, and these are texts: name a detector')
    if engine.name != "local":
        raise ValueError(
            "a classifier of sentences is fitted in one process: leave --engine out; the guard is "
            "scored by any engine"
        )


def fit_head(features: Tensor, labels: Tensor) -> Head:
    """Multinomial logistic regression on vectors (N, P) with labels (N,) from 0 to C − 1, each of
    which occurs.

    >>> head = fit_head(torch.tensor([[1.0, 0.0], [0.0, 1.0]] * 5), torch.tensor([0, 1] * 5))
    >>> head(torch.tensor([[1.0, 0.0]])).argmax().item()
    0
    """
    from sklearn.linear_model import LogisticRegression

    classifier = LogisticRegression(C=WEIGHT_OF_LOSS, max_iter=2000)
    classifier.fit(features.numpy(), labels.numpy())
    weight = torch.from_numpy(np.asarray(classifier.coef_, np.float32))
    bias = torch.from_numpy(np.asarray(classifier.intercept_, np.float32))
    return Head(weight, bias)


def _held_out(count: int, holdout: float | None) -> NDArray[np.bool_]:
    share = HOLDOUT if holdout is None else holdout
    if not 0 < share < 1:
        raise ValueError(f"holdout is {share}, expected a share between 0 and 1")
    shuffled = np.random.default_rng(0).permutation(count)
    return shuffled < round(share * count)


def _check_classes(rows: TextRows, chosen: NDArray[np.bool_]) -> None:
    """ValueError unless there are classes, each with texts in the part that is fitted."""
    assert rows.labels is not None
    if len(rows.classes) < 2:
        raise ValueError(
            f"{rows.source} has {len(rows.classes)} classes of texts, expected at least two"
        )
    counts = np.bincount(rows.labels[chosen], minlength=len(rows.classes))
    if not counts.all():
        name = rows.classes[int(counts.argmin())]
        raise ValueError(
            f"{rows.source} has so few texts of the class {name!r} that none is left for the fit: "
            "give more, or --calibration DATA"
        )


@torch.inference_mode()
def _embed(
    transformer: nn.Module, encoder: SentenceTransformer, training: Loader, progress: bool
) -> _Embedded:
    device = next(transformer.parameters()).device
    features = []
    labels = []
    seen = Sketch()
    for inputs, of_batch in track(training, "embedding", enabled=progress):
        seen.add(inputs)
        moved = {name: part.to(device) for name, part in inputs.items()}
        features.append(embed(transformer, encoder.pooling, moved).float().cpu())
        labels.append(of_batch)
    return _Embedded(torch.cat(features).clone(), torch.cat(labels), seen)


def _with_head(
    transformer: nn.Module, encoder: SentenceTransformer, head: Head, classes: tuple[str, ...]
) -> NamedModel:
    model = SentenceClassifier(transformer, head, encoder.pooling).eval()
    model = model.to(next(transformer.parameters()).device)
    name = f"sentences:{encoder.name}"
    origin = {
        "name": name,
        "num_classes": head.num_classes,
        "weights": weights_hash(model),
        "tokenizer": encoder.tokenizer.to_dict(),
    }
    return NamedModel(
        model=model,
        weights=f"{name} with a head that was fitted here",
        num_classes=head.num_classes,
        class_names=classes,
        origin=origin,
        tokenizer=encoder.tokenizer,
    )
