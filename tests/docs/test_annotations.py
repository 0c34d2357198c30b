"""The public names say what they take and give: no `Any` in their signatures and attributes."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import fdbd
import fdbd.metrics
import fdbd.testing
from fdbd.core.configuration import Passes

SENT_BACK = Passes
"""What a pass is sent back is the statistic that it asked for, which the type of a generator cannot
say."""
OF_EXTRAS = dict.fromkeys(("Table", "DataFrame", "CollectorRegistry", "Collector"), object)
"""Types of packages that need not be installed."""
SPECIAL = ("__init__", "__call__", "__iter__", "__getitem__", "__len__")


def public_objects() -> Iterator[tuple[str, Any]]:
    yield from ((name, getattr(fdbd, name)) for name in fdbd.__all__ if name != "metrics")
    yield "testing.check_detector", fdbd.testing.check_detector
    yield from (
        (f"metrics.{name}", getattr(fdbd.metrics, name)) for name in own_names(fdbd.metrics)
    )


def own_names(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "").startswith("fdbd.")
    ]


def annotated(value: Any) -> Iterator[tuple[str, Any]]:
    """A function, or a class with the methods that are fdbd's own."""
    if not inspect.isclass(value):
        yield value.__name__, value
        return
    for owner in value.__mro__:
        if not owner.__module__.startswith("fdbd."):
            continue
        yield owner.__qualname__, owner
        for name, member in vars(owner).items():
            function = getattr(
                member, "__func__", getattr(member, "fget", getattr(member, "func", member))
            )
            if inspect.isfunction(function) and (name in SPECIAL or not name.startswith("_")):
                yield f"{owner.__qualname__}.{name}", function


def holds_any(hint: Any) -> bool:
    if hint is Any:
        return True
    # numpy's own arrays are of any shape.
    if hint == SENT_BACK or typing.get_origin(hint) is np.ndarray:
        return False
    parts = hint if isinstance(hint, list) else typing.get_args(hint)
    return any(holds_any(part) for part in parts)


@pytest.mark.parametrize(
    ("name", "value"), [pytest.param(*each, id=each[0]) for each in public_objects()]
)
def test_no_public_signature_or_attribute_is_any(name: str, value: Any) -> None:
    loose = []
    for place, each in annotated(value):
        hints = typing.get_type_hints(each, localns={"Guard": fdbd.Guard, **OF_EXTRAS})
        own = vars(each).get("__annotations__", {}) if inspect.isclass(each) else hints
        loose += [
            f"{place}: {part}"
            for part in own
            if not part.startswith("_") and holds_any(hints[part])
        ]
    assert not loose


def test_an_any_is_found_wherever_it_stands() -> None:
    def of(one: dict[str, list[Any]]) -> None: ...

    assert holds_any(typing.get_type_hints(of)["one"])
    assert holds_any(typing.Callable[[Any], int])
    assert not holds_any(typing.Callable[[object], int])
