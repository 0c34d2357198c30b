"""Models inside wrappers (several devices, compilation): the model itself, the names of its parts
as they are without the wrappers, and a hash of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Digest(Protocol):
    def update(self, data: Any, /) -> None: ...


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``, in any
    order; another model unchanged.

    >>> layer = nn.Linear(2, 2)
    >>> unwrapped(torch.compile(layer)) is layer
    True
    """
    child = _wrapped_child(model)
    while child is not None:
        model = model.get_submodule(child)
        child = _wrapped_child(model)
    return model


def is_compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has wrapped the model, perhaps inside a wrapper for devices."""
    child = _wrapped_child(model)
    while child is not None:
        if child == "_orig_mod":
            return True
        model = model.get_submodule(child)
        child = _wrapped_child(model)
    return False


def plain_names(model: nn.Module, names: list[str]) -> list[str]:
    """Names of modules or tensors in `model` as they are without its wrappers: no ``module.`` of a
    ``DataParallel`` and no ``_orig_mod.`` of a compiled part, at any depth.

    >>> model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    >>> plain_names(model, ["0._orig_mod.weight"])
    ['0.weight']
    """
    wrapped = set()
    for path, module in model.named_modules(remove_duplicate=False):
        child = _wrapped_child(module)
        if child is None:
            continue
        # The path of the model itself is empty.
        wrapped.add(f"{path}.{child}".removeprefix("."))
    return [_without(name, wrapped) for name in names]


def modules_by_plain_name(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of a model under its name without wrappers; a wrapper gives way to what is in
    it."""
    modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    return dict(zip(plain_names(model, list(modules)), modules.values()))


def weights_hash(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers by name. It does not depend on the file or package that
    they come from, the device, or a wrapper for several devices or for compilation."""
    state = model.state_dict()
    plain = dict(zip(plain_names(model, list(state)), state.values()))
    digest = hashlib.sha256()
    for name in sorted(plain):
        _add(digest, name, plain[name])
    return digest.hexdigest()


def name_without_wrappers(name: str) -> str:
    """A name that was taken down from a wrapped model, such as "module.fc", without the parts that
    wrappers add."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def _wrapped_child(module: nn.Module) -> str | None:
    """The name under which a wrapper holds the model; None if the module is not a wrapper."""
    if isinstance(module, (nn.DataParallel, DistributedDataParallel)):
        return "module"
    # The class of compiled modules is not imported for this check: its import takes seconds.
    return "_orig_mod" if "_orig_mod" in module._modules else None


def _without(name: str, wrapped: set[str]) -> str:
    kept = []
    path = ""
    for part in name.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def _add(digest: _Digest, name: str, value: Any) -> None:
    """Add one entry of a state to a digest. Quantised layers keep tuples of tensors and plain
    values beside tensors."""
    if not isinstance(value, Tensor):
        for index, part in enumerate(_parts(value)):
            _add(digest, f"{name}.{index}", part)
        if not isinstance(value, (tuple, list)):
            digest.update(f"{name} {type(value).__name__} {_text(value)}\n".encode())
        return
    values = value.detach().cpu()
    digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
    if values.is_quantized:
        values = values.dequantize()
    if values.layout != torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy().data)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        yield from value


def _text(value: Any) -> str:
    """A plain value as text; "" for an object, whose text may hold an address in memory."""
    return repr(value) if isinstance(value, (str, bytes, int, float, type(None))) else ""
