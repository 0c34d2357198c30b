"""fdbd data and fdbd cache: datasets, and features that were computed from them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from fdbd.commands.options import JSON, answer, arg, opt, print_table

if TYPE_CHECKING:
    from fdbd.bench.cache import FeatureCache

Action = Enum("Action", {"list": "list", "verify": "verify", "clear": "clear"}, type=str)


def data(
    name: str | None = arg(
        None, "A dataset, or public:NETWORK for its weights; without a name, all are listed."
    ),
    split: str = opt("test", "train or test."),
    verify: bool = opt(False, "Compare what is here with the known SHA-256 sums.", "--verify"),
    as_json: bool = JSON,
) -> None:
    """List datasets, or fetch one, or the weights of a public network, into the cache.

    Examples: `fdbd data`, `fdbd data cifar10`, `fdbd data mnist --verify`, `fdbd data
    public:resnet50`
    """
    if name is None:
        _list(as_json)
    elif name.startswith("public:"):
        _fetch_network(name, as_json)
    elif verify:
        _verify(name, split, as_json)
    else:
        _fetch(name, split, as_json)


def _fetch_network(name: str, as_json: bool) -> None:
    from fdbd.networks.public import public_network

    network = public_network(name.removeprefix("public:"))
    # This fetches its weights and compares them with their SHA-256.
    network.build()
    found = {
        "name": name,
        "file": network.file,
        "sha256": network.sha256,
        "source": network.source,
    }
    answer(found, as_json, f"{name}: {network.file} from {network.source}")


def _verify(name: str, split: str, as_json: bool) -> None:
    from fdbd.data import datasets

    problems = datasets.verify(name, split)
    lines = problems or [f"{name} {split}: as it should be"]
    answer({"name": name, "split": split, "problems": problems}, as_json, *lines)
    if problems:
        raise typer.Exit(1)


def _fetch(name: str, split: str, as_json: bool) -> None:
    from fdbd.data import datasets
    from fdbd.util.progress import Bar

    with Bar(f"fetching {name}") as bar:

        def progress(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done)

        images = datasets.load(name, split, progress=progress)
    found = {
        "name": images.name,
        "split": split,
        "images": len(images),
        "source": images.source,
    }
    line = f"{images.name} {split}: {len(images):,} images from {images.source}"
    answer(found, as_json, line)


def _list(as_json: bool) -> None:
    from fdbd.data.datasets import list_datasets, status

    rows: list[dict[str, Any]] = []
    for entry in list_datasets():
        here = None
        # A pattern such as cifar10-c:CORRUPTION:SEVERITY stands for sets that are generated.
        if ":" not in entry.name:
            first_split = next(iter(entry.counts), "test")
            here = status(entry.name, first_split)
        rows.append(
            {
                "name": entry.name,
                "images": sum(entry.counts.values()) or None,
                "classes": entry.num_classes,
                "size": entry.image_size,
                "megabytes": entry.megabytes,
                "here": here,
                "licence": entry.licence,
                "home": entry.home,
                "how": entry.how,
            }
        )
    if as_json:
        answer(rows, as_json)
        return
    columns = ("name", "images", "classes", "size", "megabytes")
    lines = []
    for row in rows:
        cells = []
        for key in columns:
            is_known = row[key] is not None
            cells.append(str(row[key]) if is_known else "")
        here = "yes" if row["here"] else ""
        lines.append([*cells, here])
    print_table([*columns[:-1], "MB", "here"], lines)
    # Below the table, since no column is wide enough.
    for row in rows:
        Console().print(
            Text.assemble((row["name"], "bold"), f": {row['licence']}; {row['how']}"),
            overflow="fold",
        )


def cache(
    action: Action = arg(Action.list, "list, verify or clear.", show_default=True),
    keys: list[str] | None = arg(None, "Only these entries, for clear."),
    as_json: bool = JSON,
) -> None:
    """List, verify or clear cached features, of which there is one set for each model, dataset and
    preprocessing.

    Examples: `fdbd cache`, `fdbd cache verify`, `fdbd cache clear`
    """
    from fdbd.bench.cache import FeatureCache

    store = FeatureCache()
    if action is Action.clear:
        freed = store.clear(keys or None)
        answer({"freed_bytes": freed}, as_json, f"freed {freed / 1e6:.1f} MB")
    elif action is Action.verify:
        _verify_cache(store, as_json)
    else:
        _list_cache(store, as_json)


def _verify_cache(store: FeatureCache, as_json: bool) -> None:
    """Check what is cached. Exit code 1: something is damaged."""
    damaged = store.verify()
    lines = []
    for shard in damaged:
        lines.append(
            f"{shard.key}: shard {shard.shard}: {shard.reason}; it is computed again when it is "
            "next needed"
        )
    if not damaged:
        lines.append("every shard is as it was written")
    answer([shard._asdict() for shard in damaged], as_json, *lines)
    if damaged:
        raise typer.Exit(1)


def _list_cache(store: FeatureCache, as_json: bool) -> None:
    """Print what is cached."""
    entries = store.list()
    found = []
    for entry in entries:
        found.append({**entry._asdict(), "path": str(entry.path), "complete": entry.is_complete})
    total = sum(entry.num_bytes for entry in entries)
    lines = [f"{store.root}: {len(entries)} sets of features, {total / 1e6:.1f} MB"]
    # `fdbd cache clear` takes a key as it is printed, so each has a line of its own.
    for entry in entries:
        rows = f"{entry.rows_done:,}"
        if not entry.is_complete:
            rows += f" of {entry.rows:,}"
        lines += [entry.key, f"  {entry.model} on {entry.dataset}"]
        lines.append(
            f"  {rows} rows, {entry.dtype}, {entry.num_bytes / 1e6:.1f} MB, {entry.created}"
        )
    answer(found, as_json, *lines)
