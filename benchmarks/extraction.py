"""Extraction to the feature cache compared with the bare model over tensors that are already in
memory.

Run ``python benchmarks/extraction.py``; it writes the section "Extraction" of RESULTS.md. Run
nothing else.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from _common import interleaved, machine, seconds_text, table, write_section, writes

from fdbd import Classifier
from fdbd import networks as models
from fdbd.bench.cache import FeatureCache
from fdbd.data.datasets import Images

TARGET = 0.9
BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few images, one round; writes nothing"
    )
    quick = parser.parse_args().quick
    count, rounds = (512, 1) if quick else (10_000, 5)
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    rows = []
    for name in ("cifar10-ce", "resnet20"):
        model = models.zoo(name) if name in models.list_zoo() else models.create(name).eval()
        rows.append(_compare(name, model, pixels, rounds))
        print("  ".join(rows[-1]), flush=True)
    if writes(quick):
        text = (
            f"`python benchmarks/extraction.py` on {machine(('torch', 'numpy'))}. {count:,} images"
            f" of 32 × 32 go through the network in batches of {BATCH}, and features and logits go"
            f" to the cache; {rounds} interleaved rounds. Target: at least {TARGET:.0%} of the bare"
            " model's throughput.\n\n"
        )
        write_section(
            "Extraction", text + table(["model", "bare model", "extraction", "share"], rows)
        )


def _compare(name: str, model: torch.nn.Module, pixels: np.ndarray, rounds: int) -> list[str]:
    preprocess = models.zoo_card("cifar10-ce").preprocess
    tensors = preprocess(pixels[:BATCH])
    classifier = Classifier(model)

    def bare() -> None:
        with torch.inference_mode():
            for start in range(0, len(pixels), BATCH):
                model(tensors[: min(BATCH, len(pixels) - start)])

    def extract() -> None:
        with tempfile.TemporaryDirectory() as folder:
            FeatureCache(Path(folder)).features(
                classifier, Images(pixels), preprocess, batch_size=BATCH
            )

    timings = interleaved({"bare": bare, "extract": extract}, rounds=rounds, calls=1, dropped=0)
    seconds = [seconds_text(timings.seconds(side)) for side in ("bare", "extract")]
    return [name, *seconds, f"{timings.ratio('bare', 'extract'):.1%}"]


if __name__ == "__main__":
    main()
