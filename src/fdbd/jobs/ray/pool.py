"""The pool of actors that hold the model, and the way to a cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fdbd.util.extras import require

TASK_RETRIES = 3
"""How often a piece of work is done again after its actor died: enough for dying nodes, and an end where the work
itself is what kills, such as an image that crashes its decoder. Ray Data would go on for ever."""
_RAYS_ADVICE = "\nFailed to apply UDF transform"
"""How a text begins that Ray Data appends to the errors of workers."""


@dataclass(frozen=True)
class Workers:
    """The pool of actors, each of which holds the model.

    Args:
        count: how many; None: as many as the cluster's logical CPUs allow, less one CPU for reading.
        cpus: logical CPUs of each, and its torch threads.
        gpus: GPUs of each; with one the model runs there.
        batch_size: rows that the model sees at once.
    """

    count: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    batch_size: int = 256

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError(f"{self.count} workers asked for, expected at least 1")
        if self.cpus <= 0 or self.gpus < 0 or self.batch_size < 1:
            raise ValueError(
                f"cpus is {self.cpus}, gpus is {self.gpus}, batch_size is {self.batch_size}; expected cpus above 0, "
                "gpus at least 0 and batch_size at least 1"
            )

    @classmethod
    def of(cls, workers: Workers | int | None) -> Workers:
        """A pool, or one of so many workers."""
        return workers if isinstance(workers, Workers) else cls(workers)

    @classmethod
    def on(cls, device: str | None, count: int | None, batch_size: int) -> Workers:
        """So many workers on a device as torch names it; each on a GPU of its own where that is "cuda"."""
        return cls(count, gpus=1.0 if device == "cuda" else 0.0, batch_size=batch_size)

    @property
    def threads(self) -> int:
        """Torch threads of each."""
        return max(1, int(self.cpus))

    @property
    def device(self) -> str:
        """Where the model goes."""
        return "cuda" if self.gpus else "cpu"

    def map(self, dataset: Any, actor: type[Actor], arguments: tuple[Any, ...], batch_size: int | None = None) -> Any:
        """The dataset's tables passed through a pool of actors that start with these arguments, when it is read."""
        ray, data = require("ray", "ray"), require("ray.data", "ray")
        total = ray.cluster_resources().get("CPU", 0.0)
        count = max(1, int((total - 1) / self.cpus)) if self.count is None else self.count
        if count * self.cpus > total - 1:  # Ray Data would wait for ever
            raise ValueError(
                f"{count} workers with {self.cpus:g} CPUs each leave less than 1 of Ray's {total:g} logical CPUs, and "
                "reading needs that one: ask for fewer workers, or start Ray with more logical CPUs than there are "
                "cores (ray start --num-cpus, or num_cpus of ray.init)"
            )
        mapped = dataset.map_batches(
            actor,
            fn_constructor_args=(ray.put(arguments), self.threads, self.device),
            compute=data.ActorPoolStrategy(size=count),
            num_cpus=self.cpus,
            num_gpus=self.gpus,
            max_task_retries=TASK_RETRIES,
            batch_size=batch_size or self.batch_size,
            batch_format="pyarrow",
        )
        return with_plain_errors(mapped)


class Actor:
    """What stands in the pool: subclasses keep in `start` what they are given, and map tables in ``__call__``.

    Args:
        shared: reference to the arguments of `start`, which travel once a node.
        threads: of torch.
        device: of the model.
    """

    def __init__(self, shared: Any, threads: int, device: str) -> None:
        torch.set_num_threads(threads)
        self.device = device
        self.start(*require("ray", "ray").get(shared))

    def start(self, *arguments: Any) -> None:
        """Keep the arguments."""
        raise NotImplementedError


def connect(address: str | None = None) -> None:
    """Join a cluster, unless Ray is there already.

    Args:
        address: such as ``"auto"`` or ``"head:6379"``; None: what ``RAY_ADDRESS`` in the environment says; without
            that, Ray is started on this machine, with one logical CPU more than it has cores, for reading.
    """
    ray = require("ray", "ray")
    if ray.is_initialized():
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        ray.init(address="local", num_cpus=(os.cpu_count() or 1) + 1, include_dashboard=False, **options)
        return
    try:
        ray.init(address=address, **options)
    except (ConnectionError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address!r}: {' '.join(str(error).split())}") from None


def with_plain_errors(dataset: Any) -> Any:
    """The dataset, whose workers report what went wrong itself: Ray's own error for it would arrive without a cause."""
    dataset.context.raise_original_map_exception = True
    return dataset


@contextmanager
def quiet() -> Iterator[None]:
    """No log and no bars of Ray Data meanwhile, for commands that show their own."""
    context, logger = require("ray.data", "ray").DataContext.get_current(), logging.getLogger("ray.data")
    bars, level = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        context.enable_progress_bars = bars
        logger.setLevel(level)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Errors that a worker raised, as it raised them, instead of Ray's pages about them."""
    ray = require("ray", "ray")
    try:
        yield
    except ray.exceptions.RayError as error:
        if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
            raise RuntimeError(
                f"a worker died {TASK_RETRIES + 1} times over the same piece of work: an image may crash its decoder, "
                "which --engine local makes a row with an error, or memory is short"
            ) from None
        cause = _cause(error)
        if len(cause.args) == 1 and isinstance(cause.args[0], str):
            cause.args = (cause.args[0].partition(_RAYS_ADVICE)[0],)
        raise cause from None


def _cause(error: BaseException) -> BaseException:
    """What went wrong first: Ray wraps the errors of workers in its own, several deep."""
    chain = [error]
    while (inner := getattr(chain[-1], "cause", None) or chain[-1].__cause__) is not None and inner not in chain:
        chain.append(inner)
    return chain[-1]
