"""Pseudo-OOD texts: in-distribution texts, changed until they say nothing that a classifier was
trained on, for weighing detectors (``fdbd.Auto(kinds=…)``).

`token_kinds` changes what a model of texts takes, so that it is a function of kinds as it stands;
`text_kinds` changes texts themselves, whose features are then computed by whoever has the
encoder."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IDS = "input_ids"
MASK = "attention_mask"


def token_kinds(inputs: object, count: int = 50, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Pseudo-OOD texts of each kind, as tokens: shuffled tokens, one token repeated, random tokens.

    The first and the last token of a text stay where they are: they mark its beginning and end for
    most models. Give it to ``fdbd.Auto(kinds=token_kinds)`` for a model that takes tokens.

    Args:
        inputs: ``input_ids`` (N, L), whole numbers; perhaps ``attention_mask`` (N, L), which is 1
            for each token and 0 for padding; and whatever else the model takes, (N, …) each.
        count: how many of each kind; texts are used again if there are fewer.
        seed: of everything that is drawn.

    >>> kinds = token_kinds({"input_ids": torch.tensor([[1, 5, 6, 7, 2]])}, count=2)
    >>> list(kinds), kinds["random tokens"]["input_ids"].shape
    (['shuffled tokens', 'repeated tokens', 'random tokens'], torch.Size([2, 5]))
    """
    _check_count(count)
    tokens = _checked_tokens(inputs)
    vocabulary = _inner_tokens(tokens[IDS], _mask_of(tokens))
    kinds = {}
    for number, kind in enumerate(("shuffled tokens", "repeated tokens", "random tokens")):
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        # Another text for each row of each kind, as far as there are enough.
        rows = torch.arange(number * count, (number + 1) * count) % len(tokens[IDS])
        chosen = {key: values[rows] for key, values in tokens.items()}
        chosen[IDS] = _changed_texts(chosen[IDS], _mask_of(chosen), kind, vocabulary, generator)
        kinds[kind] = chosen
    return kinds


def _changed_texts(
    ids: Tensor, masks: Tensor, kind: str, vocabulary: Tensor, generator: torch.Generator
) -> Tensor:
    """The texts (N, L) of one kind, made of these in-distribution texts."""
    changed = ids.clone()
    for text, mask in zip(changed, masks):
        places = _inner_places(mask)
        if len(places) > 0:
            text[places] = _changed(text[places], kind, vocabulary, generator)
    return changed


def _changed(tokens: Tensor, kind: str, vocabulary: Tensor, generator: torch.Generator) -> Tensor:
    """The tokens (L,) of a text as one of another kind has them."""
    count = len(tokens)
    if kind == "shuffled tokens":
        return tokens[torch.randperm(count, generator=generator)]
    if kind == "repeated tokens":
        place = torch.randint(count, (), generator=generator)
        return tokens[place].expand(count)
    return vocabulary[torch.randint(len(vocabulary), (count,), generator=generator)]


def text_kinds(
    texts: Sequence[str], count: int = 50, seed: int = 0, *, language: str | None = None
) -> dict[str, list[str]]:
    """Pseudo-OOD texts of each kind: shuffled words, one word repeated, random letters, other
    languages.

    Their features are computed like those of the texts of the fit: ``Auto(kinds={name:
    fdbd.Batch(encode(kind)) for name, kind in text_kinds(fresh_texts).items()})``.

    Args:
        texts: in-distribution texts that neither the network nor the fit has seen.
        count: how many of each kind; texts are used again if there are fewer.
        seed: of everything that is drawn.
        language: the texts' own language as two letters, such as "en"; it is not among the other
            languages.

    >>> kinds = text_kinds(["book a table for two"], count=3)
    >>> {name: len(made) for name, made in kinds.items()}
    {'shuffled words': 3, 'repeated words': 3, 'random letters': 3, 'other languages': 3}
    """
    _check_count(count)
    if isinstance(texts, str) or len(texts) == 0:
        raise ValueError("texts is empty or one string, expected a list of at least one text")
    foreign: list[str] = []
    for code, sentences in SENTENCES.items():
        if code != language:
            foreign += sentences
    generator = random.Random(seed)
    kinds: dict[str, list[str]] = {
        "shuffled words": [],
        "repeated words": [],
        "random letters": [],
        "other languages": [],
    }
    for number in range(count):
        words = texts[number % len(texts)].split() or ["…"]
        shuffled = generator.sample(words, len(words))
        kinds["shuffled words"].append(" ".join(shuffled))
        repeated = [generator.choice(words)] * len(words)
        kinds["repeated words"].append(" ".join(repeated))
        letters = ["".join(generator.choices(string.ascii_lowercase, k=len(w))) for w in words]
        kinds["random letters"].append(" ".join(letters))
        kinds["other languages"].append(" ".join(generator.sample(foreign, 2)))
    return kinds


