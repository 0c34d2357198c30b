"""The usual mistakes of a first day are one sentence that says what to do."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fdbd


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()


def images(rows: int = 40, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    guard = fdbd.Guard(model()).fit([images(100)], progress=False)
    return guard.calibrate([images(100, 1)], progress=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (images()[0], r"\(3, 8, 8\), which looks like a single image .* images\[None\]"),
        (images()[0].permute(1, 2, 0), "looks like a single image"),
        (images().permute(0, 2, 3, 1), r"looks like channels last .*permute\(0, 3, 1, 2\)"),
        (images().double(), r"inputs are float64 .* inputs\.float\(\)"),
        (images().half(), r"inputs are float16 and the model's weights float32"),
        (images().clamp(0, 1).to(torch.uint8), "takes no images of torch.uint8"),
        (images()[:, 0], r"\(40, 8, 8\), without channels .* images\[:, None\]"),
        (images()[0, 0], r"\(8, 8\), which looks like a single grey image"),
        ("photo.jpg", "was given the text 'photo.jpg' instead of a tensor"),
        (Path("photo.jpg"), "was given a PosixPath instead of a tensor|WindowsPath"),
        (Image.new("RGB", (8, 8)), "was given a Image instead of a tensor"),
        (None, "was given a NoneType instead of a tensor"),
        (3, "was given a int instead of a tensor"),
    ],
)
def test_images_of_the_wrong_form_are_one_sentence(guard, given, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        guard(given)


def test_an_error_of_the_model_itself_stays_its_own(guard) -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        guard(torch.randn(4, 5, 8, 8))


def test_float32_images_for_a_model_in_half_precision_are_one_sentence(guard) -> None:
    half = fdbd.Guard(model().half())
    with pytest.raises(TypeError, match=r"weights float16 .* inputs\.half\(\)"):
        half.fit([images()], progress=False)


@pytest.mark.parametrize("as_given", [list, lambda samples: [each.numpy() for each in samples]])
def test_a_list_of_single_images_is_one_sentence(guard, as_given) -> None:
    with pytest.raises(ValueError, match=r"a list of 3 samples of shape \(3, 8, 8\).*torch.stack"):
        guard(as_given(images(3)))


def test_a_lazy_head_without_weights_is_one_sentence() -> None:
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'1' is a LazyLinear without weights: run the model"):
        fdbd.Guard(lazy)


class ImageAndSize(nn.Module):
    """A network that takes the size of what is shown beside the image, and can do without it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = model()

    def forward(self, pixels: torch.Tensor, size: torch.Tensor | None = None) -> torch.Tensor:
        if size is not None:
            pixels = pixels * size[:, None, None, None]
        return self.network(pixels)


def test_inputs_by_position_are_all_given_to_the_model() -> None:
    sizes = torch.arange(1, 41)
    labels = torch.arange(40) % 4
    guard = fdbd.Guard(ImageAndSize()).fit([((images(), sizes), labels)], progress=False)
    guard.calibrate([([images(seed=1), sizes], labels)], progress=False)
    scaled = images() * sizes[:, None, None, None]
    plain = fdbd.Guard(model()).fit([(scaled, labels)], progress=False)
    torch.testing.assert_close(guard.score(((images(), sizes), None)), plain.score(scaled))


