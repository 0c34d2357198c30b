"""DeepLabV3 from TensorFlow's tensors: the module computes what the frozen graph does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fdbd
from fdbd.networks import deeplab
from fdbd.networks.by_name import model_by_name
from fdbd.networks.public import public_network
from fdbd.util.download import packed_name

# Input width, inner width, output width, stride and dilation of each block, as in the graph.
BLOCKS = (
    (32, 32, 16, 1, 1),
    (16, 96, 24, 2, 1),
    (24, 144, 24, 1, 1),
    (24, 144, 32, 2, 1),
    (32, 192, 32, 1, 1),
    (32, 192, 32, 1, 1),
    (32, 192, 64, 1, 1),
    (64, 384, 64, 1, 2),
    (64, 384, 64, 1, 2),
    (64, 384, 64, 1, 2),
    (64, 384, 96, 1, 2),
    (96, 576, 96, 1, 2),
    (96, 576, 96, 1, 2),
    (96, 576, 160, 1, 2),
    (160, 960, 160, 1, 4),
    (160, 960, 160, 1, 4),
    (160, 960, 320, 1, 4),
)


def graph_tensors():
    """Random tensors under the names and in the shapes of the frozen graph."""
    random = np.random.default_rng(0)
    tensors = {}

    def add(name, *shape):
        fan_in = max(1, int(np.prod(shape[:-1])))
        tensors[name] = (random.standard_normal(shape) / fan_in**0.5).astype(np.float32)

    def merged(name, size, width_in, width):
        add(f"{name}/Conv2D/merged_input", size, size, width_in, width)
        add(f"{name}/BatchNorm/FusedBatchNorm/Offset", width)

    merged("MobilenetV2/Conv", 3, 3, 32)
    for number, (width_in, inner, width, _, _) in enumerate(BLOCKS):
        name = "MobilenetV2/expanded_conv" + (f"_{number}" if number else "")
        if number:
            merged(f"{name}/expand", 1, width_in, inner)
        add(f"{name}/depthwise/depthwise_weights", 3, 3, inner, 1)
        add(f"{name}/depthwise/BatchNorm/FusedBatchNorm/Scaled", inner)
        add(f"{name}/depthwise/BatchNorm/FusedBatchNorm/Offset", inner)
        merged(f"{name}/project", 1, inner, width)
    merged("aspp0", 1, 320, 256)
    merged("image_pooling", 1, 320, 256)
    merged("concat_projection", 1, 512, 256)
    add("logits/semantic/weights", 1, 1, 256, 21)
    add("logits/semantic/biases", 21)
    return tensors


def graph_forward(tensors, x):
    """What the frozen graph computes, with its padding "SAME", node by node."""

    def same(x, stride, dilation):
        padding = []
        for size in (x.shape[3], x.shape[2]):
            reach = 2 * dilation + 1
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
            padding += [total // 2, total - total // 2]
        return F.pad(x, padding)

    def merged(x, name):
        kernel = torch.from_numpy(tensors[f"{name}/Conv2D/merged_input"]).permute(3, 2, 0, 1)
        stride = 1
        if kernel.shape[2] == 3:
            stride = 2
            x = same(x, 2, 1)
        return F.conv2d(x, kernel, stride=stride) + offset(name)

    def offset(name):
        values = tensors[f"{name}/BatchNorm/FusedBatchNorm/Offset"]
        return torch.from_numpy(values)[:, None, None]

    x = merged(x, "MobilenetV2/Conv").clamp(0, 6)
    for number, (width_in, inner, width, stride, dilation) in enumerate(BLOCKS):
        name = "MobilenetV2/expanded_conv" + (f"_{number}" if number else "")
        y = merged(x, f"{name}/expand").clamp(0, 6) if number else x
        kernel = torch.from_numpy(tensors[f"{name}/depthwise/depthwise_weights"])
        y = F.conv2d(
            same(y, stride, dilation),
            kernel.permute(2, 3, 0, 1),
            stride=stride,
            dilation=dilation,
            groups=inner,
        )
        factor = tensors[f"{name}/depthwise/BatchNorm/FusedBatchNorm/Scaled"]
        y = y * torch.from_numpy(factor)[:, None, None] + offset(f"{name}/depthwise")
        y = merged(y.clamp(0, 6), f"{name}/project")
        x = x + y if stride == 1 and width_in == width else y
    pooled = F.relu(merged(F.avg_pool2d(x, x.shape[2:]), "image_pooling"))
    enlarged = F.interpolate(pooled, x.shape[2:], mode="bilinear", align_corners=True)
    both = torch.cat([enlarged, F.relu(merged(x, "aspp0"))], dim=1)
    features = F.relu(merged(both, "concat_projection"))
    weight = torch.from_numpy(tensors["logits/semantic/weights"]).permute(3, 2, 0, 1)
    return F.conv2d(features, weight, torch.from_numpy(tensors["logits/semantic/biases"]))


def test_the_module_computes_what_the_frozen_graph_does():
    tensors = graph_tensors()
    model = deeplab.DeepLabV3MobileNetV2().eval()
    model.load_state_dict(deeplab.torch_weights(tensors), strict=True)
    images = torch.randn(2, 3, 65, 65, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(model(images), graph_forward(tensors, images))


def test_the_head_of_deeplab_is_found_and_gives_one_row_per_position():
    model = deeplab.DeepLabV3MobileNetV2().eval()
    classifier = fdbd.Classifier(model)
    batch = classifier(torch.randn(2, 3, 65, 65))
    assert classifier.head_name == "classifier"
    assert batch.features.shape == (2 * 9 * 9, 256)


def test_the_tarball_of_a_package_of_a_scope_is_named_as_npm_names_it():
    assert packed_name("@codait/max-image-segmenter", "0.3.0") == public_network("deeplab-voc").file


def test_the_published_weights_give_a_map_of_vocs_classes():
    try:
        named = model_by_name("public:deeplab-voc", device="cpu")
    except FileNotFoundError as error:
        pytest.skip(str(error))
    grey = named.preprocess([np.full((100, 160, 3), 128, np.uint8)])
    with torch.inference_mode():
        logits = named.model(grey)
    assert logits.shape == (1, 21, 65, 65)
    # There is little to see in a grey picture.
    assert named.class_names[0] == "background"
    assert (logits.argmax(dim=1) == 0).float().mean() > 0.5
