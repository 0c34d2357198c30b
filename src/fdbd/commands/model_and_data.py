"""The model and the data that `fdbd fit` and `fdbd choose` are given: their options, and reading
them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fdbd.commands.options import arg, opt

if TYPE_CHECKING:
    from fdbd.core.batch import Head
    from fdbd.networks.by_name import NamedModel

_SOURCES = (
    "MODEL: a zoo name, timm:NAME, torchvision:NAME, package.module:factory or a .pt2 file; for "
    "texts hf:FOLDER_OR_NAME, or sentences:FOLDER_OR_NAME, a sentence encoder such as "
    "all-MiniLM-L6-v2 whose classes fdbd fit learns from DATA. Left out with --head FILE. "
    "DATA: what to fit on, ideally the network's training data: a folder of images (one folder per "
    "class), an .npz of images, the name of a dataset, a .parquet, .npz or .csv of features, or "
    "with --text a .csv, .jsonl or .parquet of texts."
)
_HEAD = (
    "For features without a model: an .npz or .safetensors with weight (C, P) and bias (C,). With "
    "a model: the name of its last linear layer, if it is not found automatically."
)
_SOURCES_TO_CHOOSE = (
    "MODEL: a zoo name, timm:NAME, torchvision:NAME, package.module:factory or a .pt2 file. Left "
    "out with --head FILE. DATA: what to fit on, ideally the network's training data: a folder of "
    "images (one folder per class), an .npz of images, the name of a dataset, or a .parquet, .npz "
    "or .csv of features."
)
SOURCES = arg(..., _SOURCES, metavar="[MODEL] DATA")
SOURCES_TO_CHOOSE = arg(..., _SOURCES_TO_CHOOSE, metavar="[MODEL] DATA")
CHECKPOINT = opt(None, "The model's weights: .safetensors, or a state dict by torch.save.")
NUM_CLASSES = opt(None, "Number of classes of the model, if the checkpoint does not show it.")
HEAD = opt(None, _HEAD)
PREPROCESS = opt(None, "How images are prepared: cifar10, imagenet, …, or fields as JSON.")


class ModelAndData(NamedTuple):
    """What a command is to work on."""

    source: NamedModel | Head
    data: str
    name: str
    """The name of the model, or of the file that holds the head."""
    layer: str | None
    """The name of the model's linear layer, if it was given."""


def read(
    command: str,
    sources: list[str],
    checkpoint: Path | None,
    *,
    num_classes: int | None,
    head: str | None,
    preprocess: str | None,
    trust: bool,
    device: str | None,
) -> ModelAndData:
    """The model, or the head alone, and the data that a command line names."""
    from fdbd.jobs.fitting import read_head
    from fdbd.networks.by_name import model_by_name

    model, data = names(command, sources, head)
    if model is None:
        assert head is not None
        return ModelAndData(read_head(head), data, head, None)
    named = model_by_name(
        model,
        checkpoint,
        num_classes=num_classes,
        preprocess=preprocess,
        trust=trust,
        device=device,
    )
    return ModelAndData(named, data, model, head)


def names(command: str, sources: list[str], head: str | None) -> tuple[str | None, str]:
    """The model, or None if a file holds the head; and the data."""
    is_head_file = head is not None and head.lower().endswith((".npz", ".safetensors"))
    if len(sources) > 2:
        raise ValueError(
            f"fdbd {command} takes a model and data, and is given {len(sources)} names: "
            f"{', '.join(sources)}"
        )
    if is_head_file:
        if len(sources) == 2:
            raise ValueError(
                f"with --head {head} there is no model: leave {sources[0]!r} or --head out"
            )
        return None, sources[0]
    if len(sources) == 1:
        raise ValueError(
            f"fdbd {command} {sources[0]} names a model and no data, or data and no head: say "
            f"fdbd {command} MODEL DATA, or fdbd {command} DATA --head FILE"
        )
    return sources[0], sources[1]
