"""Preprocess: from uint8 images of any size to the float32 tensor that a model takes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fdbd.core.pixels import MAX_PIXELS, ImageError, Picture, Pixels

if TYPE_CHECKING:
    from torch import Tensor

Channels = tuple[float, ...]

IMAGENET_MEAN: Channels = (0.485, 0.456, 0.406)
IMAGENET_STD: Channels = (0.229, 0.224, 0.225)
CROPS = ("centre", "tf", "none")
INTERPOLATIONS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop, normalise: ``(image / scale − mean) / std``, as float32 (N, 3, height, width),
    or (N, 1, height, width) for a network that takes grey images.

    Resizing is Pillow's, so the result is that of torchvision's Resize and CenterCrop on a Pillow
    image.

    Args:
        size: side of the result in pixels, or its height and width: ``224`` or ``(48, 64)``.
        mean, std: one number per channel, in units of the scaled image: three, or one for a network
            that takes grey images, such as ``mean=[0.5], std=[0.5]``.
        resize: side in pixels that the short side is brought to before the crop; None: as small as
            the crop allows.
        crop: ``"centre"`` cuts out the centre; ``"tf"`` cuts the centre size/(size + 32) of the
            short side first and resizes that (EfficientNet), for squares alone; ``"none"`` resizes
            both sides to `size`, whatever the aspect.
        interpolation: a Pillow filter: nearest, box, bilinear, hamming, bicubic or lanczos.
        scale: what the pixel values 0 to 255 are divided by.
        draft: decode JPEG files that are much larger than needed at a half, quarter or eighth of
            their size, while at least twice the needed one is left: several times as fast for
            photographs of a camera. Pixels then differ by about one grey level on average from
            those of the whole picture, so a guard scores with the setting that it was fitted and
            calibrated with (its file keeps it), and the default is off.

    >>> preprocess = Preprocess.preset("imagenet")
    >>> preprocess(np.zeros((1, 300, 400, 3), dtype=np.uint8)).shape
    torch.Size([1, 3, 224, 224])
    >>> Preprocess((48, 64), crop="none")(np.zeros((1, 300, 400, 3), dtype=np.uint8)).shape
    torch.Size([1, 3, 48, 64])
    >>> Preprocess(28, mean=(0.13,), std=(0.31,))(np.zeros((1, 28, 28, 3), dtype=np.uint8)).shape
    torch.Size([1, 1, 28, 28])
    >>> Preprocess.from_dict(preprocess.to_dict()) == preprocess
    True
    """

    size: int | tuple[int, int]
    mean: Channels = (0.0, 0.0, 0.0)
    std: Channels = (1.0, 1.0, 1.0)
    resize: int | None = None
    crop: str = "centre"
    interpolation: str = "bilinear"
    scale: float = 255.0
    draft: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_size(self.size))
        for name in ("mean", "std"):
            object.__setattr__(self, name, _checked_channels(name, getattr(self, name)))
        self._check_normalisation()
        _expect_one_of("crop", self.crop, CROPS)
        _expect_one_of("interpolation", self.interpolation, INTERPOLATIONS)
        if not isinstance(self.draft, bool):
            raise ValueError(f"draft is {self.draft!r}, expected true or false")
        self._check_sizes()

    def _check_normalisation(self) -> None:
        """ValueError unless `mean`, `std` and `scale` are numbers that pixels can be normalised
        by."""
        if len(self.mean) != len(self.std):
            raise ValueError(
                f"mean is {self.mean} and std is {self.std}, expected as many numbers in both: "
                "three, or one for a network that takes grey images"
            )
        if not isinstance(self.scale, Real):
            raise ValueError(f"scale is {self.scale!r}, expected a number")
        if not all(map(math.isfinite, (*self.mean, *self.std, self.scale))):
            raise ValueError(
                f"mean is {self.mean}, std {self.std} and scale {self.scale}, expected finite"
                " numbers"
            )
        if min(self.std) <= 0 or self.scale <= 0:
            raise ValueError(
                f"std is {self.std} and scale is {self.scale}, expected positive numbers"
            )

    def _check_sizes(self) -> None:
        """ValueError unless `size` and `resize` are within the limit and go with the crop."""
        if self.resize is not None and not _is_whole(self.resize):
            raise ValueError(f"resize is {self.resize!r}, expected a whole number of pixels")
        height = max(self.height, self.resize or 0)
        width = max(self.width, self.resize or 0)
        if height * width > MAX_PIXELS:
            raise ValueError(
                f"images of {width} × {height} pixels have more than the limit of {MAX_PIXELS:,}"
            )
        if self.crop == "tf" and self.height != self.width:
            raise ValueError(f"crop 'tf' makes squares, and size is {self.size}: give one number")
        if self.resize is None:
            return
        if self.crop != "centre" or self.resize < self.longest_side:
            raise ValueError(
                f"resize is {self.resize} with crop {self.crop!r}, expected crop 'centre' and at "
                f"least size {self.longest_side}"
            )

    @property
    def height(self) -> int:
        """Height of the result in pixels."""
        return self.size if isinstance(self.size, int) else self.size[0]

    @property
    def width(self) -> int:
        """Width of the result in pixels."""
        return self.size if isinstance(self.size, int) else self.size[1]

    @property
    def channels(self) -> int:
        """Channels of the result: 3, or 1 for a network that takes grey images."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one result."""
        return self.channels, self.height, self.width

    @property
    def longest_side(self) -> int:
        """The larger of height and width. An image of at least this many pixels on both sides is
        never enlarged."""
        return max(self.height, self.width)

    @classmethod
    def preset(cls, name: str) -> Preprocess:
        """A preprocessing by name: see `PRESETS`."""
        if name not in PRESETS:
            raise ValueError(
                f"no preprocessing is called {name!r}, expected one of {', '.join(PRESETS)}"
            )
        return PRESETS[name]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """A preprocessing from its fields by name, as a config or `to_dict` has them."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"preprocessing has no {', '.join(unknown)}, expected {', '.join(sorted(known))}"
            )
        if "size" not in values:
            raise ValueError(
                "preprocessing has no size, expected that of the network's input, in pixels"
            )
        return cls(**values)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Preprocess) -> Preprocess:
        """A preset's name, fields as JSON or by name, or a preprocessing as it is.

        >>> Preprocess.parse('{"size": 8}').size, Preprocess.parse("imagenet").size
        (8, 224)
        """
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"the preprocessing {value!r} is not JSON ({error})") from None
        if isinstance(value, Preprocess):
            return value
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ValueError(
            f"the preprocessing is {value!r}, expected the name of a preset or its fields"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return asdict(self)

    def key(self) -> str:
        """SHA-256 of all fields: equal if the results are."""
        fields = self.to_dict()
        # Results without a draft are those of versions that did not know the field.
        if not self.draft:
            del fields["draft"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def needed_side(self) -> int | None:
        """The short side that an image file must at least have left when it is decoded as a draft;
        None: decode it whole."""
        if not self.draft:
            return None
        if self.crop == "tf":
            return 2 * (self.longest_side + 32)
        return 2 * (self.resize or self.longest_side)

    def fit(self, image: Pixels | Picture) -> Pixels:
        """One image (H, W, 3) to (height, width, 3), still uint8. A long and narrow one that has
        more than MAX_PIXELS when its short side is brought to size is an ImageError."""
        picture = image if isinstance(image, Picture) else Picture.from_pixels(image)
        height = picture.height
        width = picture.width
        wanted = (self.height, self.width)
        if self.crop == "tf":
            side = self._tf_side(height, width)
            top = (height - side + 1) // 2
            left = (width - side + 1) // 2
            return picture.resized(top, left, (side, side), wanted, self.interpolation)
        if self.crop == "none":
            return picture.resized(0, 0, (height, width), wanted, self.interpolation)
        target = self._resized(height, width)
        if target[0] * target[1] > MAX_PIXELS:
            raise ImageError(
                f"the image has {width} × {height} pixels and, resized to a short side of "
                f"{min(target)}, more than the limit of {MAX_PIXELS:,}"
            )
        resized = picture.resized(0, 0, (height, width), target, self.interpolation)
        top = round((resized.shape[0] - self.height) / 2)
        left = round((resized.shape[1] - self.width) / 2)
        return resized[top : top + self.height, left : left + self.width]

    def unfit(self, mask: Pixels, height: int, width: int, unseen: int = 0) -> Pixels:
        """A map (h, w) over the model's input, of any resolution, enlarged to the whole picture
        (height, width): each pixel gets the value of the nearest position, and `unseen` if `fit`
        cuts it off.

        >>> mask = np.array([[1, 2], [3, 4]], np.uint8)
        >>> Preprocess(size=32).unfit(mask, 2, 4)
        array([[0, 1, 2, 0],
               [0, 3, 4, 0]], dtype=uint8)
        """
        # The part of the picture that the model has seen.
        seen_height = height
        seen_width = width
        if self.crop == "tf":
            seen_height = self._tf_side(height, width)
            seen_width = seen_height
        elif self.crop == "centre":
            resized_height, resized_width = self._resized(height, width)
            seen_height = max(1, round(self.height / resized_height * height))
            seen_width = max(1, round(self.width / resized_width * width))
        rows = _nearest(mask.shape[0], seen_height)
        columns = _nearest(mask.shape[1], seen_width)
        found = np.full((height, width), unseen, np.uint8)
        top = (height - seen_height) // 2
        left = (width - seen_width) // 2
        found[top : top + seen_height, left : left + seen_width] = mask[rows][:, columns]
        return found

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Height and width before the centre is cut out."""
        if self.resize is not None:
            if height <= width:
                return self.resize, int(self.resize * width / height)
            return int(self.resize * height / width), self.resize
        # As small as it can be and still cover the result.
        is_wider = height * self.width <= width * self.height
        if is_wider:
            return self.height, int(self.height * width / height)
        return int(self.width * height / width), self.width

    def _tf_side(self, height: int, width: int) -> int:
        """The side of the square that ``crop="tf"`` cuts out of a picture."""
        return max(1, int(self.height / (self.height + 32) * min(height, width)))

    def memory_needed(self, width: int, height: int) -> int:
        """Bytes that preparing one image of this size takes at most, beside its own pixels."""
        if self.crop == "centre":
            new_height, new_width = self._resized(height, width)
        else:
            new_height = self.height
            new_width = self.width
        # Pillow's copy and its result have four bytes per pixel, the array has three. A filter
        # works first along one side, which leaves an image of one old and one new side.
        between = height * new_width
        resized = new_height * new_width
        row = 3 * self.height * self.width
        return 4 * (width * height + between) + 7 * resized + row * (1 + 2 * 4)

    def normalise(self, images: Pixels) -> Tensor:
        """Images as `fit` returns them, (N, height, width, 3) uint8, to (N, channels, height,
        width) float32."""
        # Here, so that a program that serves an ONNX graph does without it.
        import torch

        return torch.from_numpy(self._planes(images))

    def array(self, images: Iterable[Pixels]) -> NDArray[np.float32]:
        """uint8 images (H, W, 3) of any sizes to (N, channels, height, width) float32, without
        torch."""
        fitted = [self.fit(image) for image in images]
        if not fitted:
            return self._planes(np.empty((0, self.height, self.width, 3), np.uint8))
        return self._planes(np.stack(fitted))

    def __call__(self, images: Pixels | Tensor | Iterable[Pixels]) -> Tensor:
        """uint8 images, as one array (N, H, W, 3) or arrays (H, W, 3) of any sizes, to (N,
        channels, height, width) float32."""
        import torch

        if not isinstance(images, np.ndarray) and hasattr(images, "numpy"):
            images = images.numpy()
        if isinstance(images, np.ndarray) and (
            images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3
        ):
            raise ValueError(
                f"images must be uint8 (N, H, W, 3), not {images.dtype} {images.shape}"
            )
        return torch.from_numpy(self.array(images))

    def _planes(self, images: Pixels) -> NDArray[np.float32]:
        # In numpy and one thread: this runs beside the model, whose threads have the cores.
        if self.channels == 1:
            images = _grey(images)
        planes = np.ascontiguousarray(images.transpose(0, 3, 1, 2), dtype=np.float32)
        factor = 1 / (self.scale * np.asarray(self.std))
        offset = -np.asarray(self.mean) / self.std
        planes *= factor.astype(np.float32)[:, None, None]
        planes += offset.astype(np.float32)[:, None, None]
        return planes


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _checked_size(size: Any) -> int | tuple[int, int]:
    """One side of a square, or height and width; ValueError if it is neither."""
    sides = list(size) if isinstance(size, (list, tuple)) else [size, size]
    if len(sides) != 2 or not all(map(_is_whole, sides)):
        raise ValueError(
            f"size is {size!r}, expected a whole number of pixels, or height and width as in "
            "[48, 64]"
        )
    if min(sides) < 1:
        raise ValueError(f"size is {size!r}, expected at least 1 pixel")
    height, width = map(int, sides)
    return height if height == width else (height, width)


