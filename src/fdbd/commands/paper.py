"""fdbd paper: the paper's tables, figures and statements."""

from pathlib import Path

import typer
from rich.console import Console

from fdbd.commands.options import DEVICE, JSON, answer, arg, note, opt, print_table

SCALES = "small: features in the package; public: public networks and images; paper: its own networks and data."


def paper(
    name: str | None = arg(
        None, "An experiment, your own .toml file, or all; left out, they are listed."
    ),
    out: Path = opt(Path("paper"), "Folder for tables and figures."),
    scale: str = opt("small", SCALES),
    fresh: bool = opt(False, "With all: run finished experiments again, too.", "--fresh"),
    device: str = DEVICE,
    as_json: bool = JSON,
) -> None:
    """List the experiments of the fDBD paper, or run them: a table, a figure, and whether the claim
    holds here.

    Examples: `fdbd paper`, `fdbd paper table-regularization`, `fdbd paper all --out results`
    """
    from fdbd.paper import find, list_experiments, run_all

    names = list_experiments()
    if name is None:
        found = [find(each, scale) for each in names]
        if as_json:
            keys = ("name", "kind", "title", "place", "claim")
            answer([{key: getattr(each, key) for key in keys} for each in found], as_json)
        else:
            print_table(
                ["experiment", "what", "in the paper"],
                [(each.name, each.title, each.place) for each in found],
            )
        return
    chosen = names if name == "all" else [name]
    records = run_all(
        chosen, out, scale, fresh or name != "all", progress=not as_json, device=device
    )
    if as_json:
        answer(records if name == "all" else records[0], as_json)
    else:
        console = Console(highlight=False)
        for record in records:
            console.print(
                f"[bold]{record['name']}[/bold] {record['verdict']} ({record['seconds']:.0f} s)"
            )
            for item in record["checks"] if len(records) == 1 else []:
                console.print(
                    f"  {item['verdict']}: {item['statement']}. {item['measured']}", markup=False
                )
        if any(record["checks"] for record in records):
            console.print(f"[dim]written in {out}[/dim]")
    for record in records:
        for line in record["missing"]:
            note(f"{record['name']}: {line}")
    if not any(record["checks"] for record in records):
        raise typer.Exit(2)
