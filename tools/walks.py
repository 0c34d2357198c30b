"""Which modules a piece of work crosses: an image on its way to its row, a batch to its score, a config to its report.

`python tools/walks.py` prints the walks, as CONTRIBUTING.md shows them. A module counts when one of its functions runs
while the work is done: an image's walk begins with the guard and the list of files open. `util` and the network's own
architecture are left out.
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


@contextmanager
def watched() -> Iterator[list[str]]:
    """Modules of fdbd whose functions run inside the block, in the order of their first call, threads included."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        is_body = frame.f_code.co_name == "<module>" or not frame.f_code.co_flags & 0x2
        is_ours = name.startswith("fdbd.") and not name.startswith(("fdbd.util", "fdbd.networks.architectures"))
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
    """What `fdbd score` does with a folder of images once the guard and the folder are open, to the Parquet file."""
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
    guard.about = {"model": named.origin, "preprocess": named.preprocess.to_dict() if named.preprocess else None}
    guard.save(folder / "guard.safetensors")
    opened = open_guard(folder / "guard.safetensors")
    rows = open_rows(str(folder / "images"))
    output = Output(folder / "scores.parquet", rows.names)
    with watched() as found:  # decoded by threads of this process, where they can be watched
        scoring._write_parts(
            output, {}, rows, lambda todo: scoring.image_tables(opened, rows, todo, 16, 1, processes=False), False
        )
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        walks: dict[str, Callable[[], list[str]]] = {
            "an image to its row": lambda: image_to_row(Path(folder)),
            "a batch to its score": batch_to_score,
        }
        for title, walk in walks.items():
            found = walk()
            print(f"{title}: {len(found)} modules")
            print("  " + ", ".join(name.removeprefix("fdbd.") for name in found))


if __name__ == "__main__":
    main()
