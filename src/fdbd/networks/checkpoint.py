"""Weights in and out of models: safetensors and torch files, never code from a file; errors say
what does not fit."""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fdbd.util.files import beside
from fdbd.util.terminal import one_line

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which checkpoints keep the weights."""
# Names of other implementations, and ours for the same tensor: wrappers; the two common names each
# of a ResNet's head and shortcut; and PyTorch-Pretrained-ViT, which the fDBD paper uses, under
# torchvision's names.
_RENAMES = (
    # Twice, since one wrapper may hold another.
    (r"^(module|encoder|backbone|model|net)\.", ""),
    (r"^(module|encoder|backbone|model|net)\.", ""),
    (r"^fc\.", "linear."),
    (r"^linear\.", "fc."),
    (r"\.shortcut\.", ".downsample."),
    (r"\.downsample\.", ".shortcut."),
    (r"^positional_embedding\.", "encoder."),
    (r"^patch_embedding\.", "conv_proj."),
    (r"^transformer\.blocks\.", "encoder.layers.encoder_layer_"),
    (r"\.norm(\d)\.", r".ln_\1."),
    (r"(\d)\.proj\.", r"\1.self_attention.out_proj."),
    (r"\.attn\.", ".self_attention."),
    (r"\.pwff\.fc1\.", ".mlp.0."),
    (r"\.pwff\.fc2\.", ".mlp.3."),
    (r"^norm\.", "encoder.ln."),
    (r"^fc\.", "heads.head."),
)


def load_checkpoint(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load weights into `model` and return it.

    A `state_dict` key and `module.` prefixes are unwrapped, names of other implementations are
    translated (`under_names`), and half precision becomes the model's type. Weights that do not fit
    are a ValueError that names the keys.

    Args:
        model: the network that gets the weights, in place.
        path: a ``.safetensors`` file, or what ``torch.load(weights_only=True)`` reads (``.pt``,
            ``.pth``, ``.th``); two files joined by ``+`` if the head is in a file of its own.

    >>> from fdbd.networks import create, zoo_card
    >>> load_checkpoint(create("resnet10_compact"), zoo_card("cifar10-ce").path).get_classifier()
    Linear(in_features=128, out_features=10, bias=True)
    """
    path = Path(path)
    own = model.state_dict()
    state = under_names(read_weights(path), own.keys())
    _check_keys(path, model, state, own)
    _check_shapes(path, model, state, own)
    model.load_state_dict(state, strict=False)
    return model


