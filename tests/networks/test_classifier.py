"""The linear head is found, its exact input and output come back, and the model stays as it was."""

from __future__ import annotations

import copy
import io
import pickle
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fdbd.core.batch import Batch
from fdbd.networks.classifier import Classifier, call_model, split_batch


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Small(nn.Module):
    """A convolutional network with batch norm, dropout and something after the pooling; `end`
    follows the head."""

    def __init__(self, classes: int = 4, end=None) -> None:
        super().__init__()
        # Registered first, so that the order of registration does not help.
        self.fc = nn.Linear(12, classes)
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Conv2d(6, 12, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.last(x).relu().mean((2, 3))
        out = self.fc(self.drop(x))
        return out if self.end is None else self.end(out)


def small(classes: int = 4, end=None) -> Small:
    torch.manual_seed(0)
    return Small(classes, end).eval()


def images(n: int = 3, size: int = 8) -> Tensor:
    return torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(n))


def hook_count(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks)
        + len(module._forward_pre_hooks)
        + len(module._forward_hooks_with_kwargs)
        for module in model.modules()
    )


def check_model(model: nn.Module, inputs, **options) -> Batch:
    """What must hold for every supported model."""
    model.eval()
    with torch.no_grad():
        # Heads that start at zero would make every check pass.
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(std=0.02)
        before = call_model(model, inputs)
        classifier = Classifier(model, **options)
        batch = classifier(inputs)
        after = call_model(model, inputs)
    if not isinstance(before, Tensor):
        before = before.logits
        after = after.logits
    assert batch.features.shape == (len(before), classifier.head.num_features)
    torch.testing.assert_close(batch.logits, before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(classifier.head(batch.features), batch.logits, atol=1e-5, rtol=1e-5)
    assert torch.equal(before, after)
    return batch


# --- models
# -----------------------------------------------------------------------------------------------------------

TORCHVISION = {
    "resnet18": ("fc", 32),
    "densenet121": ("classifier", 32),
    "efficientnet_b0": ("classifier.1", 32),
    "mobilenet_v3_small": ("classifier.3", 32),
}
TORCHVISION_SLOW = {
    "resnet50": ("fc", 64),
    "swin_t": ("head", 64),
    "convnext_tiny": ("classifier.2", 64),
    "vit_b_16": ("heads.head", 224),
    "vgg16": ("classifier.6", 32),
    "mobilenet_v3_large": ("classifier.3", 64),
    "regnet_y_400mf": ("fc", 64),
    "shufflenet_v2_x0_5": ("fc", 64),
    "googlenet": ("fc", 64),
}


def check_torchvision(name: str, head: str, size: int) -> None:
    models = pytest.importorskip("torchvision.models")
    options = {"init_weights": False} if name == "googlenet" else {}
    model = getattr(models, name)(weights=None, **options)
    check_model(model, images(2, size))
    assert Classifier(model).head_name == head


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_models_give_features_and_logits(name: str) -> None:
    check_torchvision(name, *TORCHVISION[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION_SLOW)
def test_larger_torchvision_models_give_features_and_logits(name: str) -> None:
    check_torchvision(name, *TORCHVISION_SLOW[name])


def test_squeezenet_is_refused_because_it_pools_after_its_head() -> None:
    models = pytest.importorskip("torchvision.models")
    model = models.squeezenet1_1(weights=None).eval()
    for head in (None, "classifier.1"):
        with pytest.raises(
            ValueError, match=r"\(2, 512, 3, 3\), expected \(N, 512\).*not supported"
        ):
            Classifier(model, head)(images(2, 64))


@pytest.mark.parametrize("head", [None, "roi_heads.box_predictor.cls_score"])
def test_a_detection_model_is_not_a_classifier(head: str | None) -> None:
    detection = pytest.importorskip("torchvision.models.detection")
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None
    ).eval()
    with pytest.raises(ValueError, match=r"FasterRCNN finds boxes.*BoxGuard"):
        Classifier(model, head)


TIMM = [
    ("resnet10t", 64),
    ("vit_tiny_patch16_224", 224),
    ("convnext_atto", 64),  # NormMlp head
    ("mobilenetv3_small_050", 64),
    ("regnetx_002", 64),
]
TIMM_SLOW = [
    ("levit_128s", 224),  # batch norm inside the head
    ("efficientnet_lite0", 64),
    ("ghostnet_050", 64),
    ("deit_tiny_distilled_patch16_224", 224),  # two heads, averaged
    ("crossvit_tiny_240", 240),  # a head for each branch, averaged
    ("swin_tiny_patch4_window7_224", 224),
    ("mixer_s32_224", 224),
    ("beit_base_patch16_224", 224),
    ("cait_xxs24_224", 224),
    ("vgg11", 64),  # convolutional pre-logits
    ("nfnet_l0", 64),
    ("dm_nfnet_f0", 64),
    ("xcit_nano_12_p16_224", 224),
    ("densenet121", 64),
    ("edgenext_xx_small", 64),
    ("poolformer_s12", 64),
    ("tiny_vit_5m_224", 224),
    ("mobilevit_xxs", 64),
    ("coatnet_nano_rw_224", 224),
    ("maxvit_tiny_rw_224", 224),
    ("efficientformer_l1", 224),  # distilled, averaged
    ("repvit_m1", 64),  # two heads inside one module, averaged
    ("repvit_m0_9", 64),
    ("hgnet_tiny", 64),
    ("fastvit_t8", 64),
    ("eva02_tiny_patch14_336", 336),
]


@pytest.mark.parametrize(("name", "size"), TIMM)
def test_timm_families_give_features_and_logits(name: str, size: int) -> None:
    timm = pytest.importorskip("timm")
    check_model(timm.create_model(name, pretrained=False, num_classes=7), images(2, size))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), TIMM_SLOW)
