"""Datasets from outside the package, by a call or by an entry point."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from fdbd import cli
from fdbd.core.tables import read_toml
from fdbd.data import DatasetUnavailable, Images, list_datasets, load, register_dataset
from fdbd.data.datasets import sources, status

# The package's name `info` is the function.
info_module = importlib.import_module("fdbd.data.datasets.info")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_module, "DATASETS", dict(info_module.DATASETS))
    loaders: dict[str, object] = {}
    monkeypatch.setattr(info_module, "LOADERS", loaders)
    monkeypatch.setattr(sources, "LOADERS", loaders)


def grey(split: str) -> Images:
    count = 6 if split == "train" else 4
    return Images(np.full((count, 8, 8, 3), 127, np.uint8), np.arange(count) % 2)


COUNTS = {"train": 6, "test": 4}


def test_a_registered_dataset_is_loaded_by_its_name() -> None:
    register_dataset("grey", grey, counts=COUNTS, classes=("dark", "light"))
    images = load("grey", "train", limit=3)
    assert len(images) == 3
    assert images.name == "grey"
    assert images.classes == ("dark", "light")
    assert len(load("Grey", "val")) == 4
    assert status("grey") == "registered"
    assert "grey" in [entry.name for entry in list_datasets()]


def test_a_registered_dataset_is_in_the_list_of_the_program(capsys) -> None:
    register_dataset("grey", grey, counts=COUNTS, licence="public domain", how="it is made here")
    with pytest.raises(SystemExit, match="0"):
        cli.main(["data"])
    assert "grey: public domain; it is made here" in capsys.readouterr().out


def test_a_dataset_may_be_registered_again() -> None:
    register_dataset("grey", grey, counts=COUNTS)
    register_dataset("grey", grey, counts={"test": 4})
    with pytest.raises(ValueError, match="grey has no split 'train', expected one of test"):
        load("grey", "train")


@pytest.mark.parametrize("name", ["cifar10", "CIFAR10", "cifar-10", "a/b", "npz:a", ""])
def test_a_name_that_is_taken_or_no_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"is taken by|cannot be called"):
        register_dataset(name, grey, counts=COUNTS)


@pytest.mark.parametrize("counts", [{}, {"test": 0}])
def test_a_dataset_without_images_is_refused(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected a positive number for each split"):
        register_dataset("grey", grey, counts=counts)


def test_what_its_function_raises_says_how_to_get_it() -> None:
    def absent(split: str) -> Images:
        raise FileNotFoundError("no folder /data/grey")

    register_dataset("grey", absent, counts=COUNTS, how="ask its authors")
    with pytest.raises(DatasetUnavailable, match=r"no folder /data/grey.*ask its authors"):
        load("grey")


def test_a_function_that_returns_something_else_is_named() -> None:
    register_dataset("grey", lambda split: [1, 2], counts=COUNTS)  # type: ignore[arg-type, return-value]
    with pytest.raises(DatasetUnavailable, match=r"returned a list, expected fdbd\.data\.Images"):
        load("grey")


def test_fewer_images_than_announced_draw_a_warning() -> None:
    register_dataset("grey", grey, counts={"test": 400})
    with pytest.warns(UserWarning, match="4 of 400 images"):
        load("grey")


PACKAGE = """
import numpy as np
from fdbd.data import Images, register_dataset

def register():
    register_dataset("from-a-package", load, counts={"test": 2})

def load(split):
    return Images(np.zeros((2, 8, 8, 3), np.uint8))

def broken():
    raise RuntimeError("its server is gone")
"""


def test_an_entry_point_registers_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grey_images.py").write_text(PACKAGE)
    about = tmp_path / "grey_images-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: grey-images\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[fdbd.datasets]\nbad = grey_images:broken\ngrey = grey_images:register\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.entry_points(group="fdbd.datasets")
    monkeypatch.setattr(info_module, "_found_entry_points", False)
    with pytest.warns(UserWarning, match=r"grey_images:broken.*its server is gone"):
        images = load("from-a-package")
    assert len(images) == 2


def test_the_packages_own_table_has_a_schema() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'licens' in \[x\], did you mean 'licence'"):
        read_toml("[x]\nlicens = 'MIT'", dict[str, info_module.DatasetInfo])
