"""Features of ImageNet's size from file to file: `fdbd fit` and `fdbd score` on up to 1,281,167
rows, compared with one read of the file.

    python benchmarks/scale.py [--rows 1281167] [--width 2048] [--classes 1000] [--dtype float32]
                               [--detectors fdbd mds vim energy knn] [--growth] [--ray]
                               [--bank 12811] [--folder FOLDER]

The features are made in blocks and written to a Parquet file: 10.5 GB in float32 with all rows, so
look at the disk first, or give --rows or --dtype float16. Each fit and score is a process of its
own, whose peak of resident memory is measured (Linux). Memory that grows with the rows is a fault,
except in knn, which keeps its bank. The indices of knn are compared on a bank of 1 % of the rows (--bank: another
number); recall is the share of the exact 50 nearest neighbours that they find. --ray also scores on Ray with two workers on this machine. Writes the section "A million rows"
of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from _common import machine, seconds_text, table, write_section

import fdbd

BLOCK = 16_384
"""Rows that are made, and lie in a row group, at once."""
CALIBRATION_ROWS = 5_000
QUERIES = 200
NEIGHBOURS = 50


class Measured(NamedTuple):
    """What one process took."""

    seconds: float
    peak: int
    """Bytes of resident memory, of the process and its children."""


class Problem:
    """A head with clusters of features around its classes, the same from run to run."""

    def __init__(self, width: int, classes: int) -> None:
        generator = np.random.default_rng(0)
        self.weight = generator.standard_normal((classes, width), np.float32) / width**0.5
        self.bias = np.zeros(classes, np.float32)

    def block(self, number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Features (rows, P) as behind a ReLU, and their labels."""
        generator = np.random.default_rng([1, number])
        classes, width = self.weight.shape
        labels = generator.integers(classes, size=rows)
        features = generator.standard_normal((rows, width), np.float32)
        features += 4 * self.weight[labels]
        return np.maximum(features, 0, out=features), labels

    def write(self, path: Path, rows: int, dtype: str, first: int = 0) -> None:
        """A Parquet file with the columns features and label."""
        width = self.weight.shape[1]
        kind = pa.float16() if dtype == "float16" else pa.float32()
        schema = pa.schema([("features", pa.list_(kind, width)), ("label", pa.int64())])
        with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
            for number, start in enumerate(range(0, rows, BLOCK)):
                features, labels = self.block(first + number, min(BLOCK, rows - start))
                numbers = pa.array(features.astype(dtype).reshape(-1))
                column = pa.FixedSizeListArray.from_arrays(numbers, width)
                writer.write_table(pa.table([column, pa.array(labels)], schema=schema))


def resident(pid: int) -> int:
    """Bytes of resident memory of a process and its children."""
    total = 0
    left = [pid]
    while left:
        one = left.pop()
        try:
            status = Path(f"/proc/{one}/status").read_text()
            for thread in Path(f"/proc/{one}/task").iterdir():
                left += [int(child) for child in (thread / "children").read_text().split()]
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                total += int(line.split()[1]) * 1024
    return total


