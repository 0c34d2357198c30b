"""Fuzzing what reads bytes from strangers: `make fuzz`, or

    python tests/fuzz/fuzz.py TARGET --seconds 60      new inputs, from the seeds and the corpus
    python tests/fuzz/fuzz.py TARGET FILE ...          these inputs, one after the other

With atheris installed, inputs are chosen by the coverage that they reach; without it, by random
changes. An input that a target does not answer within `SECONDS`, or for which it takes more than
`MEMORY` beyond what the process had at the start, or that raises anything but a ValueError or an
OSError of one line, is written to the folder `findings`, and the exit code is 1. A finding goes
into `corpus/TARGET/` with its repair, and is tried by the tests from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from targets import TARGETS, Target

SECONDS = 20
MEMORY = 1_500_000_000
CORPUS = Path(__file__).with_name("corpus")
EXTREMES = (
    b"0", b"-1", b"1e999", b"NaN", b"10" * 200, b"9223372036854775808", b"4294967295",
    b"true", b"null", b'""', b"[]", b"{}", b"[" * 2000, b'"\\u0000"', b"1.5",
)  # fmt: skip


class Finding(Exception):
    """A promise that did not hold."""


def check(target: Target, data: bytes) -> None:
    """Finding: the input is answered by anything but a result or a clear error."""

    def too_late(number: int, frame: object) -> None:
        raise Finding(f"no answer within {SECONDS} seconds")

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(SECONDS)
    try:
        target.read(data)
    except (ValueError, OSError) as error:
        message = str(error).strip()
        if not message:
            raise Finding(f"{type(error).__name__} without a message") from error
        if "\n" in message or len(message) > 2000:
            raise Finding(f"not one line of a message: {message[:300]!r}") from error
    except MemoryError as error:
        raise Finding(f"more than {MEMORY:,} bytes") from error
    except Finding:
        raise
    except BaseException as error:
        raise Finding(traceback.format_exc()) from error
    finally:
        signal.alarm(0)


def limit_memory() -> None:
    """From here on this process may take `MEMORY` more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY)
    )


def changed(data: bytes, generator: random.Random) -> bytes:
    """The input with a few random changes."""
    found = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        place = generator.randrange(len(found) + 1)
        kind = generator.choice(["flip", "cut", "delete", "repeat", "extreme", "number"])
        if kind == "flip" and found:
            found[min(place, len(found) - 1)] ^= 1 << generator.randrange(8)
        elif kind == "cut":
            del found[place:]
        elif kind == "delete":
            del found[place : place + generator.randint(1, 20)]
        elif kind == "repeat":
            found[place:place] = found[place : place + generator.randint(1, 200)]
        elif kind == "extreme":
            found[place:place] = generator.choice(EXTREMES)
        else:
            _replace_a_number(found, place, generator)
    return bytes(found)


def _replace_a_number(data: bytearray, place: int, generator: random.Random) -> None:
    """Puts an extreme value where the next number stands."""
    digits = b"0123456789.-+eE"
    while place < len(data) and data[place] not in digits:
        place += 1
    end = place
    while end < len(data) and data[end] in digits:
        end += 1
    data[place:end] = generator.choice(EXTREMES)


def seeds_of(name: str) -> list[bytes]:
    kept = sorted((CORPUS / name).glob("*"))
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]


def fuzz_randomly(name: str, seconds: float, report: Callable[[bytes, Finding], None]) -> int:
    """Random changes of seeds; the number of inputs tried."""
    generator = random.Random()
    seeds = seeds_of(name)
    limit_memory()
    last = Path("findings") / name / "last"
    last.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    tried = 0
    while time.monotonic() < end:
        data = changed(generator.choice(seeds), generator)
        tried += 1
        # A library may end the process: then this file is the finding.
        last.write_bytes(data)
        try:
            check(TARGETS[name], data)
        except Finding as finding:
            report(data, finding)
    last.unlink()
    return tried


def fuzz_by_coverage(name: str, seconds: int, atheris: Any) -> None:
    """atheris's own loop, which ends the process."""
    folder = Path("findings") / name / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds_of(name):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    limit_memory()
    arguments = [
        sys.argv[0], str(folder), f"-max_total_time={seconds}", f"-artifact_prefix={folder.parent}/",
        "-rss_limit_mb=0", f"-timeout={SECONDS + 5}",
    ]  # fmt: skip
    atheris.Setup(arguments, atheris.instrument_func(lambda data: check(TARGETS[name], data)))
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--random", action="store_true", help="random changes, also with atheris")
    options = parser.parse_args()
    failures = 0

    def report(data: bytes, finding: Finding) -> None:
        nonlocal failures
        failures += 1
        folder = Path("findings") / options.target
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        print(f"{path}: {finding}", file=sys.stderr)

    if options.files:
        inputs = [path.read_bytes() for path in options.files]
        # What a first call imports and makes is not the input's.
        TARGETS[options.target].seeds()
        limit_memory()
        for data in inputs:
            try:
                check(TARGETS[options.target], data)
            except Finding as finding:
                report(data, finding)
        tried = len(inputs)
    else:
        try:
            import atheris
        except ImportError:
            atheris = None
        if atheris is not None and not options.random:
            fuzz_by_coverage(options.target, options.seconds, atheris)
        tried = fuzz_randomly(options.target, options.seconds, report)
    print(f"{options.target}: {tried} inputs, {failures} findings")
    sys.exit(int(failures > 0))


if __name__ == "__main__":
    main()
