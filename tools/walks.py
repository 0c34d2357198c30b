"""Which modules an operation passes through: an image to its row, a batch to its score, a config
to its report.

`python tools/walks.py` runs the three and prints the modules in the order of the first call. A
module counts if one of its functions runs, from the command line on; `fdbd.util` and the layers of
the network are left out.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any


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
    """`fdbd score GUARD IMAGES`, from the command line to the Parquet file."""
    import numpy as np
    import torch
    from PIL import Image

    import fdbd
    from fdbd.cli import main as fdbd_program
    from fdbd.networks.by_name import model_by_name

    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)
    images = folder / "images"
    images.mkdir()
    for index, image in enumerate(pixels):
        Image.fromarray(image).save(images / f"{index}.png")
    named = model_by_name("cifar10-ce")
    assert named.preprocess is not None
    inputs = torch.rand(200, 3, 32, 32)
    guard = fdbd.Guard(named.model).fit([inputs[:100]]).calibrate([inputs[100:]])
    guard.about = {"model": named.origin, "preprocess": named.preprocess.to_dict()}
    file = folder / "guard.safetensors"
    guard.save(file)
    with watched() as found, suppress(SystemExit):
        fdbd_program(["score", str(file), str(images), "--out", str(folder / "scores.parquet")])
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
    """`fdbd bench config.toml`, from the command line to report.html: two folders of images, two
    detectors."""
    import numpy as np
    from PIL import Image

    from fdbd.cli import main as fdbd_program

    pixels = np.random.default_rng(0).integers(0, 256, (160, 32, 32, 3), dtype=np.uint8)
    for index, image in enumerate(pixels):
        kind = "ood" if index >= 120 else "id"
        place = folder / kind / f"class{index % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{index}.png")
    config = folder / "bench.toml"
    config.write_text(
        f'model = "cifar10-ce"\nid = "{folder / "id"}"\nood = ["{folder / "ood"}"]\n',
        encoding="utf-8",
    )
    out = folder / "report"
    with watched() as found, suppress(SystemExit):
        fdbd_program(["bench", str(config), "--detectors", "fdbd,msp", "--out", str(out)])
    return found


WALKS: dict[str, Callable[[Path], list[str]]] = {
    "An image to its row": image_to_row,
    "A batch to its score": lambda _: batch_to_score(),
    "A config to its report": config_to_report,
}


def line(title: str, found: list[str]) -> str:
    """One walk as a line of text."""
    names = ", ".join(name.removeprefix("fdbd.") for name in found)
    return f"{title}: {len(found)} modules\n  {names}"


def main() -> None:
    for title, walk in WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            print(line(title, walk(Path(folder))))


if __name__ == "__main__":
    main()
