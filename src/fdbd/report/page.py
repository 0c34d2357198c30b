"""The page: template, style, script and data put together into one string that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from fdbd.report.payload import payload, table
from fdbd.results.rows import convention, machine
from fdbd.results.table import ResultTable
from fdbd.results.text import facts, verdict
from fdbd.util.extras import require

SCRIPTS = ("chart.js", "table.js", "histograms.js", "roc.js", "deviation.js", "samples.js", "latency.js", "main.js")


def html(results: ResultTable) -> str:
    """The report of a benchmark as one self-contained HTML page; `Results.to_html` writes it to a file."""
    papers = list(dict.fromkeys(row.paper for row in results.ranked() if row.paper is not None))
    made = machine()
    threads = f"{made['threads']} thread{'s' if made['threads'] != 1 else ''}"
    return render(
        "page.html",
        '"use strict";\n(() => {\n' + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n",
        payload(results),
        images="; img-src data:",
        setting=results.setting,
        title=results.setting.title or "Out-of-distribution detection, compared",
        facts=facts(results),
        verdict=verdict(results),
        convention=convention(results.setting.positive),
        table=table(results),
        failures=results.failures,
        any_finished=bool(results.finished),
        papers=papers,
        machine=f"fdbd {made['fdbd']}, torch {made['torch']}, Python {made['python']}, {made['processor']}, {threads}",
    )


def render(template: str, script: str, data: Any, images: str = "", **values: Any) -> str:
    """One self-contained page from a template with its style, script and data.

    Names of datasets, detectors and files are text wherever they stand: the template escapes all that it is given. The
    page's content security policy allows no script but its own, and no request but for pictures where `images` says so.
    """
    jinja2 = require("jinja2", "report")
    raw = require("markupsafe", "report").Markup
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    only = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'"
    page: str = environment.get_template(template).render(
        policy=f"{only}{images}; script-src 'sha256-{digest}'",
        style=raw(asset("style.css")),
        script=raw(script),
        data=raw(script_json(data)),
        **values,
    )
    return page


def script_json(value: Any) -> str:
    """JSON that no text in it can end early: it stands inside a <script> element, whose content is not unescaped."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    """The text of a file of the page."""
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
