"""The service over HTTP: both protocols give the guard's own answers, and nothing a client sends
ends in a 500."""

from __future__ import annotations

import io
import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import fdbd
from fdbd.core.pixels import decode
from fdbd.core.preprocessing import Preprocess
from fdbd.decision.guard_file import OpenedGuard
from fdbd.serve.settings import Settings
from fdbd.serve.torch_backend import TorchBackend

from .conftest import app_of, client_of

SIDE, CLASSES, WIDTH = 8, 4, 6
NAMES = ("ant", "bee", "cat", "dog")
TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def image_client(images):
    with client_of(app_of(images, Settings(max_body=100_000))) as client:
        yield client


@pytest.fixture(scope="module")
def feature_client(features):
    with client_of(app_of(features, Settings(max_body=100_000))) as client:
        yield client


def png(seed: int = 0, side: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def expected(guard: fdbd.Guard, image: bytes) -> fdbd.Decision:
    return guard(Preprocess(SIDE)([decode(image)]))


@pytest.mark.parametrize("seed", range(4))
def test_an_image_as_raw_bytes_or_multipart_gets_the_guards_own_decision(
    image_client, image_guard, seed
) -> None:
    image = png(seed)
    decision = expected(image_guard, image)
    raw = image_client.post("/decide", content=image, headers={"content-type": "image/png"})
    part = image_client.post("/decide", files={"image": ("x.png", image)})
    for answer in (raw, part):
        assert answer.status_code == 200
        found = answer.json()
        assert found["label"] == int(decision.labels[0])
        assert found["class"] == NAMES[found["label"]]
        assert found["score"] == pytest.approx(float(decision.scores[0]), rel=1e-5)
        assert found["p_value"] == pytest.approx(float(decision.p_values[0]))
        assert found["is_ood"] == bool(decision.is_ood[0])


def test_a_guard_of_rectangles_answers_about_images_of_any_shape(image_guard) -> None:
    wide = Preprocess((SIDE, 2 * SIDE))
    backend = TorchBackend(OpenedGuard(image_guard, wide, NAMES))
    with client_of(app_of(backend)) as client:
        tensor = client.get("/v2/models/guard").json()["inputs"][0]
        assert tensor["shape"] == [-1, 3, SIDE, 2 * SIDE]
        found = client.post("/decide", content=png()).json()
    decision = image_guard(wide([decode(png())]))
    assert found["score"] == pytest.approx(float(decision.scores[0]), rel=1e-5)


def test_an_explanation_names_the_nearest_boundaries_in_order(image_client, image_guard) -> None:
    found = image_client.post("/decide?explain=true", content=png()).json()["boundaries"]
    why = image_guard.explain(Preprocess(SIDE)([decode(png())]))
    assert len(found) == CLASSES - 1
    assert [entry["distance"] for entry in found] == sorted(entry["distance"] for entry in found)
    assert found[0]["label"] == int(why.nearest[0])
    assert found[0]["distance"] == pytest.approx(float(why.nearest_distance[0]), rel=1e-4)


def test_features_as_json_get_the_guards_own_decisions(feature_client, feature_guard) -> None:
    rows = torch.randn(5, WIDTH)
    decision = feature_guard.decide(fdbd.Batch(rows))
    found = feature_client.post("/decide", json={"features": rows.tolist()}).json()["decisions"]
    assert [entry["label"] for entry in found] == decision.labels.tolist()
    assert [entry["is_ood"] for entry in found] == decision.is_ood.tolist()
    np.testing.assert_allclose([entry["score"] for entry in found], decision.scores, rtol=1e-5)


def test_a_number_that_is_not_finite_is_ood_and_its_score_null(feature_client) -> None:
    body = json.dumps({"features": [[1e999] + [0.0] * (WIDTH - 1)]}).replace("Infinity", "1e999")
    found = feature_client.post(
        "/decide", content=body, headers={"content-type": "application/json"}
    )
    assert found.status_code == 200
    assert found.json()["decisions"][0]["is_ood"] is True
    assert found.json()["decisions"][0]["score"] is None


def test_inference_as_json_and_as_bytes_gives_the_same(feature_client, feature_guard) -> None:
    rows = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
    plain = {"name": "features", "shape": [3, WIDTH], "datatype": "FP32", "data": rows.tolist()}
    answer = feature_client.post(
        "/v2/models/guard/infer", json={"id": "7", "inputs": [plain]}
    ).json()
    assert answer["id"] == "7"
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    decision = feature_guard.decide(fdbd.Batch(torch.from_numpy(rows)))
    np.testing.assert_allclose(outputs["score"], decision.scores, rtol=1e-5)
    assert outputs["is_ood"] == decision.is_ood.tolist()
    head = {**plain, "parameters": {"binary_data_size": rows.nbytes}}
    del head["data"]
    header = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}}).encode()
    length = {"inference-header-content-length": str(len(header))}
    answer = feature_client.post(
        "/v2/models/guard/infer", content=header + rows.tobytes(), headers=length
    )
    size = int(answer.headers["inference-header-content-length"])
    place = size
    for output in json.loads(answer.content[:size])["outputs"]:
        count = output["parameters"]["binary_data_size"]
        if output["name"] == "score":
            scores = np.frombuffer(answer.content[place : place + count], "<f8")
            np.testing.assert_allclose(scores, outputs["score"])
        place += count
    assert place == len(answer.content)


