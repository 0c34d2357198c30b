"""The operations that write files, for `harness.py`: each with inputs, an old and a new output."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Operation
from torch import nn

import fdbd
from fdbd.cli import main as fdbd_program

torch.set_num_threads(1)
WIDTH = 6
CLASSES = 3


def features(rows: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, WIDTH)).astype(np.float32)


def guard_on_features(seed: int = 0, detector: str = "fdbd") -> fdbd.Guard:
    generator = torch.Generator().manual_seed(seed)
    head = fdbd.Head(torch.randn(CLASSES, WIDTH, generator=generator), torch.zeros(CLASSES))
    guard = fdbd.Guard(head, detector)
    rows = torch.from_numpy(features(200, seed))
    guard.fit([fdbd.Batch(rows[:100])], progress=False)
    guard.calibrate([fdbd.Batch(rows[100:])], progress=False)
    return guard


def guard_on_images() -> fdbd.Guard:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, CLASSES)).eval()
    guard = fdbd.Guard(model)
    images = torch.randn(300, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    guard.fit([images[:150]], progress=False)
    guard.calibrate([images[150:]], progress=False)
    return guard


def command(*arguments: object) -> None:
    """A command of the program, in this process."""
    fdbd_program([str(argument) for argument in arguments])


def digest(path: Path) -> str | None:
    """The content of a file; None if there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def stated_guard(path: Path) -> list[float] | None:
    """What a guard's file decides."""
    if not path.exists():
        return None
    guard = fdbd.load(path)
    scores: list[float] = guard.score(fdbd.Batch(torch.from_numpy(features(5, 9)))).tolist()
    return scores


def save() -> Operation:
    """`Guard.save` over another guard."""
    guard = guard_on_features(1)

    def prepare(folder: Path) -> None:
        guard_on_features(0).save(folder / "guard.safetensors")

    return Operation(
        prepare,
        lambda folder: guard.save(folder / "guard.safetensors"),
        lambda folder: stated_guard(folder / "guard.safetensors"),
    )


def fit() -> Operation:
    """`fdbd fit` on features, over another guard; a detector of two passes."""

    def prepare(folder: Path) -> None:
        guard_on_features(0).save(folder / "guard.safetensors")
        np.savez(folder / "head.npz", weight=features(CLASSES, 3), bias=np.zeros(CLASSES))
        np.savez(folder / "train.npz", features=features(300, 1))
        np.savez(folder / "fresh.npz", features=features(200, 2))

    def run(folder: Path) -> None:
        command(
            "fit", folder / "train.npz", "--head", folder / "head.npz", "--detector", "vim",
            "--calibration", folder / "fresh.npz", "--out", folder / "guard.safetensors",
        )  # fmt: skip

    return Operation(prepare, run, lambda folder: stated_guard(folder / "guard.safetensors"))


def _score(out: str, *options: str) -> Operation:
    def prepare(folder: Path) -> None:
        guard_on_features(0).save(folder / "guard.safetensors")
        np.savez(folder / "rows.npz", features=features(40, 5))
        if Path(out).suffix:
            (folder / out).write_text("an old file")

    def run(folder: Path) -> None:
        command(
            "score", folder / "guard.safetensors", folder / "rows.npz",
            "--out", folder / out, *options,
        )  # fmt: skip

    def state(folder: Path) -> Any:
        path = folder / out
        if not path.exists():
            return None
        if path.is_file() and path.read_bytes() == b"an old file":
            return "old"
        if path.suffix == ".csv":
            rows = path.read_text().splitlines()
            if len(rows) != 41:
                raise ValueError(f"{len(rows)} lines in place of 41")
            return rows
        import pyarrow.parquet as pq

        parts = [path]
        if path.is_dir():
            parts = sorted(part for part in path.glob("*.parquet") if part.name[0] != ".")
        return [pq.read_table(part).to_pydict() for part in parts] or None

    def may_remain(name: str) -> bool:
        return Path(out).name in name or name.startswith(".")

    return Operation(prepare, run, state, may_remain, partial=not Path(out).suffix)


def score_parquet() -> Operation:
    """`fdbd score` to one Parquet file."""
    return _score("scores.parquet")