def _grey(images: Pixels) -> Pixels:
    """(N, H, W, 3) uint8 to (N, H, W, 1): the brightness of ITU-R 601, rounded as Pillow's ``"L"``,
    so that a grey picture keeps its values."""
    weights = np.array([19595, 38470, 7471], np.uint32)
    brightness = (images @ weights + 0x8000) >> 16
    return brightness.astype(np.uint8)[..., None]


def _checked_channels(name: str, values: Any) -> Channels:
    """One number for each of the three channels, or one for grey images."""
    try:
        numbers = tuple(map(float, values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3):
        raise ValueError(
            f"{name} is {values!r}, expected three numbers, one per channel, or one in brackets "
            "for a network that takes grey images"
        )
    return numbers


def _expect_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(known)}")


def _nearest(size: int, wanted: int) -> NDArray[np.int64]:
    """(wanted,) indices of pixels in a line of `size`: those that hold the centres of `wanted`
    equal parts of the line."""
    centres = (np.arange(wanted) + 0.5) * size / wanted
    return np.minimum(centres.astype(np.int64), size - 1)


PRESETS: dict[str, Preprocess] = {
    "cifar10": Preprocess(32, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": Preprocess(32, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "cifar-imagenet-statistics": Preprocess(32, IMAGENET_MEAN, IMAGENET_STD),
    "imagenet": Preprocess(224, IMAGENET_MEAN, IMAGENET_STD, resize=256),
    "resnet50-caffe": Preprocess(224, (123.68, 116.779, 103.939), resize=256, scale=1.0),
    "cifar10-densenet": Preprocess(32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    **{
        f"efficientnet-lite{number}": Preprocess(
            size, (127.0,) * 3, (128.0,) * 3, crop="tf", interpolation="bicubic", scale=1.0
        )
        for number, size in enumerate((224, 240, 260))
    },
    # The whole picture, whatever its sides are, so that a map of it is one of the picture.
    "deeplab-voc": Preprocess(513, (127.5,) * 3, (127.5,) * 3, crop="none", scale=1.0),
}
"""Preprocessings by name.

``cifar-imagenet-statistics`` is that of the public CIFAR-10 ResNet-20/56 checkpoints,
``cifar10-densenet`` of the public DenseNet-BC-100-12, ``resnet50-caffe`` of Caffe's and Keras'
ResNet-50 (our network takes RGB; theirs took BGR), ``deeplab-voc`` of the public DeepLabV3.
"""
