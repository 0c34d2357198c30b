"""Throughput of `fdbd score`: images, and photographs from FDBD_DATA/imagenet_val, compared with
the bare model over tensors; features with a bare Parquet read.

Run ``python benchmarks/scoring.py``; it writes the section "Scoring files" of RESULTS.md. Run
nothing else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import machine, seconds_text, table, write_section, writes
from PIL import Image
from safetensors.torch import save_file

import fdbd
from fdbd import networks as models
from fdbd.jobs.fitting import fit_files
from fdbd.jobs.scoring import Engine, score_files
from fdbd.networks.by_name import model_by_name

MODEL = "cifar10-ce"
# The targets.
IMAGE_SHARE = 0.85
MEMORY_SHARE = 1.10
FEATURE_SHARE = 0.5
PHOTO_SHARE = 0.95


def make_images(folder: Path, count: int) -> None:
    """The same images as PNG files and as an NPZ."""
    pixels = (
        np.random.default_rng(0)
        .integers(0, 255, (count, 8, 8, 3), np.uint8)
        .repeat(4, 1)
        .repeat(4, 2)
    )
    (folder / f"png-{count}").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"png-{count}" / f"{number:06d}.png")
    np.savez(folder / f"{count}.npz", x=pixels)


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bare_model(count: int, batch_size: int) -> float:
    """Seconds of the model alone over tensors that are already in memory."""
    model = models.zoo(MODEL)
    batch = torch.randn(batch_size, 3, 32, 32)
    with torch.inference_mode():
        model(batch)
        start = time.perf_counter()
        for first in range(0, count, batch_size):
            model(batch[: min(batch_size, count - first)])
        return time.perf_counter() - start


def peak_memory(guard: Path, data: Path, out: Path, batch_size: int) -> int:
    """Bytes at the peak of a process that scores `data` (Linux). Not ``ru_maxrss``, which starts at
    the peak of the process that started it."""
    code = (
        "import sys; from fdbd.jobs.scoring import Engine, score_files; "
        "score_files(*sys.argv[1:4], Engine(batch_size=int(sys.argv[4]), progress=False)); "
        "print(*[line for line in open('/proc/self/status') if line.startswith('VmHWM')])"
    )
    command = [sys.executable, "-c", code, *map(str, (guard, data, out, batch_size))]
    _, kilobytes, _ = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()[-3:]
    return int(kilobytes) * 1024


def images(folder: Path, count: int, rounds: int, batch_size: int) -> str:
    guard = folder / "images.safetensors"
    for size in (count // 10, count):
        make_images(folder, size)
    engine = Engine(batch_size=batch_size, progress=False)
    few = str(folder / f"png-{count // 10}")
    fitted = fit_files(model_by_name(MODEL), few, None, engine, holdout=0.2)
    fitted.guard.save(guard)
    kinds = {"PNG folder": f"png-{{}}{os.sep}", "NPZ": "{}.npz"}
    shares: dict[str, list[float]] = {kind: [] for kind in kinds}
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    bare = [bare_model(count, batch_size)]
    for _ in range(rounds):
        for kind, name in kinds.items():
            data = str(folder / name.format(count))
            summary = score_files(guard, data, folder / "out.parquet", engine)
            bare.append(bare_model(count, batch_size))
            # The machine drifts: the model's time is taken before and after.
            alone = (bare[-2] + bare[-1]) / 2
            rates[kind].append(summary.rows_per_second)
            shares[kind].append(summary.rows_per_second * alone / count)
    rows = []
    for kind, name in kinds.items():
        out = folder / "out.parquet"
        small = peak_memory(guard, folder / name.format(count // 10), out, batch_size)
        large = peak_memory(guard, folder / name.format(count), out, batch_size)
        rate = statistics.median(rates[kind])
        share = statistics.median(shares[kind])
        peaks = f"{small / 1e6:.0f} MB, {large / 1e6:.0f} MB"
        rows.append(
            [
                kind,
                f"{rate:,.0f}/s",
                f"{share:.0%}",
                f"{IMAGE_SHARE:.0%}",
                peaks,
                f"{large / small - 1:+.1%}",
            ]
        )
    return (
        f"{count:,} images of 32 × 32, `{MODEL}`, batches of {batch_size}: `score_files` compared"
        f" with the model alone over tensors in memory ({count / statistics.median(bare):,.0f}/s),"
        f" run before and after; medians of {rounds}. Peak memory of the scoring process is given"
        f" for {count // 10:,} and {count:,} images and should differ by less than"
        f" {MEMORY_SHARE - 1:.0%}.\n\n"
        + table(["input", "rate", "of the bare model", "target", "peak memory", "difference"], rows)
    )


def photographs(folder: Path, count: int, rounds: int) -> str:
    """JPEG photographs, as they are and four times as wide, through large networks with random
    weights: `score_files` beside the bare model over tensors in memory."""
    from torchvision import models as torchvision_models

    found = sorted((Path(os.environ.get("FDBD_DATA", "")) / "imagenet_val").glob("*.jpg"))[:count]
    if len(found) < 20:
        return "Photographs were not measured: FDBD_DATA names no folder with `imagenet_val`.\n"
    small = folder / "photographs"
    large = folder / "photographs-large"
    small.mkdir()
    large.mkdir()
    for path in found:
        shutil.copyfile(path, small / path.name)
    for path in found[: max(20, count // 10)]:
        with Image.open(path) as image:
            width, height = image.size
            image.convert("RGB").resize((4 * width, 4 * height)).save(large / path.name, quality=90)
    lines = []
    for name in ("resnet50", "mobilenet_v2"):
        torch.manual_seed(0)
        network = torchvision_models.get_model(name, weights=None).eval()
        weights = folder / f"{name}.safetensors"
        save_file(network.state_dict(), weights)
        guard = folder / f"{name}-guard.safetensors"
        named = model_by_name(f"torchvision:{name}", checkpoint=weights, device="cpu")
        engine = Engine(batch_size=32, progress=False)
        with warnings.catch_warnings():
            # Random weights agree with no labels, and few images calibrate.
            warnings.simplefilter("ignore")
            fitted = fit_files(named, str(large) + os.sep, None, engine, holdout=0.5)
        fitted.guard.save(guard)
        for kind, images_folder in (("as they are", small), ("4 × as wide", large)):
            total = len(list(images_folder.iterdir()))
            shares = []
            rates = []
            for _ in range(rounds):
                alone = _alone(network, total)
                summary = score_files(
                    guard, str(images_folder) + os.sep, folder / "out.parquet", engine,
                    checkpoint=weights,
                )  # fmt: skip
                alone = (alone + _alone(network, total)) / 2
                rates.append(summary.rows_per_second)
                shares.append(summary.rows_per_second * alone / total)
            rate = f"{statistics.median(rates):.1f}/s"
            share = f"{statistics.median(shares):.0%}"
            lines.append([f"{name}, {kind}", f"{total:,}", rate, share])
            print("  ".join(lines[-1]), flush=True)
    return (
        "JPEG photographs with a short side of 256, as they are and enlarged 4 times (a decoder "
        "then reads an eighth to a half of each side: draft decoding), at 224 × 224 in batches of "
        "32: `score_files`, with its start, compared with the model alone over tensors in memory, "
        f"run before and after; medians of {rounds}. Target with ResNet-50: {PHOTO_SHARE:.0%}. "
        "With a fast network, what bounds the rate is decoding, which shares the cores with it.\n\n"
        + table(["network, photographs", "images", "rate", "of the bare model"], lines)
    )


def _alone(network: torch.nn.Module, count: int) -> float:
    """Seconds of a network over `count` images that are in memory, in batches of 32."""
    batch = torch.randn(32, 3, 224, 224)
    with torch.inference_mode():
        network(batch)
        start = time.perf_counter()
        for first in range(0, count, 32):
            network(batch[: min(32, count - first)])
        return time.perf_counter() - start


def features(folder: Path, count: int, width: int, rounds: int) -> str:
    path = folder / "features.parquet"
    guard_path = folder / "features.safetensors"
    group = 65_536
    schema = pa.schema([("features", pa.list_(pa.float32(), width))])
    generator = np.random.default_rng(0)
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, count, group):
            values = generator.standard_normal((min(group, count - start), width), np.float32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), width)
            writer.write_table(pa.table([column], schema=schema))
    torch.manual_seed(0)
    guard = fdbd.Guard(fdbd.Head(torch.randn(10, width), torch.zeros(10)))
    guard.fit(fdbd.Batch(torch.randn(5000, width))).calibrate(fdbd.Batch(torch.randn(1000, width)))
    guard.save(guard_path)
    quiet = Engine(progress=False)
    reads = []
    scores = []
    shares = []
    for _ in range(rounds):
        reads.append(seconds_of(lambda: pq.read_table(path, columns=["features"])))
        scores.append(
            seconds_of(lambda: score_files(guard_path, str(path), folder / "out.parquet", quiet))
        )
        shares.append(reads[-1] / scores[-1])
    share = statistics.median(shares)
    row = [
        seconds_text(statistics.median(reads)),
        seconds_text(statistics.median(scores)),
        f"{share:.2f}",
    ]
    return (
        f"{count:,} × {width} float32 in Parquet, fixed-size lists in row groups of {group:,},"
        " uncompressed: `pyarrow.parquet.read_table` compared with `score_files` from file to"
        f" file; medians of {rounds} pairs.\n\n"
        + table(
            ["bare read", "score", "speed of the bare read", "target"],
            [[*row, f"{FEATURE_SHARE:.2f}"]],
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a hundredth of the data, one round; writes nothing"
    )
    parser.add_argument("--batch-size", type=int, default=128)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_images = 600 if arguments.quick else 20_000
        num_photographs = 200 if arguments.quick else 2000
        num_rows = 10_000 if arguments.quick else 1_000_000
        texts = [
            images(folder, num_images, rounds, arguments.batch_size),
            photographs(folder, num_photographs, rounds),
            features(folder, num_rows, 512, rounds),
        ]
    print("\n".join(texts))
    if writes(arguments.quick):
        about = machine(("torch", "numpy", "pyarrow", "pillow"))
        write_section(
            "Scoring files", f"`python benchmarks/scoring.py`. {about}\n\n" + "\n".join(texts)
        )


if __name__ == "__main__":
    main()
