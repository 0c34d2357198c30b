"""A guard goes to a hub and to MLflow and comes back the same; nothing of it is pickled or run."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.decision import hub


@pytest.fixture
def guard() -> fdbd.Guard:
    generator = torch.Generator().manual_seed(0)
    head = fdbd.Head(torch.randn(3, 5, generator=generator), torch.zeros(3))
    guard = fdbd.Guard(head).fit([fdbd.Batch(torch.randn(100, 5, generator=generator))])
    guard.about["class_names"] = ["ant", "b|e<e", "cat"]
    return guard.calibrate([fdbd.Batch(torch.randn(200, 5, generator=generator))], alpha=0.1)


ROWS = torch.randn(20, 5, generator=torch.Generator().manual_seed(1))


class Hub(ThreadingHTTPServer):
    """As much of the Hub's interface as a commit of small files needs; it keeps the files of the
    last commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.address = f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        found: dict = {}
        if self.path.endswith("/repos/create"):
            found = {"url": f"{self.server.address}/me/guard", "name": "me/guard", "id": "me/guard"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(body)["files"]]
            found = {
                "files": [
                    {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
                ]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(
                        line["value"]["content"]
                    )
            commit = hashlib.sha1(body).hexdigest()
            url = f"{self.server.address}/me/guard/commit/{commit}"
            found = {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}
        self._say(found)

    def do_GET(self) -> None:
        self._say({"id": "me/guard", "sha": "0" * 40, "siblings": [], "private": True, "tags": []})

    def _say(self, found: dict) -> None:
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[Hub]:
    constants = pytest.importorskip("huggingface_hub.constants")
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    yield server
    server.shutdown()
    thread.join()


def test_a_guard_that_was_pushed_comes_back_the_same(
    guard: fdbd.Guard, server: Hub, tmp_path: Path
) -> None:
    url = guard.push_to_hub("me/guard", {"AUROC on svhn": 0.91234567}, token="x" * 20)
    assert url.startswith(server.address)
    assert set(server.files) == {"guard.safetensors", "README.md"}
    for name, content in server.files.items():
        (tmp_path / name).write_bytes(content)
    again = fdbd.from_hub(str(tmp_path), guard.head)
    for found, expected in zip(again.decide(fdbd.Batch(ROWS)), guard.decide(fdbd.Batch(ROWS))):
        torch.testing.assert_close(found, expected)
    card = server.files["README.md"].decode()
    assert guard.threshold is not None
    assert guard.threshold.guarantee in card
    assert "| AUROC on svhn | 0.912346 |" in card
    assert "b\\|e&lt;e" in card


def test_a_card_is_written_whatever_is_said_about_the_model(guard: fdbd.Guard) -> None:
    guard.about = {"model": "resnet50", "class_names": "cat"}
    assert "not in this repository" in hub.card(guard, {})


def test_a_repository_in_the_cache_is_read_offline(
    guard: fdbd.Guard, tmp_path: Path, monkeypatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    commit = "a" * 40
    place = tmp_path / "models--me--guard"
    hub.write_folder(guard, place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    again = fdbd.from_hub("me/guard", guard.head)
    torch.testing.assert_close(
        again.decide(fdbd.Batch(ROWS)).scores, guard.decide(fdbd.Batch(ROWS)).scores
    )


def test_a_folder_without_a_guard_and_a_forged_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no guard"):
        fdbd.from_hub(str(tmp_path))
    (tmp_path / hub.FILE).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(fdbd.ArtifactError):
        fdbd.from_hub(str(tmp_path))


def test_mlflow_gives_the_guards_decisions_and_pickles_nothing(
    guard: fdbd.Guard, tmp_path: Path, monkeypatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("pandas")
    from fdbd.integrations.mlflow import log_model, save_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    guard.save("guard.safetensors")
    save_model("guard.safetensors", tmp_path / "model")
    assert not [
        path
        for path in (tmp_path / "model").rglob("*")
        if path.suffix in (".pkl", ".pickle", ".joblib")
    ]
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        logged = log_model("guard.safetensors")
    decision = guard.decide(fdbd.Batch(ROWS))
    for where in (str(tmp_path / "model"), logged.model_uri):
        found = mlflow.pyfunc.load_model(where).predict(ROWS.numpy())
        np.testing.assert_allclose(found["score"], decision.scores, rtol=1e-6)
        assert found["is_ood"].tolist() == decision.is_ood.tolist()
        assert found["class"].tolist() == [
            guard.about["class_names"][label] for label in decision.labels.tolist()
        ]
