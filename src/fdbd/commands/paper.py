"""fdbd paper: the paper's tables, figures and statements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fdbd.commands.options import Device, Json


def paper(
    name: Annotated[
        str | None, typer.Argument(help="An experiment, your own .toml file, or all; left out, they are listed.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for tables and figures.")] = Path("paper"),
    scale: Annotated[
        str,
        typer.Option(
            help="small: features in the package; public: public networks and images; paper: its own networks and data."
        ),
    ] = "small",
    fresh: Annotated[bool, typer.Option("--fresh", help="With all: run what is finished, too.")] = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """List the experiments of the fDBD paper, or run them: a table, a figure, and whether the claim holds here.

    Examples: `fdbd paper`, `fdbd paper table-regularization`, `fdbd paper all --out results`
    """
    from fdbd.paper import find, list_experiments, run_all

    names = list_experiments()
    if name is None:
        _list([find(each, scale) for each in names], as_json)
        return
    chosen = names if name == "all" else [name]
    records = run_all(chosen, out, scale, fresh or name != "all", progress=not as_json, device=device)
    if as_json:
        typer.echo(json.dumps(records if name == "all" else records[0]))
    else:
        _show(records, out)
    for record in records:
        for line in record["missing"]:
            typer.echo(f"fdbd: {record['name']}: {line}", err=True)
    if not any(record["checks"] for record in records):
        raise typer.Exit(2)


def _list(experiments: list[Any], as_json: bool) -> None:
    if as_json:
        keys = ("name", "kind", "title", "place", "claim")
        typer.echo(json.dumps([{key: getattr(each, key) for key in keys} for each in experiments]))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "what", "in the paper")
    for each in experiments:
        table.add_row(each.name, each.title, each.place)
    Console().print(table)


def _show(records: list[dict[str, Any]], out: Path) -> None:
    from rich.console import Console

    console = Console()
    for record in records:
        console.print(f"[bold]{record['name']}[/bold] {record['verdict']} ({record['seconds']:.0f} s)", highlight=False)
        for item in record["checks"] if len(records) == 1 else []:
            console.print(
                f"  {item['verdict']}: {item['statement']}. {item['measured']}", highlight=False, markup=False
            )
    if any(record["checks"] for record in records):
        console.print(f"[dim]written in {out}[/dim]", highlight=False)
