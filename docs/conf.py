"""The documentation site: `make docs` builds it in docs/_build/html, offline, with warnings as
errors."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

import cli_reference  # noqa: E402
import site_pictures  # noqa: E402

from fdbd.util.version import __version__  # noqa: E402

project = "fdbd"
author = "The fdbd developers"
copyright = "The fdbd developers"
version = release = __version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build", "paper/*.md"]
nitpicky = True
default_role = "py:obj"

# ── pages
# ──────────────────────────────────────────────────────────────────────────────────────────────────────────
REPOSITORY = "https://github.com/fdbd/fdbd/blob/main/"
INCLUDED = {"benchmarks/RESULTS.md": "benchmarks.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages of the site; links to others lead to the repository."""
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "off" if os.environ.get("FDBD_DOCS_DRAFT") else "force"
suppress_warnings = (
    ["myst-nb.lexer"] if os.environ.get("FDBD_DOCS_DRAFT") else []
)  # without a kernel: no language
nb_execution_timeout = 300
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tutorials are small: threads would only wait for each other
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True

# ── reference
# ──────────────────────────────────────────────────────────────────────────────────────────────────────
autosummary_generate = True
autosummary_imported_members = True
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False  # torch's would come along
templates_path = ["_templates"]
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100
nitpick_ignore_regex = [
    # Types of other libraries: their sites are not asked, since the build is offline.
    (
        "py:.*",
        r"(torch|numpy|np|collections|typing|typing_extensions|pathlib|os|sklearn|pandas|ray|onnx|nn|abc)\..*",
    ),
    # Type variables and aliases, and what passes through jobs without being asked for.
    (
        "py:.*",
        r"fdbd\..*\.(S|G)|fdbd\.(jobs|data)\..*|fdbd\.bench\.cache\..*|Pixels|Inputs|Data|Names",
    ),
    ("py:.*", r"fdbd\..*\.(CalibrationScores|Target|Influences)|Images"),
    ("py:exc", r"\w+"),
    (
        "py:.*",
        r"(Tensor|Module|Any|Self|Path|Iterable|Iterator|Callable|Sequence|Mapping|Literal|optional|NDArray|Table)",
    ),
    ("py:.*", r"(DataFrame|Collector|CollectorRegistry)"),
    # Pieces of a signature that Sphinx cannot parse, since a dataclass shows "<factory>" in it.
    ("py:class", r"(dict|tuple)\[str"),
    # What only the drivers of a guard touch: its stages, its pool, its tokenizer.
    (
        "py:class",
        r"fdbd\.decision\.(stages\.Stages|choice\.Pool|maps\.PixelAnswers|map_threshold\.PixelShares)",
    ),
    ("py:class", r"fdbd\.core\.(tokenizer\.Text(Tokenizer|Encoder)|pixels\.Picture)"),
    # A protocol of arrays.
    ("py:class", r"fdbd\.serve\.client\.HasToList"),
    # A type that is listed under its full name.
    ("py:class", r"Grid"),
]

# ── looks
# ──────────────────────────────────────────────────────────────────────────────────────────────────────────
html_theme = "pydata_sphinx_theme"
html_title = f"fdbd {release}"
html_static_path = ["_static"]
html_css_files = ["fdbd.css"]
html_js_files = ["fdbd.js"]
# Pages that stand alone have no section whose navigation could be shown beside them; an empty one
# would take a quarter of the width.
html_sidebars = {
    page.stem: []
    for page in sorted(HERE.glob("*.md"))
    if page.stem not in ("production", "runbook")
}
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 5,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [
        {"name": "Repository", "url": "https://github.com/fdbd/fdbd", "icon": "fa-brands fa-github"}
    ],
}


def setup(app: Any) -> None:
    """Generated pages and pictures first, then what makes our Markdown and docstrings those of
    Sphinx."""
    (HERE / "cli.md").write_text(cli_reference.render(), encoding="utf-8")
    site_pictures.draw(HERE / "pictures")
    app.connect("source-read", _lead_links_outside)
    app.connect("source-read", _link_notebook)
    app.connect("build-finished", _copy_notebooks)
    app.connect(
        "include-read", lambda app, path, parent, source: _lead_links_outside(app, parent, source)
    )
    app.connect("autodoc-process-docstring", _markdown_to_rst, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", _keep_colons, priority=900)
    app.connect("missing-reference", _plain_code)


def _lead_links_outside(app: Any, page: str, source: list[str]) -> None:
    """Links such as ../benchmarks/RESULTS.md, which work in the repository, lead to the page or the
    repository."""

    def lead(match: re.Match[str]) -> str:
        path = match[1]
        return f"]({INCLUDED.get(path) or REPOSITORY + path}"

    source[0] = re.sub(r"\]\(\.\./([^)#]+)", lead, source[0])


def _link_notebook(app: Any, page: str, source: list[str]) -> None:
    """Each tutorial links to itself as a notebook."""
    if page.startswith("tutorials/") and not page.endswith("/index"):
        name = page.removeprefix("tutorials/")
        link = (
            f'```{{raw}} html\n<p><a href="{name}.ipynb" download>This page as a'
            " notebook</a></p>\n```"
        )
        source[0] = re.sub(
            r"(?m)^(# .*)$", lambda match: f"{match[1]}\n\n{link}", source[0], count=1
        )


def _copy_notebooks(app: Any, error: Exception | None) -> None:
    """Tutorials as they were run, with their output, beside their pages."""
    if error is not None:  # a build that failed has no pages, and its own reason is the one to show
        return
    for path in (Path(app.outdir).parent / "jupyter_execute" / "tutorials").glob("*.ipynb"):
        shutil.copy(path, Path(app.outdir) / "tutorials" / path.name)


_texts: dict[str, list[str]] = {}
"""Docstrings of attributes on their way around napoleon, by name."""


def _markdown_to_rst(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Formulas, which docstrings indent by four, become literal blocks; a detector's paper stands
    at its end."""
    text = re.sub(
        r"\n\n((?:    .*(?:\n|$))+)", r"\n\n.. code-block:: text\n\n\1\n", "\n".join(lines)
    )
    text = re.sub(r"(?<!`)(`[^`\n]+`)(?=[a-z])", r"\1\\ ", text)  # `Batch`es
    text = re.sub(r"(?m)^    (\w+(?:, \w+)+): ((?:.|\n     )*)", _one_by_one, text)
    lines[:] = text.split("\n")
    paper = getattr(thing, "paper", None) if inspect.isclass(thing) else None
    if paper is not None and type(paper).__name__ == "Paper":
        lines += ["", f"Paper: {paper}", ""]
    if what in ("attribute", "property"):
        _texts[name] = list(lines)


def _one_by_one(match: re.Match[str]) -> str:
    """Attributes or arguments that share a line, each on its own."""
    return "\n".join(f"    {name}: {match[2]}" for name in match[1].split(", "))


def _keep_colons(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """napoleon takes what stands before a colon in an attribute's docstring for its type; ours are
    sentences."""
    if what in ("attribute", "property"):
        lines[:] = _texts.pop(name)


def _plain_code(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Code in backticks is a link where it names something public, and plain code elsewhere."""
    return content if node.get("reftype") == "obj" else None