def _check_keys(
    path: Path, model: nn.Module, state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    """ValueError if the file lacks weights, or holds others."""
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    problems = []
    if missing:
        problems.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    if problems:
        raise ValueError(
            f"{path} does not fit {type(model).__name__}: keys {' and '.join(problems)}"
        )


def _some(keys: list[str]) -> str:
    """The first three keys."""
    more = ", …" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more


def _check_shapes(
    path: Path, model: nn.Module, state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> None:
    """ValueError if a tensor has another shape; if the head alone has, it is the number of classes
    that differs, and the error says so."""
    wrong = [key for key in state if state[key].shape != own[key].shape]
    if not wrong:
        return
    theirs = tuple(state[wrong[0]].shape)
    ours = tuple(own[wrong[0]].shape)
    layers = {key.rpartition(".")[0] for key in wrong}
    if len(layers) == 1 and theirs[1:] == ours[1:]:
        raise ValueError(
            f"{path} has {theirs[0]} classes and the model {ours[0]}: pass num_classes={theirs[0]}"
        )
    raise ValueError(
        f"{path} does not fit {type(model).__name__}: {wrong[0]} is {theirs} there and {ours} here"
    )


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a weights file by name, unwrapped; ``encoder.pth+linear.pth`` joins two
    files."""
    path = Path(path)
    if not path.is_file() and "+" in str(path):
        joined: dict[str, Tensor] = {}
        for part in str(path).split("+"):
            joined.update(read_weights(part))
        return joined
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file at {str(path)!r}: no such file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                return _strip({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a mapping)
        except Exception as error:
            # A damaged header raises nearly anything.
            raise ValueError(
                f"{path} is not a readable safetensors file: {one_line(error)[:200]}"
            ) from None
    content = _inside_wrappers(load_plain(path))
    state = dict(content) if isinstance(content, Mapping) else {}
    are_names = all(isinstance(key, str) for key in state)
    are_tensors = all(isinstance(value, Tensor) for value in state.values())
    if not state or not are_names or not are_tensors:
        raise ValueError(f"{path} holds no state dict of tensors")
    return _strip(state)


def _inside_wrappers(content: Any) -> Any:
    """The weights in what a checkpoint holds beside them: an optimiser's state, an epoch."""
    while isinstance(content, Mapping):
        inner = [content[key] for key in _WRAPPERS if isinstance(content.get(key), Mapping)]
        if not inner:
            return content
        content = inner[0]
    return content


def load_plain(path: str | os.PathLike[str]) -> Any:
    """The content of a file of `torch.save`, if that is tensors and plain values: anything that
    could run code is refused."""
    try:
        with warnings.catch_warnings():
            # torch's remarks on the pickle inside.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        advice = "save its state_dict instead (torch.save(model.state_dict(), …))"
        raise ValueError(f"{path} needs pickle, which can run code: {advice}") from None
    except FileNotFoundError:
        raise
    except Exception as error:
        # A damaged file raises nearly anything.
        raise ValueError(f"{path} is not a readable checkpoint: {one_line(error)[:200]}") from None


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata of a safetensors file.

    >>> from fdbd.networks import zoo_card
    >>> read_metadata(zoo_card("cifar10-ce").path)["dataset"]
    'cifar10'
    """
    with safe_open(Path(path), framework="pt") as file:
        return dict(file.metadata() or {})


def save_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model's weights as safetensors, beside and then renamed; filters and matrices as
    `dtype` (such as half precision), biases and batch-norm statistics as they are.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "weights.safetensors")
    >>> save_weights(nn.Linear(3, 2), path, metadata={"dataset": "digits"}, dtype=torch.float16)
    >>> read_metadata(path)
    {'dataset': 'digits'}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, value in model.state_dict().items():
        kept = value.detach().cpu()
        is_matrix = kept.is_floating_point() and kept.ndim > 1
        if dtype is not None and is_matrix:
            kept = kept.to(dtype)
        tensors[key] = kept.clone(memory_format=torch.contiguous_format)
    with beside(path) as temporary:
        # safetensors' save_file would leave its own drafts when it is killed, and its error for a
        # full disk is not an OSError.
        temporary.write_bytes(save(tensors, dict(metadata or {})))


def _strip(state: dict[str, Any]) -> dict[str, Tensor]:
    while state and all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def under_names(state: Mapping[str, Tensor], names: Set[str]) -> dict[str, Tensor]:
    """The weights under the model's own `names`, as far as they are known by another one; the
    others keep theirs.

    A projection head beside an ``encoder.`` is dropped (SupCon), and the three matrices of an
    attention are joined if the model has them in one."""
    found = dict(state)
    has_encoder = any(key.startswith("encoder.") for key in state)
    if has_encoder:
        for key in state:
            if key.startswith("head.") and key not in names:
                del found[key]
    for key in list(found):
        if ".attn.proj_q." in key and key not in names:
            parts = [found.pop(key.replace("proj_q", f"proj_{part}")) for part in "qkv"]
            found[key.replace("proj_q.", "in_proj_")] = torch.cat(parts)
    new_names = {key: _own_name(key, names - state.keys()) for key in found}
    counts = Counter(new_names.values())
    renamed = {}
    for key, value in found.items():
        new_name = new_names[key]
        if counts[new_name] > 1:
            # Two tensors claim one name if a file holds two networks: both keep theirs.
            new_name = key
        renamed[new_name] = value
    return renamed


def _own_name(key: str, free: Set[str]) -> str:
    """Which of the model's free names a file's key stands for; the key itself if none."""
    candidates = [key]
    for pattern, replacement in _RENAMES:
        candidates += [re.sub(pattern, replacement, name, count=1) for name in candidates]
        candidates = list(dict.fromkeys(candidates))
    return next((name for name in candidates if name in free), key)
