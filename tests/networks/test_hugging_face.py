"""Sequence classifiers by the name hf:FOLDER, on small models that are made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fdbd
from fdbd.core.tokenizer import TextTokenizer
from fdbd.decision.guard_file import open_guard
from fdbd.networks.by_name import model_by_name, model_runs_code

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "a", "song", "what", "is", "the", "weather"]
TEXTS = ["play a song", "what is the weather", "play", "the weather is a song"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: a small BERT with three intents."""
    import transformers

    path = tmp_path_factory.mktemp("intents")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=6,
    )
    fast.save_pretrained(path)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        id2label={0: "music", 1: "weather", 2: "other"},
        label2id={"music": 0, "weather": 1, "other": 2},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FDBD_OFFLINE", "1")


def test_a_folder_gives_model_classes_and_tokenizer(folder: Path) -> None:
    import transformers

    found = model_by_name(f"hf:{folder}", device="cpu")
    assert not model_runs_code(f"hf:{folder}")
    assert found.class_names == ("music", "weather", "other")
    assert found.num_classes == 3
    assert found.tokenizer is not None
    inputs = found.tokenizer.encoder()(TEXTS)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs(TEXTS, padding=True, truncation=True, return_tensors="pt")
    for name, tensor in inputs.items():
        assert torch.equal(tensor, expected[name]), name
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        batch = fdbd.Classifier(found.model)(inputs)
        torch.testing.assert_close(batch.logits, model(**expected).logits)


def test_longer_texts_are_cut_to_the_models_limit(folder: Path) -> None:
    found = model_by_name(f"hf:{folder}", device="cpu")
    assert found.tokenizer is not None
    inputs = found.tokenizer.encoder()(["play a song play a song play a song"])
    assert inputs["input_ids"].shape == (1, 6)


def test_a_guard_file_carries_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    found = model_by_name(f"hf:{folder}", device="cpu")
    assert found.tokenizer is not None
    encode = found.tokenizer.encoder()
    torch.manual_seed(0)
    words = [" ".join(WORDS[4 + int(n)] for n in torch.randint(7, (5,))) for _ in range(400)]
    guard = fdbd.Guard(found.model, "fdbd")
    guard.fit([encode(words[:200])], progress=False)
    guard.calibrate([encode(words[200:])], progress=False)
    guard.about["model"] = found.origin
    path = tmp_path / "intents.safetensors"
    guard.save(path)
    opened = open_guard(path, device="cpu")
    tokenizer = TextTokenizer.from_dict(opened.guard.about["model"]["tokenizer"])
    again = tokenizer.encoder()(TEXTS)
    assert torch.equal(opened.guard(again).scores, guard(encode(TEXTS)).scores)


def test_other_weights_than_those_of_the_fit_are_refused(folder: Path) -> None:
    found = model_by_name(f"hf:{folder}", device="cpu")
    assert found.origin["weights"] == model_by_name(f"hf:{folder}", device="cpu").origin["weights"]
    assert found.origin["name"] == f"hf:{folder}"


def test_a_missing_folder_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"hf:no/such-model cannot be read \(downloads are off\)"):
        model_by_name("hf:no/such-model")


def test_another_kind_of_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds BertForMaskedLM, expected a sequence classifier"):
        model_by_name(f"hf:{tmp_path}")


def test_a_model_of_several_labels_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="several labels at once"):
        model_by_name(f"hf:{tmp_path}")


def test_a_head_without_weights_is_not_a_trained_classifier(folder: Path, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file, save_file

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    transformers.logging.set_verbosity_error()
    with pytest.raises(ValueError, match=r"no weights for classifier\.bias.*not a trained"):
        model_by_name(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    "change",
    [
        {"json": "{}"},
        {"json": 5},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"pad_id": -1},
        {"inputs": ["__class__"]},
        {"more": 1},
    ],
)
def test_a_damaged_description_of_a_tokenizer_is_one_sentence(folder: Path, change: dict) -> None:
    found = model_by_name(f"hf:{folder}", device="cpu")
    assert found.tokenizer is not None
    values = {**found.tokenizer.to_dict(), **change}
    with pytest.raises(ValueError, match="tokenizer"):
        TextTokenizer.from_dict(values).encoder()


def test_a_text_that_is_no_text_is_named(folder: Path) -> None:
    found = model_by_name(f"hf:{folder}", device="cpu")
    assert found.tokenizer is not None
    with pytest.raises(TypeError, match="text 1 is a float, expected a string"):
        found.tokenizer.encoder()(["play", float("nan")])
