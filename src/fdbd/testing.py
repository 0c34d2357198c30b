"""Checks that every detector passes, ours and a user's:
``fdbd.testing.check_detector(MyDetector())``. Each fits copies on a small made-up problem and
raises an AssertionError that names the check and says what was promised and what happened."""

import contextlib
import copy
import io
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import Configured, NotFittedError, from_config, require_name
from fdbd.detectors import Detector, Ensemble, Shaped, as_detector
from fdbd.detectors.shaping import Shaping
from fdbd.fitting.driver import add_batches, fit_by, fit_detector
from fdbd.fitting.statistics import Together
from fdbd.networks.classifier import Classifier

CLASSES = 4
WIDTH = 8
SAMPLES = 120
QUERIES = 16


class TrialData(NamedTuple):
    """What a detector is tried on."""

    train: Batch
    queries: Batch
    head: Head


def check_detector(detector: Detector | Shaping | str) -> None:
    """Run every check on copies of a detector, of a shaping (before Energy) or of what a name
    stands for. An AssertionError names the check and says which promise was broken. `check_onnx` is
    separate: it takes seconds and an optional extra.

    >>> from fdbd import MSP
    >>> check_detector(MSP())
    """
    for check in CHECKS:
        run_check(check, as_detector(detector))


def run_check(check: Callable[[Detector], None], detector: Detector) -> None:
    """Run one check; an AssertionError says its name, what it promises, and what happened instead,
    also if the detector raised an error of its own."""
    promise = " ".join((check.__doc__ or "").split())
    try:
        check(detector)
    except AssertionError as error:
        raise AssertionError(f"{check.__name__}: {error}\n  promised: {promise}") from error
    except Exception as error:
        happened = f"{type(error).__name__}: {error}"
        place = _place_of(error, detector)
        raise AssertionError(
            f"{check.__name__}: {type(detector).__name__} raised {happened}{place}"
            f"\n  promised: {promise}"
        ) from error


