"""A nightly job on Ray: fit and calibrate a guard on features in Parquet, score the day's rows,
report the OOD rate.

``python examples/nightly_ray.py`` runs it with Ray on this machine; ``--address auto`` or
``--address head:6379`` runs it on a cluster, where FOLDER must be the same on every node. If FOLDER
has no Parquet files, it writes some: features of a CIFAR-10 classifier from the package, and a day
on which a fifth of the images are not from CIFAR-10.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch

import fdbd
from fdbd.bench.bundle import load_bundle
from fdbd.jobs import ray as on_ray
from fdbd.monitor.stream import wilson

EXPECTED_OOD = 0.05


def write_day(folder: Path) -> None:
    """Training features, calibration features and those of the day, in several files each."""
    bundle = load_bundle("cifar10-ce")
    known, strange = bundle.test.features[:2000].float(), bundle.ood[0].features[:400].float()
    sets = {
        "train": (bundle.train.features.float(), bundle.train.labels),
        "calibration": (known[:400], None),
        "today": (torch.cat([known[400:], strange]), None),
    }
    for name, (features, labels) in sets.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, rows in enumerate(np.array_split(np.arange(len(features)), 4)):
            column = pa.FixedSizeListArray.from_arrays(
                features[rows].numpy().ravel(), features.shape[1]
            )
            table = pa.table({"id": rows, "features": column})
            if labels is not None:
                table = table.append_column("y", pa.array(labels[rows].numpy()))
            pq.write_table(table, folder / name / f"{number}.parquet")


def main() -> dict[str, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("nightly"))
    parser.add_argument("--address", help="of a Ray cluster; default: Ray on this machine")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    if not (folder / "today").is_dir():
        write_day(folder)
    on_ray.connect(options.address)

    guard = fdbd.Guard(load_bundle("cifar10-ce").head, "fdbd")
    on_ray.fit(guard, ray.data.read_parquet(str(folder / "train")))
    on_ray.calibrate(guard, ray.data.read_parquet(str(folder / "calibration")), alpha=EXPECTED_OOD)
    guard.save(folder / "guard.safetensors")

    scored = on_ray.score(guard, ray.data.read_parquet(str(folder / "today"))).materialize()
    scored.write_parquet(str(folder / "scores"), mode="overwrite")
    rows = scored.count()
    ood = scored.sum("is_ood")
    low, _ = wilson(ood, rows, 0.99)
    print(
        f"{rows} rows, {ood} of them OOD ({ood / rows:.1%}, at least {low:.1%}); {EXPECTED_OOD:.0%}"
        " were expected"
    )
    return {"rows": rows, "rate": ood / rows, "low": low}


if __name__ == "__main__":
    sys.exit(1 if main()["low"] > EXPECTED_OOD else 0)  # a scheduler notices the exit code
