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
from collections.abc import Sequence
from pathlib import Path

from fdbd.paper.experiment import find, list_experiments
from fdbd.paper.result import SIGNS, Record, Result, Table
from fdbd.util.files import beside, data_roots, write_text

_DEFAULTS = Path("paper"), Path("paper-public"), Path("docs/paper.md")
_MODEL = re.compile(r" \(([^()]*)\)$")  # the model that a statement is about stands at its end


def render(small: Sequence[Record], public: Sequence[Record], figures: str = "paper") -> str:
    """The page, as Markdown; figures are looked for in the folder `figures` beside it."""
    rows = [
        [f"[`{a['name']}`](#{a['name']})", a["place"], _verdict(a), _verdict(b)]
        for a, b in zip(small, public)
    ]
    introduction, slips = (
        Path(__file__).with_suffix("").joinpath(f"{name}.md").read_text(encoding="utf-8")
        for name in ("introduction", "slips")
    )
    overview = Table("", ["experiment", "in the paper", "small", "public"], rows).markdown()
    sections = (_section(a, b, figures) for a, b in zip(small, public))
    runs = (_about_run(records) for records in (small, public))
    return "\n".join([introduction, "## Overview\n", overview, *sections, slips, *runs])


def _verdict(record: Record) -> str:
    """The verdict on an experiment; what has no network here was not tested."""
    if not record["checks"] and any(line.startswith("not tested") for line in record["missing"]):
        return "not tested"
    return str(record["verdict"])


def _about_run(records: Sequence[Record]) -> str:
    done = [record for record in records if record["checks"]]
    if not done:
        return ""
    seconds, machine = sum(record["seconds"] for record in done), done[0]["machine"]
    return (
        f"Scale {done[0]['scale']}: {len(done)} of {len(records)} experiments were run, in {seconds / 60:.1f} minutes, "
        f"with fdbd {machine['fdbd']}, torch {machine['torch']} and {machine['threads']} threads.\n"
    )


def _section(small: Record, public: Record, figures: str) -> str:
    shown = public if public["checks"] else small
    lines = [
        f"## {small['name']}",
        "",
        f"{small['title']} ({small['place']}); `fdbd paper {small['name']}`.",
        "",
    ]
    lines += [f"**The paper says**: {small['claim']}", ""]
    lines += [f"**Small**: {_verdict(small)}. **Public**: {_verdict(public)}.", ""]
    notes = [(record["scale"], note) for record in (small, public) for note in record["notes"]]
    first = [pair for pair in notes if pair[1].startswith("Stand-in")]
    lines += [*(f"{note} ({scale})  " for scale, note in first), ""] if first else []
    lines += [_statements(small, public)]
    chosen = shown["tables"][: 2 if shown["kind"] == "distance-quality" else 1]
    lines += [
        Table(**{**table, "title": ""}).markdown() for table in chosen if len(table["rows"]) <= 90
    ]
    if shown["checks"]:
        lines += [f"![{shown['title']}]({figures}/{shown['name']}.svg)", ""]
    lines += [
        f"{note}  "
        for note in dict.fromkeys(note for pair in notes if pair not in first for note in pair[1:])
    ]
    for record in (small, public):
        lines += [f"Missing at the scale {record['scale']}: {line}  " for line in record["missing"]]
    return "\n".join(lines).rstrip() + "\n"


def _statements(*records: Record) -> str:
    """One row per statement: the verdict on each model, the scales side by side."""
    cells: dict[str, dict[str, list[str]]] = {}
    for record in records:
        for item in record["checks"]:
            found = _MODEL.search(item["statement"])
            statement = item["statement"][: found.start()] if found else item["statement"]
            cell = cells.setdefault(statement, {}).setdefault(record["scale"], [])
            cell.append(
                f"{SIGNS[item['verdict']]} {f'{found[1]}: ' if found else ''}{item['measured']}"
            )
    scales = ("small", "public")
    rows = [
        [text, *("<br>".join(part.get(scale, ["not tested"])) for scale in scales)]
        for text, part in cells.items()
    ]
    return Table("", ["statement", *scales], rows).markdown() if rows else ""


def read(results: Path, scale: str = "small") -> list[Record]:
    """The records of a folder, in the paper's order; an experiment without results has one that
    says so."""
    records = []
    for name in list_experiments():
        path, experiment = results / f"{name}.json", find(name, scale)
        if path.is_file():
            records.append(json.loads(path.read_text(encoding="utf-8")))
            continue
        command = f"fdbd paper {name}" + ("" if scale == "small" else f" --scale {scale}")
        untested = experiment.settings.get("untested")
        why = f"not tested: {untested}" if untested else f"no results; run: {command}"
        records.append(Result(experiment, missing=[why]).record())
    return records


def main() -> None:
    """Write the page and the figures that it shows."""
    given = [Path(argument) for argument in sys.argv[1:]]
    small, public, page = (*given, *_DEFAULTS[len(given) :])
    records = read(small), read(public, "public")
    if not any(record["checks"] for part in records for record in part):
        raise FileNotFoundError(
            f"{small} and {public} have no results; run: fdbd paper all --out {small}"
        )
    figures = page.with_suffix("")
    figures.mkdir(parents=True, exist_ok=True)
    for folder, part in zip(
        (small, public), records
    ):  # public figures take the place of small ones
        for record in part:
            source = folder / f"{record['name']}.svg"
            if record["checks"] and source.is_file():
                with beside(figures / source.name) as temporary:
                    shutil.copyfile(source, temporary)
    text = render(*records, figures.name)
    for root in data_roots():  # the reader's folder is another one
        text = text.replace(f"{root}/", "FDBD_DATA/")
    write_text(page, text)
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
