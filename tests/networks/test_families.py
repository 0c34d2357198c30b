"""Ten families of today's image networks, at random weights: the head is found, features and logits
come back, and a guard around each is exported to ONNX and decides the same there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd

# Family: where it is from, name, size of its input, the head's name.
FAMILIES = {
    "ViT": ("timm", "vit_tiny_patch16_224", 224, "head"),
    "DeiT": ("timm", "deit_tiny_distilled_patch16_224", 224, "head+head_dist"),
    "Swin": ("torchvision", "swin_t", 64, "head"),
    "ConvNeXt": ("timm", "convnext_atto", 64, "head.fc"),
    "MaxViT": ("timm", "maxvit_rmlp_pico_rw_256", 256, "head.fc"),
    "EfficientFormer": ("timm", "efficientformer_l1", 224, "head+head_dist"),
    "MobileViT": ("timm", "mobilevit_xxs", 64, "head.fc"),
    "RegNet": ("torchvision", "regnet_y_400mf", 64, "fc"),
    "BEiT": ("timm", "beit_base_patch16_224", 224, "head"),
    "EVA": ("timm", "eva02_tiny_patch14_224", 224, "head"),
}


def build(library: str, name: str) -> nn.Module:
    torch.manual_seed(0)
    if library == "timm":
        timm = pytest.importorskip("timm")
        # A constructor without drop path and with one block less per stage would be quicker, but
        # would no longer be the published architecture.
        return timm.create_model(name, pretrained=False, num_classes=5).eval()
    models = pytest.importorskip("torchvision.models")
    return models.get_model(name, weights=None, num_classes=5).eval()


def nudge(model: nn.Module) -> None:
    """Random heads and layer scales: some families start with zeros there, so that every image
    would have the same features."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        is_small = parameter.abs().max() < 1e-3
        if is_small and ("head" in name or "gamma" in name or "ls" in name or "fc" in name):
            with torch.no_grad():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def test_the_page_on_heads_lists_the_families_that_are_tested() -> None:
    page = Path(__file__).parents[2] / "docs" / "heads.md"
    text = page.read_text(encoding="utf-8")
    section = text.partition("\nOne network")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"(\w+)\s\(`(\w+)`\)", section))
    assert listed == {family: name for family, (_, name, _, _) in FAMILIES.items()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_guard_around_each_family_decides_and_is_exported(family: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    library, name, size, head = FAMILIES[family]
    model = build(library, name)
    nudge(model)
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(28, 3, size, size, generator=generator)
    guard = fdbd.Guard(model)
    assert guard.classifier.head_name == head
    guard.fit([images[:8]], progress=False)
    with pytest.warns(UserWarning, match="only 20 calibration samples"):
        guard.calibrate([images[8:]], progress=False)
    few = images[:3]
    with torch.inference_mode():
        batch = guard.classifier(few)
        torch.testing.assert_close(batch.logits, model(few), atol=1e-5, rtol=1e-4)
        decision = guard(few)
    torch.testing.assert_close(guard.head(batch.features), batch.logits, atol=1e-5, rtol=1e-4)
    path = tmp_path / "guard.onnx"
    guard.export_onnx(path, few)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {session.get_inputs()[0].name: few.numpy()})))
    np.testing.assert_allclose(found["score"], decision.scores, rtol=2e-3, atol=1e-4)
    assert (found["label"] == decision.labels.numpy()).all()
