"""Public text datasets: CLINC150 (intents, with queries that are out of scope) and 20 Newsgroups.
Their files lie below FDBD_DATA."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fdbd.util.files import data_roots, hash_file
from fdbd.util.terminal import one_line

CLINC150 = ("clinc150_full.json", "https://github.com/clinc/oos-eval, data/data_full.json")
NEWSGROUPS20 = (
    "newsgroups20.jsonl.gz",
    "20 Newsgroups as lines of JSON with group and text, 300 posts per group",
)
CLINC150_VECTORS = Path(__file__).with_name("clinc150-minilm.safetensors")
"""Sentence vectors of a part of CLINC150, which the package holds."""
_TEST_SHARE = 3
"""Every third post of a newsgroup is for testing."""
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class Texts:
    """Texts of one set, with labels if they have classes."""

    texts: tuple[str, ...]
    labels: NDArray[np.int64] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextSets:
    """A classifier's training and test texts, and others that belong to none of its classes.

    >>> black = Texts(("coal", "night"), np.array([0, 0]), ("black",))
    >>> sets = TextSets("colours", black, black, {"other": Texts(("grass",))})
    >>> len(sets.test), sets.train.classes, list(sets.ood)
    (2, ('black',), ['other'])
    """

    name: str
    train: Texts
    test: Texts
    ood: dict[str, Texts]
    #: with its SHA-256, for notes
    file: str = ""


def load_clinc150() -> TextSets:
    """CLINC150 (Larson et al., 2019; CC BY 3.0): 150 intents with 15,000 queries for training and
    4,500 for testing, and 1,000 queries that people wrote and that are none of them."""
    path = find_text_file(*CLINC150)
    try:
        content = json.loads(_read(path))
        classes = tuple(sorted({intent for _, intent in content["train"]}))
        train = _labelled(content["train"], classes)
        test = _labelled(content["test"], classes)
        out_of_scope = Texts(tuple(text for text, _ in content["oos_test"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not CLINC150's file ({one_line(error)})") from None
    return TextSets("clinc150", train, test, {"out-of-scope": out_of_scope}, _describe(path))


class Clinc150Vectors(NamedTuple):
    """Sentence vectors (N, 384) of all-MiniLM-L6-v2, of length 1, for a part of CLINC150: 150
    intents with 20 queries for training, 10 to calibrate on and 10 for testing each, and 1,000
    queries that are none of them. Computed by ``benchmarks/clinc150.py``; CC BY 3.0, Larson et
    al., 2019."""

    train: Tensor
    train_labels: Tensor
    fresh: Tensor
    fresh_labels: Tensor
    test: Tensor
    test_labels: Tensor
    out_of_scope: Tensor
    names: Tensor
    """(150, 384) vectors of the intents' names."""
    classes: tuple[str, ...]


def load_clinc150_vectors() -> Clinc150Vectors:
    """The sentence vectors in the package.

    >>> vectors = load_clinc150_vectors()
    >>> vectors.train.shape, vectors.classes[0]
    (torch.Size([3000, 384]), 'accept_reservations')
    """
    from safetensors import safe_open

    with safe_open(CLINC150_VECTORS, framework="pt") as file:
        classes = json.loads(file.metadata()["classes"])
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def vectors(part: str) -> Tensor:
        return torch.nn.functional.normalize(found[part].float(), dim=1)

    return Clinc150Vectors(
        train=vectors("train"),
        train_labels=found["train_labels"].long(),
        fresh=vectors("fresh"),
        fresh_labels=found["fresh_labels"].long(),
        test=vectors("test"),
        test_labels=found["test_labels"].long(),
        out_of_scope=vectors("oos"),
        names=vectors("names"),
        classes=tuple(classes),
    )


def load_newsgroups20(ood: Sequence[str] = ("rec",)) -> TextSets:
    """20 Newsgroups without headers: the groups of the topics in `ood` ("rec" stands for all
    ``rec.…`` groups) are out of distribution, every third post of the others is for testing."""
    path = find_text_file(*NEWSGROUPS20)
    posts = _read_posts(path)
    left_out = [group for group in posts if group.partition(".")[0] in ood]
    if not left_out or len(left_out) == len(posts):
        raise ValueError(f"ood is {tuple(ood)}: expected some, not all, topics of {sorted(posts)}")
    classes = tuple(sorted(set(posts) - set(left_out)))
    train: list[tuple[str, str]] = []
    test: list[tuple[str, str]] = []
    for group in classes:
        for number, text in enumerate(posts[group]):
            part = test if number % _TEST_SHARE == 0 else train
            part.append((text, group))
    others: list[str] = []
    for group in left_out:
        others += posts[group]
    return TextSets(
        name="newsgroups20",
        train=_labelled(train, classes),
        test=_labelled(test, classes),
        ood={f"{'.*, '.join(ood)}.*": Texts(tuple(others))},
        file=_describe(path),
    )


def _read_posts(path: Path) -> dict[str, list[str]]:
    """The posts of each group."""
    posts: dict[str, list[str]] = {}
    try:
        for line in _read(path).decode().splitlines():
            row = json.loads(line)
            posts.setdefault(row["group"], []).append(row["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a file of newsgroups ({one_line(error)})") from None
    return posts


def with_ood(sets: TextSets, name: str, texts: Texts) -> TextSets:
    """The same sets with one more that is out of distribution."""
    return replace(sets, ood={**sets.ood, name: replace(texts, labels=None, classes=())})


def _labelled(rows: Sequence[Any], classes: tuple[str, ...]) -> Texts:
    number = {name: index for index, name in enumerate(classes)}
    labels = np.array([number[name] for _, name in rows], np.int64)
    return Texts(tuple(str(text) for text, _ in rows), labels, classes)


def find_text_file(file: str, source: str) -> Path:
    """A file of texts below FDBD_DATA; FileNotFoundError names its source."""
    for root in data_roots():
        for folder in (root, root / "text"):
            if (folder / file).is_file():
                return folder / file
    raise FileNotFoundError(
        f"no {file} in the folder that FDBD_DATA names, nor in its folder text/; it is {source}"
    )


def _read(path: Path) -> bytes:
    try:
        opened = gzip.open(path) if path.suffix == ".gz" else open(path, "rb")  # noqa: SIM115
        with opened as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({one_line(error)})") from None
    if len(content) > _MAX_BYTES:
        raise ValueError(f"{path} unpacks to more than {_MAX_BYTES:,} bytes")
    return content


def _describe(path: Path) -> str:
    return f"{path.name}, SHA-256 {hash_file(path)[:16]}…"
