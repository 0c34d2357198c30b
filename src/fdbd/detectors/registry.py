"""Detectors by name: what there is, and how to make it."""

import difflib
import fnmatch
import inspect
import re
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
        shapings: with those of shapings, each of which `create` puts before Energy as its paper
            does; False leaves them out.

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
    kinds = _kinds(name)
    options_of_parts, of_shaped = _options_by_part(name, kinds, options)
    detector_kind = kinds.pop()
    detector: Any = detector_kind(**options_of_parts.pop())
    # From the inside to the outside: the last shaping stands next to the detector.
    while kinds:
        kind = kinds.pop()
        shaping = create_shaping(kind.name, detector_kind, **options_of_parts.pop())
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
    [of_shaping], _ = _options_by_part(shaping, [kind], given)
    return kind(**of_shaping)


def as_detector(value: Detector | Shaping | str) -> Detector:
    """The detector that a name, a shaping alone (before Energy) or a detector stands for."""
    if isinstance(value, str):
        return create(value)
    if isinstance(value, Shaping):
        return Shaped(value, Energy())
    if isinstance(value, Detector):
        return value
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


def _options_by_part(
    name: str, kinds: list[type[Configured]], options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The options of each part, and those of `Shaped` itself."""
    titles = [kind.name for kind in kinds]
    accepted = [set(parameters_of(kind)) for kind in kinds]
    has_shaping = len(kinds) > 1
    titles.append(Shaped.name)
    accepted.append({"mean"} if has_shaping else set())
    by_part: list[dict[str, Any]] = [{} for _ in accepted]
    for option, value in options.items():
        takers = [index for index, names in enumerate(accepted) if option in names]
        if not takers:
            known = ", ".join(sorted(set().union(*accepted)))
            raise ValueError(
                f"{name!r} has no option {option!r}; its options are {known or 'none'}"
            )
        if len(takers) > 1:
            who = " and ".join(titles[index] for index in takers)
            raise ValueError(
                f"{option!r} is an option of {who}: compose the classes instead, such as "
                "Shaped(ReAct(80), Energy())"
            )
        by_part[takers[0]][option] = value
    return by_part[:-1], by_part[-1]


def _is_made_without_options(kind: type[Configured]) -> bool:
    defaults = [parameter.default for parameter in parameters_of(kind).values()]
    return inspect.Parameter.empty not in defaults


def _matching(names: list[str], pattern: str | None) -> list[str]:
    if pattern is None:
        return sorted(names)
    return sorted(fnmatch.filter(names, pattern.lower()))
