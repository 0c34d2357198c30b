"""A guard of maps behind the service: share, score and verdict of an image, and its mask."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fdbd
from fdbd.core.pixels import decode
from fdbd.core.preprocessing import Preprocess
from fdbd.decision.guard_file import open_guard
from fdbd.serve.backend import OnnxBackend
from fdbd.serve.torch_backend import TorchBackend

from .conftest import app_of, client_of

PREPROCESS = Preprocess(16, (0.5,) * 3, (0.25,) * 3, crop="none")


def segmenter() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 4, 1)).eval()


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    images = [
        PREPROCESS([decode(picture(seed)) for seed in range(40 * k, 40 * k + 40)]) for k in (1, 2)
    ]
    guard = fdbd.Guard(segmenter()).fit(images[0]).calibrate(images[1], alpha=0.1)
    guard.about["preprocess"] = PREPROCESS.to_dict()
    return guard


@pytest.fixture(scope="module", params=["torch", "onnx"])
def backend(guard, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("maps")
    if request.param == "onnx":
        pytest.importorskip("onnxruntime")
        example = PREPROCESS([decode(picture(0))])
        guard.export_onnx(folder / "guard.onnx", example)
        return OnnxBackend(folder / "guard.onnx")
    opened = open_guard_of(guard, folder)
    return TorchBackend(opened)


def open_guard_of(guard, folder):
    guard.save(folder / "guard.safetensors")
    opened = open_guard(folder / "guard.safetensors", features=True)
    return opened._replace(guard=guard, preprocess=PREPROCESS)


def test_an_image_gets_the_share_score_verdict_and_mask_of_the_guard(backend, guard) -> None:
    with client_of(app_of(backend)) as client:
        for seed in range(3):
            decision = guard(PREPROCESS([decode(picture(seed))]))
            answer = client.post("/decide?mask=1", content=picture(seed)).json()
            assert answer["ood_share"] == pytest.approx(float(decision.ood_share), abs=1e-6)
            assert answer["score"] == pytest.approx(float(decision.image_scores), rel=1e-4)
            assert answer["p_value"] == pytest.approx(float(decision.image_p_values))
            assert answer["is_ood"] == bool(decision.image_is_ood)
            assert answer["label"] == int(decision.image_labels())
            mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(answer["mask"]))))
            assert np.array_equal(mask, np.where(decision.is_ood[0], 255, 0))
        plain = client.post("/decide", content=picture(0)).json()
        assert "mask" not in plain


def test_what_maps_do_not_have_is_refused_in_one_sentence(backend) -> None:
    with client_of(app_of(backend)) as client:
        answer = client.post("/decide?explain=1", content=picture(0))
        assert answer.status_code == 400
        name = client.post("/v2/repository/index", json={}).json()[0]["name"]
        answer = client.post(f"/v2/models/{name}/infer", json={})
        assert answer.status_code == 400
        assert "POST /decide" in answer.json()["error"]
        assert client.get(f"/v2/models/{name}").json()["outputs"] == []


def test_many_images_are_decided_in_pieces_as_one_by_one(backend) -> None:
    rows = PREPROCESS([decode(picture(seed)) for seed in range(9)]).numpy()
    together = backend.decide(rows)
    alone = [backend.decide(rows[place : place + 1]) for place in range(9)]
    assert together.masks.shape == (9, 8, 8)
    for name in ("scores", "ood_shares", "labels", "is_ood"):
        values = np.concatenate([getattr(answers, name) for answers in alone])
        np.testing.assert_allclose(getattr(together, name), values, rtol=1e-4)
