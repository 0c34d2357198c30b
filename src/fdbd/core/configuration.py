"""What detectors and shapings share: a description of their needs, a name, options, and fitted
buffers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from typing_extensions import Self

T = TypeVar("T")
Passes = Generator[Any, Any, None]
"""What `passes` returns: yields empty statistics, and is sent them summed over the training
data."""


class Paper(NamedTuple):
    """Where a method comes from.

    >>> import fdbd
    >>> fdbd.FDBD.paper.venue, fdbd.FDBD.paper.year
    ('ICML', 2024)
    """

    title: str
    authors: str
    venue: str
    year: int

    def __str__(self) -> str:
        return f"{self.authors}, {self.title} ({self.venue} {self.year})"


@dataclass(frozen=True)
class Needs:
    """What a detector or a shaping looks at, and what fitting it takes.

    >>> needs = Needs(logits=True, passes=1)
    >>> needs.features, needs.logits, needs.labels
    (True, True, False)
    """

    features: bool = True  #: a score reads Batch.features
    logits: bool = False  #: a score reads Batch.logits; missing ones are computed from the head
    views: bool = False  #: a score reads Batch.views, where there are any
    layers: tuple[str, ...] = ()  #: names in Batch.layers that a score reads
    labels: bool = False  #: a fit needs Batch.labels
    heldout: bool = False  #: a fit needs data that the network was not trained on: training data would mislead it
    network: bool = False  #: scores need the network itself, so that only a Guard can give them
    passes: int | None = None
    """Passes over the training data in a fit; None: several, or not known. For more than one a
    Guard uses the disk."""
    calibration: bool = False  #: scores need `calibrate` after the fit, as those of an ensemble do


class NotFittedError(RuntimeError):
    """A detector was asked for scores before it saw training data.

    >>> import fdbd
    >>> fdbd.FDBD().score(fdbd.Batch(torch.rand(2, 3)))
    Traceback (most recent call last):
        ...
    fdbd.core.configuration.NotFittedError: ...
    """


class Configured(nn.Module):
    """A module that is rebuilt from its name and its constructor's arguments, and whose state is
    buffers. A subclass with a `name` is registered under it. Arguments of ``__init__`` are
    attributes of the same name and never change."""

    name: ClassVar[str] = ""
    paper: ClassVar[Paper | None] = None
    needs: Needs = Needs()
    """What it reads and what its fit takes; may be set per instance if that depends on options."""
    earlier_options: ClassVar[dict[str, object]] = {}
    """Values for options that are missing in older files."""
    registry: ClassVar[dict[str, type[Configured]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__dict__.get("name"):
            return
        known = Configured.registry.get(cls.name, cls)
        place = f"{known.__module__}.{known.__qualname__}"
        if place != f"{cls.__module__}.{cls.__qualname__}":
            raise ValueError(
                f"the name {cls.name!r} of {cls.__qualname__} is taken by {place}: choose another name"
            )
        Configured.registry[cls.name] = (
            cls  # a class that is defined again, as in a notebook, replaces the old one
        )

    def options(self) -> dict[str, object]:
        """Constructor arguments by name."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {
            p.name: getattr(self, p.name)
            for p in parameters
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }

    def to_config(self) -> dict[str, object]:
        """Name and options as plain JSON values; `from_config` turns them back into an unfitted
        object."""
        return {
            "name": self.name,
            "options": {name: _plain(value) for name, value in self.options().items()},
        }

    def require_name(self) -> None:
        """ValueError unless `from_config` can rebuild this object and its parts."""
        for part in self.modules():
            if isinstance(part, Configured) and Configured.registry.get(part.name) is not type(
                part
            ):
                kind = type(part).__name__
                lack = f"{kind} has no name of its own, by which a file could say what it is"
                raise ValueError(f"{lack}: give the class one, such as name = {kind.lower()!r}")

    fit_dtype: torch.dtype = torch.float32
    """float64 if head or features are, else float32."""

    def set(self, **tensors: Tensor) -> None:
        """Keep fitted tensors as buffers; floating ones take the dtype of the fit."""
        for name, tensor in tensors.items():
            tensor = tensor.to(self.fit_dtype) if tensor.is_floating_point() else tensor
            self._set_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))

    def _set_buffer(self, name: str, tensor: Tensor) -> None:
        self._buffers[name] = (
            tensor  # `register_buffer` would refuse a name that is also a property
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.half() is for the network: fitted tensors stay in float32, and half inputs are
        # scored in it.
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return (
                tensor.to(moved.device)
                if moved.is_floating_point() and moved.dtype.itemsize < 4
                else moved
            )

        return super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # An unfitted module has no buffers yet: create those that the file holds for it.
        for key, tensor in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix) and "." not in name:
                self._set_buffer(name, torch.empty_like(tensor))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.check_buffers()

    def buffer_shape(self, name: str) -> str | None:
        """The shape of a buffer as letters, such as "C P"; None: any. By default taken from its
        annotation, such as ``center: Annotated[Tensor, "P"]``. C and P are the head's classes and
        features, other letters sizes that are the same in all buffers; "" is a scalar."""
        try:
            parts = get_args(get_type_hints(type(self), include_extras=True).get(name))
        except (
            NameError,
            TypeError,
        ):  # annotations of a user's class that cannot be evaluated at run time
            return None
        return (
            parts[1]
            if len(parts) == 2 and parts[0] is Tensor and isinstance(parts[1], str)
            else None
        )

    def check_buffers(self) -> None:
        """ValueError for buffers with NaN or infinity, or whose shapes do not fit each other."""
        sizes: dict[str, int] = {}
        for name, tensor in sorted(
            self._buffers.items(), key=lambda item: not item[0].startswith("head_")
        ):
            if tensor is None:
                continue
            what = f"{name} of {type(self).__name__}"
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"{what} holds NaN or infinity; fit it again")
            if (shape := self.buffer_shape(name)) is None:
                continue
            letters = shape.split()
            sizes.update({letter: int(letter) for letter in letters if letter.isdigit()})
            found = [sizes.setdefault(letter, size) for letter, size in zip(letters, tensor.shape)]
            if len(letters) != tensor.ndim or found != list(tensor.shape):
                expected = ", ".join(str(sizes.get(letter, letter)) for letter in letters)
                shapes = (
                    f"shape {tuple(tensor.shape)}, expected ({expected}) to fit its other buffers"
                )
                raise ValueError(f"{what} has {shapes}")

    def extra_repr(self) -> str:
        options = self.options().items()
        return ", ".join(
            f"{name}={value!r}" for name, value in options if not isinstance(value, nn.Module)
        )


