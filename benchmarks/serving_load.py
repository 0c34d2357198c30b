"""A service under mixed load for a long time: its memory and its answers, second by second.

Run ``python benchmarks/serving_load.py --minutes 60``. Honest clients ask for decisions on small
images all the time. Meanwhile others send pictures of sixteen megapixels, bodies that they never
finish, headers that never end, files that are no images, and some leave in the middle. Every second
the memory of the process is read at its highest, and the time that the honest answers took.

It writes a plot to docs/_static/serving-load.svg and a table to docs/reliability.md. It ends with
an error if the memory reaches ``--memory``, an honest answer is wrong, a client's fault is answered
with 500, or memory grows from the second third of the run to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from serving_faults import (
    HEADER_TIMEOUT,
    MEMORY,
    TIMEOUT,
    Clients,
    Service,
    empty_png,
    make_guard,
    png,
    post_head,
)

from fdbd.decision.guard_file import open_guard
from fdbd.serve.torch_backend import TorchBackend

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
PLOT = ROOT / "docs" / "_static" / "serving-load.svg"
MARKS = ("<!-- the load's table begins -->", "<!-- the load's table ends -->")
BIN_SECONDS = 10.0
"""Answers of so many seconds are one point of the plot."""


class Asked(NamedTuple):
    """One request of an honest client."""

    moment: float
    status: int
    seconds: float


class Load:
    """The clients, and what was seen of the service."""

    def __init__(self, service: Service, backend: TorchBackend, seconds: float) -> None:
        self.service = service
        self.clients = Clients(service)
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.asked: list[Asked] = []
        self.probes: list[Asked] = []
        self.memory: list[tuple[float, float]] = []
        self.faults: list[str] = []
        self.sent: collections.Counter[str] = collections.Counter()
        self.images = []
        for seed in range(16):
            image = png(40, seed)
            decided = backend.decide(backend.prepare(image)[None])
            self.images.append((image, int(decided.labels[0]), float(decided.scores[0])))

    def moment(self) -> float:
        return time.monotonic() - self.start

    def goes_on(self) -> bool:
        return time.monotonic() < self.end

    async def honest(self) -> None:
        """Asks for a decision, waits a little, and asks again."""
        while self.goes_on():
            image, label, score = random.choice(self.images)
            moment = self.moment()
            answer = await self.clients.post("/decide", image)
            self.asked.append(Asked(moment, answer.status, answer.seconds))
            if answer.status == 200:
                is_close = math.isclose(answer.body["score"], score, rel_tol=1e-4, abs_tol=1e-6)
                if answer.body["label"] != label or not is_close:
                    self.faults.append(f"{answer.body} in place of {label}, {score}")
            await asyncio.sleep(random.uniform(0.1, 0.3))

    async def probe(self) -> None:
        """Asks for health and metrics."""
        while self.goes_on():
            for path in ("/v2/health/live", "/metrics"):
                moment = self.moment()
                answer = await self.clients.get(path)
                self.probes.append(Asked(moment, answer.status, answer.seconds))
                self.sent[f"{path}: {answer.status or 'closed'}"] += 1
                if answer.status != 200:
                    self.faults.append(f"{path} answered with {answer.status} {answer.body}")
            await asyncio.sleep(0.5)

    async def large_images(self) -> None:
        """Eight pictures of sixteen megapixels at once."""
        picture = empty_png(4000, 4000)
        while self.goes_on():
            asked = [self.clients.post("/decide", picture) for _ in range(8)]
            for answer in await asyncio.gather(*asked):
                self._count("large images", answer.status, {200, 503, 504, 0})
            await asyncio.sleep(random.uniform(2, 6))

    async def unfinished_bodies(self) -> None:
        """Ten bodies of 31 megabytes whose last byte does not come."""
        length = 31_000_000
        content = post_head("/decide", length) + bytes(length - 1)
        while self.goes_on():
            asked = [self.clients.send(content, TIMEOUT + 10) for _ in range(10)]
            for answer in await asyncio.gather(*asked):
                self._count("unfinished bodies", answer.status, {0, 408, 503})
            await asyncio.sleep(random.uniform(2, 6))

    async def slow_headers(self) -> None:
        """Fifty connections with half a header."""
        half = b"POST /decide HTTP/1.1\r\nhost: x\r\nx-half"
        while self.goes_on():
            asked = [self.clients.send(half, HEADER_TIMEOUT + 10) for _ in range(50)]
            for answer in await asyncio.gather(*asked):
                self._count("half headers", answer.status, {0, 408, 503})
            await asyncio.sleep(random.uniform(1, 3))

    async def no_images(self) -> None:
        """Noise, truncated images and JSON that ends too early."""
        while self.goes_on():
            image = random.choice(self.images)[0]
            for body, kind in (
                (random.randbytes(500), "image/png"),
                (image[: len(image) // 2], "image/png"),
                (b'{"features": [[1, 2', "application/json"),
            ):
                answer = await self.clients.post("/decide", body, kind)
                self._count("no images", answer.status, {400, 415, 503, 504, 0})
            await asyncio.sleep(0.5)

    async def leaving(self) -> None:
        """Sends half an image or a whole one, and disconnects."""
        while self.goes_on():
            image = random.choice(self.images)[0]
            try:
                _, writer = await self.clients.connect()
                writer.write(post_head("/decide", len(image)))
                writer.write(image[: random.choice([10, len(image)])])
                await writer.drain()
                writer.transport.abort()
                self.sent["left"] += 1
            except OSError:
                self.sent["refused connections"] += 1
            await asyncio.sleep(random.uniform(0.1, 0.3))

    async def watch(self) -> None:
        """Reads the highest memory of each second."""
        while self.goes_on():
            self.service.forget_peak()
            await asyncio.sleep(1)
            self.memory.append((self.moment(), self.service.peak_memory()))

    def _count(self, what: str, status: int, allowed: set[int]) -> None:
        self.sent[f"{what}: {status or 'closed'}"] += 1
        if status not in allowed:
            self.faults.append(f"{what} answered with {status}")

    async def run(self) -> None:
        honest = [self.honest() for _ in range(4)]
        hostile = [
            self.large_images(), self.unfinished_bodies(), self.slow_headers(),
            self.no_images(), self.leaving(),
        ]  # fmt: skip
        await asyncio.gather(*honest, *hostile, self.probe(), self.watch())


def quantiles(asked: list[Asked], share: float) -> tuple[list[float], list[float]]:
    """Minutes, and that quantile of the seconds of the answers around them."""
    bins: dict[int, list[float]] = {}
    for each in asked:
        if each.status == 200:
            bins.setdefault(int(each.moment // BIN_SECONDS), []).append(each.seconds)
    minutes = [(number + 0.5) * BIN_SECONDS / 60 for number in sorted(bins)]
    return minutes, [float(np.quantile(bins[number], share)) for number in sorted(bins)]


def draw(load: Load, path: Path) -> None:
    """Memory above, seconds below, over minutes."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(
        [moment / 60 for moment, _ in load.memory], [value for _, value in load.memory], lw=0.8
    )
    above.axhline(MEMORY, color="tab:red", ls="--", lw=1, label=f"--memory {MEMORY}")
    above.set_ylim(0, 1.1 * MEMORY)
    above.set_ylabel("MB, highest of a second")
    above.legend(loc="lower right")
    for share, name in ((0.5, "median"), (0.99, "99th percentile")):
        below.plot(*quantiles(load.asked, share), lw=1, label=f"small images, {name}")
    below.plot(*quantiles(load.probes, 0.99), lw=1, label="health and metrics, 99th percentile")
    below.axhline(TIMEOUT, color="tab:red", ls="--", lw=1, label=f"--timeout {TIMEOUT:g}")
    below.set_ylabel("seconds to the answer")
    below.set_xlabel("minutes")
    below.set_ylim(0)
    below.legend(loc="upper right", fontsize="small")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def summary(load: Load, minutes: float) -> dict[str, Any]:
    """The numbers of the table."""
    values = np.array([value for _, value in load.memory])
    third = len(values) // 3
    answered = [each.seconds for each in load.asked if each.status == 200]
    probes = [each.seconds for each in load.probes]
    statuses = collections.Counter(each.status for each in load.asked)
    if values.max() >= MEMORY:
        load.faults.append(f"{values.max():.0f} MB of {MEMORY}")
    growth = float(
        np.quantile(values[2 * third :], 0.9) / np.quantile(values[third : 2 * third], 0.9) - 1
    )
    if growth > 0.1:
        load.faults.append(f"memory grew by {growth:.0%} in the last third")
    if 500 in statuses:
        load.faults.append("an honest client was answered with 500")
    return {
        "minutes": minutes,
        "small images asked": len(load.asked),
        "answers by status (0: no answer)": dict(sorted(statuses.items())),
        "median, 99th percentile, longest of the answers (s)": [
            round(float(np.quantile(answered, share)), 3) for share in (0.5, 0.99, 1.0)
        ],
        "99th percentile, longest of health and metrics (s)": [
            round(float(np.quantile(probes, share)), 3) for share in (0.99, 1.0)
        ],
        "memory: median, highest, limit (MB)": [
            round(float(np.median(values))), round(float(values.max())), MEMORY,
        ],
        "growth of memory, last third against the one before": f"{growth:+.1%}",
        "others": dict(sorted(load.sent.items())),
        "faults": load.faults[:10],
    }  # fmt: skip


