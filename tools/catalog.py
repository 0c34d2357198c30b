"""The page of all detectors and shapings, written from the classes themselves: ``python
tools/catalog.py``."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from fdbd.core.configuration import parameters_of, registered
from fdbd.detectors.base import Configured, Detector

PAGE = Path("docs/detectors.md")

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


def render() -> str:
    """The page, as Markdown."""
    detectors: list[type[Configured]] = []
    shapings: list[type[Configured]] = []
    combinations: list[type[Configured]] = []
    for _, kind in sorted(_registered().items()):
        if any(part.default is part.empty for part in parameters_of(kind).values()):
            combinations.append(kind)
        else:
            (detectors if issubclass(kind, Detector) else shapings).append(kind)
    parts = [
        _INTRODUCTION,
        "## All detectors\n",
        _table(detectors),
        "## All shapings\n",
        _table(shapings),
    ]
    parts += [_section(kind) for kind in detectors + shapings]
    parts += ["## Combinations\n", *(_section(kind, "###") for kind in combinations)]
    return "\n".join(parts)


def _registered() -> dict[str, type[Configured]]:
    return {
        name: kind for name, kind in registered().items() if kind.__module__.startswith("fdbd.")
    }


def _table(kinds: list[type[Configured]]) -> str:
    what = "what it scores" if issubclass(kinds[0], Detector) else "what it does to the activations"
    lines = [
        f"| name | {what} | cost per sample | reads | fit | ONNX | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        paragraphs = _paragraphs(kind)
        needs = kind().needs
        parts = ("features", "logits", "views", "perturbed")
        asks = []
        if needs.labels:
            asks.append("labels")
        if needs.network:
            asks.append("the network")
        if needs.passes is None:
            asks.append("several passes")
        elif needs.passes > 1:
            asks.append(f"{needs.passes} passes")
        cells = [
            f"[`{kind.name}`](#{_anchor(kind)})",
            _summary(paragraphs[0]),
            _cost(" ".join(paragraphs)) or "",
            ", ".join(part for part in parts if getattr(needs, part)),
            ", ".join(asks),
            "no" if needs.network else "yes",
            f"{kind.paper.authors}, {kind.paper.venue} {kind.paper.year}" if kind.paper else "",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


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
    for entry in re.split(r"\n(?=\S)", text):
        names, _, meaning = entry.partition(": ")
        defaults = [
            parameter.default
            for name, parameter in parameters_of(kind).items()
            if name in names.split(", ")
        ]
        shown = ", ".join(
            f"`{value!r}`" for value in defaults if value is not inspect.Parameter.empty
        )
        lines.append(
            f"- `{names}`" + (f" ({shown})" if shown else "") + ": " + " ".join(meaning.split())
        )
    return "\n".join(lines) + "\n"


def _summary(paragraph: str) -> str:
    """The first sentence without its citation."""
    sentence = re.sub(r"\s*\([^()]*\d{4}\)", "", " ".join(paragraph.split()))
    return re.split(r"(?<=[^.])\. (?=[A-Z0])|[.:]$", sentence)[0]


def _cost(text: str) -> str | None:
    """The first O(…) of a text, with its parentheses in balance."""
    start = text.find("O(")
    if start < 0:
        return None
    depth = 0
    for index in range(start + 1, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return text[start : index + 1]
    return None


def _anchor(kind: type[Configured]) -> str:
    """The link target of a section, as GitHub makes it: letters, digits and hyphens alone."""
    return re.sub(r"[^a-z0-9-]", "", f"{kind.name}-{kind.__name__}".lower())


def main() -> None:
    """Write the page to the path given as the only argument, or to docs/detectors.md."""
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