def test_more_timm_families_give_features_and_logits(name: str, size: int) -> None:
    timm = pytest.importorskip("timm")
    check_model(timm.create_model(name, pretrained=False, num_classes=7), images(2, size))


def test_the_page_on_heads_lists_the_architectures_that_are_tested() -> None:
    page = Path(__file__).parents[2] / "docs" / "heads.md"
    text = page.read_text(encoding="utf-8")
    section = text.partition("## Architectures\n")[2].partition("\n## ")[0]
    _, of_torchvision, of_timm = section.partition("\nOne network")[0].split("\n- ")
    names = set(re.findall(r"`(\w+)`", of_torchvision))
    assert names == {*TORCHVISION, *TORCHVISION_SLOW}
    names = set(re.findall(r"`(\w+)`", of_timm))
    assert names == {name for name, _ in [*TIMM, *TIMM_SLOW]}


def test_averaged_heads_are_one_head_on_their_inputs_side_by_side() -> None:
    timm = pytest.importorskip("timm")
    model = timm.models.levit.LevitDistilled(
        img_size=64, num_classes=5, embed_dim=(16, 32), num_heads=(2, 2), depth=(1, 1), key_dim=8
    )
    batch = check_model(model, images(2, 64))
    assert batch.features.shape == (2, 64)
    name = Classifier(model).head_name
    assert name == "head.linear+head_dist.linear"
    assert torch.equal(Classifier(model, head=name)(images(2, 64)).features, batch.features)


HF_IMAGE = {
    "ViT": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "DeiT": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "Beit": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    },
    "ConvNext": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    "Swin": {
        "image_size": 32,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
    },
}
HF_TEXT = ["Bert", "Roberta", "Electra", "DebertaV2", "Albert", "Llama", "Qwen2"]
TOKENS = {
    "input_ids": torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
}


@pytest.mark.parametrize("name", HF_IMAGE)
@pytest.mark.parametrize("as_dict", [False, True])
def test_hugging_face_image_classifiers_give_features_and_logits(name: str, as_dict: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=5, **HF_IMAGE[name])
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    inputs = images(2, 32)
    if as_dict:
        inputs = {"pixel_values": inputs}
    check_model(model, inputs)


