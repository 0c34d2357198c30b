"""Work on a cluster. Ray Data gives it out, to Ray's tasks and not to actors: a task holds its CPUs
only while it works, so that jobs share a cluster, and none waits for CPUs that another job, or its
own reading, will never give back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fdbd.decision.guard import Guard
from fdbd.util.extras import require

TASK_RETRIES = 3
"""How often a piece of work is repeated after its process or node died: enough for dying nodes, and
an end if the work itself is what kills, such as an image that crashes its decoder."""
IDLE_SECONDS = 20.0
"""How long a process keeps a model that it has no work for."""


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
        if self.count is not None and self.count < 1:
            raise ValueError(f"count is {self.count}, expected at least 1, or None")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, expected at least 1")
        if self.cpus <= 0 or self.patience <= 0:
            raise ValueError(
                f"cpus is {self.cpus} and patience is {self.patience}, expected more than 0"
            )
        if self.gpus < 0:
            raise ValueError(f"gpus is {self.gpus}, expected at least 0")

    @classmethod
    def from_count(cls, workers: Workers | int | None) -> Workers:
        """The workers as given; for a number, that many."""
        if isinstance(workers, Workers):
            return workers
        return cls(workers)

    @classmethod
    def of(cls, workers: Workers | int | None) -> Workers:
        """Deprecated: use `from_count`."""
        warnings.warn(
            "Workers.of is now Workers.from_count; the old name will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        return cls.from_count(workers)

    def shared(self, guard: Guard, work: Callable[[Any], Any]) -> Shared:
        """Work for the processes of the cluster, in each of which its guard goes to a device
        once."""
        # In one object, so that the work refers to this very guard in the processes, too.
        reference = require("ray", "ray").put((guard, work))
        threads = max(1, int(self.cpus))
        device = "cuda" if self.gpus else "cpu"
        return Shared([reference], threads, device)

    def mapped(self, dataset: Any, guard: Guard, work: Callable[[Any], Any]) -> Any:
        """The Ray Dataset of the results of some work on the tables of another, which is done when
        it is read."""
        shared = self.shared(guard, work)

        def task(table: Any) -> Any:
            return shared(table)

        # Ray Data shows this name when a job makes no progress.
        task.__name__ = f"task with {self.needs}"
        mapped = dataset.map_batches(
            task,
            compute=require("ray.data", "ray").TaskPoolStrategy(size=self.count),
            num_cpus=self.cpus,
            num_gpus=self.gpus or None,
            # A process keeps its model for the next task.
            max_calls=0,
            # Ray Data's own choice is to try for ever.
            max_retries=TASK_RETRIES,
            batch_size=self.batch_size,
            batch_format="pyarrow",
        )
        mapped.context.execution_no_progress_timeout_s = self.patience
        # Ray's own error would reach this process without its cause.
        mapped.context.raise_original_map_exception = True
        return mapped

    def results(
        self, dataset: Any, guard: Guard, work: Callable[[Any], Any]
    ) -> Generator[Any, None, None]:
        """The results of some work on the tables of a Ray Dataset, whatever they are, in the order
        in which they get ready. TimeoutError: there was none for `patience` seconds."""
        mapped = self.mapped(dataset, guard, partial(_pickled, work))
        try:
            with plain_errors():
                for row in mapped.iter_rows():
                    yield pickle.loads(row["result"])
        except require("ray.data.exceptions", "ray").ExecutionTimeoutError:
            raise TimeoutError(
                f"no result for {self.patience:g} seconds: {self.waits_for()}"
            ) from None

    def run(
        self, guard: Guard, work: Callable[[Any], Any], pieces: Sequence[Any]
    ) -> Generator[tuple[Any, Any], None, None]:
        """Do all pieces of some work with a guard. Yields each piece once with its result, in the
        order in which they get ready. TimeoutError: there was none for `patience` seconds."""
        if not pieces:
            return
        numbers = [{"number": number} for number in range(len(pieces))]
        # The dataset holds only the numbers of the pieces, which travel with the work: blocks that
        # lie in the driver are not lost with a node.
        dataset = require("ray.data", "ray").from_items(numbers, override_num_blocks=len(pieces))
        one_by_one = replace(self, batch_size=1)
        numbered = partial(_by_number, work, pieces)
        with contextlib.closing(one_by_one.results(dataset, guard, numbered)) as results:
            for number, result in results:
                yield pieces[number], result

    def _fits(self, resources: dict[str, float]) -> bool:
        """Whether a node with these resources could run a task, if it had nothing else to do."""
        has_cpus = resources.get("CPU", 0.0) >= self.cpus
        has_gpus = resources.get("GPU", 0.0) >= self.gpus
        return has_cpus and has_gpus

    @property
    def needs(self) -> str:
        """What one task holds while it works."""
        if self.gpus:
            return f"{_count(self.cpus, 'CPU')} and {_count(self.gpus, 'GPU')}"
        return _count(self.cpus, "CPU")

    def waits_for(self) -> str:
        """What a task needs, and what the cluster has."""
        nodes = _nodes()
        free = require("ray", "ray").available_resources()
        kinds = ["CPU"]
        if self.gpus:
            kinds.append("GPU")
        have = []
        for kind in kinds:
            total = sum(node.get(kind, 0) for node in nodes)
            have.append(f"{free.get(kind, 0):g} of {_count(total, kind)}")
        said = (
            f"a task needs {self.needs} on one node, and {' and '.join(have)} are free on "
            f"{_count(len(nodes), 'node')}"
        )
        if not any(self._fits(node) for node in nodes):
            said += ", none of which is large enough"
        return (
            f"{said}; unless this job's own tasks are at work there, end what holds the rest, ask"
            " for less, or add nodes"
        )


class Shared(NamedTuple):
    """Work as it travels to the processes of the cluster: by reference, fetched once per
    process."""

    references: list[Any]
    """One, in a list because Ray would fetch a bare one again for each task."""
    threads: int
    device: str

    def __call__(self, piece: Any) -> Any:
        """Do a piece of the work, in a process of the cluster."""
        [reference] = self.references
        return _HELD.do(piece, reference, self.threads, self.device)


class _HeldWork:
    """The latest work of a process of the cluster, with its guard, which the next piece is likely
    to need again. It is dropped after `IDLE_SECONDS` without work."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._key: str | None = None
        self._work: Callable[[Any], Any] | None = None
        self._timer: threading.Timer | None = None

    def do(self, piece: Any, reference: Any, threads: int, device: str) -> Any:
        """Do a piece of the work that a reference stands for, one piece at a time."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            work = self._work
            if work is None or self._key != reference.hex():
                # The old guard goes first: memory may not be enough for two.
                self._drop()
                torch.set_num_threads(threads)
                guard, work = require("ray", "ray").get(reference)
                guard.to(device)
                self._key = reference.hex()
                self._work = work
            try:
                return work(piece)
            finally:
                self._timer = threading.Timer(IDLE_SECONDS, self._drop)
                self._timer.daemon = True
                self._timer.start()

    def _drop(self) -> None:
        with self._lock:
            self._key = None
            self._work = None
            if torch.cuda.is_initialized():  # pragma: no cover - GPU
                torch.cuda.empty_cache()


_HELD = _HeldWork()


def _pickled(work: Callable[[Any], Any], table: Any) -> dict[str, Any]:
    """The result of some work on a table, pickled into a table of one row: Ray Data takes nothing
    but tables."""
    return {"result": np.array([pickle.dumps(work(table))], dtype=object)}


def _by_number(work: Callable[[Any], Any], pieces: Sequence[Any], table: Any) -> tuple[int, Any]:
    """The number in a table of one row, and the result of the work on that piece."""
    [number] = table["number"].to_pylist()
    return number, work(pieces[number])


def _count(number: float, what: str) -> str:
    if number == 1:
        return f"1 {what}"
    return f"{number:g} {what}s"


def _nodes() -> list[dict[str, float]]:
    """Resources of each living node of the cluster."""
    return [node["Resources"] for node in require("ray", "ray").nodes() if node["Alive"]]


def connect(address: str | None = None) -> None:
    """Join a Ray cluster, unless this process has joined one already.

    Args:
        address: of the cluster, such as ``"auto"`` or ``"head:6379"``. None: the address in the
            environment variable ``RAY_ADDRESS``; if that is not set, Ray is started on this
            machine.

    >>> connect()
    >>> require("ray", "ray").is_initialized()
    True
    """
    ray = require("ray", "ray")
    if ray.is_initialized():
        return
    address = address or os.environ.get("RAY_ADDRESS")
    where: dict[str, Any] = {"address": address}
    if not address:
        where = {"address": "local", "include_dashboard": False}
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
                f"a worker died {TASK_RETRIES + 1} times over the same piece of work: an image may "
                "crash its decoder, which --engine local makes a row with an error, or memory is "
                "short"
            ) from None
        raise _innermost(error) from None


def _innermost(error: BaseException) -> BaseException:
    """The error that a worker raised: Ray wraps it in its own, several deep."""
    while True:
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is None or inner is error:
            break
        error = inner
    if len(error.args) == 1 and isinstance(error.args[0], str):
        # What follows is Ray Data's.
        message, _, _ = error.args[0].partition("\nFailed to apply UDF transform")
        error.args = (message,)
    return error
