"""What records of decisions cost the service: added latency at batch 1, and memory over a million.

    python benchmarks/decision_records.py

Two services run the same guard, that of `fdbd demo`; one writes records (`--decisions`). They are
asked in turn, one image per request, and each pair of requests gives one ratio. Two processes of the
same program differ by some percent, so the services are started anew in each round, and the result
is the median over rounds; the processor time of both is compared, too, which other programs on the
machine disturb less. Then tensors go to
the recording service until it has written a million records, and its resident memory is read on the
way; this guard takes features, so that the records are most of the work. Linux.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
from _common import machine, table, verdict, write_section

import fdbd
from fdbd.commands.demo import write_guard

PICTURE = Path(__file__).parents[1] / "src/fdbd/serve/assets/examples/cat.jpg"
ROWS = 500
"""Rows of a request while memory is watched; all its records fit in the queue."""
FEATURES = 128
MOST_ADDED = 0.02
MOST_GROWTH = 0.05
"""Of memory, from a tenth of the records to all."""


class Served:
    """A running service, and one connection to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def post(self, path: str, body: bytes, kind: str, **headers: str) -> float:
        """Seconds until the answer was read."""
        start = time.perf_counter()
        self._connection.request("POST", path, body, {"content-type": kind, **headers})
        answer = self._connection.getresponse()
        content = answer.read()
        seconds = time.perf_counter() - start
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}: {content[:200]!r}")
        return seconds

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 if it is not there."""
        self._connection.request("GET", "/metrics")
        text = self._connection.getresponse().read().decode()
        values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in values)

    def cpu_seconds(self) -> float:
        """Processor time of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        """Bytes resident in the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


@contextmanager
def serving(guard: Path, *options: object) -> Iterator[Served]:
    """`fdbd serve` on a free port of the loopback, once it answers."""
    given = ["serve", guard, "--port", 0, "--no-state", "--device", "cpu", *options]
    command = [sys.executable, "-m", "fdbd", *map(str, given)]
    # A file, since a pipe that nobody reads would stop the service once its log has filled it.
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield Served(process, _port(Path(log.name), process))
        finally:
            process.terminate()
            process.wait(timeout=120)


def _port(log: Path, process: subprocess.Popen[bytes]) -> int:
    """The port of a service, once it says so."""
    while process.poll() is None:
        found = re.search(r"serving on http://127\.0\.0\.1:(\d+)", log.read_text())
        if found:
            return int(found[1])
        time.sleep(0.2)
    raise RuntimeError(f"the service did not start: {log.read_text()}")


def added_latency(guard: Path, folder: Path, pairs: int, number: int) -> tuple[float, float]:
    """How many times as long the recording service takes, and how many times the processor time,
    in one round."""
    picture = PICTURE.read_bytes()
    ratios = []
    with ExitStack() as stack:
        # The first that is started may find a better place.
        if number % 2:
            plain = stack.enter_context(serving(guard))
            recording = stack.enter_context(serving(guard, "--decisions", folder))
        else:
            recording = stack.enter_context(serving(guard, "--decisions", folder))
            plain = stack.enter_context(serving(guard))
        before = {}
        for request in range(pairs + 50):
            if request == 50:
                before = {plain: plain.cpu_seconds(), recording: recording.cpu_seconds()}
            seconds = {}
            # They change places, so that neither always comes after the other.
            order = [plain, recording] if request % 2 else [recording, plain]
            for served in order:
                seconds[served] = served.post("/decide", picture, "image/jpeg")
            # The first requests find cold caches.
            if request >= 50:
                ratios.append(seconds[recording] / seconds[plain])
        spent = {served: served.cpu_seconds() - start for served, start in before.items()}
    return statistics.median(ratios), spent[recording] / spent[plain]


def memory_over(guard: Path, folder: Path, records: int) -> tuple[list[tuple[int, int]], int]:
    """(records, bytes) at every tenth, and how many records were dropped."""
    with serving(guard, "--decisions", folder, "--batch-size", ROWS) as served:
        rows = np.random.default_rng(0).random((ROWS, FEATURES), np.float32)
        tensor = {"name": "features", "shape": list(rows.shape), "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": rows.nbytes}
        head = json.dumps({"inputs": [tensor]}).encode()
        body = head + rows.tobytes()
        lengths = {"inference-header-content-length": str(len(head))}
        seen = []
        sent = 0
        for tenth in range(1, 11):
            while sent < records * tenth // 10:
                path = "/v2/models/guard/infer"
                served.post(path, body, "application/octet-stream", **lengths)
                sent += ROWS
            seen.append((sent, served.memory()))
            print(f"{sent:,} records: {seen[-1][1] / 1e6:.0f} MB", flush=True)
        dropped = int(served.metric("fdbd_decisions_dropped_total"))
    return seen, dropped


def write_guard_of_features(path: Path) -> None:
    """A guard of features that is fitted on noise: only what its records cost is of interest."""
    generator = torch.Generator().manual_seed(0)
    head = fdbd.Head(torch.randn(10, FEATURES, generator=generator), torch.zeros(10))
    guard = fdbd.Guard(head, "fdbd")
    guard.fit([fdbd.Batch(torch.rand(1000, FEATURES, generator=generator))], progress=False)
    fresh = [fdbd.Batch(torch.rand(1000, FEATURES, generator=generator))]
    guard.calibrate(fresh, alpha=0.05, progress=False)
    guard.save(path)


def count_records(folder: Path) -> int:
    number = 0
    for path in folder.glob("*.jsonl"):
        with path.open("rb") as file:
            number += sum(1 for _ in file)
    return number


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    # Two services share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        guard = Path(temporary) / "guard.safetensors"
        write_guard(guard)
        rounds = []
        for number in range(options.rounds):
            rounds.append(added_latency(guard, Path(temporary) / "latency", options.pairs, number))
            print(f"round {number + 1}: latency × {rounds[-1][0]:.3f}, CPU × {rounds[-1][1]:.3f}")
        folder = Path(temporary) / "memory"
        of_features = Path(temporary) / "features.safetensors"
        write_guard_of_features(of_features)
        seen, dropped = memory_over(of_features, folder, options.records)
        written = count_records(folder)
    latencies = sorted(latency - 1 for latency, _ in rounds)
    cpu_times = sorted(cpu_time - 1 for _, cpu_time in rounds)
    added = statistics.median(latencies)
    growth = seen[-1][1] / seen[0][1] - 1
    rows = [
        [
            "added latency at batch 1",
            f"{_percent(added)} ({_percent(latencies[0])} to {_percent(latencies[-1])})",
            f"below {100 * MOST_ADDED:.0f} %",
        ],
        [
            "added processor time at batch 1",
            f"{_percent(statistics.median(cpu_times))} ({_percent(cpu_times[0])} to "
            f"{_percent(cpu_times[-1])})",
            "",
        ],
        [
            f"memory at {seen[-1][0]:,} records over that at {seen[0][0]:,}",
            f"{100 * growth:+.1f} %",
            f"below {100 * MOST_GROWTH:.0f} %",
        ],
        ["records in the files", f"{written:,}; {dropped:,} dropped", "none lost uncounted"],
    ]
    missed = []
    if added >= MOST_ADDED:
        missed.append("records add more latency than they should")
    if growth >= MOST_GROWTH:
        missed.append("memory grows with the number of records")
    if written + dropped != seen[-1][0]:
        missed.append(f"{seen[-1][0] - written - dropped:,} records are neither kept nor counted")
    text = f"""\
`python benchmarks/decision_records.py`: two services run the guard of `fdbd demo`, and one of them
writes records. Latency: the median over {options.rounds} rounds (least to most), in each the median of
{options.pairs:,} ratios within pairs of requests, one JPEG to `/decide`; the services are started anew in each
round. Memory is what is resident in the recording service.
Machine: {machine()}

{table(["what", "measured", "target"], rows)}
{verdict(missed)}
"""
    print(text)
    if not options.no_write:
        write_section("Decision records", text)


if __name__ == "__main__":
    main()