MOST, _MOST_ENTRIES = 1_000_000, 2_000
"""The largest count in an option, and the most values in a configuration: bounds the memory for a
forged file."""


def expect(name: str, value: T, is_right: bool, what: str) -> T:
    """The option's value if it is right, else a ValueError that says what was expected."""
    if not is_right:
        raise ValueError(f"{name} is {value!r}, expected {what}")
    return value


def one_of(name: str, value: T, *choices: object) -> T:
    """The option if it is one of the choices, else a ValueError that lists them."""
    return expect(
        name, value, value in choices, f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    )


def positive(name: str, value: float) -> float:
    """The option if it is a positive number, else a ValueError."""
    return expect(name, value, 0 < value < float("inf"), "a positive number")


def at_least_one(name: str, value: object, what: str) -> int:
    """The option as an int if it is an integer (numpy's too) from 1, else a ValueError that says
    `what` is expected."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    is_right = 1 <= number <= MOST and not isinstance(value, bool)
    expect(name, value, is_right, what + (f", at most {MOST:,}" if number > MOST else ""))
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.to_config() if isinstance(value, Configured) else value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return from_config(value) if isinstance(value, dict) else value


def from_config(config: Any) -> Any:
    """The unfitted object that `Configured.to_config` described; only registered names: no code
    comes from a file."""
    if (
        not isinstance(config, dict)
        or set(config) != {"name", "options"}
        or not isinstance(config["options"], dict)
    ):
        raise ValueError(f"not a detector's configuration: {config!r}")
    if _entries(config) > _MOST_ENTRIES:
        raise ValueError(f"a detector's configuration has more than {_MOST_ENTRIES:,} entries")
    if config["name"] not in Configured.registry:
        known = ", ".join(sorted(Configured.registry))
        raise ValueError(f"unknown detector or shaping {config['name']!r}; known are {known}")
    kind = Configured.registry[config["name"]]
    options = {
        **kind.earlier_options,
        **{name: _restored(value) for name, value in config["options"].items()},
    }
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"{config['name']!r} does not take these options: {error}") from None


def _entries(value: Any) -> int:
    """The number of values in a configuration and its parts."""
    if not isinstance(value, (dict, list)):
        return 1
    inner = value.values() if isinstance(value, dict) else value
    return len(value) if len(value) > _MOST_ENTRIES else 1 + sum(map(_entries, inner))
