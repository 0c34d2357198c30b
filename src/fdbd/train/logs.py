"""Where training says how it goes: a progress display, and a CSV or TensorBoard log."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fdbd.util.files import beside

Row = dict[str, float]
LOGS = ("csv", "tensorboard", "none")


class Log:
    """One row per epoch. The whole history is written each time, so a resumed run leaves no duplicate rows."""

    def __init__(self, kind: str, folder: Path | None) -> None:
        if kind not in LOGS:
            raise ValueError(f"log {kind!r} is none of {', '.join(LOGS)}")
        self.folder, self.kind = folder, kind if folder is not None else "none"
        self._writer: Any = None
        if self.kind == "tensorboard":
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError("TensorBoard logs need it: pip install tensorboard") from error
            self._writer = SummaryWriter(str(folder))

    def write(self, history: list[Row]) -> None:
        """Record a history whose last row is new."""
        if self.kind == "csv" and self.folder is not None:
            with beside(self.folder / "log.csv") as temporary, open(temporary, "w", newline="") as file:
                writer = csv.DictWriter(file, fieldnames=list(history[0]))
                writer.writeheader()
                writer.writerows(history)
        elif self._writer is not None:
            for key, value in history[-1].items():
                self._writer.add_scalar(key, value, int(history[-1]["epoch"]))
            self._writer.flush()


class Display(Progress):
    """A bar with loss, accuracy and time left on a terminal, and one line per epoch anywhere; or nothing."""

    def __init__(self, title: str, total: int, done: int, show: bool) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), disable=not show,
        )  # fmt: skip
        self.show = show
        self.bar = self.add_task(title, total=total, completed=done, state="")

    def epoch(self, row: Row) -> None:
        """At the end of an epoch."""
        if self.show:
            test = f"  test {row['test_accuracy']:.2%}" if "test_accuracy" in row else ""
            means = f"loss {row['loss']:.4f}  accuracy {row['accuracy']:.2%}{test}"
            self.console.print(f"epoch {int(row['epoch'])}  {means}  lr {row['lr']:.4f}  {row['seconds']:.0f} s")
