"""`make architecture`: the packages (layers) of the library, with their modules and lines, and
which imports which.

Prints the packages with their lines and writes docs/architecture.md and docs/architecture.svg from
the code; tests/docs/test_architecture.py checks that they are up to date. The rule itself, that a
package imports only from packages below it, is the import-linter contract in pyproject.toml, from
which the order of the packages is read.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fdbd"
# Of the drawing, in pixels.
ROW = 34
WIDTH = 560
LEFT = 250
TOP = 24


class Package(NamedTuple):
    """One layer: a package such as `fdbd.core`, or a module at the top such as `fdbd.cli`."""

    name: str
    what: str
    """The first sentence of its docstring."""
    modules: tuple[str, ...]
    lines: int
    imports: tuple[str, ...]
    """Packages that it imports from, from the ground up."""


def packages() -> list[Package]:
    """All packages, from the ground up."""
    names: list[str] = []
    for layer in reversed(_layers()):
        names += layer
    graph = grimp.build_graph("fdbd", include_external_packages=False, cache_dir=None)
    found = []
    for name in names:
        package = f"fdbd.{name}"
        modules = sorted(module for module in graph.modules if _inside(module, package))
        imported: set[str] = set()
        lines = 0
        for module in modules:
            imported |= graph.find_modules_directly_imported_by(module)
            lines += len(_source(module).read_text(encoding="utf-8").splitlines())
        others = [other for other in names if other != name]
        short = tuple(module.removeprefix(f"{package}.") for module in modules if module != package)
        what = _sentence(_source(package))
        found.append(Package(name, what, short, lines, _packages_of(imported, others)))
    return found


def _packages_of(modules: set[str], names: list[str]) -> tuple[str, ...]:
    """Which of these packages the modules belong to."""
    found = []
    for name in names:
        if any(_inside(module, f"fdbd.{name}") for module in modules):
            found.append(name)
    return tuple(found)


def page(found: list[Package]) -> str:
    """docs/architecture.md."""
    rows = [
        f"| `{package.name}` | {package.what} | {', '.join(package.modules) or '-'} |"
        for package in reversed(found)
    ]
    return "\n".join(
        [
            "# The packages of the library",
            "",
            (
                "Written by `make architecture` from the code. A package imports only from tiers "
                "below its own; `make lint` checks this."
            ),
            "",
            "![Packages and their imports](architecture.svg)",
            "",
            "| package | what is in it | modules |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def drawing(found: list[Package]) -> str:
    """docs/architecture.svg: one row per package, an arc for each import, to the left of the
    names."""
    place = {package.name: TOP + ROW * index for index, package in enumerate(reversed(found))}
    arcs = []
    boxes = []
    for package in found:
        y = place[package.name]
        for other in package.imports:
            z = place[other]
            bend = LEFT - 12 - min(200, 26 * (abs(z - y) // ROW))
            arcs.append(
                f'<path d="M{LEFT} {y + 11} C{bend} {y + 11} {bend} {z + 11} {LEFT} {z + 11}"/>'
            )
        boxes.append(
            f'<rect x="{LEFT}" y="{y}" width="110" height="22" rx="4"/>'
            f'<text x="{LEFT + 8}" y="{y + 15}">{package.name}</text>'
            f'<text class="what" x="{LEFT + 122}" y="{y + 15}">{_size(package)}</text>'
        )
    height = TOP + ROW * len(found)
    style = (
        "path{fill:none;stroke:#4477aa;stroke-opacity:.45}rect{fill:#e8eef5;stroke:#4477aa}"
        "text{font:13px sans-serif;fill:#1b1f24}.what{fill:#57606a}"
    )
    title = escape("Packages of fdbd: each imports only from those below it")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{title}</title><style>{style}</style>"
        + "".join(arcs)
        + "".join(boxes)
        + "</svg>\n"
    )


def _size(package: Package) -> str:
    count = len(package.modules) or 1
    return f"{count} module{'s' if count > 1 else ''}"


def _layers() -> list[list[str]]:
    """The layers of the contract, the highest first; packages beside each other are joined by `|`
    there."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    found = []
    for layer in layers:
        names = layer.replace(":", "|").split("|")
        found.append([name.strip() for name in names])
    return found


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _source(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _sentence(path: Path) -> str:
    text = path.read_text(encoding="utf-8").split('"""')[1]
    return " ".join(text.strip().split("\n\n")[0].split()).rstrip(".")


def main() -> None:
    found = packages()
    for package in reversed(found):
        print(f"{package.name:<10} {package.lines:>6,} lines  {', '.join(package.modules) or '-'}")
    print(f"{'in all':<10} {sum(package.lines for package in found):>6,} lines")
    (ROOT / "docs" / "architecture.md").write_text(page(found), encoding="utf-8")
    (ROOT / "docs" / "architecture.svg").write_text(drawing(found), encoding="utf-8")


if __name__ == "__main__":
    main()