def test_numbers_of_an_inference_that_are_not_finite_are_null(feature_client) -> None:
    body = {"inputs": [tensor(data=[None] * WIDTH)], "outputs": [{"name": "score"}]}
    answer = feature_client.post("/v2/models/guard/infer", json=body)
    [output] = answer.json()["outputs"]
    assert output["data"] == [None]
    assert output["shape"] == [1]


def tensor(**changes):
    return {
        "name": "features",
        "shape": [1, WIDTH],
        "datatype": "FP32",
        "data": [0.0] * WIDTH,
        **changes,
    }


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "inputs"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [tensor(name="other")]}, "other"),
        ({"inputs": [tensor(shape=[1, WIDTH + 1])]}, "shape"),
        ({"inputs": [tensor(shape=[0, WIDTH], data=[])]}, "at least one row"),
        ({"inputs": [tensor(shape=[2, WIDTH])]}, "numbers"),
        ({"inputs": [tensor(datatype="BYTES")]}, "datatype"),
        ({"inputs": [tensor(data=["a"] * WIDTH)]}, "not numbers"),
        ({"inputs": [tensor(parameters={"binary_data_size": 4})]}, "binary_data_size"),
        ({"inputs": [tensor()], "outputs": [{"name": "nothing"}]}, "nothing"),
        ({"inputs": [tensor()], "id": 7}, "id"),
        ({"inputs": [tensor()], "id": "half a pair: \ud800"}, "valid Unicode"),
    ],
)
def test_a_request_off_the_protocol_is_refused_in_one_sentence(feature_client, body, words) -> None:
    answer = feature_client.post("/v2/models/guard/infer", content=json.dumps(body))
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_what_cannot_be_answered_is_refused_with_a_reason(image_client, feature_client) -> None:
    assert image_client.post("/decide", content=b"no image").status_code == 400
    assert image_client.post("/decide", json={"features": [[1.0]]}).status_code == 415
    assert feature_client.post("/decide", content=png()).status_code == 415
    assert feature_client.post("/decide", json={"features": [[1.0]]}).status_code == 400
    assert image_client.post("/decide", content=b"x" * 100_001).status_code == 413
    assert image_client.post("/decide", files={}, data={"note": "no file"}).status_code == 400
    assert image_client.get("/v2/models/other").status_code == 404
    assert image_client.get("/nowhere").status_code == 404
    assert image_client.get("/decide").status_code == 405


def test_a_form_made_to_be_read_slowly_ends_with_the_time_of_its_request(images) -> None:
    # Ends of parts that are none: the parser looks at each byte of them.
    form = b'--x\r\ncontent-disposition: form-data; name="a"; filename="a.png"\r\n\r\n'
    form += b"\r\n--x-" * 4_000_000
    settings = Settings(timeout=0.5, max_body=len(form))
    app = app_of(images, settings)
    with client_of(app) as client:
        kind = {"content-type": "multipart/form-data; boundary=x"}
        answer = client.post("/decide", content=form, headers=kind)
        assert answer.status_code == 504
        assert app.process.decoder.longest_running < 2 * settings.timeout
        deadline = time.monotonic() + settings.timeout
        while app.process.decoder.longest_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not app.process.decoder.longest_running


def test_a_body_without_a_stated_length_is_cut_off_at_the_limit(image_client) -> None:
    answer = image_client.post("/decide", content=(b"x" * 1000 for _ in range(200)))
    assert answer.status_code == 413


