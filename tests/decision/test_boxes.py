"""Guards of boxes, against a computation by hand on untrained networks."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fdbd
from fdbd.decision.boxes import CONFIDENT, BoxGuard, is_matched
from fdbd.networks.boxes import Detections, box_network

detection = pytest.importorskip("torchvision.models.detection")
transformers = pytest.importorskip("transformers")
HEADS_PAGE = Path(__file__).parents[2] / "docs" / "heads.md"


@pytest.fixture(scope="module")
def faster_rcnn() -> nn.Module:
    """A Faster R-CNN of four classes and the background on a backbone of one layer, untrained."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 8, 1), nn.ReLU())
    backbone.out_channels = 16
    anchors = detection.rpn.AnchorGenerator(((16, 32),), ((0.5, 1.0, 2.0),))
    model = detection.FasterRCNN(
        backbone,
        rpn_anchor_generator=anchors,
        num_classes=5,
        min_size=64,
        max_size=96,
        rpn_post_nms_top_n_test=60,
        box_score_thresh=0.1,
        box_detections_per_img=20,
    )
    # An untrained class layer finds all classes equally likely.
    nn.init.normal_(model.roi_heads.box_predictor.cls_score.weight, std=0.3)
    return model.eval()


def detr() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
        ),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=12,
        num_labels=4,
    )
    model = transformers.DetrForObjectDetection(config)
    nn.init.normal_(model.class_labels_classifier.weight, std=1.0)
    return model.eval()


def images(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, 64, 80, generator=generator) for _ in range(count)]


def test_the_features_of_a_detection_of_faster_rcnn_give_its_own_class_and_confidence(
    faster_rcnn,
) -> None:
    batch = images(3, seed=1)
    found = box_network(faster_rcnn).detections(batch)
    with torch.no_grad():
        outputs = faster_rcnn(batch)
    layer = faster_rcnn.roi_heads.box_predictor.cls_score
    for detections, output in zip(found, outputs):
        assert len(detections.labels) > 0
        torch.testing.assert_close(detections.boxes, output["boxes"])
        assert torch.equal(detections.labels, output["labels"])
        logits = layer(detections.features)
        torch.testing.assert_close(detections.logits, logits)
        probabilities = logits.softmax(dim=1)
        own = probabilities[torch.arange(len(logits)), output["labels"]]
        torch.testing.assert_close(own, output["scores"])


def test_the_decisions_on_boxes_are_those_of_a_detector_on_their_features(faster_rcnn) -> None:
    network = box_network(faster_rcnn)
    training = images(8, seed=2)
    targets = targets_of(network.detections(training))
    guard = BoxGuard(faster_rcnn).fit([(training, targets)])
    fresh = images(25, seed=3)
    guard.calibrate([(fresh, targets_of(network.detections(fresh)))], alpha=0.1)
    # Every detection matches itself, so all of them are learnt from.
    rows = torch.cat([each.features for each in network.detections(training)])
    by_hand = fdbd.FDBD().fit(fdbd.Batch(rows), network.head)
    batch = images(4, seed=4)
    for decision, found in zip(guard(batch), network.detections(batch)):
        expected = by_hand.score(fdbd.Batch(found.features, found.logits))
        torch.testing.assert_close(decision.scores, expected)
        p_values = guard.guard.threshold.p_values(expected)
        torch.testing.assert_close(decision.p_values, p_values)
        assert torch.equal(decision.is_ood, p_values <= 0.1)
        assert torch.equal(decision.labels, found.labels)
    assert guard.guard.threshold.count == 25


def targets_of(found: list[Detections]) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": each.boxes, "labels": each.labels} for each in found]


