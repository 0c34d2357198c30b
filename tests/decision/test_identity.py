"""A guard's id and version, and what becomes of them when it is saved, loaded and changed."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fdbd
from fdbd.networks.wrapped import plain_names, unwrapped, weights_hash

ARTIFACTS = Path(__file__).parent.parent / "artifacts"


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    return nn.Sequential(layers, nn.Linear(8, 3)).eval()


def calibrated(model: nn.Module, detector: str = "fdbd", seed: int = 1) -> fdbd.Guard:
    torch.manual_seed(seed)
    guard = fdbd.Guard(model, detector).fit([torch.randn(200, 4)], progress=False)
    return guard.calibrate([torch.randn(200, 4)], tpr=0.9, progress=False)


def saved(guard: fdbd.Guard, folder: Path) -> Path:
    guard.save(folder / "guard.safetensors")
    return folder / "guard.safetensors"


@pytest.mark.parametrize("detector", ["fdbd", "vim", "knn", "react+energy", "csi"])
def test_saving_and_loading_keep_id_and_version(detector: str, tmp_path: Path) -> None:
    model = network()
    guard = calibrated(model, detector)
    path = saved(guard, tmp_path)
    for loaded in (fdbd.load(path), fdbd.load(path, model)):
        assert (loaded.id, loaded.version) == (guard.id, 1)
    loaded.save(tmp_path / "again.safetensors")
    assert fdbd.load(tmp_path / "again.safetensors").id == guard.id


def test_the_same_data_give_the_same_id() -> None:
    assert calibrated(network()).id == calibrated(network()).id


def test_the_id_follows_detector_threshold_head_and_weights() -> None:
    guard = calibrated(network())
    ids = {guard.id}
    guard.calibrate([torch.randn(200, 4)], tpr=0.8, progress=False)
    ids.add(guard.id)
    other_data = calibrated(network(), seed=2)
    ids.add(other_data.id)
    ids.add(calibrated(network(), "energy").id)
    other_head = network()
    with torch.no_grad():
        other_head[1].bias += 1
    ids.add(calibrated(other_head).id)
    other_backbone = network()
    with torch.no_grad():
        other_backbone[0][0].weight[0, 0] += 1
    ids.add(calibrated(other_backbone).id)
    other_statistics = network()
    other_statistics[0][1].running_mean += 1
    ids.add(calibrated(other_statistics).id)
    assert len(ids) == 7


def test_weights_that_change_under_the_guard_change_its_id() -> None:
    guard = calibrated(network())
    before = guard.id
    with torch.no_grad():
        guard.classifier.model[0][0].weight += 1
    assert guard.id != before


def test_the_version_counts_thresholds_since_the_fit() -> None:
    guard = fdbd.Guard(network()).fit([torch.randn(200, 4)], progress=False)
    assert guard.version == 0
    for expected in (1, 2):
        guard.calibrate([torch.randn(200, 4)], progress=False)
        assert guard.version == expected
    assert guard.fit([torch.randn(200, 4)], progress=False).version == 0


def test_a_changed_backbone_behind_the_same_head_draws_a_warning(tmp_path: Path) -> None:
    model = network()
    path = saved(calibrated(model), tmp_path)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0][0].weight[0, 0] += 0.01
    with pytest.warns(UserWarning, match="other weights; the head is the same") as caught:
        loaded = fdbd.load(path, changed)
    assert caught[0].filename == __file__
    loaded.save(tmp_path / "again.safetensors")
    with pytest.warns(UserWarning, match="other weights"):
        fdbd.load(tmp_path / "again.safetensors", changed)


def test_a_network_that_was_trained_on_after_the_fit_draws_a_warning(tmp_path: Path) -> None:
    model = network()
    guard = calibrated(model)
    with torch.no_grad():
        model[0][0].weight += 0.01
    path = saved(guard, tmp_path)
    with pytest.warns(UserWarning, match="other weights"):
        fdbd.load(path, model)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)


def compiled_inside(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    model[0] = torch.compile(model[0])
    return model


def compiled_in_parallel(model: nn.Module) -> nn.Module:
    return nn.DataParallel(torch.compile(model))


@pytest.mark.filterwarnings("ignore:the model is compiled, and the guard runs it uncompiled")
@pytest.mark.parametrize("wrap", [nn.DataParallel, compiled, compiled_inside, compiled_in_parallel])
def test_wrappers_matter_on_neither_side(wrap, tmp_path: Path) -> None:
    model = network()
    wrapped = wrap(model)
    assert weights_hash(wrapped) == weights_hash(model)
    plain_path = saved(calibrated(model, "fdbd"), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "other weights|.*other weights")
        assert fdbd.load(plain_path, wrapped).id == fdbd.load(plain_path, model).id
        guard = calibrated(wrapped)
        (tmp_path / "wrapped").mkdir()
        wrapped_path = saved(guard, tmp_path / "wrapped")
        assert fdbd.load(wrapped_path, model).id == guard.id
    assert guard.classifier.head_name == "1"


@pytest.mark.parametrize("head", ["module.1", "_orig_mod.1", "module._orig_mod.1"])
def test_a_head_named_with_its_wrapper_is_found_without_it(head: str) -> None:
    assert fdbd.Classifier(network(), head=head).head.num_classes == 3


def test_layers_named_inside_a_wrapper_are_those_of_the_plain_model() -> None:
    model = network()
    wrapped = nn.Sequential(nn.DataParallel(model[0]), model[1])
    images = torch.randn(3, 4)
    expected = fdbd.Classifier(model, layers=["0.0"])(images).layers["0.0"]
    for name in ("0.module.0", "0.0"):
        assert torch.equal(fdbd.Classifier(wrapped, layers=[name])(images).layers[name], expected)


def test_a_part_that_is_really_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    holder = Holder()
    assert unwrapped(holder) is holder
    assert plain_names(holder, ["module.weight"]) == ["module.weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize")
def test_quantised_models_have_a_hash_that_follows_their_weights() -> None:
    def quantised(scale: float) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        with torch.no_grad():
            model[0].weight *= scale
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})

    assert weights_hash(quantised(1.0)) == weights_hash(quantised(1.0))
    assert weights_hash(quantised(1.0)) != weights_hash(quantised(3.0))


@pytest.mark.parametrize("release", ["0.1.0", "0.2.0"])
def test_files_of_older_releases_have_an_id_and_a_version(release: str) -> None:
    path = ARTIFACTS / release / "fdbd.safetensors"
    guard = fdbd.load(path)
    assert guard.version == 1
    assert guard.id == fdbd.load(path).id
    assert guard.id != fdbd.load(ARTIFACTS / release / "energy.safetensors").id
