"""A guard around a classifier of pixels decides on each position and on each image, and says no to
what it cannot do with maps."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import fdbd
from fdbd.cli import app
from fdbd.core import artifact
from fdbd.core.grid import Grid
from fdbd.decision.map_threshold import image_scores
from fdbd.decision.maps import POSITIONS, MapDecision, draw_positions
from fdbd.decision.threshold import FewSamplesWarning
from fdbd.fitting.overlap import sample_hashes

CLASSES = 4
SIDE = 24
IGNORED = 255
HEADS_PAGE = Path(__file__).parents[2] / "docs" / "heads.md"


class SegmentationNet(nn.Module):
    """Maps of half the images' sides, and a 1×1 convolution."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.ReLU6()
        )
        self.classifier = nn.Conv2d(12, CLASSES, 1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 2

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.classifier(self.body(images))
        return nn.functional.interpolate(maps, images.shape[2:], mode="bilinear")


def make_images(count: int, seed: int, scale: float = 1.0) -> Tensor:
    """Images that differ as a whole: each has colours and a contrast of its own."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randn(count, 3, 1, 1, generator=generator)
    contrast = 0.2 + torch.rand(count, 1, 1, 1, generator=generator)
    noise = torch.randn(count, 3, SIDE, SIDE, generator=generator)
    return scale * (colours + contrast * noise)


def calibrated_guard(detector: str = "fdbd", **target: Any) -> fdbd.Guard:
    guard = fdbd.Guard(SegmentationNet(), detector)
    guard.fit(make_images(60, seed=1).split(20), progress=False)
    target = target or {"alpha": 0.1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewSamplesWarning)
        return guard.calibrate(make_images(80, seed=2).split(30), progress=False, **target)


@pytest.fixture(scope="module")
def guard() -> fdbd.Guard:
    return calibrated_guard()


def test_scores_and_labels_are_those_of_a_detector_on_rows(guard: fdbd.Guard) -> None:
    model = SegmentationNet()
    images = make_images(3, seed=3)
    with torch.no_grad():
        maps = model.body(images)
        logits = model.classifier(maps)
    rows = maps.permute(0, 2, 3, 1).reshape(-1, 12)
    scores = guard.detector.score(fdbd.Batch(rows)).reshape(3, 12, 12)
    decision = guard(images)
    assert isinstance(decision, MapDecision)
    torch.testing.assert_close(decision.logits, logits)
    torch.testing.assert_close(decision.scores, scores)
    torch.testing.assert_close(guard.score(images), scores)
    assert torch.equal(decision.labels, logits.argmax(dim=1))
    assert guard.map_threshold is not None
    assert torch.equal(decision.is_ood, scores < guard.map_threshold.value)
    torch.testing.assert_close(decision.ood_share, decision.is_ood.float().mean(dim=(1, 2)))
    # 5 % of 144 positions are 7.2: the eighth smallest.
    expected = decision.scores.flatten(1).sort(dim=1).values[:, 7]
    assert torch.equal(decision.image_scores, expected)
    calibration = guard.score(make_images(80, seed=2))
    of_images = image_scores(calibration.flatten(1))
    ranks = (of_images[None] <= expected[:, None]).sum(dim=1) + 1
    torch.testing.assert_close(decision.image_p_values, ranks / 81)
    assert torch.equal(decision.image_is_ood, ranks / 81 <= 0.1)


def test_a_fit_reads_the_same_positions_however_the_data_are_split() -> None:
    images = make_images(60, seed=1)
    labels = torch.randint(0, CLASSES, (60, SIDE, SIDE), generator=torch.Generator().manual_seed(4))
    fits = []
    for sizes in (60, 7):
        batches = zip(images.split(sizes), labels.split(sizes))
        guard = fdbd.Guard(SegmentationNet(), "mds")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard.fit(batches, progress=False)
        fits.append(guard.detector.state_dict())
    for name, value in fits[0].items():
        torch.testing.assert_close(fits[1][name], value, rtol=1e-4, atol=1e-4)


def test_as_many_positions_are_drawn_as_asked_and_none_twice() -> None:
    grid = Grid(3, 40, 50)
    # Each row holds its own place.
    batch = fdbd.Batch(torch.arange(6000.0)[:, None], grid=grid)
    hashes = sample_hashes(torch.rand(3, 5))
    drawn = draw_positions(batch, hashes, CLASSES)
    places = drawn.features[:, 0].long()
    assert len(places.unique()) == len(places) == 3 * POSITIONS
    assert torch.bincount(places // grid.positions).tolist() == [POSITIONS] * 3
    # Spread over the whole image, and another draw for another image.
    halves = (places % grid.positions) // 1000
    assert 3 * POSITIONS * 0.4 < int(halves.sum()) < 3 * POSITIONS * 0.6
    first, second, _ = (places % grid.positions).reshape(3, POSITIONS)
    assert not torch.equal(first, second)
    # An image's draw does not depend on the images beside it.
    alone = fdbd.Batch(batch.features[2000:4000], grid=Grid(1, 40, 50))
    again = draw_positions(alone, hashes[1:2], CLASSES).features[:, 0].long()
    assert torch.equal(again, 2000 + second)
    with pytest.raises(ValueError, match="maps are of 3 images, and its first input holds 2"):
        draw_positions(batch, hashes[:2], CLASSES)


def test_positions_without_a_class_are_not_learnt_from() -> None:
    grid = Grid(2, 30, 30)
    labels = torch.full((1800,), IGNORED)
    labels[:100] = 3
    labels[900:] = torch.tensor([-1, 2]).repeat(450)
    batch = fdbd.Batch(torch.arange(1800.0)[:, None], labels=labels, grid=grid)
    drawn = draw_positions(batch, sample_hashes(torch.rand(2, 5)), CLASSES)
    assert drawn.labels is not None
    # All that there are in the first image, and no fewer than asked for in the second.
    assert drawn.labels.tolist() == [3] * 100 + [2] * POSITIONS
    assert (drawn.features[:100, 0] == torch.arange(100.0)).all()


def test_a_fit_with_an_ignore_index_is_one_on_the_labelled_positions() -> None:
    images = make_images(20, seed=5)
    model = SegmentationNet()
    with torch.no_grad():
        maps = model.body(images)
        labels = model(images).argmax(dim=1)
    # The upper half of each image, with 72 positions of the map.
    labels[:, SIDE // 2 :] = IGNORED
    guard = fdbd.Guard(model).fit([(images, labels)], progress=False)
    upper = maps[:, :, :6].permute(0, 2, 3, 1).reshape(-1, 12)
    by_hand = fdbd.Guard(fdbd.Head.from_linear(model.classifier))
    by_hand.fit([fdbd.Batch(upper)], progress=False)
    for name, value in by_hand.detector.state_dict().items():
        torch.testing.assert_close(guard.detector.state_dict()[name], value)


def test_images_without_any_labelled_position_are_one_sentence() -> None:
    images = make_images(4, seed=0)
    nothing = torch.full((4, SIDE, SIDE), IGNORED)
    with pytest.raises(ValueError, match=r"at least one position whose label is a class .*255"):
        fdbd.Guard(SegmentationNet().eval()).fit([(images, nothing)], progress=False)


def test_a_guard_of_maps_is_the_same_after_a_file(guard: fdbd.Guard, tmp_path: Path) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    again = fdbd.load(path, SegmentationNet())
    images = make_images(5, seed=6)
    for before, after in zip(guard(images), again(images)):
        assert torch.equal(before, after)
    assert again.id == guard.id
    assert again.version == guard.version == 1
    assert again.threshold is None
    assert repr(again) == repr(guard)
    assert "conformal, alpha=0.1, 80 calibration images" in repr(again)


def test_the_id_follows_the_threshold_of_maps(guard: fdbd.Guard) -> None:
    assert calibrated_guard().id == guard.id
    assert calibrated_guard(alpha=0.2).id != guard.id
    assert calibrated_guard(tpr=0.9).id != guard.id


def test_the_promise_holds_on_new_images_and_odd_ones_are_flagged() -> None:
    shares = []
    verdicts = []
    guard = calibrated_guard()
    for trial in range(60):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            guard.calibrate(make_images(40, seed=100 + trial), alpha=0.1, progress=False)
        decision = guard(make_images(60, seed=1000 + trial))
        shares.append(float(decision.ood_share.mean()))
        verdicts.append(float(decision.image_is_ood.float().mean()))
    for found in (torch.tensor(shares), torch.tensor(verdicts)):
        error = float(found.std()) / len(found) ** 0.5
        assert float(found.mean()) <= 0.1 + 2 * error
    assert float(torch.tensor(shares).mean()) > 0.05


def test_a_number_that_is_not_finite_flags_its_image_and_no_other(guard: fdbd.Guard) -> None:
    images = make_images(4, seed=7)
    clean = guard(images)
    for bad in (float("nan"), float("inf")):
        spoilt = images.clone()
        spoilt[1, 2, 5, 5] = bad
        decision = guard(spoilt)
        assert decision.is_ood[1].all()
        assert (decision.scores[1] == -torch.inf).all()
        assert decision.image_is_ood[1]
        assert float(decision.image_p_values[1]) == pytest.approx(1 / 81)
        others = torch.tensor([0, 2, 3])
        assert torch.equal(decision.is_ood[others], clean.is_ood[others])
    spoilt = make_images(80, seed=2)
    spoilt[31, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="calibration image 31 has pixels"):
        calibrated_guard().calibrate(spoilt.split(30), alpha=0.1, progress=False)


def test_verdicts_on_pixels_are_those_of_the_nearest_positions(guard: fdbd.Guard) -> None:
    decision = guard(make_images(2, seed=8))
    pixels = decision.upsample((SIDE, SIDE))
    for name in ("labels", "scores", "is_ood"):
        maps = getattr(decision, name)
        expected = maps.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        assert torch.equal(getattr(pixels, name), expected)
    # Twice as many pixels on each side flag the same share.
    torch.testing.assert_close(pixels.is_ood.float().mean(dim=(1, 2)), decision.ood_share)
    with pytest.raises(ValueError, match="at least one pixel"):
        decision.upsample((0, 4))


def test_a_size_that_is_not_a_pair_is_one_sentence(guard: fdbd.Guard) -> None:
    decision = guard(make_images(1, seed=3))
    for size in (48, (0, 4), (4,)):
        with pytest.raises(ValueError, match=r"expected \(height, width\) of at least one pixel"):
            decision.upsample(size)


def test_features_with_a_grid_are_decided_on_without_the_network(guard: fdbd.Guard) -> None:
    images = make_images(3, seed=9)
    assert guard.classifier is not None
    with torch.no_grad():
        batch = guard.classifier(images)
    for before, after in zip(guard(images), guard(batch)):
        torch.testing.assert_close(before, after)
    with pytest.raises(ValueError, match=re.escape("guard(batch)")):
        guard.decide(batch)


def test_labels_that_the_predictions_contradict_are_noticed() -> None:
    images = make_images(40, seed=1)
    labels = (SegmentationNet()(images).argmax(dim=1) + 1) % CLASSES
    with pytest.warns(UserWarning, match="the fit data"):
        guard = fdbd.Guard(SegmentationNet()).fit([(images, labels)], progress=False)
    with pytest.warns(UserWarning, match="also used for the fit"):
        guard.calibrate(images, tpr=0.9, progress=False)


def test_what_cannot_be_done_with_maps_is_refused_in_one_sentence(
    guard: fdbd.Guard, tmp_path: Path
) -> None:
    images = make_images(3, seed=10)
    with pytest.raises(ValueError, match="predicts maps"):
        guard.explain(images)
    with pytest.raises(ValueError, match="decides on maps"):
        guard.decide(fdbd.Batch(torch.rand(5, 12)))
    with pytest.raises(ValueError, match="decides on maps"):
        fdbd.Monitor(guard)
    with pytest.raises(RuntimeError, match="decides on maps"):
        guard.export_onnx(tmp_path / "guard.onnx", fdbd.Batch(torch.rand(5, 12)))
    with pytest.raises(ValueError, match="decides on maps"):
        guard.stages.calibration_scores(images)
    with pytest.raises(ValueError, match="decides on maps"):
        guard.stages.calibration_scores(fdbd.Batch(torch.rand(5, 12)))
    with pytest.raises(ValueError, match="leave per_class out"):
        calibrated_guard(alpha=0.1, per_class=True)
    with pytest.raises(ValueError, match="takes at least 99"):
        calibrated_guard(alpha=0.01)


@pytest.mark.parametrize("detector", ["auto", "odin"])
def test_detectors_of_whole_images_are_refused(detector: str) -> None:
    with pytest.raises(ValueError, match="predicts maps"):
        fdbd.Guard(SegmentationNet(), detector).fit(make_images(20, seed=1), progress=False)
    perturbed = fdbd.Guard(SegmentationNet(), perturb=fdbd.InputPerturbation(0.01))
    with pytest.raises(ValueError, match="predicts maps"):
        perturbed.fit(make_images(20, seed=1), progress=False)


def test_features_are_refused_by_the_commands_of_a_guard_of_maps(
    guard: fdbd.Guard, tmp_path: Path
) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    features = tmp_path / "features.npz"
    np.savez(features, features=np.zeros((4, 12), dtype=np.float32))
    run = CliRunner().invoke(app, ["score", str(path), str(features)])
    assert isinstance(run.exception, ValueError)
    assert "decides on maps" in str(run.exception)
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "at most 0.1 of an image's pixels" in shown.output


def test_a_file_whose_map_threshold_does_not_fit_is_damaged(
    guard: fdbd.Guard, tmp_path: Path
) -> None:
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    description, tensors = artifact.read(path)
    del description["sha256"]
    for name in ("threshold.value", "threshold.image_threshold.calibration"):
        forged = {**tensors, name: torch.tensor([[float("nan")]])}
        artifact.write(path, description, forged)
        with pytest.raises(fdbd.ArtifactError, match="working guard"):
            fdbd.load(path, SegmentationNet())
    images = {**description["threshold"]["images"], "per_class": True}
    threshold = {**description["threshold"], "images": images}
    artifact.write(path, {**description, "threshold": threshold}, tensors)
    with pytest.raises(fdbd.ArtifactError, match="working guard"):
        fdbd.load(path, SegmentationNet())


def test_one_label_per_image_is_no_label_of_maps() -> None:
    images = make_images(20, seed=1)
    with pytest.raises(ValueError, match="one class index per pixel; leave labels out"):
        fdbd.Guard(SegmentationNet()).fit([(images, torch.zeros(20).long())], progress=False)


def test_a_copy_of_a_guard_decides_alike(guard: fdbd.Guard) -> None:
    images = make_images(3, seed=11)
    for before, after in zip(guard(images), copy.deepcopy(guard)(images)):
        assert torch.equal(before, after)


@pytest.mark.slow
def test_a_compiled_guard_decides_alike(guard: fdbd.Guard) -> None:
    images = make_images(3, seed=11)
    compiled = copy.deepcopy(guard)
    compiled.compile()
    with torch.no_grad():
        for before, after in zip(guard(images), compiled(images)):
            torch.testing.assert_close(before, after)


def test_a_threshold_from_single_rows_decides_on_no_map() -> None:
    guard = fdbd.Guard(SegmentationNet())
    images = make_images(60, seed=1)
    guard.fit(images, progress=False)
    with pytest.raises(fdbd.NotCalibratedError, match="no threshold of maps"):
        guard(images)
    assert guard.classifier is not None
    with torch.no_grad():
        rows = guard.classifier(images).rows(slice(0, 2000))
    guard.calibrate(rows, tpr=0.95, progress=False)
    assert guard.decide(rows).is_ood.shape == (2000,)
    with pytest.raises(fdbd.NotCalibratedError, match="promises nothing"):
        guard(images)
    with pytest.raises(ValueError, match="give one kind"):
        guard.calibrate([images, rows], tpr=0.95, progress=False)


class PlainSegmenter(nn.Module):
    """A map of a quarter of the images' sides, which is not enlarged: a small image has a map of
    one position, whose shape is that of a prediction for the whole image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 12, 4, stride=4)
        self.classifier = nn.Conv2d(12, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps: Tensor = self.classifier(self.body(images).relu())
        return maps


def small(images: Tensor) -> Tensor:
    return images[:, :, :4, :4]


@pytest.mark.parametrize("detector", ["fdbd", "msp"])
def test_a_map_of_one_position_is_decided_as_a_map_by_a_guard_of_maps(
    detector: str, tmp_path: Path
) -> None:
    guard = fdbd.Guard(PlainSegmenter().eval(), detector)
    guard.fit(make_images(60, seed=1), progress=False)
    guard.calibrate(make_images(80, seed=2), alpha=0.1, progress=False)
    images = make_images(5, seed=3)
    decision = guard(small(images))
    assert isinstance(decision, MapDecision)
    assert decision.is_ood.shape == guard.score(small(images)).shape == (5, 1, 1)
    # The position sees these pixels alone, so it is the first one of the larger map.
    torch.testing.assert_close(decision.scores, guard(images).scores[:, :1, :1])
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    again = fdbd.load(path, PlainSegmenter().eval())(small(images))
    assert torch.equal(again.is_ood, decision.is_ood)


def test_a_file_from_before_maps_were_noted_decides_on_one_position(tmp_path: Path) -> None:
    guard = fdbd.Guard(PlainSegmenter().eval()).fit(make_images(60, seed=1), progress=False)
    guard.calibrate(make_images(80, seed=2), alpha=0.1, progress=False)
    path = tmp_path / "guard.safetensors"
    guard.save(path)
    description, tensors = artifact.read(path)
    del description["sha256"], description["gives_maps"]
    artifact.write(path, description, tensors)
    again = fdbd.load(path, PlainSegmenter().eval())
    assert again(small(make_images(5, seed=3))).is_ood.shape == (5, 1, 1)
    artifact.write(path, {**description, "gives_maps": "yes"}, tensors)
    with pytest.raises(fdbd.ArtifactError, match="expected true or false"):
        fdbd.load(path, PlainSegmenter().eval())


def test_fit_and_calibration_take_images_of_several_sizes_with_label_maps() -> None:
    images = make_images(60, seed=1)
    labels = PlainSegmenter()(images).argmax(dim=1)
    pixels = labels.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)
    guard = fdbd.Guard(PlainSegmenter().eval(), "mds")
    guard.fit([(images, pixels), (small(images) + 0.1, small(pixels[:, None])[:, 0])])
    fresh = make_images(80, seed=2)
    guard.calibrate([(small(fresh), torch.zeros(80, 4, 4).long()), fresh + 0.1], alpha=0.1)
    assert guard.map_threshold is not None
    assert guard.map_threshold.count == 160