def test_the_rows_of_detr_are_the_queries_that_found_something() -> None:
    model = detr()
    pixels = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(pixels)
    probabilities = output.logits.softmax(dim=-1)[..., :-1]
    limit = float(probabilities.amax(dim=-1).median())
    found = box_network(model, min_confidence=limit).detections(pixels)
    for place, detections in enumerate(found):
        kept = probabilities[place].amax(dim=-1) >= limit
        torch.testing.assert_close(detections.features, output.last_hidden_state[place][kept])
        assert torch.equal(detections.labels, probabilities[place][kept].argmax(dim=-1))
        x, y, width, height = output.pred_boxes[place][kept].unbind(dim=-1)
        corners = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], 1)
        torch.testing.assert_close(detections.boxes, corners)
    guard = BoxGuard(model, "msp", min_confidence=limit)
    everything = targets_of(guard.network.detections(pixels))
    guard.fit([(pixels, everything)])
    for detections, scores in zip(found, map(guard.guard.score, map(rows_of, found))):
        expected = detections.logits.softmax(dim=-1).amax(dim=-1)
        torch.testing.assert_close(scores, expected)


def rows_of(found: Detections) -> fdbd.Batch:
    return fdbd.Batch(found.features, found.logits)


def test_a_detection_matches_a_true_box_of_its_class_that_it_overlaps_by_half() -> None:
    found = Detections(
        boxes=torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 4, 10]]),
        labels=torch.tensor([1, 2, 1, 1]),
        confidences=torch.ones(4),
        features=torch.zeros(4, 2),
        logits=torch.zeros(4, 3),
    )
    target = {"boxes": torch.tensor([[0.0, 0, 10, 9]]), "labels": torch.tensor([1])}
    assert is_matched(found, target).tolist() == [True, False, False, False]
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    assert not is_matched(found, nothing).any()


def test_a_guard_of_boxes_is_saved_and_read_as_one_of_features(faster_rcnn, tmp_path) -> None:
    training = images(6, seed=5)
    targets = targets_of(box_network(faster_rcnn).detections(training))
    guard = BoxGuard(faster_rcnn).fit([(training, targets)])
    guard.guard.save(tmp_path / "boxes.safetensors")
    again = BoxGuard(faster_rcnn, fdbd.load(tmp_path / "boxes.safetensors"))
    found = box_network(faster_rcnn).detections(images(1, seed=6))[0]
    assert torch.equal(again.guard.score(rows_of(found)), guard.guard.score(rows_of(found)))


def test_the_quickstart_on_the_page_runs_as_it_stands(faster_rcnn) -> None:
    blocks = re.findall(r"```python\n(.*?)```", HEADS_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    block = next(block for block in blocks if "BoxGuard" in block)
    assert len(block.splitlines()) <= 10
    network = box_network(faster_rcnn)
    fresh = images(25, seed=8)
    names = {
        "box_model": faster_rcnn,
        "box_loader": [(fresh, targets_of(network.detections(fresh)))],
        "fresh_box_loader": [(fresh, targets_of(network.detections(fresh)))],
        "box_images": images(1, seed=9),
    }
    with warnings.catch_warnings():
        # The same images are used twice here.
        warnings.simplefilter("ignore")
        exec(block, names)
    assert names["decision"].is_ood.shape == names["decision"].labels.shape


def test_other_detectors_of_boxes_are_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ValueError, match=r"anchors by a convolution.*fdbd\.Batch\(features\)"):
        BoxGuard(detection.retinanet_resnet50_fpn(weights=None, weights_backbone=None))


def test_images_without_a_detection_to_learn_from_are_an_error(faster_rcnn) -> None:
    with pytest.raises(ValueError, match="no detection to learn from"):
        BoxGuard(faster_rcnn).fit([([torch.zeros(3, 64, 64)], [target_of_nothing()])])


def target_of_nothing() -> dict[str, torch.Tensor]:
    return {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}


