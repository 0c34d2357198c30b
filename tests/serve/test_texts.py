"""A guard of texts behind the service: from its own file and as an ONNX graph."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

import fdbd
from fdbd.decision.guard_file import OpenedGuard, open_guard
from fdbd.networks.by_name import model_by_name
from fdbd.serve.backend import Backend, OnnxBackend
from fdbd.serve.client import Client
from fdbd.serve.settings import Settings
from fdbd.serve.torch_backend import TorchBackend

from .conftest import app_of, client_of

WORDS = ("play", "a", "song", "what", "is", "the", "weather")
TEXTS = ["play a song", "what is the weather what is the weather", "play", "unknown words"]
LIMITS = Settings(max_text=200, queue=16, max_body=100_000)


def sentences(count: int, seed: int) -> list[str]:
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        found.append(" ".join(generator.choice(WORDS, generator.integers(1, 9))))
    return found


@pytest.fixture(scope="module")
def guard_file(intents_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = model_by_name(f"hf:{intents_folder}", device="cpu")
    assert found.tokenizer is not None
    encode = found.tokenizer.encoder()
    guard = fdbd.Guard(found.model).fit([encode(sentences(200, 0))], progress=False)
    guard.calibrate([encode(sentences(200, 1))], alpha=0.1, progress=False)
    guard.about = {**guard.about, "model": found.origin, "class_names": list(found.class_names)}
    path = tmp_path_factory.mktemp("guard") / "intents.safetensors"
    guard.save(path)
    return path


@pytest.fixture(scope="module")
def opened(guard_file: Path) -> OpenedGuard:
    return open_guard(guard_file, device="cpu")


@pytest.fixture(scope="module")
def graph(guard_file: Path) -> Path:
    from fdbd import cli

    for module in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(module)
    out = guard_file.with_suffix(".onnx")
    with pytest.raises(SystemExit) as end:
        cli.main(["export", str(guard_file), "--out", str(out)])
    assert not end.value.code
    return out


@pytest.fixture(scope="module", params=["torch", "onnx"])
def backend(request: pytest.FixtureRequest, opened: OpenedGuard) -> Backend:
    if request.param == "torch":
        return TorchBackend(opened)
    return OnnxBackend(request.getfixturevalue("graph"))


@pytest.fixture
def client(backend: Backend) -> Iterator[TestClient]:
    with client_of(app_of(backend, LIMITS)) as found:
        yield found


def expected(opened: OpenedGuard, texts: list[str]) -> fdbd.Decision:
    assert opened.tokenizer is not None
    return opened.guard(opened.tokenizer.encoder()(texts))


def test_a_text_gets_the_guards_own_decision(client: TestClient, opened: OpenedGuard) -> None:
    decision = expected(opened, TEXTS)
    for row, text in enumerate(TEXTS):
        answer = client.post("/decide", json={"text": text})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert found["label"] == decision.labels[row]
        assert found["class"] == opened.class_names[found["label"]]
        assert found["score"] == pytest.approx(float(decision.scores[row]), rel=1e-3)
        assert found["is_ood"] == decision.is_ood[row]


def test_a_list_of_texts_gets_a_list_of_decisions(client: TestClient, opened: OpenedGuard) -> None:
    found = client.post("/decide", json={"text": TEXTS}).json()["decisions"]
    scores = expected(opened, TEXTS).scores
    np.testing.assert_allclose([each["score"] for each in found], scores, rtol=1e-3)


def test_the_protocol_takes_bytes_tensors_as_json_and_binary(
    client: TestClient, opened: OpenedGuard
) -> None:
    about = client.get("/v2/models/guard").json()
    assert about["inputs"] == [{"name": "texts", "datatype": "BYTES", "shape": [-1]}]
    scores = expected(opened, TEXTS).scores
    tensor = {"name": "texts", "datatype": "BYTES", "shape": [len(TEXTS)]}
    wanted = [{"name": "score"}]
    plain = {"inputs": [{**tensor, "data": TEXTS}], "outputs": wanted}
    column = {
        "inputs": [{**tensor, "shape": [len(TEXTS), 1], "data": [[text] for text in TEXTS]}],
        "outputs": wanted,
    }
    for request in (plain, column):
        answer = client.post("/v2/models/guard/infer", json=request)
        assert answer.status_code == 200, answer.text
        np.testing.assert_allclose(answer.json()["outputs"][0]["data"], scores, rtol=1e-3)
    tail = b"".join(struct.pack("<I", len(text)) + text.encode() for text in TEXTS)
    binary = {
        "inputs": [{**tensor, "parameters": {"binary_data_size": len(tail)}}],
        "outputs": wanted,
    }
    header = json.dumps(binary).encode()
    answer = client.post(
        "/v2/models/guard/infer",
        content=header + tail,
        headers={"inference-header-content-length": str(len(header))},
    )
    np.testing.assert_allclose(answer.json()["outputs"][0]["data"], scores, rtol=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ({"text": ""}, 400, "text 0 is empty"),
        ({"text": ["play", ""]}, 400, "text 1 is empty"),
        ({"text": 5}, 400, 'the body is not {"text"'),
        ({"text": []}, 400, 'the body is not {"text"'),
        ({"features": [[1.0]]}, 400, 'the body is not {"text"'),
        (["play"], 400, 'the body is not {"text"'),
        ({"text": "a" * 201}, 400, "has 201 characters, more than the limit of 200 (--max-text)"),
        ({"text": ["play"] * 17}, 413, "has 17 rows, at most 16"),
    ],
)
def test_what_is_no_text_is_refused_in_a_sentence(
    client: TestClient, body: object, status: int, reason: str
) -> None:
    answer = client.post("/decide", json=body)
    assert answer.status_code == status
    assert reason in answer.json()["error"]


def test_half_a_surrogate_pair_is_refused(client: TestClient) -> None:
    answer = client.post(
        "/decide", content=b'{"text": "\\ud800"}', headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert "not valid Unicode" in answer.json()["error"]


def test_too_many_texts_are_refused_before_they_are_read(client: TestClient) -> None:
    # The first of them is cut off, which would be said otherwise.
    tail = b"\x09\0\0\0a"
    tensor = {"name": "texts", "datatype": "BYTES", "shape": [LIMITS.queue + 1]}
    tensor["parameters"] = {"binary_data_size": len(tail)}
    header = json.dumps({"inputs": [tensor]}).encode()
    answer = client.post(
        "/v2/models/guard/infer",
        content=header + tail,
        headers={"inference-header-content-length": str(len(header))},
    )
    assert answer.status_code == 413


def test_images_are_refused_by_their_type(client: TestClient) -> None:
    answer = client.post("/decide", content=b"x", headers={"content-type": "image/png"})
    assert answer.status_code == 415
    assert "this guard takes texts" in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "tail", "reason"),
    [
        ({"datatype": "FP32"}, b"", "expected BYTES"),
        ({"name": "images"}, b"", "expected 'texts'"),
        ({"shape": [2]}, b"", "data hold 1 texts, the shape needs 2"),
        ({"shape": [1, 2]}, b"", "expected [N] or [N, 1]"),
        ({"data": [5]}, b"", "expected a list of strings"),
        ({"parameters": {"binary_data_size": 6}}, b"\x09\x00\x00\x00ab", "end within a text"),
        ({"parameters": {"binary_data_size": 2}}, b"\x01\x00", "end within a text"),
        ({"parameters": {"binary_data_size": 5}}, b"\x01\x00\x00\x00\xff", "is not UTF-8"),
        ({"parameters": {"binary_data_size": 9}}, b"\x01\x00\x00\x00a", "binary_data_size is 9"),
        ({"parameters": {"binary_data_size": 8}}, b"\0" * 8, "more than 1 texts"),
        ({}, b"more", "no tensor is binary"),
    ],
)
def test_damaged_tensors_of_texts_are_one_sentence(
    client: TestClient, change: dict[str, object], tail: bytes, reason: str
) -> None:
    tensor = {"name": "texts", "datatype": "BYTES", "shape": [1], "data": ["play"], **change}
    header = json.dumps({"inputs": [tensor]}).encode()
    answer = client.post(
        "/v2/models/guard/infer",
        content=header + tail,
        headers={"inference-header-content-length": str(len(header))},
    )
    assert answer.status_code == 400
    assert reason in answer.json()["error"]


def test_a_text_is_explained_by_its_nearest_boundaries(opened: OpenedGuard) -> None:
    with client_of(app_of(TorchBackend(opened), LIMITS)) as client:
        found = client.post("/decide?explain=true", json={"text": TEXTS[0]}).json()
    assert len(found["boundaries"]) == 2
    assert {each["class"] for each in found["boundaries"]} < set(opened.class_names)


def test_texts_that_do_not_fit_into_the_memory_are_refused(opened: OpenedGuard) -> None:
    app = app_of(TorchBackend(opened), Settings(max_text=60_000))
    with client_of(app) as client:
        app.process.budget.total = 1_000_000
        answer = client.post("/decide", json={"text": "a " * 20_000})
        assert answer.status_code == 413
        assert app.process.budget.used == 0
        assert client.post("/decide", json={"text": "play"}).status_code == 200


def test_requests_of_several_lengths_share_a_batch(opened: OpenedGuard) -> None:
    backend = TorchBackend(opened)
    assert backend.encoder is not None
    rows = np.stack([backend.encoder.row(text) for text in TEXTS])
    np.testing.assert_allclose(
        backend.decide(rows).scores, expected(opened, TEXTS).scores, rtol=1e-4
    )


def test_the_client_asks_about_a_text(serving, opened: OpenedGuard) -> None:
    with Client(serving(TorchBackend(opened))) as client:
        found = client.decide_text(TEXTS[0])
    assert found["label"] == int(expected(opened, TEXTS[:1]).labels[0])


def test_the_description_of_the_interface_is_that_of_texts(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    body = found["paths"]["/decide"]["post"]["requestBody"]["$ref"]
    assert body == "#/components/requestBodies/texts"
    assert client.get("/status").json()["input"] == "texts"


def test_serving_a_graph_of_texts_imports_no_torch(graph: Path) -> None:
    code = (
        "import sys\n"
        "from starlette.testclient import TestClient\n"
        "from fdbd.serve.run import Service, application\n"
        f"app = application(Service({{'guard': {str(graph)!r}}}))\n"
        "with TestClient(app, base_url='http://127.0.0.1') as client:\n"
        "    answer = client.post('/decide', json={'text': 'play a song'})\n"
        "    assert answer.status_code == 200, answer.text\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_graph_of_one_length_is_served_at_that_length(
    graph: Path, opened: OpenedGuard, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load_model(graph)
    for given in model.graph.input:
        given.type.tensor_type.shape.dim[1].dim_value = 12
    path = tmp_path / "fixed.onnx"
    onnx.save_model(model, path)
    backend = OnnxBackend(path)
    assert backend.encoder is not None
    rows = np.stack([backend.encoder.row(text) for text in TEXTS])
    assert rows.shape[2] == 12
    with torch.inference_mode():
        scores = expected(opened, TEXTS).scores
    np.testing.assert_allclose(backend.decide(rows).scores, scores, rtol=1e-3)
