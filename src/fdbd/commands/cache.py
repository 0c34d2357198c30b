"""fdbd cache: list, verify and clear cached features."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from fdbd.commands import options


class Action(str, Enum):
    """What to do with the cache."""

    list = "list"
    verify = "verify"
    clear = "clear"


def cache(
    action: Annotated[Action, typer.Argument(help="list, verify or clear.")] = Action.list,
    keys: Annotated[list[str] | None, typer.Argument(help="Only these entries, for clear.")] = None,
    as_json: options.Json = False,
) -> None:
    """Look after cached features: one forward pass for each model, dataset and preprocessing.

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
            for p in problems:
                options.say(f"{p.key}: shard {p.shard}: {p.reason}; it is computed anew when next asked for")
            if not problems:
                options.say("every shard is as it was written")
        if problems:
            raise typer.Exit(1)
        return
    entries = store.list()
    if as_json:
        typer.echo(
            json.dumps([{**vars(entry), "path": str(entry.path), "complete": entry.is_complete} for entry in entries])
        )
        return
    options.say(f"{store.root}: {len(entries)} sets of features, {sum(e.num_bytes for e in entries) / 1e6:.1f} MB")
    for entry in entries:  # a key is given to clear as it stands, so it has a line of its own
        rows = f"{entry.rows_done:,}" + ("" if entry.is_complete else f" of {entry.rows:,}")
        options.say(entry.key)
        options.say(f"  {entry.model} on {entry.dataset}")
        options.say(f"  {rows} rows, {entry.dtype}, {entry.num_bytes / 1e6:.1f} MB, {entry.created}")
