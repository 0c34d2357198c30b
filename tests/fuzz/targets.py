"""What reads bytes from strangers, as functions of bytes: each returns, or raises a ValueError or
an OSError of one line. Anything else is a finding, and so are seconds and gigabytes for a small
input.

Files with a checksum are fuzzed behind it: the input is the description, sealed again with a right
checksum, as a forger would.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fdbd
from fdbd.core import artifact
from fdbd.decision.guard_file import open_guard

# A name in a file is not to download anything here.
os.environ["FDBD_OFFLINE"] = "1"


class Target(NamedTuple):
    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


@contextmanager
def as_file(data: bytes, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        yield path


@cache
def a_guard() -> fdbd.Guard:
    generator = torch.Generator().manual_seed(0)
    head = fdbd.Head(torch.randn(3, 4, generator=generator), torch.zeros(3))
    rows = torch.randn(200, 4, generator=generator)
    guard = fdbd.Guard(head, "vim")
    guard.fit([fdbd.Batch(rows[:100])], progress=False)
    guard.calibrate([fdbd.Batch(rows[100:])], progress=False)
    return guard


@cache
def saved_guard() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with tempfile.TemporaryDirectory() as folder:
        a_guard().save(Path(folder) / "guard.safetensors")
        return artifact.read(Path(folder) / "guard.safetensors")


@cache
def saved_monitor() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    monitor = fdbd.Monitor(a_guard())
    monitor(fdbd.Batch(torch.randn(20, 4, generator=torch.Generator().manual_seed(1))))
    with tempfile.TemporaryDirectory() as folder:
        monitor.save(Path(folder) / "monitor.safetensors")
        return artifact.read(Path(folder) / "monitor.safetensors")


def description_of(data: bytes) -> dict[str, Any] | None:
    """The JSON object in the input; None if it is none, which is not what is tried here."""
    try:
        description = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return description if isinstance(description, dict) else None


def read_guard_description(data: bytes) -> object:
    description = description_of(data)
    if description is None:
        return None
    with as_file(b"", "guard.safetensors") as path:
        artifact.write(path, description, saved_guard()[1])
        return open_guard(path)


def read_monitor_description(data: bytes) -> object:
    description = description_of(data)
    if description is None:
        return None
    with as_file(b"", "monitor.safetensors") as path:
        artifact.write(path, description, saved_monitor()[1])
        monitor = fdbd.Monitor.load(path, a_guard())
        monitor(fdbd.Batch(torch.zeros(3, 4)))
        return monitor.snapshot()


def read_guard(data: bytes) -> object:
    with as_file(data, "guard.safetensors") as path:
        return fdbd.load(path)


def read_results(data: bytes) -> object:
    with as_file(data, "results.json") as path:
        return str(fdbd.Results.from_json(path).table())


def read_npz(data: bytes) -> object:
    from fdbd.data.inputs import open_rows

    with as_file(data, "rows.npz") as path:
        return len(open_rows(str(path)))


def read_parquet(data: bytes) -> object:
    from fdbd.data.inputs import open_rows

    with as_file(data, "rows.parquet") as path:
        return len(open_rows(str(path)))


def read_config(data: bytes) -> object:
    from fdbd.bench import Config

    with as_file(data, "bench.toml") as path:
        return Config.from_file(path)


def read_image(data: bytes) -> object:
    from fdbd.core.pixels import decode

    return decode(data, max_pixels=1_000_000).shape


@cache
def backend() -> Any:
    """The graph of an earlier release, as the service opens it."""
    from fdbd.serve.backend import OnnxBackend

    return OnnxBackend(Path(__file__).parents[1] / "artifacts" / "0.2.0" / "guard.onnx")


def read_inference_request(data: bytes) -> object:
    """The body after a first line with the length of its JSON header; an empty line: no header."""
    from fdbd.serve import inference_protocol

    first, _, body = data.partition(b"\n")
    header_length = first.decode("latin-1") or None
    return inference_protocol.read(body, header_length, backend())


def inference_seeds() -> list[bytes]:
    shape = [1, *backend().row_shape]
    count = int(np.prod(shape))
    tensor = {"name": backend().input_name, "datatype": "FP32", "shape": shape}
    plain = json.dumps({"id": "1", "inputs": [{**tensor, "data": [0.5] * count}]}).encode()
    binary = json.dumps(
        {"inputs": [{**tensor, "parameters": {"binary_data_size": 4 * count}}]}
    ).encode()
    tail = np.zeros(count, np.float32).tobytes()
    return [b"\n" + plain, str(len(binary)).encode() + b"\n" + binary + tail]


def read_service_state(data: bytes) -> object:
    """What two processes left behind in a service's folder. Whatever it is, the service starts,
    counts, and answers those who ask for its numbers."""
    from fdbd.serve.metrics import Observed, exposition
    from fdbd.serve.state_store import FolderStore
    from fdbd.serve.watch import Watch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = description_of(data)
        for slot in range(2):
            content = data if state is None else json.dumps({**state, "slot": slot}).encode()
            (folder / f"slot-{slot}.json").write_bytes(content)
        (folder / "acknowledged.json").write_bytes(data)
        watch = Watch(backend(), FolderStore(folder), processes=2)
        watch.start()
        try:
            watch.count_request("/decide", 200, 0.1)
            numbers = json.dumps(watch.view(), allow_nan=False)
            metrics = exposition([Observed("guard", backend(), watch, 0, True)], {})
        finally:
            watch.stop()
        return numbers, metrics


def service_state_seeds() -> list[bytes]:
    from fdbd.serve.state_store import FolderStore
    from fdbd.serve.watch import Watch

    with tempfile.TemporaryDirectory() as name:
        watch = Watch(backend(), FolderStore(Path(name)), processes=2)
        watch.start()
        watch.count_request("/decide", 200, 0.1)
        watch.stop()
        state = (Path(name) / "slot-0.json").read_bytes()
    return [state, b'{"time": 1.5, "note": "seen"}']


def description_seed(saved: Callable[[], tuple[dict[str, Any], Any]]) -> Callable[[], list[bytes]]:
    def seeds() -> list[bytes]:
        description = {name: value for name, value in saved()[0].items() if name != "sha256"}
        return [json.dumps(description).encode()]

    return seeds


def guard_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "guard.safetensors"
        a_guard().save(path)
        return [path.read_bytes()]


def results_seeds() -> list[bytes]:
    results = fdbd.bench.load_bundle("cifar10-ce").run(["msp"], latency=False, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        results.to_json(path)
        return [path.read_bytes()]


def npz_seeds() -> list[bytes]:
    found = []
    for write in (np.savez, np.savez_compressed):
        for arrays in (
            {"features": np.ones((3, 4), np.float32)},
            {"x": np.zeros((2, 5, 5, 3), np.uint8), "y": np.arange(2)},
        ):
            buffer = io.BytesIO()
            write(buffer, **arrays)
            found.append(buffer.getvalue())
    return found


def parquet_seeds() -> list[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table({"features": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]}), buffer)
    return [buffer.getvalue()]


def config_seeds() -> list[bytes]:
    text = (
        'model = "cifar10-ce"\nid = "cifar10"\nood = ["textures", "svhn"]\n'
        'detectors = ["fdbd", { name = "knn", k = 5 }]\nlimit = 100\n[groups]\nfar = ["svhn"]\n'
    )
    return [text.encode()]


def image_seeds() -> list[bytes]:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=np.uint8)
    found = []
    for kind in ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM"):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, kind)
        found.append(buffer.getvalue())
    return found


TARGETS: dict[str, Target] = {
    "guard": Target(read_guard, guard_seeds),
    "guard-description": Target(read_guard_description, description_seed(saved_guard)),
    "monitor-description": Target(read_monitor_description, description_seed(saved_monitor)),
    "results": Target(read_results, results_seeds),
    "npz": Target(read_npz, npz_seeds),
    "parquet": Target(read_parquet, parquet_seeds),
    "config": Target(read_config, config_seeds),
    "inference-request": Target(read_inference_request, inference_seeds),
    "image": Target(read_image, image_seeds),
    "service-state": Target(read_service_state, service_state_seeds),
}