def test_hugging_face_model_with_teacher_averages_two_heads() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DeiTConfig(num_labels=5, **HF_IMAGE["DeiT"])
    batch = check_model(transformers.DeiTForImageClassificationWithTeacher(config), images(2, 32))
    assert batch.features.shape == (2, 64)


@pytest.mark.parametrize("name", HF_TEXT)
def test_hugging_face_text_classifiers_give_features_and_logits(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    check_model(getattr(transformers, f"{name}ForSequenceClassification")(config), TOKENS)


def test_distilbert_gives_features_and_logits_and_drops_labels() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=100, dim=32, n_layers=1, n_heads=2, hidden_dim=64, num_labels=3
    )
    model = transformers.DistilBertForSequenceClassification(config)
    check_model(model, TOKENS)
    batch = Classifier(model)({**TOKENS, "labels": torch.tensor([2, 0])})
    assert batch.labels.tolist() == [2, 0]


def test_the_kept_token_of_a_padded_sequence_gives_the_features() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=100,
        n_embd=32,
        n_layer=1,
        n_head=2,
        num_labels=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2ForSequenceClassification(config).eval()
    batch = check_model(model, TOKENS)
    hidden = model.transformer(**TOKENS).last_hidden_state
    torch.testing.assert_close(
        batch.features, torch.stack([hidden[0, 4], hidden[1, 2]]).detach(), atol=1e-6, rtol=0
    )


def test_token_classifiers_are_refused_with_their_shapes() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"\(2, 7, 5\), expected \(N, 5\)"):
        Classifier(model)(torch.randn(2, 7, 6))


def test_a_head_before_the_mean_over_tokens_is_refused() -> None:
    class MeanOfTokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).mean(1)

    with pytest.raises(ValueError, match="does not keep one"):
        Classifier(MeanOfTokens())(torch.randn(2, 7, 6))


def test_a_1x1_convolution_after_global_pooling_is_a_head() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Dropout(),
        nn.Conv2d(8, 5, 1),
        nn.Flatten(),
    )
    batch = check_model(model, images())
    assert batch.features.shape == (3, 8)
    assert Classifier(model).head_name == "4"


def test_plain_sequentials_and_a_bare_linear_layer() -> None:
    check_model(
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Identity()), torch.randn(4, 6)
    )
    assert Classifier(nn.Linear(6, 3)).head_name == ""
    check_model(nn.Linear(6, 3), torch.randn(4, 6))


def test_the_head_of_a_wrapped_timm_model_is_found() -> None:
    timm = pytest.importorskip("timm")
    model = nn.Sequential(nn.BatchNorm2d(3), timm.create_model("resnet10t", num_classes=3))
    check_model(model, images(2, 32))
    assert Classifier(model).head_name == "1.fc"


def test_a_head_on_a_timm_backbone_without_classifier_is_found() -> None:
    timm = pytest.importorskip("timm")
    backbone = timm.create_model("resnet10t", num_classes=0)
    check_model(nn.Sequential(backbone, nn.Linear(512, 3)), images(2, 32))
    with pytest.raises(ValueError, match="num_classes above 0"):
        Classifier(backbone)


def test_a_binary_head_gives_two_columns() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 1), nn.Flatten(0)).eval()
    x = torch.randn(4, 3, 2, 2)
    classifier = Classifier(model)
    batch = classifier(x)
    assert batch.logits.shape == (4, 2)
    torch.testing.assert_close(batch.logits.softmax(1)[:, 1], model(x).sigmoid())
    torch.testing.assert_close(classifier.head(batch.features), batch.logits)


# --- refusals and explicit heads
# --------------------------------------------------------------------------------------


def test_a_model_whose_last_layer_is_not_linear_lists_the_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Softmax(1))
    with pytest.raises(
        ValueError, match=r"something follows it.*softmax.*2 \(5 to 3\), 0 \(6 to 5\)"
    ):
        Classifier(model)(torch.randn(2, 6))
    with pytest.raises(ValueError, match="no linear layer"):
        Classifier(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))


