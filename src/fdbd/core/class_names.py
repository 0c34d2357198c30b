"""Class names of standard datasets, in label order: datasets show them, and networks that were
trained on one know their classes by them."""

from __future__ import annotations

_DIGITS = ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")

CLASS_NAMES: dict[str, tuple[str, ...]] = {
    "cifar10": (
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    "svhn": _DIGITS,
    "mnist": _DIGITS,
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "voc": (
        "background",
        "aeroplane",
        "bicycle",
        "bird",
        "boat",
        "bottle",
        "bus",
        "car",
        "cat",
        "chair",
        "cow",
        "dining table",
        "dog",
        "horse",
        "motorbike",
        "person",
        "potted plant",
        "sheep",
        "sofa",
        "train",
        "tv",
    ),
}
"""By the dataset's name; datasets of many classes have none here."""
