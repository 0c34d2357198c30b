"""The tokenizer of a text model, as plain values that a guard's file can carry: with it, texts are
scored and served without transformers, without the model's folder and without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fdbd.util.extras import require
from fdbd.util.terminal import one_line

if TYPE_CHECKING:
    from torch import Tensor

MAX_TOKENIZER_BYTES = 64 << 20
"""The largest tokenizer that is built from a guard file; that of a multilingual model has 17 MB."""

INPUTS = {
    "input_ids": "ids",
    "attention_mask": "attention_mask",
    "token_type_ids": "type_ids",
}
"""The model's names for its inputs, and the names of the same arrays in the tokenizers library."""


@dataclass(frozen=True)
class TextTokenizer:
    """The settings of a text model's tokenizer: how texts become the model's inputs."""

    #: the tokenizer in the form of the ``tokenizers`` library
    json: str
    #: longer texts are cut
    max_tokens: int
    #: the token that fills up shorter texts of a batch
    pad_id: int
    #: whether padding stands before the text
    pad_left: bool = False
    #: keyword arguments of the model
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")

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
            and all(name in INPUTS for name in values["inputs"])
        )
        if not is_right:
            raise ValueError("the description of the tokenizer is damaged or from another program")
        return cls(**{**values, "inputs": tuple(values["inputs"])})

    @classmethod
    def from_model(cls, described: object) -> TextTokenizer | None:
        """The tokenizer in the description of a model that a guard's file holds; None if the model
        takes no texts."""
        if not isinstance(described, Mapping) or described.get("tokenizer") is None:
            return None
        return cls.from_dict(described["tokenizer"])

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {**asdict(self), "inputs": list(self.inputs)}

    def encoder(self) -> TextEncoder:
        """The function that turns texts into inputs."""
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
        self._tokenizer.no_padding()
        self._description = tokenizer

    def __call__(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Texts (N) to int64 tensors (N, T), T the number of tokens of the longest one."""
        # Here, so that a program that serves an ONNX graph does without it.
        import torch

        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"text {number} is a {type(text).__name__}, expected a string")
        encoded = self._tokenizer.encode_batch(list(texts))
        longest = max((len(each.ids) for each in encoded), default=0)
        rows = np.zeros((len(texts), *self._shape(longest)), np.int32)
        for row, each in zip(rows, encoded):
            self._fill(row, each)
        arrays = self._arrays(rows)
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    @property
    def row_shape(self) -> tuple[int, int]:
        """(lines, tokens) of an array that `row` returns."""
        return self._shape(self._description.max_tokens)

    def row(self, text: str) -> NDArray[np.int32]:
        """One text in a shape that all texts share: a line that says which places hold tokens, then
        one line for each input of the model."""
        row = np.zeros(self.row_shape, np.int32)
        # Unlike `encode`, it lets other threads run meanwhile.
        [encoded] = self._tokenizer.encode_batch([text])
        self._fill(row, encoded)
        return row

    def longest_rows(self, count: int) -> NDArray[np.int32]:
        """Rows of texts that are as long as the model takes them, to try what these need."""
        rows = np.zeros((count, *self.row_shape), np.int32)
        rows[:, 0] = 1
        for number, name in enumerate(self._description.inputs, start=1):
            if name == "attention_mask":
                rows[:, number] = 1
        return rows

    def inputs_of(self, rows: NDArray[np.int32], cut: bool = True) -> dict[str, NDArray[np.int64]]:
        """The model's inputs (N, T) from rows that `row` made. With `cut`, T is the number of
        tokens of the longest text, else that of the rows."""
        if cut:
            is_used: NDArray[np.bool_] = np.any(rows[:, 0], axis=0)
            # A model may not take texts without any token.
            place = -1 if self._description.pad_left else 0
            is_used[place] = True
            rows = rows[:, :, is_used]
        return self._arrays(rows)

    def _shape(self, length: int) -> tuple[int, int]:
        return 1 + len(self._description.inputs), length

    def _fill(self, row: NDArray[np.int32], encoded: Any) -> None:
        """Write the tokens of one text into a row of zeros, and what pads it."""
        count = len(encoded.ids)
        places = slice(0, count)
        if self._description.pad_left:
            places = slice(row.shape[1] - count, row.shape[1])
        row[0, places] = 1
        for line, name in zip(row[1:], self._description.inputs):
            if name == "input_ids":
                line[:] = self._description.pad_id
            line[places] = getattr(encoded, INPUTS[name])

    def _arrays(self, rows: NDArray[np.int32]) -> dict[str, NDArray[np.int64]]:
        arrays = {}
        for number, name in enumerate(self._description.inputs, start=1):
            arrays[name] = rows[:, number].astype(np.int64)
        return arrays


def _is_count(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
