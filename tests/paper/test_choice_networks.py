"""The public networks of the study on choosing that were not made for PyTorch: weights as
published, and a pickle of arrays that runs nothing else."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest

from fdbd.data.datasets import DatasetUnavailable, load
from fdbd.networks.by_name import model_by_name
from fdbd.paper.choice_features import Protocol
from fdbd.paper.choice_networks import _ArraysOnly


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "at_least"), [("Keras CNN on CIFAR-10", 0.75), ("sigmoid MLP on MNIST", 0.93)]
)
def test_the_published_weights_classify_test_images(title: str, at_least: float) -> None:
    entry = next(each for each in Protocol.read().networks if each.title == title)
    try:
        named = model_by_name(entry.model, preprocess=entry.preprocess, device="cpu")
        images = load(entry.id, "test", limit=300, for_size=32)
    except (DatasetUnavailable, FileNotFoundError, ImportError) as error:
        pytest.skip(str(error))
    assert named.preprocess is not None
    assert images.labels is not None
    inputs = named.preprocess(np.stack([images[row] for row in range(len(images))]))
    predicted = named.model(inputs).argmax(dim=1).numpy()
    assert (predicted == np.asarray(images.labels)).mean() > at_least


def test_a_pickle_of_arrays_is_read_and_one_that_calls_a_function_is_refused() -> None:
    arrays = [np.arange(4.0), np.eye(2)]
    found = _ArraysOnly(io.BytesIO(pickle.dumps(arrays, protocol=4))).load()
    np.testing.assert_array_equal(found[1], arrays[1])
    with pytest.raises(pickle.UnpicklingError, match="not expected"):
        _ArraysOnly(io.BytesIO(pickle.dumps(print))).load()
