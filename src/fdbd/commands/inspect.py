"""fdbd inspect: what is in a guard's file."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from fdbd.commands import options
from fdbd.commands.options import answer

OF_THE_THRESHOLD = ("count", "kind", "num_classes", "per_class", "promise", "target")
"""Entries of a guard's calibration that the chapter on the threshold shows as well."""
FLOAT64 = 8
"""Bytes of a score in a graph."""


def inspect(guard: Path = options.GUARD, as_json: bool = options.JSON) -> None:
    """Say what is in a guard's file, or in an .onnx file of fdbd export: detector, threshold and
    its promise, calibration, model, id and sizes. No model is loaded, and no code runs.

    Examples: `fdbd inspect guard.safetensors`, `fdbd inspect guard.onnx`
    """
    found = describe_graph(guard) if guard.suffix == ".onnx" else describe(guard)
    lines = []
    for title, part in found.items():
        shown = {name: value for name, value in part.items() if not _is_repeated(title, name)}
        lines.append(title)
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            words = name if title == "Tensors" else name.replace("_", " ")
            lines.append(f"  {words:<{width}}  {_in_words(value)}")
    answer(found, as_json, *lines)


def _is_repeated(title: str, name: str) -> bool:
    """Whether a line would repeat the threshold's chapter."""
    return title == "Calibration" and name in OF_THE_THRESHOLD


def describe_graph(path: Path) -> dict[str, dict[str, Any]]:
    """All that an exported graph says of itself, by chapter, as JSON values."""
    from fdbd.decision.onnx_export import metadata
    from fdbd.util.files import hash_file

    about = metadata(path)
    threshold = about.get("threshold") or {}
    calibration = base64.b64decode(about.get("calibration") or "")
    detector = about.get("detector") or {}
    return {
        "Guard": {
            "file": str(path),
            "id": about.get("id"),
            "version": about.get("guard_version"),
            "written by": f"fdbd {about['version']}",
            "opset": about.get("opset"),
            "bytes": path.stat().st_size,
            "sha256": hash_file(path),
        },
        "Detector": {"name": detector.get("name"), "options": detector},
        "Threshold": {**threshold, "promise": about.get("promise")},
        "Calibration": {"scores": len(calibration) // FLOAT64},
        "Model": {
            "head": about.get("head"),
            "preprocess": about.get("preprocess"),
            "tokenizer": about.get("tokenizer"),
            "class names": about.get("class_names") or [],
        },
    }


def describe(path: Path) -> dict[str, dict[str, Any]]:
    """All that a guard's file says, by chapter, as JSON values."""
    from fdbd.core import artifact
    from fdbd.decision.guard_file import load

    guard = load(path)
    description, tensors = artifact.read(path)
    about = description.get("about") or {}
    head = guard.detector.head
    sizes = {}
    for name in sorted(tensors, key=lambda name: -_bytes(tensors[name])):
        shape = " × ".join(str(size) for size in tensors[name].shape) or "1"
        sizes[name] = f"{shape}, {_bytes(tensors[name]) / 1e3:.1f} kB"
    return {
        "Guard": {
            "file": str(path),
            "id": guard.id,
            "version": guard.version,
            "written by": f"fdbd {description.get('version', 'of an unknown version')}",
            "bytes": path.stat().st_size,
            "sha256": description["sha256"],
        },
        "Detector": {
            "name": guard.detector.label,
            "options": description["detector"],
            "perturbation": description["perturb"],
            "classes": head.num_classes,
            "features": head.num_features,
        },
        "Threshold": _threshold(guard),
        "Calibration": about.get("calibration") or {"data": None},
        "Model": _model(description, about),
        "Tensors": sizes,
    }


def _threshold(guard: Any) -> dict[str, Any]:
    """What the threshold is and what it promises."""
    maps = guard.map_threshold
    if maps is not None:
        return {
            "kind": f"{maps.kind}, of maps",
            "target": maps.target,
            "images": maps.count,
            "value": maps.value.item(),
            "promise": maps.guarantee,
        }
    threshold = guard.threshold
    if threshold is None:
        return {"kind": None, "promise": "none: the guard is not calibrated"}
    values = threshold.value.tolist()
    mean, low, high = threshold.acceptance()
    return {
        "kind": threshold.kind,
        "target": threshold.target,
        "samples": threshold.count,
        "per class": threshold.per_class,
        "value": values[0] if len(values) == 1 else {"least": min(values), "most": max(values)},
        "promise": threshold.guarantee,
        "false alarms": {"mean": 1 - mean, "low": 1 - high, "high": 1 - low},
        "caution": threshold.caution,
    }


def _model(description: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """What the file says of the model that the guard stands around."""
    origin = about.get("model") or {}
    names = list(about.get("class_names") or [])
    return {
        "name": origin.get("name"),
        "checkpoint": origin.get("checkpoint"),
        "weights": description.get("weights") or origin.get("weights"),
        "head": description["head"],
        "head name": description["head_name"],
        "layers": description["layers"],
        "autocast": description.get("autocast"),
        "preprocess": about.get("preprocess"),
        "class names": names,
    }


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _in_words(value: Any) -> str:
    """A value on one line; long lists show their beginning."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        if not value:
            return "none"
        shown = ", ".join(str(each) for each in value[:10])
        return f"{shown}, … ({len(value)})" if len(value) > 10 else shown
    if isinstance(value, dict):
        return ", ".join(_named(name, each) for name, each in value.items())
    return str(value)


def _named(name: str, value: Any) -> str:
    """A name and its value; a value with parts of its own stands in brackets."""
    words = _in_words(value)
    if isinstance(value, (dict, list)):
        words = f"({words})"
    return f"{name} {words}"
