"""The service compared with the bare model, plain FastAPI and LitServe, with 32 clients on
loopback.

Run ``python benchmarks/serving.py`` (under six minutes); it writes the section "Serving" of
RESULTS.md. LitServe is measured where it is installed (``pip install litserve``).
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import machine, table, verdict, write_section
from PIL import Image
from safetensors.torch import save_file

from fdbd.decision.guard_file import open_guard
from fdbd.serve.torch_backend import TorchBackend

try:
    import litserve
except ImportError:
    litserve = None

CLIENTS = 32
CORES = os.cpu_count() or 1
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
OF_BARE, OF_SINGLE, OF_LITSERVE, ADDED_SECONDS = 0.85, 3.0, 1.0, 0.003


# ── the others: run in separate processes
# ─────────────────────────────────────────────────────────────────────────


def serve_fastapi(guard: str, port: int, size: int) -> None:
    """A simple first version: a route that decodes an image and calls the guard, one request at a
    time."""
    import uvicorn
    from fastapi import FastAPI, Request

    backend, app = TorchBackend(open_guard(guard, device="cpu")), FastAPI()

    @app.get("/v2/health/ready")
    def ready() -> dict[str, bool]:
        return {"ready": True}

    async def decide(request: Request) -> dict[str, Any]:
        answers = backend.decide(backend.prepare(await request.body())[None])
        return {
            "label": int(answers.labels[0]),
            "score": float(answers.scores[0]),
            "is_ood": bool(answers.is_ood[0]),
        }

    decide.__annotations__["request"] = Request  # FastAPI cannot look into this function's names
    app.post("/decide")(decide)
    uvicorn.run(app, port=port, log_level="error")


def serve_litserve(guard: str, port: int, size: int) -> None:
    server = litserve.LitServer(LitGuard(guard, size), accelerator="cpu", workers_per_device=CORES)
    server.run(port=port, log_level="error", generate_client_file=False)


class LitGuard(litserve.LitAPI if litserve else object):
    """LitServe with its batching. It takes JSON, so images are sent as base64."""

    def __init__(self, guard: str, size: int) -> None:
        super().__init__(max_batch_size=size, batch_timeout=0.001)
        self.guard = guard

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.backend = TorchBackend(open_guard(self.guard, device="cpu"))

    def decode_request(self, request: dict[str, str]) -> Any:
        return self.backend.prepare(base64.b64decode(request["image"]))

    def batch(self, inputs: list[Any]) -> Any:
        return np.stack(inputs)

    def predict(self, rows: Any) -> Any:
        return self.backend.decide(rows)

    def unbatch(self, answers: Any) -> list[Any]:
        return [answers.rows(row, row + 1) for row in range(len(answers.labels))]

    def encode_response(self, answers: Any) -> dict[str, Any]:
        return {
            "label": int(answers.labels[0]),
            "score": float(answers.scores[0]),
            "is_ood": bool(answers.is_ood[0]),
        }


def cpu_seconds(group: int) -> float:
    """Processor time of a process and its children so far (Linux)."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running(command: list[str], port: int, path: str) -> Iterator[int]:
    """A server in separate processes, once it answers; yields the ID of their process group."""
    process = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 180
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no server came up: {command}") from None
                time.sleep(0.2)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def alone(group: int | None, groups: Iterable[int]) -> Iterator[None]:
    """Stops the other servers for a while: idle ones poll, which takes cores from the one that is
    measured."""
    others = [each for each in groups if each != group]
    for each in others:
        os.killpg(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in others:
            os.killpg(each, signal.SIGCONT)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# ── the clients
# ────────────────────────────────────────────────────────────────────────────────────────────────────


def request_bytes(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    return (
        "\r\n".join(
            [*lines, *(f"{key}: {value}" for key, value in headers.items()), "", ""]
        ).encode()
        + body
    )


async def _client(port: int, request: bytes, until: Callable[[], bool], times: list[float]) -> None:
    """Sends one request after another on one connection; a minimal reader, so that the client costs
    little."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    while not until():
        start = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(f"an answer was not 200: {head[:200]!r}")
        length = next(
            line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        await reader.readexactly(int(length.split(b":")[1]))
        times.append(time.perf_counter() - start)
    writer.close()


def per_second(group: int, port: int, request: bytes, seconds: float) -> tuple[float, float, float]:
    """Answers per second to all clients together; the server's and the clients' processor time per
    answer."""
    times: list[float] = []
    before, own = cpu_seconds(group), time.process_time()
    end = time.perf_counter() + seconds

    async def all_clients() -> float:
        start = time.perf_counter()
        await asyncio.gather(
            *(
                _client(port, request, lambda: time.perf_counter() > end, times)
                for _ in range(CLIENTS)
            )
        )
        return time.perf_counter() - start

    took = asyncio.run(all_clients())
    spent, own = cpu_seconds(group) - before, time.process_time() - own
    return len(times) / took, spent / len(times), own / len(times)


def median_latency(port: int, request: bytes, count: int) -> float:
    times: list[float] = []
    asyncio.run(_client(port, request, lambda: len(times) >= count, times))
    return statistics.median(times)


def bare_per_second(
    model: torch.nn.Module, rows: torch.Tensor, seconds: float
) -> tuple[float, float, float]:
    """Images per second of the network alone, and its processor time per image."""
    done, start, before = 0, time.perf_counter(), time.process_time()
    with torch.inference_mode():
        while time.perf_counter() - start < seconds:
            model(rows)
            done += len(rows)
    return done / (time.perf_counter() - start), (time.process_time() - before) / done, 0.0


# ── the measurement
# ────────────────────────────────────────────────────────────────────────────────────────────────


def make_guard(folder: Path, model: str, side: int) -> Path:
    """A guard fitted on noise: its speed does not depend on the data."""
    generator = np.random.default_rng(0)
    for name in ("fit", "calibration"):
        (folder / name).mkdir()
        for number in range(24):
            pixels = generator.integers(0, 256, (side, side, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    given = ["fit", model, str(folder / "fit"), "--calibration", str(folder / "calibration")]
    if model.startswith("torchvision:"):
        from torchvision.models import resnet18

        save_file(resnet18().state_dict(), folder / "weights.safetensors")
        given += ["--checkpoint", str(folder / "weights.safetensors")]
    out = folder / "guard.safetensors"
    subprocess.run(
        [sys.executable, "-m", "fdbd", *given, "--out", str(out)], check=True, capture_output=True
    )
    return out


def measure(
    model: str, side: int, seconds: float, rounds: int
) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and the targets that were missed."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        guard = make_guard(Path(name), model, side)
        opened = open_guard(guard, device="cpu")
        backend = TorchBackend(opened)
        assert opened.guard.classifier is not None
        network = opened.guard.classifier.model.eval()
        buffer = io.BytesIO()
        Image.fromarray(np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)).save(
            buffer, "JPEG"
        )
        image = buffer.getvalue()
        row = backend.prepare(image)[None]
        rows = {
            size: torch.from_numpy(row).expand(size, *row.shape[1:]).contiguous()
            for size in BATCH_SIZES
        }
        best = max(
            BATCH_SIZES, key=lambda size: bare_per_second(network, rows[size], seconds / 4)[0]
        )

        here, python = str(Path(__file__).resolve()), sys.executable
        ports = {
            kind: free_port()
            for kind in ("fdbd", "workers", "fastapi", *(["litserve"] if litserve else []))
        }
        groups = {}
        for kind, port in ports.items():
            command = [python, here, "--child", kind, str(guard), str(port), str(best)]
            if kind in ("fdbd", "workers"):
                command = [
                    python,
                    "-m",
                    "fdbd",
                    "serve",
                    str(guard),
                    "--no-state",
                    "--no-samples",
                    "--device",
                    "cpu",
                ]
                command += [
                    "--port",
                    str(port),
                    "--workers",
                    str(CORES if kind == "workers" else 1),
                ]
                command += ["--batch-size", str(best)]
            path = "/health" if kind == "litserve" else "/v2/health/ready"
            groups[kind] = stack.enter_context(running(command, port, path))
        described = {"name": "images", "shape": list(row.shape), "datatype": "FP32"}
        header = json.dumps(
            {"inputs": [described | {"parameters": {"binary_data_size": row.nbytes}}]}
        ).encode()
        tensor = request_bytes(
            "/v2/models/guard/infer",
            header + row.astype("<f4").tobytes(),
            {
                "content-type": "application/octet-stream",
                "inference-header-content-length": str(len(header)),
            },
        )
        file = request_bytes("/decide", image, {"content-type": "image/jpeg"})
        lit = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        posted = request_bytes("/predict", lit, {"content-type": "application/json"})
        asked = {
            "tensors": ("fdbd", tensor),
            "workers": ("workers", tensor),
            "files": ("fdbd", file),
            "worker files": ("workers", file),
            "fastapi": ("fastapi", file),
            **({"litserve": ("litserve", posted)} if litserve else {}),
        }

        def rate(kind: str) -> tuple[float, float, float]:
            if kind == "bare":
                with alone(None, groups.values()):
                    return bare_per_second(network, rows[best], seconds)
            server, request = asked[kind]
            with alone(groups[server], groups.values()):
                return per_second(groups[server], ports[server], request, seconds)

        contenders = ("bare", *asked)
        found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in contenders}
        added = []
        for number in range(rounds + 1):
            for kind in contenders:
                measured = rate(kind)
                if number:  # the first round warms up
                    found[kind].append(measured)
            with alone(groups["fdbd"], groups.values()):
                called = []
                for _ in range(20):
                    start = time.perf_counter()
                    backend.decide(row)
                    called.append(time.perf_counter() - start)
                if number:
                    added.append(
                        median_latency(ports["fdbd"], tensor, 20) - statistics.median(called)
                    )

    def ratio(kinds: tuple[str, str], base: str) -> float:
        """For the better of the two numbers of processes."""
        return max(
            statistics.median(a[0] / b[0] for a, b in zip(found[kind], found[base]))
            for kind in kinds
        )

    tensors, files = ("tensors", "workers"), ("files", "worker files")
    results = [
        ("tensors, of the bare model's throughput", ratio(tensors, "bare"), OF_BARE),
        ("files, times plain FastAPI", ratio(files, "fastapi"), OF_SINGLE),
    ]
    if litserve:
        results.append(
            ("files, times LitServe with batching", ratio(files, "litserve"), OF_LITSERVE)
        )
    most = 1 / ratio(("fastapi", "fastapi"), "bare")
    names = {
        "bare": f"network alone, batches of {best}",
        "tensors": "fdbd serve, tensors",
        "workers": f"fdbd serve --workers {CORES}, tensors",
        "files": "fdbd serve, files",
        "worker files": f"fdbd serve --workers {CORES}, files",
        "fastapi": "plain FastAPI, files",
        "litserve": "LitServe, files",
    }
    lines = []
    for kind, rounds_ in found.items():
        rate, cpu, client = (statistics.median(values) for values in zip(*rounds_))
        clients = f" + {1e3 * client:.2f} of its client" if client else ""
        lines.append([names[kind], f"{rate:,.0f}/s, {1e3 * cpu:.2f} ms of CPU{clients}", ""])
    lines += [[what, f"{value:.2f}", f"≥ {target:g}"] for what, value, target in results]
    lines += [
        ["added median latency, one client", f"{1e3 * statistics.median(added):.1f} ms", "< 3 ms"]
    ]
    missed = [
        f"{model}: {what}: {value:.2f} instead of {target:g}"
        for what, value, target in results
        if value < target
    ]
    if most < OF_SINGLE:
        missed.append(
            f"{model}: the bare model itself has {most:.2f} times the throughput of plain FastAPI,"
            " not 3"
        )
    if statistics.median(added) >= ADDED_SECONDS:
        missed.append(
            f"{model}: one client waits {1e3 * statistics.median(added):.1f} ms longer, not 3 ms"
        )
    return [[model, *line] for line in lines], missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["cifar10-ce:32", "torchvision:resnet18:224"],
        help="NAME:SIDE",
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--no-write", action="store_true", help="print only")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, guard, port, size = options.child
        (serve_litserve if kind == "litserve" else serve_fastapi)(guard, int(port), int(size))
        return
    lines: list[list[str]] = []
    missed: list[str] = []
    for given in options.models:
        model, _, side = given.rpartition(":")
        found, misses = measure(model, int(side), options.seconds, options.rounds)
        lines, missed = lines + found, missed + misses
    text = f"""\
`python benchmarks/serving.py`: {CLIENTS} clients on loopback, one image per request, on connections that stay open. The
clients are one process on the same {CORES} cores, so the service lacks the CPU time that they use. The bare model has
the cores to itself, in one process with a thread per core, and runs at the batch size that suits it best, which is also
the servers' maximum. `fdbd serve` runs in one process, as by default, and with one process per core; the better of the
two counts. LitServe runs with one process per core, plain FastAPI with one; the latency is that of `fdbd serve` in one
process. Tensors go to the Open Inference Protocol in binary form, files (JPEG) to `/decide`; plain FastAPI and LitServe
decode the same files with the same code and use the same guard (LitServe gets them as base64 in JSON). ResNet-18 has
random weights. Medians over {options.rounds} interleaved rounds of {options.seconds:g} s, with the other servers
stopped; ratios are within a round.
Machine: {machine()}

{table(["model", "what", "measured", "target"], lines)}

{verdict(missed)}
"""
    print(text)
    if not options.no_write:
        write_section("Serving", text)


if __name__ == "__main__":
    main()
