"""Texts and features in tables: CSV, JSON Lines and Parquet through fit, score and calibrate."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.data.columns import open_columns
from fdbd.networks.by_name import model_by_name

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "a", "song", "what", "is", "the", "weather")
INTENTS = ("music", "weather", "other")


@pytest.fixture(scope="module")
def intents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained writes it: a small BERT with three intents."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("intents")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
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
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        id2label=dict(enumerate(INTENTS)),
        label2id={name: number for number, name in enumerate(INTENTS)},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return path


def rows(count: int, seed: int) -> list[dict]:
    """Sentences of random words, with ids, one of them with a comma and a line break."""
    generator = np.random.default_rng(seed)
    found = []
    for number in range(count):
        words = generator.choice(WORDS[4:], size=generator.integers(1, 9))
        text = " ".join(words)
        if number == 3:
            text = 'play, "a\nsong"'
        found.append({"id": number + 1000, "query": text, "intent": INTENTS[number % 3]})
    return found


def write_csv(path: Path, table: list[dict]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def write_jsonl(path: Path, table: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


def write_parquet(path: Path, table: list[dict]) -> None:
    pq.write_table(pa.Table.from_pylist(table), path, row_group_size=40)


WRITERS: dict[str, Callable[[Path, list[dict]], None]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("ending", list(WRITERS))
def test_texts_go_from_a_file_to_decisions_with_their_ids(
    ending, intents, place, result, monkeypatch
) -> None:
    write = WRITERS[ending]
    write(place / f"train.{ending}", rows(120, 0))
    write(place / f"fresh.{ending}", rows(60, 1))
    table = rows(100, 2)
    table[7]["query"] = ""
    write(place / f"queries.{ending}", table)
    arguments = ["--text", "query", "--label", "intent", "--calibration", f"fresh.{ending}"]
    fitted = result("fit", f"hf:{intents}", f"train.{ending}", *arguments, "--detector", "mds")
    assert (fitted["fit_rows"], fitted["calibration_rows"]) == (120, 60)
    assert fitted["fit_accuracy"] is not None
    monkeypatch.setattr("fdbd.jobs.scoring.PART_ROWS", 32)
    score = ["score", "guard.safetensors", f"queries.{ending}", "--text", "query"]
    summary = result(*score, "--keep", "id,intent", "--batch-size", 8)
    assert (summary["rows"], summary["unreadable"]) == (100, 1)
    found = pq.read_table("scores.parquet")
    assert found.column_names[:3] == ["row", "id", "intent"]
    assert [int(number) for number in found["id"].to_pylist()] == list(range(1000, 1100))
    assert found["intent"].to_pylist() == [row["intent"] for row in table]
    assert found["error"].to_pylist()[7] == "its query is missing"
    assert found["is_ood"].to_pylist()[7]
    named = model_by_name(f"hf:{intents}")
    guard = fdbd.load("guard.safetensors", named.model)
    assert named.tokenizer is not None
    encode = named.tokenizer.encoder()
    read = [row["query"] for row in table if row["query"]]
    decision = guard(encode(read))
    scores = [score for score in found["score"].to_pylist() if score is not None]
    np.testing.assert_allclose(scores, decision.scores, rtol=1e-4, atol=1e-5)
    labels = [label for label in found["label"].to_pylist() if label is not None]
    assert labels == decision.labels.tolist()
    assert found["class"].to_pylist()[0] == INTENTS[labels[0]]
    result("calibrate", "guard.safetensors", "--data", f"fresh.{ending}", "--text", "query")


def test_labels_that_are_not_classes_of_the_model_are_named(intents, place, run) -> None:
    table = rows(30, 0)
    table[4]["intent"] = "musik"
    write_csv(place / "train.csv", table)
    code, _, err = run(
        "fit", f"hf:{intents}", "train.csv", "--text", "query", "--label", "intent",
        "--network-never-saw-data",
    )  # fmt: skip
    assert code == 2, err
    # Loading the model may print its progress.
    assert "the label 'musik', which is not a class of the model" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "arguments", "sentence"),
    [
        ("query\nplay\n", ("--text", "text"), "no column 'text', which --text names; it has query"),
        ("query\nplay,a\n", ("--text", "query"), "line 2: it has 2 cells, expected 1"),
        ('query\n"play\n', ("--text", "query"), "q.csv"),
        ("query,query\na,b\n", ("--text", "query"), "two columns of one name"),
        ("query\nplay\n", ("--text", "query", "--keep", "id"), "no column 'id', which --keep"),
        ("query,score\nplay,1\n", ("--text", "query", "--keep", "score"), "a column of the scores"),
        ("query\nplay\n", (), "name their column with --text"),
        ("query\nplay\n", ("--text", "query"), "has no tokenizer for texts"),
    ],
)
def test_bad_tables_are_one_line(place, run, content, arguments, sentence) -> None:
    guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit(fdbd.Batch(torch.rand(40, 3)))
    guard.calibrate(fdbd.Batch(torch.rand(40, 3))).save("guard.safetensors")
    Path("q.csv").write_text(content)
    code, _, err = run("score", "guard.safetensors", "q.csv", *arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert sentence in err
    assert not Path("scores.parquet").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"query": "a"}\n{"query": \n', "line 2 is not JSON"),
        ('{"query": "a"}\n[1]\n', "line 2 is not a JSON object"),
        ("[" * 100_000 + "\n", "line 1 is not JSON"),
    ],
)
def test_bad_lines_of_json_are_named(tmp_path, content, sentence) -> None:
    (tmp_path / "q.jsonl").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        open_columns(str(tmp_path / "q.jsonl"))


@pytest.mark.parametrize("ending", list(WRITERS))
def test_parts_of_a_table_are_its_rows_in_any_order(ending, tmp_path) -> None:
    table = rows(100, 0)
    path = tmp_path / f"t.{ending}"
    WRITERS[ending](path, table)
    file = open_columns(str(path))
    for span in (range(50, 70), range(70, 90), range(0, 5), range(39, 41), range(99, 100)):
        [texts, ids] = file.read(span, ["query", "id"])
        assert texts == [table[row]["query"] for row in span]
        assert [int(number) for number in ids] == [table[row]["id"] for row in span]
    in_spans: list[int] = []
    for span in file.spans(17):
        in_spans += span
    assert in_spans == list(range(100))
    WRITERS[ending](path, rows(100, 5))
    with pytest.raises(ValueError, match="changed or replaced"):
        file.read(range(0, 5), ["query"])


def test_features_in_csv_give_the_decisions_of_features_in_npz(place, result) -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(size=(300, 4)).astype(np.float32)
    labels = generator.integers(0, 3, 300)
    np.savez("train.npz", features=values, y=labels)
    np.savez("head.npz", weight=generator.normal(size=(3, 4)).astype(np.float32))
    table = []
    for number, row in enumerate(values):
        cells = {f"features_{column}": repr(float(value)) for column, value in enumerate(row)}
        table.append({"id": f"a{number}", **cells, "y": int(labels[number])})
    write_csv(place / "train.csv", table)
    arguments = ["--head", "head.npz", "--network-never-saw-data", "--detector", "mds"]
    result("fit", "train.npz", *arguments, "--out", "npz.safetensors")
    result("fit", "train.csv", *arguments, "--out", "csv.safetensors")
    expected = fdbd.load("npz.safetensors").detector.state_dict()
    for name, tensor in fdbd.load("csv.safetensors").detector.state_dict().items():
        torch.testing.assert_close(tensor, expected[name])
    table[5]["features_1"] = "much"
    table[6]["features_2"] = "nan"
    write_csv(place / "today.csv", table)
    summary = result(
        "score", "npz.safetensors", "today.csv", "--keep", "id", "--out", "csv.parquet"
    )
    result("score", "npz.safetensors", "train.npz", "--out", "npz.parquet")
    assert summary["unreadable"] == 2
    found = pq.read_table("csv.parquet").to_pylist()
    other = pq.read_table("npz.parquet").to_pylist()
    assert [row["id"] for row in found] == [f"a{number}" for number in range(300)]
    assert found[5]["error"] == "its features_1 is 'much', expected a number"
    assert found[6]["is_ood"]
    for row, same in zip(found[7:], other[7:]):
        assert row["score"] == pytest.approx(same["score"], rel=1e-5)
        assert row["is_ood"] == same["is_ood"]


def test_columns_of_parquet_keep_their_types_and_gaps(place, result) -> None:
    values = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    guard = fdbd.Guard(fdbd.Head(torch.eye(3))).fit(fdbd.Batch(torch.from_numpy(values)))
    guard.calibrate(fdbd.Batch(torch.rand(40, 3))).save("guard.safetensors")
    numbers = [None if number % 7 == 0 else number for number in range(60)]
    columns = {
        "features": pa.FixedSizeListArray.from_arrays(values.ravel(), 3),
        "number": pa.array(numbers, pa.int32()),
        "weight": pa.array([number / 3 for number in range(60)]),
        "day": pa.array(["2026-01-01"] * 60),
        "new": pa.array([True, None, False] * 20),
    }
    pq.write_table(pa.table(columns), "today.parquet", row_group_size=25)
    result("score", "guard.safetensors", "today.parquet", "--keep", "day, number,new,weight")
    found = pq.read_table("scores.parquet")
    assert found.column_names[:5] == ["row", "day", "number", "new", "weight"]
    assert found["number"].to_pylist() == numbers
    assert found.schema.field("number").type == pa.int64()
    assert found["new"].to_pylist() == [True, None, False] * 20
    assert found["weight"].to_pylist() == columns["weight"].to_pylist()
    result("score", "guard.safetensors", "today.parquet", "--keep", "number", "--out", "s.csv")
    with open("s.csv", newline="") as file:
        cells = [row["number"] for row in csv.DictReader(file)]
    assert cells == ["" if number is None else str(number) for number in numbers]
