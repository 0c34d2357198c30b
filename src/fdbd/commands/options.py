"""Options that several commands have, declared once, and how commands speak."""

import json
from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from fdbd.util.terminal import printable

Engine = Enum("Engine", {"local": "local", "ray": "ray"}, type=str)


class Command(TyperCommand):
    """A command whose help shows no type for --help, which takes no value."""

    def get_help_option(self, ctx: Any) -> Any:
        """The option --help of click."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


class Program(TyperGroup):
    """The program, whose help shows no type for options that take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of the program itself."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


def opt(default: Any, text: str, *names: str, **limits: Any) -> Any:
    """An option with this default and help; with names and a default of True or False, a flag."""
    if isinstance(default, bool):
        # Without it, the help would show the type of a flag, which takes no value.
        limits.setdefault("metavar", "")
    return typer.Option(default, *names, help=text, **limits)


def arg(default: Any, text: str, show_default: bool = False, **names: Any) -> Any:
    """An argument with this default (``...``: none) and help."""
    return typer.Argument(default, help=text, show_default=show_default, **names)


GUARD = arg(..., "A guard's file, as fdbd fit writes it.")
MODEL = opt(
    None, "The model. Needed only if the guard's file names none, or names one that runs code."
)
CHECKPOINT = opt(None, "The file of the model's weights, if it is not where the fit found it.")
_TRUST = (
    "Let code run: that of a .pt2 file, or package.module:function in a config. A function that a"
    " guard names as its model is trusted by naming it again, with --model."
)
TRUST_MODEL = opt(False, _TRUST, "--trust-model")
DEVICE = opt("auto", "Where the model runs: auto (a GPU if there is one), cpu, cuda:1, …")
_AUTOCAST = "Run the network in bfloat16 if it can: faster on most GPUs, slightly rounded."
AUTOCAST = opt(False, _AUTOCAST, "--autocast")
BATCH_SIZE = opt(128, "Images per batch.")
WORKERS = opt(
    None,
    "Processes that decode images (with --engine ray: tasks at once); default: by the machine.",
)
ENGINE = opt(Engine.local, "local, or ray for a cluster.", "--engine")
ADDRESS = opt(None, "With --engine ray: the cluster's address; default: Ray on this machine.")
JSON = opt(False, "Print JSON.", "--json")


def say(line: str, err: bool = False) -> None:
    """Print one line; control characters in names of files and classes are escaped."""
    typer.echo(printable(line), err=err)


def note(line: str) -> None:
    """Print one line on standard error."""
    say(f"fdbd: {line}", err=True)


def answer(found: Any, as_json: bool, *lines: str) -> None:
    """Print what was found: as JSON, or in these lines."""
    if as_json:
        typer.echo(json.dumps(found))
        return
    for line in lines:
        typer.echo(printable(line))


def names(text: str) -> list[str]:
    """The names in a text that separates them by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def print_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Collection[str] = (),
    title: str | None = None,
    caption: str | None = None,
) -> None:
    """A table on the terminal, the columns named in `right` aligned there; texts are printed as
    they are."""
    table = Table(title_justify="left", caption_justify="left")
    if title is not None:
        table.title = Text(printable(title))
    if caption is not None:
        table.caption = Text(printable(caption))
    for name in titles:
        is_number = name in right
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
