"""The zoo: small CIFAR-10 classifiers that come with the package, trained by `fdbd train zoo-ce`
and `zoo-supcon`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fdbd.core.preprocessing import Preprocess
from fdbd.networks.checkpoint import load_checkpoint, read_metadata
from fdbd.networks.factories import create

_ZOO = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class ZooCard:
    """The description of a shipped model; `recipe` is the name of its preset, `test_accuracy` a
    fraction.

    >>> zoo_card("cifar10-supcon").recipe
    'zoo-supcon'
    """

    name: str
    model: str
    num_classes: int
    recipe: str
    seed: int
    dataset: str
    test_accuracy: float
    preprocess: Preprocess
    path: Path

    @property
    def text(self) -> str:
        """The card as Markdown."""
        return self.path.with_suffix(".md").read_text(encoding="utf-8")


def list_zoo() -> list[str]:
    """Names of the shipped models.

    >>> list_zoo()
    ['cifar10-ce', 'cifar10-supcon']
    """
    return sorted(path.stem for path in _ZOO.glob("*.safetensors"))


def zoo_card(name: str) -> ZooCard:
    """The card of the shipped model `name`, without loading its weights.

    >>> zoo_card("cifar10-supcon").recipe
    'zoo-supcon'
    """
    if name not in list_zoo():
        raise ValueError(f"no zoo model {name!r}: there are {', '.join(list_zoo())}")
    path = _ZOO / f"{name}.safetensors"
    # From the metadata of the weights file; the Markdown card beside it says the same to people.
    about = read_metadata(path)
    return ZooCard(
        name=name,
        model=about["model"],
        num_classes=json.loads(about["num_classes"]),
        recipe=about["recipe"],
        seed=json.loads(about["seed"]),
        dataset=about["dataset"],
        test_accuracy=json.loads(about["test_accuracy"]),
        preprocess=Preprocess(32, json.loads(about["mean"]), json.loads(about["std"])),
        path=path,
    )


def zoo(name: str) -> nn.Module:
    """A shipped model with its weights, in evaluation mode; `zoo_card(name).preprocess` makes its
    inputs.

    >>> import torch
    >>> zoo("cifar10-ce")(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    card = zoo_card(name)
    return load_checkpoint(create(card.model, card.num_classes), card.path).eval()