class OfTexts(nn.Module):
    """A network that takes a list of texts."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, texts: list[str]) -> torch.Tensor:
        rows = [self.letters(torch.tensor(list(text.encode()))).mean(dim=0) for text in texts]
        return self.fc(torch.stack(rows))


def test_a_model_that_takes_texts_is_given_all_of_them() -> None:
    texts = [f"order {number}" for number in range(40)]
    network = OfTexts().eval()
    guard = fdbd.Guard(network).fit([(texts, torch.arange(40) % 4)], progress=False)
    guard.calibrate([[f"letter {number}" for number in range(40)]], progress=False)
    torch.testing.assert_close(guard(texts).logits, network(texts).detach())
    torch.testing.assert_close(guard(texts[:2]).scores, guard(texts).scores[:2])


@pytest.mark.parametrize("labels", [["cat"] * 40, ("cat",) * 40, np.array(["cat"] * 40)])
def test_labels_that_are_text_are_named(labels) -> None:
    with pytest.raises(ValueError, match="the labels are text, such as 'cat'"):
        fdbd.Guard(model(), "mds").fit([(images(), labels)], progress=False)
    with pytest.raises(ValueError, match="the labels are text, such as 'cat'"):
        fdbd.Guard(model(), "mds").fit([{"image": images(), "label": labels}], progress=False)


def test_file_names_beside_images_are_left_out(guard) -> None:
    names = [f"{number}.png" for number in range(40)]
    again = fdbd.Guard(guard.classifier.model).fit([(images(100), names)], progress=False)
    assert again.detector.is_fitted


def test_dicts_of_data_sets_are_images_and_labels(guard) -> None:
    plain = guard(images())
    for name in ("image", "images", "img"):
        found = guard({name: images(), "label": torch.zeros(40, dtype=torch.long)})
        assert torch.equal(found.scores, plain.scores)
    fitted = fdbd.Guard(model(), "mds")
    fitted.fit([{"image": images(100), "label": torch.arange(100) % 4}], progress=False)
    assert fitted.detector.is_fitted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_in_one_sentence(guard) -> None:
    with pytest.raises(TypeError, match="TorchScript module, whose layers cannot be watched"):
        fdbd.Guard(torch.jit.script(model()))
    with pytest.raises(Exception, match=r"torch.jit.script cannot compile a model with"):
        torch.jit.script(guard.classifier.model)


def test_a_head_of_zeros_is_said_to_be_untrained() -> None:
    network = model()
    nn.init.zeros_(network[-1].weight)
    with pytest.raises(ValueError, match="is the model untrained"):
        fdbd.Guard(network).fit([images()], progress=False)


def test_a_compiled_model_is_said_to_run_uncompiled() -> None:
    with pytest.warns(UserWarning, match=r"runs it uncompiled.* call guard.compile\(\)") as caught:
        fdbd.Guard(torch.compile(model()))
    assert caught[0].filename == __file__


def test_pixels_given_to_a_guard_of_normalised_images_draw_one_warning(tmp_path) -> None:
    guard = fdbd.Guard(model()).fit([images(100)], progress=False)
    guard.calibrate([images(100, 1)], progress=False)
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", guard.classifier.model)
    pixels = 255 * torch.rand(8, 3, 8, 8)
    for each in (guard, loaded):
        with pytest.warns(UserWarning, match="outside of the inputs of the fit") as caught:
            each(pixels)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            each(pixels)


@pytest.mark.filterwarnings("error")
def test_ordinary_images_draw_no_warning(guard) -> None:
    guard(images(3, 7))
    guard(torch.zeros(2, 3, 8, 8))
    guard(torch.full((1, 3, 8, 8), torch.nan))
    guard(torch.full((1, 3, 8, 8), torch.inf))
    spoilt = images(3, 8)
    spoilt[1, 2, 3, 4] = torch.inf
    guard(spoilt)


@pytest.mark.filterwarnings("error")
def test_white_and_black_images_draw_no_warning() -> None:
    # The mean of equal numbers is rounded, to either side of them.
    for white in torch.linspace(2.0, 3.0, 20):
        training = images(100).clamp(-white, white)
        training[0] = white
        training[1] = -white
        guard = fdbd.Guard(model()).fit([training], progress=False)
        for value in (white, -white):
            guard.score(value.expand(2, 3, 8, 8).contiguous())


def test_labels_that_the_model_does_not_know_draw_a_warning_at_the_fit() -> None:
    network = model()
    pixels = images(100)
    wrong = (network(pixels).argmax(dim=1) + 1) % 4
    with pytest.warns(UserWarning, match="no better than guessing: are these the model's classes"):
        fdbd.Guard(network).fit([(pixels, wrong)], progress=False)


def test_an_exported_graph_given_for_a_guard_is_said_to_be_one(tmp_path) -> None:
    path = tmp_path / "guard.onnx"
    path.write_bytes(b"graph")
    with pytest.raises(ValueError, match=r"guard.onnx' is an exported graph.*safetensors"):
        fdbd.load(path)


def rows_of(classes: range, seed: int) -> fdbd.Batch:
    """Features near the directions of these classes, sorted by class."""
    labels = torch.tensor(classes).repeat_interleave(50)
    noise = torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(seed))
    return fdbd.Batch(3 * torch.eye(4)[labels] + 0.1 * noise, labels=labels)


def test_classes_without_any_sample_draw_a_warning() -> None:
    guard = fdbd.Guard(fdbd.Head(torch.eye(4)))
    with pytest.warns(UserWarning, match="the fit data have no samples of 1 of the 4 classes: 3"):
        guard.fit([rows_of(range(3), 0)], progress=False)
    with pytest.warns(UserWarning, match="the calibration data have no samples of 2 of the 4"):
        guard.calibrate([rows_of(range(2), 1)], progress=False)


# MSP learns nothing, so that its fit reads the first batch alone.
@pytest.mark.parametrize("detector", ["fdbd", "msp"])
@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.filterwarnings("error")
def test_a_class_of_the_last_batch_alone_is_not_missing(detector: str, with_model: bool) -> None:
    batches = [rows_of(range(3), 0), rows_of(range(3, 4), 1)]
    if with_model:
        head = nn.Linear(4, 4)
        nn.init.eye_(head.weight)
        guard = fdbd.Guard(nn.Sequential(nn.Identity(), head), detector)
        guard.fit([(batch.features, batch.labels) for batch in batches], progress=False)
    else:
        guard = fdbd.Guard(fdbd.Head(torch.eye(4)), detector)
        guard.fit(batches, progress=False)
        guard.calibrate([rows_of(range(4), 9)], progress=False)


@pytest.mark.filterwarnings("error")
def test_few_samples_may_lack_classes() -> None:
    few = rows_of(range(2), 0)
    few = fdbd.Batch(few.features[::2], labels=few.labels[::2])
    fdbd.Guard(fdbd.Head(torch.eye(4))).fit([few], progress=False)


def test_calibration_data_of_which_a_third_was_used_for_the_fit_draw_a_warning() -> None:
    guard = fdbd.Guard(model()).fit([images(100)], progress=False)
    mixed = torch.cat([images(100, 1), images(100)[:50]])
    with pytest.warns(UserWarning, match=r"also used for the fit \(33% of them\)"):
        guard.calibrate([mixed], progress=False)


@pytest.mark.parametrize("kind", ["training", "no running statistics"])
def test_scores_that_depend_on_the_batch_draw_a_warning(kind: str, tmp_path) -> None:
    network = model()
    normalisation = network[1]
    if kind == "training":
        normalisation.train()
    else:
        normalisation.running_mean = None
        normalisation.running_var = None
    guard = fdbd.Guard(network)
    with pytest.warns(UserWarning, match=r"1 batch normalisations \(1, …\) use the statistics"):
        guard.fit([images(100)], progress=False)
    guard.calibrate([images(100, 1)], progress=False).save(tmp_path / "guard.safetensors")
    with pytest.warns(UserWarning, match="holds for such batches alone: call model.eval"):
        fdbd.load(tmp_path / "guard.safetensors", network)


def test_a_model_in_training_mode_is_no_batch_that_scores_depend_on(guard) -> None:
    again = fdbd.Guard(model().train()).fit([images(100)], progress=False)
    assert again.classifier.batch_statistics == []