@pytest.mark.parametrize(
    "end", [torch.relu, torch.relu_, lambda x: x.log_softmax(1), lambda x: 30 * x.tanh()]
)
def test_what_follows_the_head_in_code_is_noticed_at_the_first_call(end) -> None:
    classifier = Classifier(small(end=end))
    # And at each further call.
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"'fc'.*(something follows|not weight).*linear layers found"
        ):
            classifier(images(8))


def test_a_softmax_after_the_head_is_accepted_when_the_head_is_named() -> None:
    model = small(end=lambda x: x.softmax(1))
    batch = Classifier(model, head="fc")(images())
    torch.testing.assert_close(batch.logits.softmax(1), model(images()))
    assert torch.equal(Classifier(model, head=model.fc)(images()).logits, batch.logits)


def test_a_wrong_guess_lists_the_layers_to_choose_from() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(5, 5)
            self.into = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(x).relu())

    model = Backwards()
    with pytest.raises(
        ValueError,
        match=r"not that of its linear layer 'into'; it is that of 'out': pass head='out'",
    ):
        Classifier(model)(torch.randn(3, 5))
    check_model(model, torch.randn(3, 5), head="out")


def test_a_head_that_is_not_linear_as_it_stands_is_refused() -> None:
    class Squashed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.tanh())

    with pytest.raises(ValueError, match="not weight · input"):
        Classifier(nn.Sequential(nn.Linear(6, 5), Squashed(5, 3)))(torch.randn(4, 6))


def test_bad_head_arguments_say_what_is_there() -> None:
    model = small()
    with pytest.raises(ValueError, match=r"no module named 'fcc'; did you mean.*fc"):
        Classifier(model, head="fcc")
    with pytest.raises(ValueError, match=r"'conv' is a Conv2d.*fc \(12 to 4\)"):
        Classifier(model, head="conv")
    with pytest.raises(ValueError, match="not a module of the model"):
        Classifier(model, head=nn.Linear(12, 4))
    with pytest.raises(TypeError, match="expected a torch"):
        Classifier(lambda x: x)


def test_a_named_head_with_another_class_count_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(ValueError, match=r"gives \(2, 3\) and its linear layer '0' gives \(2, 5\)"):
        Classifier(model, head="0")(torch.randn(2, 6))


def test_a_head_called_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.fc(-x)

    with pytest.raises(ValueError, match="'fc' 2 times"):
        Classifier(Twice())(torch.randn(2, 6))


def test_non_finite_and_empty_first_batches_pass_and_leave_the_check_to_the_next() -> None:
    classifier = Classifier(small(end=torch.relu))
    assert classifier(images(0)).logits.shape == (0, 4)
    assert classifier(torch.full((2, 3, 8, 8), torch.nan)).features.isnan().all()
    with pytest.raises(ValueError, match="something follows"):
        classifier(images(8))


# --- layers
# -----------------------------------------------------------------------------------------------------------


def test_layers_are_pooled_over_positions() -> None:
    model = small()
    outputs = {}
    handle = model.norm.register_forward_hook(lambda m, a, out: outputs.update(norm=out))
    batch = Classifier(model, layers=("norm", "fc"))(images())
    handle.remove()
    torch.testing.assert_close(batch.layers["norm"], outputs["norm"].mean((2, 3)))
    assert torch.equal(batch.layers["fc"], batch.logits)


def test_layers_of_transformers_are_pooled_over_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(num_labels=5, **HF_IMAGE["ViT"])
    model = transformers.ViTForImageClassification(config).eval()
    name = next(
        name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer"
    )
    batch = Classifier(model, layers=[name])(images(2, 32))
    assert batch.layers[name].shape == (2, 32)


