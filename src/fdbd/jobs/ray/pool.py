"""Work on a cluster, and fits by such work, whatever the rows come from: files, or a Ray Dataset.

Work is done by Ray's tasks, not by actors: a task holds its CPUs only while it works, so that jobs
share a cluster, and none waits for CPUs that another job, or its own reading, will never give back.
In a fit, features become partial sums where they are read, and the driver merges the sums; where a
network runs, its features come to the driver.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from typing_extensions import Unpack

from fdbd.core.batch import Batch, Head
from fdbd.decision.guard import Guard
from fdbd.decision.stages import CalibrationScores, TrainingBatch
from fdbd.decision.threshold import Target
from fdbd.detectors import Detector
from fdbd.fitting.driver import add_batches, fit_by, fit_detector
from fdbd.fitting.overlap import Sketch
from fdbd.fitting.spool import Spool
from fdbd.fitting.statistics import Together
from fdbd.util.extras import require

if TYPE_CHECKING:
    from fdbd.jobs.fitting import Loader

Items = list[Any]
"""Batches as loaders give them: (inputs of the model, labels or None), or `Batch`es of features."""
Run = Callable[[Guard, Callable[[Items], Any]], Iterator[Any]]
"""Does some work with a guard on all batches of some rows, in the processes of a cluster; results
come in any order."""

TASK_RETRIES = 3
"""How often a piece of work is repeated after its process or node died: enough for dying nodes, and
an end where the work itself is what kills, such as an image that crashes its decoder."""
IDLE_SECONDS = 20.0  # how long a process keeps a model that it has no work for
NOTICE_SECONDS = 60.0  # without a result for so long, a job says what it waits for
LATE_SECONDS, LATE_TIMES = 60.0, 10
"""A piece of work that takes longer than LATE_SECONDS, and LATE_TIMES as long as the slowest
finished one, is given out a second time: its process may have been stopped, which Ray does not
notice."""


@dataclass(frozen=True)
class Workers:
    """How work is spread over a cluster.

    Args:
        count: pieces of work at once, each in a process with a copy of the model; None: as many as
            there is room for.
        cpus: logical CPUs of each, and its torch threads; fractions are allowed.
        gpus: GPUs of each; with one the model runs there.
        batch_size: rows that the model sees at once.
        patience: seconds without a result after which a job ends with an error that says what it
            waits for.

    >>> Workers(8, cpus=4, gpus=1).batch_size
    256
    """

    count: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    batch_size: int = 256
    patience: float = 1800.0

    def __post_init__(self) -> None:
        too_few = self.batch_size < 1 or (self.count is not None and self.count < 1)
        if too_few or self.cpus <= 0 or self.gpus < 0 or self.patience <= 0:
            raise ValueError(
                f"{self}: expected count and batch_size to be at least 1, cpus and patience above 0, gpus at least 0"
            )

    @classmethod
    def of(cls, workers: Workers | int | None) -> Workers:
        """The workers as given; for a number, that many."""
        return workers if isinstance(workers, Workers) else cls(workers)

    def shared(self, guard: Guard, work: Callable[[Any], Any]) -> Shared:
        """Work for the processes of the cluster, in each of which its guard goes to a device
        once."""
        together = require("ray", "ray").put(
            (guard, work)
        )  # so that they share the guard there, too
        return Shared([together], max(1, int(self.cpus)), "cuda" if self.gpus else "cpu")

    def run(
        self, guard: Guard, work: Callable[[Any], Any], pieces: Iterable[Any]
    ) -> Generator[tuple[Any, Any], None, None]:
        """Do all pieces of some work with a guard. Yields each piece once with its result, in the
        order in which they get ready. TimeoutError: there was none for `patience` seconds."""
        ray = require("ray", "ray")
        options = {
            "num_cpus": self.cpus,
            "num_gpus": self.gpus,
            "max_calls": 0,
            "max_retries": TASK_RETRIES,
        }
        task = ray.remote(**options)(Shared.__call__)
        shared, waiting = self.shared(guard, work), iter(pieces)
        pending: dict[Any, _Pending] = {}
        progress, slowest, notice = time.monotonic(), 0.0, min(NOTICE_SECONDS, self.patience)
        try:
            while True:
                room = self.count or max(1, sum(map(self._fits, _nodes())))
                for piece in islice(waiting, max(0, room - len(pending))):
                    pending[task.remote(shared, piece)] = _Pending(piece, time.monotonic())
                if not pending:
                    return
                ready, _ = ray.wait(list(pending), timeout=1.0)
                for reference in ready:
                    done = pending.pop(reference)
                    with plain_errors():
                        found = ray.get(reference)
                    for other in [
                        other for other, each in pending.items() if each.piece is done.piece
                    ]:
                        del pending[other]
                        ray.cancel(other)
                    slowest = max(slowest, time.monotonic() - done.start)
                    yield done.piece, found
                    progress = time.monotonic()
                now = time.monotonic()
                if now - progress >= notice:
                    sentence = f"no result for {now - progress:.0f} seconds: {self.waits_for()}"
                    if now - progress >= self.patience:
                        raise TimeoutError(sentence)
                    warnings.warn(sentence, stacklevel=2)
                    notice = self.patience
                for reference, each in list(pending.items()):
                    if each.can_be_late and now - each.start > max(
                        LATE_SECONDS, LATE_TIMES * slowest
                    ):
                        pending[reference] = each._replace(can_be_late=False)
                        pending[task.remote(shared, each.piece)] = _Pending(
                            each.piece, now, can_be_late=False
                        )
        finally:
            for reference in pending:
                ray.cancel(reference)

    def _fits(self, resources: dict[str, float]) -> int:
        """How many tasks of this size a node with these resources could run at once, if it had
        nothing else to do."""
        gpus = resources.get("GPU", 0.0) / self.gpus if self.gpus else math.inf
        return int(min(resources.get("CPU", 0.0) / self.cpus, gpus))

    @property
    def needs(self) -> str:
        """What one task holds while it works."""
        return _count(self.cpus, "CPU") + (f" and {_count(self.gpus, 'GPU')}" if self.gpus else "")

    def waits_for(self) -> str:
        """What a task needs, and what the cluster has."""
        nodes, free = _nodes(), require("ray", "ray").available_resources()
        total = {
            kind: sum(node.get(kind, 0) for node in nodes)
            for kind in (["CPU", "GPU"] if self.gpus else ["CPU"])
        }
        have = " and ".join(
            f"{free.get(kind, 0):g} of {_count(number, kind)}" for kind, number in total.items()
        )
        return (
            f"a task needs {self.needs} on one node, and {have} are free on {_count(len(nodes), 'node')}"
            + ("" if any(map(self._fits, nodes)) else ", none of which is large enough")
            + "; unless this job's own tasks are at work there, end what holds the rest, ask for less, or add nodes"
        )


class _Pending(NamedTuple):
    """A piece of work that was given out; `can_be_late` is False where it was given out twice."""

    piece: Any
    start: float
    can_be_late: bool = True


class Shared(NamedTuple):
    """Work as it travels to the processes of the cluster: by reference, fetched once per
    process."""

    references: list[Any]  # one, in a list because Ray would fetch a bare one again for each task
    threads: int
    device: str

    def __call__(self, piece: Any) -> Any:
        """Do a piece of the work, in a process of the cluster."""
        [reference] = self.references
        with _LOCK:
            if "idle" in _HELD:
                _HELD["idle"].cancel()
            if _HELD.get("key") != reference.hex():
                _drop()
                torch.set_num_threads(self.threads)
                guard, work = require("ray", "ray").get(reference)
                guard.to(self.device)
                _HELD.update(key=reference.hex(), work=work)
            try:
                return _HELD["work"](piece)
            finally:
                _HELD["idle"] = threading.Timer(IDLE_SECONDS, _drop)
                _HELD["idle"].daemon = True
                _HELD["idle"].start()


_LOCK = threading.RLock()
_HELD: dict[str, Any] = {}
"""In a process of the cluster: the last `work`, its `key`, and the timer that drops it when it is
`idle`."""


def _drop() -> None:
    with _LOCK:
        _HELD.clear()
        if torch.cuda.is_initialized():  # pragma: no cover - GPU
            torch.cuda.empty_cache()


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _nodes() -> list[dict[str, float]]:
    """Resources of each living node of the cluster."""
    return [node["Resources"] for node in require("ray", "ray").nodes() if node["Alive"]]


def connect(address: str | None = None) -> None:
    """Join a cluster, unless Ray is there already: at an address such as ``"auto"`` or
    ``"head:6379"``; None: at what ``RAY_ADDRESS`` in the environment says, and without that Ray is
    started on this machine.

    >>> connect()
    >>> require("ray", "ray").is_initialized()
    True
    """
    ray = require("ray", "ray")
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    where: dict[str, Any] = (
        {"address": address} if address else {"address": "local", "include_dashboard": False}
    )
    try:
        ray.init(logging_level=logging.WARNING, log_to_driver=False, **where)
    except (ConnectionError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address!r}: {' '.join(str(error).split())}"
        ) from None


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that a worker raised, as it raised them, instead of Ray's pages about them."""
    ray = require("ray", "ray")
    try:
        yield
    except ray.exceptions.RayError as error:
        if isinstance(error, (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)):
            raise RuntimeError(
                f"a worker died {TASK_RETRIES + 1} times over the same piece of work: an image may crash its decoder, "
                "which --engine local makes a row with an error, or memory is short"
            ) from None
        while (
            inner := getattr(error, "cause", None) or error.__cause__
        ) is not None and inner is not error:
            error = inner  # Ray wraps the errors of workers in its own, several deep
        if len(error.args) == 1 and isinstance(error.args[0], str):
            error.args = (
                error.args[0].partition("\nFailed to apply UDF transform")[0],
            )  # which Ray Data appends
        raise error from None


