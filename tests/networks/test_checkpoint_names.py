"""Published weights under other names: each layout as its authors' code writes it, with generated
tensors."""

from __future__ import annotations

import pytest
import torch

from fdbd import networks

torchvision = pytest.importorskip("torchvision")


def renamed(state, *pairs):
    found = {}
    for key, value in state.items():
        for old, new in pairs:
            key = key.replace(old, new)
        found[key] = value
    return found


@pytest.mark.parametrize(
    "layout",
    [
        # OpenOOD's names.
        (("linear.", "fc."),),
        # Those of fDBD's authors, in torchvision's manner.
        (("linear.", "fc."), (".shortcut.", ".downsample.")),
        ((".shortcut.", ".downsample."),),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_resnets_with_other_names_of_head_and_shortcut_load(layout, wrapped, tmp_path) -> None:
    model = networks.create("resnet18")
    state = renamed(model.state_dict(), *layout)
    if wrapped:
        state = {"state_dict": {f"module.{key}": value for key, value in state.items()}}
    torch.save(state, tmp_path / "published.pth")
    loaded = networks.create("resnet18", checkpoint=tmp_path / "published.pth")
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_a_supcon_file_loads_with_its_separate_linear_head(tmp_path) -> None:
    model = networks.create("resnet18")
    state = model.state_dict()
    encoder = {
        f"encoder.{key}": value for key, value in state.items() if not key.startswith("linear.")
    }
    projection = {"head.0.weight": torch.zeros(512, 512), "head.2.weight": torch.zeros(128, 512)}
    torch.save({"model": {**encoder, **projection}, "epoch": 500}, tmp_path / "supcon.pth")
    linear = {"fc.weight": state["linear.weight"], "fc.bias": state["linear.bias"]}
    torch.save({"model": linear}, tmp_path / "linear.pth")
    path = f"{tmp_path / 'supcon.pth'}+{tmp_path / 'linear.pth'}"
    loaded = networks.create("resnet18", checkpoint=path)
    for key, value in state.items():
        assert torch.equal(loaded.state_dict()[key], value), key
    with pytest.raises(ValueError, match=r"2 missing \(linear.weight, linear.bias\)"):
        networks.create("resnet18", checkpoint=tmp_path / "supcon.pth")


def test_the_papers_vit_loads_into_torchvisions_and_computes_the_same(tmp_path) -> None:
    from torchvision.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(32, 16, 2, 2, 8, 16, num_classes=5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    state = model.state_dict()
    theirs = {}
    for key, value in state.items():
        name = key
        for old, new in (
            ("encoder.pos_embedding", "positional_embedding.pos_embedding"), ("conv_proj.", "patch_embedding."),
            ("encoder.layers.encoder_layer_", "transformer.blocks."), (".ln_", ".norm"), ("encoder.ln.", "norm."),
            (".self_attention.out_proj.", ".proj."), (".mlp.0.", ".pwff.fc1."), (".mlp.3.", ".pwff.fc2."),
            ("heads.head.", "fc."),
        ):  # fmt: skip
            name = name.replace(old, new)
        if "in_proj_" in name:
            block, kind = name.split(".self_attention.in_proj_")
            for part, chunk in zip("qkv", value.chunk(3)):
                theirs[f"{block}.attn.proj_{part}.{kind}"] = chunk.clone()
        else:
            theirs[name] = value
    torch.save(theirs, tmp_path / "B_16.pth")
    other = VisionTransformer(32, 16, 2, 2, 8, 16, num_classes=5).eval()
    networks.load_checkpoint(other, tmp_path / "B_16.pth")
    images = torch.randn(3, 3, 32, 32)
    assert torch.equal(other(images), model(images))


@pytest.mark.parametrize("weights", ["IMAGENET1K_V1", "IMAGENET1K_V2"])
def test_both_published_resnet50s_load_from_a_file_of_their_name(
    weights, tmp_path, monkeypatch
) -> None:
    from fdbd.networks.by_name import model_by_name

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    state = torchvision.models.resnet50().state_dict()
    file = torchvision.models.get_model_weights("resnet50")[weights].url.rpartition("/")[2]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(state, tmp_path / "hub" / "checkpoints" / file)
    found = model_by_name(f"torchvision:resnet50.{weights}", device="cpu")
    assert torch.equal(found.model.fc.weight, state["fc.weight"])
    assert not found.untrained
