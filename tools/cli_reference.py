"""docs/cli.md, the reference of the command line, from the commands themselves: `python
tools/cli_reference.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, get_args, get_type_hints

from typer.models import ArgumentInfo

from fdbd import cli

INTRODUCTION = """\
# Command line

Written from the commands themselves; `fdbd COMMAND --help` says the same. Bad input ends in one line on standard error
and exit code 2; with `FDBD_DEBUG=1` in the environment the traceback is shown.
"""


class Parameter(NamedTuple):
    """One argument or option of a command."""

    name: str
    kind: Any
    """Its type, such as `Path | None`."""
    info: Any
    """What the command says about it: typer's ArgumentInfo or OptionInfo."""

    @property
    def default(self) -> Any:
        """``...`` if it must be given."""
        return self.info.default

    @property
    def is_argument(self) -> bool:
        return isinstance(self.info, ArgumentInfo)

    @property
    def is_required(self) -> bool:
        return self.default is ...

    @property
    def usage(self) -> str:
        if not self.is_argument:
            name = self.name.replace("_", "-")
            both = f"--{name} / --no-{name}" if self.default is True else f"--{name}"
            return ", ".join(self.info.param_decls or ()) or both
        name = (self.info.metavar or self.name).upper()
        if "list" in str(self.kind):
            name += "..."
        return name if self.is_required else f"[{name}]"

    @property
    def meaning(self) -> str:
        text = " ".join((self.info.help or "").split())
        for kind in (self.kind, *get_args(self.kind)):
            if isinstance(kind, type) and issubclass(kind, Enum):
                text += f" One of {', '.join(f'`{choice.value}`' for choice in kind)}."
        return text

    @property
    def row(self) -> str:
        cells = [f"`{self.usage}`", self.meaning, self._shown_default()]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        return f"| {' | '.join(escaped)} |"

    def _shown_default(self) -> str:
        """Empty for an option that is off, or not there, by default."""
        value = getattr(self.default, "value", self.default)
        if self.is_required:
            return "required"
        if value in (None, False, ()):
            return ""
        return f"`{value}`"


def parameters(command: Callable[..., object]) -> list[Parameter]:
    """What a command takes, in its order."""
    hints = get_type_hints(command)
    return [
        Parameter(name, hints[name], each.default)
        for name, each in inspect.signature(command).parameters.items()
    ]


def render() -> str:
    """The page, as Markdown: a section per command, in the order of `fdbd --help`."""
    return "\n".join([INTRODUCTION, *map(_section, cli.COMMANDS)])


def _section(command: Callable[..., object]) -> str:
    found = parameters(command)
    arguments = [parameter for parameter in found if parameter.is_argument]
    options = [parameter for parameter in found if not parameter.is_argument]
    usage = " ".join(["fdbd", command.__name__, *(argument.usage for argument in arguments)])
    if options:
        usage += " [OPTIONS]"
    parts = [
        f"## fdbd {command.__name__}\n",
        f"```text\n{usage}\n```\n",
        inspect.cleandoc(command.__doc__ or "") + "\n",
    ]
    for title, rows in (("argument", arguments), ("option", options)):
        if rows:
            parts += [
                f"| {title} | meaning | default |",
                "|---|---|---|",
                *(parameter.row for parameter in rows),
                "",
            ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(render())