def _place_of(error: Exception, detector: Detector) -> str:
    """Where in the detector's own file an error was raised, if it was there."""
    file = getattr(sys.modules.get(type(detector).__module__), "__file__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if file is not None and frame.filename == file:
            return f" (line {frame.lineno}, in {frame.name}: {frame.line})"
    return ""


def trial_data(
    detector: Detector, dtype: torch.dtype = torch.float64, seed: int = 0, views: bool = True
) -> TrialData:
    """A problem that is learnable but not separable, with all that this detector reads: features
    that are not negative, as after a ReLU, and logits with mean 0. Half of the queries are unlike
    the training data."""
    normal = _normal_numbers(seed)
    labels = torch.arange(SAMPLES) % CLASSES
    features, head = _clusters(normal, labels, dtype)
    needs = detector.needs
    batch = Batch(features)
    if needs.network:
        classifier = _random_classifier(normal, dtype, needs.layers)
        head = classifier.head
        # By a copy: `check_state_is_in_buffers` looks at what `observe` itself leaves behind.
        batch = copy.deepcopy(detector).observe(features, classifier).detach()
    elif needs.views and views:
        batch = batch._replace(views=torch.stack([features, features.flip(1)]))
    if needs.layers and not needs.network:
        layers = {name: normal(len(features), 5).to(dtype) for name in needs.layers}
        batch = batch._replace(layers=layers)
    train = batch.rows(slice(0, SAMPLES))._replace(labels=labels)
    return TrialData(train, batch.rows(slice(SAMPLES, None)), head)


def _normal_numbers(seed: int) -> Callable[..., Tensor]:
    """A function that draws a tensor of a given shape from the standard normal distribution."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal


def _clusters(
    normal: Callable[..., Tensor], labels: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Head]:
    """Features around one center per class, and the head that belongs to them: first the training
    samples, then queries of the same classes, then queries around the origin."""
    centers = 4 * nn.functional.normalize(normal(CLASSES, WIDTH).relu() + 1e-3)
    of_known_queries = labels[: QUERIES // 2]
    known = centers[torch.cat([labels, of_known_queries])]
    unlike = torch.zeros(QUERIES // 2, WIDTH, dtype=torch.float64)
    means = torch.cat([known, unlike])
    features = (means + 0.8 * normal(*means.shape)).relu()
    weight = centers - centers.mean(dim=0)
    bias = 0.1 * normal(CLASSES)
    return features.to(dtype), Head(weight.to(dtype), bias.to(dtype))


def _random_classifier(
    normal: Callable[..., Tensor], dtype: torch.dtype, layers: Sequence[str]
) -> Classifier:
    """A small network for detectors that look through one."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).to(dtype)
    for parameter in model.parameters():
        parameter.data = normal(*parameter.shape).to(dtype)
    return Classifier(model.eval(), layers=layers)


def fitted(detector: Detector, data: TrialData, batches: Any = None) -> Detector:
    """A copy of the detector, fitted, and calibrated if it needs that."""
    learner = copy.deepcopy(detector)
    if batches is None:
        batches = [data.train]
    fit_detector(learner, batches, data.head)
    return _calibrated(learner, data)


def _calibrated(detector: Detector, data: TrialData) -> Detector:
    return detector.calibrate(data.train) if isinstance(detector, Ensemble) else detector


def _fitted_on_trial(
    detector: Detector, dtype: torch.dtype = torch.float64, views: bool = True
) -> tuple[TrialData, Detector]:
    data = trial_data(detector, dtype, views=views)
    return data, fitted(detector, data)


def _assert_close(found: Tensor, expected: Tensor, promise: str, tolerance: float = 1e-6) -> None:
    found = found.detach()
    expected = expected.detach()
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if len(finite) else 1.0
    allowed = tolerance * max(1.0, largest)
    assert found.shape == expected.shape, (
        f"{promise}: the shape is {tuple(found.shape)}, expected {tuple(expected.shape)}"
    )
    differences = (found.double() - expected.double()).abs()
    is_near = (differences <= allowed) | (found == expected)
    wrong = (~is_near).nonzero()[:, 0].tolist()
    if wrong:
        first = wrong[0]
        raise AssertionError(
            f"{promise}: {len(wrong)} of {len(found)} scores differ, that of sample {first} is "
            f"{found[first].item():.6g}, expected {expected[first].item():.6g}"
        )


def _complaint(action: Callable[[], object], *kinds: type[Exception]) -> str:
    """The message of the error that the action raises, "" if it raises none."""
    try:
        action()
    except kinds as error:
        return str(error) or type(error).__name__
    return ""


def check_documentation(detector: Detector) -> None:
    """It has a docstring; it is rebuilt from its name and options; a repr shows it."""
    part = detector.shaping if isinstance(detector, Shaped) else detector
    kind = type(part).__name__
    assert "_modules" in vars(part), (
        f"{kind}.__init__ does not begin with super().__init__(), which every torch module needs"
    )
    assert (type(part).__doc__ or "").strip(), f"{kind} has no docstring"
    assert part.paper is None or part.paper.year > 1900, f"{kind} has a paper without a year"
    assert kind in repr(detector), f"the repr of {kind} does not name it"
    # A detector without a name, or with a part without one, cannot be saved, and is not rebuilt.
    has_names = not _complaint(lambda: require_name(detector), ValueError)
    if has_names:
        config = detector.to_config()
        rebuilt = from_config(config).to_config()
        assert rebuilt == config, f"{config} is not rebuilt from its options"


def check_fit_and_score(detector: Detector) -> None:
    """A fit takes what `needs` names and no more, and a score is one number per sample, (N,), in
    the dtype of the fit; a good row has a finite score, the same each time."""
    data = trial_data(detector)
    learner = _fitted_on_what_is_needed(detector, data)
    scores = _score_of_what_is_needed(learner, data)
    shape = tuple(scores.shape)
    assert shape == (QUERIES,), f"{QUERIES} samples have scores of shape {shape}, not ({QUERIES},)"
    assert scores.dtype == torch.float64, (
        f"after a fit in float64 the scores are {scores.dtype}: make new tensors in the dtype of "
        "the features"
    )
    bad = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
    assert not bad, (
        f"samples {bad} have only finite numbers and the score −inf: the formula gives NaN or an "
        "infinity for them"
    )
    # Drawn anew, since a formula that changes its input in place has a check of its own.
    again = _score_of_what_is_needed(learner, trial_data(detector))
    _assert_close(again, scores, "the same samples have other scores the second time")


def _fitted_on_what_is_needed(detector: Detector, data: TrialData) -> Detector:
    """The detector, fitted on labels only if `needs` names them. If that fails although a fit with
    labels succeeds, the error says so."""
    needs_labels = detector.needs.labels
    train = data.train if needs_labels else data.train._replace(labels=None)
    try:
        return fitted(detector, data, [train])
    except Exception as error:
        if needs_labels or _complaint(lambda: fitted(detector, data), Exception):
            raise
        raise AssertionError(
            "the fit reads labels, and needs does not say labels=True, so that it gets none "
            f"({type(error).__name__}: {error})"
        ) from error


def _score_of_what_is_needed(learner: Detector, data: TrialData) -> Any:
    """The scores of queries without logits. If they fail although queries with logits can be
    scored, the error says so."""
    with_logits = data.queries._replace(logits=data.head(data.queries.features))
    try:
        return learner.score(data.queries)
    except Exception as error:
        if learner.needs.logits or _complaint(lambda: learner.score(with_logits), Exception):
            raise
        raise AssertionError(
            "the formula reads logits, and needs does not say logits=True, so that it may get none "
            f"({type(error).__name__}: {error})"
        ) from error


def check_inputs_are_left_alone(detector: Detector) -> None:
    """Tensors that are given to a fit or a score do not change."""
    data = trial_data(detector)
    # Negative numbers, of which the trial data have none, so that a ReLU in place is found; and
    # logits, so that a formula which changes them is found.
    features = data.queries.features - 1
    queries = data.queries._replace(features=features, logits=data.head(features))
    if queries.views is not None:
        queries = queries._replace(views=queries.views - 1)
    data = data._replace(queries=queries)
    kept = copy.deepcopy(data)
    learner = fitted(detector, data)
    _assert_unchanged(data.train, kept.train, "the fit")
    learner.score(data.queries)
    _assert_unchanged(data.queries, kept.queries, "the score")
    assert torch.equal(data.head.weight, kept.head.weight), "the head that was given has changed"


def _assert_unchanged(given: Batch, kept: Batch, stage: str) -> None:
    for name in ("features", "logits", "labels", "views", "perturbed"):
        part = getattr(given, name)
        assert part is None or torch.equal(part, getattr(kept, name)), (
            f"the {name} that were given have changed: {stage} writes to them in place; compute "
            "new tensors"
        )


def check_state_is_in_buffers(detector: Detector) -> None:
    """All that a fit learns is in buffers, so that files, devices and exports have it; those with
    floating-point numbers have the dtype of the fit."""
    # In float32, since statistics are float64: a sum that is kept as it is shows by its dtype.
    data, learner = _fitted_on_trial(detector, torch.float32)
    if detector.needs.network:
        # A Guard calls `observe` while it fits and before each score.
        classifier = _random_classifier(_normal_numbers(0), torch.float32, detector.needs.layers)
        learner.observe(data.queries.features, classifier)
    unfitted = dict(detector.named_modules())
    for path, module in learner.named_modules():
        assert path in unfitted, (
            f"the fit adds the module {path}, which an unfitted copy does not have when a file is "
            "loaded: create it in __init__"
        )
        _assert_no_learnt_attributes(module, unfitted[path])
        _assert_no_learnt_parameters(module, unfitted[path])
        _assert_buffers_have_dtype(module, learner.fit_dtype)


def _assert_no_learnt_attributes(module: nn.Module, unfitted: nn.Module) -> None:
    before = vars(unfitted)
    for name, value in vars(module).items():
        if name in ("_buffers", "_modules", "_parameters", "fit_dtype", "training"):
            continue
        is_learnt = _is_array(value) or name not in before or _differs(value, before[name])
        assert not is_learnt or value is None, (
            f"the fit keeps {name} as an attribute of {type(module).__name__}, which no file "
            f"holds: call self.set_buffers({name}=tensor)"
        )


def _assert_no_learnt_parameters(module: nn.Module, unfitted: nn.Module) -> None:
    before = dict(unfitted.named_parameters(recurse=False))
    for name, parameter in module.named_parameters(recurse=False):
        is_unchanged = name in before and torch.equal(parameter, before[name])
        assert is_unchanged, (
            f"after the fit, {name} is a parameter of {type(module).__name__}, which the next fit "
            f"does not forget: call self.set_buffers({name}=tensor)"
        )


def _assert_buffers_have_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        assert not buffer.is_floating_point() or buffer.dtype == dtype, (
            f"after a fit in {dtype}, the buffer {name} is {buffer.dtype}: call "
            f"self.set_buffers({name}=tensor), which converts it"
        )


def _is_array(value: object) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _differs(value: object, before: object) -> bool:
    """Whether plain values, or a container of values, are others than before a fit."""
    plain = (bool, int, float, str, list, tuple, dict, set)
    return isinstance(value, plain) and repr(value) != repr(before)


def check_direction(detector: Detector) -> None:
    """Higher is more in-distribution: training data score above features of random
    directions."""
    if detector.needs.network or detector.needs.layers or _says_nothing_of_direction(detector):
        return
    data, learner = _fitted_on_trial(detector, views=False)
    # In any direction, so with negative numbers, and half as long as the features of training.
    size = torch.linalg.vector_norm(data.train.features, dim=1).mean()
    noise = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    unlike = 0.5 * size * nn.functional.normalize(noise)
    known = learner.score(Batch(data.train.features))
    unknown = learner.score(Batch(unlike))
    share = (known[:, None] > unknown).double().mean().item()
    assert share > 0.5, (
        f"only {share:.0%} of the pairs have the training sample above one of a random "
        "direction: is the sign wrong? Higher means more in-distribution; or say "
        "has_known_direction = False"
    )


def _says_nothing_of_direction(detector: Detector) -> bool:
    return not all(
        part.has_known_direction for part in detector.modules() if isinstance(part, Detector)
    )


def check_needs(detector: Detector) -> None:
    """`needs` is true: passes and labels of a fit, and what a score reads."""
    data = trial_data(detector)
    needs = detector.needs
    learner, passes = _fitted_counting_passes(detector, data)
    assert needs.passes is None or passes <= needs.passes, (
        f"needs says passes={needs.passes}, and the fit asks for {passes} (one with each yield)"
    )
    scores = learner.score(data.queries)
    # Logits that do not follow from the features.
    logits = data.head(data.queries.features) + torch.arange(CLASSES)
    with_logits = data.queries._replace(logits=logits)
    if not needs.logits:
        promise = "needs says that no logits are read, but they change the score"
        _assert_close(learner.score(with_logits), scores, promise)
    elif not needs.features:
        promise = "needs says that no features are read, but they change the score"
        moved = with_logits._replace(features=with_logits.features + 1)
        _assert_close(learner.score(moved), learner.score(with_logits), promise)


def _fitted_counting_passes(detector: Detector, data: TrialData) -> tuple[Detector, int]:
    """A copy of the detector, fitted without labels unless it needs them, and the number of passes
    over the training data that it asked for."""
    learner = copy.deepcopy(detector)
    train = data.train if detector.needs.labels else data.train._replace(labels=None)
    passes = 0

    def sum_up(statistics: Together) -> Together:
        nonlocal passes
        passes += 1
        add_batches(statistics, [train], data.head, learner)
        return statistics

    fit_by(sum_up, learner, data.head, torch.float64)
    return _calibrated(learner, data), passes


def check_fit(detector: Detector) -> None:
    """Neither the split nor the order of the training data nor an earlier fit changes a score."""
    data = trial_data(detector)
    expected = fitted(detector, data).score(data.queries)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    pieces = [data.train.rows(piece) for piece in order.split(17)]
    empty = pieces[0].rows(slice(0, 0))
    split = fitted(detector, data, [empty, *pieces]).score(data.queries)
    _assert_close(split, expected, "the split of the training data changes scores")
    other = fitted(detector, trial_data(detector, seed=1))
    again = fitted(other, data).score(data.queries)
    _assert_close(again, expected, "a second fit remembers the first")


def check_merging(detector: Detector) -> None:
    """Statistics travel as bytes and merge in any order, so that shards on other machines give the
    scores of one pass."""
    data = trial_data(detector)
    expected = fitted(detector, data).score(data.queries)
    shards = [data.train.rows(piece) for piece in torch.arange(SAMPLES).split(50)]
    for ordered in (shards, shards[::-1]):
        merged = copy.deepcopy(detector)
        sum_up = partial(_summed_over_shards, shards=ordered, head=data.head, detector=detector)
        fit_by(sum_up, merged, data.head, torch.float64)
        scores = _calibrated(merged, data).score(data.queries)
        _assert_close(scores, expected, "merged statistics give other scores than one pass")


def _summed_over_shards(
    statistics: Together, shards: Sequence[Batch], head: Head, detector: Detector
) -> Together:
    """The statistics of each shard, sent as bytes and merged."""
    empty = pickle.dumps(statistics)
    merged: Together | None = None
    for shard in shards:
        part: Together = pickle.loads(empty)
        add_batches(part, [shard], head, detector)
        received: Together = pickle.loads(pickle.dumps(part))
        if merged is None:
            merged = received
        else:
            merged.merge(received)
    assert merged is not None
    return merged


def check_refuses_bad_training_data(detector: Detector) -> None:
    """A fit on a NaN is an error that names the batch and the row, and leaves the detector
    unfitted."""
    data, learner = _fitted_on_trial(detector)
    asks_for_nothing = next(copy.deepcopy(detector)._start_fit(data.head), None) is None
    if detector.needs.network or asks_for_nothing:
        return
    features = data.train.features.clone()
    features[SAMPLES // 2 + 3, 1] = math.nan
    broken = data.train._replace(features=features)
    halves = [broken.rows(slice(0, 60)), broken.rows(slice(60, SAMPLES))]
    complaint = _complaint(lambda: fit_detector(learner, halves, data.head), ValueError)
    assert "batch 1, row 3" in complaint, (
        f"a NaN feature in batch 1, row 3 is reported as: {complaint or 'nothing'}"
    )
    refused = _complaint(lambda: learner.score(data.queries), NotFittedError)
    assert refused, "a detector whose fit failed still scores"


def check_rows(detector: Detector) -> None:
    """A sample's score depends on that sample alone; an empty batch has no scores."""
    data, learner = _fitted_on_trial(detector)
    together = learner.score(data.queries)
    alone = []
    for row in range(QUERIES):
        alone.append(learner.score(data.queries.rows(slice(row, row + 1))))
    promise = "a sample's score depends on the rest of its batch"
    _assert_close(torch.cat(alone), together, promise, 1e-5)
    empty = learner.score(data.queries.rows(slice(0, 0)))
    assert empty.shape == (0,), f"an empty batch has scores of shape {tuple(empty.shape)}"


def check_fails_closed(detector: Detector) -> None:
    """A NaN or an infinity in anything that a score reads gives −inf, and leaves the other rows
    alone."""
    data, learner = _fitted_on_trial(detector, torch.float32)
    queries = data.queries._replace(logits=None)
    for name in _parts_read(detector, queries):
        clean = learner.score(_spoilt(queries, name, 0.5, data.head))
        for bad in (math.nan, math.inf, -math.inf):
            scores = learner.score(_spoilt(queries, name, bad, data.head))
            assert bool((scores[:3] == -math.inf).all()), (
                f"{bad} in its {name} scores {scores[:3].tolist()}, not −inf"
            )
            promise = f"{bad} in the {name} of a row changes other rows"
            _assert_close(scores[3:], clean[3:], promise, 1e-5)


def _parts_read(detector: Detector, queries: Batch) -> list[str]:
    """Names of the parts of a batch that a score rests on, and of its layers."""
    needs = detector.needs
    parts = []
    if needs.features or needs.logits:
        parts.append("features")
    if needs.logits:
        parts.append("logits")
    if needs.views and queries.views is not None:
        parts.append("views")
    if needs.perturbed:
        parts.append("perturbed")
    return parts + list(needs.layers)


def _spoilt(queries: Batch, name: str, bad: float, head: Head) -> Batch:
    """The queries with a number in place of one entry of each of the first three rows of a part, in
    all views."""
    layers = dict(queries.layers or {})
    if name in layers:
        part = layers[name].clone()
    elif name == "logits":
        part = head(queries.features)
    else:
        part = getattr(queries, name).clone()
    part[..., [0, 1, 2], [0, part.shape[-1] // 2, -1]] = bad
    changed: dict[str, Any] = {name: part}
    if name in layers:
        changed = {"layers": {**layers, name: part}}
    return queries._replace(**changed)


def check_large_numbers(detector: Detector) -> None:
    """Finite numbers of any size have a score that is a number or −inf, never NaN or +inf."""
    for dtype, factor in ((torch.float32, 1e25), (torch.float32, 1e37), (torch.float64, 1e307)):
        data, learner = _fitted_on_trial(detector, dtype)
        queries = data.queries._replace(features=data.queries.features * factor, logits=None)
        if queries.views is not None:
            queries = queries._replace(views=queries.views * factor)
        if queries.perturbed is not None:
            queries = queries._replace(perturbed=queries.perturbed * factor)
        scores = learner.score(queries)
        assert bool((scores < math.inf).all()), (
            f"features of size {factor:g} in {dtype} score {scores.tolist()}"
        )


def check_dtypes(detector: Detector) -> None:
    """Half, bfloat16, integer and array inputs are scored in the dtype of the fit; float32 agrees
    with float64."""
    data, learner = _fitted_on_trial(detector, torch.float32)
    expected = learner.score(data.queries)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        given = data.queries.to(dtype=dtype)
        scores = learner.score(given)
        assert scores.dtype == torch.float32, (
            f"{dtype} features have scores of {scores.dtype}, expected torch.float32"
        )
        same = learner.score(given.to(dtype=torch.float32))
        _assert_close(scores, same, f"{dtype} features score otherwise", 1e-4)
    array: Any = data.queries.features.numpy()
    of_array = learner.score(data.queries._replace(features=array))
    _assert_close(of_array, expected, "arrays score otherwise")
    # A detector with a network steps along the sign of a gradient, which rounding may turn.
    if not detector.needs.network:
        exact_data, exact = _fitted_on_trial(detector)
        promise = "float32 scores are not those of float64"
        _assert_close(expected, exact.score(exact_data.queries), promise, 2e-3)


def check_devices(detector: Detector) -> None:
    """Scores stay where the detector is, whatever the default device; on an accelerator if there is
    one."""
    data, learner = _fitted_on_trial(detector, torch.float32)
    expected = learner.score(data.queries)
    # A tensor that the fit or the score makes without a device would land on the meta device.
    with torch.device("meta"):
        try:
            scores = learner.score(data.queries)
            scores_of_another_fit = fitted(detector, data).score(data.queries)
        except Exception as error:
            raise AssertionError(
                "a tensor is made on the default device, which need not be that of the features "
                f"({error}): give device=batch.features.device{_place_of(error, detector)}"
            ) from error
    promise = "another default device changes scores"
    _assert_close(scores, expected, promise, 1e-5)
    _assert_close(scores_of_another_fit, expected, promise, 1e-5)
    if torch.cuda.is_available():  # pragma: no cover - GPU
        moved = learner.to("cuda").score(data.queries.to("cuda"))
        assert moved.is_cuda, "scores of a detector on the GPU are not on the GPU"
        _assert_close(moved.cpu(), expected, "the GPU gives other scores", 1e-3)


def check_gradients(detector: Detector) -> None:
    """If a score has a gradient, it is that of finite differences, but for the few rows at a
    kink."""
    if detector.needs.network:
        return
    data, learner = _fitted_on_trial(detector, views=False)
    # Away from the kink of features at 0.
    inputs = (data.queries.features + 0.1).requires_grad_()
    scores = learner.score(data.queries._replace(features=inputs))
    if not scores.requires_grad:
        return
    (gradient,) = torch.autograd.grad(scores.sum(), inputs)
    generator = torch.Generator().manual_seed(2)
    step = 1e-6 * torch.randn(inputs.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        ahead = learner.score(data.queries._replace(features=inputs + step))
        behind = learner.score(data.queries._replace(features=inputs - step))
    expected = (ahead - behind) / 2
    found = (gradient * step).sum(dim=1)
    is_near = (found - expected).abs() <= 1e-3 * expected.abs() + 1e-4 * step.abs().max()
    assert is_near.double().mean() >= 0.75, (
        f"gradients are {found.tolist()}, finite differences {expected.tolist()}"
    )


def check_saving(detector: Detector) -> None:
    """Copies, pickles and state dicts score the same; buffers that are not finite or do not fit are
    refused."""
    data, learner = _fitted_on_trial(detector, torch.float32)
    expected = learner.score(data.queries)
    state = learner.state_dict()

    def score_with(tensors: dict[str, Tensor]) -> Tensor:
        loaded = copy.deepcopy(detector)
        loaded.load_state_dict(tensors)
        return loaded.score(data.queries)

    found = {
        "a loaded state": score_with(state),
        "a copy": copy.deepcopy(learner).score(data.queries),
    }
    if _can_be_imported(learner):
        found["a pickle"] = pickle.loads(pickle.dumps(learner)).score(data.queries)
    for what, scores in found.items():
        assert torch.equal(scores, expected), f"{what} scores otherwise"
    for name, buffer in state.items():
        for what, broken in _forged(learner, name, buffer).items():
            load = partial(score_with, {**state, name: broken})
            assert _complaint(load, ValueError, RuntimeError, IndexError), (
                f"a file with {what} is not refused: state its shape, such as "
                'Annotated[Tensor, "C P"]'
            )


def _can_be_imported(detector: Detector) -> bool:
    """Whether pickle finds the classes of a detector and its parts by their names."""
    for module in detector.modules():
        kind = type(module)
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
            return False
    return True


def _forged(learner: Detector, name: str, buffer: Tensor) -> dict[str, Tensor]:
    """Buffers that no fit would leave, by what is wrong with them."""
    forged = {}
    if buffer.is_floating_point():
        forged[f"{name} of infinities"] = torch.full_like(buffer, math.inf)
    for axis in _bound_axes(learner, name, buffer):
        short = buffer.narrow(axis, 0, buffer.shape[axis] - 1).clone()
        forged[f"{name} that is too short on axis {axis}"] = short
    return forged


def _bound_axes(detector: Detector, name: str, buffer: Tensor) -> list[int]:
    """Axes of a buffer whose length follows from other buffers: those with letters that others
    share, the last one of an undeclared buffer."""
    path, _, own_name = name.rpartition(".")
    module = detector.get_submodule(path)
    assert isinstance(module, Configured)
    shape = module.buffer_shape(own_name)
    if shape is None:
        return [buffer.ndim - 1] if buffer.ndim > 1 else []
    letters = []
    for other in module._buffers:
        letters += (module.buffer_shape(other) or "").split()
    return [axis for axis, letter in enumerate(shape.split()) if letters.count(letter) > 1]


class _OnFeatures(nn.Module):
    """A detector as a graph sees it: features in, scores out."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, features: Tensor) -> Tensor:
        return self.detector.score(Batch(features))


Recorder = Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]


def _check_graph(detector: Detector, record: Recorder, size: int) -> None:
    """A recorded graph gives the same scores for another batch size too, and for a row with a
    NaN."""
    if detector.needs.network or detector.needs.layers:
        return
    data, learner = _fitted_on_trial(detector, torch.float32, views=False)
    # No two equal features in a row: graphs break ties in an order of their own.
    features = data.queries.features + torch.linspace(0.01, 0.02, WIDTH)
    features[0, 0] = math.nan
    try:
        # torch prints the whole graph of a formula that it cannot record.
        with contextlib.redirect_stderr(io.StringIO()):
            graph = record(_OnFeatures(learner).eval(), features)
    except Exception as error:
        first_line = next(iter(str(error).strip().splitlines()), "")
        raise AssertionError(
            f"the formula cannot be recorded as a graph ({type(error).__name__}: {first_line}); "
            "use tensor operations, without .item(), .tolist(), numpy, a branch on values or a "
            "loop over samples"
        ) from error
    for rows in (features, features[:size]):
        expected = learner.score(Batch(rows))
        _assert_close(graph(rows), expected, "an exported graph scores otherwise", 1e-4)


def check_export(detector: Detector) -> None:
    """`torch.export` gives the same scores for any batch size, and fails closed."""

    def record(module: nn.Module, features: Tensor) -> Any:
        sizes = ({0: torch.export.Dim("n", min=2)},)
        return torch.export.export(module, (features,), dynamic_shapes=sizes, strict=False).module()

    _check_graph(detector, record, 5)


def check_onnx(detector: Detector) -> None:
    """ONNX Runtime gives the same scores for any batch size, and fails closed; needs the extra
    ``fdbd[onnx]``."""
    import onnxruntime

    def record(module: nn.Module, features: Tensor) -> Callable[[Tensor], Tensor]:
        sizes = ({0: torch.export.Dim("n")},)
        program: Any = torch.onnx.export(
            module, (features[:3],), dynamo=True, dynamic_shapes=sizes, verbose=False
        )
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        name = session.get_inputs()[0].name
        return lambda rows: torch.from_numpy(session.run(None, {name: rows.numpy()})[0])

    _check_graph(detector, record, 1)


CHECKS: tuple[Callable[[Detector], None], ...] = (
    check_documentation,
    check_fit_and_score,
    check_inputs_are_left_alone,
    check_state_is_in_buffers,
    check_needs,
    check_rows,
    check_direction,
    check_fit,
    check_merging,
    check_refuses_bad_training_data,
    check_fails_closed,
    check_large_numbers,
    check_dtypes,
    check_export,
    check_devices,
    check_gradients,
    check_saving,
)
"""All checks but `check_onnx`, for a test that runs them one by one; the most usual mistakes
first."""
