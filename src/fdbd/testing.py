"""Checks that every detector passes, ours and a user's:
``fdbd.testing.check_detector(MyDetector())``. Each fits copies on a small made-up problem and
raises an AssertionError that says what was promised and what happened."""

import copy
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch, Head
from fdbd.core.configuration import Configured, NotFittedError, from_config
from fdbd.detectors import Detector, Ensemble, Shaped, as_detector
from fdbd.detectors.shaping import Shaping
from fdbd.fitting.driver import add_batches, fit_by, fit_detector
from fdbd.fitting.statistics import Together
from fdbd.networks.classifier import Classifier

CLASSES, WIDTH, SAMPLES, QUERIES = 4, 8, 120, 16


class Problem(NamedTuple):
    """What a detector is tried on."""

    train: Batch
    queries: Batch
    head: Head


def check_detector(detector: Detector | Shaping | str) -> None:
    """Run every check on copies of a detector, of a shaping (before Energy) or of what a name
    stands for. An AssertionError says which promise was broken. `check_onnx` is separate: it takes
    seconds and an optional extra.

    >>> from fdbd import MSP
    >>> check_detector(MSP())
    """
    for check in CHECKS:
        check(as_detector(detector))


def make_problem(
    detector: Detector, dtype: torch.dtype = torch.float64, seed: int = 0, views: bool = True
) -> Problem:
    """A problem that is learnable but not separable, with all that this detector reads: features
    that are not negative, as after a ReLU, and logits with mean 0. Half of the queries are unlike
    the training data."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    centers = 4 * nn.functional.normalize(normal(CLASSES, WIDTH).relu() + 1e-3)
    labels = torch.arange(SAMPLES) % CLASSES
    rows = torch.cat(
        [
            centers[labels],
            centers[labels[: QUERIES // 2]],
            torch.zeros(QUERIES // 2, WIDTH).double(),
        ]
    )
    features = (rows + 0.8 * normal(*rows.shape)).relu().to(dtype)
    head = Head((centers - centers.mean(dim=0)).to(dtype), (0.1 * normal(CLASSES)).to(dtype))
    needs, batch = detector.needs, Batch(features)
    if needs.network:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)).to(
            dtype
        )
        for parameter in model.parameters():
            parameter.data = normal(*parameter.shape).to(dtype)
        classifier = Classifier(model.eval())
        head = classifier.head
        batch = detector.observe(features, classifier).detach()
    elif needs.views and views:
        batch = batch._replace(views=torch.stack([features, features.flip(1)]))
    if needs.layers:
        batch = batch._replace(
            layers={name: normal(len(rows), 5).to(dtype) for name in needs.layers}
        )
    train, queries = batch.rows(slice(0, SAMPLES)), batch.rows(slice(SAMPLES, None))
    return Problem(train._replace(labels=labels), queries, head)


def fitted(detector: Detector, problem: Problem, batches: Any = None) -> Detector:
    """A copy of the detector, fitted, and calibrated where it needs that."""
    detector = copy.deepcopy(detector)
    fit_detector(detector, [problem.train] if batches is None else batches, problem.head)
    return detector.calibrate(problem.train) if isinstance(detector, Ensemble) else detector


def _solved(
    detector: Detector, dtype: torch.dtype = torch.float64, views: bool = True
) -> tuple[Problem, Detector]:
    problem = make_problem(detector, dtype, views=views)
    return problem, fitted(detector, problem)


def _assert_close(found: Tensor, expected: Tensor, promise: str, tolerance: float = 1e-6) -> None:
    finite = expected[expected.isfinite()].abs()
    scale = tolerance * max(1.0, float(finite.max()) if len(finite) else 1.0)
    near = ((found.double() - expected.double()).abs() <= scale) | (found == expected)
    if found.shape != expected.shape or not bool(near.all()):
        raise AssertionError(f"{promise}: got {found.tolist()}, expected {expected.tolist()}")


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
    assert (type(part).__doc__ or "").strip(), f"{kind} has no docstring"
    assert part.paper is None or part.paper.year > 1900, f"{kind} has a paper without a year"
    assert kind in repr(detector), f"the repr of {kind} does not name it"
    if Configured.registry.get(detector.name) is type(detector):
        config = detector.to_config()
        assert from_config(config).to_config() == config, (
            f"{config} is not rebuilt from its options"
        )


def check_needs(detector: Detector) -> None:
    """`needs` is true: passes and labels of a fit, and what a score reads."""
    problem, needs = make_problem(detector), detector.needs
    passes = 0

    class Counted:
        def __iter__(self) -> Iterator[Batch]:
            nonlocal passes
            passes += 1  # once the first batch is asked for
            yield problem.train if needs.labels else problem.train._replace(labels=None)

    learner = fitted(detector, problem, Counted())
    allowed = (
        math.inf if needs.passes is None else max(needs.passes, 1)
    )  # the first batch is looked at in any case
    assert passes <= allowed, f"needs says {needs.passes} passes, the fit made {passes}"
    scores = learner.score(problem.queries)
    other = problem.queries._replace(
        logits=problem.head(problem.queries.features) + torch.arange(CLASSES)
    )
    if not needs.logits:
        _assert_close(
            learner.score(other),
            scores,
            "needs says that no logits are read, but they change the score",
        )
    elif not needs.features:
        moved, promise = (
            other._replace(features=other.features + 1),
            "needs says that no features are read, but they",
        )
        _assert_close(learner.score(moved), learner.score(other), f"{promise} change the score")


def check_fit(detector: Detector) -> None:
    """Neither the split nor the order of the training data nor an earlier fit changes a score, and
    statistics travel as bytes and merge in any order. Tensors that are given to a fit or a score do
    not change."""
    problem = make_problem(detector)
    kept, expected = copy.deepcopy(problem), fitted(detector, problem).score(problem.queries)
    for given, same in zip(problem[:2], kept[:2]):
        for name in ("features", "labels", "views"):
            part = getattr(given, name)
            assert part is None or torch.equal(part, getattr(same, name)), (
                f"the {name} that were given have changed"
            )
    assert torch.equal(problem.head.weight, kept.head.weight), "the head that was given has changed"
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1))
    pieces = [problem.train.rows(piece) for piece in order.split(17)]
    split = fitted(detector, problem, [pieces[0].rows(slice(0, 0)), *pieces])
    _assert_close(
        split.score(problem.queries), expected, "the split of the training data changes scores"
    )
    again = fitted(fitted(detector, make_problem(detector, seed=1)), problem)
    _assert_close(again.score(problem.queries), expected, "a second fit remembers the first")
    shards = [problem.train.rows(piece) for piece in torch.arange(SAMPLES).split(50)]

    def sum_up(statistics: Together) -> Together:
        sums: list[Together] = [pickle.loads(pickle.dumps(statistics)) for _ in shards]
        for part, shard in zip(sums, shards):
            add_batches(part, [shard], problem.head, detector)
        for part in sums[1:]:
            sums[0].merge(pickle.loads(pickle.dumps(part)))
        return sums[0]

    for _ in range(2):
        merged = copy.deepcopy(detector)
        fit_by(sum_up, merged, problem.head, torch.float64)
        merged = merged.calibrate(problem.train) if isinstance(merged, Ensemble) else merged
        _assert_close(
            merged.score(problem.queries),
            expected,
            "merged statistics give other scores than one pass",
        )
        shards.reverse()


def check_refuses_bad_training_data(detector: Detector) -> None:
    """A fit on a NaN is an error that names the batch and the row, and leaves the detector
    unfitted."""
    problem, learner = _solved(detector)
    if detector.needs.network or next(copy.deepcopy(detector).start(problem.head), None) is None:
        return  # it learns nothing
    broken = problem.train.features.clone()
    broken[SAMPLES // 2 + 3, 1] = math.nan
    halves = [
        problem.train._replace(features=broken).rows(slice(*ends))
        for ends in ((0, 60), (60, SAMPLES))
    ]
    complaint = _complaint(lambda: fit_detector(learner, halves, problem.head), ValueError)
    assert "batch 1, row 3" in complaint, (
        f"a NaN feature in batch 1, row 3 is reported as: {complaint or 'nothing'}"
    )
    refused = _complaint(lambda: learner.score(problem.queries), NotFittedError)
    assert refused, "a detector whose fit failed still scores"


def check_rows(detector: Detector) -> None:
    """A sample's score depends on that sample alone; an empty batch has no scores."""
    problem, learner = _solved(detector)
    together = learner.score(problem.queries)
    assert together.shape == (QUERIES,), (
        f"{QUERIES} samples have scores of shape {tuple(together.shape)}"
    )
    assert bool(torch.isfinite(together).all()), (
        f"finite samples have the scores {together.tolist()}"
    )
    alone = torch.cat(
        [learner.score(problem.queries.rows(slice(row, row + 1))) for row in range(QUERIES)]
    )
    _assert_close(alone, together, "a sample's score depends on the rest of its batch", 1e-5)
    empty = learner.score(problem.queries.rows(slice(0, 0)))
    assert empty.shape == (0,), f"an empty batch has scores of shape {tuple(empty.shape)}"


