"""fdbd train: train a classifier."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fdbd.commands.options import DEVICE, JSON, answer, arg, opt


def train(
    preset: str | None = arg(None, "A recipe; without a name, all are listed."),
    out: Path | None = opt(None, "Folder for checkpoint, log and weights; default runs/PRESET."),
    override: list[str] | None = opt(
        None, "Change a field of the recipe: --set epochs=2 (repeatable).", "--set"
    ),
    log: str = opt("csv", "csv or tensorboard."),
    resume: bool = opt(True, "Go on from the folder's checkpoint, if there is one."),
    checkpoint_steps: int = opt(
        0, "Steps between checkpoints, besides those of each epoch; 0: none."
    ),
    max_steps: int = opt(
        0, "A smoke run: stop after so many steps, in runs/PRESET-smoke; 0: the whole recipe."
    ),
    device: str = DEVICE,
    as_json: bool = JSON,
) -> None:
    """Train a classifier: cross-entropy, SupCon or CSI, the paper's settings or a small version
    that runs in minutes.

    Examples: `fdbd train`, `fdbd train zoo-ce`, `fdbd train supcon-small --set epochs=1 --out
    runs/try`, `fdbd train supcon-resnet18 --max-steps 3`
    """
    from fdbd import train as training

    if preset is None:
        recipes = [training.preset(name) for name in training.list_presets()]
        lines = [f"{recipe.name:18} {recipe.summary}" for recipe in recipes]
        answer([asdict(recipe) for recipe in recipes], as_json, *lines)
        return
    recipe = training.preset(preset)
    changes = _changes(recipe, override or [])
    # The model of a smoke run is useless and must not be found where the real one belongs.
    name = f"{preset}-smoke" if max_steps else preset
    folder = out or Path("runs", name)
    result = training.train(
        recipe,
        out=folder,
        device=device,
        log=log,
        resume=resume,
        checkpoint_steps=checkpoint_steps,
        max_steps=max_steps,
        progress=not as_json,
        **changes,
    )
    accuracy = result.test_accuracy
    found = {
        "preset": preset,
        "folder": str(folder),
        "test_accuracy": accuracy,
        "epochs": len(result.history),
    }
    shown = "" if accuracy is None else f", test accuracy {accuracy:.2%}"
    answer(found, as_json, f"{preset}: {len(result.history)} epochs{shown}, in {folder}")


def _changes(recipe: Any, overrides: list[str]) -> dict[str, Any]:
    """Fields from NAME=VALUE texts, each with the kind of the recipe's own value."""
    kinds = {field.name: type(getattr(recipe, field.name)) for field in fields(recipe)}
    changes: dict[str, Any] = {}
    for text in overrides:
        name, equals, value = text.partition("=")
        if not equals or name not in kinds:
            raise ValueError(
                f"--set {text!r}: expected NAME=VALUE with a name among {', '.join(sorted(kinds))}"
            )
        kind = kinds[name]
        if kind not in (int, float, str, bool):
            raise ValueError(
                f"--set {name}: this field is a {kind.__name__}, set it from Python instead"
            )
        try:
            changes[name] = _parse(value, kind)
        except ValueError:
            raise ValueError(f"--set {text!r}: {value!r} is not a {kind.__name__}") from None
    return changes


def _parse(value: str, kind: type) -> Any:
    if kind is not bool:
        return kind(value)
    if value.lower() not in ("true", "false"):
        raise ValueError
    return value.lower() == "true"
