"""The `fdbd` program: commands are in `commands`, errors become one line here."""

import os
import signal
import sys
import warnings
from typing import Any

import typer

from fdbd.commands import options
from fdbd.commands.bench import bench
from fdbd.commands.calibrate import calibrate
from fdbd.commands.choose import choose
from fdbd.commands.compare import compare
from fdbd.commands.data import cache, data
from fdbd.commands.demo import demo
from fdbd.commands.doctor import doctor
from fdbd.commands.explain import explain
from fdbd.commands.export import export
from fdbd.commands.fit import fit
from fdbd.commands.inspect import inspect
from fdbd.commands.options import note
from fdbd.commands.paper import paper
from fdbd.commands.safety import checked
from fdbd.commands.sample import sample
from fdbd.commands.score import gallery, score
from fdbd.commands.serve import serve
from fdbd.commands.stress import stress
from fdbd.commands.train import train
from fdbd.util.terminal import INTERRUPTED, answer_interrupts, one_line
from fdbd.util.version import __version__

COMMANDS = (
    demo,
    bench,
    compare,
    choose,
    fit,
    score,
    gallery,
    sample,
    calibrate,
    inspect,
    explain,
    stress,
    export,
    serve,
    paper,
    data,
    cache,
    train,
    doctor,
)
"""In the order of `fdbd --help`."""
FIRST_STEPS = """fdbd: out-of-distribution detection for any classifier with a linear head

  fdbd demo
      open a page with a guarded model that you can throw pictures at
  fdbd bench
      compare all detectors on data in the package
  fdbd fit timm:resnet50 ./train --calibration ./fresh --alpha 0.05
      fit a guard and set its threshold: one file, guard.safetensors
  fdbd score guard.safetensors ./inbox
      decide on images or features: one row per file, scores.parquet

fdbd --help lists all commands, fdbd COMMAND --help explains one, and
fdbd doctor checks the installation. fdbd --install-completion makes Tab
complete commands and options."""
STOPPING = (
    "fdbd: stopping; finished parts are kept, and the same command continues from them (fit starts "
    "over)"
)

app = typer.Typer(
    name="fdbd",
    cls=options.Program,
    help="Out-of-distribution detection for any classifier with a linear head.",
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS)
        raise typer.Exit


for _command in COMMANDS:
    app.command(_command.__name__, cls=options.Command)(checked(_command))


def main(arguments: list[str] | None = None) -> None:
    """Run the program. Bad input and warnings are a line each on standard error, the former with
    exit code 2; FDBD_DEBUG=1 shows where."""
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
    if arguments is None:
        # The work is done: Ctrl-C ends the rest without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A command that ends well returns nothing.
    exit_code = code if isinstance(code, int) else 0
    sys.exit(exit_code)


def _explain(error: Exception) -> int:
    """One line for what went wrong; what cannot be the user's doing is raised."""
    show = getattr(error, "show", None)
    if show is not None:
        # Click's own usage errors know how to print themselves.
        show(file=sys.stderr)
    elif isinstance(
        error, (ValueError, TypeError, OSError, RuntimeError, ImportError, LookupError)
    ):
        note(one_line(error))
    elif isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        note(
            f"there is not enough memory{why}: give a smaller --batch-size, fewer --workers or "
            "less data"
        )
    elif type(error).__name__ == "Abort":
        note("aborted")
    else:
        raise error
    return 2


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    # Warnings of other kinds are for developers.
    if issubclass(category, UserWarning):
        note(f"warning: {' '.join(str(message).split())}")