def fit_rows(guard: Guard, run: Run, first: Batch | None) -> None:
    """Fit a guard in place, with the result of `Guard.fit`. Where rows are features, `first` is a
    batch of them, and they are read once per pass of the detector; without it, the network runs
    once over the rows."""
    stages = guard.stages
    stages.begin_fit()
    head = guard.head
    if first is None:
        with Spool() as spool:
            for found in run(guard, partial(_features, guard)):
                for each in found:
                    spool.append(stages.note(each))
            fit_detector(guard.detector, spool, head)
    else:
        stages.features_alone(first)  # says so where features are not enough

        def sum_up(statistics: Together) -> Together:
            seen = Sketch()
            total = copy.deepcopy(statistics)
            for sketch, sums in run(
                guard, partial(_partial_sums, statistics, head, guard.detector)
            ):
                seen.merge(sketch)
                total.merge(sums)
            stages.record.seen = seen
            return total

        fit_by(sum_up, guard.detector, head, first.features.dtype)
    stages.end_fit()


def no_rows(guard: Guard) -> Batch:
    return Batch(torch.zeros(0, guard.head.num_features))


def calibrate_rows(guard: Guard, run: Run, **target: Unpack[Target]) -> None:
    """Set a fitted guard's threshold."""
    found = (batch for batches in run(guard, partial(_scores, guard)) for batch in batches)
    guard.calibrate(found, **target, progress=False)