def check_fails_closed(detector: Detector) -> None:
    """A NaN or an infinity in anything that a score reads gives −inf, and leaves the other rows
    alone."""
    problem, learner = _solved(detector, torch.float32)
    needs, queries = detector.needs, problem.queries._replace(logits=None)
    is_read = {
        "features": needs.features or needs.logits,
        "logits": needs.logits,
        "views": needs.views and queries.views is not None,
        **dict.fromkeys(needs.layers, True),
    }

    def spoilt(name: str, bad: float) -> Batch:
        """The queries with a number in place of one entry of each of the first three rows, in all
        views."""
        layers = dict(queries.layers or {})
        part = layers.get(
            name,
            problem.head(queries.features) if name == "logits" else getattr(queries, name, None),
        )
        assert part is not None
        part = part.clone()
        part[..., [0, 1, 2], [0, part.shape[-1] // 2, -1]] = bad
        return queries._replace(
            **{"layers": {**layers, name: part}} if name in layers else {name: part}
        )

    for name in filter(is_read.get, is_read):
        clean = learner.score(spoilt(name, 0.5))
        for bad in (math.nan, math.inf, -math.inf):
            scores = learner.score(spoilt(name, bad))
            assert bool((scores[:3] == -math.inf).all()), (
                f"{bad} in its {name} scores {scores[:3].tolist()}, not −inf"
            )
            _assert_close(
                scores[3:], clean[3:], f"{bad} in the {name} of a row changes other rows", 1e-5
            )


def check_large_numbers(detector: Detector) -> None:
    """Finite numbers of any size have a score that is a number or −inf, never NaN or +inf."""
    for dtype, factor in ((torch.float32, 1e25), (torch.float32, 1e37), (torch.float64, 1e307)):
        problem, learner = _solved(detector, dtype)
        queries = problem.queries._replace(features=problem.queries.features * factor, logits=None)
        if queries.views is not None:
            queries = queries._replace(views=queries.views * factor)
        scores = learner.score(queries)
        assert bool((scores < math.inf).all()), (
            f"features of size {factor:g} in {dtype} score {scores.tolist()}"
        )


def check_dtypes_and_devices(detector: Detector) -> None:
    """Half, bfloat16, integer and array inputs are scored in the dtype of the fit; float32 agrees
    with float64. Scores stay where the detector is, whatever the default device; on an accelerator
    where there is one."""
    problem, learner = _solved(detector, torch.float32)
    expected = learner.score(problem.queries)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64):
        given = problem.queries.to(dtype=dtype)
        scores = learner.score(given)
        assert scores.dtype == torch.float32, (
            f"{dtype} features have scores of {scores.dtype}, expected torch.float32"
        )
        _assert_close(
            scores,
            learner.score(given.to(dtype=torch.float32)),
            f"{dtype} features score otherwise",
            1e-4,
        )
    array: Any = problem.queries.features.numpy()
    _assert_close(
        learner.score(problem.queries._replace(features=array)), expected, "arrays score otherwise"
    )
    if not detector.needs.network:  # a step along a gradient's sign has no digits to agree in
        exact_problem, exact = _solved(detector)
        _assert_close(
            expected,
            exact.score(exact_problem.queries),
            "float32 scores are not those of float64",
            2e-3,
        )
    with torch.device("meta"):  # a tensor that the score makes without a device would land there
        for one in (learner, fitted(detector, problem)):
            _assert_close(
                one.score(problem.queries), expected, "another default device changes scores", 1e-5
            )
    if torch.cuda.is_available():  # pragma: no cover - GPU
        moved = learner.to("cuda").score(problem.queries.to("cuda"))
        assert moved.is_cuda, "scores of a detector on the GPU are not on the GPU"
        _assert_close(moved.cpu(), expected, "the GPU gives other scores", 1e-3)


def check_gradients(detector: Detector) -> None:
    """Where a score has a gradient, it is that of finite differences, but for the few rows at a
    kink."""
    if detector.needs.network:
        return
    problem, learner = _solved(detector, views=False)
    inputs = (
        problem.queries.features + 0.1
    ).requires_grad_()  # away from the kink of features at 0
    scores = learner.score(problem.queries._replace(features=inputs))
    if not scores.requires_grad:
        return
    (gradient,) = torch.autograd.grad(scores.sum(), inputs)
    step = 1e-6 * torch.randn(
        inputs.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    with torch.no_grad():
        ends = [
            learner.score(problem.queries._replace(features=inputs + sign * step))
            for sign in (1, -1)
        ]
    expected, found = (ends[0] - ends[1]) / 2, (gradient * step).sum(dim=1)
    near = (found - expected).abs() <= 1e-3 * expected.abs() + 1e-4 * step.abs().max()
    assert near.double().mean() >= 0.75, (
        f"gradients are {found.tolist()}, finite differences {expected.tolist()}"
    )


def check_saving(detector: Detector) -> None:
    """Copies, pickles and state dicts score the same; buffers that are not finite or do not fit are
    refused."""
    problem, learner = _solved(detector, torch.float32)
    expected, state = learner.score(problem.queries), learner.state_dict()

    def score_with(state: dict[str, Tensor]) -> Tensor:
        loaded = copy.deepcopy(detector)
        loaded.load_state_dict(state)
        return loaded.score(problem.queries)

    found = [score_with(state), copy.deepcopy(learner).score(problem.queries)]
    kinds = {type(module) for module in learner.modules()}
    if all(
        getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind for kind in kinds
    ):  # can be imported
        found.append(pickle.loads(pickle.dumps(learner)).score(problem.queries))
    assert all(torch.equal(scores, expected) for scores in found), (
        "a copy or a loaded state scores otherwise"
    )
    for name, buffer in state.items():
        forged = (
            {f"{name} of infinities": torch.full_like(buffer, math.inf)}
            if buffer.is_floating_point()
            else {}
        )
        for axis in _bound_axes(learner, name, buffer):
            forged[f"{name} that is too short on axis {axis}"] = buffer.narrow(
                axis, 0, buffer.shape[axis] - 1
            ).clone()
        for what, broken in forged.items():
            refused = _complaint(
                partial(score_with, {**state, name: broken}), ValueError, RuntimeError, IndexError
            )
            assert refused, (
                f'a file with {what} is not refused: state its shape, such as Annotated[Tensor, "C P"]'
            )


def _bound_axes(detector: Detector, name: str, buffer: Tensor) -> list[int]:
    """Axes of a buffer whose length follows from other buffers: those with letters that others
    share, the last one of an undeclared buffer."""
    path, _, own = name.rpartition(".")
    module = detector.get_submodule(path)
    assert isinstance(module, Configured)
    if module.buffer_shape(own) is None:
        return [buffer.ndim - 1] if buffer.ndim > 1 else []
    letters = [
        letter for other in module._buffers for letter in (module.buffer_shape(other) or "").split()
    ]
    return [
        axis
        for axis, letter in enumerate((module.buffer_shape(own) or "").split())
        if letters.count(letter) > 1
    ]


class _OnFeatures(nn.Sequential):
    """A detector as a graph sees it: features in, scores out."""

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self[0](Batch(features))
        return scores


def _check_graph(
    detector: Detector, record: Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]], size: int
) -> None:
    """A recorded graph gives the same scores for another batch size too, and for a row with a
    NaN."""
    if detector.needs.network or detector.needs.layers:
        return
    problem, learner = _solved(detector, torch.float32, views=False)
    # No two equal features in a row: graphs break ties in an order of their own.
    features = problem.queries.features + torch.linspace(0.01, 0.02, WIDTH)
    features[0, 0] = math.nan
    graph = record(_OnFeatures(learner).eval(), features)
    for rows in (features, features[:size]):
        _assert_close(
            graph(rows), learner.score(Batch(rows)), "an exported graph scores otherwise", 1e-4
        )


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


_NAMES = [
    name
    for name in globals()
    if name.startswith("check_") and name not in ("check_detector", "check_onnx")
]
CHECKS: tuple[Callable[[Detector], None], ...] = tuple(globals()[name] for name in _NAMES)
"""All checks above but `check_onnx`, for a test that runs them one by one."""
