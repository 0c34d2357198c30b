"""Sequence classifiers of Hugging Face's transformers, by the model name ``hf:FOLDER_OR_NAME``: the
model, and a description of its tokenizer that a guard file can carry."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fdbd.core.tokenizer import INPUTS, TextTokenizer
from fdbd.util.extras import require
from fdbd.util.files import downloads_allowed
from fdbd.util.terminal import one_line

MAX_TOKENS = 512
"""Texts are cut to this many tokens if the tokenizer does not state a smaller limit."""


@dataclass(frozen=True)
class HuggingFaceModel:
    """A sequence classifier that lies in a folder, in the cache or on the hub; its weights are read
    by `load`."""

    #: a folder or a name on the hub
    name: str
    num_classes: int
    #: none if the model only numbers its classes
    class_names: tuple[str, ...]
    tokenizer: TextTokenizer

    def load(self) -> nn.Module:
        """The model with its weights, in evaluation mode. No code of the repository is run."""
        transformers = require("transformers", "text")
        model, report = fetch(
            "hf",
            self.name,
            transformers.AutoModelForSequenceClassification.from_pretrained,
            output_loading_info=True,
        )
        missing = sorted(report["missing_keys"])
        if missing:
            raise ValueError(
                f"hf:{self.name} has no weights for {', '.join(missing[:3])}: it is not a trained "
                "classifier"
            )
        found: nn.Module = model
        return found.eval()


def hugging_face_model(name: str) -> HuggingFaceModel:
    """The model of a name: a folder as `save_pretrained` writes it, or a model on the hub, which is
    downloaded unless it is in the cache or downloads are off."""
    transformers = require("transformers", "text")
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path.absolute())
    config = fetch("hf", name, transformers.AutoConfig.from_pretrained)
    architectures = config.architectures or ()
    if not any(each.endswith("ForSequenceClassification") for each in architectures):
        kind = ", ".join(architectures) or type(config).__name__
        raise ValueError(f"hf:{name} holds {kind}, expected a sequence classifier")
    if config.problem_type == "multi_label_classification":
        raise ValueError(
            f"hf:{name} gives a text several labels at once: its classes have no boundaries "
            "between them, and such models are not supported"
        )
    names = tuple(str(config.id2label[index]) for index in range(config.num_labels))
    are_numbers = all(label == f"LABEL_{index}" for index, label in enumerate(names))
    if are_numbers:
        class_names: tuple[str, ...] = ()
    else:
        class_names = names
    return HuggingFaceModel(
        name=name,
        num_classes=config.num_labels,
        class_names=class_names,
        tokenizer=tokenizer_of("hf", name, config),
    )


def tokenizer_of(source: str, name: str, config: Any, most: int = MAX_TOKENS) -> TextTokenizer:
    """The tokenizer of a model; texts are cut to its own limit, or to `most` tokens."""
    transformers = require("transformers", "text")
    tokenizer = fetch(source, name, transformers.AutoTokenizer.from_pretrained)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{source}:{name} has a tokenizer without a tokenizer.json: save it in that form first "
            "(AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…))"
        )
    limit = tokenizer.model_max_length or most
    positions = getattr(config, "max_position_embeddings", None) or most
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = config.pad_token_id or 0
    return TextTokenizer(
        json=tokenizer.backend_tokenizer.to_str(),
        max_tokens=int(min(limit, positions, most)),
        pad_id=int(pad_id),
        pad_left=tokenizer.padding_side == "left",
        inputs=tuple(each for each in tokenizer.model_input_names if each in INPUTS),
    )


def fetch(source: str, name: str, from_pretrained: Any, **options: Any) -> Any:
    """The result of one of transformers' ``from_pretrained``; ValueError in one sentence if it
    fails. No code of the repository is run."""
    is_offline = not downloads_allowed()
    try:
        return from_pretrained(
            name, local_files_only=is_offline, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError) as error:
        if os.path.isdir(name):
            how = "is it a folder that save_pretrained wrote?"
        elif is_offline:
            how = "downloads are off"
        else:
            how = "it may not be a public model, or the hub may not be reachable"
        reason = one_line(error)[:200]
        raise ValueError(f"{source}:{name} cannot be read ({how}): {reason}") from None
