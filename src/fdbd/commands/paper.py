"""fdbd paper: the paper's tables, figures and statements."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fdbd.commands.options import DEVICE, JSON, answer, arg, note, opt, print_table

SCALES = (
    "small: features in the package; public: public networks and images; paper: its own networks "
    "and data."
)


def paper(
    name: str | None = arg(
        None, "An experiment, your own .toml file, or all; without a name, they are listed."
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
    from fdbd.paper import list_experiments, run_all

    names = list_experiments()
    if name is None:
        _list(names, scale, as_json)
        return
    chosen = names if name == "all" else [name]
    run_again = fresh or name != "all"
    records = run_all(chosen, out, scale, run_again, progress=not as_json, device=device)
    any_ran = any(record["checks"] for record in records)
    if as_json:
        shown = records if name == "all" else records[0]
        answer(shown, as_json)
    else:
        _print(records)
        if any_ran:
            Console(highlight=False).print(f"[dim]written in {out}[/dim]")
    for record in records:
        for line in record["missing"]:
            note(f"{record['name']}: {line}")
    if not any_ran:
        raise typer.Exit(2)


def _list(names: list[str], scale: str, as_json: bool) -> None:
    from fdbd.paper import find

    experiments = [find(name, scale) for name in names]
    if as_json:
        listed = []
        for each in experiments:
            listed.append(
                {
                    "name": each.name,
                    "kind": each.kind,
                    "title": each.title,
                    "place": each.place,
                    "claim": each.claim,
                }
            )
        answer(listed, as_json)
        return
    rows = [(each.name, each.title, each.place) for each in experiments]
    print_table(["experiment", "what", "in the paper"], rows)


def _print(records: list[dict[str, Any]]) -> None:
    """One line per experiment; for a single one also each statement."""
    console = Console(highlight=False)
    for record in records:
        took = f"({record['seconds']:.0f} s)"
        console.print(f"[bold]{record['name']}[/bold] {record['verdict']} {took}")
    if len(records) > 1:
        return
    for item in records[0]["checks"]:
        # No markup: statements may have brackets.
        console.print(f"  {item['verdict']}: {item['statement']}. {item['measured']}", markup=False)
