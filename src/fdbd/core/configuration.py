"""What detectors and shapings share: a description of their needs, a name, options, and fitted
buffers."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn
from typing_extensions import Self

T = TypeVar("T")
Passes = Generator[Any, Any, None]
"""The generator that `passes` returns: it yields empty statistics, and gets each back summed over
the training data."""

MOST = 1_000_000
"""The largest count in an option: bounds the memory that a forged file can ask for."""
_MOST_ENTRIES = 2_000
"""The most values in a configuration, for the same reason."""


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

    Attributes:
        features: a score reads ``Batch.features``.
        logits: a score reads ``Batch.logits``; missing ones are computed from the head.
        views: a score reads ``Batch.views``, if there are any.
        perturbed: a score reads ``Batch.perturbed``.
        layers: names in ``Batch.layers`` that a score reads.
        labels: a fit needs ``Batch.labels``.
        heldout: a fit needs data that the network was not trained on; training data would mislead
            it.
        network: scores need the network itself, so that only a Guard can give them.
        passes: passes over the training data in a fit; None: several, or not known. For more than
            one a Guard uses the disk.
        calibration: scores need `calibrate` after the fit, as those of an ensemble do.
        many_labels: the head is one of many labels, each a yes or no of its own (sigmoid).

    >>> needs = Needs(logits=True, passes=1)
    >>> needs.features, needs.logits, needs.labels
    (True, True, False)
    """

    features: bool = True
    logits: bool = False
    views: bool = False
    layers: tuple[str, ...] = ()
    labels: bool = False
    heldout: bool = False
    network: bool = False
    passes: int | None = None
    calibration: bool = False
    perturbed: bool = False
    many_labels: bool = False


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
    """What a score reads and what a fit takes. An instance sets its own if that depends on its
    options."""
    fit_dtype: torch.dtype = torch.float32
    """float64 if head or features are, else float32."""

    _earlier_options: ClassVar[dict[str, object]] = {}
    """Values for options that are missing in older files."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Only a name of its own registers a class: an inherited one belongs to the base class.
        if cls.__dict__.get("name"):
            _register(cls)

    def options(self) -> dict[str, object]:
        """Constructor arguments by name."""
        found = {}
        for name in parameters_of(type(self)):
            if not hasattr(self, name):
                raise AttributeError(
                    f"{type(self).__name__} does not keep the argument {name} of its constructor, "
                    f"which a file stores to rebuild it: set self.{name}"
                )
            found[name] = getattr(self, name)
        return found

    def to_config(self) -> dict[str, object]:
        """Name and options as plain JSON values; `from_config` turns them back into an unfitted
        object."""
        options = {name: _plain(value) for name, value in self.options().items()}
        return {"name": self.name, "options": options}

    def set_buffers(self, **tensors: Tensor) -> None:
        """Keep fitted tensors as buffers of these names; floating ones take the dtype of the
        fit."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensor = tensor.to(self.fit_dtype)
            self._set_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))

    def set(self, **tensors: Tensor) -> None:
        """Deprecated: use `set_buffers`."""
        warnings.warn(
            "set(…) is now set_buffers(…); the old name will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )
        self.set_buffers(**tensors)

    def buffer_shape(self, name: str) -> str | None:
        """The shape of a buffer as letters, such as "C P"; None: any. By default taken from its
        annotation, such as ``center: Annotated[Tensor, "P"]``. C and P are the head's classes and
        features, other letters sizes that are the same in all buffers; "" is a scalar."""
        try:
            hints = get_type_hints(type(self), include_extras=True)
        except (NameError, TypeError):
            # Annotations of a user's class that cannot be evaluated at run time.
            return None
        parts = get_args(hints.get(name))
        states_a_shape = len(parts) == 2 and parts[0] is Tensor and isinstance(parts[1], str)
        return parts[1] if states_a_shape else None

    def extra_repr(self) -> str:
        shown = []
        for name, value in self.options().items():
            if not isinstance(value, nn.Module):
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)

    def _set_buffer(self, name: str, tensor: Tensor) -> None:
        # `register_buffer` would refuse a name that is also a property.
        self._buffers[name] = tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.half() is for the network: fitted tensors stay in float32, and half inputs are
        # scored in it.
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.is_floating_point() and moved.dtype.itemsize < 4:
                return tensor.to(moved.device)
            return moved

        return super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # An unfitted module has no buffers yet: create those that the file holds for it.
        for key, tensor in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix) and "." not in name:
                self._set_buffer(name, torch.empty_like(tensor))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._check_buffers()

    def _check_buffers(self) -> None:
        """ValueError for buffers with NaN or infinity, or whose shapes do not fit each other."""
        sizes: dict[str, int] = {}
        # The head's buffers first: they say what C and P are.
        names = sorted(self._buffers, key=lambda name: not name.startswith("head_"))
        for name in names:
            tensor = self._buffers[name]
            if tensor is None:
                continue
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{name} of {type(self).__name__} holds NaN or infinity; fit it again"
                )
            shape = self.buffer_shape(name)
            if shape is not None and not _fits(tensor, shape.split(), sizes):
                expected = ", ".join(str(sizes.get(letter, letter)) for letter in shape.split())
                raise ValueError(
                    f"{name} of {type(self).__name__} has shape {tuple(tensor.shape)}, "
                    f"expected ({expected}) to fit its other buffers"
                )


