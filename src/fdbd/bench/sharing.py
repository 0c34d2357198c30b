"""A benchmark's features as files that any other code can read: arrays in NPZ, the rest in JSON,
and a card for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fdbd.bench.runner import Benchmark
from fdbd.core.batch import Head
from fdbd.data.features import FeatureSet
from fdbd.data.npz import array_names, read_array
from fdbd.fitting.statistics import ClassMoments
from fdbd.util.files import beside, hash_file, read_json, write_json, write_text

FORMAT = 1
ABOUT = "benchmark.json"


def share(benchmark: Benchmark, folder: Path) -> Path:
    """Write a benchmark's features, head and card to a folder.

    Each set is an NPZ file with ``features`` (N, P) and, if there are labels, ``y`` (N,); the head
    is ``head.npz`` with ``weight`` (C, P) and ``bias`` (C,). ``benchmark.json`` says what they are,
    with a SHA-256 of each. Images are not written. `load_shared` reads the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not (folder / ABOUT).exists():
        raise FileExistsError(
            f"{str(folder)!r} holds other files: give --share a folder of its own"
        )
    files = _ArrayFiles(folder)
    head = {"weight": benchmark.head.weight.numpy(), "bias": benchmark.head.bias.numpy()}
    about: dict[str, Any] = {
        "format": FORMAT,
        "title": benchmark.title,
        "notes": list(benchmark.notes),
        "positive": benchmark.positive,
        "groups": {name: list(members) for name, members in benchmark.groups.items()},
        "class_names": list(benchmark.class_names),
        "warnings": list(benchmark.warnings),
        "head": files.write("head", head),
        "train": files.write_set("train", benchmark.train),
        "test": files.write_set("test", benchmark.test),
        "ood": [],
        "shifted": [],
    }
    for number, samples in enumerate(benchmark.ood):
        about["ood"].append(files.write_set(f"ood-{number}", samples))
    for number, samples in enumerate(benchmark.shifted):
        about["shifted"].append(files.write_set(f"shifted-{number}", samples))
    if benchmark.validation is not None:
        about["validation"] = files.write_set("validation", benchmark.validation)
    if benchmark.ood_validation is not None:
        about["ood_validation"] = files.write_set("ood-validation", benchmark.ood_validation)
    if benchmark.statistics is not None:
        about["statistics"] = files.write("statistics", _moment_arrays(benchmark.statistics))
    about["tune"] = {name: dict(grid) for name, grid in benchmark.grids.items()}
    about["sha256"] = files.hashes
    write_text(folder / "README.md", _card(benchmark, about))
    # Last, so that a folder with it is whole.
    write_json(folder / ABOUT, about)
    return folder


class _ArrayFiles:
    """Writes arrays as NPZ files to a folder; `hashes` has the SHA-256 of each file by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hashes: dict[str, str] = {}

    def write(self, name: str, arrays: dict[str, Any]) -> str:
        """Write arrays by name, and return the file's name."""
        path = self.folder / f"{name}.npz"
        # By rows: NumPy would keep the order of an array that is stored by columns.
        by_rows: dict[str, Any] = {}
        for key, array in arrays.items():
            by_rows[key] = np.ascontiguousarray(array)
        with beside(path) as draft, open(draft, "wb") as file:
            np.savez_compressed(file, **by_rows)
        self.hashes[path.name] = hash_file(path)
        return path.name

    def write_set(self, name: str, samples: FeatureSet) -> dict[str, Any]:
        """Write a set of features, and return what the description says of it."""
        arrays = {"features": samples.features.detach().cpu().numpy()}
        if samples.labels is not None:
            arrays["y"] = samples.labels.cpu().numpy()
        if samples.logits is not None:
            arrays["logits"] = samples.logits.detach().cpu().numpy()
        file = self.write(name, arrays)
        return {"name": samples.name, "file": file, "samples": samples.key}


def _moment_arrays(moments: ClassMoments) -> dict[str, Any]:
    return {
        "counts": moments.counts.numpy(),
        "totals": moments.totals.numpy(),
        "scatter": moments.scatter.numpy(),
    }


