"""Sequence classifiers of Hugging Face's transformers, by the model name ``hf:FOLDER_OR_NAME``: the
model, and a description of its tokenizer that a guard file can carry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fdbd.util.extras import require
from fdbd.util.files import downloads_allowed
from fdbd.util.terminal import one_line

MAX_TOKENS = 512
"""Texts are cut to this many tokens if the tokenizer does not state a smaller limit."""
MAX_TOKENIZER_BYTES = 64 << 20
"""The largest tokenizer that is built from a guard file; that of a multilingual model has 17 MB."""


@dataclass(frozen=True)
class TextTokenizer:
    """How texts become a text model's inputs: plain values that a guard file can carry, so that
    texts can be scored without transformers and without the model's folder."""

    json: str  #: the tokenizer in the form of the ``tokenizers`` library
    max_tokens: int  #: longer texts are cut
    pad_id: int  #: the token that fills up shorter texts of a batch
    pad_left: bool = False  #: whether it stands before the text
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")  #: keyword arguments of the model

    @classmethod
    def from_dict(cls, values: Any) -> TextTokenizer:
        """From `to_dict`; ValueError for anything else."""
        is_right = (
            isinstance(values, dict)
            and set(values) == set(cls.__dataclass_fields__)
            and isinstance(values["json"], str)
            and len(values["json"]) <= MAX_TOKENIZER_BYTES
            and _is_count(values["max_tokens"], 1, 1 << 20)
            and _is_count(values["pad_id"], 0, 1 << 31)
            and isinstance(values["pad_left"], bool)
            and isinstance(values["inputs"], (list, tuple))
            and all(name in _COLUMNS for name in values["inputs"])
        )
        if not is_right:
            raise ValueError("the description of the tokenizer is damaged or from another program")
        return cls(**{**values, "inputs": tuple(values["inputs"])})

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {**asdict(self), "inputs": list(self.inputs)}

    def encoder(self) -> TextEncoder:
        """What turns texts into inputs."""
        return TextEncoder(self)


class TextEncoder:
    """Turns texts into the keyword arguments of a text model."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        tokenizers = require("tokenizers", "text")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer.json)
        except Exception as error:
            raise ValueError(
                f"the tokenizer cannot be built ({one_line(error)[:200]}): update tokenizers, or "
                "fit the guard again"
            ) from None
        self._tokenizer.enable_truncation(tokenizer.max_tokens)
        direction = "left" if tokenizer.pad_left else "right"
        self._tokenizer.enable_padding(pad_id=tokenizer.pad_id, direction=direction)
        self._inputs = tokenizer.inputs

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Texts (N) to int64 tensors (N, T), T the number of tokens of the longest one."""
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"text {number} is a {type(text).__name__}, expected a string")
        encoded = self._tokenizer.encode_batch(list(texts))
        inputs = {}
        for name in self._inputs:
            rows = [getattr(each, _COLUMNS[name]) for each in encoded]
            inputs[name] = torch.tensor(rows, dtype=torch.int64).reshape(len(texts), -1)
        return inputs


# What a model calls its inputs, and what the tokenizers library calls them.
_COLUMNS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
}


@dataclass(frozen=True)
class HuggingFaceModel:
    """A sequence classifier that lies in a folder, in the cache or on the hub; its weights are read
    by `load`."""

    name: str  #: a folder or a name on the hub
    num_classes: int
    class_names: tuple[str, ...]  #: none if the model only numbers its classes
    tokenizer: TextTokenizer

    def load(self) -> nn.Module:
        """The model with its weights, in evaluation mode. No code of the repository is run."""
        transformers = require("transformers", "text")
        model, report = _fetch(
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
    """What lies under a name: a folder as `save_pretrained` writes it, or a model on the hub, which
    is downloaded unless it is in the cache or downloads are off."""
    transformers = require("transformers", "text")
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path.absolute())
    config = _fetch(name, transformers.AutoConfig.from_pretrained)
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
    return HuggingFaceModel(
        name=name,
        num_classes=config.num_labels,
        class_names=() if are_numbers else names,
        tokenizer=_tokenizer(name, config),
    )


def _tokenizer(name: str, config: Any) -> TextTokenizer:
    transformers = require("transformers", "text")
    tokenizer = _fetch(name, transformers.AutoTokenizer.from_pretrained)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"hf:{name} has a tokenizer without a tokenizer.json: save it in that form first "
            "(AutoTokenizer.from_pretrained(…, use_fast=True).save_pretrained(…))"
        )
    limit = tokenizer.model_max_length or MAX_TOKENS
    positions = getattr(config, "max_position_embeddings", None) or MAX_TOKENS
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = config.pad_token_id or 0
    return TextTokenizer(
        json=tokenizer.backend_tokenizer.to_str(),
        max_tokens=int(min(limit, positions, MAX_TOKENS)),
        pad_id=int(pad_id),
        pad_left=tokenizer.padding_side == "left",
        inputs=tuple(each for each in tokenizer.model_input_names if each in _COLUMNS),
    )


def _fetch(name: str, from_pretrained: Any, **options: Any) -> Any:
    """What one of transformers' ``from_pretrained`` gives, or one sentence that says why not."""
    is_offline = not downloads_allowed()
    try:
        return from_pretrained(
            name, local_files_only=is_offline, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError) as error:
        how = "downloads are off" if is_offline else "it may be no public model, or need a network"
        if os.path.isdir(name):
            how = "is it a folder that save_pretrained wrote?"
        raise ValueError(f"hf:{name} cannot be read ({how}): {one_line(error)[:200]}") from None


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