@given(
    st.binary(max_size=400),
    st.sampled_from(["application/json", "image/png", "multipart/form-data; boundary=b"]),
)
def test_no_body_ends_in_a_server_error_on_decide(image_client, feature_client, body, kind) -> None:
    for client in (image_client, feature_client):
        answer = client.post("/decide", content=body, headers={"content-type": kind})
        assert answer.status_code < 500, answer.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("name", "shape", "datatype", "data", "parameters"), json_values)
    )
)
def test_no_tensor_ends_in_a_server_error_on_infer(feature_client, changes) -> None:
    answer = feature_client.post(
        "/v2/models/guard/infer", content=json.dumps({"inputs": [tensor(**changes)]})
    )
    assert answer.status_code < 500, answer.text


@given(
    st.binary(max_size=200),
    st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8),
)
def test_no_header_length_ends_in_a_server_error_on_infer(feature_client, body, length) -> None:
    headers = {"inference-header-content-length": length}
    assert (
        feature_client.post("/v2/models/guard/infer", content=body, headers=headers).status_code
        < 500
    )


def test_a_token_is_asked_for_everywhere_but_at_probes_and_pages(features) -> None:
    with client_of(app_of(features, Settings(token=TOKEN))) as client:
        for path in ("/status", "/metrics", "/v2", "/v2/models/guard"):
            assert client.get(path).status_code == 401
            assert (
                client.get(path, headers={"authorization": f"Bearer {TOKEN}x"}).status_code == 401
            )
            assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.post("/decide", json={"features": [[0.0] * WIDTH]}).status_code == 401
        for path in ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200


def test_a_request_keeps_its_id_and_gets_one_where_it_has_none(feature_client) -> None:
    assert (
        feature_client.get("/status", headers={"x-request-id": "abc-1"}).headers["x-request-id"]
        == "abc-1"
    )
    assert (
        len(feature_client.get("/status", headers={"x-request-id": "a b"}).headers["x-request-id"])
        == 32
    )


class Slow:
    """A guard for features whose model works until it is let."""

    def __init__(self, guard) -> None:
        self.guard, self.gate = guard, threading.Event()
        self.gate.set()

    def __getattr__(self, name: str):
        return getattr(self.guard, name)

    def decide(self, rows):
        self.gate.wait(20)
        return self.guard.decide(rows)


def test_an_answer_that_takes_too_long_is_given_up(features) -> None:
    slow = Slow(features)
    with client_of(app_of(slow, Settings(timeout=0.05))) as client:
        slow.gate.clear()
        answer = client.post("/decide", json={"features": [[0.0] * WIDTH]})
        slow.gate.set()
    assert answer.status_code == 504
    assert "0.05 s" in answer.json()["error"]


def test_a_client_that_leaves_gives_its_place_back_and_is_counted(features) -> None:
    slow = Slow(features)
    app = app_of(slow, Settings(batch_size=1))
    body = json.dumps({"features": [[0.0] * WIDTH]}).encode()
    sent: list[dict] = []

    async def ask(client) -> None:
        messages = iter([{"type": "http.request", "body": body}, {"type": "http.disconnect"}])
        scope = {"type": "http", "method": "POST", "path": "/decide", "query_string": b""}
        scope["root_path"] = ""
        scope["headers"] = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]

        async def receive() -> dict:
            return next(messages)

        async def send(message: dict) -> None:
            sent.append(message)

        await app(scope, receive, send)

    with client_of(app) as client:
        slow.gate.clear()
        # The model has it.
        client.portal.call(ask, client)
        client.portal.call(ask, client)
        waiting = client.get("/status").json()["waiting"]
        slow.gate.set()
        text = client.get("/metrics").text
    assert waiting == 0
    assert [message["status"] for message in sent if "status" in message] == [499, 499]
    assert 'fdbd_requests_total{guard="guard",path="/decide",status="499"} 2.0' in text


def test_metrics_count_what_was_asked_and_decided(features) -> None:
    with client_of(app_of(features)) as client:
        far = [[50.0 * (-1) ** i for i in range(WIDTH)], [0.1] * WIDTH]
        decisions = client.post("/decide", json={"features": far}).json()["decisions"]
        client.post("/decide", content=b"nonsense", headers={"content-type": "application/json"})
        text = client.get("/metrics").text
        status = client.get("/status").json()
    assert 'fdbd_requests_total{guard="guard",path="/decide",status="200"} 1.0' in text
    assert 'fdbd_requests_total{guard="guard",path="/decide",status="400"} 1.0' in text
    for entry in decisions:
        assert (
            f'fdbd_samples_total{{class="{NAMES[entry["label"]]}",guard="guard",label="{entry["label"]}"}}'
            in text
        )
    assert 'fdbd_batch_rows_sum{guard="guard"} 2.0' in text
    assert status["monitor"]["samples"] == 2
    assert status["monitor"]["ood"] == sum(entry["is_ood"] for entry in decisions)


