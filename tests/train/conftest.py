"""A network small enough to train in a second, with group norm so that a split batch is the same
batch."""

import numpy as np
import pytest

NETWORK = """
from torch import nn

def make(num_classes=4, dropout=0.1, norm="group"):
    bn = (lambda c: nn.BatchNorm2d(c)) if norm == "batch" else (lambda c: nn.GroupNorm(2, c))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), bn(8), nn.ReLU(), nn.Dropout(dropout),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), bn(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes),
    )

def still(num_classes=4):
    return make(num_classes, dropout=0.0)

def batch(num_classes=4):
    return make(num_classes, norm="batch")
"""


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """The folder of the importable module `tiny_networks`."""
    folder = tmp_path / "importable"
    folder.mkdir()
    (folder / "tiny_networks.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def coloured_squares(n, seed):
    """uint8 images (n, 16, 16, 3) whose class is the brightest quarter, under noise; labels
    (n,)."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, n)
    images = random.integers(0, 120, (n, 16, 16, 3))
    for image, label in zip(images, labels):
        row, column = divmod(int(label), 2)
        image[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] += 100
    return images.astype(np.uint8), labels


@pytest.fixture(scope="session")
def data():
    return coloured_squares(96, 0)


@pytest.fixture(scope="session")
def test_data():
    return coloured_squares(64, 1)
