"""Training recipes by name; `presets.toml` holds them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fdbd.train.augment import Augment
from fdbd.train.schedule import learning_rate
from fdbd.util.files import parse_toml


@dataclass(frozen=True)
class Preset:
    """One recipe. Rates are for the joint batch; `milestones` and `warmup` are fractions of training, or of each of its
    two cycles where there is a `restart` (when, as a fraction; scale of the peak).

    weight_decay falls on all parameters, or only on weight matrices and filters when `decay_all` is false. ema: decay
    per step of the average that is evaluated and kept; 0 for none. sizes: image sides of equally long phases of
    training (small ones first are cheaper, and a resized crop enlarges what it shows: Touvron et al., 2019); empty for
    the images' own. image_size: side of the centre squares that image files are decoded to; arrays have one size.
    start: the zoo model whose weights training starts from; empty for random ones. linear_*: the head on frozen
    features that follows a contrastive objective.
    """

    name: str
    summary: str
    model: str = "resnet18"
    dataset: str = "cifar10"
    num_classes: int = 10
    objective: str = "cross_entropy"
    epochs: int = 100
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-4
    decay_all: bool = True
    schedule: str = "multistep"
    milestones: tuple[float, ...] = ()
    warmup: float = 0.0
    restart: tuple[float, float] | None = None
    augment: Augment = field(default_factory=Augment)
    sizes: tuple[int, ...] = ()
    temperature: float = 0.1
    projection: int = 128
    csi_labelled: bool = False
    ema: float = 0.0
    whiten: bool = False
    start: str = ""
    image_size: int = 0
    linear_epochs: int = 40
    linear_lr: float = 0.1
    linear_weight_decay: float = 1e-4
    linear_flip: bool = True
    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465)  # of CIFAR-10
    std: tuple[float, ...] = (0.2470, 0.2435, 0.2616)
    seed: int = 0

    def rate(self, progress: float) -> float:
        """The learning rate at `progress`, the fraction of training done."""
        return learning_rate(
            self.schedule, progress, self.lr, milestones=self.milestones, warmup=self.warmup, restart=self.restart
        )

    def override(self, **changes: Any) -> Preset:
        """A copy with some fields changed; a name that is no field is an error that lists them."""
        known = {f.name for f in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(f"no such training option: {', '.join(unknown)} (there are {', '.join(sorted(known))})")
        return replace(self, **changes)


def _read(text: str) -> dict[str, Preset]:
    found: dict[str, Preset] = {}
    for name, said in parse_toml(text).items():
        like = found[said.pop("like")] if "like" in said else Preset(name, "")
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in said.items()
        }
        if "augment" in said:
            area = said["augment"].get("area")
            values["augment"] = Augment(**{**said["augment"], "area": area and tuple(area)})
        found[name] = replace(like, name=name, **values)
    return found


PRESETS = _read(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


def preset(name: str) -> Preset:
    """The recipe called `name`.

    >>> preset("ce-resnet18").epochs
    100
    """
    if name not in PRESETS:
        raise ValueError(f"no training preset {name!r}: there are {', '.join(PRESETS)}")
    return PRESETS[name]


def list_presets() -> list[str]:
    """Names of all recipes."""
    return list(PRESETS)