SENTENCES: Mapping[str, tuple[str, ...]] = {
    "de": (
        "Im Garten hinter dem Haus wächst ein alter Apfelbaum.",
        "Der letzte Zug fährt heute schon um neun.",
        "Meine Schwester hat gestern ihren Schlüssel verloren.",
    ),
    "fr": (
        "Le boulanger ouvre sa boutique avant le lever du soleil.",
        "Nous avons marché le long de la rivière jusqu'au pont.",
        "Il reste un peu de soupe dans la casserole.",
    ),
    "es": (
        "La abuela cuenta historias de su pueblo junto al mar.",
        "Ayer llovió tanto que cerraron la carretera.",
        "El gato duerme encima de la mesa de la cocina.",
    ),
    "fi": (
        "Järven jää kantaa vasta tammikuussa.",
        "Lapset rakensivat lumiukon koulun pihalle.",
    ),
    "tr": (
        "Komşumuz her sabah balkonda çay içer.",
        "Vapur iskeleye yavaşça yanaştı.",
    ),
    "sw": (
        "Watoto wanacheza mpira karibu na shule.",
        "Mama anapika wali na samaki jioni.",
    ),
    "ru": (
        "Зимой река замерзает, и дети катаются на коньках.",
        "На столе лежит старая книга без обложки.",
    ),
    "el": (
        "Το καράβι φεύγει νωρίς το πρωί από το λιμάνι.",
        "Η γάτα κοιμάται στον ήλιο.",
    ),
    "ar": (
        "يجلس الأصدقاء في المقهى كل مساء.",
        "هطل المطر طوال الليل على المدينة.",
    ),
    "hi": (
        "बच्चे बगीचे में पतंग उड़ा रहे हैं।",
        "आज बाज़ार में बहुत भीड़ है।",
    ),
    "zh": (
        "孩子们在河边放风筝。",
        "昨天晚上下了一场大雪。",
    ),
    "ja": (
        "駅前の本屋は夜九時に閉まります。",
        "庭の桜が今朝咲きました。",
    ),
}
"""Everyday sentences by the two letters of their language, written for this purpose."""


def _check_count(count: int) -> None:
    if count < 1:
        raise ValueError(f"count is {count}, expected at least 1 text of each kind")


def _checked_tokens(inputs: object) -> dict[str, Tensor]:
    """The model's inputs; ValueError unless they are tokens."""
    if not isinstance(inputs, Mapping) or not isinstance(inputs.get(IDS), Tensor):
        raise ValueError(
            f"pseudo-OOD tokens are made of a dict with {IDS!r} (N, L), not of a "
            f"{type(inputs).__name__}; for texts whose features are computed elsewhere, use "
            "fdbd.data.text_kinds"
        )
    ids = inputs[IDS]
    if ids.ndim != 2 or ids.numel() == 0 or ids.is_floating_point():
        raise ValueError(
            f"{IDS!r} is {ids.dtype} {tuple(ids.shape)}, expected whole numbers (N, L)"
        )
    return {key: values.detach().cpu() for key, values in inputs.items()}


def _mask_of(tokens: Mapping[str, Tensor]) -> Tensor:
    """(N, L) bool: True for each token, False for padding."""
    if MASK not in tokens:
        return torch.ones_like(tokens[IDS], dtype=torch.bool)
    return tokens[MASK].bool()


def _inner_places(mask: Tensor) -> Tensor:
    """Places of a text's tokens, without the first and the last."""
    return mask.nonzero()[:, 0][1:-1]


def _inner_tokens(ids: Tensor, masks: Tensor) -> Tensor:
    """All tokens that occur inside the texts, each once."""
    found = [text[_inner_places(mask)] for text, mask in zip(ids, masks)]
    vocabulary: Tensor = torch.cat(found).unique()
    return vocabulary
