"""Two Ray workers compared with one, on this machine: a zoo model over CIFAR-size images, one torch
thread per worker.

Run ``python benchmarks/ray_scaling.py``; it writes the section "Ray" of RESULTS.md. Nothing else
should run meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import ray
import ray.data
import torch
from _common import machine, seconds_text, table, write_section

import fdbd
from fdbd import networks as models
from fdbd.jobs import ray as on_ray

LIMIT = 1.5
MODEL = "cifar10-ce"
WARM = 0.25
"""Share of the rows that come before the clock starts: until then workers are starting and loading
the model."""


def measure(
    guard: fdbd.Guard, images: ray.data.Dataset, workers: int, batch_size: int
) -> tuple[float, float]:
    """Rows per second once all workers are at work, and seconds for the whole job."""
    card = models.zoo_card(MODEL)
    pool = on_ray.Workers(workers, cpus=1, batch_size=batch_size)
    scored = on_ray.score(guard, images, preprocess=card.preprocess, workers=pool)
    total = images.count()
    begin = time.perf_counter()
    rows = 0
    warm_rows = 0
    warm_time = begin
    for block in scored.iter_batches(batch_size=None, batch_format="pyarrow"):
        rows += len(block)
        if not warm_rows and rows >= WARM * total:
            warm_rows = rows
            warm_time = time.perf_counter()
    end = time.perf_counter()
    if rows != total:
        raise RuntimeError(f"{rows} rows came back of {total}")
    return (rows - warm_rows) / (end - warm_time), end - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    on_ray.connect()
    ray.data.DataContext.get_current().enable_progress_bars = False
    torch.manual_seed(0)
    model = models.zoo(MODEL)
    card = models.zoo_card(MODEL)
    pixels = np.random.default_rng(0).integers(0, 256, (options.images, 32, 32, 3), dtype=np.uint8)
    sample = card.preprocess(pixels[:512])
    guard = (
        fdbd.Guard(model, "fdbd")
        .fit([sample[:256]], progress=False)
        .calibrate([sample[256:]], progress=False)
    )
    pieces = np.array_split(pixels, max(8, options.images // 512))
    images = ray.data.from_numpy(pieces).rename_columns({"data": "image"}).materialize()
    rates: dict[int, list[float]] = {1: [], 2: []}
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(options.rounds):
        for workers in (1, 2) if number % 2 == 0 else (2, 1):
            rate, whole = measure(guard, images, workers, options.batch_size)
            rates[workers].append(rate)
            seconds[workers].append(whole)
            print(f"round {number}, {workers} workers: {rate:.0f} images/s, {whole:.1f} s in all")
    ray.shutdown()
    ratio = statistics.median(two / one for one, two in zip(rates[1], rates[2]))
    whole_ratio = statistics.median(one / two for one, two in zip(seconds[1], seconds[2]))
    rows = [
        [
            str(workers),
            f"{statistics.median(rates[workers]):,.0f}",
            seconds_text(statistics.median(seconds[workers])),
        ]
        for workers in (1, 2)
    ]
    rows.append(["ratio", f"{ratio:.2f}", f"{whole_ratio:.2f}"])
    write_section(
        "Ray",
        f"`python benchmarks/ray_scaling.py`: `fdbd.jobs.ray.score` with the zoo model {MODEL} over"
        f" {options.images:,} images of 32 × 32 in Ray's object store, batches of"
        f" {options.batch_size}, one torch thread per worker; medians of {options.rounds} rounds."
        f" The rate is that of the last {1 - WARM:.0%} of the images; the whole job includes"
        f" starting the workers. Target: at least {LIMIT} times the rate of one worker.\n\n"
        + table(["workers", "images/s", "whole job"], rows)
        + "\n"
        + machine(("torch", "ray"))
        + "\n",
    )
    print(f"two workers: {ratio:.2f} × one (asked for: {LIMIT})")


if __name__ == "__main__":
    main()
