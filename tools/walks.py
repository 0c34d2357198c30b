"""Which modules an operation passes through: from an image to its row, a batch to its score, a
config to its report.

`python tools/walks.py` prints the walks, as CONTRIBUTING.md shows them. A module counts if one of
its functions runs during the operation. The walk of an image begins after the guard and the list of
files are open and the model's head is checked, which happens only for the first batch. `util` and
the network's architecture are left out.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any


class InThisThread:
    """In place of a cluster: parts are decided here, where they can be watched."""

    def run(self, guard: Any, work: Callable[[Any], Any], pieces: Any) -> Iterator[Any]:
        for piece in pieces:
            yield piece, work(piece)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Modules of fdbd whose functions run inside the block, in the order of their first call,
    threads included."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        is_body = frame.f_code.co_name == "<module>" or not frame.f_code.co_flags & 0x2
        is_ours = name.startswith("fdbd.") and not name.startswith(
            ("fdbd.util", "fdbd.networks.architectures")
        )
        if event == "call" and is_ours and not is_body and name not in found:
            found.append(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def image_to_row(folder: Path) -> list[str]:
    """What `fdbd score` does with a folder of images once the guard and the folder are open, to the
    Parquet file."""
    import numpy as np
    import torch
    from PIL import Image

    import fdbd
    from fdbd.data.inputs import open_rows
    from fdbd.decision.guard_file import open_guard
    from fdbd.jobs import scoring
    from fdbd.jobs.output import Output
    from fdbd.networks.by_name import model_by_name

    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    (folder / "images").mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "images" / f"{index}.png")
    named = model_by_name("cifar10-ce")
    inputs = torch.rand(200, 3, 32, 32)
    guard = fdbd.Guard(named.model).fit([inputs[:100]]).calibrate([inputs[100:]])
    guard.about = {
        "model": named.origin,
        "preprocess": named.preprocess.to_dict() if named.preprocess else None,
    }
    guard.save(folder / "guard.safetensors")
    opened = open_guard(folder / "guard.safetensors")
    rows = open_rows(str(folder / "images"))
    output = Output(folder / "scores.parquet", rows.names)
    opened.guard(inputs[:1])
    with watched() as found:
        engine = scoring.Engine(batch_size=16, progress=False)
        scoring.Scoring(opened, rows, engine).write(output, InThisThread())  # type: ignore[arg-type]
    return found


def batch_to_score() -> list[str]:
    """`guard.decide(batch)`."""
    import torch

    import fdbd

    rows = torch.randn(200, 6)
    guard = fdbd.Guard(fdbd.Head(torch.randn(4, 6), torch.zeros(4)))
    guard.fit([fdbd.Batch(rows)]).calibrate([fdbd.Batch(rows + 1)])
    with watched() as found:
        guard.decide(fdbd.Batch(rows))
    return found


def config_to_report(folder: Path) -> list[str]:
    """What `fdbd bench config.toml` does, from the config to report.html: two folders of images,
    two detectors."""
    import numpy as np
    from PIL import Image

    from fdbd.bench import Config, benchmark_of
    from fdbd.bench.cache import FeatureCache
    from fdbd.bench.config import detectors_from
    from fdbd.kernels.threads import survive_forks

    survive_forks()  # once per process, whichever walk is first
    pixels = np.random.default_rng(0).integers(0, 256, (160, 32, 32, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        place = folder / ("ood" if index >= 120 else "id") / f"class{index % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{index}.png")
    path = folder / "bench.toml"
    path.write_text(
        f'model = "cifar10-ce"\nid = "{folder / "id"}"\nood = ["{folder / "ood"}"]\n',
        encoding="utf-8",
    )
    with watched() as found:
        config = Config.from_file(path)
        chosen = detectors_from(["fdbd", "msp"])
        benchmark = benchmark_of(config, FeatureCache(folder / "cache"), lambda _: None)
        benchmark.run(chosen, latency=False).to_html(folder / "report.html")
    return found


WALKS: dict[str, Callable[[Path], list[str]]] = {
    "An image to its row": image_to_row,
    "A batch to its score": lambda _: batch_to_score(),
    "A config to its report": config_to_report,
}


def line(title: str, found: list[str]) -> str:
    """One walk as CONTRIBUTING.md shows it."""
    names = ", ".join(f"`{name.removeprefix('fdbd.')}`" for name in found)
    return f"- **{title}**, {len(found)} modules: {names}"


def main() -> None:
    for title, walk in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            print(line(title, walk(Path(folder))))


if __name__ == "__main__":
    main()