def test_rejected_images_are_kept_as_thumbnails_up_to_a_bound(images) -> None:
    def rejected(settings: Settings) -> list[dict]:
        with client_of(app_of(images, settings)) as client:
            count = sum(
                client.post("/decide", content=png(seed)).json()["is_ood"] for seed in range(40)
            )
            assert count > 2, "the test needs rejected images"
            return client.get("/status").json()["samples"]

    kept = rejected(Settings(samples=2))
    assert len(kept) == 2
    assert all(entry["image"].startswith("data:image/jpeg;base64,") for entry in kept)
    assert rejected(Settings(samples=0)) == []


def test_the_description_names_every_path_that_answers(feature_client) -> None:
    paths = feature_client.get("/openapi.json").json()["paths"]
    assert len(paths) > 12
    for path, methods in paths.items():
        for method in methods:
            answer = feature_client.request(method, path)
            assert answer.status_code != 405, path
            assert "there is nothing at" not in answer.text, path


def test_without_the_token_nothing_is_said_of_the_guard(features) -> None:
    open_paths = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
    with client_of(app_of(features, Settings(token=TOKEN))) as client:
        said = "".join(client.get(path).text for path in open_paths)
        headers = {"authorization": f"Bearer {TOKEN}"}
        full = client.get("/openapi.json", headers=headers).text
    for secret in (features.name, features.promise, features.id, "/v2/models/guard"):
        assert secret not in said
    assert features.promise in full
    assert "/v2/models/guard/infer" in full


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/json", "origin": "http://elsewhere.example"},
        {"content-type": "application/json", "origin": "null"},
        {"content-type": "application/json", "sec-fetch-site": "cross-site"},
        {"content-type": "application/json", "host": "rebound.example"},
    ],
)
def test_a_page_of_another_site_cannot_have_anything_decided(features, headers) -> None:
    with client_of(app_of(features)) as client:
        body = json.dumps({"features": [[9.0] * WIDTH]})
        for path in ("/decide", "/monitor/acknowledge"):
            answer = client.post(path, content=body, headers=headers)
            assert answer.status_code in (403, 415, 421), path
        assert client.get("/status").json()["monitor"]["samples"] == 0


def test_a_note_that_nobody_could_read_is_refused_and_the_status_goes_on(features) -> None:
    half_of_a_pair = b'{"note": "\\ud800"}'
    kind = {"content-type": "application/json"}
    with client_of(app_of(features)) as client:
        answer = client.post("/monitor/acknowledge", content=half_of_a_pair, headers=kind)
        assert answer.status_code == 400
        assert client.get("/status").status_code == 200


def test_a_request_with_two_hosts_is_refused(features) -> None:
    with client_of(app_of(features)) as client:
        for names in (("127.0.0.1", "rebound.example"), ("127.0.0.1", "127.0.0.1")):
            hosts = [("host", name) for name in names]
            assert client.get("/status", headers=hosts).status_code == 400


def test_the_page_itself_and_allowed_hosts_are_answered(features) -> None:
    ask = {"features": [[0.1] * WIDTH]}
    own = {"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}
    with client_of(app_of(features)) as client:
        assert client.post("/decide", json=ask, headers=own).status_code == 200
        assert client.get("/status", headers={"host": "localhost:80"}).status_code == 200
        assert client.get("/status", headers={"host": "[::1]:80"}).status_code == 200
        assert client.get("/status", headers={"host": "guard.example"}).status_code == 421
        health = client.get("/v2/health/live", headers={"host": "guard.example"})
        assert health.status_code == 200, "a probe may name any host"
    with client_of(app_of(features, Settings(allowed_hosts=("guard.example",)))) as client:
        assert client.get("/status", headers={"host": "guard.example"}).status_code == 200
        assert client.get("/status", headers={"host": "other.example"}).status_code == 421


def test_a_tensor_with_data_in_json_and_in_bytes_is_refused(feature_client) -> None:
    data = np.zeros(WIDTH, "<f4").tobytes()
    head = tensor(data=[1.0] * WIDTH, parameters={"binary_data_size": len(data)})
    header = json.dumps({"inputs": [head]}).encode()
    length = {"inference-header-content-length": str(len(header))}
    answer = feature_client.post("/v2/models/guard/infer", content=header + data, headers=length)
    assert answer.status_code == 400
    assert "send one of them" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["UINT8", "INT32", "INT64", "FP16", "FP64", "BOOL", "BYTES"])
