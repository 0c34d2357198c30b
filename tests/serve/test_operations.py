"""A service in operation, as real processes: several guards, a shadow, records, a second port."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

import fdbd

from .test_run import ROW, Running

pytestmark = pytest.mark.slow
TOKEN = "a-token-of-enough-letters"
AUTHORIZED = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def begin(*arguments: object) -> Running:
        running.append(Running(*arguments))
        return running[-1]

    yield begin
    for service in running:
        if service.process.poll() is None:
            service.kill()


def saved(guard: fdbd.Guard, path: Path) -> Path:
    guard.save(path)
    return path


def another(guard: fdbd.Guard) -> fdbd.Guard:
    """The same head with a detector of another kind."""
    generator = torch.Generator().manual_seed(1)
    width = guard.detector.head.num_features
    other = fdbd.Guard(guard.detector.head, "energy")
    other.fit([fdbd.Batch(torch.randn(100, width, generator=generator))])
    batch = fdbd.Batch(torch.randn(100, width, generator=generator))
    return other.calibrate([batch], alpha=0.5)


def records_of(folder: Path, count: int) -> list[dict]:
    """So many records, once they are on the disk."""
    deadline = time.monotonic() + 20
    while True:
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        assert time.monotonic() < deadline, f"{len(lines)} records of {count}"
        time.sleep(0.2)


def test_each_decision_is_recorded_once_and_that_of_the_shadow_beside_it(
    start, feature_guard, tmp_path
) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    shadow = another(feature_guard)
    b = saved(shadow, tmp_path / "b.safetensors")
    folder = tmp_path / "records"
    service = start(a, "--shadow", b, "--decisions", folder)
    content = json.dumps(ROW).encode()
    headers = {"content-type": "application/json", "x-request-id": "request-7"}
    answer = service.client.post("/decide", content=content, headers=headers)
    decision = answer.json()["decisions"][0]
    for _ in range(9):
        assert service.client.post("/decide", json=ROW).status_code == 200
    records = records_of(folder, 20)
    mine = [record for record in records if "role" not in record]
    shadows = [record for record in records if record.get("role") == "shadow"]
    assert len(mine) == len(shadows) == 10
    (first,) = [record for record in mine if record["request"] == "request-7"]
    for name in ("label", "score", "p_value", "is_ood"):
        assert first[name] == decision[name]
    assert first["guard"] == feature_guard.id == answer.headers["x-fdbd-guard"]
    assert first["input_sha256"] == hashlib.sha256(content).hexdigest()
    expected = shadow.decide(fdbd.Batch(torch.tensor(ROW["features"])))
    assert {record["guard"] for record in shadows} == {shadow.id}
    assert shadows[0]["score"] == pytest.approx(float(expected.scores[0]), rel=1e-4)
    text = service.client.get("/metrics").text
    assert 'fdbd_shadow_samples_total{guard="guard"} 10.0' in text
    differs = float(first["is_ood"] != shadows[0]["is_ood"])
    assert f'fdbd_shadow_disagreements_total{{guard="guard"}} {10 * differs}' in text
    service.process.send_signal(signal.SIGTERM)
    service.process.wait(30)
    pandas = pytest.importorskip("pandas")
    table = pandas.concat(pandas.read_json(path, lines=True) for path in folder.glob("*.jsonl"))
    assert len(table) == 20


def test_several_guards_are_asked_by_name_unloaded_and_loaded_in_all_processes(
    start, feature_guard, tmp_path
) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    other = another(feature_guard)
    b = saved(other, tmp_path / "b.safetensors")
    token = tmp_path / "token.txt"
    token.write_text(TOKEN)
    service = start(f"one={a}", f"two={b}", "--workers", 2, "--token-file", token)

    def guards() -> set[str]:
        """The guards that answer under the second name, over many connections."""
        found = set()
        for _ in range(12):
            answer = httpx.post(
                f"{service.url}/decide?guard=two", json=ROW, headers=AUTHORIZED, timeout=30
            )
            found.add(answer.headers.get("x-fdbd-guard", str(answer.status_code)))
        return found

    def post(path: str) -> httpx.Response:
        return httpx.post(f"{service.url}{path}", headers=AUTHORIZED, timeout=60)

    assert guards() == {other.id}
    answer = httpx.post(f"{service.url}/decide", json=ROW, headers=AUTHORIZED, timeout=30)
    assert answer.headers["x-fdbd-guard"] == feature_guard.id
    index = {entry["name"]: entry["state"] for entry in post("/v2/repository/index").json()}
    assert index == {"one": "READY", "two": "READY"}
    assert httpx.post(f"{service.url}/v2/repository/models/two/unload").status_code == 401
    assert post("/v2/repository/models/two/unload").status_code == 200
    service.until(lambda: guards() == {"503"})
    shutil.copy(a, b)
    assert post("/v2/repository/models/two/load").status_code == 200
    service.until(lambda: guards() == {feature_guard.id})
    saved(other, b)
    service.process.send_signal(signal.SIGHUP)
    service.until(lambda: guards() == {other.id})
    assert post("/v2/repository/models/three/load").status_code == 404
    text = httpx.get(f"{service.url}/metrics", headers=AUTHORIZED, timeout=30).text
    for name, guard in (("one", feature_guard), ("two", other)):
        (line,) = [line for line in text.splitlines() if f'guard="{name}",guard_version' in line]
        assert f'id="{guard.id}"' in line


def test_a_damaged_file_is_not_loaded_and_the_old_guard_goes_on(
    start, feature_guard, tmp_path
) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    token = tmp_path / "token.txt"
    token.write_text(TOKEN)
    service = start(a, "--token-file", token)
    a.write_bytes(b"damaged")
    answer = service.client.post("/v2/repository/models/guard/load", headers=AUTHORIZED)
    assert answer.status_code == 400
    assert "cannot be loaded" in answer.json()["error"]
    decision = service.client.post("/decide", json=ROW, headers=AUTHORIZED)
    assert decision.headers["x-fdbd-guard"] == feature_guard.id


def test_a_hangup_has_a_service_of_one_process_load_its_file_again(
    start, feature_guard, tmp_path
) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    other = another(feature_guard)
    service = start(a)
    assert service.client.get("/status").headers["x-fdbd-guard"] == feature_guard.id
    saved(other, a)
    service.process.send_signal(signal.SIGHUP)
    service.until(lambda: service.client.get("/status").headers["x-fdbd-guard"] == other.id)
    view = service.client.get("/status").json()["monitor"]
    assert "guard" in view["began"]["why"], "the new guard begins its own test"


def test_metrics_have_a_port_of_their_own_without_a_token(start, feature_guard, tmp_path) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    token = tmp_path / "token.txt"
    token.write_text(TOKEN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = start(a, "--token-file", token, "--metrics-port", port)
    assert service.client.get("/metrics").status_code == 401
    own = f"http://127.0.0.1:{port}"
    assert "fdbd_guard_info" in httpx.get(f"{own}/metrics").text
    assert httpx.get(f"{own}/v2/health/ready").json() == {"ready": True}
    for path in ("/", "/status", "/v2/models/guard"):
        refused = httpx.get(f"{own}{path}")
        assert refused.status_code == 404
        assert "this port answers /metrics" in refused.json()["error"]
    assert httpx.post(f"{own}/decide", json=ROW).status_code == 404


def test_a_guard_that_does_not_fit_its_memory_does_not_start(feature_guard, tmp_path) -> None:
    a = saved(feature_guard, tmp_path / "a.safetensors")
    with pytest.raises(BaseException, match="give at least"):
        Running(a, "--memory", 50)


def test_records_are_bounded_and_a_disk_that_fails_costs_records_not_answers(tmp_path) -> None:
    from fdbd.serve import decisions

    dropped: list[int] = []
    most = 2_000_000
    for start in (0, 300):
        # The second log goes on with the files of the first.
        log = decisions.DecisionLog(tmp_path, most, dropped.append)
        for number in range(start, start + 300):
            log.add({"number": number, "thumbnail": "x" * 20_000})
            time.sleep(0.001)
        log.stop()
        files = list(tmp_path.glob("*.jsonl"))
        assert sum(path.stat().st_size for path in files) <= most
        numbers = []
        for path in files:
            numbers += [json.loads(line)["number"] for line in path.read_text().splitlines()]
        # The latest are there without a gap, and no more is gone than had to be.
        assert sorted(numbers) == list(range(start + 300 - len(numbers), start + 300))
        assert len(numbers) > 0.7 * most / 20_000
    assert not dropped
    gone = tmp_path / "gone"
    failing = decisions.DecisionLog(gone, 10, dropped.append)
    shutil.rmtree(gone)
    os.mkfifo(tmp_path / "pipe")
    start = time.perf_counter()
    for _ in range(100):
        failing.add({"a": 1})
    assert time.perf_counter() - start < 0.5, "a decision waits for the disk"
    deadline = time.monotonic() + 10
    while sum(dropped) < 100 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert sum(dropped) == 100
