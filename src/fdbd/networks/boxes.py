"""Networks that find boxes, taken apart: for each detection, the features that its class layer
read.

Two families have a class layer that is one linear map per box: torchvision's Faster R-CNN and
Mask R-CNN (``roi_heads.box_predictor.cls_score``, whose class 0 is the background), and Hugging
Face's DETR (``class_labels_classifier``, whose last class is "no object")."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdbd.core.batch import Head

NOT_SUPPORTED = (
    "has no class layer that is one linear map per box: supported are torchvision's Faster R-CNN "
    "(cls_score) and Hugging Face's DETR (class_labels_classifier); of detectors that classify "
    "anchors by a convolution with several sigmoid outputs per position (RetinaNet, FCOS, SSD, "
    "YOLO), or by several layers, take the features of each box by hand and give them to a guard "
    "as fdbd.Batch(features)"
)


class Detections(NamedTuple):
    """The D detections of one image, and what the class layer saw of each."""

    boxes: Tensor
    """(D, 4) corners x1, y1, x2, y2: in pixels of the image, or for DETR as shares of its sides."""
    labels: Tensor
    """(D,) classes, as the network numbers them."""
    confidences: Tensor
    """(D,) the network's own scores of its classes, from 0 to 1."""
    features: Tensor
    """(D, P) what the class layer read."""
    logits: Tensor
    """(D, C) what it gave, with the background or "no object"."""

    def chosen(self, which: Tensor) -> Detections:
        """The detections that a mask (D,) or indices select."""
        return Detections._make(part[which] for part in self)


