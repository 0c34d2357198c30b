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
    if same:
        facts = {"format": FORMAT, **description, "same": same}
    else:
        facts = {"format": 1, **description}
    text = json.dumps(facts, sort_keys=True)
    stored = {}
    for name, tensor in tensors.items():
        if name not in same:
            stored[name] = tensor.detach().cpu().contiguous().clone()
    metadata = {"fdbd": text, "sha256": _digest(text, stored)}
    with beside(path) as temporary:
        # safetensors' save_file would leave its own drafts when it is killed.
        temporary.write_bytes(save(stored, metadata))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Description and tensors of a file that `write` made; ArtifactError says what is wrong with
    any other. The description has the checked SHA-256 of the file's content under ``sha256``."""
    shown = repr(os.fspath(path))
    metadata, tensors = _contents(Path(path), shown)
    description = _description(metadata["fdbd"], shown)
    if _digest(metadata["fdbd"], tensors) != metadata["sha256"]:
        raise ArtifactError(
            f"{shown} is corrupted: its content does not match its SHA-256; copy it again"
        )
    _add_shared(tensors, description.pop("same", {}), shown)
    return {**description, "sha256": metadata["sha256"]}, tensors


def _contents(path: Path, shown: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file that says that it is a guard."""
    if not path.is_file():
        raise FileNotFoundError(f"no guard at {shown}: no such file")
    if path.suffix == ".onnx":
        raise ArtifactError(
            f"{shown} is an exported graph, which fdbd serve reads; here the guard's own file is "
            "needed, as fdbd fit writes it (.safetensors)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, OverflowError, RuntimeError, OSError) as error:
        raise ArtifactError(
            f"{shown} is truncated or is not a safetensors file ({error}); copy it again or save "
            "the guard again"
        ) from None
    if "fdbd" not in metadata or "sha256" not in metadata:
        raise ArtifactError(f"{shown} is a safetensors file, but not a guard saved by fdbd")
    return metadata, tensors


def _description(text: str, shown: str) -> dict[str, Any]:
    """The JSON description of a guard, if this version of the library can read its format."""
    try:
        description = json.loads(text)
    except (ValueError, RecursionError):
        # Not JSON, a number of too many digits, or nested too deeply.
        description = None
    version = description.get("format") if isinstance(description, dict) else None
    # Not isinstance: True is an int, too.
    if type(version) is not int or version < 1:
        raise ArtifactError(f"{shown} is corrupted: its description cannot be read; copy it again")
    if version > FORMAT:
        raise ArtifactError(
            f"{shown} has format {version}, this fdbd reads up to {FORMAT}: upgrade fdbd"
        )
    assert isinstance(description, dict)
    return description


def _add_shared(tensors: dict[str, Tensor], same: Any, shown: str) -> None:
    """Add the tensors that the file stores under the name of another one, given as a JSON object
    from the one name to the other."""
    lacking = f"{shown} is corrupted: it lacks tensors that it names; copy it again"
    if not isinstance(same, dict):
        raise ArtifactError(lacking)
    for name, stored_as in same.items():
        if not isinstance(stored_as, str) or stored_as not in tensors:
            raise ArtifactError(lacking)
        tensors[name] = tensors[stored_as]


def _shared(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Which tensors are the same memory as an earlier one, and the name of that one.

    Addresses alone do not tell: tensors of some devices have none, and all say 0."""
    first_at: dict[tuple[object, ...], str] = {}
    same = {}
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        first = first_at.setdefault(place, name)
        if first != name and torch.equal(tensor.detach().cpu(), tensors[first].detach().cpu()):
            same[name] = first
    return same


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        # torch cannot view a tensor without elements as bytes.
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
