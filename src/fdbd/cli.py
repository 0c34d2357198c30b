"""The `fdbd` program: commands are in `commands`, errors become one line here."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer

COMMANDS = ("bench", "fit", "score", "explain", "export", "paper", "data", "cache", "train")
"""Modules of `fdbd.commands`, in the order of `fdbd --help`; each has a function of its own name."""

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
    """Run the program. Bad input ends in one line on standard error and exit code 2; FDBD_DEBUG=1 shows where."""
    try:
        code: Any = app(args=arguments, standalone_mode=False)
    except KeyboardInterrupt:
        _complain("interrupted; what was finished is kept, run the same command again to go on")
        code = 130
    except Exception as error:
        if os.environ.get("FDBD_DEBUG"):
            raise
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
            raise
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> None:
    typer.echo(f"fdbd: {' '.join(message.split())}", err=True)
