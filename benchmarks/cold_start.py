"""How long a fresh process takes to its first decision: import, load, decide.

    python benchmarks/cold_start.py [--repeat 5] [--rows 1] [--json FILE]

Each figure is the least of several fresh processes, in seconds of wall time, with a warm, an empty
and an unwritable folder for compiled kernels. `import torch` and building the network are timed in
the same process and shown beside what fdbd adds to them. Batches large enough for a compiled kernel
(more than half a million features) show what its compilation costs: try --rows 20000.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

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
        folder = cache / str(number) if is_cold else cache
        folder.mkdir(exist_ok=True)
        found: dict[str, float] = json.loads(run(folder, str(guard), str(rows)))
        for name, seconds in found.items():
            best[name] = min(seconds, best.get(name, seconds))
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="fdbd-cold-") as name:
        folder = Path(name)
        guard = folder / "guard.safetensors"
        warm = folder / "warm"
        cold = folder / "cold"
        unwritable = folder / "unwritable"
        warm.mkdir()
        cold.mkdir()
        unwritable.mkdir(mode=0o500)
        run(warm, "-", str(options.rows), str(guard))
        for kind, cache, is_cold in (
            ("warm cache", warm, False),
            ("empty cache", cold, True),
            ("unwritable cache", unwritable, False),
        ):
            results[kind] = measure(cache, guard, options.rows, options.repeat, is_cold)
    names = list(next(iter(results.values())))
    print(f"{options.rows} rows, seconds, the least of {options.repeat} processes")
    print(f"{'':20}" + "".join(f"{kind:>18}" for kind in results))
    for step in names:
        values = "".join(f"{found[step]:18.3f}" for found in results.values())
        print(f"{step:20}{values}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