def shown(value: Any) -> str:
    """A value as text of a table's cell."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {number:,}" for key, number in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def write_page(found: dict[str, Any], processors: str) -> None:
    """Puts the table between its marks."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    lines = [f"| {name} | {shown(value)} |" for name, value in found.items()]
    told = f"On {time.strftime('%Y-%m-%d')}, {processors}; the clients ran on the same processors."
    page = [MARKS[0], "", "| what | found |", "|---|---|", *lines, "", told, "", MARKS[1]]
    PAGE.write_text(before + "\n".join(page) + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--no-page", action="store_true", help="print the numbers alone")
    parser.add_argument("--machine", default="two processors", help="what the page says of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        guard = make_guard(Path(name))
        torch.set_num_threads(1)
        backend = TorchBackend(open_guard(guard, device="cpu"))
        service = Service(guard, "--no-state")
        try:
            load = Load(service, backend, 60 * options.minutes)
            asyncio.run(load.run())
            log = service.text()
        finally:
            service.end()
    if "Traceback" in log:
        load.faults.append(f"a traceback is in the log: {log[-500:]}")
    found = summary(load, options.minutes)
    print(json.dumps(found, indent=2))
    if not options.no_page:
        draw(load, PLOT)
        write_page(found, options.machine)
    return 1 if load.faults else 0


if __name__ == "__main__":
    sys.exit(main())