@pytest.mark.slow
def test_channels_last_layers_of_swin_are_pooled_over_positions() -> None:
    models = pytest.importorskip("torchvision.models")
    timm = pytest.importorskip("timm")
    batch = Classifier(models.swin_t(weights=None).eval(), layers=("features.0.0", "features.1"))(
        images(2, 64)
    )
    assert [layer.shape[1] for layer in batch.layers.values()] == [96, 96]
    model = timm.create_model("swin_tiny_patch4_window7_224").eval()
    batch = Classifier(model, layers=("layers.0", "layers.1", "patch_embed.proj"))(images(1, 224))
    assert [layer.shape[1] for layer in batch.layers.values()] == [96, 192, 96]


def test_unknown_and_repeated_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="no module named 'nrm'; did you mean norm"):
        Classifier(small(), layers=("nrm",))
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(4, 4), relu, nn.Linear(4, 4), relu, nn.Linear(4, 2))
    with pytest.raises(ValueError, match="'1' 2 times"):
        Classifier(model, layers=["1"])(torch.randn(2, 4))


# --- modes, devices, dtypes, inputs
# -----------------------------------------------------------------------------------


def test_a_model_in_training_mode_is_run_in_eval_mode_and_restored() -> None:
    model = small()
    expected = Classifier(model)(images())
    model.train()
    # Frozen batch norm.
    model.norm.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    batch = Classifier(model)(images())
    assert torch.equal(batch.features, expected.features)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError):
        Classifier(model)(torch.randn(2, 5, 8, 8))
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_gradients_and_inference_mode_follow_the_caller() -> None:
    classifier = Classifier(small())
    x = images().requires_grad_()
    classifier(x).logits.sum().backward()
    assert x.grad.abs().sum() > 0
    with torch.inference_mode():
        assert classifier(images()).features.is_inference()
    assert not classifier(images()).features.is_inference()


def test_autocast_keeps_the_dtype_of_the_model() -> None:
    classifier = Classifier(small())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        batch = classifier(images())
    assert batch.logits.dtype == torch.bfloat16
    assert classifier.double()(images().double()).features.dtype == torch.float64
    assert classifier.to(torch.bfloat16)(images().bfloat16()).features.dtype == torch.bfloat16


def test_a_classifier_under_autocast_gives_float32_features_close_to_the_plain_ones() -> None:
    plain = Classifier(small(), layers=["conv"])(images())
    batch = Classifier(small(), layers=["conv"], autocast=torch.bfloat16)(images())
    for found, expected in ((batch.features, plain.features), (batch.logits, plain.logits)):
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)
        torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    assert batch.layers["conv"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"autocast is torch\.float64"):
        Classifier(small(), autocast=torch.float64)