class BoxNetwork(ABC):
    """A network that finds boxes. One call runs at a time."""

    def __init__(self, model: nn.Module, layer: nn.Linear) -> None:
        self.model = model
        self._layer = layer
        self._lock = threading.Lock()

    @property
    def head(self) -> Head:
        """The class layer with its present weights, background or "no object" included."""
        return Head.from_linear(self._layer)

    def detections(self, inputs: Any) -> list[Detections]:
        """The detections in each image of a batch, by the network in evaluation mode."""
        seen: dict[str, Any] = {}

        def note(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            seen["features"] = given[0]
            seen["logits"] = result

        with self._lock, torch.no_grad():
            was_training = self.model.training
            handle = self._layer.register_forward_hook(note)
            self.model.eval()
            try:
                return self._detections(inputs, seen)
            finally:
                handle.remove()
                self.model.train(was_training)

    @abstractmethod
    def _detections(self, inputs: Any, seen: dict[str, Any]) -> list[Detections]:
        """Run the network; `seen` then holds what the class layer was given and gave."""


class FasterRCNN(BoxNetwork):
    """torchvision's Faster R-CNN and Mask R-CNN. Images are a list of tensors (3, H, W)."""

    def _detections(self, inputs: Any, seen: dict[str, Any]) -> list[Detections]:
        _check_images(inputs, self._layer.weight.dtype)
        model: Any = self.model
        roi_heads = model.roi_heads

        def note_boxes(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            seen["proposals"] = given[1]
            seen["sizes"] = given[2]
            # Before the boxes are brought back to the images' own sizes, in place.
            found = []
            for of_image in result[0]:
                found.append({name: part.clone() for name, part in of_image.items()})
            seen["found"] = found

        def note_shifts(module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            seen["shifts"] = result[1]

        handles = [
            roi_heads.register_forward_hook(note_boxes),
            roi_heads.box_predictor.register_forward_hook(note_shifts),
        ]
        try:
            outputs = model(inputs)
        finally:
            for handle in handles:
                handle.remove()
        counts = [len(proposals) for proposals in seen["proposals"]]
        decoded = roi_heads.box_coder.decode(seen["shifts"], seen["proposals"])
        # Without any proposal, torchvision leaves the boxes of all classes side by side.
        decoded = decoded.reshape(sum(counts), self._layer.out_features, 4)
        boxes_of_images = decoded.split(counts)
        features_of_images = seen["features"].split(counts)
        logits_of_images = seen["logits"].split(counts)
        found = []
        for place, output in enumerate(outputs):
            logits = logits_of_images[place]
            rows = _rows_of_survivors(
                seen["found"][place], boxes_of_images[place], logits, seen["sizes"][place]
            )
            found.append(
                Detections(
                    output["boxes"],
                    output["labels"],
                    output["scores"],
                    features_of_images[place][rows],
                    logits[rows],
                )
            )
        return found


def _rows_of_survivors(
    found: dict[str, Tensor], decoded: Tensor, logits: Tensor, size: tuple[int, int]
) -> Tensor:
    """(D,) which of the R proposals each detection came from.

    torchvision does not say; but a detection's box is that of its proposal and class, cut off at
    the image's border, and its confidence the softmax there, so the proposal that comes nearest is
    the one."""
    height, width = size
    labels = found["labels"]
    if not len(labels):
        return labels
    # (R, D, 4) and (R, D): each proposal, with the class of each detection.
    boxes = decoded[:, labels]
    horizontal = boxes[..., 0::2].clamp(0, width)
    vertical = boxes[..., 1::2].clamp(0, height)
    clipped = torch.stack([horizontal, vertical], dim=-1).flatten(2)
    confidences = logits.softmax(dim=1)[:, labels]
    distance = (clipped - found["boxes"]).abs().amax(dim=2)
    distance = distance + (confidences - found["scores"]).abs()
    return distance.argmin(dim=0)


class DETR(BoxNetwork):
    """Hugging Face's DETR. Inputs are pixel values (N, 3, H, W), or a dict with them and their
    mask.

    Args:
        min_confidence: queries with a lower one have found nothing.
    """

    def __init__(self, model: nn.Module, layer: nn.Linear, min_confidence: float) -> None:
        super().__init__(model, layer)
        self._min_confidence = min_confidence

    def _detections(self, inputs: Any, seen: dict[str, Any]) -> list[Detections]:
        _check_pixel_values(inputs, self._layer.weight.dtype)
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        confidences, labels = output.logits.softmax(dim=-1)[..., :-1].max(dim=-1)
        centre, extent = output.pred_boxes.split(2, dim=-1)
        boxes = torch.cat([centre - extent / 2, centre + extent / 2], dim=-1)
        found = []
        for place, of_image in enumerate(confidences):
            all_queries = Detections(
                boxes[place],
                labels[place],
                of_image,
                seen["features"][place],
                seen["logits"][place],
            )
            found.append(all_queries.chosen(of_image >= self._min_confidence))
        return found


def _check_images(inputs: Any, dtype: torch.dtype) -> None:
    """ValueError unless the inputs are images as torchvision's detectors take them, in the dtype of
    the network's weights."""
    expected = f"expected a list of at least one image, each a tensor of {dtype} (3, H, W)"
    is_batch = isinstance(inputs, (list, tuple)) or (
        isinstance(inputs, Tensor) and inputs.ndim == 4
    )
    if not is_batch or not len(inputs):
        raise ValueError(f"the inputs are {_described(inputs)}, {expected}")
    for place, image in enumerate(inputs):
        is_image = isinstance(image, Tensor) and image.ndim == 3 and image.dtype == dtype
        # torchvision makes three channels of one.
        if not is_image or image.shape[0] not in (1, 3):
            raise ValueError(f"image {place} is {_described(image)}, {expected}")


def _check_pixel_values(inputs: Any, dtype: torch.dtype) -> None:
    """ValueError unless the inputs are what DETR takes, in the dtype of the network's weights."""
    pixels = inputs.get("pixel_values") if isinstance(inputs, dict) else inputs
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or pixels.dtype != dtype:
        raise ValueError(
            f"the pixel values are {_described(pixels)}, expected a tensor of {dtype} (N, 3, H, W),"
            " or a dict with it as pixel_values"
        )


def _described(value: Any) -> str:
    """What a value is, for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    if isinstance(value, (list, tuple)) and not value:
        return "empty"
    return f"of type {type(value).__name__}"


def box_network(model: nn.Module, min_confidence: float = 0.5) -> BoxNetwork:
    """The network taken apart; ValueError if it is of another family."""
    layer = _faster_rcnn_layer(model)
    if layer is not None:
        return FasterRCNN(model, layer)
    layer = _detr_layer(model)
    if layer is not None:
        return DETR(model, layer, min_confidence)
    raise ValueError(f"{type(model).__name__} {NOT_SUPPORTED}")


def finds_boxes(model: nn.Module) -> bool:
    """Whether `box_network` takes the model."""
    return _faster_rcnn_layer(model) is not None or _detr_layer(model) is not None


def _faster_rcnn_layer(model: nn.Module) -> nn.Linear | None:
    predictor = getattr(getattr(model, "roi_heads", None), "box_predictor", None)
    layer = getattr(predictor, "cls_score", None)
    return layer if isinstance(layer, nn.Linear) else None


def _detr_layer(model: nn.Module) -> nn.Linear | None:
    layer = getattr(model, "class_labels_classifier", None)
    return layer if isinstance(layer, nn.Linear) else None
