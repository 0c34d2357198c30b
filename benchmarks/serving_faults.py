"""What clients can do to a service, on a real one: each row is a fault, and can fail.

Run ``python benchmarks/serving_faults.py`` (about a quarter of an hour), or with ``--quick`` (under
three minutes); ``--rows`` chooses some. Each row starts from a service that answers, does what its
name says, and looks whether the service kept its bounds: every request is answered or refused in
time, health and metrics answer meanwhile, no answer is wrong, and the memory of the process, at its
highest, stays below ``--memory``. It ends with an error if a row fails, and prints all rows as
JSON.

Options that an older version of `fdbd serve` lacks are left out, so that its rows can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import functools
import http.client
import io
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fdbd.decision.guard_file import open_guard
from fdbd.serve.torch_backend import TorchBackend

MEMORY = 1_800
"""Megabytes that a process may use."""
TIMEOUT = 5.0
HEADER_TIMEOUT = 3.0
CONNECTIONS = 128
MAX_BODY = 32
"""Megabytes."""
PROBE_SECONDS = 2.0
"""The longest that health and metrics may take while the service is attacked. The clients run on
the same cores."""
WORKERS = 2
KILL_SECONDS = 20.0


# ── services


@functools.cache
def known_options() -> str:
    """The help of `fdbd serve`."""
    wide = {**os.environ, "COLUMNS": "200"}
    command = [sys.executable, "-m", "fdbd", "serve", "--help"]
    return subprocess.run(command, capture_output=True, text=True, env=wide).stdout


class Service:
    """`fdbd serve` in processes of its own."""

    def __init__(self, guard: Path, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "fdbd", "serve", str(guard), "--port", "0"]
        command += ["--device", "cpu"]
        given = {
            "--memory": MEMORY,
            "--timeout": TIMEOUT,
            "--header-timeout": HEADER_TIMEOUT,
            "--connections": CONNECTIONS,
            "--max-body": MAX_BODY,
        }
        for option, value in given.items():
            if option in known_options():
                command += [option, str(value)]
        command += [str(argument) for argument in arguments]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stderr=self.log,
            start_new_session=True,
            cwd=guard.parent,
            env={**os.environ, **environment},
        )
        deadline = time.monotonic() + 180
        found = None
        while found is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start:\n{self.text()}")
            time.sleep(0.1)
            found = re.search(r"serving on http://127\.0\.0\.1:(\d+)", self.text())
        self.port = int(found[1])

    def text(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def workers(self) -> list[int]:
        """The processes that answer."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        children = []
        for child in _read(path).decode().split():
            if b"spawn_main" in _read(f"/proc/{child}/cmdline"):
                children.append(int(child))
        return children or [self.process.pid]

    def forget_peak(self) -> None:
        """Have the system measure the highest memory anew."""
        for worker in self.workers():
            Path(f"/proc/{worker}/clear_refs").write_text("5")

    def peak_memory(self) -> float:
        """The highest memory of a process, in megabytes."""
        peaks = [0.0]
        for worker in self.workers():
            found = re.search(r"VmHWM:\s+(\d+)", _read(f"/proc/{worker}/status").decode())
            if found:
                peaks.append(1024 * int(found[1]) / 1e6)
        return max(peaks)

    def cpu_seconds(self) -> float:
        """Processor time of the processes so far."""
        ticks = 0
        for worker in self.workers():
            fields = _read(f"/proc/{worker}/stat").decode().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


# ── clients


@dataclass
class Answer:
    """What came back: status 0 if the connection broke or was closed without an answer."""

    status: int
    body: Any
    seconds: float


