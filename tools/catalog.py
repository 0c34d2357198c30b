"""The page of all detectors and shapings, and their names in the reference, written from the
classes themselves: ``python tools/catalog.py``."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import NamedTuple

from fdbd.core.configuration import Configured, Needs, parameters_of, registered
from fdbd.detectors.base import Detector

PAGE = Path("docs/detectors.md")
REFERENCE = Path("docs/api")

_INTRODUCTION = """\
# Detectors

Written by `python tools/catalog.py` from the classes themselves: change a docstring, then run it again.

A detector scores how in-distribution a sample is: higher is more in-distribution. `fdbd.create(name)` creates a
detector by name; `fdbd.create("react+fdbd")` combines a shaping with a detector. P is the number of features, C the
number of classes, z the features of a sample, k its predicted class, and W and b the weight and the bias of the head.

- **reads**: what a score is computed from. Logits that are not given are computed from the head.
- **fit**: what the fit needs besides features: labels, or the network itself, which only a `Guard` has; and the number
  of passes over the training data, if more than one.
- **ONNX**: whether a fitted detector can be exported.
"""

_ABOUT_DETECTORS = """\
:doc:`/detectors` lists the formula, cost and defaults of all detectors. :doc:`/which-detector` helps to choose one."""
_ABOUT_SHAPINGS = """\
Shapings change features before they are scored; ``fdbd.create("react+fdbd")`` puts one before a detector."""


class Kinds(NamedTuple):
    """All registered classes of the library, each list in the order of the names."""

    detectors: list[type[Configured]]
    shapings: list[type[Configured]]
    combinations: list[type[Configured]]
    """Those that are made of other detectors."""

    @classmethod
    def from_registry(cls) -> Kinds:
        kinds = cls([], [], [])
        for _, kind in sorted(_registered().items()):
            if _takes_parts(kind):
                kinds.combinations.append(kind)
            elif issubclass(kind, Detector):
                kinds.detectors.append(kind)
            else:
                kinds.shapings.append(kind)
        return kinds


def render() -> str:
    """The page, as Markdown."""
    kinds = Kinds.from_registry()
    parts = [
        _INTRODUCTION,
        "## All detectors\n",
        _table(kinds.detectors),
        "## All shapings\n",
        _table(kinds.shapings),
    ]
    parts += [_section(kind) for kind in kinds.detectors + kinds.shapings]
    parts += ["## Combinations\n", *(_section(kind, "###") for kind in kinds.combinations)]
    return "\n".join(parts)


def reference() -> dict[str, str]:
    """The pages of the reference that list every detector and every shaping, by file name."""
    kinds = Kinds.from_registry()
    of_detectors = ["create", "list_detectors", "Detector", "Batch", "Head", "Paper"]
    of_detectors += _class_names(kinds.detectors)
    of_detectors += _class_names(kinds.combinations)
    of_shapings = ["list_shapings", "Shaping", *_class_names(kinds.shapings)]
    return {
        "detectors.rst": _reference_page("Detectors", _ABOUT_DETECTORS, of_detectors),
        "shapings.rst": _reference_page("Activation shapings", _ABOUT_SHAPINGS, of_shapings),
    }


def _class_names(kinds: list[type[Configured]]) -> list[str]:
    return sorted((kind.__name__ for kind in kinds), key=str.lower)


def _reference_page(title: str, about: str, names: list[str]) -> str:
    lines = [title, "=" * len(title), "", about, "", ".. currentmodule:: fdbd", ""]
    lines += [".. autosummary::", "   :toctree: generated", "   :nosignatures:", ""]
    lines += [f"   {name}" for name in names]
    return "\n".join(lines) + "\n"


def _registered() -> dict[str, type[Configured]]:
    return {
        name: kind for name, kind in registered().items() if kind.__module__.startswith("fdbd.")
    }


def _takes_parts(kind: type[Configured]) -> bool:
    """Whether the constructor has an argument without a default, as those of combinations do."""
    return any(part.default is part.empty for part in parameters_of(kind).values())


def _table(kinds: list[type[Configured]]) -> str:
    what = "what it scores" if issubclass(kinds[0], Detector) else "what it does to the activations"
    lines = [
        f"| name | {what} | cost per sample | reads | fit | ONNX | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        cells = [cell.replace("|", "\\|") for cell in _cells(kind)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cells(kind: type[Configured]) -> list[str]:
    """The row of a detector or shaping in the table, one text for each column."""
    paragraphs = _paragraphs(kind)
    needs = kind().needs
    read = []
    for part in ("features", "logits", "views", "perturbed"):
        if getattr(needs, part):
            read.append(part)
    onnx = "no" if needs.network else "yes"
    paper = ""
    if kind.paper:
        paper = f"{kind.paper.authors}, {kind.paper.venue} {kind.paper.year}"
    return [
        f"[`{kind.name}`](#{_anchor(kind)})",
        _summary(paragraphs[0]),
        _cost(" ".join(paragraphs)),
        ", ".join(read),
        ", ".join(_demands_of_fit(needs)),
        onnx,
        paper,
    ]


def _demands_of_fit(needs: Needs) -> list[str]:
    """What a fit takes besides features."""
    demands = []
    if needs.labels:
        demands.append("labels")
    if needs.network:
        demands.append("the network")
    if needs.passes is None:
        demands.append("several passes")
    elif needs.passes > 1:
        demands.append(f"{needs.passes} passes")
    return demands


def _section(kind: type[Configured], level: str = "##") -> str:
    lines = [f"{level} {kind.name}: {kind.__name__}\n"]
    for paragraph in _paragraphs(kind):
        if paragraph.startswith("Args:"):
            lines.append(_options(paragraph, kind))
        elif paragraph.startswith("    "):
            lines.append("```text\n" + inspect.cleandoc(paragraph) + "\n```\n")
        else:
            lines.append(paragraph + "\n")
    if kind.paper:
        lines.append(f"*{kind.paper}*\n")
    return "\n".join(lines)


def _paragraphs(kind: type[Configured]) -> list[str]:
    """Paragraphs of the docstring, without its doctests."""
    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    return [paragraph for paragraph in paragraphs if not paragraph.startswith(">>>")]


def _options(paragraph: str, kind: type[Configured]) -> str:
    """The paragraph of arguments as a list, each with its default."""
    text = inspect.cleandoc(paragraph.removeprefix("Args:"))
    lines = []
    parameters = parameters_of(kind)
    for entry in re.split(r"\n(?=\S)", text):
        # One entry may be about several arguments: "low, high: percentiles …".
        names, _, meaning = entry.partition(": ")
        defaults = []
        for name in names.split(", "):
            parameter = parameters.get(name)
            if parameter is not None and parameter.default is not parameter.empty:
                defaults.append(f"`{parameter.default!r}`")
        line = f"- `{names}`"
        if defaults:
            line += f" ({', '.join(defaults)})"
        lines.append(f"{line}: {' '.join(meaning.split())}")
    return "\n".join(lines) + "\n"


def _summary(paragraph: str) -> str:
    """The first sentence without its citation."""
    sentence = re.sub(r"\s*\([^()]*\d{4}\)", "", " ".join(paragraph.split()))
    return re.split(r"(?<=[^.])\. (?=[A-Z0])|[.:]$", sentence)[0]


def _cost(text: str) -> str:
    """The first O(…) of a text up to the parenthesis that closes it, on one line; "" if the text
    states no cost."""
    start = text.find("O(")
    if start < 0:
        return ""
    depth = 0
    for stop in range(start, len(text)):
        if text[stop] == "(":
            depth += 1
        elif text[stop] == ")":
            depth -= 1
            if depth == 0:
                return " ".join(text[start : stop + 1].split())
    return ""


def _anchor(kind: type[Configured]) -> str:
    """The link target of a section, as GitHub makes it: letters, digits and hyphens alone."""
    return re.sub(r"[^a-z0-9-]", "", f"{kind.name}-{kind.__name__}".lower())


def main() -> None:
    """Write the page to the path given as the only argument; without one, all pages of the docs."""
    if len(sys.argv) > 1:
        _write(Path(sys.argv[1]), render())
        return
    _write(PAGE, render())
    for name, text in reference().items():
        _write(REFERENCE / name, text)


def _write(page: Path, text: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
