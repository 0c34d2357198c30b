"""Benchmark configs: TOML and YAML, and what is said of a slip in one."""

from __future__ import annotations

import pytest

from fdbd.bench.config import EXAMPLE, Config


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