def test_only_the_declared_datatype_is_taken(feature_client, kind) -> None:
    body = {"inputs": [tensor(datatype=kind, data=[1.5] * WIDTH)]}
    answer = feature_client.post("/v2/models/guard/infer", json=body)
    assert answer.status_code == 400
    assert "expected FP32" in answer.json()["error"]
    data = np.zeros(WIDTH, np.uint8).tobytes()
    head = tensor(datatype=kind, parameters={"binary_data_size": len(data)})
    header = json.dumps({"inputs": [head]}).encode()
    length = {"inference-header-content-length": str(len(header))}
    answer = feature_client.post("/v2/models/guard/infer", content=header + data, headers=length)
    assert answer.status_code == 400


@pytest.mark.parametrize(
    "data",
    [
        ["1.5"] * WIDTH,
        [True] * WIDTH,
        [1.0] * (WIDTH - 1) + ["x" * 50_000],
        [{}] * WIDTH,
        [[[[1.0]]]] * WIDTH,
        [10**400] * WIDTH,
    ],
)
def test_data_that_are_not_numbers_are_refused(feature_client, data) -> None:
    answer = feature_client.post("/v2/models/guard/infer", json={"inputs": [tensor(data=data)]})
    assert answer.status_code == 400
    assert "not numbers" in answer.json()["error"]
    answer = feature_client.post("/decide", json={"features": data})
    assert answer.status_code == 400


def test_urls_may_name_the_version_that_the_metadata_list(feature_client) -> None:
    about = feature_client.get("/v2/models/guard").json()
    for version in about["versions"]:
        base = f"/v2/models/guard/versions/{version}"
        assert feature_client.get(base).json() == about
        assert feature_client.get(f"{base}/ready").json()["ready"] is True
        answer = feature_client.post(f"{base}/infer", json={"inputs": [tensor()]})
        assert answer.status_code == 200
        assert answer.json()["model_version"] == version
    answer = feature_client.post("/v2/models/guard/versions/7/infer", json={"inputs": [tensor()]})
    assert answer.status_code == 404


def test_answers_name_the_guard_that_gave_them(feature_client, feature_guard) -> None:
    answer = feature_client.post("/decide", json={"features": [[0.0] * WIDTH]})
    assert answer.headers["x-fdbd-guard"] == feature_guard.id
    answer = feature_client.post("/v2/models/guard/infer", json={"inputs": [tensor()]})
    assert answer.headers["x-fdbd-guard"] == feature_guard.id
    text = feature_client.get("/metrics").text
    assert f'id="{feature_guard.id}"' in text


class Broken(Slow):
    """A guard whose model ends its thread, until it is repaired."""

    is_broken = False

    def decide(self, rows):
        if self.is_broken:
            raise SystemExit("the model gives up")
        return self.guard.decide(rows)


def test_a_model_that_ends_its_thread_is_an_error_and_readiness_follows_its_answers(
    features,
) -> None:
    broken = Broken(features)
    ask = {"features": [[0.0] * WIDTH]}
    with client_of(app_of(broken)) as client:
        assert client.post("/decide", json=ask).status_code == 200
        broken.is_broken = True
        assert client.post("/decide", json=ask).status_code == 500
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/health/live").status_code == 200
        broken.is_broken = False
        deadline = time.monotonic() + 10
        while client.get("/v2/health/ready").status_code != 200:
            assert time.monotonic() < deadline, "it works again, and nobody noticed"
            time.sleep(0.1)
        assert client.post("/decide", json=ask).status_code == 200


def test_a_model_that_hangs_is_not_ready_then_not_alive_and_work_is_refused(features) -> None:
    slow = Slow(features)
    ask = {"features": [[0.0] * WIDTH]}
    with client_of(app_of(slow, Settings(timeout=0.4))) as client:
        assert client.get("/v2/health/ready").status_code == 200
        slow.gate.clear()
        assert client.post("/decide", json=ask).status_code == 504
        time.sleep(0.1)
        assert client.get("/v2/health/ready").status_code == 503
        assert client.get("/v2/models/guard/ready").status_code == 503
        refused = client.post("/decide", json=ask)
        assert refused.status_code == 503
        assert "has not answered" in refused.json()["error"]
        assert int(refused.headers["retry-after"]) > 0
        time.sleep(0.5)
        assert client.get("/v2/health/live").status_code == 503
        for path in ("/metrics", "/status"):
            assert client.get(path).status_code == 200
        slow.gate.set()
        deadline = time.monotonic() + 10
        while client.get("/v2/health/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.post("/decide", json=ask).status_code == 200
