"""TOML with a schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from fdbd.core.tables import from_table, read_toml


@dataclass(frozen=True)
class Optimizer:
    rate: float = 0.1
    milestones: tuple[float, ...] = ()


@dataclass(frozen=True)
class Recipe:
    epochs: int
    title: str | None = None
    optimizer: Optimizer = field(default_factory=Optimizer)


class Network(msgspec.Struct, frozen=True, kw_only=True):
    depth: int
    widths: list[int] = []


def test_a_text_becomes_a_typed_object() -> None:
    recipe = read_toml("epochs = 3\n[optimizer]\nrate = 1\nmilestones = [0.5, 0.75]", Recipe)
    assert recipe == Recipe(3, None, Optimizer(1.0, (0.5, 0.75)))


def test_a_file_is_named_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("epochs = 'three'")
    with pytest.raises(ValueError, match=r"recipe\.toml: epochs: expected an integer, got text"):
        read_toml(path, Recipe)


def test_a_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "none.toml", Recipe)


def test_bytes_that_are_not_text_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_bytes(b"epochs = \xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_toml(path, Recipe)


def test_a_misspelt_key_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'epoch', did you mean 'epochs'\?"):
        read_toml("epoch = 3", Recipe)


def test_a_misspelt_key_in_an_inner_table_names_the_table() -> None:
    text = "epochs = 3\n[optimizer]\nrte = 1"
    expected = r"unknown key 'rte' in \[optimizer\], did you mean 'rate'\?"
    with pytest.raises(ValueError, match=expected):
        read_toml(text, Recipe)


def test_tables_of_free_names_check_their_keys() -> None:
    text = "[small]\ndepth = 2\n[large]\ndept = 9"
    with pytest.raises(ValueError, match=r"unknown key 'dept' in \[large\], did you mean 'depth'"):
        read_toml(text, dict[str, Network])
    assert read_toml("[small]\ndepth = 2", dict[str, Network])["small"].depth == 2


def test_tables_in_a_list_check_their_keys() -> None:
    @dataclass
    class All:
        networks: list[Network]

    with pytest.raises(ValueError, match="unknown key 'dept' in"):
        read_toml("[[networks]]\ndept = 9", All)


def test_an_unknown_key_unlike_any_other_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'x' \(known: epochs, optimizer, title\)"):
        read_toml("x = 3", Recipe)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="the TOML text: missing key 'epochs'"):
        read_toml("title = 'a'", Recipe)


@pytest.mark.parametrize("text", ["epochs = ", "epochs = 3\nepochs = 4", "[a\n"])
def test_text_that_is_not_toml_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="is not valid TOML") as error:
        read_toml(text, Recipe, name="my.toml")
    assert str(error.value).startswith("my.toml")
    assert "\n" not in str(error.value)


def test_a_wrong_type_in_a_list_names_the_list() -> None:
    with pytest.raises(ValueError, match=r"optimizer\.milestones\[.*\]: expected a number"):
        from_table({"epochs": 1, "optimizer": {"milestones": [0.5, "x"]}}, Recipe, name="recipe")