def score_csv() -> Operation:
    """`fdbd score` to CSV, with a false discovery rate."""
    return _score("scores.csv", "--fdr", "0.2")


def score_folder() -> Operation:
    """`fdbd score` to a folder of parts."""
    return _score("scores")


def gallery() -> Operation:
    """`fdbd gallery` over another page."""

    def prepare(folder: Path) -> None:
        scored = _score("scores.csv")
        scored.prepare(folder)
        (folder / "scores.csv").unlink()
        run_quietly(lambda: scored.run(folder))
        (folder / "gallery.html").write_text("<p>old</p>")

    return Operation(
        prepare,
        lambda folder: command("gallery", folder / "scores.csv", "--out", folder / "gallery.html"),
        lambda folder: digest(folder / "gallery.html"),
    )


def run_quietly(work: Callable[[], None]) -> None:
    """A command that ends this process by SystemExit(0) is one that ended well."""
    try:
        work()
    except SystemExit as ended:
        if ended.code:
            raise


def report() -> Operation:
    """Results as JSON and as a page, over others."""
    from fdbd.bench import FeatureSet

    head = fdbd.Head(torch.eye(CLASSES, WIDTH), torch.zeros(CLASSES))
    sets = [FeatureSet(f"set{seed}", torch.from_numpy(features(60, seed))) for seed in range(3)]
    benchmark = fdbd.Benchmark(head, sets[0], sets[1], [sets[2]])
    results = benchmark.run(["fdbd", "msp"], latency=False, progress=False)

    def prepare(folder: Path) -> None:
        (folder / "report.html").write_text("<p>old</p>")
        (folder / "results.json").write_text("{}")

    def run(folder: Path) -> None:
        results.to_json(folder / "results.json")
        results.to_html(folder / "report.html")

    def state(folder: Path) -> Any:
        page = (folder / "report.html").read_text()
        whole_page = page == "<p>old</p>" or page.rstrip().endswith("</html>")
        if not whole_page:
            raise ValueError("the page is cut short")
        text = (folder / "results.json").read_text()
        if text != "{}":
            fdbd.Results.from_json(folder / "results.json")
        return (page != "<p>old</p>", text != "{}")

    return Operation(prepare, run, state, partial=True)


def cache() -> Operation:
    """Features of 40 images into the cache, in shards."""
    from fdbd.bench.cache import FeatureCache
    from fdbd.core.preprocessing import Preprocess
    from fdbd.data.images import Images

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, CLASSES)).eval()
    classifier = fdbd.Classifier(model)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), dtype=np.uint8)
    images = Images(pixels, name="noise")

    def run(folder: Path) -> None:
        cache = FeatureCache(folder / "cache", shard_rows=16)
        cache.features(classifier, images, Preprocess(8))

    def state(folder: Path) -> Any:
        """What the cache gives now: it may hold nothing, a part, or all."""
        return any((folder / "cache").rglob("*")) if (folder / "cache").exists() else False

    return Operation(
        lambda folder: None, run, state, lambda name: name.startswith("cache"), partial=True
    )


def monitor() -> Operation:
    """`Monitor.save` over another state."""
    guard = guard_on_features(0)
    watched = fdbd.Monitor(guard)
    watched(fdbd.Batch(torch.from_numpy(features(50, 7))))

    def prepare(folder: Path) -> None:
        fdbd.Monitor(guard).save(folder / "monitor.safetensors")

    def state(folder: Path) -> Any:
        loaded = fdbd.Monitor.load(folder / "monitor.safetensors", guard)
        return loaded.snapshot()["samples"]

    return Operation(prepare, lambda folder: watched.save(folder / "monitor.safetensors"), state)


def train() -> Operation:
    """Training of one epoch, with checkpoints."""
    from fdbd.train import train as train_network

    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (32, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, 32)

    def run(folder: Path) -> None:
        train_network(
            "zoo-ce", (pixels, labels), out=folder / "run", device="cpu", progress=False,
            checkpoint_steps=1, epochs=1, batch_size=16, model="small_cnn", sizes=(), whiten=False,
        )  # fmt: skip

    def state(folder: Path) -> Any:
        """The network that the folder holds; a checkpoint alone is a run that goes on."""
        path = folder / "run" / "model.safetensors"
        if not path.exists():
            return None
        from safetensors.torch import load_file

        return sorted((name, tuple(value.shape)) for name, value in load_file(path).items())

    return Operation(lambda folder: None, run, state, lambda name: name.startswith("run/"))


