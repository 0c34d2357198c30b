"""What all tests share: repeatable property tests, and the program itself, run in this process.

Property tests draw the same examples in every run, so that a run's result says something of the
code alone; `pytest --hypothesis-profile=default` draws new ones.
"""

from __future__ import annotations

import json
import shutil
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from fdbd import cli

# A shell that starts the tests in the background has Ctrl-C ignored by them and by what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

Run = Callable[..., tuple[int, str, str]]
Result = Callable[..., dict]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests fit on all sorts of data: what they are warned of is shown, and is no error."""
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.filterwarnings("default:::tests"))


@pytest.fixture
def tiff_of_tiles() -> Callable[[int], bytes]:
    """`tiff_of_tiles(side)`: a grey TIFF of 10 × 10 pixels in one tile of `side` × `side`."""

    def tiff(side: int) -> bytes:
        tile = zlib.compress(bytes(side * side), 9)
        tags = 10
        place = 8 + 2 + 12 * tags + 4
        entries = [
            (256, 10),  # width
            (257, 10),  # height
            (258, 8),  # bits
            (259, 8),  # deflate
            (262, 1),  # grey, 0 is black
            (277, 1),  # channels
            (322, side),  # a tile's width
            (323, side),  # a tile's height
            (324, place),  # where the tile is
            (325, len(tile)),
        ]
        header = b"II*\0" + struct.pack("<IH", 8, tags)
        packed = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries]
        return header + b"".join(packed) + bytes(4) + tile

    return tiff


@pytest.fixture
def run(capsys) -> Run:
    """`run("score", …)`: exit code, output and errors of the program."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def result(run) -> Result:
    """`result("score", …)`: what the program prints as JSON."""

    def result(*arguments: object) -> dict:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return result


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real Chromium, driven by Playwright; tests that need one are skipped where there is none.

    Of one module: Playwright keeps an event loop running in this thread until it ends.
    """
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs the Python package playwright"
    )
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip("needs Chromium or Chrome on the path")
    quiet = (
        "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    )
    arguments = [*quiet.split(), "--disable-component-update", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield found
        found.close()


INTENTS = ("music", "weather", "other")
INTENT_WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "play",
    "a",
    "song",
    "what",
    "is",
    "the",
    "weather",
]


@pytest.fixture(scope="session")
def intents_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: a small BERT that gives texts one of three intents."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    import torch

    path = tmp_path_factory.mktemp("intents")
    vocabulary = {word: number for number, word in enumerate(INTENT_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, sep_token="[SEP]", model_max_length=12, **special
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(INTENT_WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        id2label=dict(enumerate(INTENTS)),
        label2id={name: number for number, name in enumerate(INTENTS)},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path
