"""Mutation testing: change one operator of a module, and see whether its tests notice.

    python tools/mutations.py [--mutants 60] [--json FILE]

A mutant that no test fails on has survived: it is printed, and is either a gap in the tests or a
change without an effect. Mutants are drawn at random with a fixed seed, evenly over the modules
below. The source is changed in a copy, never in this checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {
    "fdbd/geometry.py": ["tests/core/test_geometry.py"],
    "fdbd/core/ranks.py": ["tests/decision/test_threshold.py", "tests/metrics"],
    "fdbd/decision/threshold.py": ["tests/decision/test_threshold.py"],
    "fdbd/metrics/points.py": ["tests/metrics"],
    "fdbd/fitting/statistics.py": ["tests/fitting/test_statistics.py"],
    "fdbd/jobs/review.py": ["tests/jobs/test_operations.py"],
    "fdbd/serve/access.py": ["tests/serve/test_app.py"],
}
"""What is changed, and the tests that should notice."""
SECONDS = 900
"""After so long a mutant counts as found: it does not end."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


@dataclass
class Mutant:
    """One change, and what became of it."""

    module: str
    line: int
    change: str
    is_found: bool = False


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """What can be changed: nodes with an operator, and negations."""
    for node in ast.walk(tree):
        is_comparison = isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS
        is_formula = isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS
        if is_comparison or is_formula:
            yield node, "operator"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, "not"


def mutate(source: str, number: int) -> tuple[str, int, str]:
    """The source with one place changed; its line, and the change in words."""
    tree = ast.parse(source)
    node, kind = list(places(tree))[number]
    before = ast.unparse(node)
    if kind == "not":
        assert isinstance(node, ast.UnaryOp)
        # `not x` becomes `not not x`.
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
    else:
        assert isinstance(node, ast.BinOp | ast.BoolOp)
        node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
    ast.fix_missing_locations(tree)
    return ast.unparse(tree), node.lineno, f"{before}  →  {ast.unparse(node)}"


def tests_pass(source: Path, tests: list[str]) -> bool:
    """Whether the tests pass on the package in a folder."""
    settings = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return ran.returncode == 0


def draw(mutants: int) -> list[tuple[str, int]]:
    """Modules and places, evenly over the modules."""
    generator = random.Random(0)
    by_module = {}
    for module in MODULES:
        tree = ast.parse((ROOT / "src" / module).read_text(encoding="utf-8"))
        numbers = list(range(len(list(places(tree)))))
        generator.shuffle(numbers)
        by_module[module] = numbers
    drawn = []
    while len(drawn) < mutants and any(by_module.values()):
        for module, numbers in by_module.items():
            if numbers and len(drawn) < mutants:
                drawn.append((module, numbers.pop()))
    return sorted(drawn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=60)
    parser.add_argument("--json", type=Path, help="where the results go")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for module, tests in MODULES.items():
            if not tests_pass(copy, tests):
                raise SystemExit(f"the tests of {module} fail before anything is changed")
        for module, number in draw(options.mutants):
            original = (copy / module).read_text(encoding="utf-8")
            changed, line, change = mutate(original, number)
            (copy / module).write_text(changed, encoding="utf-8")
            mutant = Mutant(module, line, change)
            mutant.is_found = not tests_pass(copy, MODULES[module])
            (copy / module).write_text(original, encoding="utf-8")
            results.append(mutant)
            verdict = "found   " if mutant.is_found else "SURVIVED"
            print(f"{verdict} {module}:{line}  {change}", flush=True)
    found = sum(mutant.is_found for mutant in results)
    print(f"{found} of {len(results)} mutants found")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(mutant) for mutant in results], indent=1))


if __name__ == "__main__":
    main()
