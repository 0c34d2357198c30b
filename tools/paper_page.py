"""docs/paper.md from the results, the scales side by side: ``python tools/paper_page.py [SMALL]
[PUBLIC] [PAGE]``.

SMALL and PUBLIC are the folders that ``fdbd paper all --out SMALL`` and ``fdbd paper all --scale
public --out PUBLIC`` wrote.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fdbd.paper.experiment import find, list_experiments
from fdbd.paper.finding import SIGNS, Finding, Record, TextTable
from fdbd.util.files import beside, data_roots, write_text

_DEFAULTS = (Path("paper"), Path("paper-public"), Path("docs/paper.md"))
"""The arguments of the command, if they are not given."""
_MODEL = re.compile(r" \(([^()]*)\)$")
"""The model that a statement is about, in brackets at its end."""
_MOST_ROWS = 90
"""Rows of a table on the page; longer tables are in the files of the results."""


def render(small: Sequence[Record], public: Sequence[Record], figures: str = "paper") -> str:
    """The page, as Markdown; figures are looked for in the folder `figures` beside it."""
    parts = [_fragment("introduction"), _overview(small, public)]
    for of_small, of_public in zip(small, public):
        parts.append(_section(of_small, of_public, figures))
    parts += [_fragment("slips"), _about_run(small), _about_run(public)]
    return "\n".join(parts)


def _fragment(name: str) -> str:
    folder = Path(__file__).with_suffix("")
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def _overview(small: Sequence[Record], public: Sequence[Record]) -> str:
    rows = []
    for of_small, of_public in zip(small, public):
        name = of_small["name"]
        link = f"[`{name}`](#{name})"
        rows.append([link, of_small["place"], _verdict(of_small), _verdict(of_public)])
    table = TextTable("", ["experiment", "in the paper", "small", "public"], rows).markdown()
    counts = [_count(records) for records in (small, public) if _any_ran(records)]
    return "\n".join(["## Overview\n", *counts, "", table])


def _any_ran(records: Sequence[Record]) -> bool:
    return any(record["checks"] for record in records)


def _count(records: Sequence[Record]) -> str:
    """How many of the paper's statements hold, and how many could not be tested."""
    verdicts: Counter[str] = Counter()
    own_questions = 0
    for record in records:
        for item in record["checks"]:
            if item["ours"]:
                own_questions += 1
            else:
                verdicts[item["verdict"]] += 1
    words = ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in SIGNS if verdicts[verdict])
    return (
        f"Statements of the paper at the scale {records[0]['scale']}, each model counted: {words}. "
        f"Apart from them, {own_questions} questions of our own.  "
    )


def _verdict(record: Record) -> str:
    """The verdict on an experiment; what has no network here was not tested."""
    if not record["checks"] and any(line.startswith("not tested") for line in record["missing"]):
        return "not tested"
    return str(record["verdict"])


def _about_run(records: Sequence[Record]) -> str:
    done = [record for record in records if record["checks"]]
    if not done:
        return ""
    minutes = sum(record["seconds"] for record in done) / 60
    machine = done[0]["machine"]
    return (
        f"Scale {done[0]['scale']}: {len(done)} of {len(records)} experiments were run, in "
        f"{minutes:.1f} minutes, with fdbd {machine['fdbd']}, torch {machine['torch']} and "
        f"{machine['threads']} threads.\n"
    )


def _section(small: Record, public: Record, figures: str) -> str:
    shown = public if public["checks"] else small
    name = small["name"]
    stand_ins, notes = _notes(small, public)
    lines = [f"## {name}", ""]
    lines += [f"{small['title']} ({small['place']}); `fdbd paper {name}`.", ""]
    lines += [f"**The paper says**: {small['claim']}", ""]
    if small["question"]:
        lines += [f"**Our question**: {small['question']}", ""]
    lines += [f"**Small**: {_verdict(small)}. **Public**: {_verdict(public)}.", ""]
    if stand_ins:
        lines += [*stand_ins, ""]
    lines += [_statements(small, public), *_tables(shown)]
    if shown["checks"]:
        lines += [f"![{shown['title']}]({figures}/{name}.svg)", ""]
    lines += [f"{note}  " for note in notes]
    for record in (small, public):
        for line in record["missing"]:
            lines.append(f"Missing at the scale {record['scale']}: {line}  ")
    return "\n".join(lines).rstrip() + "\n"


