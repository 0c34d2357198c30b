"""fdbd cache: list, verify and clear cached features."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer


class Action(str, Enum):
    """What to do with the cache."""

    list = "list"
    verify = "verify"
    clear = "clear"


def cache(
    action: Annotated[Action, typer.Argument(help="list, verify or clear.")] = Action.list,
    keys: Annotated[list[str] | None, typer.Argument(help="Only these entries, for clear.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look after cached features: one forward pass a model, dataset and preprocessing.

    Examples: `fdbd cache`, `fdbd cache verify`, `fdbd cache clear`
    """
    from fdbd.bench.cache import FeatureCache

    store = FeatureCache()
    if action is Action.clear:
        freed = store.clear(keys or None)
        typer.echo(json.dumps({"freed_bytes": freed}) if as_json else f"freed {freed / 1e6:.1f} MB")
        return
    if action is Action.verify:
        problems = store.verify()
        if as_json:
            typer.echo(json.dumps([problem._asdict() for problem in problems]))
        else:
            lines = [f"{p.key}: shard {p.shard}: {p.reason}; it is computed anew when next asked for" for p in problems]
            typer.echo("\n".join(lines) if lines else "every shard is as it was written")
        if problems:
            raise typer.Exit(1)
        return
    entries = store.list()
    if as_json:
        typer.echo(
            json.dumps([{**vars(entry), "path": str(entry.path), "complete": entry.is_complete} for entry in entries])
        )
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("key", "model", "dataset", "rows", "dtype", "MB", "created", title=str(store.root))
    for entry in entries:
        rows = f"{entry.rows_done:,}" + ("" if entry.is_complete else f" of {entry.rows:,}")
        size = f"{entry.num_bytes / 1e6:.1f}"
        table.add_row(entry.key, entry.model, entry.dataset, rows, entry.dtype, size, entry.created)
    Console().print(table)
