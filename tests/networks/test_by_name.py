"""One way from a name to a model: the same name means the same model, weights and preprocessing
everywhere."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fdbd import networks as models
from fdbd.core.preprocessing import Preprocess
from fdbd.networks.by_name import model_by_name
from fdbd.networks.wrapped import weights_hash
from fdbd.util.devices import choose_device

FACTORY = """
import torch
from torch import nn

def trained(num_classes=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
    nn.init.uniform_(model[1].weight)
    return model

def fresh(num_classes=3):
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of the user's in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.path", [entry for entry in __import__("sys").path if entry not in ("", str(tmp_path))]
    )
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "mine.py").write_text(FACTORY)
    return tmp_path


@pytest.mark.parametrize("name", ["cifar10-ce", "zoo:cifar10-ce"])
def test_a_zoo_model_has_one_meaning_with_and_without_its_prefix(name: str) -> None:
    found = model_by_name(name, device="cpu")
    assert weights_hash(found.model) == weights_hash(models.zoo("cifar10-ce"))
    assert found.preprocess == models.zoo_card("cifar10-ce").preprocess
    assert (len(found.class_names), found.untrained, found.model.training) == (10, False, False)


@pytest.mark.parametrize(
    "name", ["torchvision:squeezenet1_1", "squeezenet1_1", "timm:test_resnet", "test_resnet"]
)
def test_a_library_name_means_published_weights_and_never_random_ones(
    name: str, here: Path, monkeypatch
) -> None:
    asked = []
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda url, **_: asked.append(url))

    def no_network(*_: object, **__: object) -> None:
        asked.append("hub")
        raise OSError("no network")

    for library in (
        "torchvision.models._api.load_state_dict_from_url",
        "timm.models._builder.load_state_dict_from_hf",
    ):
        monkeypatch.setattr(library, no_network)
    with pytest.raises(
        OSError, match=r"published weights of .* cannot be downloaded here .*--checkpoint"
    ):
        model_by_name(name, allow_untrained=True)
    assert asked


def test_weights_of_torchvision_can_be_chosen_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"has no weights 'NO', expected one of IMAGENET1K_V1, IMAGENET1K_V2"
    ):
        model_by_name("torchvision:resnet50.NO")


def test_a_checkpoint_tells_the_number_of_classes_and_lies_below_a_data_folder(
    here: Path, monkeypatch
) -> None:
    network = models.create("resnet20", 7)
    (here / "data").mkdir()
    monkeypatch.setenv("FDBD_DATA", str(here / "data"))
    save_file(network.state_dict(), here / "data" / "net.safetensors")
    found = model_by_name("resnet20", "net.safetensors", preprocess={"size": 8}, device="cpu")
    assert weights_hash(found.model) == weights_hash(network)
    assert (found.origin["num_classes"], found.untrained, found.preprocess) == (
        7,
        False,
        Preprocess(8),
    )
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        model_by_name("resnet20", "other.safetensors")


@pytest.mark.parametrize(
    "name", ["resnet20", "mine:fresh", "timm:test_resnet", "torchvision:squeezenet1_1"]
)
def test_random_weights_are_refused_or_said_in_capitals(name: str, here: Path) -> None:
    # The published weights have 1,000.
    classes = None if name in ("resnet20", "mine:fresh") else 7
    with pytest.raises(ValueError, match="comes without weights: give them with --checkpoint"):
        model_by_name(name, num_classes=classes)
    with pytest.warns(UserWarning, match="UNTRAINED WEIGHTS"):
        found = model_by_name(name, num_classes=classes, allow_untrained=True, device="cpu")
    assert found.untrained
    assert "UNTRAINED WEIGHTS" in found.weights


def test_a_factory_in_the_current_folder_is_found_and_its_weights_are_taken_as_trained(
    here: Path,
) -> None:
    found = model_by_name("mine:trained", device="cpu")
    assert isinstance(found.model, nn.Sequential)
    assert not found.untrained


def test_a_file_does_not_choose_what_code_runs(here: Path) -> None:
    (here / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(
        ValueError, match=r"'bench.toml' names the model mine:trained, which is code to run"
    ):
        model_by_name("mine:trained", named_by="bench.toml")
    with pytest.raises(SystemExit, match="ran"):
        model_by_name("mine:trained", named_by="bench.toml", trust=True)


def test_an_exported_head_whose_weights_are_computed_is_refused(here: Path) -> None:
    class Cosine(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, nn.functional.normalize(self.weight))

    torch.export.save(
        torch.export.export(Cosine(3, 2).eval(), (torch.ones(2, 3),)), here / "cosine.pt2"
    )
    with pytest.raises(ValueError, match="computes its weights, expected stored ones"):
        model_by_name("cosine.pt2", trust=True)


@pytest.mark.parametrize("name", ["cifar10-ce", "public:resnet50", "model.pt2"])
def test_a_model_with_weights_of_its_own_takes_no_checkpoint(name: str, here: Path) -> None:
    save_file({"a": torch.zeros(1)}, here / "w.safetensors")
    with pytest.raises(ValueError, match="has its own weights"):
        model_by_name(name, "w.safetensors")


@pytest.mark.parametrize("name", ["nonsense", "cuda:99", "xpu:7", ""])
def test_a_device_that_is_not_there_is_one_sentence(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"the device .* is not available here, expected auto or one of: cpu"
    ):
        choose_device(name)


def test_auto_takes_the_accelerator_that_is_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    assert choose_device("auto") == choose_device(None) == torch.device("cpu")
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("xpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == torch.device("cuda")
