"""How long a fresh process takes to its first decision: import, load, decide.

    python benchmarks/cold_start.py [--repeat 5] [--rows 1 20000] [--no-write]

Each figure is the least of several fresh processes, in seconds of wall time, with a warm, an empty
and an unwritable folder for compiled kernels. `import torch` and building the network are timed in
the same process and shown beside what fdbd adds to them. Batches large enough for a compiled kernel
(more than half a million features: 20,000 rows here) show what its compilation costs. Writes the
section "Cold start" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import machine, seconds_text, table, verdict, write_section

IMPORT_LIMIT = 0.2
"""Seconds that `import fdbd` may take beyond torch."""
DECISION_LIMIT = 0.5
"""Seconds from loading a guard to its first decision, beyond the network's own."""
CHILD = """
import json, sys, time
start = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - start
start = time.perf_counter()
import fdbd
fdbd.load, fdbd.Batch
import_seconds = time.perf_counter() - start
path, rows = sys.argv[1], int(sys.argv[2])
start = time.perf_counter()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 100)).eval()
model_seconds = time.perf_counter() - start
if path == "-":
    path = sys.argv[3]
    guard = fdbd.Guard(model).fit([torch.randn(400, 64)], progress=False)
    guard.calibrate([torch.randn(400, 64)], progress=False).save(path)
    guard(torch.randn(rows, 64))
    sys.exit()
start = time.perf_counter()
guard = fdbd.load(path, model)
load_seconds = time.perf_counter() - start
images = torch.randn(rows, 64)
with torch.no_grad():
    start = time.perf_counter()
    model(images)
    network_seconds = time.perf_counter() - start
start = time.perf_counter()
guard(images)
first_seconds = time.perf_counter() - start
start = time.perf_counter()
guard(images)
second_seconds = time.perf_counter() - start
print(json.dumps({
    "import torch": torch_seconds, "import fdbd": import_seconds, "build the network": model_seconds,
    "load the guard": load_seconds, "the network alone": network_seconds,
    "first decision": first_seconds, "second decision": second_seconds,
}))
"""


def run(cache: Path, *arguments: str) -> str:
    """What a fresh process prints, with this folder for compiled kernels."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def measure(cache: Path, guard: Path, rows: int, repeat: int, is_cold: bool) -> dict[str, float]:
    """The least of several processes; a cold cache is emptied before each."""
    best: dict[str, float] = {}
    for number in range(repeat):
        folder = cache
        if is_cold:
            folder = cache / str(number)
            folder.mkdir()
        found: dict[str, float] = json.loads(run(folder, str(guard), str(rows)))
        for name, seconds in found.items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


def of_rows(rows: int, repeat: int) -> dict[str, dict[str, float]]:
    """Seconds by folder for kernels and step, for a first batch of so many rows."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="fdbd-cold-") as name:
        folder = Path(name)
        guard = folder / "guard.safetensors"
        warm = folder / "warm"
        cold = folder / "cold"
        unwritable = folder / "unwritable"
        warm.mkdir()
        cold.mkdir()
        # A file cannot be written to as a folder, not even by the superuser.
        unwritable.touch()
        run(warm, "-", str(rows), str(guard))
        results["warm cache"] = measure(warm, guard, rows, repeat, is_cold=False)
        results["empty cache"] = measure(cold, guard, rows, repeat, is_cold=True)
        results["unwritable cache"] = measure(unwritable, guard, rows, repeat, is_cold=False)
    return results


def shortfalls(rows: int, results: dict[str, dict[str, float]]) -> list[str]:
    """The targets that were missed: of small batches, whatever the folder for kernels."""
    missed = []
    for kind, found in results.items():
        if found["import fdbd"] > IMPORT_LIMIT:
            missed.append(f"{kind}: fdbd takes {found['import fdbd']:.2f} s to import")
        added = found["load the guard"] + found["first decision"] - found["the network alone"]
        if added > DECISION_LIMIT:
            missed.append(f"{kind}, {rows:,} rows: {added:.2f} s from load to first decision")
    return missed


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 20_000])
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    lines = []
    missed = []
    for rows in options.rows:
        results = of_rows(rows, options.repeat)
        missed += shortfalls(rows, results)
        for step in next(iter(results.values())):
            values = [seconds_text(found[step]) for found in results.values()]
            lines.append([f"{rows:,}", step, *values])
    text = (
        f"`python benchmarks/cold_start.py`: the least of {options.repeat} fresh processes, wall "
        "time; features of 64 numbers through a network of two layers. Targets: "
        f"{IMPORT_LIMIT} s to import beyond torch, {DECISION_LIMIT} s from load to the first "
        f"decision beyond the network. {machine()}\n\n"
        + table(["rows", "step", "warm cache", "empty cache", "unwritable cache"], lines)
        + "\n"
        + verdict(missed)
    )
    print(text)
    if not options.no_write:
        write_section("Cold start", text)


if __name__ == "__main__":
    main()
