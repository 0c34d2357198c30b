"""Write the stored samples of real features: ``FDBD_DATA=FOLDER python
tests/bench/make_real_features.py [NETWORK …]``.

Of each public network: a few fitted, ID and OOD features in float16, and a part of its head.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from fdbd.bench import Config, benchmark_of
from fdbd.paper.experiment import NETWORKS
from fdbd.util.files import parse_toml

FOLDER = Path(__file__).parent / "real"
ROWS, CLASSES = 60, 50


def spread(values: Tensor, count: int) -> Tensor:
    """At most `count` rows, spread evenly."""
    return values[torch.arange(min(count, len(values))) * len(values) // min(count, len(values))]


def main() -> None:
    entries = parse_toml(NETWORKS.read_text(encoding="utf-8"))
    for name in sys.argv[1:] or entries:
        benchmark = benchmark_of(Config.from_dict(entries[name]))
        head = benchmark.head
        tensors = {
            "weight": spread(head.weight, CLASSES),
            "bias": spread(head.bias, CLASSES),
            "fit": spread(benchmark.train.features, ROWS),
            "inside": spread(benchmark.test.features, ROWS),
            **{
                f"outside {samples.name}": spread(samples.features, ROWS)
                for samples in benchmark.ood[:2]
            },
        }
        path = FOLDER / f"{name}.safetensors"
        save_file({key: value.half().contiguous() for key, value in tensors.items()}, path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
