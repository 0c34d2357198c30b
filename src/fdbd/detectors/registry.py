"""Detectors by name: what there is, and how to make it."""

import difflib
import fnmatch
import inspect
import re
from collections.abc import Sequence
from typing import Any

from fdbd.core.configuration import parameters_of, registered
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
        shapings: also the names of shapings; `create` puts one that is named alone before Energy,
            as its paper does.

    >>> (
    ...     "fdbd" in list_detectors(),
    ...     "react" in list_detectors(),
    ...     "react" in list_detectors(shapings=False),
    ... )
    (True, True, False)
    """
    names = list_shapings() if shapings else []
    for name, kind in registered().items():
        if issubclass(kind, Detector) and _is_made_without_options(kind):
            names.append(name)
    return _matching(names, pattern)


def list_shapings(pattern: str | None = None) -> list[str]:
    """Names of activation shapings, in alphabetical order.

    >>> list_shapings("ash*")
    ['ash-b', 'ash-p', 'ash-s']
    """
    names = [name for name, kind in registered().items() if issubclass(kind, Shaping)]
    return _matching(names, pattern)


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
    *shapings, detector_kind = _kinds(name)
    takers = [*shapings, detector_kind]
    if shapings:
        takers.append(Shaped)
    options_of = _options_by_taker(name, takers, options)
    detector: Any = detector_kind(**options_of[len(shapings)])
    if not shapings:
        return detector  # type: ignore[no-any-return]
    of_shaped = options_of[-1]
    # From the inside to the outside: the last shaping stands next to the detector.
    for place in reversed(range(len(shapings))):
        shaping = create_shaping(shapings[place].name, detector_kind, **options_of[place])
        detector = Shaped(shaping, detector, **of_shaped)
        # `mean` is about the detector, so it goes to the shaping next to it alone.
        of_shaped = {}
    return detector  # type: ignore[no-any-return]


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
    kind = _find(shaping)
    if not issubclass(kind, Shaping):
        raise ValueError(
            f"{shaping!r} is a detector, expected a shaping: {', '.join(list_shapings())}"
        )
    given = dict(options)
    if before is not None and issubclass(before, FDBD) and kind.name in PERCENTILES_BEFORE_FDBD:
        given.setdefault("percentile", PERCENTILES_BEFORE_FDBD[kind.name])
    [of_shaping] = _options_by_taker(shaping, [kind], given)
    return kind(**of_shaping)


def as_detector(value: Detector | Shaping | str) -> Detector:
    """The detector that a name, a shaping alone (before Energy) or a detector stands for."""
    if isinstance(value, str):
        return create(value)
    if isinstance(value, Shaping):
        return Shaped(value, Energy())
    if isinstance(value, Detector):
        return value
    if isinstance(value, type):
        kind = value.__name__
        raise TypeError(f"{kind} is a class, expected a detector: make one, such as {kind}()")
    raise TypeError(
        f"a {type(value).__name__} is not a detector; expected an fdbd detector or its name"
    )


def parts_of_name(name: str) -> list[str]:
    """The parts of a composed name, which a single + separates: "++" belongs to a name.

    >>> parts_of_name("react+mds++")
    ['react', 'mds++']
    """
    return re.split(r"(?<!\+)\+(?!\+)", name)


def _kinds(name: str) -> list[type[Configured]]:
    """The classes that a name stands for: shapings, and last a detector."""
    if not isinstance(name, str):
        raise TypeError(
            f"name is a {type(name).__name__}, expected the name of a detector such as 'react+fdbd'"
        )
    parts = parts_of_name(name)
    if len(parts) > 16:
        raise ValueError(f"{name[:40]!r}… has {len(parts)} parts, expected at most 16")
    kinds = [_find(part) for part in parts]
    if issubclass(kinds[-1], Shaping):
        kinds.append(Energy)
    for kind in kinds[:-1]:
        if not issubclass(kind, Shaping):
            known = ", ".join(list_shapings())
            raise ValueError(f"{name!r} has {kind.name!r} before a +, expected a shaping: {known}")
    return kinds


def _find(part: str) -> type[Configured]:
    part = part.strip().lower()
    kind = registered().get(part)
    if kind is not None and issubclass(kind, (Detector, Shaping)):
        return kind
    if part == "auto":
        raise ValueError(
            '"auto" is not one detector but a choice among several, which takes a network and '
            "held-out data: give it to fdbd.Guard(model, 'auto'), fdbd fit --detector auto or fdbd "
            "bench; to combine detectors of your own choice, use fdbd.Ensemble"
        )
    known = list_detectors()
    close = difflib.get_close_matches(part, known)
    if close:
        hint = f"did you mean {' or '.join(repr(name) for name in close)}?"
    else:
        hint = f"there are {', '.join(known)}"
    raise ValueError(f"unknown detector {part!r:.80}; {hint}")


def _options_by_taker(
    name: str, kinds: Sequence[type[Configured]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """The options of each of the classes; ValueError for one that none takes, or several do."""
    accepted = [_accepted_options(kind) for kind in kinds]
    options_of: list[dict[str, Any]] = [{} for _ in kinds]
    for option, value in options.items():
        places = [place for place, names in enumerate(accepted) if option in names]
        if not places:
            known = ", ".join(sorted(set().union(*accepted)))
            raise ValueError(
                f"{name!r} has no option {option!r}; its options are {known or 'none'}"
            )
        if len(places) > 1:
            who = " and ".join(kinds[place].name for place in places)
            raise ValueError(
                f"{option!r} is an option of {who}: compose the classes instead, such as "
                "Shaped(ReAct(80), Energy())"
            )
        options_of[places[0]][option] = value
    return options_of


def _accepted_options(kind: type[Configured]) -> set[str]:
    """Options that go to a class; the name itself says what a `Shaped` is made of."""
    if issubclass(kind, Shaped):
        return {"mean"}
    return set(parameters_of(kind))


def _is_made_without_options(kind: type[Configured]) -> bool:
    defaults = [parameter.default for parameter in parameters_of(kind).values()]
    return inspect.Parameter.empty not in defaults


def _matching(names: list[str], pattern: str | None) -> list[str]:
    if pattern is None:
        return sorted(names)
    return sorted(fnmatch.filter(names, pattern.lower()))