def export_onnx() -> Operation:
    """`Guard.export_onnx` over another graph."""
    guard = guard_on_images()
    example = torch.randn(2, 3, 4, 4)

    def prepare(folder: Path) -> None:
        (folder / "guard.onnx").write_bytes(b"old")

    def state(folder: Path) -> Any:
        data = (folder / "guard.onnx").read_bytes()
        if data == b"old":
            return "old"
        import onnxruntime

        return [each.name for each in onnxruntime.InferenceSession(data).get_outputs()]

    return Operation(
        prepare, lambda folder: guard.export_onnx(folder / "guard.onnx", example), state
    )


def export_openvino() -> Operation:
    """OpenVINO's pair of files over an older pair."""
    from fdbd.export.openvino import export_openvino as export

    guard = guard_on_images()
    example = torch.randn(2, 3, 4, 4)

    def prepare(folder: Path) -> None:
        old = guard_on_images()
        with torch.no_grad():
            for parameter in old.parameters():
                parameter.mul_(2)
        export(old, folder / "guard.xml", example)

    def state(folder: Path) -> Any:
        if not (folder / "guard.xml").exists():
            return None
        import openvino

        compiled = openvino.Core().compile_model(folder / "guard.xml", "CPU")
        images = torch.linspace(-1, 1, 48).reshape(1, 3, 4, 4).numpy()
        found = compiled(images)
        return [round(float(found[0][0, index]), 4) for index in range(CLASSES)]

    # Two files cannot be renamed at once: a crash between them leaves no model, never a mixed pair.
    return Operation(
        prepare,
        lambda folder: export(guard, folder / "guard.xml", example),
        state,
        may_be_missing=True,
    )


def export_int8() -> Operation:
    """An 8-bit ONNX graph over another graph."""
    from fdbd.export.int8 import export_int8 as export

    guard = guard_on_images()
    images = torch.randn(300, 3, 4, 4, generator=torch.Generator().manual_seed(2))

    def prepare(folder: Path) -> None:
        (folder / "guard.onnx").write_bytes(b"old")

    def run(folder: Path) -> None:
        export(guard, folder / "guard.onnx", images[:2], [images])

    def state(folder: Path) -> Any:
        data = (folder / "guard.onnx").read_bytes()
        if data == b"old":
            return "old"
        import onnxruntime

        return [each.name for each in onnxruntime.InferenceSession(data).get_outputs()]

    return Operation(prepare, run, state)


def unsafe_in_place() -> Operation:
    """Writes over the old file: the harness is to find it."""

    def run(folder: Path) -> None:
        with open(folder / "file", "w") as file:
            for part in ("new ", "and ", "whole"):
                file.write(part)
                file.flush()

    def state(folder: Path) -> str:
        return (folder / "file").read_text()

    return Operation(lambda folder: write_old(folder / "file"), run, state)


def unsafe_draft() -> Operation:
    """Leaves its draft behind when it fails: the harness is to find it."""

    def run(folder: Path) -> None:
        draft = folder / ".00000000.file"
        draft.write_text("new")
        draft.rename(folder / "file")

    def state(folder: Path) -> str:
        return (folder / "file").read_text()

    return Operation(lambda folder: write_old(folder / "file"), run, state)


def write_old(path: Path) -> None:
    path.write_text("old")


UNSAFE = {"unsafe_in_place": unsafe_in_place, "unsafe_draft": unsafe_draft}
OPERATIONS: dict[str, Callable[[], Operation]] = {
    "save": save,
    "fit": fit,
    "score_parquet": score_parquet,
    "score_csv": score_csv,
    "score_folder": score_folder,
    "gallery": gallery,
    "report": report,
    "cache": cache,
    "monitor": monitor,
    "train": train,
    "export_onnx": export_onnx,
    "export_openvino": export_openvino,
    "export_int8": export_int8,
}