def _notes(small: Record, public: Record) -> tuple[list[str], list[str]]:
    """What stands in for what, with its scale, and all other notes, each once."""
    stand_ins: list[str] = []
    notes: list[str] = []
    for record in (small, public):
        for note in record["notes"]:
            if note.startswith("Stand-in"):
                stand_ins.append(f"{note} ({record['scale']})  ")
            elif note not in notes:
                notes.append(note)
    return stand_ins, notes


def _tables(record: Record) -> list[str]:
    """The tables that the page shows: the first, and the second if it says something else. A table
    of the ranks of one more model does not."""
    count = 1 if record["kind"] == "distances" else 2
    shown = []
    for table in record["tables"][:count]:
        if len(table["rows"]) > _MOST_ROWS:
            continue
        is_first = table is record["tables"][0]
        title = "" if is_first else table["title"]
        shown.append(TextTable(**{**table, "title": title}).markdown())
    return shown


def _statements(*records: Record) -> str:
    """One row per statement: the verdict on each model, the scales side by side."""
    cells: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for item in record["checks"]:
            statement, model = _without_model(item["statement"])
            if item["ours"]:
                statement += " *(our question)*"
            about = f"{model}: " if model else ""
            text = f"{SIGNS[item['verdict']]} {about}{item['measured']}"
            cells.setdefault(statement, {}).setdefault(record["scale"], []).append(text)
    if not cells:
        return ""
    rows = []
    for statement, by_scale in cells.items():
        row = [statement]
        for scale in ("small", "public"):
            row.append("<br>".join(by_scale.get(scale, ["not tested"])))
        rows.append(row)
    return TextTable("", ["statement", "small", "public"], rows).markdown()


def _without_model(statement: str) -> tuple[str, str]:
    """The statement without the model that it ends with, and that model or ""."""
    found = _MODEL.search(statement)
    if found is None:
        return statement, ""
    return statement[: found.start()], found[1]


def read(results: Path, scale: str = "small") -> list[Record]:
    """The records of a folder, in the paper's order; an experiment without results has one that
    says so."""
    records = []
    for name in list_experiments():
        path = results / f"{name}.json"
        if path.is_file():
            records.append(json.loads(path.read_text(encoding="utf-8")))
            continue
        experiment = find(name, scale)
        untested = getattr(experiment.settings, "untested", "")
        command = f"fdbd paper {name}"
        if scale != "small":
            command += f" --scale {scale}"
        why = f"not tested: {untested}" if untested else f"no results; run: {command}"
        records.append(Finding(experiment, missing=[why]).record())
    return records


def main() -> None:
    """Write the page and the figures that it shows."""
    given = [Path(argument) for argument in sys.argv[1:]]
    arguments = [*given, *_DEFAULTS[len(given) :]]
    small_folder, public_folder, page = arguments
    small = read(small_folder)
    public = read(public_folder, "public")
    if not _any_ran(small) and not _any_ran(public):
        raise FileNotFoundError(
            f"{small_folder} and {public_folder} have no results; run: "
            f"fdbd paper all --out {small_folder}"
        )
    figures = page.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    _copy_figures(small_folder, small, figures)
    # A public figure takes the place of the small one.
    _copy_figures(public_folder, public, figures)
    text = render(small, public, figures.name)
    # The data are in another folder on the reader's machine.
    for root in data_roots():
        text = text.replace(f"{root}/", "FDBD_DATA/")
    write_text(page, text)
    print(f"wrote {page}")


def _copy_figures(results: Path, records: Sequence[Record], figures: Path) -> None:
    for record in records:
        source = results / f"{record['name']}.svg"
        if record["checks"] and source.is_file():
            with beside(figures / source.name) as temporary:
                shutil.copyfile(source, temporary)


if __name__ == "__main__":
    main()
