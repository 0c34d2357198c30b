"""The page: template, style, script and data put together into one string that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from fdbd.bench.results import Results, convention, machine
from fdbd.report.headline import facts, verdict
from fdbd.report.payload import payload
from fdbd.report.table import metric_choices, table

SCRIPTS = ("chart.js", "table.js", "histograms.js", "roc.js", "deviation.js", "samples.js", "latency.js", "main.js")


def html(results: Results) -> str:
    """The report of a benchmark as one self-contained HTML page; `Results.to_html` writes it to a file.

    Names of datasets and detectors are text wherever they stand. The page's content security policy allows no request
    and no script but its own.
    """
    papers, references = _papers(results)
    script = '"use strict";\n(() => {\n' + "\n".join(_asset(name) for name in SCRIPTS) + "\n})();\n"
    style = _asset("style.css")
    title = results.setting.title or "Out-of-distribution detection, compared"
    return Template(_asset("page.html")).substitute(
        policy=_policy(script),
        style=style,
        script=script,
        data=_json(payload(results)),
        title=escape(title),
        facts="".join(
            f"<div><dt>{escape(what)}</dt><dd>{escape(number)}<small>{escape(remark)}</small></dd></div>"
            for what, number, remark in facts(results)
        ),
        verdict="".join(f"<p>{sentence}</p>" for sentence in verdict(results)),
        convention=escape(convention(results.setting.positive)),
        metrics=metric_choices(results),
        table=table(results, references),
        failures=_failures(results),
        papers="".join(f'<li id="paper-{number}">{escape(text)}</li>' for number, text in enumerate(papers, 1)),
        notes="".join(f"<li>{escape(note)}</li>" for note in results.setting.notes),
        machine=escape(_machine()),
    )


def _papers(results: Results) -> tuple[list[str], dict[str, int]]:
    """Each paper once, in the table's order, and its number for each detector."""
    papers: list[str] = []
    references: dict[str, int] = {}
    for row in results.ranked():
        if row.paper is not None:
            text = str(row.paper)
            if text not in papers:
                papers.append(text)
            references[row.name] = papers.index(text) + 1
    return papers, references


def _failures(results: Results) -> str:
    if not results.failures:
        return ""
    items = "".join(f"<li><b>{escape(row.name)}</b> {escape(str(row.error))}</li>" for row in results.failures)
    shown = "" if results.finished else " open"
    summary = f"<summary>{len(results.failures)} could not run</summary>"
    return f'<details class="failures"{shown}>{summary}<ul>{items}</ul></details>'


def _machine() -> str:
    found = machine()
    return (
        f"fdbd {found['fdbd']}, torch {found['torch']}, Python {found['python']}, {found['processor']}, "
        f"{found['threads']} thread{'s' if found['threads'] != 1 else ''}"
    )


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and only this very script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    only = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"
    return f"{only}; script-src 'sha256-{digest}'"


def _json(value: Any) -> str:
    """JSON that no text in it can end early: it stands inside a <script> element, whose content is not unescaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