class Sigmoids(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(x).sigmoid()


@pytest.mark.parametrize(
    "make",
    [lambda classes: nn.Sequential(nn.Linear(4, classes), nn.Sigmoid()), Sigmoids],
    ids=["module", "function"],
)
def test_a_sigmoid_for_each_class_is_refused_as_multi_label(make) -> None:
    with pytest.raises(ValueError, match=r"several at once.*multilabel-fdbd"):
        Classifier(make(3))(torch.randn(2, 4))
    # Of two classes, which a head by name may be.
    with pytest.raises(ValueError, match="pass head="):
        Classifier(make(1))(torch.randn(2, 4))
    name = "0" if isinstance(make(1), nn.Sequential) else "fc"
    assert Classifier(make(1), head=name)(torch.randn(2, 4)).logits.shape == (2, 2)


def test_inputs_move_to_the_models_device() -> None:
    classifier = Classifier(small()).to("meta")
    batch = classifier((images(), torch.tensor([1, 2, 3])))
    assert batch.features.device.type == batch.labels.device.type == "meta"


def test_the_head_follows_the_weights() -> None:
    model = small()
    classifier = Classifier(model)
    before = classifier.fingerprint()
    with torch.no_grad():
        model.fc.bias += 1
    assert classifier.fingerprint() != before
    torch.testing.assert_close(classifier.head.bias, model.fc.bias.detach())


def test_loader_items_go_in_as_they_are() -> None:
    classifier = Classifier(small())
    expected = classifier(images())
    assert expected.labels is None
    for item in [
        (images(), torch.tensor([0, 1, 3])),
        [images(), [0, 1, 3]],
        (images(), torch.tensor([0.0, 1, 3]), "a"),
    ]:
        batch = classifier(item)
        assert torch.equal(batch.features, expected.features)
        assert batch.labels.tolist() == [0, 1, 3]
    assert classifier([images()]).labels is None
    assert classifier({"x": images(), "label": torch.tensor([[0], [1], [3]])}).labels.tolist() == [
        0,
        1,
        3,
    ]


def test_split_batch_tells_labels_from_other_things() -> None:
    x = images()
    assert split_batch(x)[1] is None
    assert split_batch((x, None))[1] is None
    assert split_batch((x, ["a.png", "b.png", "c.png"]))[1] is None
    inputs, labels = split_batch(({"x": x}, torch.tensor([1, 0, 1], dtype=torch.bool)))
    assert list(inputs) == ["x"]
    assert labels.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match=r"shape \(3, 4\).*dicts"):
        split_batch((x, torch.full((3, 4), 0.5)))
    sets = torch.eye(3, 4)
    assert torch.equal(split_batch((x, sets))[1], sets.long())
    with pytest.raises(ValueError, match="class indices"):
        split_batch((x, torch.tensor([0.5, 1.0, 2.0])))
    with pytest.raises(ValueError, match="empty tuple"):
        split_batch(())


# --- hooks, threads, copies
# -------------------------------------------------------------------------------------------


def test_deleting_classifiers_removes_their_hooks() -> None:
    model = small()
    classifiers = [Classifier(model, layers=("norm",)) for _ in range(100)]
    assert hook_count(model) == 400
    classifiers[0](images())
    del classifiers
    assert hook_count(model) == 0


def test_an_error_in_the_model_leaves_no_features_behind() -> None:
    classifier = Classifier(small(end=lambda x: x.no_such_method()))
    with pytest.raises(AttributeError, match="no_such_method"):
        classifier(images())
    assert classifier._recorder.local.calls is None
    classifier.model.end = None
    assert classifier(images(2)).features.shape == (2, 12)


def test_calling_the_model_itself_records_nothing() -> None:
    classifier = Classifier(small())
    classifier.model(images())
    assert classifier._recorder.local.calls is None
    assert classifier._recorder.traced is None