def post_head(path: str, length: int, kind: str = "image/png", *more: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: 127.0.0.1",
        f"content-type: {kind}",
        f"content-length: {length}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


class Clients:
    """Opens connections to a service, and looks after its probes while a row runs."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.probe_seconds: list[float] = []
        self.probe_failures: list[str] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.service.port)

    async def send(self, content: bytes, patience: float = 60.0) -> Answer:
        """Send bytes on a new connection and read the answer."""
        start = time.monotonic()
        writer = None
        sending = None
        try:
            reader, writer = await self.connect()
            sending = asyncio.ensure_future(send_in_parts(writer, content))
            answer = await asyncio.wait_for(read_answer(reader), patience)
        except (OSError, ValueError, EOFError, asyncio.TimeoutError):
            answer = (0, None)
        finally:
            if sending is not None:
                sending.cancel()
            if writer is not None:
                writer.transport.abort()
        return Answer(*answer, time.monotonic() - start)

    async def post(
        self, path: str, body: bytes, kind: str = "image/png", *more: str, patience: float = 60.0
    ) -> Answer:
        head = post_head(path, len(body), kind, "connection: close", *more)
        return await self.send(head + body, patience)

    async def get(self, path: str, patience: float = 60.0) -> Answer:
        head = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
        return await self.send(head.encode(), patience)

    def probe(self, ended: threading.Event) -> None:
        """Ask for health, metrics and status until the end, in a thread: this process is busy with
        the clients that attack."""
        while not ended.wait(0.2):
            for path in ("/v2/health/live", "/metrics", "/status"):
                start = time.monotonic()
                connection = http.client.HTTPConnection("127.0.0.1", self.service.port, timeout=30)
                try:
                    connection.request("GET", path)
                    status = connection.getresponse().status
                except OSError as error:
                    self.probe_failures.append(f"{path}: {error!r}")
                    continue
                finally:
                    connection.close()
                self.probe_seconds.append(time.monotonic() - start)
                if status != 200:
                    self.probe_failures.append(f"{path}: {status}")


async def send_in_parts(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send as fast as the service reads."""
    view = memoryview(content)
    with contextlib.suppress(OSError):
        for start in range(0, len(content), 1 << 18):
            writer.write(view[start : start + (1 << 18)])
            await writer.drain()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of one answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    body = await reader.readexactly(int(length[1])) if length else b""
    status = int(head.split()[1])
    try:
        return status, json.loads(body)
    except ValueError:
        return status, body


# ── images


def png(side: int, seed: int = 0) -> bytes:
    """A small picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def empty_png(width: int, height: int, *chunks: bytes) -> bytes:
    """A PNG of one colour: few bytes, many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    compressor = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    packed = b"".join([compressor.compress(row) for _ in range(height)]) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    texts = b"".join(chunk(b"zTXt", text) for text in chunks)
    parts = (chunk(b"IHDR", header), texts, chunk(b"IDAT", packed), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg(width: int, height: int, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (120, 60, 200)).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def jpeg_of_many_scans(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated, as no camera does: each costs a pass over the
    whole image."""
    content = jpeg(side, side, progressive=True)
    last = content.rindex(b"\xff\xda")
    end = content.rindex(b"\xff\xd9")
    return content[:end] + content[last:end] * scans + content[end:]


def bmp_of_short_lines(side: int) -> bytes:
    """A BMP each of whose lines ends after its first pixel: the rest is filled in Python, pixel by
    pixel."""
    palette = bytes(4 * 256)
    runs = b"\1\0\0\0" * side
    start = 14 + 40 + len(palette)
    file_header = b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start)
    sizes = (40, side, side, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return file_header + struct.pack("<IiiHHIIiiII", *sizes) + palette + runs


def png_of_pieces(pieces: int) -> bytes:
    """A PNG of ten pixels behind many empty pieces, each of which is read in Python."""
    empty = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    small = empty_png(10, 10)
    place = small.index(b"IDAT") - 4
    return small[:place] + empty * pieces + small[place:]


def tiff_of_strips(strips: int) -> bytes:
    """A TIFF two pixels wide whose strips are one row each: a header alone."""
    place = 8 + 2 + 12 * 9 + 4
    entries = [
        (256, 4, 1, 2),
        (257, 4, 1, strips),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, strips, place),
        (277, 3, 1, 1),
        (278, 4, 1, 1),
        (279, 4, strips, place),
    ]
    directory = struct.pack("<H", len(entries))
    for entry in entries:
        directory += struct.pack("<HHLL", *entry)
    head = b"II*\0" + struct.pack("<L", 8) + directory + b"\0" * 4
    return head + struct.pack("<L", 2) * strips


# ── rows


@dataclass
class Found:
    """What a row found."""

    faults: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def expect(self, is_so: bool, otherwise: str) -> None:
        if not is_so:
            self.faults.append(otherwise)


Row = Callable[["Trial", Clients, Found], Awaitable[None]]


@dataclass
class Trial:
    """The guards of a run, and how long it may take."""

    folder: Path
    guard: Path
    backend: TorchBackend
    quick: bool


async def large_images(trial: Trial, clients: Clients, found: Found) -> None:
    """Forty pictures of sixteen megapixels in a few kilobytes each, and small ones meanwhile."""
    large = empty_png(4000, 4000)
    count = 20 if trial.quick else 40
    small = png(50)

    async def honest() -> list[Answer]:
        answers = []
        for _ in range(10):
            answers.append(await clients.post("/decide", small))
            await asyncio.sleep(0.3)
        return answers

    asked = [clients.post("/decide", large) for _ in range(count)]
    honest_answers, *answers = await asyncio.gather(honest(), *asked)
    found.numbers["statuses"] = statuses(answers)
    found.numbers["longest"] = longest(answers)
    found.numbers["longest of a small one"] = longest(honest_answers)
    found.expect(longest(answers) < TIMEOUT + 2, f"an answer took {longest(answers)} s")
    found.expect(set(statuses(answers)) <= {200, 503, 504}, f"answers: {statuses(answers)}")
    allowed = {200, 503, 504}
    found.expect(set(statuses(honest_answers)) <= allowed, f"{statuses(honest_answers)}")
    found.expect(longest(honest_answers) < TIMEOUT + 2, "a small image waited for large ones")
    too_large = await clients.post("/decide", empty_png(8000, 8000))
    found.expect(too_large.status == 400, f"64 megapixels: {too_large.status}")
    photo = await clients.post("/decide", jpeg(8000, 6000))
    found.expect(photo.status == 200, f"a photo of 48 megapixels: {photo.status} {photo.body}")


async def images_made_to_be_slow(trial: Trial, clients: Clients, found: Found) -> None:
    """Pictures whose decoding costs far more than their size says."""
    text = b"key\0\0" + zlib.compress(bytes(50_000_000), 9)
    pictures = {
        "many scans": jpeg_of_many_scans(3000, 300),
        "large texts": empty_png(10, 10, *[text] * 30),
        "a long strip": empty_png(1_000_000, 1),
        "strips of a TIFF": tiff_of_strips(2_000_000),
        "short lines of a BMP": bmp_of_short_lines(3900),
        "pieces of a PNG": png_of_pieces(900_000),
    }
    for name, picture in pictures.items():
        answers = await asyncio.gather(*(clients.post("/decide", picture) for _ in range(8)))
        found.numbers[name] = [statuses(answers), longest(answers)]
        allowed = {200, 400, 413, 503, 504}
        found.expect(set(statuses(answers)) <= allowed, f"{name}: {answers[0]}")
        found.expect(longest(answers) < TIMEOUT + 2, f"{name}: {longest(answers)} s")


async def unfinished_bodies(trial: Trial, clients: Clients, found: Found) -> None:
    """A hundred bodies of 31 megabytes of which the last byte never comes."""
    length = 31_000_000
    content = post_head("/decide", length) + bytes(length - 1)

    async def unfinished() -> Answer:
        return await clients.send(content, TIMEOUT + 10)

    answers = await asyncio.gather(*(unfinished() for _ in range(100)))
    found.numbers["statuses"] = statuses(answers)
    found.numbers["longest"] = longest(answers)
    found.expect(longest(answers) < TIMEOUT + 5, f"a body was held for {longest(answers)} s")
    found.expect(set(statuses(answers)) <= {0, 408, 503}, f"answers: {statuses(answers)}")


async def small_chunks(trial: Trial, clients: Clients, found: Found) -> None:
    """Bodies in chunks of one byte and of 32, which cost far more than their bytes."""
    head = post_head("/decide", 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    for size in (1, 32):
        chunk = b"%x\r\n%s\r\n" % (size, b"x" * size)
        content = head + chunk * (30_000_000 // len(chunk)) + b"0\r\n\r\n"
        answers = await asyncio.gather(*(clients.send(content) for _ in range(30)))
        found.numbers[f"of {size}"] = [statuses(answers), longest(answers)]
        found.expect(set(statuses(answers)) <= {0, 400, 503}, f"of {size}: {statuses(answers)}")
        found.expect(longest(answers) < TIMEOUT, f"of {size}: {longest(answers)} s")


async def forms_made_to_be_slow(trial: Trial, clients: Clients, found: Found) -> None:
    """Forms that consist of what looks like their end, which a parser reads byte by byte; small
    images meanwhile."""
    start = b'--x\r\ncontent-disposition: form-data; name="a"; filename="a.png"\r\n\r\n'
    parts = {"ends": b"\r\n--x-", "other ends": b"\r\n--xy", "spaces": b" "}
    kind = "multipart/form-data; boundary=x"
    for name, part in parts.items():
        form = start + b"\r\n--x" + part * (30_000_000 // len(part))
        slow = [clients.post("/decide", form, kind) for _ in range(6)]
        small = [clients.post("/decide", png(40)) for _ in range(5)]
        answers = await asyncio.gather(*slow, *small)
        forms, images = answers[:6], answers[6:]
        found.numbers[name] = [statuses(forms), longest(forms), longest(images)]
        found.expect(set(statuses(forms)) <= {400, 503, 504}, f"{name}: {statuses(forms)}")
        found.expect(longest(forms) < TIMEOUT + 2, f"{name}: {longest(forms)} s")
        found.expect(set(statuses(images)) <= {200, 503}, f"images: {statuses(images)}")
        afterwards = await clients.post("/decide", jpeg(2000, 2000))
        found.expect(afterwards.status == 200, f"a large image afterwards: {afterwards.status}")


def what_is_no_http() -> dict[str, bytes]:
    """Requests that two programs could read in two ways, or that none should understand."""
    image = png(40)
    start = b"POST /decide HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: image/png\r\n"
    length = b"content-length: %d\r\n" % len(image)
    chunked = b"transfer-encoding: chunked\r\n"
    end = b"0\r\n\r\n"
    return {
        "two lengths": start + length + b"content-length: 5\r\n\r\n" + image,
        "the same length twice": start + length * 2 + b"\r\n" + image,
        "a length with a sign": start + length.replace(b": ", b": +") + b"\r\n" + image,
        "length and chunks": start + length + chunked + b"\r\n" + end,
        "chunks within chunks": start + b"transfer-encoding: chunked, chunked\r\n\r\n" + end,
        "another coding": start + b"transfer-encoding: gzip\r\n\r\n" + image,
        "a folded header": start + b"x: a\r\n b\r\n" + length + b"\r\n" + image,
        "lines without CR": start.replace(b"\r\n", b"\n") + b"content-length: 0\n\n",
        "NUL in a header": start + b"x: a\0b\r\n" + length + b"\r\n" + image,
        "a space before the colon": start + length.replace(b":", b" :") + b"\r\n" + image,
        "a chunk of 2**68 bytes": start + chunked + b"\r\nfffffffffffffffff\r\n",
        "two hosts": start + b"host: elsewhere.example\r\n" + length + b"\r\n" + image,
        "TLS": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(500),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "a path that is no text": b"GET /\xff\xfe HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
    }


async def no_http(trial: Trial, clients: Clients, found: Found) -> None:
    """Each of these is refused, alone; and behind a good request it does not become its answer."""
    good = post_head("/decide", len(png(40))) + png(40)
    for name, content in what_is_no_http().items():
        answer = await clients.send(content)
        found.expect(400 <= answer.status < 500, f"{name}: {answer.status} {answer.body}")
        behind = await clients.send(good + content)
        found.expect(behind.status in (0, 200), f"{name} behind a request: {behind.status}")
    found.numbers["forms"] = len(what_is_no_http())


async def large_json(trial: Trial, clients: Clients, found: Found) -> None:
    """JSON that takes many times its size once it is read."""
    for name, part in (("lists", b"[],"), ("objects", b'{"":0},'), ("numbers", b"0.1,")):
        body = b'{"inputs":[' + part * (8_000_000 // len(part)) + b"0]}"
        asked = (clients.post("/v2/models/guard/infer", body, "application/json") for _ in range(8))
        answers = await asyncio.gather(*asked)
        found.numbers[name] = [statuses(answers), longest(answers)]
        found.expect(set(statuses(answers)) <= {400, 413, 503, 504}, f"{name}: {statuses(answers)}")
        found.expect(longest(answers) < TIMEOUT + 5, f"{name}: {longest(answers)} s")


async def slow_headers(trial: Trial, clients: Clients, found: Found) -> None:
    """A thousand connections that send half a header, or nothing, and stay."""
    closed: list[float] = []

    async def half(content: bytes) -> None:
        start = time.monotonic()
        try:
            reader, writer = await clients.connect()
            writer.write(content)
            await asyncio.wait_for(reader.read(), HEADER_TIMEOUT + 10)
            closed.append(time.monotonic() - start)
            writer.close()
        except asyncio.TimeoutError:
            # Caught before OSError, of which it is one.
            found.numbers["still open"] = found.numbers.get("still open", 0) + 1
            writer.close()
        except OSError:
            closed.append(time.monotonic() - start)

    contents = [b"POST /decide HTTP/1.1\r\nhost: x\r\nx-half", b""]
    await asyncio.gather(*(half(contents[number % 2]) for number in range(1000)))
    found.numbers["closed"] = len(closed)
    found.numbers["longest"] = round(max(closed, default=0.0), 2)
    found.expect(len(closed) == 1000, f"{1000 - len(closed)} connections stay open")


async def endless_header(trial: Trial, clients: Clients, found: Found) -> None:
    """Headers that never end, or are too many."""
    before = clients.service.cpu_seconds()
    status = b"GET /status HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "
    chunks = post_head("/decide", 0).replace(b"content-length: 0", b"transfer-encoding: chunked")
    trailer = chunks + b"1\r\na\r\n0\r\nx: "
    one = b"a" * 100_000
    many = b"a: b\r\n" * 10_000
    attacks = {
        "one": (status, one),
        "many": (status, many),
        "one behind a body": (trailer, one),
        "many behind a body": (trailer, many),
        "length of a chunk": (chunks + b"1;", one),
    }
    for name, (start, line) in attacks.items():
        sent = 0
        _, writer = await clients.connect()
        writer.write(start)
        try:
            while sent < 80_000_000:
                writer.write(line)
                sent += len(line)
                await writer.drain()
        except OSError:
            pass
        writer.close()
        found.numbers[f"{name}: bytes taken"] = sent
        found.expect(sent < 20_000_000, f"{name}: {sent} bytes of a header were taken")
    head = b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n" + b"a: b\r\n" * 500 + b"\r\n"
    refused = await clients.send(head)
    found.expect(refused.status == 431, f"500 headers: {refused.status}")
    seconds = clients.service.cpu_seconds() - before
    found.numbers["processor seconds"] = round(seconds, 2)
    found.expect(seconds < 3, f"headers cost {seconds:.1f} s of processor time")


async def requests_sent_ahead(trial: Trial, clients: Clients, found: Found) -> None:
    """Ten thousand requests on each of ten connections, without reading an answer."""
    image = png(40)
    content = (post_head("/decide", len(image)) + image) * 3 + (
        b"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 10_000
    )

    async def ahead() -> float:
        start = time.monotonic()
        reader, writer = await clients.connect()
        writer.write(content)
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(), 3 * TIMEOUT)
        writer.transport.abort()
        return time.monotonic() - start

    seconds = await asyncio.gather(*(ahead() for _ in range(10)))
    found.numbers["longest"] = round(max(seconds), 2)
    found.expect(max(seconds) < 2 * TIMEOUT + 3, f"connections stayed for {max(seconds):.1f} s")


async def clients_that_do_not_read(trial: Trial, clients: Clients, found: Found) -> None:
    """Answers of many megabytes that nobody reads."""
    row = np.zeros((512, *trial.backend.row_shape), "<f4").tobytes()
    tensor = {"name": "images", "shape": [512, *trial.backend.row_shape], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": len(row)}
    header = json.dumps({"inputs": [tensor]}).encode()
    length = f"inference-header-content-length: {len(header)}"
    body = header + row
    path = "/v2/models/guard/infer"
    content = post_head(path, len(body), "application/octet-stream", length) + body
    connections = []
    for _ in range(20):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", clients.service.port, limit=1024
        )
        writer.transport.pause_reading()
        writer.write(content)
        connections.append((reader, writer))
    await asyncio.sleep(2 * TIMEOUT)
    answer = await clients.post("/decide", png(40))
    found.expect(answer.status == 200, f"afterwards: {answer.status}")
    for _, writer in connections:
        writer.transport.abort()


async def silent_connections(trial: Trial, clients: Clients, found: Found) -> None:
    """All connections are used by bodies that stay unfinished; images are asked meanwhile."""
    half = post_head("/decide", 1000) + bytes(500)
    writers = []
    for _ in range(2 * CONNECTIONS):
        try:
            _, writer = await clients.connect()
        except OSError:
            continue
        writer.write(half)
        writers.append(writer)
    answers = [await clients.post("/decide", png(40)) for _ in range(10)]
    found.numbers["statuses"] = statuses(answers)
    found.expect(set(statuses(answers)) <= {200, 503}, f"answers: {statuses(answers)}")
    found.expect(200 in statuses(answers), "no image was decided")
    for writer in writers:
        writer.transport.abort()


async def pages_of_other_sites(trial: Trial, clients: Clients, found: Found) -> None:
    """What a browser sends for a page of another site, without asking its user."""
    before = (await clients.get("/status")).body["monitor"]["samples"]
    image = png(40)
    tries = {
        "text/plain": ("text/plain", ()),
        "a form": ("multipart/form-data; boundary=x", ("origin: http://elsewhere.example",)),
        "an image": ("image/png", ("origin: http://elsewhere.example",)),
        "a sandbox": ("image/png", ("origin: null",)),
        "a page by fetch": ("image/png", ("sec-fetch-site: cross-site",)),
    }
    for name, (kind, more) in tries.items():
        answer = await clients.post("/decide", image, kind, *more)
        found.expect(answer.status in (403, 415), f"{name}: {answer.status}")
    head = b"GET /status HTTP/1.1\r\nhost: rebound.example\r\nconnection: close\r\n\r\n"
    rebound = await clients.send(head)
    found.expect(rebound.status == 421, f"another host: {rebound.status}")
    after = (await clients.get("/status")).body["monitor"]["samples"]
    found.expect(after == before, f"{after - before} samples were counted")


def statuses(answers: list[Answer]) -> dict[int, int]:
    return dict(sorted(collections.Counter(answer.status for answer in answers).items()))


def longest(answers: list[Answer]) -> float:
    return round(max(answer.seconds for answer in answers), 2)


# ── rows with a service of their own


async def a_model_that_hangs(trial: Trial, _: Clients | None, found: Found) -> None:
    """The model stops in the middle of a batch: not ready, then not alive; it ends when told to."""
    folder = trial.folder / "hanging"
    guard = make_hanging_guard(folder)
    hang = folder / "hang"
    hang.unlink(missing_ok=True)
    service = Service(
        guard,
        "--model",
        "hanging:factory",
        "--trust-model",
        "--no-state",
        PYTHONPATH=path_of(folder),
    )
    try:
        clients = Clients(service)
        answer = await clients.post("/decide", png(8))
        found.expect(answer.status == 200, f"before: {answer.status} {answer.body}")
        hang.touch()
        start = time.monotonic()
        asked = await asyncio.gather(*(clients.post("/decide", png(8)) for _ in range(5)))
        found.numbers["statuses"] = statuses(asked)
        found.expect(set(statuses(asked)) <= {503, 504}, f"asked: {statuses(asked)}")
        found.expect(longest(asked) < TIMEOUT + 2, f"an answer took {longest(asked)} s")
        for name, path, limit in (
            ("not ready after", "/v2/health/ready", TIMEOUT + 3),
            ("not alive after", "/v2/health/live", 2 * TIMEOUT + 3),
        ):
            while (await clients.get(path)).status == 200:
                await asyncio.sleep(0.1)
                if time.monotonic() - start > limit:
                    found.faults.append(f"{path} is still 200 after {limit} s")
                    break
            found.numbers[name] = round(time.monotonic() - start, 1)
        await expect_end(service, TIMEOUT + 10, found)
    finally:
        service.end()


async def half_sent_bodies_at_the_end(trial: Trial, _: Clients | None, found: Found) -> None:
    """SIGTERM while bodies are half sent: nobody is told that the service made an error."""
    service = Service(trial.guard, "--no-state")
    try:
        clients = Clients(service)
        half = post_head("/decide", 3000) + bytes(1000)
        asked = [asyncio.ensure_future(clients.send(half)) for _ in range(20)]
        await asyncio.sleep(1)
        await expect_end(service, TIMEOUT + 3, found)
        answers = await asyncio.gather(*asked)
        found.numbers["statuses"] = statuses(answers)
        found.expect(set(statuses(answers)) <= {0, 408, 503}, f"answers: {statuses(answers)}")
    finally:
        service.end()


async def files_that_go(trial: Trial, _: Clients | None, found: Found) -> None:
    """While images are decided, the guard's file is damaged and loaded again, and the folders of
    records and state are removed."""
    folder = trial.folder / "files"
    folder.mkdir()
    guard = folder / "guard.safetensors"
    shutil.copy(trial.guard, guard)
    records = folder / "records"
    state = folder / "state"
    service = Service(guard, "--decisions", records, "--state", state)
    try:
        clients = Clients(service)
        answers = []

        async def decide(seconds: float) -> None:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                answers.append(await clients.post("/decide", png(40)))
                await asyncio.sleep(0.05)

        whole = guard.read_bytes()
        for content in (b"no guard", whole[: len(whole) // 2], whole):
            guard.write_bytes(content)
            service.process.send_signal(signal.SIGHUP)
            await decide(2.5)
        shutil.rmtree(state)
        shutil.rmtree(records)
        await decide(2.5)
        records.mkdir()
        before = len(answers)
        await decide(2.5)
        await asyncio.sleep(1.5)
        lines = 0
        for path in records.glob("*.jsonl"):
            lines += len(path.read_bytes().splitlines())
        log = service.text()
        await expect_end(service, TIMEOUT + 3, found)
    finally:
        service.end()
    found.numbers["statuses"] = statuses(answers)
    found.numbers["longest"] = longest(answers)
    found.numbers["records of the new folder"] = lines
    # One request may meet the guard that is just being replaced.
    found.expect(set(statuses(answers)) <= {200, 503}, f"answers: {statuses(answers)}")
    found.expect(statuses(answers).get(503, 0) <= 2, f"answers: {statuses(answers)}")
    found.expect(lines >= len(answers) - before, "decisions went into a file that was removed")
    found.expect(log.count("could not be loaded") == 2, "a damaged guard was not named")
    found.expect('"message": "loaded"' in log, "the whole guard was not loaded")
    found.expect("could not be recorded" in log, "lost records were not named")


async def expect_end(service: Service, limit: float, found: Found) -> None:
    """The service ends within so many seconds once it is told to."""
    start = time.monotonic()
    service.process.send_signal(signal.SIGTERM)
    while service.process.poll() is None and time.monotonic() - start < limit + 20:
        await asyncio.sleep(0.05)
    seconds = time.monotonic() - start
    found.numbers["seconds to the end"] = round(seconds, 1)
    found.expect(seconds < limit, f"SIGTERM took {seconds:.1f} s, expected less than {limit} s")


class Load:
    """Clients that behave, and clients that do not."""

    def __init__(self, clients: Clients, backend: TorchBackend, end: float) -> None:
        self.clients = clients
        self.end = end
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.images = []
        for seed in range(16):
            image = png(40, seed)
            answers = backend.decide(backend.prepare(image)[None])
            expected = (int(answers.labels[0]), float(answers.scores[0]), bool(answers.is_ood[0]))
            self.images.append((image, *expected))

    async def honest(self) -> None:
        """Sends images, and repeats each request until it is answered."""
        while time.monotonic() < self.end:
            image, label, score, is_ood = random.choice(self.images)
            answer = await self._answered(image)
            if answer is None:
                self.wrong.append("a request had no answer in 600 tries")
                return
            self.counts["answers"] += 1
            given = answer.body
            is_close = math.isclose(given["score"], score, rel_tol=1e-4, abs_tol=1e-6)
            if (given["label"], given["is_ood"]) != (label, is_ood) or not is_close:
                self.wrong.append(f"{given} instead of {label}, {score}, {is_ood}")

    async def _answered(self, image: bytes) -> Answer | None:
        for _ in range(600):
            answer = await self.clients.post("/decide", image)
            if answer.status == 200:
                return answer
            what = "broken connections" if not answer.status else f"status {answer.status}"
            self.counts[what] += 1
            await asyncio.sleep(0.1)
        return None

    async def slow(self) -> None:
        """Sends images two thousand bytes at a time."""
        while time.monotonic() < self.end:
            image = random.choice(self.images)[0]
            content = post_head("/decide", len(image)) + image
            try:
                reader, writer = await self.clients.connect()
                for start in range(0, len(content), 2000):
                    writer.write(content[start : start + 2000])
                    await writer.drain()
                    await asyncio.sleep(0.05)
                status, _ = await asyncio.wait_for(read_answer(reader), 60)
                self.counts[f"slowly sent: {status}"] += 1
                writer.close()
            except (OSError, EOFError, asyncio.TimeoutError):
                self.counts["broken connections"] += 1
                await asyncio.sleep(0.1)

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
                answer = await self.clients.post("/decide", body, kind)
                self.counts[f"broken: {answer.status}"] += 1
                if answer.status not in expected and answer.status not in (0, 503):
                    self.wrong.append(f"{name} was answered with {answer.status}")
                await asyncio.sleep(0.1)

    async def leaving(self) -> None:
        """Sends half a request or a whole one, and disconnects."""
        while time.monotonic() < self.end:
            image = random.choice(self.images)[0]
            try:
                _, writer = await self.clients.connect()
                writer.write(post_head("/decide", len(image)))
                writer.write(image[: random.choice([10, len(image)])])
                await writer.drain()
                await asyncio.sleep(random.random() * 0.02)
                writer.transport.abort()
                self.counts["left"] += 1
            except OSError:
                self.counts["broken connections"] += 1
            await asyncio.sleep(0.02)

    async def killing(self) -> None:
        """Kills a worker now and then."""
        while time.monotonic() + 10 < self.end:
            left = self.end - time.monotonic()
            await asyncio.sleep(min(KILL_SECONDS, max(1.0, left / 3)))
            os.kill(random.choice(self.clients.service.workers()), signal.SIGKILL)
            self.counts["kills"] += 1


async def load_with_kills(trial: Trial, _: Clients | None, found: Found, minutes: float) -> None:
    """Honest, slow, broken and leaving clients on two processes of which one is killed at times."""
    service = Service(trial.guard, "--workers", WORKERS, "--no-state")
    try:
        clients = Clients(service)
        load = Load(clients, trial.backend, time.monotonic() + 60 * minutes)
        memory: list[float] = []

        async def watch_memory() -> None:
            while time.monotonic() < load.end:
                memory.append(service.peak_memory())
                service.forget_peak()
                await asyncio.sleep(1)

        work = [load.honest() for _ in range(8)] + [load.slow() for _ in range(4)]
        await asyncio.gather(*work, load.broken(), load.leaving(), load.killing(), watch_memory())
        status = (await clients.post("/decide", load.images[0][0])).status
        log = service.text()
    finally:
        service.end()
    found.faults += load.wrong[:20]
    found.numbers.update(sorted(load.counts.items()))
    found.numbers["memory"] = round(max(memory))
    found.expect(load.counts["answers"] > 0, "no request was answered")
    found.expect(load.counts["kills"] > 0, "no worker was killed")
    found.expect(status == 200, f"after the load the service answers with {status}")
    found.expect("Traceback" not in log, f"a traceback is in the log: {log[-500:]}")
    found.expect(not any(name.endswith(" 500") for name in load.counts), "an answer was 500")
    found.expect(max(memory) < MEMORY, f"{max(memory):.0f} MB of {MEMORY}")
    settled = [value for value in memory[len(memory) // 3 :] if value]
    half = len(settled) // 2
    growth = max(settled[half:], default=0) / max(1, *settled[:half]) - 1
    found.numbers["growth"] = round(growth, 3)
    found.expect(growth < 0.1, f"memory grew by {growth:.0%} in the second half")


ROWS: tuple[Row, ...] = (
    large_images,
    images_made_to_be_slow,
    unfinished_bodies,
    small_chunks,
    forms_made_to_be_slow,
    no_http,
    large_json,
    slow_headers,
    endless_header,
    requests_sent_ahead,
    clients_that_do_not_read,
    silent_connections,
    pages_of_other_sites,
)
"""Rows that run one after the other on one service."""


def run_row(trial: Trial, service: Service, row: Row) -> Found:
    """One row on a service that answers, with its probes and its memory."""
    found = Found()
    clients = Clients(service)

    async def whole() -> None:
        ended = threading.Event()
        probing = threading.Thread(target=clients.probe, args=(ended,))
        probing.start()
        try:
            await row(trial, clients, found)
        finally:
            ended.set()
            await asyncio.to_thread(probing.join)
        answer = await clients.post("/decide", png(40))
        found.expect(answer.status == 200, f"afterwards an image is answered {answer.status}")

    service.forget_peak()
    asyncio.run(whole())
    memory = service.peak_memory()
    slowest = max(clients.probe_seconds, default=0.0)
    found.numbers["memory"] = round(memory)
    found.numbers["slowest probe"] = round(slowest, 2)
    found.expect(memory < MEMORY, f"{memory:.0f} MB of {MEMORY}")
    found.expect(slowest < PROBE_SECONDS, f"health or metrics took {slowest:.1f} s")
    found.expect(not clients.probe_failures, f"probes failed: {clients.probe_failures[:5]}")
    return found


def run_alone(trial: Trial, row: Callable[..., Awaitable[None]], *arguments: Any) -> Found:
    """One row that starts its own service."""
    found = Found()
    asyncio.run(row(trial, None, found, *arguments))
    return found


# ── guards


def make_guard(folder: Path) -> Path:
    """The zoo's model with a guard that was fitted on noise."""
    save_noise(folder, 32)
    return fit(folder, "cifar10-ce")


HANGING = """\
import os, time
import torch
from torch import nn

class Hanging(nn.Module):
    def __init__(self):
        super().__init__()
        pooled = nn.AdaptiveAvgPool2d(1)
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), pooled, nn.Flatten())
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        while os.path.exists({hang!r}):
            time.sleep(0.1)
        return self.fc(self.body(x))

def factory():
    torch.manual_seed(0)
    return Hanging().eval()
"""


def make_hanging_guard(folder: Path) -> Path:
    """A guard of a model that stops for as long as a file is there."""
    folder.mkdir()
    (folder / "hanging.py").write_text(HANGING.format(hang=str(folder / "hang")))
    save_noise(folder, 8)
    preprocess = json.dumps({"size": 8})
    return fit(folder, "hanging:factory", "--preprocess", preprocess, "--trust-model")


def save_noise(folder: Path, side: int) -> None:
    for name in ("fit", "calibration"):
        (folder / name).mkdir()
        for number in range(24):
            (folder / name / f"{number}.png").write_bytes(png(side, number + 100))


def fit(folder: Path, model: str, *more: str) -> Path:
    out = folder / "guard.safetensors"
    command = [sys.executable, "-m", "fdbd", "fit", model, str(folder / "fit"), *more]
    command += ["--calibration", str(folder / "calibration"), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": path_of(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return out


def path_of(folder: Path) -> str:
    """PYTHONPATH with a folder in front."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))


# ── the run


def trial_of(wanted: list[str], quick: bool, minutes: float) -> dict[str, Found]:
    """Run the rows and report what each found."""
    results: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        guard = make_guard(folder)
        torch.set_num_threads(1)
        trial = Trial(folder, guard, TorchBackend(open_guard(guard, device="cpu")), quick)
        together = [row for row in ROWS if row.__name__ in wanted]
        if together:
            service = Service(guard, "--no-state")
            try:
                for row in together:
                    results[row.__name__] = run_row(trial, service, row)
                    report(row.__name__, results[row.__name__])
            finally:
                service.end()
        for alone in (a_model_that_hangs, half_sent_bodies_at_the_end, files_that_go):
            if alone.__name__ in wanted:
                results[alone.__name__] = run_alone(trial, alone)
                report(alone.__name__, results[alone.__name__])
        if load_with_kills.__name__ in wanted:
            results[load_with_kills.__name__] = run_alone(trial, load_with_kills, minutes)
            report(load_with_kills.__name__, results[load_with_kills.__name__])
    return results


def report(name: str, found: Found) -> None:
    verdict = "failed" if found.faults else "passed"
    print(f"{verdict}: {name} {found.numbers} {found.faults or ''}", file=sys.stderr, flush=True)


ALONE = (a_model_that_hangs, half_sent_bodies_at_the_end, files_that_go, load_with_kills)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [row.__name__ for row in (*ROWS, *ALONE)]
    parser.add_argument("--rows", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="under three minutes")
    parser.add_argument("--minutes", type=float, help="of the load with kills")
    options = parser.parse_args()
    minutes = options.minutes or (0.4 if options.quick else 10.0)
    results = trial_of(options.rows, options.quick, minutes)
    failed = [name for name, found in results.items() if found.faults]
    summary = {
        "verdict": "failed" if failed else "passed",
        "memory_limit": MEMORY,
        "rows": {name: {"faults": f.faults, **f.numbers} for name, f in results.items()},
    }
    print(json.dumps(summary, indent=2))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