def run(*arguments: object) -> Measured:
    """`fdbd` with these arguments as a process."""
    command = [sys.executable, "-W", "ignore", "-m", "fdbd", *map(str, arguments)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peaks = [0]

    def watch() -> None:
        while process.poll() is None:
            peaks.append(max(peaks[-1], resident(process.pid)))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    said, _ = process.communicate()
    watcher.join()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{said[-2000:]}")
    return Measured(time.perf_counter() - start, peaks[-1])


def read_seconds(path: Path) -> float:
    """One read of a file's features, row group by row group."""
    file = pq.ParquetFile(path)
    start = time.perf_counter()
    for group in range(file.num_row_groups):
        file.read_row_group(group, columns=["features"])
    return time.perf_counter() - start


def fit_and_score(
    folder: Path, detector: str, train: Path, held_out: Path, rows: int, on_ray: bool
) -> list[list[str]]:
    """One detector at one size: a line for the local engine and, if asked for, one for Ray."""
    guard = folder / f"{detector}.safetensors"
    fitted = run(
        "fit", train, "--head", folder / "head.npz", "--detector", detector,
        "--calibration", held_out, "--out", guard,
    )  # fmt: skip
    lines = []
    for engine in ("local", "ray") if on_ray else ("local",):
        out = folder / f"{detector}-{engine}-scores.parquet"
        arguments = ["score", guard, train, "--out", out, "--engine", engine]
        if engine == "ray":
            arguments += ["--workers", 2]
        scored = run(*arguments)
        read = read_seconds(train)
        if pq.ParquetFile(out).metadata.num_rows != rows:
            raise RuntimeError(f"{detector}: {out.name} has not one row per row of the features")
        out.unlink()
        lines.append(
            [
                detector,
                f"{rows:,}" if engine == "local" else f"{rows:,}, Ray",
                seconds_text(fitted.seconds),
                f"{fitted.seconds / read:.2f}",
                f"{fitted.peak / 1e6:.0f} MB",
                seconds_text(scored.seconds),
                f"{scored.seconds / read:.2f}",
                f"{scored.peak / 1e6:.0f} MB",
            ]
        )
        print("  ".join(lines[-1]), flush=True)
    return lines


def neighbours(problem: Problem, bank_rows: int) -> list[list[str]]:
    """Time and recall of the indices of knn, against the exact neighbours in the same bank."""
    blocks = [problem.block(number, BLOCK)[0] for number in range(-(-bank_rows // BLOCK))]
    bank = fdbd.Batch(torch.from_numpy(np.concatenate(blocks)[:bank_rows]))
    queries = fdbd.Batch(torch.from_numpy(problem.block(10**6, QUERIES)[0]))
    head = fdbd.Head(problem.weight, problem.bias)
    lines = []
    for kind in ("flat", "ivf", "hnsw"):
        detector = fdbd.create("knn", k=NEIGHBOURS, index=kind)
        start = time.perf_counter()
        detector.fit(bank, head)
        # The index is built at the first score.
        detector.score(queries)
        built = time.perf_counter() - start
        start = time.perf_counter()
        detector.score(queries)
        took = time.perf_counter() - start
        lines.append(
            [
                kind,
                f"{bank_rows:,}",
                seconds_text(built),
                seconds_text(took / QUERIES),
                f"{detector.recall(queries):.3f}",
            ]
        )
        print("  ".join(lines[-1]), flush=True)
    return lines


def check_disk(folder: Path, rows: int, width: int, dtype: str) -> None:
    """Stop before a file is written that does not fit."""
    size = rows * width * np.dtype(dtype).itemsize
    free = shutil.disk_usage(folder).free
    if free < 1.3 * size:
        sys.exit(
            f"{rows:,} × {width} {dtype} features are {size / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free in {folder}: give fewer --rows, --dtype float16 or "
            "another --folder"
        )


def main() -> None:
    """Make the files, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_281_167)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32")
    parser.add_argument("--detectors", nargs="+", default=["fdbd", "mds", "vim", "energy"])
    parser.add_argument("--growth", action="store_true", help="also at a tenth of the rows")
    parser.add_argument("--bank", type=int, default=0, help="rows of knn's bank; default 1 %%")
    parser.add_argument("--ray", action="store_true", help="also on Ray with two workers")
    parser.add_argument("--folder", type=Path, help="where the files are made")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    sizes = [options.rows]
    if options.growth:
        sizes.insert(0, options.rows // 10)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="fdbd-scale-") as name:
        folder = Path(name)
        check_disk(folder, sum(sizes), options.width, options.dtype)
        problem = Problem(options.width, options.classes)
        np.savez(folder / "head.npz", weight=problem.weight, bias=problem.bias)
        held_out = folder / "held-out.parquet"
        problem.write(held_out, CALIBRATION_ROWS, options.dtype, first=10**5)
        lines = []
        for rows in sizes:
            train = folder / f"features-{rows}.parquet"
            problem.write(train, rows, options.dtype)
            for detector in options.detectors:
                lines += fit_and_score(folder, detector, train, held_out, rows, options.ray)
            train.unlink()
        found = neighbours(problem, options.bank or max(1000, options.rows // 100))
    size = options.rows * options.width * np.dtype(options.dtype).itemsize
    tables_of_peer = options.rows * (options.width + options.classes) * 4
    text = (
        f"`python benchmarks/scale.py {' '.join(sys.argv[1:])}`: {options.width} features in "
        f"{options.dtype}, {options.classes:,} classes; the largest file holds {size / 1e9:.2f} "
        "GB. A whole process each, with its start; a read is one of the file's features in the "
        "same minute, from the page cache if the memory holds them. pytorch-ood fits from arrays: "
        f"its user holds features and logits in memory, {tables_of_peer / 1e9:.1f} GB here, and "
        f"its fDBD fit a table of {options.classes:,}² × {options.width} float32, "
        f"{options.classes**2 * options.width * 4 / 1e9:.1f} GB. {machine()}, "
        f"{os.cpu_count()} cores\n\n"
        + table(
            [
                "detector", "rows", "fit", "fit, reads of the file", "peak memory of the fit",
                "score", "score, reads of the file", "peak memory of the score",
            ],
            lines,
        )
        + f"\nThe indices of knn over banks in memory, {QUERIES} queries, and the share of the "
        f"exact {NEIGHBOURS} nearest neighbours that they find:\n\n"
        + table(["index", "bank", "to build", "per query", "recall"], found)
    )  # fmt: skip
    print(text)
    if not options.no_write:
        write_section("A million rows", text)


if __name__ == "__main__":
    main()
