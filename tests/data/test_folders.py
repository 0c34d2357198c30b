"""Which files of a folder are read, and which classes their folders stand for."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fdbd.core.pixels import ImageError, decode
from fdbd.data.datasets import from_folder
from fdbd.data.images import CHANGED, ImageFiles, find_images
from fdbd.data.inputs import open_images
from fdbd.data.labels import Agreement, as_classes, class_order


def write(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(path)
    return path


def test_what_is_passed_over_is_counted(tmp_path) -> None:
    write(tmp_path / "b.png")
    write(tmp_path / "a" / "z.PNG")
    write(tmp_path / ".hidden.png")
    (tmp_path / "notes.txt").write_text("")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "null.png").symlink_to("/dev/null")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "itself.png").symlink_to(tmp_path / "itself.png")
    (tmp_path / "loop").symlink_to(tmp_path)
    found = find_images(tmp_path)
    assert found.names == ["a/z.PNG", "b.png", "gone.png", "itself.png"]
    assert found.skipped == {
        "hidden": 1,
        "without the ending of an image": 1,
        "neither a file nor a folder": 2,
        "a link to a folder met before": 1,
    }
    assert open_images(str(tmp_path)).skipped == found.skipped
    for name in ("pipe.png", "null.png"):
        with pytest.raises(ImageError, match="not a regular file"):
            decode(tmp_path / name)


def test_linked_class_folders_are_read_once_and_loops_end(tmp_path) -> None:
    write(tmp_path / "elsewhere" / "cats" / "1.png")
    (tmp_path / "elsewhere" / "cats" / "back").symlink_to(tmp_path / "photos")
    write(tmp_path / "photos" / "dog" / "2.png")
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    rows = open_images(str(tmp_path / "photos"))
    assert rows.names == ["cat/1.png", "dog/2.png"]
    assert rows.classes == ("cat", "dog")
    assert from_folder(tmp_path / "photos").classes == ("cat", "dog")


def test_a_thousand_nested_folders_are_walked(tmp_path) -> None:
    path = tmp_path
    for _ in range(1200):
        path = path / "d"
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        write(Path("a.png"))
    finally:
        os.chdir(here)
    assert len(find_images(tmp_path).names) == 1
    # Remove it from the inside: shutil's recursion is not for this depth.
    os.chdir(tmp_path)
    try:
        os.system("rm -rf d")
    finally:
        os.chdir(here)


def test_one_image_is_a_valid_input(tmp_path) -> None:
    rows = open_images(str(write(tmp_path / "photo.png", 7)))
    assert rows.names == ["photo.png"]
    assert (rows.images[0] == 7).all()


def test_an_image_that_was_replaced_since_it_was_listed_cannot_be_read(tmp_path) -> None:
    write(tmp_path / "a.png")
    rows = open_images(str(tmp_path))
    write(tmp_path / "new.png", 9).rename(tmp_path / "a.png")
    with pytest.raises(ImageError, match=CHANGED):
        rows.images[0]
    assert open_images(str(tmp_path)).key != rows.key


@pytest.mark.parametrize(
    ("classes", "num_classes", "class_names", "expected"),
    [
        (["2", "10"], 1000, (), [2, 10]),  # indices, though not all are there
        (["002", "010"], 11, (), [2, 10]),
        (["1", "2", "10"], 3, (), [0, 1, 2]),  # counted from 1: their order is the model's
        (["cat", "dog"], 3, ("dog", "bird", "cat"), [2, 0]),
        (["cat", "dog"], 2, (), [0, 1]),
        (["cat", "dog"], 3, (), None),
        (["3", "7"], 3, (), None),
    ],
)
def test_class_folders_are_classes_by_one_rule(
    classes, num_classes, class_names, expected, tmp_path
) -> None:
    for name in classes:
        write(tmp_path / name / "1.png")
    rows = open_images(str(tmp_path))
    found = as_classes(rows.labels, rows.classes, num_classes, class_names)
    images = from_folder(tmp_path)
    if expected is None:
        assert found is None
        with pytest.raises(ValueError, match="classes"):
            images.as_classes(num_classes, class_names)
        return
    by_folder = dict(zip([name.partition("/")[0] for name in rows.names], found.tolist()))
    assert [by_folder[name] for name in classes] == expected
    assert sorted(images.as_classes(num_classes, class_names).labels.tolist()) == sorted(expected)


def test_numbers_are_sorted_as_numbers_and_text_as_text() -> None:
    assert class_order([str(number) for number in range(1000)]) == [
        str(number) for number in range(1000)
    ]
    assert class_order(["b10", "b9"]) == ["b10", "b9"]


@pytest.mark.parametrize(
    ("right", "count", "num_classes", "warns"),
    [
        (0, 5000, 1000, True),  # sorted as text
        (10, 100, 10, True),  # chance
        (60, 100, 10, False),
        (20, 2000, 1000, False),  # poor, and far better than chance
        (0, 5, 10, False),  # too few to say
        (9, 10, 2, False),
        (500, 1000, 2, True),
    ],
)
def test_an_accuracy_no_better_than_guessing_is_named_with_mismatches(
    right, count, num_classes, warns
) -> None:
    labels = torch.arange(count) % num_classes
    predicted = labels.clone()
    predicted[right:] = (labels[right:] + 1) % num_classes
    agreement = Agreement(num_classes)
    for part in range(0, count, 7):
        agreement.add(labels[part : part + 7], predicted[part : part + 7])
    assert (agreement.right, agreement.count) == (right, count)
    text = agreement.warning("photos", ["ant", "bee"])
    assert (text is not None) == warns
    if warns and right == 0:
        assert (
            "label 0 (ant), predicted 1 (bee); label 1 (bee), predicted 2; label 2, predicted 3"
            in text
        )


def test_files_may_be_given_as_paths(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    files = ImageFiles([tmp_path / "a.png"])
    same = ImageFiles([str(tmp_path / "a.png")])
    assert (files.names, files.key()) == (same.names, same.key())