def test_a_classifier_of_images_with_a_convolution_as_head_gives_one_prediction_per_image() -> None:
    """Whether it flattens its output or leaves it as (N, C, 1, 1)."""
    for end in (nn.Identity(), nn.Flatten()):
        model = nn.Sequential(
            nn.Conv2d(3, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(12, CLASSES, 1), end
        )
        guard = fdbd.Guard(model.eval()).fit(make_images(60, seed=1), progress=False)
        guard.calibrate(make_images(80, seed=2), alpha=0.1, progress=False)
        decision = guard(make_images(5, seed=3))
        assert decision.is_ood.shape == (5,)
        assert guard.threshold is not None
        label_maps = torch.zeros(60, SIDE, SIDE).long()
        with pytest.raises(ValueError, match="labels"):
            fdbd.Guard(model.eval(), "mds").fit([(make_images(60, seed=1), label_maps)])


def test_the_quickstart_on_the_page_runs_as_it_stands() -> None:
    text = HEADS_PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    block = next(block for block in blocks if "decision.upsample" in block)
    assert len(block.splitlines()) <= 10
    names: dict[str, Any] = {
        "model": SegmentationNet(),
        "train_loader": make_images(60, seed=1).split(20),
        "val_loader": make_images(300, seed=2).split(20),
        "images": make_images(4, seed=3),
    }
    exec(block, names)
    assert names["pixels"].is_ood.shape == (4, SIDE, SIDE)
    assert names["decision"].image_is_ood.shape == (4,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "side"),
    [
        ("deeplabv3_mobilenet_v3_large", "classifier.4", 8),
        ("lraspp_mobilenet_v3_large", None, 16),
    ],
)
def test_networks_of_torchvision_are_guarded(
    name: str, head: str | None, side: int, tmp_path: Path
) -> None:
    segmentation = pytest.importorskip("torchvision.models.segmentation")
    torch.manual_seed(0)
    options = {"weights": None, "weights_backbone": None, "num_classes": CLASSES}
    model = getattr(segmentation, name)(**options).eval()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(50, 3, 128, 128, generator=generator)
    labels = torch.randint(0, CLASSES, (20, 128, 128), generator=generator)
    guard = fdbd.Guard(model, head=head)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard.fit(zip(images[:20].split(5), labels.split(5)), progress=False)
        guard.calibrate(images[20:].split(10), alpha=0.1, progress=False)
    decision = guard(images[:2])
    assert decision.scores.shape == (2, side, side)
    expected = guard.detector.score(guard.classifier(images[:2]).rows(slice(None)))
    torch.testing.assert_close(decision.scores.reshape(-1), expected.detach())
    guard.save(tmp_path / "guard.safetensors")
    again = fdbd.load(tmp_path / "guard.safetensors", model)
    assert torch.equal(again(images[:2]).is_ood, decision.is_ood)
