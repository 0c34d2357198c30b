"""What scoring the positions of a map costs beside the network's forward pass.

    FDBD_DATA=FOLDER python benchmarks/pixels_cost.py [--untrained]

DeepLabV3-MobileNetV2 at 513 × 513: a map of 65 × 65 positions of 256 features. The score, and the
whole decision, are timed against the forward pass in the same rounds. Memory is counted as bytes
that torch allocates on the CPU while the map is scored: a copy of the map would be 4.3 MB.

Ends as a section of RESULTS.md.
"""

from __future__ import annotations

import argparse

import torch
from _common import interleaved, verdict, write_section
from torch.profiler import ProfilerActivity, profile

import fdbd
from fdbd.networks.by_name import model_by_name
from fdbd.networks.deeplab import DeepLabV3MobileNetV2

SIDE = 513
TARGET = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--untrained", action="store_true", help="random weights, without FDBD_DATA"
    )
    is_untrained = parser.parse_args().untrained
    torch.manual_seed(0)
    if is_untrained:
        model = DeepLabV3MobileNetV2().eval().to(memory_format=torch.channels_last)
    else:
        model = model_by_name("public:deeplab-voc", device="cpu").model
    classifier = fdbd.Classifier(model)
    guard = fdbd.Guard(classifier)
    images = torch.randn(1, 3, SIDE, SIDE)
    many = torch.randn(24, 3, 129, 129)
    guard.fit(many, progress=False).calibrate(many.flip(3), alpha=0.1, progress=False)
    with torch.inference_mode():
        batch = classifier(images)
        features = batch.features
        labelled = fdbd.Batch(features, batch.logits)
        timings = interleaved(
            {
                "forward pass": lambda: model(images),
                "score": lambda: guard.detector.score(labelled),
                "decision on the map": lambda: guard(batch),
            },
            rounds=15,
            calls=3,
        )
        copied = allocated(lambda: guard.detector.score(labelled))
    ratio = timings.ratio("score", "forward pass")
    decided = timings.ratio("decision on the map", "forward pass")
    size = features.nbytes
    missed = []
    if ratio > TARGET:
        missed.append(f"the score adds {100 * ratio:.2f} %, more than {100 * TARGET:.0f} %")
    if copied > size / 2:
        missed.append(f"the score allocates {copied / 1e6:.2f} MB beside a map of {size / 1e6:.2f}")
    lines = [
        "`python benchmarks/pixels_cost.py" + (" --untrained" if is_untrained else "") + "`: "
        f"one image of {SIDE} × {SIDE}, a map of {len(features):,} positions × "
        f"{features.shape[1]} features, fDBD. Shares of the forward pass are medians over rounds "
        "in which both ran.",
        "",
        "| | share of the forward pass |",
        "| --- | --- |",
        f"| score | {100 * ratio:.2f} % |",
        f"| decision: score, argmax, thresholds, shares | {100 * decided:.2f} % |",
        "",
        f"While it scores, torch allocates {copied / 1e3:,.0f} kB; the map has "
        f"{size / 1e3:,.0f} kB. The rows are a view of the map: "
        f"{'yes' if is_view(classifier, images) else 'no, a copy of the map is made'}.",
        "",
        verdict(missed),
    ]
    write_section("Scoring a map beside DeepLab's forward pass", "\n".join(lines))


def allocated(function: object) -> int:
    """Bytes that torch allocates on the CPU in one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in found.key_averages())


def is_view(classifier: fdbd.Classifier, images: torch.Tensor) -> bool:
    """Whether the rows share the memory of the map that the head read."""
    seen = []
    layer = classifier.model.classifier
    handle = layer.register_forward_hook(lambda module, given, result: seen.append(given[0]))
    try:
        rows = classifier(images).features
    finally:
        handle.remove()
    return rows.untyped_storage().data_ptr() == seen[0].untyped_storage().data_ptr()


if __name__ == "__main__":
    main()
