"""Detectors by name: what there is, and how to make it."""

import difflib
import fnmatch
import inspect
from typing import Any

from fdbd.detectors.base import Configured, Detector
from fdbd.detectors.energy import Energy
from fdbd.detectors.fdbd import FDBD
from fdbd.detectors.shaped import Shaped
from fdbd.detectors.shaping.base import Shaping

PERCENTILES_BEFORE_FDBD = {
    "react": 80.0,
    "ash-p": 90.0,
    "ash-b": 90.0,
    "ash-s": 90.0,
    "scale": 90.0,
}
"""Percentiles of the fDBD paper's experiments with shapings (section 4.3): ReAct 80, ASH 90, Scale
90."""


def list_detectors(pattern: str | None = None, *, shapings: bool = True) -> list[str]:
    """Names that `create` takes, in alphabetical order.

    Args:
        pattern: only names that match, such as "*nn*".
        shapings: with those of shapings, each of which `create` puts before Energy as its paper
            does; False leaves them out.

    >>> "fdbd" in list_detectors(), "react" in list_detectors(), "react" in list_detectors(shapings=False)
    (True, True, False)
    """
    kinds = [kind for kind in Configured.registry.values() if issubclass(kind, Detector)]
    names = [
        kind.name
        for kind in kinds
        if all(p.default is not p.empty for p in _parameters(kind).values())
    ]
    return _matching(names + (list_shapings() if shapings else []), pattern)


def list_shapings(pattern: str | None = None) -> list[str]:
    """Names of activation shapings, in alphabetical order.

    >>> list_shapings("ash*")
    ['ash-b', 'ash-p', 'ash-s']
    """
    return _matching(
        [name for name, kind in Configured.registry.items() if issubclass(kind, Shaping)], pattern
    )


def create(name: str, **options: object) -> Detector:
    """A detector by name, unfitted.

    Args:
        name: a detector ("fdbd"), shapings and a detector ("react+fdbd", applied from left to
            right), or a shaping alone ("react"), which stands before Energy as in its paper. Before
            fDBD, ReAct, ASH and SCALE have the percentiles of the fDBD paper, and fDBD its shaped
            mean (see `Shaped`); elsewhere they have their own papers' defaults.
        **options: constructor arguments, each given to the part that takes it; `mean` is
            `Shaped`'s.

    >>> create("react+fdbd", mean="of_shaped", normalizer="norm")
    Shaped(
      mean='of_shaped'
      (shaping): ReAct(percentile=80.0)
      (detector): FDBD(normalizer='norm', nearest=None)
    )
    """
    if not isinstance(name, str):
        raise TypeError(
            f"name is a {type(name).__name__}, expected the name of a detector such as 'react+fdbd'"
        )
    if name.count("+") >= 16:
        raise ValueError(f"{name[:40]!r}… has {name.count('+') + 1} parts, expected at most 16")
    kinds = [_find(part) for part in name.split("+")]
    if issubclass(kinds[-1], Shaping):
        kinds.append(Energy)
    for kind in kinds[:-1]:
        if not issubclass(kind, Shaping):
            raise ValueError(
                f"{name!r} has {kind.name!r} before a +, expected a shaping: {', '.join(list_shapings())}"
            )
    *of_shapings, of_detector, of_shaped = _route(name, kinds, options)
    detector: Any = kinds[-1](**of_detector)
    for kind, given in zip(kinds[-2::-1], reversed(of_shapings)):
        detector = Shaped(create_shaping(kind.name, kinds[-1], **given), detector, **of_shaped)
        of_shaped = {}  # `mean` is about the detector, so it goes to the shaping next to it
    assert isinstance(detector, Detector)
    return detector


def create_shaping(
    shaping: Shaping | str, before: type[Configured] | None = None, **options: object
) -> Shaping:
    """A shaping by name, with the defaults that suit the kind of detector it stands `before`; one
    that is given already comes back as it is.

    >>> create_shaping("scale", percentile=90)
    SCALE(percentile=90.0)
    """
    if isinstance(shaping, Shaping):
        return shaping
    kind, given = _find(shaping), options
    if not issubclass(kind, Shaping):
        raise ValueError(
            f"{shaping!r} is a detector, expected a shaping: {', '.join(list_shapings())}"
        )
    if before is not None and issubclass(before, FDBD) and kind.name in PERCENTILES_BEFORE_FDBD:
        given = {"percentile": PERCENTILES_BEFORE_FDBD[kind.name], **options}
    return kind(**_route(shaping, [kind], given)[0])


def as_detector(value: Detector | Shaping | str) -> Detector:
    """The detector that a name, a shaping alone (before Energy) or a detector stands for."""
    if isinstance(value, str):
        return create(value)
    if isinstance(value, Shaping):
        return Shaped(value, Energy())
    if isinstance(value, Detector):
        return value
    raise TypeError(
        f"a {type(value).__name__} is no detector; expected an fdbd detector or its name"
    )


def _find(part: str) -> type[Configured]:
    part = part.strip().lower()
    kind = Configured.registry.get(part)
    if kind is None or not issubclass(kind, (Detector, Shaping)):
        known = list_detectors()
        close = difflib.get_close_matches(part, known)
        hint = (
            f"did you mean {' or '.join(map(repr, close))}?"
            if close
            else f"there are {', '.join(known)}"
        )
        raise ValueError(f"unknown detector {part!r}; {hint}")
    return kind


def _route(
    name: str, kinds: list[type[Configured]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """The options of each part, and last those of `Shaped` itself."""
    given: list[dict[str, Any]] = [{} for _ in range(len(kinds) + 1)]
    accepted = [set(_parameters(kind)) for kind in kinds] + [{"mean"} if len(kinds) > 1 else set()]
    for option, value in options.items():
        takers = [index for index, names in enumerate(accepted) if option in names]
        if not takers:
            known = sorted(set().union(*accepted))
            raise ValueError(
                f"{name!r} has no option {option!r}; its options are {', '.join(known) or 'none'}"
            )
        if len(takers) > 1:
            who = (
                f"{option!r} is an option of {' and '.join(kinds[index].name for index in takers)}"
            )
            raise ValueError(
                f"{who}: compose the classes instead, such as Shaped(ReAct(80), Energy())"
            )
        given[takers[0]][option] = value
    return given


def _parameters(kind: type[Configured]) -> dict[str, inspect.Parameter]:
    """Parameters of its constructor, without *args and **kwargs: nn.Module's are never used."""
    parameters = inspect.signature(kind).parameters.values()
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _matching(names: list[str], pattern: str | None) -> list[str]:
    return sorted(names) if pattern is None else sorted(fnmatch.filter(names, pattern.lower()))
