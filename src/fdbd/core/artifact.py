"""The file of a fitted guard: one safetensors file whose loading runs no code. Tensors are the
buffers; the metadata holds a JSON description and a SHA-256 of everything else in the file."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fdbd.util.files import beside

FORMAT = 2
"""Increased when older versions of the library could misread a new file. Since 2, tensors that
share their memory, such as the one head of all members of an ensemble, are stored once; a file
without such tensors is still written as 1."""


class ArtifactError(ValueError):
    """A file is not a guard, is damaged, or does not fit the model.

    >>> import fdbd, pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "guard.safetensors")
    >>> path.write_bytes(b"no guard")
    8
    >>> fdbd.load(path)
    Traceback (most recent call last):
        ...
    fdbd.core.artifact.ArtifactError: ...
    """


def write(
    path: str | os.PathLike[str], description: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write tensors and a JSON-able description as one file, beside its place and then renamed."""
    same = _shared(tensors)
    facts = {"format": 1, **description}
    if same:
        facts = {"format": FORMAT, **description, "same": same}
    text = json.dumps(facts, sort_keys=True)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in same}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    metadata = {"fdbd": text, "sha256": _digest(text, tensors)}
    with beside(path) as temporary:
        # safetensors' save_file would leave its own drafts when it is killed.
        temporary.write_bytes(save(tensors, metadata))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and tensors of a file that `write` made; ArtifactError says what is wrong with
    any other. The description has the checked SHA-256 of the file's content under ``sha256``."""
    source, shown = Path(path), repr(os.fspath(path))
    if not source.is_file():
        raise FileNotFoundError(f"no guard at {shown}: no such file")
    try:
        with safe_open(source, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, OverflowError, RuntimeError, OSError) as error:
        what = f"{shown} is truncated or is no safetensors file ({error})"
        raise ArtifactError(f"{what}; copy it again or save the guard again") from None
    if "fdbd" not in metadata or "sha256" not in metadata:
        raise ArtifactError(f"{shown} is a safetensors file, but not a guard saved by fdbd")
    try:
        description = json.loads(metadata["fdbd"])
    except (ValueError, RecursionError):  # no JSON, or a number of a million digits
        description = None
    if (
        not isinstance(description, dict)
        or type(description.get("format")) is not int
        or description["format"] < 1
    ):
        raise ArtifactError(f"{shown} is corrupted: its description cannot be read; copy it again")
    if (version := description["format"]) > FORMAT:
        raise ArtifactError(
            f"{shown} has format {version}, this fdbd reads up to {FORMAT}: upgrade fdbd"
        )
    if _digest(metadata["fdbd"], tensors) != metadata["sha256"]:
        raise ArtifactError(
            f"{shown} is corrupted: its content does not match its SHA-256; copy it again"
        )
    same = description.pop("same", {})
    if not isinstance(same, dict):
        same = {"": ""}
    for name, first in same.items():
        if not isinstance(first, str) or first not in tensors:
            raise ArtifactError(
                f"{shown} is corrupted: it lacks tensors that it names; copy it again"
            )
        tensors[name] = tensors[first]
    return {**description, "sha256": metadata["sha256"]}, tensors


def _shared(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Which tensors are the same memory as an earlier one, and the name of that one."""
    first_at: dict[tuple[object, ...], str] = {}
    same = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if place in first_at:
            same[name] = first_at[place]
        else:
            first_at[place] = name
    return same


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(
            tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
    return digest.hexdigest()
