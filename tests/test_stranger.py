"""A stranger's path: a fresh virtual environment, an empty home, the wheel, what the README shows,
word for word, and the site with its tutorials.

torch and the other packages are those of this environment; fdbd comes from the wheel.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import subprocess
import sysconfig
import tarfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "release_check.py")))


def pictures(folder: Path, count: int, seed: int) -> None:
    """Images of 32 x 32 pixels in two folders, one per class."""
    from PIL import Image

    generator = np.random.default_rng(seed)
    for number in range(count):
        path = folder / ("cat", "ship")[number % 2] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        colour = generator.integers(0, 255, 3)
        pixels = np.clip(colour + generator.normal(0, 30, (32, 32, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(path)


def readme_commands() -> list[list[str]]:
    """The README's commands on files, in order."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:bash)?\n(fdbd .*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_from_an_empty_home_to_a_guard_in_production(tmp_path: Path) -> None:
    wheel, sdist = tool.build(tmp_path / "dist")
    tool.check_wheel(wheel)
    tool.check_sdist(sdist)
    home = tmp_path / "home"
    home.mkdir()
    python = tool.environment(tmp_path / "venv", below=sysconfig.get_path("purelib"))
    tool.run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--force-reinstall",
        wheel,
        folder=home,
    )
    code = "import fdbd; print(fdbd.__file__)"
    # -I: as below, nothing of this process's Python is inherited.
    where = subprocess.run(
        [str(python), "-I", "-c", code], capture_output=True, text=True, check=True, cwd=home
    ).stdout
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")

    tool.use(python, home)
    found = json.loads((home / "results.json").read_text())
    assert len(found["detectors"]) > 20
    assert (home / "report.html").is_file()

    pictures(home / "photos", 60, seed=0)
    pictures(home / "fresh", 40, seed=1)
    pictures(home / "inbox", 12, seed=2)
    for path in sorted((home / "inbox").glob("*/*.png")):
        path.rename(home / "inbox" / path.name)
    commands = readme_commands()
    assert {"fit", "score", "gallery", "explain", "stress", "export"} <= {
        command[1] for command in commands
    }
    for _, *arguments in commands:
        tool.run(python, "-m", "fdbd", *arguments, folder=home)
    for name in ("guard.safetensors", "scores.parquet", "why.png", "guard.onnx"):
        assert (home / name).is_file(), name
    assert list(home.glob("**/*gallery*.html"))
    tool.run(python, "-m", "fdbd", "doctor", folder=home)

    pytest.importorskip("myst_nb")
    with tarfile.open(sdist) as archive:
        archive.extractall(home, filter="data")
    source = home / sdist.name.removesuffix(".tar.gz")
    # The site is that of the wheel.
    shutil.rmtree(source / "src")
    site = home / "site"
    tool.run(
        python, "-m", "sphinx", "--fail-on-warning", "--quiet", source / "docs", site, folder=home
    )
    tool.run(python, source / "tools" / "check_site.py", site, folder=home)
    notebooks = sorted((site / "tutorials").glob("*.ipynb"))
    tutorials = {path.stem for path in (source / "docs" / "tutorials").glob("*.md")}
    assert {path.stem for path in notebooks} == tutorials - {"index"}
    # The build has run them.
    for notebook in notebooks:
        cells = [
            cell
            for cell in json.loads(notebook.read_text())["cells"]
            if cell["cell_type"] == "code"
        ]
        assert all(cell["execution_count"] for cell in cells), notebook
        outputs = [output for cell in cells for output in cell["outputs"]]
        assert outputs, notebook
        assert not any(output["output_type"] == "error" for output in outputs), notebook
