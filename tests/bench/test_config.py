"""Benchmark configs: what they may say, what is said of a slip in one, and the benchmark that they
become."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fdbd import cli
from fdbd.bench import benchmark_of
from fdbd.bench.build import open_id_sets
from fdbd.bench.cache import FeatureCache
from fdbd.bench.config import EXAMPLE, Config, detectors_from
from fdbd.data.datasets import DatasetUnavailable, load

BASE = 'model = "cifar10-ce"\nid = "cifar10"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "bench.toml"
    path.write_text(text)
    return path


def images_file(path: Path, count: int) -> str:
    """An NPZ of images that are all different, with their number as the first pixel."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(count)
    np.savez(path, x=pixels, y=np.arange(count) % 10)
    return str(path)


def test_the_example_is_a_valid_config() -> None:
    config = Config.from_file(EXAMPLE)
    assert config.train == config.id == "cifar10"
    assert config.groups["near"] == ("tiny-imagenet",)
    assert set(config.groups["far"]) <= set(config.ood)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE, "'ood' is missing"),
        (BASE + 'ood = ["mnist"]\ndetector = ["fdbd"]', "did you mean 'detectors'"),
        (BASE + 'ood = ["mnist"]\nseeds = [0]', "takes a 'checkpoint' with {seed}"),
        (BASE + 'ood = ["mnist"]\ncheckpoint = "s{seed}.pt"', "give 'seeds'"),
        (BASE + 'ood = ["mnist"]\n[tune]\nknn = { kk = [1] }', "no option 'kk'"),
        (BASE + 'ood = ["mnist"]\n[tune]\nknn = { k = [] }', "'tune.knn' is empty"),
        (BASE + 'ood = ["mnist"]\nunresized = ["minst"]', "neither in 'ood' nor 'shifted'"),
        (BASE + 'ood = ["mnist"]\n[shifted]\nmnist = "mnist"', "both among 'ood' and"),
        (BASE + "ood = [3]", "expected text, got an integer"),
        (BASE + 'ood = ["mnist"]\nlimit = -1', "positive whole number"),
        (BASE + 'ood = ["mnist"]\nood_limit = 0', "positive whole number"),
        (BASE + 'ood = ["mnist"]\npositive = "both"', "expected 'id' or 'ood'"),
        ('model = 3\nid = "cifar10"\nood = ["mnist"]', "model: expected text"),
        (BASE + 'ood = ["mnist"]\nholdout = 1.5', "'holdout' is 1.5"),
        (BASE + 'ood = ["mnist"]\nvalidation = 0', "'validation' is 0"),
        (
            'model = "m"\nid = "a"\ntrain = "b"\nood = ["c"]\nholdout = 0.5',
            "leave out 'train', or 'holdout'",
        ),
        (BASE + 'ood = ["a/test", "b/test"]', "two OOD sets would both be called 'test'"),
        (
            BASE + 'ood = ["flowers", "flowers102"]',
            "two OOD sets would both be called 'flowers102'",
        ),
        (BASE + 'ood = ["mnist"]\n[groups]\nfar = ["nmist"]', "group 'far' has 'nmist'"),
        (BASE + 'ood = ["mnist"]\ndetectors = ["fdbdd"]', "unknown detector 'fdbdd'"),
        (
            BASE + 'ood = ["mnist"]\ndetectors = [{name = "react+fdbd", percent = 3}]',
            "no option 'percent'",
        ),
        (BASE + 'ood = ["mnist"]\ndetectors = [{percentile = 3}]', "expected a name"),
        (BASE + 'ood = ["mnist"]\ndetectors = ["knn", "knn"]', "both be called 'knn'"),
        (BASE + 'ood = ["mnist"]\npreprocess = "nothing"', "nothing"),
        ("model = ", "is not valid TOML"),
    ],
)
def test_a_slip_is_answered_in_one_sentence_before_any_work(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Config.from_file(written(tmp_path, text))
    assert "bench.toml" in str(error.value)


def test_other_files_and_missing_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bench.yaml").write_text("model: resnet20")
    with pytest.raises(ValueError, match=r"expected a \.toml"):
        Config.from_file(tmp_path / "bench.yaml")
    with pytest.raises(FileNotFoundError, match="--init"):
        Config.from_file(tmp_path / "nothing.toml")


def test_detectors_have_options_titles_and_rows_of_their_own() -> None:
    found = detectors_from(
        [
            "fdbd",
            {"name": "react+fdbd", "percentile": 80, "mean": "shaped"},
            {"name": "fdbd", "normalizer": "none", "title": "avgDistDB"},
        ]
    )
    assert list(found) == ["fdbd", "react+fdbd (percentile=80, mean=shaped)", "avgDistDB"]
    assert found["avgDistDB"].normalizer is None


def test_a_detector_of_the_users_own_is_found_in_the_current_folder(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "own_scores.py").write_text(
        "from fdbd import MSP\n\nclass Mine(MSP):\n    name = ''\n\nnumber = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = detectors_from([{"name": "own_scores:Mine", "temperature": 2.0}], trust=True)
    assert type(next(iter(found.values()))).__name__ == "Mine"
    with pytest.raises(ValueError, match="--trust-model"):
        detectors_from(["own_scores:Mine"])
    for name in ("own_scores:number", "own_scores:nothing", "no_such_module:X", "own_scores:print"):
        with pytest.raises(ValueError, match=name):
            detectors_from([name], trust=True)


@pytest.mark.parametrize(("holdout", "scored"), [(0.5, 10), (0.25, 5), (0.9, 18)])
def test_parts_of_the_id_images_share_none(holdout: float, scored: int, tmp_path: Path) -> None:
    data = images_file(tmp_path / "id.npz", 20)
    config = Config("cifar10-ce", data, {"mnist": "mnist"}, holdout=holdout, validation=0.4)
    train, test, validation = open_id_sets(config, 32)
    assert validation is not None
    numbers = []
    for images in (train, test, validation):
        numbers.append({int(image[0, 0, 0]) for image in images.images})
    assert len(numbers[1]) + len(numbers[2]) == scored
    assert set.union(*numbers) == set(range(20))
    assert sum(len(part) for part in numbers) == 20
    with pytest.raises(ValueError, match="leaves a part empty"):
        open_id_sets(Config("cifar10-ce", data, {}, holdout=0.01), 32)


def test_the_configs_of_the_project_are_valid() -> None:
    paths = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    assert len(paths) >= 3
    for path in paths:
        Config.from_file(path)


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    """An ID set in class folders called 0 to 9, behind links, and two OOD folders of the same
    name."""
    rng = np.random.default_rng(0)

    def draw(folder: Path, count: int) -> None:
        folder.mkdir(parents=True)
        for number in range(count):
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
                folder / f"{number}.png"
            )

    for label in range(10):
        draw(tmp_path / "store" / f"class {label}", 3)
        (tmp_path / "id").mkdir(exist_ok=True)
        (tmp_path / "id" / str(label)).symlink_to(tmp_path / "store" / f"class {label}")
    draw(tmp_path / "a" / "test", 6)
    draw(tmp_path / "b" / "test", 5)
    return tmp_path


def test_a_benchmark_on_ones_own_folders_has_their_names_limits_and_keys(own_data: Path) -> None:
    text = (
        f'model = "cifar10-ce"\nid = "{own_data}/id"\nholdout = 0.5\nood_limit = 4\n'
        f'[ood]\n"first" = "{own_data}/a/test"\n"second" = "{own_data}/b/test"\n'
        '[groups]\nboth = ["first", "second"]\n'
    )
    said: list[str] = []
    config = Config.from_file(written(own_data, text))
    benchmark = benchmark_of(config, FeatureCache(own_data / "cache"), said.append, device="cpu")
    assert [(part.name, len(part)) for part in benchmark.ood] == [("first", 4), ("second", 4)]
    assert len(benchmark.test) == len(benchmark.train) == 15
    assert benchmark.groups == {"both": ("first", "second")}
    assert len({part.key for part in (benchmark.test, *benchmark.ood)}) == 3
    assert any(line.startswith("first: 4 images") for line in said)
    # The images are noise.
    assert any("no better than guessing" in line for line in said)
    again = benchmark_of(config, FeatureCache(own_data / "cache"), said.append, device="cpu")
    assert torch.equal(again.test.features, benchmark.test.features)


def test_two_sets_of_one_name_are_refused_before_the_network_runs(own_data: Path) -> None:
    config = Config("cifar10-ce", f"{own_data}/id", {"id": f"{own_data}/a/test"}, holdout=0.5)
    with pytest.raises(ValueError, match="two sets are called 'id'"):
        benchmark_of(config, FeatureCache(own_data / "cache"), print, device="cpu")
    assert not (own_data / "cache").exists()


def test_untrained_weights_are_said_in_capitals_above_every_table(
    own_data: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("FDBD_CACHE", str(own_data / "cache"))
    text = f'id = "{own_data}/id"\nholdout = 0.5\nood = ["{own_data}/a/test"]\n'
    text += 'preprocess = "cifar10"\n'
    text += 'model = "resnet20"\nnum_classes = 10\n'
    path = written(own_data, text)
    out = own_data / "out"
    with pytest.raises(SystemExit) as left:
        cli.main(
            [
                "bench",
                str(path),
                "--detectors",
                "msp",
                "--no-latency",
                "--out",
                str(out),
                "--format",
                "html,json,md,tex",
            ]
        )
    assert left.value.code == 0
    assert "UNTRAINED WEIGHTS" in capsys.readouterr().out.partition("┏")[0]
    assert "UNTRAINED WEIGHTS" in (out / "results.md").read_text().partition("|")[0]
    for name in ("report.html", "results.tex"):
        assert "UNTRAINED WEIGHTS" in (out / name).read_text()
    assert json.loads((out / "results.json").read_text())["setting"]["warnings"]


@pytest.mark.filterwarnings("ignore:tiny-imagenet .test. from:UserWarning")
def test_a_reduced_copy_is_not_handed_to_a_network_of_larger_images(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "ood32").mkdir()
    images_file(tmp_path / "ood32" / "tiny_imagenet_val.npz", 12)
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    assert len(load("tiny-imagenet", for_size=32, download=False)) == 12
    with pytest.raises(DatasetUnavailable, match="32×32, too small for a network of 224"):
        load("tiny-imagenet", for_size=224, download=False)
