"""docs/paper.md from the results: ``python -m fdbd.paper.page [RESULTS] [PAGE]`` after ``fdbd paper all``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from fdbd.paper.experiment import find, list_experiments
from fdbd.paper.result import Record, Result, verdict_lines
from fdbd.paper.table import Table
from fdbd.util.files import beside, write_text

PAGE = Path("docs/paper.md")
RESULTS = Path("paper")

FOLDER = Path(__file__).parent


def summary(records: Sequence[Record]) -> str:
    """README.md of a folder of results: one line per experiment."""
    rows = [[_link(r), r["title"], r["verdict"], f"{r['seconds']:.0f} s"] for r in records]
    lines = ["# Results", "", Table("", ["experiment", "what", "verdict", "time"], rows).markdown()]
    missing = [f"- {record['name']}: {line}" for record in records for line in record["missing"]]
    return "\n".join([*lines, *(["Missing:", "", *missing, ""] if missing else [])])


def render(records: Sequence[Record], figures: str = "paper") -> str:
    """The page, as Markdown; figures are looked for in the folder `figures` beside it."""
    rows = [[f"[`{r['name']}`](#{r['name']})", r["place"], r["verdict"]] for r in records]
    parts = [_text("introduction"), "## Overview\n"]
    parts.append(Table("", ["experiment", "in the paper", "on our data"], rows).markdown())
    for record in records:
        parts.append(_section(record, figures))
    parts.append(_text("slips"))
    done = [record for record in records if record["checks"]]
    seconds, machine = sum(record["seconds"] for record in done), done[0]["machine"]
    parts.append(
        f"{len(done)} of {len(records)} experiments were run, in {seconds / 60:.1f} minutes, at the "
        f"scale {done[0]['scale']}, with fdbd {machine['fdbd']}, torch {machine['torch']} and "
        f"{machine['threads']} threads.\n"
    )
    return "\n".join(parts)


def _section(record: Record, figures: str) -> str:
    lines = [f"## {record['name']}", "", f"{record['title']} ({record['place']}); `fdbd paper {record['name']}`.", ""]
    lines += [f"**The paper says**: {record['claim']}", "", f"**On our data**: {record['verdict']}.", ""]
    first = [note for note in record["notes"] if note.startswith("Stand-in")]
    lines += [*(f"{note}  " for note in first), ""] if first else []
    lines += [*verdict_lines(record), ""]
    shown = record["tables"][: 2 if record["kind"] == "distance-quality" else 1]
    lines += [Table(**{**table, "title": ""}).markdown() for table in shown if len(table["rows"]) <= 24]
    if record["checks"]:
        lines += [f"![{record['title']}]({figures}/{record['name']}.svg)", ""]
    lines += [f"{note}  " for note in record["notes"] if note not in first]
    lines += [f"Missing: {line}  " for line in record["missing"]]
    return "\n".join(lines).rstrip() + "\n"


def _text(name: str) -> str:
    return (FOLDER / f"{name}.md").read_text(encoding="utf-8")


def _link(record: Record) -> str:
    return f"[{record['name']}]({record['name']}.md)" if record["checks"] else record["name"]


def read(results: Path) -> list[Record]:
    """The records of a folder, in the paper's order; an experiment without results has one that says so."""
    records = []
    for name in list_experiments():
        path = results / f"{name}.json"
        if path.is_file():
            records.append(json.loads(path.read_text(encoding="utf-8")))
        else:
            records.append(Result(missing=[f"no results; run: fdbd paper {name}"]).record(find(name), 0.0))
    if not any(record["checks"] for record in records):
        raise FileNotFoundError(f"{results} has no results; run: fdbd paper all --out {results}")
    return records


def main() -> None:
    """Write the page and the figures that it shows."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    page = Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE
    records = read(results)
    figures = page.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    for record in records:
        source = results / f"{record['name']}.svg"
        if record["checks"]:
            with beside(figures / source.name) as temporary:
                shutil.copyfile(source, temporary)
    write_text(page, render(records, figures.name))
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
