"""The usual mistakes of a first day are one sentence that says what to do."""

import warnings

import pytest
import torch
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
        (images().clamp(0, 1).to(torch.uint8), "takes no images of torch.uint8"),
    ],
)
def test_images_of_the_wrong_form_are_one_sentence(guard, given, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        guard(given)


def test_an_error_of_the_model_itself_stays_its_own(guard) -> None:
    with pytest.raises(RuntimeError, match="expected input"):
        guard(torch.randn(4, 5, 8, 8))


@pytest.mark.parametrize("labels", [["cat"] * 40, ("cat",) * 40])
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