def test_without_targets_the_threshold_rests_on_one_confident_detection_per_image() -> None:
    model = detr()
    pixels = torch.rand(40, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    found = box_network(model, min_confidence=0.3).detections(pixels)
    confident = [each.chosen(each.confidences >= CONFIDENT) for each in found]
    confident = [each for each in confident if len(each.labels)]
    assert 0 < len(confident) < sum(len(each.labels) for each in found)
    training = torch.rand(10, 3, 64, 64, generator=torch.Generator().manual_seed(2))
    guard = BoxGuard(model, "msp", min_confidence=0.3).fit([training])
    guard.calibrate([pixels], alpha=0.2)
    scores = torch.cat([guard.guard.score(rows_of(each)) for each in confident])
    drawn = guard.guard.threshold.calibration
    assert len(drawn) == len(confident)
    assert torch.isin(drawn, scores).all()


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([], "the inputs are empty, expected a list of at least one image"),
        (torch.rand(3, 64, 80), r"the inputs are a tensor of torch.float32 \(3, 64, 80\)"),
        ("a.jpg", "the inputs are of type str"),
        ([torch.rand(64, 80)], r"image 0 is a tensor of torch.float32 \(64, 80\), expected"),
        (
            [torch.rand(3, 64, 80), torch.zeros(3, 64, 80).byte()],
            "image 1 is a tensor of torch.uin",
        ),
        ([torch.rand(3, 64, 80).numpy()], r"image 0 is of type ndarray.* \(3, H, W\)"),
        ([torch.rand(3, 64, 80).double()], r"image 0 is a tensor of torch.float64 .*torch.float32"),
        ([torch.rand(64, 80, 3)], r"image 0 is a tensor of torch.float32 \(64, 80, 3\), expected"),
    ],
)
def test_what_is_no_list_of_images_is_one_sentence(faster_rcnn, inputs, said) -> None:
    with pytest.raises(ValueError, match=said):
        BoxGuard(faster_rcnn)(inputs)


def test_what_detr_does_not_take_is_one_sentence() -> None:
    images = torch.rand(1, 3, 32, 32)
    for inputs in ([images[0]], images[0], {"pixels": images}, images.double()):
        with pytest.raises(ValueError, match=r"the pixel values are .*expected a tensor of"):
            BoxGuard(detr())(inputs)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"boxes": torch.rand(1, 4)}, "target 0 of a batch holds 'boxes', expected a dict"),
        ({"boxes": torch.rand(4), "labels": torch.ones(1)}, r"boxes \(4,\) and labels \(1,\)"),
        ({"boxes": torch.rand(2, 4), "labels": torch.ones(1)}, r"boxes \(2, 4\) and labels \(1,"),
    ],
)
def test_targets_of_a_wrong_form_are_one_sentence(faster_rcnn, target, said) -> None:
    with pytest.raises(ValueError, match=said):
        BoxGuard(faster_rcnn).fit([([torch.rand(3, 64, 80)], [target])])


@pytest.mark.parametrize("targets", ["boxes", {"boxes": torch.rand(1, 4)}, [torch.rand(1, 4)]])
def test_targets_that_are_no_list_of_dicts_are_one_sentence(faster_rcnn, targets) -> None:
    with pytest.raises(ValueError, match=r"the targets of a batch are of type .*one dict of boxes"):
        BoxGuard(faster_rcnn).fit([([torch.rand(3, 64, 80)], targets)])


def test_a_guard_of_other_features_and_a_wrong_confidence_are_refused_at_once(faster_rcnn) -> None:
    other = fdbd.Guard(fdbd.Head(torch.eye(3)))
    with pytest.raises(ValueError, match="takes 3 features of 3 classes, and the network's class"):
        BoxGuard(faster_rcnn, other)
    with pytest.raises(ValueError, match="min_confidence is 70, expected a number from 0 to 1"):
        BoxGuard(faster_rcnn, min_confidence=70)


def test_an_image_in_which_the_network_proposes_nothing_has_no_detection(faster_rcnn) -> None:
    nothing = torch.full((3, 64, 80), float("nan"))
    [found] = box_network(faster_rcnn).detections([nothing])
    assert found.boxes.shape == (0, 4)
    assert found.features.shape == (0, faster_rcnn.roi_heads.box_predictor.cls_score.in_features)


def test_a_guard_of_boxes_says_what_it_is(faster_rcnn) -> None:
    assert repr(BoxGuard(faster_rcnn)).startswith("BoxGuard(FasterRCNN, Guard(fdbd, not fitted")
