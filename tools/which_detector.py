"""docs/which-detector.md from docs/results.md: ``python tools/which_detector.py [RESULTS] [PAGE]``.

Each piece of advice names the networks on which it was seen and how far below the best detector it
may be on any of them. If the results no longer bear it out, the page is not written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fdbd.paper.finding import TextTable
from fdbd.util.files import write_text

DOCS = Path(__file__).parents[1] / "docs"
AUROC = "average AUROC ↑"
FPR95 = "average FPR95 ↓"
LOGITS_ONLY = ("msp", "tempscale", "maxlogit", "energy", "entropy", "gen", "klm")
_BEST = 12
"""Rows of the tables of regrets."""
_SECTION = re.compile(r"^<!-- (\S+) -->\n## (.*)$", re.MULTILINE)

Measured = dict[str, dict[str, float]]
"""The numbers of one network's section: by detector, and by the table's column."""


@dataclass(frozen=True)
class Advice:
    """Detectors to take in a situation: on each of the networks each of them is at most `within`
    points below the first in the column."""

    situation: str
    take: tuple[str, ...]
    #: what the names of their sections start with
    networks: str
    within: float
    column: str = AUROC
    #: the detectors that are compared; all, if empty
    among: tuple[str, ...] = ()
    remark: str = ""


ADVICE = (
    Advice(
        "A convolutional network on small images, and no time to compare",
        ("fdbd",),
        "cifar10",
        within=1.5,
        remark="no labels, no option to set; `mds++`, which takes labels, is ahead on two of them",
    ),
    Advice(
        "A convolutional network with ImageNet's thousand classes",
        ("optfs",),
        "imagenet",
        within=4.5,
        remark="first on three EfficientNets; on ResNet-50 and MobileNetV2 `actsub` and shapings "
        "lead, which fail on others: compare them on yours",
    ),
    Advice(
        "OOD is near (other objects of the same kind)",
        ("ash-p+energy", "vra+energy", "energy"),
        "cifar10",
        within=1.0,
        column="near AUROC ↑",
        remark="measured on small images alone",
    ),
    Advice(
        "OOD is far (textures, digits, another modality)",
        ("fdbd", "knn"),
        "cifar10",
        within=2.0,
        column="far AUROC ↑",
        remark="measured on small images alone",
    ),
    Advice(
        "Only logits, no features; small images",
        ("gen", "maxlogit", "energy"),
        "cifar10",
        within=1.5,
        among=LOGITS_ONLY,
        remark="against others that read only logits",
    ),
    Advice(
        "Only logits, no features; a thousand classes",
        ("gen",),
        "imagenet",
        within=2.5,
        among=LOGITS_ONLY,
        remark="against others that read only logits",
    ),
    Advice(
        "Contrastive training (SupCon)",
        ("mds++", "vra+energy"),
        "cifar10-supcon",
        within=1.0,
        remark="`mds++` takes labels",
    ),
    Advice(
        "A small vision transformer",
        ("react+fdbd", "fdbd"),
        "transformer",
        within=1.0,
        remark="one network of 73 % accuracy: large ones may behave otherwise",
    ),
    Advice(
        "Sentence vectors and a linear classifier",
        ("ssd", "nnguide"),
        "text",
        within=1.0,
        remark="embeddings of one encoder; `ssd` takes labels, `nnguide` keeps training samples",
    ),
)


def read_results(text: str) -> dict[str, Measured]:
    """The sections of docs/results.md by name, with the numbers of their tables."""
    found: dict[str, Measured] = {}
    headings = list(_SECTION.finditer(text))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends):
        found[heading[1]] = _table_of(text[heading.end() : end])
    return found


def titles_of(text: str) -> dict[str, str]:
    """The title of each section by its name."""
    return {heading[1]: heading[2] for heading in _SECTION.finditer(text)}


def _table_of(section: str) -> Measured:
    lines = [line for line in section.splitlines() if line.startswith("|")]
    columns = _cells(lines[0])[1:]
    measured: Measured = {}
    for line in lines[2:]:
        name, *cells = _cells(line)
        numbers: dict[str, float] = {}
        for column, cell in zip(columns, cells):
            plain = cell.strip("*~ ")
            if plain:
                numbers[column] = float(plain)
        # The signs say that a fit saw a part of the samples, or too few.
        plain_name = name.rstrip(" †!")
        # The choice is made of the others, and only a few sections have it.
        if plain_name != "auto":
            measured[plain_name] = numbers
    return measured


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def regrets(
    results: dict[str, Measured],
    detector: str,
    networks: Sequence[str],
    column: str = AUROC,
    among: Sequence[str] = (),
) -> dict[str, float]:
    """By network, how many points a detector is below the best one.

    Raises:
        KeyError: if the detector has no number for a network.
    """
    found: dict[str, float] = {}
    for network in networks:
        measured = results[network]
        compared = among or measured
        best = max(measured[name].get(column, 0.0) for name in compared if name in measured)
        found[network] = best - measured[detector][column]
    return found


def check(results: dict[str, Measured]) -> list[str]:
    """What of the advice the results do not bear out, one sentence each."""
    faults = []
    for advice in ADVICE:
        networks = _networks(results, advice.networks)
        for detector in advice.take:
            by_network = regrets(results, detector, networks, advice.column, advice.among)
            worst = max(by_network, key=lambda name: by_network[name])
            if by_network[worst] > advice.within:
                faults.append(
                    f"{advice.situation!r} advises {detector}, which on {worst} is "
                    f"{by_network[worst]:.1f} points below the first; allowed are {advice.within:g}"
                )
    return faults


def _networks(results: dict[str, Measured], start: str) -> list[str]:
    return [name for name in results if name.startswith(start)]


def render(text: str) -> str:
    """The page, from the text of docs/results.md.

    Raises:
        ValueError: if the results do not bear out a piece of advice.
    """
    results = read_results(text)
    faults = check(results)
    if faults:
        raise ValueError(f"the advice does not follow from the results: {'; '.join(faults)}")
    titles = titles_of(text)
    parts = [
        _fragment("start"),
        "## By situation\n",
        _table_of_advice(results),
        _fragment("further"),
        "## Regrets\n",
        _about_regrets(),
        "### CIFAR-10\n",
        _table_of_regrets(results, "cifar10"),
        "### ImageNet\n",
        _table_of_regrets(results, "imagenet"),
        "## Side by side\n",
        _table_of_networks(results, titles),
        _fragment("end"),
    ]
    return "\n".join(parts)


def _fragment(name: str) -> str:
    folder = Path(__file__).with_suffix("")
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def _table_of_advice(results: dict[str, Measured]) -> str:
    rows = []
    for advice in ADVICE:
        networks = _networks(results, advice.networks)
        parts = []
        for detector in advice.take:
            by_network = regrets(results, detector, networks, advice.column, advice.among)
            mean = sum(by_network.values()) / len(by_network)
            worst = max(by_network.values())
            if len(networks) == 1:
                parts.append(f"`{detector}` {worst:.1f}")
            else:
                parts.append(f"`{detector}` {mean:.1f} (at most {worst:.1f})")
        count = f"{len(networks)} network{'s' if len(networks) > 1 else ''}"
        take = ", ".join(f"`{detector}`" for detector in advice.take)
        seen_on = f"{count}; {advice.remark}" if advice.remark else count
        rows.append([advice.situation, take, "; ".join(parts), seen_on])
    columns = ["your situation", "take", "points of AUROC below the first, mean", "seen on"]
    return TextTable("", columns, rows).markdown()


def _about_regrets() -> str:
    return (
        "How many points of average AUROC each detector is below the best one, which is another "
        f"one on each network: mean and largest over the networks, the {_BEST} with the smallest "
        "largest regret.\n"
    )


def _table_of_regrets(results: dict[str, Measured], start: str) -> str:
    networks = _networks(results, start)
    shared = set(results[networks[0]])
    for network in networks[1:]:
        shared &= set(results[network])
    found = {name: regrets(results, name, networks) for name in sorted(shared)}
    by_worst = sorted(found, key=lambda name: max(found[name].values()))
    rows = []
    for name in by_worst[:_BEST]:
        values = list(found[name].values())
        mean = sum(values) / len(values)
        numbers = [f"{value:.1f}" for value in values]
        rows.append([name, f"{mean:.1f}", f"{max(values):.1f}", *numbers])
    columns = ["detector", "mean", "largest", *networks]
    return TextTable("", columns, rows).markdown()


def _table_of_networks(results: dict[str, Measured], titles: dict[str, str]) -> str:
    """The first detector of each network beside the best-known ones."""
    known = ("fdbd", "energy", "knn", "vim", "msp")
    rows = []
    for network, measured in results.items():
        first = max(measured, key=lambda name: measured[name][AUROC])
        rank_of_fdbd = 1 + sum(
            numbers[AUROC] > measured["fdbd"][AUROC] for numbers in measured.values()
        )
        cells = [f"`{first}` {_both(measured[first])}", f"{rank_of_fdbd} of {len(measured)}"]
        cells += [_both(measured[name]) for name in known]
        rows.append([titles[network].partition(":")[0], *cells])
    columns = ["network", "first", "fDBD's rank", "fDBD", "Energy", "KNN", "ViM", "MSP"]
    note = "AUROC / FPR95 in percent, averaged over the OOD sets."
    return TextTable("", columns, rows, [note]).markdown()


def _both(numbers: dict[str, float]) -> str:
    return f"{numbers[AUROC]:.1f} / {numbers[FPR95]:.1f}"


def main() -> None:
    """Write the page."""
    given = [Path(argument) for argument in sys.argv[1:]]
    defaults = [DOCS / "results.md", DOCS / "which-detector.md"]
    arguments = [*given, *defaults[len(given) :]]
    results, page = arguments
    try:
        text = render(results.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(str(error))
    write_text(page, text)
    print(f"wrote {page}")


if __name__ == "__main__":
    main()
