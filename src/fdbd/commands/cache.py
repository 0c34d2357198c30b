"""fdbd cache: list, verify and clear cached features."""

from __future__ import annotations

from enum import Enum

import typer

from fdbd.commands.options import JSON, answer, arg

Action = Enum("Action", {"list": "list", "verify": "verify", "clear": "clear"}, type=str)


def cache(
    action: Action = arg(Action.list, "list, verify or clear.", show_default=True),
    keys: list[str] | None = arg(None, "Only these entries, for clear."),
    as_json: bool = JSON,
) -> None:
    """Look after cached features: one forward pass for each model, dataset and preprocessing.

    Examples: `fdbd cache`, `fdbd cache verify`, `fdbd cache clear`
    """
    from fdbd.bench.cache import FeatureCache

    store = FeatureCache()
    if action is Action.clear:
        freed = store.clear(keys or None)
        answer({"freed_bytes": freed}, as_json, f"freed {freed / 1e6:.1f} MB")
        return
    if action is Action.verify:
        problems = store.verify()
        lines = [f"{p.key}: shard {p.shard}: {p.reason}; it is computed anew when next asked for" for p in problems]
        answer([p._asdict() for p in problems], as_json, *(lines or ["every shard is as it was written"]))
        if problems:
            raise typer.Exit(1)
        return
    entries = store.list()
    found = [{**entry._asdict(), "path": str(entry.path), "complete": entry.is_complete} for entry in entries]
    lines = [f"{store.root}: {len(entries)} sets of features, {sum(e.num_bytes for e in entries) / 1e6:.1f} MB"]
    for entry in entries:  # a key is given to clear as it stands, so it has a line of its own
        rows = f"{entry.rows_done:,}" + ("" if entry.is_complete else f" of {entry.rows:,}")
        lines += [entry.key, f"  {entry.model} on {entry.dataset}"]
        lines.append(f"  {rows} rows, {entry.dtype}, {entry.num_bytes / 1e6:.1f} MB, {entry.created}")
    answer(found, as_json, *lines)
