"""Options that several commands have, declared once, and how commands speak."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fdbd.util.terminal import printable


class Engine(str, Enum):
    """Where the work is done."""

    local = "local"
    ray = "ray"


GuardFile = Annotated[Path, typer.Argument(help="A guard's file, as fdbd fit writes it.", show_default=False)]
Model = Annotated[str | None, typer.Option(help="The model, where the guard's file does not name it or names code.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Where the model's weights are now.")]
TrustModel = Annotated[
    bool,
    typer.Option(
        "--trust-model",
        help="Run code that a file holds or names: a .pt2 file, or package.module:function in a guard or a config.",
    ),
]
Device = Annotated[str, typer.Option(help="Where the model runs: auto (a GPU where there is one), cpu, cuda:1, …")]
Autocast = Annotated[
    bool,
    typer.Option("--autocast", help="Run the network in bfloat16 where it can: faster on most GPUs, a little rounded."),
]
BatchSize = Annotated[int, typer.Option(help="Images that the model sees at once.")]
Workers = Annotated[
    int | None,
    typer.Option(help="Processes that decode images (with ray: tasks at once); default: by the machine."),
]
EngineName = Annotated[Engine, typer.Option("--engine", help="local, or ray for a cluster.")]
Address = Annotated[str | None, typer.Option(help="Ray's address; default: Ray on this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def say(line: str, err: bool = False) -> None:
    """Print one line; control characters in names of files and classes are escaped."""
    typer.echo(printable(line), err=err)


def note(line: str) -> None:
    """Print one line on standard error."""
    say(f"fdbd: {line}", err=True)
