"""Weights files: the public checkpoints as they are, wrapped and prefixed ones, and refusals that
say why."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fdbd import networks as models
from fdbd.networks.checkpoint import under_names

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "weights"


@pytest.mark.parametrize(
    ("name", "file"), [("resnet20", "resnet20-12fca82f.th"), ("resnet56", "resnet56-4bfd9763.th")]
)
def test_public_checkpoint_loads_as_it_is(name, file):
    if not (PUBLIC / file).exists():
        pytest.skip(f"the public checkpoint {file} is not at hand")
    model = models.create(name, checkpoint=PUBLIC / file)
    raw = torch.load(PUBLIC / file, map_location="cpu", weights_only=True)["state_dict"]
    assert torch.equal(model.linear.weight, raw["module.linear.weight"])
    assert torch.equal(model.layer3[2].bn2.running_var, raw["module.layer3.2.bn2.running_var"])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return models.create("densenet22")


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "module", "both", "safetensors"])
def test_wrappings_are_undone(model, tmp_path, wrap):
    state = model.state_dict()
    if wrap in ("module", "both"):
        state = {f"module.{key}": value for key, value in state.items()}
    if wrap == "safetensors":
        path = tmp_path / "w.safetensors"
        save_file(state, path)
    else:
        path = tmp_path / "w.pt"
        if wrap in ("state_dict", "both"):
            state = {"state_dict": state, "epoch": 3}
        torch.save(state, path)
    loaded = models.create("densenet22", checkpoint=path)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), model.state_dict().values())
    )


@pytest.mark.parametrize("prefix", ["model.", "model.net.", "encoder.module.", "net.backbone."])
def test_wrappers_are_undone_one_in_another(model, prefix):
    state = model.state_dict()
    found = under_names({prefix + key: value for key, value in state.items()}, state.keys())
    assert all(found[key] is value for key, value in state.items())


def test_of_two_networks_in_one_file_neither_is_taken(model, tmp_path):
    state = model.state_dict()
    both = {}
    for key, value in state.items():
        both[f"model.{key}"] = value
        both[f"net.{key}"] = value
    torch.save(both, tmp_path / "w")
    with pytest.raises(ValueError, match=r"keys \d+ missing .* and \d+ unexpected \(model\."):
        models.create("densenet22", checkpoint=tmp_path / "w")


def test_half_precision_keeps_small_tensors_exact_and_loads_as_float32(model, tmp_path):
    models.save_weights(model, tmp_path / "h.safetensors", metadata={"a": "b"}, dtype=torch.float16)
    loaded = models.create("densenet22", checkpoint=tmp_path / "h.safetensors")
    assert loaded.fc.weight.dtype == torch.float32
    assert torch.equal(loaded.fc.bias, model.fc.bias)
    torch.testing.assert_close(loaded.fc.weight, model.fc.weight, atol=1e-3, rtol=1e-3)
    assert models.read_metadata(tmp_path / "h.safetensors") == {"a": "b"}
    assert [p.name for p in tmp_path.iterdir()] == ["h.safetensors"]


def test_wrong_class_count_says_which_to_pass(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match="has 10 classes and the model 100: pass num_classes=10"):
        models.create("densenet22", num_classes=100, checkpoint=tmp_path / "w.pt")


def test_missing_and_unexpected_keys_are_named(model, tmp_path):
    state = dict(model.state_dict())
    state["surplus.weight"] = state.pop("fc.weight")
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(
        ValueError, match=r"1 missing \(fc.weight\) and 1 unexpected \(surplus.weight\)"
    ):
        models.create("densenet22", checkpoint=tmp_path / "w.pt")


def test_another_shape_is_named(model, tmp_path):
    state = {**model.state_dict(), "conv1.weight": torch.zeros(24, 3, 5, 5)}
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(
        ValueError, match=r"conv1.weight is \(24, 3, 5, 5\) there and \(24, 3, 3, 3\) here"
    ):
        models.create("densenet22", checkpoint=tmp_path / "w.pt")


def test_a_pickled_model_is_refused(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"needs pickle, which can run code: save its state_dict"):
        models.create("resnet20", checkpoint=tmp_path / "whole.pt")


def test_no_file_garbage_and_no_tensors_are_clear(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint file"):
        models.create("resnet20", checkpoint=tmp_path / "none.pt")
    for name in ("garbage.pt", "garbage.safetensors"):
        (tmp_path / name).write_bytes(b"\x00\x01 nothing of the kind")
        with pytest.raises(ValueError, match="garbage"):
            models.create("resnet20", checkpoint=tmp_path / name)
    torch.save({"epoch": 3}, tmp_path / "numbers.pt")
    with pytest.raises(ValueError, match="holds no state dict of tensors"):
        models.create("resnet20", checkpoint=tmp_path / "numbers.pt")
