"""Class folders are matched by name, and a set whose labels are mixed up is noticed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fdbd
from fdbd.data.images import Images
from fdbd.data.labels import Agreement
from fdbd.jobs.classes import gap_caution, match_classes

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def folders(*names: str) -> Images:
    """Two images in each folder, in the order in which folders are read."""
    ordered = tuple(sorted(names))
    labels = np.repeat(np.arange(len(ordered)), 2)
    return Images(np.zeros((len(labels), 4, 4, 3), np.uint8), labels, ordered, source="data")


def test_folders_are_matched_by_name_whatever_their_order_spelling_and_number() -> None:
    found = match_classes(folders("Fire_truck", "dog"), 3, ("dog", "cat", "fire truck"))
    assert found.labels is not None
    assert found.labels.tolist() == [2, 2, 0, 0]
    assert found.cautions == ["data has no folder for the class 'cat'"]


def test_a_renamed_folder_is_named_with_the_class_that_lacks_one() -> None:
    with pytest.raises(
        ValueError, match=r"'sea', which is not a class .*; the class 'ocean' has no"
    ):
        match_classes(folders("ant", "sea"), 2, ("ant", "ocean"))
    fit = match_classes(folders("ant", "ocean"), 2, ())
    with pytest.raises(
        ValueError, match=r"'sea', which is not a class .*; the class 'ocean' has no"
    ):
        match_classes(folders("ant", "sea"), 2, (), fit)


def test_calibration_folders_are_matched_with_those_of_the_fit() -> None:
    fit = match_classes(folders("ant", "bee", "cat"), 3, ())
    calibration = match_classes(folders("cat", "bee"), 3, (), fit)
    assert calibration.labels is not None
    assert calibration.labels.tolist() == [1, 1, 2, 2]
    assert calibration.cautions == ["data has no folder for the class 'ant'"]
    by_day = match_classes(folders("monday", "tuesday", "today"), 3, (), fit)
    assert by_day.labels is None
    assert "without labels" in by_day.cautions[0]


def test_names_of_another_kind_are_taken_in_their_order_with_a_caution() -> None:
    found = match_classes(folders("n01440764", "n01443537"), 2, ("tench", "goldfish"))
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert "n01440764 for tench" in found.cautions[0]
    numbers = match_classes(folders("7", "2"), 10, ("a",) * 10)
    assert numbers.labels is not None
    assert sorted(set(numbers.labels.tolist())) == [2, 7]


def agreement(labels: np.ndarray, predicted: np.ndarray) -> Agreement:
    found = Agreement(10)
    found.add(torch.from_numpy(labels), torch.from_numpy(predicted))
    return found


def test_a_gap_with_one_confusion_behind_it_is_explained_and_overfitting_is_not_a_gap() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(2000) % 10
    errs = generator.random(2000) < 0.08
    usual = np.where(errs, generator.integers(0, 10, 2000), labels)
    trained = agreement(labels, labels)
    assert gap_caution(trained, agreement(labels, usual), CIFAR) is None
    assert gap_caution(agreement(labels, usual), agreement(labels, usual), CIFAR) is None
    swapped = np.select([labels == 3, labels == 5], [5, 3], labels)
    said = gap_caution(agreement(swapped, labels), agreement(labels, usual), CIFAR)
    assert said is not None
    assert "labelled 'dog' in the fit data are predicted as 'cat'" in said
    said = gap_caution(trained, agreement(swapped, labels), CIFAR)
    assert said is not None
    assert "in the calibration data" in said
    worse = np.where(generator.random(2000) < 0.3, generator.integers(0, 10, 2000), labels)
    said = gap_caution(agreement(labels, worse), agreement(labels, usual), CIFAR)
    assert said is not None
    assert "are the classes of the fit data the model's?" in said


def save(folder: Path, image: np.ndarray, number: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(folder / f"{number:03d}.png")


def test_fdbd_fit_refuses_a_renamed_class_and_mentions_a_missing_one(
    tmp_path, monkeypatch, run, result
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    for number in range(100):
        image = generator.integers(0, 256, (32, 32, 3), np.uint8)
        save(tmp_path / "train" / CIFAR[number % 10], image, number)
        image = generator.integers(0, 256, (32, 32, 3), np.uint8)
        if number % 10 != 9:
            save(tmp_path / "fresh" / CIFAR[number % 10], image, number)
    found = result("fit", "cifar10-ce", "train", "--calibration", "fresh")
    assert any("no folder for the class 'truck'" in caution for caution in found["cautions"])
    assert fdbd.load("guard.safetensors").about["class_names"] == list(CIFAR)
    (tmp_path / "fresh" / "ship").rename(tmp_path / "fresh" / "boat")
    code, _, err = run("fit", "cifar10-ce", "train", "--calibration", "fresh")
    assert (code, err.count("\n")) == (2, 1)
    assert "the class folder 'boat', which is not a class of the model" in err
    assert "'ship'" in err


def test_fdbd_fit_explains_a_gap_by_the_folders_that_were_swapped(
    tmp_path, monkeypatch, result
) -> None:
    """Three colours, which a linear model tells apart; in the data of the fit two folders have
    each other's name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "colours.py").write_text(
        "import torch\n\n\ndef model():\n"
        "    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())\n"
        "    head = torch.nn.Linear(3, 3)\n"
        "    head.weight.data = torch.eye(3)\n"
        "    head.bias.data.zero_()\n"
        "    return torch.nn.Sequential(pool, head)\n"
    )
    generator = np.random.default_rng(0)
    names = ("a-red", "b-green", "c-blue")
    for part, swapped in (("train", ("b-green", "a-red", "c-blue")), ("fresh", names)):
        for number in range(150):
            image = generator.integers(0, 60, (8, 8, 3), np.uint8)
            image[:, :, number % 3] += 150
            save(tmp_path / part / swapped[number % 3], image, number)
    arguments = ["colours:model", "train", "--calibration", "fresh", "--preprocess"]
    names_file = '{"size": 8, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}'
    cautions = " ".join(result("fit", *arguments, names_file)["cautions"])
    assert "which chance does not explain" in cautions
    assert "50 of 50 images labelled 'a-red' in the fit data are predicted as 'b-green'" in cautions
