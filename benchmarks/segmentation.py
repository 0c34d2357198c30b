"""What a guard of maps finds with a real network: DeepLabV3-MobileNetV2 on Pascal VOC's classes.

    FDBD_DATA=FOLDER python benchmarks/segmentation.py [--images N]

The network is `public:deeplab-voc` (npm, Apache 2.0). FDBD_DATA holds ImageNet photographs as
`imagenet/NNN_….jpg` and `imagenet_val/NNN_….jpg`, NNN the class's index, and textures in `dtd`.

- In-distribution: photographs of ImageNet classes whose object Pascal VOC has. The guard is fitted
  on those of `imagenet`; those of `imagenet_val` are split at random into a half to calibrate on
  and a half to test on.
- Out-of-distribution: photographs of objects that VOC lacks (`imagenet_val`), textures, and the test
  photographs with an object pasted in, whose mask is exact.

Ends as a section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from _common import write_section
from numpy.typing import NDArray

import fdbd
from fdbd.core.grid import Grid
from fdbd.core.pixels import decode
from fdbd.data.pasting import paste_object
from fdbd.decision.map_threshold import MapThreshold, PixelShares
from fdbd.metrics import evaluate_components, evaluate_pixels
from fdbd.metrics.evaluation import evaluate
from fdbd.networks.by_name import NamedModel, model_by_name
from fdbd.util.files import data_roots

DETECTORS = ("fdbd", "msp", "maxlogit", "energy", "mds")
ALPHA = 0.05
BATCH = 4
# The side of the maps on which pixels are compared, about half of the network's input.
TRUTH_SIDE = 257
SPLITS = 100
# Of a predicted region, as a share of the pixels of SegmentMeIfYouCan's images.
MIN_PIXELS = 50

# ImageNet's classes that show an object of Pascal VOC.
WITH_VOC_OBJECT = (
    # birds
    *range(7, 25),
    *range(80, 101),
    *range(127, 147),
    # dogs
    *range(151, 269),
    # cats
    *range(281, 286),
    # horse, ox, sheep
    *(339, 345, 348, 349),
    # aeroplanes
    *(404, 895),
    # bicycles
    *(444, 671),
    # boats
    *(472, 484, 554, 576, 625, 628, 780, 814, 871, 914),
    # bottles
    *(440, 737, 898, 907),
    # buses
    *(654, 779, 874),
    # cars
    *(407, 436, 468, 511, 609, 627, 656, 661, 751, 817),
    # chairs
    *(423, 559, 765),
    # trains
    *(466, 547, 705, 820),
    # table, screens, motorbikes, pot plant, sofa
    *(532, 664, 665, 670, 738, 831, 851),
    # people
    *(981, 982),
)
# Fish, amphibians, reptiles, spiders, shells, insects, food: nothing of VOC, and seldom a person.
WITHOUT_VOC_OBJECT = (
    *range(0, 7),
    *range(25, 69),
    *range(70, 80),
    *range(107, 127),
    *range(300, 327),
    *range(389, 398),
    *range(924, 970),
    *range(984, 999),
)


class Maps(NamedTuple):
    """What the network and the detectors say of a set of images."""

    scores: dict[str, torch.Tensor]
    """By detector: (N, H, W)."""
    share_of_background: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=200, help="most images of a set")
    limit = parser.parse_args().images
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    root = _data_folder()
    network = model_by_name("public:deeplab-voc", device="cpu")

    fresh = _photographs(root / "imagenet_val", WITH_VOC_OBJECT)
    random.shuffle(fresh)
    calibration = fresh[: len(fresh) // 2][:limit]
    test = fresh[len(fresh) // 2 :][:limit]
    training = _some(_photographs(root / "imagenet", WITH_VOC_OBJECT), limit, random)
    objects = _some(_photographs(root / "imagenet_val", WITHOUT_VOC_OBJECT), limit, random)
    textures = _some(sorted((root / "dtd").glob("*.jpg")), 2 * limit, random)
    fillings = textures[limit:]
    textures = textures[:limit]

    started = time.perf_counter()
    guards = fitted_guards(network, training)
    on_calibration = maps_of(network, guards, _decoded(calibration))
    for name, guard in guards.items():
        guard.map_threshold = threshold_of(on_calibration.scores[name])
    on_test = maps_of(network, guards, _decoded(test))
    on_objects = maps_of(network, guards, _decoded(objects))
    on_textures = maps_of(network, guards, _decoded(textures))
    pasted = []
    truth = []
    for image, filling in zip(_decoded(test), _decoded(_repeated(fillings, len(test)))):
        found = paste_object(network.preprocess.fit(image), filling, random)
        pasted.append(found.image)
        truth.append(_at_truth_side(found.mask))
    on_pasted = maps_of(network, guards, iter(pasted))

    lines = [
        f"`FDBD_DATA=FOLDER python benchmarks/segmentation.py --images {limit}`. Fitted on "
        f"{len(training)} photographs, calibrated on {len(calibration)}, tested on {len(test)} "
        f"others, {len(objects)} photographs of objects that VOC lacks, {len(textures)} textures "
        f"and {len(pasted)} photographs with a pasted object; α = {ALPHA}. "
        f"{(time.perf_counter() - started) / 60:.0f} minutes.",
        "",
        "The promise, on fresh in-distribution images: mean share of flagged positions with a 95 % "
        "interval over images (and its mean over random splits of calibration and test images), "
        "and share of flagged images.",
        "",
        "| Detector | flagged positions, % | over splits, % | flagged images, % |",
        "| --- | --- | --- | --- |",
    ]
    for name, guard in guards.items():
        lines.append(_promise_row(name, guard, on_calibration.scores[name], on_test.scores[name]))
    lines += [
        "",
        f"Pasted objects, pixel by pixel at {TRUTH_SIDE} × {TRUTH_SIDE}, OOD positive, in percent, "
        "with 95 % intervals over images; components at the guard's own threshold, regions from "
        f"{MIN_PIXELS} pixels on.",
        "",
        "| Detector | AUROC | FPR95 | AP | sIoU | PPV | F1* |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, guard in guards.items():
        lines.append(_pixel_row(name, guard, on_pasted.scores[name], truth))
    lines += [
        "",
        "Images as a whole: AUROC of the image's score against the test photographs, and in "
        "brackets the share of images flagged, in percent.",
        "",
        "| Detector | objects that VOC lacks | textures | pasted objects |",
        "| --- | --- | --- | --- |",
    ]
    for name, guard in guards.items():
        outside = (on_objects.scores[name], on_textures.scores[name], on_pasted.scores[name])
        lines.append(_image_row(name, guard, on_test.scores[name], outside))
    lines += [
        "",
        "Positions that the network calls background: "
        f"{100 * on_test.share_of_background:.0f} % of the test photographs, "
        f"{100 * on_objects.share_of_background:.0f} % of the objects that VOC lacks, "
        f"{100 * on_textures.share_of_background:.0f} % of the textures.",
    ]
    write_section("Segmentation: DeepLabV3 on VOC's classes", "\n".join(lines))


# ── data


def _data_folder() -> Path:
    for root in data_roots():
        if (root / "imagenet_val").is_dir() and (root / "dtd").is_dir():
            return root
    raise SystemExit("FDBD_DATA names no folder with imagenet, imagenet_val and dtd")


def _photographs(folder: Path, classes: Sequence[int]) -> list[Path]:
    """The photographs of these ImageNet classes, whose index their name begins with."""
    return [path for path in sorted(folder.glob("*.jpg")) if int(path.name[:3]) in classes]


def _some(paths: list[Path], count: int, random: np.random.Generator) -> list[Path]:
    order = random.permutation(len(paths))[:count]
    return [paths[place] for place in order]


def _repeated(paths: list[Path], count: int) -> list[Path]:
    return [paths[place % len(paths)] for place in range(count)]


def _decoded(paths: Sequence[Path]) -> Iterator[NDArray[np.uint8]]:
    for path in paths:
        yield decode(path)


def _batches(network: NamedModel, images: Iterator[NDArray[np.uint8]]) -> Iterator[torch.Tensor]:
    waiting = []
    for image in images:
        waiting.append(image)
        if len(waiting) == BATCH:
            yield network.preprocess(waiting)
            waiting = []
    if waiting:
        yield network.preprocess(waiting)


def _at_truth_side(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    places = (np.arange(TRUTH_SIDE) + 0.5) * len(mask) / TRUTH_SIDE
    rows = places.astype(int)
    return mask[rows][:, rows].astype(np.int64)


# ── guards


def fitted_guards(network: NamedModel, training: Sequence[Path]) -> dict[str, fdbd.Guard]:
    """A guard for each detector, fitted on the same positions of one run of the network; those that
    learn from labels take the network's own."""
    classifier = fdbd.Classifier(network.model)
    batches = []
    with torch.inference_mode():
        for images in _batches(network, _decoded(training)):
            seen = classifier(images)
            batches.append(seen._replace(labels=seen.logits.argmax(dim=1)))
    guards = {}
    for name in DETECTORS:
        guards[name] = fdbd.Guard(classifier.head, name).fit(batches)
    return guards


