"""Commands and code in the documentation: each block is run by a test of its page, each command in
a text exists."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from fdbd import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
GENERATED = {"_build", "cli.md"}
PAGES += [
    path for path in sorted((ROOT / "docs").glob("**/*.md")) if not GENERATED & set(path.parts)
]
RUN_BY = {
    "README.md": ["docs/test_readme.py", "docs/test_production_page.py", "test_stranger.py"],
    "docs/choosing.md": ["decision/test_choosing_page.py"],
    "docs/datasets.md": ["docs/test_datasets_page.py"],
    "docs/heads.md": ["decision/test_map_guard.py", "docs/test_text_page.py"],
    "docs/index.md": ["docs/test_readme.py"],
    "docs/migrating.md": ["docs/test_commands.py"],
    "docs/new-detector.md": ["docs/test_new_detector.py"],
    "docs/openood.md": ["bench/test_openood.py", "bench/test_merging.py"],
    "docs/production.md": ["docs/test_production_page.py"],
    "docs/production/cluster.md": ["jobs/test_ray.py"],
    "docs/production/fit.md": ["docs/test_production_page.py"],
    "docs/production/monitoring.md": ["docs/test_production_page.py"],
    "docs/production/onnx.md": ["docs/test_production_page.py"],
    "docs/production/scikit-learn.md": ["docs/test_production_page.py"],
    "docs/production/score.md": ["docs/test_production_page.py"],
    "docs/runbook.md": ["docs/test_production_page.py"],
    "docs/serving.md": ["docs/test_serving_page.py"],
    "docs/tutorials/segmentation.md": ["commands/test_maps_on_files.py"],
    "docs/tutorials/text.md": ["docs/test_text_page.py"],
}
"""Pages with code or commands of their own, and the tests that run them word for word. Tutorials
are run by the build of the site; commands of `make` and `pip` are checked below."""
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """Commands in blocks and in sentences, as words."""
    text = page.read_text(encoding="utf-8")
    lines = []
    for language, block in FENCE.findall(text):
        if language in ("", "bash"):
            lines += block.splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    starts = ("fdbd ", "make ", "python ", "pytest ", "pip install ")
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


def test_a_test_runs_every_page_that_has_code_or_commands() -> None:
    found = set()
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            if language == "python" or re.match("(fdbd|curl|torchrun) ", block):
                found.add(page.relative_to(ROOT).as_posix())
    assert found == set(RUN_BY)
    for page, tests in RUN_BY.items():
        for test in tests:
            assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8"), (
                f"{test} ignores {page}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    known = typer.main.get_command(cli.app).commands
    targets = re.findall(
        r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    extras = re.findall(
        r"^([a-z-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
    )
    for program, *words in commands(page):
        if program == "make":
            assert set(words) <= set(targets), words
        elif program == "fdbd" and not words[0].startswith("-"):
            options = {"--help"}
            for part in known[words[0]].params:
                options.update(part.opts, part.secondary_opts)
            assert {word for word in words if word.startswith("--")} <= options, words
        elif program == "pip":
            asked = re.findall(r"fdbd\[([^]]+)\]", " ".join(words))
            assert set(",".join(asked).split(",")) - {""} <= set(extras), words
        elif program == "pytest" or (program == "python" and words[0].endswith(".py")):
            assert (ROOT / words[0]).is_file(), words
        elif words[0] == "-m":
            assert importlib.util.find_spec(words[1]), words


@pytest.mark.slow
def test_the_code_of_the_page_for_others_prints_its_table() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    code = "".join(block for language, block in FENCE.findall(text) if language == "python")
    shown: list[str] = []
    exec(
        compile(code, "migrating.md", "exec"),
        {"print": lambda results: shown.extend(map(str, _averages(results)))},
    )
    cells = []
    for name in ("react", "ash-s", "scale"):
        cells += _cells(text, f"`{name}+fdbd`")
    # The code prints them in another order than that of the table.
    assert sorted(cells) == sorted(shown)


def _averages(results, digits: int = 2) -> list[str]:
    """AUROC / FPR95 in percent of each row, averaged over the OOD sets."""
    shown = []
    for row in results.rows:
        auroc = 100 * results.value(row, "average", "auroc")
        fpr = 100 * results.value(row, "average", "fpr95")
        shown.append(f"{auroc:.{digits}f} / {fpr:.1f}")
    return shown


def _cells(text: str, start: str) -> list[str]:
    """The cells of the row of a table that starts with some text, without the first."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {start}") and "/" in line)
    return [cell.strip() for cell in row.strip("| ").split(" | ")][1:]
