"""Weights that were published under other names than ours: the same network, written down by others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

import torch
from torch import Tensor

_PREFIXES = ("module.", "encoder.", "backbone.", "model.", "net.")
# Head and shortcut of a ResNet have two common names each.
_SWAPS = (("fc.", "linear."), ("linear.", "fc."), (".shortcut.", ".downsample."), (".downsample.", ".shortcut."))
# The ViT of lukemelas' PyTorch-Pretrained-ViT, which the fDBD paper uses, under torchvision's names.
_VIT = (
    (r"^positional_embedding\.pos_embedding$", "encoder.pos_embedding"),
    (r"^patch_embedding\.", "conv_proj."),
    (r"^transformer\.blocks\.(\d+)\.norm(\d)\.", r"encoder.layers.encoder_layer_\1.ln_\2."),
    (r"^transformer\.blocks\.(\d+)\.proj\.", r"encoder.layers.encoder_layer_\1.self_attention.out_proj."),
    (r"^transformer\.blocks\.(\d+)\.pwff\.fc1\.", r"encoder.layers.encoder_layer_\1.mlp.0."),
    (r"^transformer\.blocks\.(\d+)\.pwff\.fc2\.", r"encoder.layers.encoder_layer_\1.mlp.3."),
    (r"^norm\.", "encoder.ln."),
    (r"^fc\.", "heads.head."),
)
_VIT_ATTENTION = re.compile(r"^transformer\.blocks\.(\d+)\.attn\.proj_q\.(weight|bias)$")


def under_names(state: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """The weights under the model's own names, as far as they are known by another one.

    state: the file's tensors; names: the keys that the model has. A projection head beside an ``encoder.`` is dropped
    (SupCon). What nothing is known of keeps its name.
    """
    found = dict(state)
    if "patch_embedding.weight" in found and "conv_proj.weight" in names:
        found = _as_torchvision_vit(found)
    for prefix in _PREFIXES:
        inner = {key.removeprefix(prefix): value for key, value in found.items() if key.startswith(prefix)}
        outer = {key: value for key, value in found.items() if not key.startswith(prefix)}
        if inner and not set(found) & names - set(inner) and all(key in names or _is_head(key) for key in outer):
            kept = {key: value for key, value in outer.items() if not key.startswith("head.") or key in names}
            found = {**inner, **kept}
    for old, new in _SWAPS:
        targets = {key: key.replace(old, new, 1) for key in found if key not in names}
        found = {targets[key] if targets.get(key) in names else key: value for key, value in found.items()}
    return found


def _is_head(key: str) -> bool:
    return key.startswith(("head.", "fc.", "linear."))


def _as_torchvision_vit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for key, value in state.items():
        if match := _VIT_ATTENTION.match(key):
            parts = [state[key.replace("proj_q", f"proj_{part}")] for part in "qkv"]
            name = f"encoder.layers.encoder_layer_{match[1]}.self_attention.in_proj_{match[2]}"
            found[name] = torch.cat(parts)
        elif ".attn.proj_" not in key:
            for pattern, replacement in _VIT:
                key = re.sub(pattern, replacement, key)
            found[key] = value
    return found