def maps_of(
    network: NamedModel, guards: dict[str, fdbd.Guard], images: Iterator[NDArray[np.uint8]]
) -> Maps:
    """The scores of every guard, from one run of the network."""
    classifier = fdbd.Classifier(network.model)
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in guards}
    background = []
    with torch.inference_mode():
        for given in _batches(network, images):
            seen = classifier(given)
            background.append((seen.logits.argmax(dim=1) == 0).float().mean())
            for name, guard in guards.items():
                scores[name].append(guard.score(seen))
    joined = {name: torch.cat(parts) for name, parts in scores.items()}
    return Maps(joined, float(torch.stack(background).mean()))


def threshold_of(scores: torch.Tensor) -> MapThreshold:
    """The threshold from maps of calibration images."""
    shares = PixelShares()
    shares.add(scores.flatten(1))
    return MapThreshold.from_shares(shares, alpha=ALPHA)


# ── tables


def _promise_row(
    name: str, guard: fdbd.Guard, calibration: torch.Tensor, test: torch.Tensor
) -> str:
    flagged = _flagged_shares(guard.map_threshold, test)
    low, high = _interval_of_mean(flagged.numpy())
    both = torch.cat([calibration, test])
    means = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(SPLITS):
        order = torch.randperm(len(both), generator=generator)
        threshold = threshold_of(both[order[: len(calibration)]])
        means.append(float(_flagged_shares(threshold, both[order[len(calibration) :]]).mean()))
    images = _is_flagged(guard, test).float().mean()
    return (
        f"| {name} | {100 * flagged.mean():.2f} ({100 * low:.2f}–{100 * high:.2f}) | "
        f"{100 * np.mean(means):.2f} | {100 * images:.1f} |"
    )


