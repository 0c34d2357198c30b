"""Benchmark configs: TOML and YAML, and what is said of a slip in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd import networks as models
from fdbd.bench import from_config as assemble
from fdbd.bench.config import EXAMPLE, Config
from fdbd.data.preprocessing import Preprocess


def test_the_example_is_a_valid_config(tmp_path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(EXAMPLE)
    config = Config.from_file(path)
    assert config.model == "zoo:cifar10-ce"
    assert config.train == config.id == "cifar10"
    assert config.groups["near"] == ("tiny-imagenet",)
    assert set(config.groups["far"]) <= set(config.ood)


def test_yaml_and_toml_say_the_same(tmp_path) -> None:
    (tmp_path / "a.toml").write_text('model = "resnet20"\nid = "cifar10"\nood = ["mnist"]\nlimit = 5\n')
    (tmp_path / "a.yaml").write_text("model: resnet20\nid: cifar10\nood: [mnist]\nlimit: 5\n")
    assert Config.from_file(tmp_path / "a.toml") == Config.from_file(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "resnet20"\nid = "cifar10"\n', "'ood' is missing"),
        ('model = "resnet20"\nid = "cifar10"\nood = ["mnist"]\ndetector = ["fdbd"]\n', "did you mean 'detectors'"),
        ('model = "resnet20"\nid = "cifar10"\nood = [3]\n', "expected a list of names"),
        ('model = "resnet20"\nid = "cifar10"\nood = ["mnist"]\nlimit = -1\n', "positive whole number"),
        ('model = "resnet20"\nid = "cifar10"\nood = ["mnist"]\npositive = "both"\n', "expected 'id' or 'ood'"),
        ('model = 3\nid = "cifar10"\nood = ["mnist"]\n', "expected a text"),
        ('model = "resnet20"\nid = "cifar10"\nood = ["mnist"]\nholdout = 1.5\n', "'holdout' is 1.5"),
        ('model = "m"\nid = "a"\ntrain = "b"\nood = ["c"]\nholdout = 0.5\n', "leave out 'train', or 'holdout'"),
        ("model = ", "no valid TOML"),
    ],
)
def test_a_slip_is_answered_in_one_sentence(text: str, message: str, tmp_path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Config.from_file(path)


def test_yaml_that_would_run_code_is_refused(tmp_path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("model: !!python/object/apply:os.system ['touch owned']\n")
    with pytest.raises(ValueError, match="no valid YAML"):
        Config.from_file(path)
    assert not (tmp_path / "owned").exists()


def test_other_files_and_missing_ones_are_refused(tmp_path) -> None:
    (tmp_path / "bench.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected \.toml"):
        Config.from_file(tmp_path / "bench.json")
    with pytest.raises(FileNotFoundError, match="--init"):
        Config.from_file(tmp_path / "nothing.toml")


def images_file(path, count: int) -> str:
    """An NPZ of images that are all different, with their number as the first pixel."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(count)
    np.savez(path, x=pixels, y=np.arange(count) % 10)
    return str(path)


@pytest.mark.parametrize(("holdout", "scored"), [(0.5, 10), (0.25, 5), (0.9, 18)])
def test_a_holdout_fits_on_the_images_that_are_not_scored(holdout: float, scored: int, tmp_path) -> None:
    config = Config("resnet20", images_file(tmp_path / "id.npz", 20), ("mnist",), holdout=holdout)
    train, test = assemble._fitted_and_scored(config)
    numbers = [{int(image[0, 0, 0]) for image in part.images} for part in (train, test)]
    assert len(numbers[1]) == scored
    assert numbers[0] | numbers[1] == set(range(20))
    assert not numbers[0] & numbers[1]


def test_a_holdout_that_leaves_nothing_is_refused(tmp_path) -> None:
    config = Config("resnet20", images_file(tmp_path / "id.npz", 3), ("mnist",), holdout=0.01)
    with pytest.raises(ValueError, match="leaves a part empty"):
        assemble._fitted_and_scored(config)


def test_a_checkpoint_is_found_below_the_data_folder(tmp_path, monkeypatch) -> None:
    model = models.create("resnet20")
    (tmp_path / "weights").mkdir()
    models.save_weights(model, tmp_path / "weights" / "some.safetensors")
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    found, _, about = assemble.model_of(
        Config("resnet20", "cifar10", ("mnist",), checkpoint="weights/some.safetensors")
    )
    assert torch.equal(found.linear.weight, model.linear.weight)
    assert "weights/some.safetensors" in about


def test_the_configs_of_the_project_are_valid() -> None:
    paths = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
    assert len(paths) >= 3
    for path in paths:
        config = Config.from_file(path)
        for name in config.detectors or ():
            fdbd.create(name)
        if config.preprocess is not None:
            assert Preprocess.parse(config.preprocess).size in (32, 224)
