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
import re
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
from typing import Any, NamedTuple

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
OF_BARE = 0.85
OF_SINGLE = 3.0
OF_LITSERVE = 1.0
ADDED_SECONDS = 0.003
FILES = ("files", "worker files")


# ── the others: run in separate processes
# ─────────────────────────────────────────────────────────────────────────


def serve_fastapi(guard: str, port: int, size: int) -> None:
    """A simple first version: a route that decodes an image and calls the guard, one request at a
    time."""
    import uvicorn
    from fastapi import FastAPI, Request

    backend = TorchBackend(open_guard(guard, device="cpu"))
    app = FastAPI()

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

    # FastAPI cannot look into this function's names.
    decide.__annotations__["request"] = Request
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


class Speed(NamedTuple):
    """What a contender did in one round."""

    per_second: float
    #: of the server, per answer
    cpu_seconds: float
    #: of the clients, per answer; 0 without clients
    client_seconds: float


class Server(NamedTuple):
    """A server that runs in processes of its own."""

    port: int
    group: int


# ── the clients
# ────────────────────────────────────────────────────────────────────────────────────────────────────


def request_bytes(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """A whole HTTP request."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}"]
    for name, value in headers.items():
        lines.append(f"{name}: {value}")
    head = "\r\n".join(lines).encode()
    return head + b"\r\n\r\n" + body


_HEADER_OF_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)\r\n", re.IGNORECASE)


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
        length = _HEADER_OF_LENGTH.search(head)
        if length is None:
            raise RuntimeError(f"an answer does not say its length: {head[:200]!r}")
        await reader.readexactly(int(length[1]))
        times.append(time.perf_counter() - start)
    writer.close()


def served_speed(server: Server, request: bytes, seconds: float) -> Speed:
    """Answers to all clients together."""
    times: list[float] = []
    server_before = cpu_seconds(server.group)
    own_before = time.process_time()
    start = time.perf_counter()

    def is_over() -> bool:
        return time.perf_counter() > start + seconds

    async def all_clients() -> None:
        clients = [_client(server.port, request, is_over, times) for _ in range(CLIENTS)]
        await asyncio.gather(*clients)

    asyncio.run(all_clients())
    took = time.perf_counter() - start
    spent = cpu_seconds(server.group) - server_before
    own = time.process_time() - own_before
    count = len(times)
    return Speed(count / took, spent / count, own / count)


def median_latency(port: int, request: bytes, count: int) -> float:
    times: list[float] = []
    asyncio.run(_client(port, request, lambda: len(times) >= count, times))
    return statistics.median(times)


def bare_speed(network: torch.nn.Module, rows: torch.Tensor, seconds: float) -> Speed:
    """The network alone, without clients."""
    done = 0
    start = time.perf_counter()
    before = time.process_time()
    with torch.inference_mode():
        while time.perf_counter() - start < seconds:
            network(rows)
            done += len(rows)
    took = time.perf_counter() - start
    spent = time.process_time() - before
    return Speed(done / took, spent / done, 0.0)


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


class Found(NamedTuple):
    """All rounds: the speeds of each contender, and what the service added to one client's wait."""

    speeds: dict[str, list[Speed]]
    added_seconds: list[float]

    def ratio(self, kinds: Iterable[str], base: str) -> float:
        """The throughput of the best of these kinds, in units of that of another; each round is
        compared with itself."""
        ratios = []
        for kind in kinds:
            rounds = zip(self.speeds[kind], self.speeds[base])
            ratios.append(statistics.median(a.per_second / b.per_second for a, b in rounds))
        return max(ratios)


def measure(
    model: str, side: int, seconds: float, rounds: int
) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and the targets that were missed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        guard = make_guard(Path(folder), model, side)
        opened = open_guard(guard, device="cpu")
        backend = TorchBackend(opened)
        assert opened.guard.classifier is not None
        network = opened.guard.classifier.model.eval()
        image = jpeg(side)
        row = backend.prepare(image)[None]
        size = best_batch_size(network, row, seconds / 4)
        servers = start_servers(guard, size, stack)
        found = run_rounds(servers, backend, network, image, row, size, seconds, rounds)
    lines, missed = report(found, size)
    return [[model, *line] for line in lines], [f"{model}: {what}" for what in missed]


def jpeg(side: int) -> bytes:
    """An image of noise as a file."""
    pixels = np.random.default_rng(1).integers(0, 256, (side, side, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    return buffer.getvalue()


def repeated(row: np.ndarray, size: int) -> torch.Tensor:
    """A batch of one row (1, …), `size` times."""
    return torch.from_numpy(row).expand(size, *row.shape[1:]).contiguous()


def best_batch_size(network: torch.nn.Module, row: np.ndarray, seconds: float) -> int:
    """The batch size at which the network alone is fastest."""
    speeds = {}
    for size in BATCH_SIZES:
        speeds[size] = bare_speed(network, repeated(row, size), seconds).per_second
    return max(speeds, key=lambda size: speeds[size])


def start_servers(guard: Path, size: int, stack: ExitStack) -> dict[str, Server]:
    """All servers, with batches of at most `size`; they end with the stack."""
    kinds = ["fdbd", "workers", "fastapi"]
    if litserve:
        kinds.append("litserve")
    servers = {}
    for kind in kinds:
        port = free_port()
        path = "/v2/health/ready"
        if kind == "litserve":
            path = "/health"
        command = [sys.executable, str(Path(__file__).resolve())]
        command += ["--child", kind, str(guard), str(port), str(size)]
        if kind == "fdbd":
            command = serve_command(guard, port, size, workers=1)
        elif kind == "workers":
            command = serve_command(guard, port, size, workers=CORES)
        servers[kind] = Server(port, stack.enter_context(running(command, port, path)))
    return servers


def serve_command(guard: Path, port: int, size: int, workers: int) -> list[str]:
    command = [sys.executable, "-m", "fdbd", "serve", str(guard), "--device", "cpu"]
    command += ["--no-state", "--no-samples", "--port", str(port)]
    return [*command, "--workers", str(workers), "--batch-size", str(size)]


def requests_of(image: bytes, row: np.ndarray) -> dict[str, tuple[str, bytes]]:
    """For each contender that is a server: which one it asks, and the request."""
    tensor = tensor_request(row)
    file = request_bytes("/decide", image, {"content-type": "image/jpeg"})
    asked = {
        "tensors": ("fdbd", tensor),
        "workers": ("workers", tensor),
        "files": ("fdbd", file),
        "worker files": ("workers", file),
        "fastapi": ("fastapi", file),
    }
    if litserve:
        content = json.dumps({"image": base64.b64encode(image).decode()}).encode()
        headers = {"content-type": "application/json"}
        asked["litserve"] = ("litserve", request_bytes("/predict", content, headers))
    return asked


def tensor_request(row: np.ndarray) -> bytes:
    """A prepared image by the Open Inference Protocol, in binary form."""
    described = {
        "name": "images",
        "shape": list(row.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": row.nbytes},
    }
    header = json.dumps({"inputs": [described]}).encode()
    headers = {
        "content-type": "application/octet-stream",
        "inference-header-content-length": str(len(header)),
    }
    content = header + row.astype("<f4").tobytes()
    return request_bytes("/v2/models/guard/infer", content, headers)


def run_rounds(
    servers: dict[str, Server],
    backend: TorchBackend,
    network: torch.nn.Module,
    image: bytes,
    row: np.ndarray,
    size: int,
    seconds: float,
    rounds: int,
) -> Found:
    """Measure all contenders in turn, several times."""
    asked = requests_of(image, row)
    groups = [server.group for server in servers.values()]
    batch = repeated(row, size)
    found = Found({kind: [] for kind in ("bare", *asked)}, [])
    for number in range(rounds + 1):
        # The first round warms up.
        counts = number > 0
        with alone(None, groups):
            bare = bare_speed(network, batch, seconds)
        if counts:
            found.speeds["bare"].append(bare)
        for kind, (name, request) in asked.items():
            with alone(servers[name].group, groups):
                speed = served_speed(servers[name], request, seconds)
            if counts:
                found.speeds[kind].append(speed)
        with alone(servers["fdbd"].group, groups):
            _, tensor = asked["tensors"]
            added = added_latency(servers["fdbd"], tensor, backend, row)
        if counts:
            found.added_seconds.append(added)
    return found


def added_latency(
    server: Server, request: bytes, backend: TorchBackend, row: np.ndarray, count: int = 20
) -> float:
    """Seconds that one client waits longer than a call of the guard in this process takes."""
    called = []
    for _ in range(count):
        start = time.perf_counter()
        backend.decide(row)
        called.append(time.perf_counter() - start)
    return median_latency(server.port, request, count) - statistics.median(called)


def report(found: Found, size: int) -> tuple[list[list[str]], list[str]]:
    """Lines of the table, and the targets that were missed."""
    names = {
        "bare": f"network alone, batches of {size}",
        "tensors": "fdbd serve, tensors",
        "workers": f"fdbd serve --workers {CORES}, tensors",
        "files": "fdbd serve, files",
        "worker files": f"fdbd serve --workers {CORES}, files",
        "fastapi": "plain FastAPI, files",
        "litserve": "LitServe, files",
    }
    lines = []
    for kind, rounds in found.speeds.items():
        rate = statistics.median(speed.per_second for speed in rounds)
        server_ms = 1e3 * statistics.median(speed.cpu_seconds for speed in rounds)
        client_ms = 1e3 * statistics.median(speed.client_seconds for speed in rounds)
        measured = f"{rate:,.0f}/s, {server_ms:.2f} ms of CPU"
        if client_ms:
            measured += f" + {client_ms:.2f} of its client"
        lines.append([names[kind], measured, ""])

    missed = []
    for what, value, target in ratios_of(found):
        lines.append([what, f"{value:.2f}", f"≥ {target:g}"])
        if value < target:
            missed.append(f"{what}: {value:.2f} instead of {target:g}")
    most = 1 / found.ratio(["fastapi"], "bare")
    if most < OF_SINGLE:
        missed.append(
            f"the bare model itself has {most:.2f} times the throughput of plain FastAPI, not 3"
        )
    added = statistics.median(found.added_seconds)
    lines.append(["added median latency, one client", f"{1e3 * added:.1f} ms", "< 3 ms"])
    if added >= ADDED_SECONDS:
        missed.append(f"one client waits {1e3 * added:.1f} ms longer, not 3 ms")
    return lines, missed


def ratios_of(found: Found) -> list[tuple[str, float, float]]:
    """What is compared, the ratio and its target; the better of the two numbers of processes
    counts."""
    tensors = found.ratio(["tensors", "workers"], "bare")
    ratios = [
        ("tensors, of the bare model's throughput", tensors, OF_BARE),
        ("files, times plain FastAPI", found.ratio(FILES, "fastapi"), OF_SINGLE),
    ]
    if litserve:
        files = found.ratio(FILES, "litserve")
        ratios.append(("files, times LitServe with batching", files, OF_LITSERVE))
    return ratios


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
        if kind == "litserve":
            serve_litserve(guard, int(port), int(size))
        else:
            serve_fastapi(guard, int(port), int(size))
        return
    lines: list[list[str]] = []
    missed: list[str] = []
    for given in options.models:
        model, _, side = given.rpartition(":")
        found, misses = measure(model, int(side), options.seconds, options.rounds)
        lines += found
        missed += misses
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
