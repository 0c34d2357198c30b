"""Load and faults on a real service: broken images, huge bodies, slow clients, disconnects, killed
workers.

Run ``python benchmarks/serving_faults.py --minutes 15``. It ends with an error unless each answer
equals the guard's, each request is answered (except on connections that a killed worker held: those
are counted and repeated), and the memory of the service stays flat. It prints its verdict and its
counts as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import io
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fdbd.decision.guard_file import open_guard
from fdbd.serve.torch_backend import TorchBackend

WORKERS = 2
KILL_SECONDS = 20.0
MAX_BODY = 1
"""Megabytes."""


class Service:
    """`fdbd serve` with two workers, in separate processes."""

    def __init__(self, guard: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "fdbd",
            "serve",
            str(guard),
            "--port",
            "0",
            "--workers",
            str(WORKERS),
        ]
        command += ["--max-body", str(MAX_BODY), "--device", "cpu"]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(command, stderr=self.log, start_new_session=True)
        deadline = time.monotonic() + 180
        while not (found := re.search(r"serving on http://127\.0\.0\.1:(\d+)", self.text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{self.text()}")
            time.sleep(0.2)
        self.port = int(found[1])

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def workers(self) -> list[int]:
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return [
            int(child) for child in children if b"spawn_main" in _read(f"/proc/{child}/cmdline")
        ]

    def memory(self) -> int:
        """Memory of the largest worker, in bytes."""
        lines = (_read(f"/proc/{pid}/status").decode() for pid in self.workers())
        return max(
            (1024 * int(m[1]) for text in lines if (m := re.search(r"VmRSS:\s+(\d+)", text))),
            default=0,
        )

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


class Load:
    """Clients that behave, and clients that do not."""

    def __init__(self, port: int, backend: TorchBackend, end: float) -> None:
        self.port, self.end = port, end
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        generator = np.random.default_rng(0)
        self.images = []
        for _ in range(16):
            buffer = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (40, 36, 3), np.uint8)).save(buffer, "PNG")
            image = buffer.getvalue()
            answers = backend.decide(backend.prepare(image)[None])
            self.images.append(
                (image, int(answers.labels[0]), float(answers.scores[0]), bool(answers.is_ood[0]))
            )

    async def ask(
        self, body: bytes, kind: str = "image/png", *, pause: float = 0.0
    ) -> tuple[int, Any]:
        """One request on a new connection; status 0 if the connection broke."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return 0, None
        try:
            head = (
                f"POST /decide HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: {kind}\r\n"
            )
            content = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
            for start in range(0, len(content), size := 2000 if pause else len(content)):
                writer.write(content[start : start + size])
                await writer.drain()
                await asyncio.sleep(pause)
            answer = await asyncio.wait_for(reader.read(), 60)
            status, _, text = answer.partition(b"\r\n\r\n")
            return (int(status.split()[1]), json.loads(text)) if status else (0, None)
        except (OSError, ValueError):
            return 0, None
        finally:
            writer.close()

    async def honest(self, pause: float = 0.0) -> None:
        """Sends images, and repeats each request until it is answered."""
        while time.monotonic() < self.end:
            image, label, score, is_ood = random.choice(self.images)
            for _ in range(600):
                status, found = await self.ask(image, pause=pause)
                if status == 200:
                    break
                self.counts["broken connections" if not status else f"status {status}"] += 1
                await asyncio.sleep(0.1)
            else:
                self.wrong.append("a request had no answer in 600 tries")
                return
            self.counts["answers"] += 1
            close = math.isclose(found["score"], score, rel_tol=1e-4, abs_tol=1e-6)
            if (found["label"], found["is_ood"]) != (label, is_ood) or not close:
                self.wrong.append(f"{found} instead of {label}, {score}, {is_ood}")

    async def broken(self) -> None:
        """Sends files that are not images, truncated images, and bodies above the limit."""
        while time.monotonic() < self.end:
            image = random.choice(self.images)[0]
            for name, body, kind, expected in (
                ("noise", random.randbytes(500), "image/png", {400}),
                ("a cut image", image[: len(image) // 2], "image/png", {400}),
                ("no JSON", b'{"features": [[1, 2', "application/json", {400, 415}),
                ("a form without a file", b"--x--\r\n", "multipart/form-data; boundary=x", {400}),
                ("a huge body", bytes(MAX_BODY * 1_000_000 + 1), "image/png", {413}),
            ):
                status, _ = await self.ask(body, kind)
                self.counts[f"broken: {status}"] += 1
                if status not in expected and status not in (0, 503):
                    self.wrong.append(f"{name} was answered with {status}")
                await asyncio.sleep(0.02)

    async def leaving(self) -> None:
        """Sends half a request or a whole one, and disconnects."""
        while time.monotonic() < self.end:
            image = random.choice(self.images)[0]
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                head = f"POST /decide HTTP/1.1\r\nhost: x\r\ncontent-length: {len(image)}\r\n\r\n".encode()
                writer.write(head + image[: random.choice([10, len(image)])])
                await writer.drain()
                await asyncio.sleep(random.random() * 0.02)
                writer.transport.abort()
                self.counts["left"] += 1
            except OSError:
                self.counts["broken connections"] += 1
            await asyncio.sleep(0.02)

    async def killing(self, service: Service) -> None:
        """Kills a worker now and then."""
        while time.monotonic() + 10 < self.end:
            await asyncio.sleep(min(KILL_SECONDS, max(1.0, (self.end - time.monotonic()) / 3)))
            if workers := service.workers():
                os.kill(random.choice(workers), signal.SIGKILL)
                self.counts["kills"] += 1

    async def run(self, service: Service) -> list[int]:
        """Runs all of them; reads the memory once per second."""
        memory = []

        async def watch() -> None:
            while time.monotonic() < self.end:
                memory.append(service.memory())
                await asyncio.sleep(1)

        clients = [self.honest() for _ in range(8)] + [self.honest(0.05) for _ in range(4)]
        await asyncio.gather(
            *clients, self.broken(), self.leaving(), self.killing(service), watch()
        )
        return memory


def make_guard(folder: Path) -> Path:
    """The zoo's model with a guard that was fitted on noise."""
    generator = np.random.default_rng(1)
    for name in ("fit", "calibration"):
        (folder / name).mkdir()
        for number in range(24):
            pixels = generator.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    given = ["fit", "cifar10-ce", str(folder / "fit"), "--calibration", str(folder / "calibration")]
    out = folder / "guard.safetensors"
    subprocess.run(
        [sys.executable, "-m", "fdbd", *given, "--out", str(out)], check=True, capture_output=True
    )
    return out


def trial(minutes: float) -> dict[str, Any]:
    """Runs it and reports what happened; `faults` is empty if all is well."""
    with tempfile.TemporaryDirectory() as name:
        guard = make_guard(Path(name))
        torch.set_num_threads(1)
        backend = TorchBackend(open_guard(guard, device="cpu"))
        service = Service(guard)
        try:
            load = Load(service.port, backend, time.monotonic() + 60 * minutes)
            memory = asyncio.run(load.run(service))
            status, _ = asyncio.run(load.ask(load.images[0][0]))
            log = service.text()
        finally:
            service.end()
    faults = load.wrong[:20]
    if not load.counts["answers"]:
        faults.append("no request was answered")
    if status != 200:
        faults.append(f"after the load the service answers with {status}")
    if "Traceback" in log:
        faults.append("a traceback is in the log: " + log[log.index("Traceback") :][:500])
    if any(count.endswith(" 500") for count in load.counts):
        faults.append("a request was answered with 500")
    warm = [value for value in memory[len(memory) // 3 :] if value]
    growth = max(warm[len(warm) // 2 :], default=0) / max(1, *warm[: len(warm) // 2]) - 1
    if growth > 0.1:
        faults.append(f"memory grew by {growth:.0%} in the second half")
    return {
        "verdict": "failed" if faults else "passed",
        "minutes": minutes,
        **dict(sorted(load.counts.items())),
        "memory_mb": round(max(memory) / 1e6),
        "growth": round(growth, 3),
        "faults": faults,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    found = trial(parser.parse_args().minutes)
    print(json.dumps(found, indent=2))
    if found["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
