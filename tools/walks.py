"""Which modules a piece of work crosses: an image on its way to its row, a batch to its score, a config to its report.

`python tools/walks.py` prints the walks, as CONTRIBUTING.md shows them. A module counts when one of its functions runs
while the work is done. An image's walk begins where it is decoded: the command line, the guard's file and the list of
files come before. `util` and the network's own architecture are left out.
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
def watched(start: str | None = None) -> Iterator[list[str]]:
    """Modules of fdbd whose functions run inside the block, in the order of their first call, threads included; from
    the first call of the function `start` on."""
    found: list[str] = []
    has_begun = start is None

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal has_begun
        name = frame.f_globals.get("__name__", "")
        has_begun = has_begun or f"{name}.{frame.f_code.co_name}" == start
        is_body = frame.f_code.co_name == "<module>" or not frame.f_code.co_flags & 0x2  # class bodies have no new locals
        is_ours = name.startswith("fdbd.") and not name.startswith(("fdbd.util", "fdbd.networks.architectures"))
        if event == "call" and has_begun and is_ours and not is_body and name not in found:
            found.append(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def image_to_row(folder: Path) -> list[str]:
    """`fdbd score` on a folder of images, from the open guard to the Parquet file."""
    import numpy as np
    import torch
    from PIL import Image

    import fdbd
    from fdbd import cli
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
    arguments = ["score", str(folder / "guard.safetensors"), str(folder / "images"), "--out", str(folder / "s.parquet")]
    with watched("fdbd.data.images.decode") as found, _quiet():
        cli.main(arguments)
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


@contextmanager
def _quiet() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise


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
