"""A guard in a repository of the Hugging Face Hub: its file, which runs no code, and a card that
says what it promises."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from fdbd.util.extras import require
from fdbd.util.version import __version__

if TYPE_CHECKING:
    from fdbd.decision.guard import Guard

FILE = "guard.safetensors"
"""The guard's file in a repository."""

_CLASSES_SHOWN = 20
"""Names of classes in a model card."""


def write_folder(
    guard: Guard, folder: str | os.PathLike[str], metrics: Mapping[str, float] | None = None
) -> Path:
    """Write what a repository holds, the guard's file and its card, to a folder that
    `fdbd.from_hub` reads too."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    guard.save(place / FILE)
    (place / "README.md").write_text(card(guard, metrics or {}), encoding="utf-8")
    return place


def push(
    guard: Guard,
    repo: str,
    metrics: Mapping[str, float] | None = None,
    *,
    private: bool = True,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload the guard's file and a card to a repository of the Hugging Face Hub, "owner/name",
    which is created if there is none; `fdbd.from_hub` reads it. Returns the address of the commit.

    Args:
        metrics: what you measured, by name, for the card, which also has the threshold's promise.
        private: whether a new repository is private.
        token: of the Hub; None: that of your login.
        message: of the commit.
    """
    interface = require("huggingface_hub", "hub").HfApi(token=token)
    message = message or f"A guard of fdbd {__version__}"
    with tempfile.TemporaryDirectory() as folder:
        write_folder(guard, folder, metrics)
        interface.create_repo(repo, private=private, exist_ok=True)
        commit = interface.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    return str(commit.commit_url)


def fetch(repo: str, revision: str | None = None, token: str | None = None) -> Path:
    """The path of the guard's file in a folder or, if there is no such folder, in a repository
    (downloaded once)."""
    if Path(repo).is_dir():
        path = Path(repo, FILE)
        if not path.is_file():
            raise FileNotFoundError(
                f"the folder {repo!r} holds no {FILE}: was it written by push_to_hub?"
            )
        return path
    hub = require("huggingface_hub", "hub")
    return Path(hub.hf_hub_download(repo, FILE, revision=revision, token=token))


def card(guard: Guard, metrics: Mapping[str, float]) -> str:
    """A model card in Markdown: what the guard is, what its threshold promises, and metrics that
    were measured."""
    detector = guard.detector
    head = detector.head
    threshold = guard.threshold or guard.map_threshold
    promise = "It has no threshold, so it gives scores and no decisions."
    if threshold is not None:
        promise = threshold.guarantee
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return Template(template).substitute(
        detector=detector.label,
        model=_model_line(guard.about.get("model")),
        classes=head.num_classes,
        features=head.num_features,
        names=_names_line(guard.about.get("class_names")),
        promise=promise,
        metrics=_metrics_table(metrics),
        version=__version__,
        config=json.dumps(detector.to_config(), sort_keys=True),
    )


def _model_line(model: object) -> str:
    """The name of the model, if the guard's file has one."""
    if isinstance(model, dict) and model.get("name"):
        return _plain(model["name"])
    return "not in this repository: give it to `fdbd.from_hub(…, model)`"


def _names_line(names: object) -> str:
    """The names of the first classes; nothing if they have none."""
    if not isinstance(names, (list, tuple)) or not names:
        return ""
    shown = [_plain(name) for name in names[:_CLASSES_SHOWN]]
    if len(names) > _CLASSES_SHOWN:
        shown.append("…")
    return f"- Classes: {', '.join(shown)}"


def _metrics_table(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return "None were given."
    lines = ["| metric | value |", "| --- | --- |"]
    for name, value in metrics.items():
        lines.append(f"| {_plain(name)} | {float(value):.6g} |")
    return "\n".join(lines)


def _plain(text: object) -> str:
    """Text that cannot leave its place in a line or a table of Markdown."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