def fit_loaders(
    guard: Guard, training: Loader, calibration: Loader, workers: Workers, **target: Unpack[Target]
) -> None:
    """Fit and calibrate a guard on the rows of two loaders, which then know how many they gave and
    left out. The pieces of work are the loaders' spans, read by the same path on every node."""
    first = next(iter(training), no_rows(guard)) if training.preparation is None else None
    fit_rows(guard, partial(_run_loader, training, workers), first)
    calibrate_rows(guard, partial(_run_loader, calibration, workers), **target)


def _run_loader(
    loader: Loader, workers: Workers, guard: Guard, work: Callable[[Items], Any]
) -> Iterator[Any]:
    notes: dict[
        Any, tuple[int, list[str]]
    ] = {}  # of each span: rows given, and why others were left out
    for span, (note, result) in workers.run(guard, partial(_read, loader, work), loader.spans):
        notes[span] = note
        yield result
    loader.num_given = sum(given for given, _ in notes.values())
    loader.errors = [error for span in loader.spans for error in notes[span][1]]
    loader.check_given()


def _read(
    loader: Loader, work: Callable[[Items], Any], span: Any
) -> tuple[tuple[int, list[str]], Any]:
    loader = copy.copy(loader)
    items = list(loader.read([span], processes=False))
    return (loader.num_given, loader.errors), work(items)


def _features(guard: Guard, items: Items) -> list[TrainingBatch]:
    found = []
    with torch.no_grad():
        for item in items:
            training = guard.stages.training_batch(item)
            found.append(training._replace(batch=training.batch.cpu()))
    return found


def _scores(guard: Guard, items: Items) -> list[CalibrationScores]:
    with torch.no_grad():
        found = [guard.stages.calibration_scores(item) for item in items]
    return [
        batch._replace(scores=batch.scores.cpu(), predicted=batch.predicted.cpu())
        for batch in found
    ]


def _partial_sums(
    empty: Together, head: Head, detector: Detector, items: Items
) -> tuple[Sketch, Together]:
    sketch, sums = Sketch(), copy.deepcopy(empty)  # one process sums many pieces
    for batch in items:
        sketch.add(batch.features)
    add_batches(sums, items, head, detector)
    return sketch, sums
