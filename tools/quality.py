"""Write docs/quality.md, the evidence of quality: every number from a command that runs now.

    python tools/quality.py

It runs the tests once with coverage, tries mutants, and reads what the other commands have written.
It takes as long as the tests and `tools/mutations.py` together. `--coverage FILE` and `--mutations
FILE` take the results of commands that have just run, instead of running them.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOT_RUN = "not run when this page was written"
PAGE = ROOT / "docs" / "quality.md"
LIBRARIES = ("torch", "numpy", "numba", "scipy", "scikit-learn", "onnxruntime", "pytest", "mypy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", type=Path, help="coverage.json of pytest-cov")
    parser.add_argument("--mutations", type=Path, help="what tools/mutations.py --json wrote")
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument(
        "--quick", action="store_true", help="run no tests and no mutants, and say so"
    )
    options = parser.parse_args()
    tests: dict[str, Any] | None = None
    mutants: list[dict[str, Any]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        if not options.quick or options.coverage is not None:
            tests = run_tests(Path(folder), options.coverage)
        if not options.quick or options.mutations is not None:
            mutants = run_mutations(Path(folder), options.mutations, options.mutants)
    text = page(tests, mutants, is_quick=options.quick)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} is written")


def run_tests(folder: Path, given: Path | None) -> dict[str, Any]:
    """Totals of coverage, and the outcome of the tests if they were run here."""
    path = given or folder / "coverage.json"
    outcome = "not run by this command"
    if given is None:
        command = ["-m", "pytest", "-q", "--cov=fdbd", f"--cov-report=json:{path}"]
        outcome = last_line(command)
    totals = json.loads(path.read_text(encoding="utf-8"))["totals"]
    return {
        "outcome": outcome,
        "covered": totals["covered_lines"],
        "lines": totals["num_statements"],
    }


def run_mutations(folder: Path, given: Path | None, mutants: int) -> list[dict[str, Any]]:
    path = given or folder / "mutations.json"
    if given is None:
        last_line(["tools/mutations.py", "--mutants", str(mutants), "--json", str(path)])
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def last_line(arguments: list[str], *, may_fail: bool = True) -> str:
    """The last line that a Python command prints, without colours and times."""
    print("$ python", *arguments, flush=True)
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if ran.returncode and not may_fail:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    if not lines:
        return f"no output, exit code {ran.returncode}"
    return re.sub(r"\x1b\[[0-9;]*m|\s*=+\s*", " ", lines[-1]).strip()


def count_tests(marker: str) -> int:
    """How many tests pytest finds."""
    line = last_line(["-m", "pytest", "--collect-only", "-q", "-o", "addopts=", "-m", marker])
    found = re.search(r"(\d+)(?:/\d+)? tests", line)
    if found is None:
        raise SystemExit(f"pytest does not say how many tests there are: {line}")
    return int(found[1])


def tested_systems() -> str:
    """The matrix of the workflow."""
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    systems = re.search(r"os: \[([^]]+)\]", text)
    pythons = re.search(r"python: \[([^]]+)\]", text)
    assert systems is not None
    assert pythons is not None
    names = systems[1].replace("-latest", "").replace(", ", ", ")
    return f"{names}; Python {pythons[1].replace(chr(34), '')}"


def reliability() -> str:
    """How many ways of failing docs/reliability.md reports, and how many did not hold."""
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    return f"{len(rows)} rows of trials; [the page](reliability.md) says what each did"


def commit() -> str:
    command = ["git", "describe", "--always", "--long"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or "unknown"


def page(
    tests: dict[str, Any] | None, mutants: list[dict[str, Any]] | None, *, is_quick: bool
) -> str:
    default = NOT_RUN
    slow = NOT_RUN
    if not is_quick:
        default = f"{count_tests('not slow'):,}"
        slow = f"{count_tests('slow'):,}"
    outcome = NOT_RUN
    covered = NOT_RUN
    found = NOT_RUN
    if tests is not None:
        outcome = tests["outcome"]
        share = 100 * tests["covered"] / tests["lines"]
        covered = f"{tests['covered']:,} of {tests['lines']:,} ({share:.1f} %)"
    if mutants is not None:
        number = sum(mutant["is_found"] for mutant in mutants)
        found = f"{number} of {len(mutants)}"
    versions = []
    for name in LIBRARIES:
        versions.append(f"{name} {metadata.version(name)}")
    rows = [
        ("tests in the default run", default, "`python -m pytest --collect-only -q`"),
        ("slow tests", slow, "`python -m pytest --collect-only -q -m slow`"),
        ("the default run", outcome, "`make test`"),
        ("statements that it covers", covered, "`make coverage`"),
        ("mutants that the tests find", found, "`python tools/mutations.py`"),
        (
            "types",
            last_line(["-m", "mypy"]),
            "`make types`",
        ),
        (
            "style and layers",
            last_line(["-m", "ruff", "check", "."]),
            "`make lint`",
        ),
        ("kills, forged files, full disks", reliability(), "`make faults`"),
        ("systems of the workflow", tested_systems(), "`.github/workflows/tests.yml`"),
        ("oldest supported libraries", "the lowest versions of pyproject.toml", "`make oldest`"),
        ("arithmetic of other processors", "four settings", "`make elsewhere`"),
    ]
    lines = ["| what | found | by |", "|---|---|---|"]
    for what, outcome, command in rows:
        lines.append(f"| {what} | {outcome} | {command} |")
    return f"""\
# Quality

What is known about the quality of this code, each number from a command that you can run. The page is written by
`python tools/quality.py`, here at `{commit()}` on {platform.system()} {platform.machine()}, Python
{platform.python_version()}, with {", ".join(versions)}.

{chr(10).join(lines)}

The workflows run on Linux, macOS and Windows. What is only emulated there is listed on
[the page of platforms](production/platforms.md). Speed and results have pages of their own: [benchmarks](benchmarks.md),
[results](results.md).

## Mutants

A mutant is the code with one operator changed. If the tests of its module still pass, nothing holds that operator in
place. Mutants of the modules that decide, count and guard access are drawn at random with a fixed seed.

{survivors_in_words(mutants)}
"""


def survivors_in_words(mutants: list[dict[str, Any]] | None) -> str:
    if mutants is None:
        return "They were not tried when this page was written."
    survivors = [mutant for mutant in mutants if not mutant["is_found"]]
    if not survivors:
        return f"All {len(mutants)} were found."
    lines = [f"Of {len(mutants)}, these were found by no test of their module:", ""]
    for mutant in survivors:
        lines.append(f"- `{mutant['module']}`, line {mutant['line']}: `{mutant['change']}`")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