def _fits(tensor: Tensor, letters: list[str], sizes: dict[str, int]) -> bool:
    """Whether a tensor has the shape that the letters stand for. A letter that is seen for the
    first time takes the size found, and is added to `sizes`; a number stands for itself."""
    if len(letters) != tensor.ndim:
        return False
    for letter, size in zip(letters, tensor.shape):
        known = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
        if known != size:
            return False
    return True


_REGISTRY: dict[str, type[Configured]] = {}


def registered() -> dict[str, type[Configured]]:
    """Every class of a detector or shaping that has a name, by that name."""
    return _REGISTRY


def _register(cls: type[Configured]) -> None:
    """Make a class known by its name. A class that is defined again, as in a notebook, replaces the
    old one."""
    known = _REGISTRY.get(cls.name, cls)
    place = f"{known.__module__}.{known.__qualname__}"
    if place != f"{cls.__module__}.{cls.__qualname__}":
        raise ValueError(
            f"the name {cls.name!r} of {cls.__qualname__} is taken by {place}: choose another name"
        )
    _REGISTRY[cls.name] = cls


def require_name(module: nn.Module) -> None:
    """ValueError unless `from_config` can rebuild this object and its parts."""
    for part in module.modules():
        if isinstance(part, Configured) and _REGISTRY.get(part.name) is not type(part):
            kind = type(part).__name__
            raise ValueError(
                f"{kind} has no name of its own, which a file needs to say what it holds: give "
                f"the class one, such as name = {kind.lower()!r}"
            )


def parameters_of(kind: type[Configured]) -> dict[str, inspect.Parameter]:
    """Parameters of a class's constructor by name, without *args and **kwargs: nn.Module's are
    never used."""
    named = {}
    for parameter in inspect.signature(kind).parameters.values():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            named[parameter.name] = parameter
    return named


def expect(name: str, value: T, is_right: bool, what: str) -> T:
    """The option's value if it is right, else a ValueError that says what was expected."""
    if not is_right:
        raise ValueError(f"{name} is {value!r}, expected {what}")
    return value


def one_of(name: str, value: T, *choices: object) -> T:
    """The option if it is one of the choices, else a ValueError that lists them."""
    if value not in choices:
        known = [repr(choice) for choice in choices]
        others = ", ".join(known[:-1])
        raise ValueError(f"{name} is {value!r}, expected {others} or {known[-1]}")
    return value


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
    if number > MOST:
        what += f", at most {MOST:,}"
    expect(name, value, 1 <= number <= MOST and not isinstance(value, bool), what)
    return number


def _plain(value: Any) -> Any:
    """An option as JSON values: parts become their configurations."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.to_config() if isinstance(value, Configured) else value


def _restored(value: Any) -> Any:
    """An option from the JSON values that `_plain` made of it."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return from_config(value) if isinstance(value, dict) else value


def from_config(config: Any) -> Any:
    """The unfitted object that `Configured.to_config` described; only registered names: no code
    comes from a file."""
    if not isinstance(config, dict) or set(config) != {"name", "options"}:
        raise ValueError(f"not a detector's configuration: {config!r}")
    name = config["name"]
    given = config["options"]
    if not isinstance(given, dict):
        raise ValueError(f"not a detector's configuration: {config!r}")
    if _entries(config) > _MOST_ENTRIES:
        raise ValueError(f"a detector's configuration has more than {_MOST_ENTRIES:,} entries")
    if name not in _REGISTRY:
        known = ", ".join(sorted(_REGISTRY))
        raise ValueError(f"unknown detector or shaping {name!r}; known are {known}")
    kind = _REGISTRY[name]
    options = dict(kind._earlier_options)
    for option, value in given.items():
        options[option] = _restored(value)
    try:
        return kind(**options)
    except TypeError as error:
        raise ValueError(f"{name!r} does not take these options: {error}") from None


def _entries(value: Any) -> int:
    """The number of values in a configuration and its parts."""
    if not isinstance(value, (dict, list)):
        return 1
    if len(value) > _MOST_ENTRIES:
        return len(value)
    inner = value.values() if isinstance(value, dict) else value
    return 1 + sum(_entries(item) for item in inner)
