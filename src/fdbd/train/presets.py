"""Training recipes by name; `presets.toml` holds them. Rates are functions of progress: resuming
needs no scheduler."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fdbd.core.configuration import one_of
from fdbd.core.tables import from_table
from fdbd.train.augment import Augment
from fdbd.util.files import parse_toml

SCHEDULES = ("constant", "multistep", "cosine", "triangle")


@dataclass(frozen=True)
class Preset:
    """One recipe. Rates are for the joint batch; `milestones` and `warmup` are fractions of
    training, or of each of its two cycles if there is a `restart` (when, as a fraction; scale of
    the peak): see `rate`.

    optimizer: "sgd", "adamw" or "lars".
    weight_decay: falls on all parameters, or only on weight matrices and filters if `decay_all` is
        false.
    ema: decay per step of the average that is evaluated and kept; 0 for none.
    sizes: image sides of equally long phases of training (small ones first are cheaper, and a
        resized crop enlarges what it shows: Touvron et al., 2019); empty for the images' own.
    image_size: side of the centre squares that image files are decoded to; arrays have one size.
    start: the zoo model whose weights training starts from; empty for random ones.
    linear_*: the head on frozen features that follows a contrastive objective."""

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
    #: of CIFAR-10
    mean: tuple[float, ...] = (0.4914, 0.4822, 0.4465)
    std: tuple[float, ...] = (0.2470, 0.2435, 0.2616)
    seed: int = 0

    def rate(self, progress: float) -> float:
        """The learning rate at `progress`, the fraction of training done, in [0, 1).

        multistep: ×0.1 at each milestone; cosine: to zero; triangle: linearly up for `warmup`,
        linearly down to zero (the one-cycle policy of Smith, 2018). `warmup` is linear, for every
        schedule. restart: the whole schedule until `when`, and once more after it with `scale`
        times the peak (a warm restart: Loshchilov and Hutter, 2017)."""
        one_of("schedule", self.schedule, *SCHEDULES)
        peak = self.lr
        if self.restart is not None:
            when, scale = self.restart
            if not 0 < when < 1 or not scale > 0:
                raise ValueError(
                    f"restart is {self.restart}, expected a fraction of training and a positive "
                    "scale"
                )
            if progress < when:
                progress /= when
            else:
                progress = (progress - when) / (1 - when)
                peak *= scale
        if progress < self.warmup:
            return peak * progress / self.warmup
        if self.schedule == "multistep":
            passed = sum(progress >= milestone for milestone in self.milestones)
            # Rounded, so that 0.1 after three milestones is 0.0001 and not a hair beside it.
            return round(peak * 0.1**passed, 12)
        if self.schedule == "constant":
            return peak
        rest = (progress - self.warmup) / (1 - self.warmup)
        if self.schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * rest))
        return peak * (1 - rest)

    def override(self, **changes: Any) -> Preset:
        """A copy with some fields changed; a name that is not a field is an error that lists
        them."""
        known = {each.name for each in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ValueError(
                f"a recipe has no {', '.join(unknown)}, expected options among "
                f"{', '.join(sorted(known))}"
            )
        return replace(self, **changes)


def read_presets(text: str, name: str = "presets.toml") -> dict[str, Preset]:
    """The recipes of a TOML text, whose tables are recipes by name. `like` names an earlier recipe
    that one is the same as except for what it says.

    Raises:
        ValueError: if a field is unknown (the nearest one is suggested) or has the wrong type.

    >>> read_presets('[mine]\\nsummary = "two epochs"\\nepochs = 2')["mine"].epochs
    2
    """
    found: dict[str, Preset] = {}
    for title, table in parse_toml(text).items():
        own = dict(table)
        like = own.pop("like", None)
        if like is not None and like not in found:
            raise ValueError(
                f"{name}, [{title}]: like is {like!r}, expected the name of a recipe above it"
            )
        inherited = asdict(found[like]) if like is not None else {}
        values = {**inherited, **own, "name": title}
        found[title] = from_table(values, Preset, name=f"{name}, [{title}]")
    return found


PRESETS = read_presets(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))


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
