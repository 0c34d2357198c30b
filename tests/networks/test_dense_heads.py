"""Models of pixels: one row per position of the map that their 1×1 convolution sees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdbd.core.grid import Grid
from fdbd.networks.classifier import Classifier


class Segmenter(nn.Module):
    """Stride 4, a 1×1 convolution, and logits that are resized to the images."""

    def __init__(self, classes: int = 5, end: str = "resize") -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 4, stride=4)
        self.classifier = nn.Conv2d(8, classes, 1)
        self.end = end

    def forward(self, images: Tensor) -> object:
        maps = self.classifier(self.backbone(images).relu())
        if self.end == "none":
            return maps
        if self.end == "masks":
            return maps.argmax(1)
        resized = F.interpolate(maps, images.shape[2:], mode="bilinear", align_corners=False)
        return {"out": resized.softmax(1) if self.end == "softmax" else resized}


def images(count: int = 2, height: int = 24, width: int = 32) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("end", ["none", "resize"])
def test_each_position_is_a_row_and_the_grid_leads_back(end: str) -> None:
    torch.manual_seed(0)
    model = Segmenter(end=end).eval()
    batch = Classifier(model)(images())
    assert batch.grid == Grid(2, 6, 8)
    assert batch.features.shape == (96, 8)
    assert batch.logits.shape == (96, 5)
    maps = model.backbone(images()).relu()
    assert torch.equal(batch.grid.to_maps(batch.features), maps)
    torch.testing.assert_close(batch.grid.to_maps(batch.logits), model.classifier(maps))
    # The first row of the second image is its upper left corner.
    assert torch.equal(batch.features[48], maps[1, :, 0, 0])
    assert torch.equal(batch.features[48 + 8 + 3], maps[1, :, 1, 3])


def test_a_map_of_one_position_that_the_model_enlarges_is_still_a_map() -> None:
    batch = Classifier(Segmenter().eval())(images(height=4, width=4))
    assert batch.grid == Grid(2, 1, 1)


def test_what_follows_the_maps_is_noticed_unless_the_head_is_named() -> None:
    with pytest.raises(ValueError, match=r"gives \(2, 5, 24, 32\) and .* gives \(2, 5, 6, 8\)"):
        Classifier(Segmenter(end="softmax").eval())(images())
    named = Classifier(Segmenter(end="softmax").eval(), head="classifier")
    assert named(images()).grid == Grid(2, 6, 8)


class WithAuxiliary(nn.Module):
    """Two heads on the same features; the second, for training alone, stands last."""

    def __init__(self, is_enlarged: bool) -> None:
        super().__init__()
        self.main = Segmenter(end="none")
        self.auxiliary = nn.Conv2d(8, 5, 1)
        self.is_enlarged = is_enlarged

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.main.backbone(images).relu()
        maps = self.main.classifier(features)
        if self.is_enlarged:
            maps = F.interpolate(maps, images.shape[2:], mode="bilinear")
        return maps, self.auxiliary(features)


@pytest.mark.parametrize("is_enlarged", [False, True])
def test_the_error_names_the_head_that_the_maps_come_from(is_enlarged: bool) -> None:
    model = WithAuxiliary(is_enlarged).eval()
    with pytest.raises(ValueError, match=r"pass head='main\.classifier'"):
        Classifier(model, head=None)(images())
    assert Classifier(model, head="main.classifier")(images()).grid == Grid(2, 6, 8)


def test_maps_under_an_unknown_key_of_a_dict_need_the_heads_name() -> None:
    class Named(Segmenter):
        def forward(self, images: Tensor) -> object:
            return {"semantic": super().forward(images)}

    model = Named(end="none").eval()
    with pytest.raises(ValueError, match=r"a dict with 'semantic'.*pass head='classifier'"):
        Classifier(model)(images())
    assert Classifier(model, head="classifier")(images()).grid == Grid(2, 6, 8)


def test_a_model_that_ends_in_masks_works_with_its_head_named() -> None:
    model = Segmenter(end="masks").eval()
    with pytest.raises(ValueError, match="pass head= to name the layer"):
        Classifier(model)(images())
    batch = Classifier(model, head="classifier")(images())
    assert torch.equal(batch.grid.to_maps(batch.logits.argmax(1)), model(images()))


def test_label_maps_of_the_images_become_one_label_per_row() -> None:
    labels = torch.arange(6)[:, None] * 8 + torch.arange(8)
    full = labels.repeat_interleave(4, 0).repeat_interleave(4, 1)
    batch = Classifier(Segmenter().eval())((images(), torch.stack([full, full + 100])))
    assert torch.equal(batch.labels, torch.cat([torch.arange(48), torch.arange(48) + 100]))


def test_label_maps_may_keep_their_one_channel() -> None:
    labels = torch.randint(5, (2, 24, 32))
    classifier = Classifier(Segmenter().eval())
    with_channel = classifier((images(), labels[:, None]))
    assert torch.equal(with_channel.labels, classifier((images(), labels)).labels)


def test_labels_that_do_not_belong_to_the_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"label maps have shape \(2,\)"):
        Classifier(Segmenter().eval())((images(), torch.tensor([0, 1])))
    plain = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ValueError, match="one prediction per sample"):
        Classifier(plain)((torch.randn(2, 3, 2, 2), torch.zeros(2, 4, 4, dtype=torch.long)))


def test_layers_of_a_model_of_pixels_are_refused() -> None:
    with pytest.raises(ValueError, match="leave layers out"):
        Classifier(Segmenter().eval(), layers=["backbone"])(images())


def test_a_binary_model_of_pixels_gives_two_columns() -> None:
    model = Segmenter(classes=1).eval()
    batch = Classifier(model)(images())
    assert batch.logits.shape == (96, 2)
    difference = batch.logits[:, 1] - batch.logits[:, 0]
    expected = model.classifier(model.backbone(images()).relu())
    torch.testing.assert_close(batch.grid.to_maps(difference), expected[:, 0])


def test_the_rows_of_channels_last_maps_are_no_copy() -> None:
    maps = torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last)
    rows = Grid.from_maps(maps).to_rows(maps)
    assert rows.data_ptr() == maps.data_ptr()


def test_some_rows_have_no_grid_and_moves_keep_it() -> None:
    batch = Classifier(Segmenter().eval())(images())
    assert batch.cpu().grid == batch.grid
    assert batch.rows(slice(0, 3)).grid is None


TORCHVISION = {
    "deeplabv3_mobilenet_v3_large": ("classifier.4", 256),
    "lraspp_mobilenet_v3_large": ("classifier.low_classifier+classifier.high_classifier", 40 + 128),
    "fcn_resnet50": ("classifier.4", 512),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * ("fcn" in name)) for name in TORCHVISION]
)
@pytest.mark.parametrize("aux_loss", [False, True])
def test_torchvisions_segmentation_models_give_rows(name: str, aux_loss: bool) -> None:
    models = pytest.importorskip("torchvision.models.segmentation")
    options = {} if name.startswith("lraspp") else {"aux_loss": aux_loss}
    torch.manual_seed(0)
    model = getattr(models, name)(weights=None, weights_backbone=None, num_classes=7, **options)
    model.eval()
    classifier = Classifier(model)
    with torch.inference_mode():
        batch = classifier(images(2, 64, 96))
        output = model(images(2, 64, 96))["out"]
    head, features = TORCHVISION[name]
    assert classifier.head_name == head
    assert batch.features.shape[1] == features
    torch.testing.assert_close(classifier.head(batch.features), batch.logits, atol=1e-4, rtol=1e-4)
    maps = batch.grid.to_maps(batch.logits)
    resized = F.interpolate(maps, output.shape[2:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(resized, output, atol=1e-4, rtol=1e-4)
    again = Classifier(model, head=classifier.head_name)
    assert torch.equal(again.head.weight, classifier.head.weight)


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    if name == "segformer":
        config = transformers.SegformerConfig(
            num_labels=7,
            depths=[1, 1, 1, 1],
            hidden_sizes=[8, 16, 24, 32],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=24,
        )
        return transformers.SegformerForSemanticSegmentation(config)
    backbone = transformers.ConvNextConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone,
        num_labels=7,
        hidden_size=16,
        auxiliary_channels=8,
        auxiliary_in_channels=24,
    )
    return transformers.UperNetForSemanticSegmentation(config)


@pytest.mark.parametrize("name", ["segformer", "upernet"])
def test_hugging_faces_segmentation_models_give_rows(name: str) -> None:
    torch.manual_seed(0)
    model = hugging_face(name).eval()
    classifier = Classifier(model)
    with torch.inference_mode():
        batch = classifier({"pixel_values": images(2, 64, 96)})
        output = model(pixel_values=images(2, 64, 96)).logits
    assert classifier.head_name == "decode_head.classifier"
    maps = batch.grid.to_maps(batch.logits)
    resized = F.interpolate(maps, output.shape[2:], mode="bilinear", align_corners=False)
    torch.testing.assert_close(resized, output, atol=1e-4, rtol=1e-4)


def test_rows_of_pixels_compile_and_export() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Segmenter().eval())
    expected = classifier(images())
    with torch.no_grad():
        compiled = torch.compile(classifier, fullgraph=True, backend="aot_eager")(images())
    assert compiled.grid == expected.grid
    torch.testing.assert_close(compiled.features, expected.features)