@pytest.mark.parametrize("training", [False, True])
def test_eight_threads_do_not_see_each_others_features(training: bool) -> None:
    model = small().train(training)
    classifier = Classifier(model, layers=("norm",))
    inputs = [images(n + 1) for n in range(8)]
    expected = [classifier(x) for x in inputs]
    barrier = threading.Barrier(8)

    def work(index: int) -> bool:
        barrier.wait()
        batches = [classifier(inputs[index]) for _ in range(40)]
        return all(
            torch.allclose(batch.features, expected[index].features, atol=1e-6)
            and torch.allclose(batch.logits, expected[index].logits, atol=1e-6)
            and torch.allclose(batch.layers["norm"], expected[index].layers["norm"], atol=1e-6)
            for batch in batches
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_have_hooks_of_their_own(how: str) -> None:
    classifier = Classifier(small(), layers=("norm",))
    expected = classifier(images())
    if how == "deepcopy":
        copied = copy.deepcopy(classifier)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(classifier))
    else:
        buffer = io.BytesIO()
        torch.save(classifier, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    assert hook_count(copied.model) == hook_count(classifier.model) == 4
    assert copied._recorder is not classifier._recorder
    batch = copied(images())
    assert torch.equal(batch.features, expected.features)
    assert torch.equal(batch.layers["norm"], expected.layers["norm"])
    model = copied.model
    del copied, batch
    assert hook_count(model) == 0
    assert hook_count(classifier.model) == 4
    assert torch.equal(classifier(images()).features, expected.features)


def test_a_copied_model_carries_a_hook_that_does_nothing() -> None:
    classifier = Classifier(small())
    model = copy.deepcopy(classifier.model)
    assert torch.equal(model(images()), classifier(images()).logits)
    assert torch.equal(Classifier(model)(images()).features, classifier(images()).features)


# --- compile and export
# -----------------------------------------------------------------------------------------------


def assert_same(batch: Batch, expected: Batch) -> None:
    torch.testing.assert_close(batch.features, expected.features, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(batch.logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert (batch.layers is None) == (expected.layers is None)
    for name in expected.layers or ():
        torch.testing.assert_close(batch.layers[name], expected.layers[name], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layers", [(), ("norm",)])
def test_compile_with_a_full_graph_gives_the_same(backend: str, layers: tuple[str, ...]) -> None:
    torch._dynamo.reset()
    classifier = Classifier(small(), layers=layers)
    compiled = torch.compile(classifier, fullgraph=True, backend=backend)
    # Compiled before any eager call, and for two sizes.
    for n in (3, 3, 5):
        assert_same(compiled(images(n)), classifier(images(n)))
    assert classifier._recorder.traced is None
    with ThreadPoolExecutor(8) as pool:
        batches = list(pool.map(compiled, [images(n) for n in range(2, 10)]))
    for n, batch in enumerate(batches, 2):
        assert_same(batch, classifier(images(n)))


@pytest.mark.slow
def test_compile_with_inductor_gives_the_same() -> None:
    torch._dynamo.reset()
    classifier = Classifier(small(), layers=("norm",))
    compiled = torch.compile(classifier, fullgraph=True)
    with torch.inference_mode():
        assert_same(compiled(images()), classifier(images()))


def test_a_graph_break_in_the_model_does_no_harm() -> None:
    torch._dynamo.reset()

    def end(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    classifier = Classifier(small(end=end))
    expected = classifier(images())
    compiled = torch.compile(classifier, backend="eager")
    for _ in range(2):
        assert_same(compiled(images()), expected)


def test_a_compiled_model_is_unwrapped() -> None:
    torch._dynamo.reset()
    model = small()
    classifier = Classifier(torch.compile(model, backend="eager"))
    assert classifier.model is model
    assert_same(classifier(images()), Classifier(model)(images()))


@pytest.mark.parametrize("strict", [False, True])
def test_export_gives_the_same_for_any_batch_size(strict: bool) -> None:
    classifier = Classifier(small(), layers=("norm",))
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    program = torch.export.export(classifier, (images(4),), dynamic_shapes=shapes, strict=strict)
    for n in (1, 4, 7):
        assert_same(program.module()(images(n)), classifier(images(n)))


class LastToken(nn.Module):
    """A head on every token, of which the last counts, as decoder models do it."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x)[:, -1]


def test_export_and_compile_of_averaged_heads_and_kept_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    config = transformers.DeiTConfig(num_labels=5, **HF_IMAGE["DeiT"])
    teacher = Classifier(transformers.DeiTForImageClassificationWithTeacher(config).eval())
    assert_same(
        torch.export.export(teacher, (images(2, 32),)).module()(images(2, 32)),
        teacher(images(2, 32)),
    )
    compiled = torch.compile(teacher, fullgraph=True, backend="eager")
    assert_same(compiled(images(2, 32)), teacher(images(2, 32)))
    tokens = Classifier(LastToken().eval())
    x = torch.randn(2, 7, 6)
    assert_same(torch.export.export(tokens, (x,)).module()(x), tokens(x))
    assert_same(torch.compile(tokens, fullgraph=True, backend="aot_eager")(x), tokens(x))


def test_a_model_in_training_mode_is_not_exported() -> None:
    with pytest.raises(Exception, match="training mode"):
        torch.export.export(Classifier(small().train()), (images(4),))


def test_a_cuda_classifier_takes_cpu_images() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    classifier = Classifier(small()).cuda()
    assert classifier(images()).features.is_cuda
