"""The documentation site: every page is reachable, every public name is described, every tutorial
can be run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fdbd import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted(path for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index")
WITHOUT_A_PICTURE = {"boxes", "deploy"}
GENERATED = {"cli"}
"""Pages that the build writes."""
MODULES = {
    name: name
    for name in ("fdbd", "fdbd.metrics", "fdbd.bench", "fdbd.export.onnx", "fdbd.jobs.ray")
}
MODULES |= {"fdbd.networks": "fdbd.networks"}
"""Documented modules, and where their public names are listed."""


def pages() -> set[str]:
    """Pages of the site by name, such as tutorials/guard."""
    found = list(DOCS.glob("api/*.rst"))
    for folder in (".", "production", "tutorials"):
        found += (DOCS / folder).glob("*.md")
    return {str(path.relative_to(DOCS).with_suffix("")) for path in found} | GENERATED


def reached_from(page: str) -> set[str]:
    """Pages that the toctrees of a page lead to, directly or further on."""
    found: set[str] = set()
    for name in _toctree_names(page):
        target = os.path.normpath(os.path.join(os.path.dirname(page), name))
        found.add(target)
        found |= reached_from(target)
    return found


def _toctree_names(page: str) -> list[str]:
    """The entries of a page's toctrees; none of a page that the build writes."""
    text = ""
    for path in (DOCS / f"{page}.md", DOCS / f"{page}.rst"):
        if path.exists():
            text = path.read_text(encoding="utf-8")
    in_markdown = re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL)
    in_rst = re.findall(r"\.\. toctree::\n((?:\s+.*\n|\n)*)", text)
    lines = [line.strip() for line in "\n".join(in_markdown + in_rst).splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def documented() -> set[str]:
    """Full names in the tables of the reference."""
    found = set()
    for path in (DOCS / "api").glob("*.rst"):
        module = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.removeprefix(".. currentmodule:: ")
            elif re.fullmatch(r"   [A-Za-z_]\w*", line) and module:
                found.add(f"{module}.{line.strip()}")
    return found


def test_every_page_is_in_a_table_of_contents() -> None:
    assert pages() - {"index"} == reached_from("index")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    imported = importlib.import_module(module)
    known = documented()
    missing = []
    for name in importlib.import_module(MODULES[module]).__all__:
        full_name = f"{module}.{name}"
        if name in ("Benchmark", "Results"):
            full_name = f"fdbd.bench.{name}"
        if callable(getattr(imported, name)) and full_name not in known:
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("name", sorted(documented()))
def test_every_name_in_the_reference_exists_and_says_what_it_is(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    assert (thing.__doc__ or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("name", sorted(documented()))
def test_every_name_in_the_reference_has_an_example_that_is_run(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    thing = getattr(importlib.import_module(module), attribute)
    texts = [thing.__doc__]
    if inspect.isclass(thing):
        for member in vars(thing).values():
            # The function behind a class method, a static method or a decorator.
            function = inspect.unwrap(getattr(member, "__func__", member))
            texts.append(function.__doc__)
    examples = []
    for text in texts:
        examples += doctest.DocTestParser().get_examples(text or "")
    assert examples, f"{name} has no example"
    assert not any(doctest.SKIP in example.options for example in examples), (
        f"{name} has an example that is skipped"
    )
    home = inspect.getmodule(thing)
    assert home is not None
    assert (home.__file__ or "").startswith(str(ROOT / "src")), (
        "the tests run the examples of modules of the package"
    )


def test_the_code_of_the_tutorials_parses() -> None:
    assert TUTORIALS
    for path in TUTORIALS:
        cells = re.findall(
            r"```\{code-cell\} python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL
        )
        assert cells, path
        for cell in cells:
            ast.parse(cell, str(path))


def test_the_reference_of_the_command_line_has_every_option() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        cli_reference = importlib.import_module("cli_reference")
    finally:
        sys.path.remove(str(ROOT / "tools"))
    page = cli_reference.render()
    for command in cli.COMMANDS:
        section = page.split(f"## fdbd {command.__name__}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        assert len(rows) == len(inspect.signature(command).parameters), command.__name__
    assert "| `--json` | Print" in page
    assert "`--latency / --no-latency`" in page


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_site_builds_without_a_warning_and_runs_its_tutorials(tmp_path: Path) -> None:
    pytest.importorskip("myst_nb")
    docs = tmp_path / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("_build", "generated"))
    for name in ("src", "tools", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    out = tmp_path / "html"
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        str(docs),
        str(out),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        build, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-4000:]
    check = [sys.executable, str(ROOT / "tools" / "check_site.py"), str(out)]
    done = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for path in TUTORIALS:
        notebook = json.loads(
            (out / "tutorials" / f"{path.stem}.ipynb").read_text(encoding="utf-8")
        )
        outputs = []
        for cell in notebook["cells"]:
            outputs += cell.get("outputs", ())
        shows_a_picture = any("image/png" in output.get("data", {}) for output in outputs)
        assert shows_a_picture or path.stem in WITHOUT_A_PICTURE, path
        assert not any(output["output_type"] == "error" for output in outputs), path
