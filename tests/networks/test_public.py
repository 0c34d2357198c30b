"""Public networks: one name, one file, one SHA-256."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fdbd.core.preprocessing import Preprocess
from fdbd.networks import public
from fdbd.networks.architectures import CifarResNet
from fdbd.networks.by_name import model_by_name
from fdbd.networks.checkpoint import save_weights
from fdbd.util.files import hash_file


@pytest.mark.parametrize("network", public.NETWORKS.values(), ids=lambda network: network.name)
def test_every_public_network_says_where_it_comes_from(network: public.PublicNetwork) -> None:
    assert len(network.sha256) == 64
    assert network.file
    assert network.source
    assert Preprocess.preset(network.preprocess).longest_side >= 32


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small network in the place of the public ResNet-20, whose file is the published one."""
    path = tmp_path / "weights" / "small.safetensors"
    torch.manual_seed(0)
    save_weights(CifarResNet(8), path)
    sha256 = hash_file(path)
    make = partial(CifarResNet, 8)
    file = "weights/small.safetensors"
    changed = replace(
        public.public_network("resnet20"), make=make, file=file, sha256=sha256, source="a test"
    )
    monkeypatch.setitem(public.NETWORKS, "resnet20", changed)
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    return path


def test_a_public_name_gives_the_network_with_its_weights_preprocessing_and_class_names(
    published: Path,
) -> None:
    found = model_by_name("public:resnet20", named_by="config.toml")
    assert found.preprocess == Preprocess.preset("cifar-imagenet-statistics")
    assert found.class_names[0] == "airplane"
    assert not found.untrained
    assert not found.model.training
    torch.manual_seed(0)
    assert torch.equal(found.model.get_parameter("linear.weight"), CifarResNet(8).linear.weight)


def test_a_file_that_is_not_the_published_one_is_refused(published: Path) -> None:
    published.write_bytes(published.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match="not the published file"):
        model_by_name("public:resnet20")


def test_missing_weights_are_named_with_their_file_folder_and_source(published: Path) -> None:
    published.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"no weights/small\.safetensors .*FDBD_DATA.* a test"
    ):
        model_by_name("public:resnet20")


def test_an_unknown_public_network_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(
        ValueError, match="no public network is called 'resnet51': there are resnet50"
    ):
        model_by_name("public:resnet51")
