"""Things that are rebuilt from a name and options, whose fitted state is buffers: detectors and shapings alike."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

Passes = Generator[Any, Any, None]
"""What `passes` returns: it yields empty statistics and receives them back, summed over the training data."""


class Paper(NamedTuple):
    """Where a method comes from."""

    title: str
    authors: str
    venue: str
    year: int

    def __str__(self) -> str:
        return f"{self.authors}, {self.title} ({self.venue} {self.year})"


class NotFittedError(RuntimeError):
    """A detector was asked for scores before it saw training data."""


class Configured(nn.Module):
    """A module that is rebuilt from its name and its constructor's arguments, and whose state is buffers.

    A subclass with a `name` enters the registry of its family under that name. Arguments of ``__init__`` are kept under
    their own names and never change after construction.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[Paper | None] = None
    registry: ClassVar[dict[str, type[Configured]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__ and cls.name:
            Configured.registry[cls.name] = cls

    def options(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: getattr(self, p.name) for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}

    def to_config(self) -> dict[str, Any]:
        """Name and options as plain JSON values; `from_config` turns them back into an unfitted object."""
        return {"name": self.name, "options": {name: _plain(value) for name, value in self.options().items()}}

    def require_name(self) -> None:
        """Refuse to be saved where `from_config` would make something else of it."""
        for part in self.modules():
            if isinstance(part, Configured) and Configured.registry.get(part.name) is not type(part):
                kind = type(part).__name__
                raise ValueError(
                    f"{kind} has no name of its own, by which a file could say what it is: give the class one, such as "
                    f"name = {kind.lower()!r}"
                )

    def set(self, **tensors: Tensor) -> None:
        """Keep fitted tensors as buffers; floating ones take the dtype of the fit."""
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensor = tensor.to(self.fit_dtype)
            self._set_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))

    fit_dtype: torch.dtype = torch.float32
    """float64 where head or features are, else float32."""

    def _set_buffer(self, name: str, tensor: Tensor) -> None:
        if name in self._buffers:
            self._buffers[name] = tensor
        else:
            self.register_buffer(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # model.half() is for the network: what was fitted stays in float32, and half inputs are scored in it.
        def at_least_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.is_floating_point() and moved.dtype.itemsize < 4 else moved

        return super()._apply(at_least_float32, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # An unfitted module has no buffers yet: take those that the file holds for it.
        for key, tensor in state_dict.items():
            name = key[len(prefix) :]
            if key.startswith(prefix) and "." not in name:
                self._set_buffer(name, torch.empty_like(tensor))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value!r}" for name, value in self.options().items() if not isinstance(value, nn.Module)
        )


def at_least_one(name: str, value: Any, what: str) -> int:
    """The option as an int, numpy's integers included, or an error that says what was expected."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, expected {what}")
    return number


def _plain(value: Any) -> Any:
    if isinstance(value, Configured):
        return value.to_config()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def from_config(config: Any) -> Any:
    """The unfitted object that `Configured.to_config` described; registered names only: no code comes from a file."""
    if not isinstance(config, dict) or set(config) != {"name", "options"} or not isinstance(config["options"], dict):
        raise ValueError(f"not a detector's configuration: {config!r}")
    if config["name"] not in Configured.registry:
        known = ", ".join(sorted(Configured.registry))
        raise ValueError(f"unknown detector or shaping {config['name']!r}; known are {known}")
    options = {name: _restored(value) for name, value in config["options"].items()}
    try:
        return Configured.registry[config["name"]](**options)
    except TypeError as error:
        raise ValueError(f"{config['name']!r} does not take these options: {error}") from None


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return from_config(value)
    if isinstance(value, list):
        return [_restored(item) for item in value]
    return value
