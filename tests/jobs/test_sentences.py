"""A sentence encoder with a classifier of its own: one command fits both, and one file keeps what
the encoder does not have."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fdbd.decision.guard_file import open_guard
from fdbd.networks.by_name import model_by_name
from fdbd.networks.sentence_model import MINILM, sentence_transformer
from fdbd.networks.sentences import SentenceEncoder, find_package

WORDS = {"music": ("play", "a", "song"), "weather": ("what", "is", "the", "weather")}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "1")


@pytest.fixture(scope="module")
def folder(intents_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer of a classifier of texts, without its head."""
    import transformers

    path = tmp_path_factory.mktemp("encoder")
    transformers.AutoTokenizer.from_pretrained(intents_folder).save_pretrained(path)
    transformers.AutoModel.from_pretrained(intents_folder).save_pretrained(path)
    return path


def write_texts(path: Path, count: int, seed: int, intents: tuple[str, ...] = tuple(WORDS)) -> Path:
    generator = np.random.default_rng(seed)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "query", "intent"])
        for number in range(count):
            intent = intents[number % len(intents)]
            words = generator.choice(WORDS[intent], generator.integers(1, 8))
            writer.writerow([f"q{number}", " ".join(words), intent])
    return path


@pytest.fixture
def fitted(folder: Path, tmp_path: Path, run) -> Path:
    train = write_texts(tmp_path / "train.csv", 200, 0)
    fresh = write_texts(tmp_path / "fresh.csv", 100, 1)
    out = tmp_path / "guard.safetensors"
    columns = ("--text", "query", "--label", "intent", "--calibration", fresh)
    code, _, errors = run(
        "fit", f"sentences:{folder}", train, *columns, "--alpha", 0.1, "--out", out
    )
    assert code == 0, errors
    return out


def test_one_command_fits_classifier_and_guard(fitted: Path, tmp_path: Path, run) -> None:
    opened = open_guard(fitted, device="cpu")
    assert opened.class_names == ("music", "weather")
    assert opened.tokenizer is not None
    inputs = opened.tokenizer.encoder()(["play a song", "what is the weather"])
    assert opened.guard(inputs).labels.tolist() == [0, 1]
    new = write_texts(tmp_path / "new.csv", 20, 2)
    scores = tmp_path / "scores.csv"
    code, _, errors = run("score", fitted, new, "--text", "query", "--keep", "id", "--out", scores)
    assert code == 0, errors
    with open(scores, encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["id"] for row in found] == [f"q{number}" for number in range(20)]
    assert [row["class"] for row in found] == ["music", "weather"] * 10


def test_a_part_of_the_data_is_kept_from_classifier_and_fit(
    folder: Path, tmp_path: Path, run
) -> None:
    train = write_texts(tmp_path / "train.csv", 200, 0)
    columns = ("--text", "query", "--label", "intent", "--json")
    out = tmp_path / "guard.safetensors"
    code, printed, errors = run("fit", f"sentences:{folder}", train, *columns, "--out", out)
    assert code == 0, errors
    found = json.loads(printed)
    assert (found["fit_rows"], found["calibration_rows"]) == (160, 40)


def test_the_fits_own_texts_are_noticed_at_calibration(folder: Path, tmp_path: Path, run) -> None:
    train = write_texts(tmp_path / "train.csv", 200, 0)
    columns = ("--text", "query", "--label", "intent", "--calibration", train)
    out = tmp_path / "guard.safetensors"
    _, _, errors = run("fit", f"sentences:{folder}", train, *columns, "--out", out)
    assert "also used for the fit" in errors


def test_another_encoder_than_that_of_the_fit_is_refused(
    fitted: Path, folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(other / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="are not those that"):
        open_guard(fitted, model=f"sentences:{other}", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "name their columns with --text and --label"),
        (("--text", "query"), "name their columns with --text and --label"),
        (("--text", "query", "--label", "no"), "has no column 'no'"),
        (("--text", "query", "--label", "id"), "that none is left for the fit"),
        (("--text", "query", "--label", "intent", "--detector", "auto"), "name a detector"),
        (("--text", "query", "--label", "intent", "--holdout", "2"), "between 0 and 1"),
    ],
)
def test_what_cannot_be_fitted_is_one_sentence(
    folder: Path, tmp_path: Path, run, arguments: tuple[str, ...], reason: str
) -> None:
    train = write_texts(tmp_path / "train.csv", 20, 0)
    out = tmp_path / "guard.safetensors"
    code, _, errors = run("fit", f"sentences:{folder}", train, *arguments, "--out", out)
    assert code == 2
    assert reason in errors
    assert not out.exists()


def test_texts_of_one_class_are_refused(folder: Path, tmp_path: Path, run) -> None:
    train = write_texts(tmp_path / "train.csv", 20, 0, ("music",))
    columns = ("--text", "query", "--label", "intent")
    code, _, errors = run("fit", f"sentences:{folder}", train, *columns, "--out", tmp_path / "g")
    assert code == 2
    assert "has 1 classes of texts, expected at least two" in errors


def test_an_encoder_alone_has_no_classes(folder: Path) -> None:
    with pytest.raises(ValueError, match="without classes of its own"):
        model_by_name(f"sentences:{folder}")


def test_vectors_do_not_depend_on_the_batch(folder: Path) -> None:
    encoder = sentence_transformer(str(folder))
    texts = ["play", "what is the weather", "a song", "play a song a song"]
    together = encoder.embed(texts)
    alone = torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(4))


def test_a_folder_says_how_it_pools(folder: Path, tmp_path: Path) -> None:
    pooled = tmp_path / "cls"
    (pooled / "1_Pooling").mkdir(parents=True)
    for file in folder.iterdir():
        (pooled / file.name).write_bytes(file.read_bytes())
    config = pooled / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_cls_token": True}))
    assert sentence_transformer(str(pooled)).pooling == "cls"
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ValueError, match="neither by the mean nor by the first token"):
        sentence_transformer(str(pooled))
    config.write_text("[")
    with pytest.raises(ValueError, match="cannot be read"):
        sentence_transformer(str(pooled))


@pytest.mark.slow
def test_minilm_in_torch_gives_the_directions_of_its_graph() -> None:
    try:
        find_package()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    texts = ["how much money is in my account", "will it rain tomorrow", "tell me a joke"]
    ours = sentence_transformer(MINILM).embed(texts)
    theirs = torch.from_numpy(SentenceEncoder(max_tokens=256)(texts))
    assert (ours * theirs).sum(dim=1).min() > 0.97
