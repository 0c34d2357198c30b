"""The `fdbd` program: commands are in `commands`, errors become one line here."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import typer

from fdbd.util.terminal import INTERRUPTED, answer_interrupts, printable

COMMANDS = (
    "bench",
    "compare",
    "fit",
    "score",
    "gallery",
    "explain",
    "export",
    "serve",
    "paper",
    "data",
    "cache",
    "train",
)
"""Modules of `fdbd.commands`, in the order of `fdbd --help`; each has a function of its own name."""
STOPPING = "fdbd: stopping; what is finished is kept, run the same command again to go on from there"

app = typer.Typer(
    name="fdbd",
    help="Out-of-distribution detection for any classifier with a linear head.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        from fdbd.util.version import __version__

        typer.echo(__version__)
        raise typer.Exit


for _name in COMMANDS:
    app.command(_name)(getattr(importlib.import_module(f".commands.{_name}", __package__), _name))


def main(arguments: list[str] | None = None) -> None:
    """Run the program. Bad input ends in one line on standard error and exit code 2; FDBD_DEBUG=1 shows where.

    Warnings are a line each, too.
    """
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        warnings.simplefilter("default", UserWarning)
        try:
            with answer_interrupts(STOPPING):
                code: Any = app(args=arguments, standalone_mode=False)
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Exception as error:
            if os.environ.get("FDBD_DEBUG"):
                raise
            code = _explain(error)
    sys.exit(code if isinstance(code, int) else 0)


def _explain(error: Exception) -> int:
    """One line for what went wrong; what cannot be the user's doing is raised."""
    show = getattr(error, "show", None)  # click's own usage errors know how to print themselves
    if show is not None:
        show(file=sys.stderr)
    elif isinstance(error, (ValueError, TypeError, OSError, RuntimeError, ImportError, LookupError)):
        _complain(str(error) or type(error).__name__)
    elif isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        _complain(f"there is not enough memory{why}: give a smaller --batch-size, fewer --workers or less data")
    elif type(error).__name__ == "Abort":
        _complain("aborted")
    else:
        raise error
    return 2


def _complain(message: str) -> None:
    typer.echo(f"fdbd: {printable(' '.join(message.split()))}", err=True)


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, UserWarning):  # others are for developers
        _complain(f"warning: {message}")