def _card(benchmark: Benchmark, about: dict[str, Any]) -> str:
    lines = [f"# {benchmark.title or 'Features of a benchmark'}", ""]
    lines += [f"- {note}" for note in benchmark.notes]
    lines += [
        "",
        f"{benchmark.head.num_classes:,} classes, {benchmark.head.num_features:,} features.",
        "",
        "| file | set | samples |",
        "|---|---|---:|",
    ]
    sets: dict[str, Sequence[FeatureSet]] = {
        "train": [benchmark.train],
        "test": [benchmark.test],
        "ood": benchmark.ood,
        "shifted": benchmark.shifted,
    }
    if benchmark.validation is not None:
        sets["validation"] = [benchmark.validation]
    if benchmark.ood_validation is not None:
        sets["ood_validation"] = [benchmark.ood_validation]
    for role, members in sets.items():
        entries = about[role] if isinstance(about[role], list) else [about[role]]
        for entry, samples in zip(entries, members):
            lines.append(f"| `{entry['file']}` | {role}: {samples.name} | {len(samples):,} |")
    lines += [
        "",
        "Each set holds `features` (N, P) and, if there are labels, `y` (N,); `head.npz` holds",
        "`weight` (C, P) and `bias` (C,), so that logits are `features @ weight.T + bias`.",
        "",
        "```python",
        "import numpy as np",
        'train = np.load("train.npz")["features"]',
        'head = np.load("head.npz")',
        "```",
        "",
        "`fdbd bench FOLDER` runs every detector of fdbd on it, and `--detectors",
        "package.module:Class` one of your own. Whether features of a dataset may be passed on is",
        "a matter of that dataset's terms.",
    ]
    return "\n".join(lines) + "\n"


def run_folder(folder: Path, number: int, count: int) -> Path:
    """Where the features of one of `count` runs go: the folder itself, or one below it for each of
    several runs. FileExistsError if the folder holds features of other runs."""
    if count == 1:
        return folder
    if (folder / ABOUT).exists() or len(_run_folders(folder)) > count:
        raise FileExistsError(
            f"{str(folder)!r} holds features of other runs: give --share a folder of its own"
        )
    return folder / f"run{number}"


def shared_folders(folder: Path) -> list[Path]:
    """The folders that `load_shared` reads: this one, or those of several runs below it."""
    if (folder / ABOUT).exists():
        return [folder]
    # If there are none, `load_shared` says what is missing.
    return _run_folders(folder) or [folder]


def _run_folders(folder: Path) -> list[Path]:
    numbers = []
    for path in folder.glob("run*"):
        number = path.name.removeprefix("run")
        if number.isdecimal():
            numbers.append(int(number))
    return [folder / f"run{number}" for number in sorted(numbers)]


def load_shared(folder: Path) -> Benchmark:
    """The benchmark that `share` wrote to a folder; a ValueError if a file is missing or
    changed."""
    about = read_json(folder / ABOUT)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(
            f"{str(folder)!r} holds no {ABOUT} of `fdbd bench --share` that this version reads"
        )
    try:
        for name, expected in about["sha256"].items():
            _check_file(folder, name, expected)
        head = Head(
            _tensor(folder / about["head"], "weight"),
            _tensor(folder / about["head"], "bias"),
        )
        return Benchmark(
            head,
            _read_set(folder, about["train"]),
            _read_set(folder, about["test"]),
            [_read_set(folder, entry) for entry in about["ood"]],
            groups={name: tuple(members) for name, members in about["groups"].items()},
            title=about["title"],
            notes=about["notes"],
            statistics=_read_moments(folder, about.get("statistics")),
            validation=_read_optional(folder, about.get("validation")),
            positive=about["positive"],
            warnings=about["warnings"],
            class_names=about["class_names"],
            shifted=[_read_set(folder, entry) for entry in about["shifted"]],
            ood_validation=_read_optional(folder, about.get("ood_validation")),
            grids=about["tune"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / ABOUT} is damaged: {error}") from None


def _check_file(folder: Path, name: str, expected: str) -> None:
    path = folder / name
    if Path(name).name != name:
        raise ValueError(f"{folder / ABOUT} names {name!r}, expected a file beside it")
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    if hash_file(path) != expected:
        raise ValueError(f"{path} has changed since it was shared: its SHA-256 differs")


def _read_set(folder: Path, entry: dict[str, Any]) -> FeatureSet:
    # Only files whose hash was checked are read.
    path = folder / Path(entry["file"]).name
    names = array_names(path)
    return FeatureSet(
        entry["name"],
        _tensor(path, "features"),
        _optional_array(path, "y", names),
        _optional_array(path, "logits", names),
        samples=entry["samples"],
    )


def _read_optional(folder: Path, entry: dict[str, Any] | None) -> FeatureSet | None:
    if entry is None:
        return None
    return _read_set(folder, entry)


def _tensor(path: Path, key: str) -> Tensor:
    # A copy, since what is read may not be written to.
    return torch.from_numpy(read_array(path, key).copy())


def _optional_array(path: Path, key: str, names: Any) -> Tensor | None:
    if key not in names:
        return None
    return _tensor(path, key)


def _read_moments(folder: Path, file: str | None) -> ClassMoments | None:
    """Moments of the full training set, as the statistic that detectors ask for."""
    if file is None:
        return None
    path = folder / file
    totals = _tensor(path, "totals")
    moments = ClassMoments(*totals.shape)
    moments.counts = _tensor(path, "counts")
    moments.totals = totals
    moments.count = int(moments.counts.sum())
    moments.average = totals.sum(dim=0) / moments.count
    moments.scatter = _tensor(path, "scatter")
    return moments
