"""Detectors by name: what is listed, what `create` makes of a name, and what it says to a wrong
one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fdbd
from fdbd.core.configuration import registered
from fdbd.detectors import as_detector, create_shaping

DETECTORS = [
    *(
        "fdbd",
        "msp",
        "odin",
        "energy",
        "mds",
        "knn",
        "ssd",
        "csi",
        "vim",
        "residual",
        "maxlogit",
        "entropy",
    ),
    *(
        "tempscale",
        "gen",
        "klm",
        "rmds",
        "nci",
        "neco",
        "she",
        "nnguide",
        "dice",
        "gradnorm",
        "openmax",
        "deviation",
    ),
]
SHAPINGS = ["react", "ash-p", "ash-b", "ash-s", "scale", "vra", "lts", "adascale"]


def test_every_detector_and_shaping_is_listed() -> None:
    assert set(DETECTORS) <= set(fdbd.list_detectors(shapings=False))
    assert set(SHAPINGS) <= set(fdbd.list_shapings())
    assert set(DETECTORS + SHAPINGS) <= set(fdbd.list_detectors())
    assert fdbd.list_detectors() == sorted(fdbd.list_detectors())
    # Those that need parts are not listed.
    assert not {"shaped", "ensemble"} & set(fdbd.list_detectors())


def test_patterns_choose_names() -> None:
    assert fdbd.list_detectors("*nn*") == ["knn", "nnguide"]
    assert fdbd.list_detectors("ash-?") == ["ash-b", "ash-p", "ash-s"]
    assert fdbd.list_detectors("nothing*") == []


@pytest.mark.parametrize("name", DETECTORS + SHAPINGS)
def test_every_name_makes_a_detector_with_a_paper(name: str) -> None:
    detector = fdbd.create(name)
    assert isinstance(detector, fdbd.Detector)
    paper = registered()[name].paper
    assert paper is not None
    assert paper.year >= 2015


def test_a_shaping_alone_stands_before_energy() -> None:
    assert fdbd.create("react").label == "react+energy"
    assert as_detector(fdbd.ReAct(80)).label == "react+energy"
    assert as_detector("scale+fdbd").label == "scale+fdbd"
    detector = fdbd.FDBD()
    assert as_detector(detector) is detector


def test_options_go_to_the_part_that_takes_them() -> None:
    detector = fdbd.create("react+fdbd", percentile=80, normalizer="norm")
    assert (detector.shaping.percentile, detector.detector.normalizer) == (80, "norm")
    assert fdbd.create("react+fdbd", mean="shaped").mean == "shaped"
    assert fdbd.create("fdbd", normalizer=None).normalizer is None
    assert fdbd.create("vra", low=50, temperature=2.0).detector.temperature == 2.0


def test_an_option_of_two_parts_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="'percentile' is an option of react and scale"):
        fdbd.create("react+scale+energy", percentile=80)


def test_an_option_of_a_users_detector_and_of_shaped_is_ambiguous() -> None:
    class WithMean(fdbd.MaxLogit):
        """Has an option of the name that `Shaped` has, too."""

        name = "with-mean"

        def __init__(self, mean: float = 0.0) -> None:
            super().__init__()
            self.mean = mean

    try:
        with pytest.raises(ValueError, match="'mean' is an option of with-mean and shaped"):
            fdbd.create("react+with-mean", mean=1.0)
    finally:
        del registered()["with-mean"]


def test_an_unknown_option_lists_those_there_are() -> None:
    with pytest.raises(
        ValueError, match=r"no option 'percent'; its options are mean, percentile, temperature"
    ):
        fdbd.create("react", percent=80)
    with pytest.raises(ValueError, match="no option 'mean'"):
        fdbd.create("fdbd", mean="shaped")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown detector 'fbdb'; did you mean 'fdbd'"):
        fdbd.create("fbdb")
    first_names = ", ".join(fdbd.list_detectors()[:3])
    with pytest.raises(ValueError, match=f"'zzzzzz'; there are {first_names}, "):
        fdbd.create("zzzzzz")
    with pytest.raises(ValueError, match="unknown detector ''"):
        fdbd.create("react+")
    with pytest.raises(TypeError, match="expected the name"):
        fdbd.create(fdbd.FDBD())  # type: ignore[arg-type]


def test_only_shapings_stand_before_a_plus() -> None:
    with pytest.raises(ValueError, match="'energy' before a \\+, expected a shaping"):
        fdbd.create("energy+fdbd")


def test_names_ignore_case_and_blanks() -> None:
    assert fdbd.create(" ReAct + FDBD ").label == "react+fdbd"


def test_shapings_are_made_by_name_or_passed_on() -> None:
    assert create_shaping("ash-s", percentile=70).percentile == 70
    shaping = fdbd.SCALE()
    assert create_shaping(shaping) is shaping
    with pytest.raises(ValueError, match="is a detector, expected a shaping"):
        create_shaping("fdbd")


def test_parts_are_given_to_those_that_need_them() -> None:
    ensemble = fdbd.create("ensemble", detectors=["fdbd", "react+energy"], combine="fisher")
    assert [member.label for member in ensemble.members] == ["fdbd", "react+energy"]


def migration_table() -> list[list[str]]:
    text = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
    table = text.split("## Names and defaults")[1].partition("A shaping combines")[0]
    return [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| `")]


def test_the_migration_table_names_every_detector_and_shaping() -> None:
    named = {name for row in migration_table() for name in re.findall(r"`([\w+-]+)`", row[0])}
    # Other tests may have registered detectors of their own.
    kinds = registered()
    ours = {name for name in fdbd.list_detectors() if kinds[name].__module__.startswith("fdbd.")}
    wanted = ours | {"Ensemble"}
    assert named == wanted, f"add rows to the table in docs/migrating.md: {sorted(wanted - named)}"


def test_the_migration_table_names_classes_of_pytorch_ood() -> None:
    peer = pytest.importorskip("pytorch_ood.detector")
    named = {name for row in migration_table() for name in re.findall(r"`(\w+)`", row[1])}
    assert len(named) >= 25
    assert all(hasattr(peer, name) for name in named)


def test_every_detector_and_shaping_of_ours_is_a_name_of_fdbd() -> None:
    for kind in registered().values():
        if kind.__module__.startswith("fdbd.detectors."):
            module = kind.__module__.removeprefix("fdbd")
            line = f"from {module} import {kind.__name__} as {kind.__name__}"
            assert getattr(fdbd, kind.__name__, None) is kind, (
                f"add to src/fdbd/__init__.pyi: {line}"
            )


def test_a_class_in_place_of_a_detector_is_an_error_that_says_how_to_make_one() -> None:
    with pytest.raises(TypeError, match=r"Energy is a class, expected a detector: .*Energy\(\)"):
        as_detector(fdbd.Energy)  # type: ignore[arg-type]