def _flagged_shares(threshold: MapThreshold, scores: torch.Tensor) -> torch.Tensor:
    return threshold.is_ood(scores.float()).flatten(1).double().mean(dim=1)


def _interval_of_mean(values: NDArray[np.float64]) -> tuple[float, float]:
    random = np.random.default_rng(0)
    draws = random.choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def _image_scores(scores: torch.Tensor) -> torch.Tensor:
    from fdbd.decision.map_threshold import image_scores

    return image_scores(scores.float().flatten(1))


def _is_flagged(guard: fdbd.Guard, scores: torch.Tensor) -> torch.Tensor:
    return guard.map_threshold.image_threshold.is_ood(_image_scores(scores))


def _pixel_row(
    name: str, guard: fdbd.Guard, scores: torch.Tensor, truth: list[NDArray[np.int64]]
) -> str:
    enlarged = _enlarged(scores.float())
    found = evaluate_pixels(enlarged.numpy(), truth, bootstrap=300)
    flagged = guard.map_threshold.is_ood(enlarged)
    components = evaluate_components(flagged.numpy(), truth, min_pixels=MIN_PIXELS)
    cells = []
    for estimate in (found.auroc, found.fpr95, found.ap):
        cells.append(f"{100 * estimate:.2f} ({100 * estimate.low:.1f}–{100 * estimate.high:.1f})")
    for value in (components.siou, components.ppv, components.f1):
        cells.append(f"{100 * value:.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def _enlarged(scores: torch.Tensor) -> torch.Tensor:
    """Scores of the nearest position, at the side of the truth."""
    images, height, width = scores.shape
    wanted = Grid(images, TRUTH_SIDE, TRUTH_SIDE)
    rows = (torch.arange(wanted.height) * height + height // 2) // wanted.height
    columns = (torch.arange(wanted.width) * width + width // 2) // wanted.width
    return scores[:, rows][:, :, columns]


def _image_row(
    name: str, guard: fdbd.Guard, test: torch.Tensor, outside: Sequence[torch.Tensor]
) -> str:
    cells = []
    for scores in outside:
        auroc = evaluate(_image_scores(test), _image_scores(scores)).auroc
        share = _is_flagged(guard, scores).float().mean()
        cells.append(f"{100 * auroc:.2f} ({100 * share:.0f})")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
