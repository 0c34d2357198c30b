"""`make release-check`: build wheel and sdist, check what is in them, and use them as a stranger would.

The wheel is installed without extras into a fresh environment, where the README's quickstart and `fdbd bench` run; then
each extra alone is resolved beside it. Nothing of this checkout is on the path.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LARGEST = 40_000_000
"""Bytes of the wheel at most."""
EXPECTED = (
    "fdbd/__init__.py",
    "fdbd/py.typed",
    "fdbd/serve/assets/page.html",
    "fdbd/report/assets/page.html",
    "fdbd/report/assets/gallery.html",
    "fdbd/networks/weights/cifar10-ce.safetensors",
)
"""Files that the wheel must hold, beside the licences."""
ALLOWED = {".py", ".typed", ".safetensors", ".toml", ".md", ".js", ".html", ".css", ".json", ".txt", ".jpg", ".npz", ""}


def main() -> None:
    quick = "--quick" in sys.argv
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    wheel, sdist = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    # W002: two packages may each have a file of the same few words; W009: one top-level name is what we have
    run(Path(sys.executable).with_name("check-wheel-contents"), "--ignore", "W002", wheel)
    check_contents(wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder))
        run(python, "-m", "pip", "install", "--quiet", wheel)
        use(python, Path(folder))
        if not quick:
            for extra in extras():
                run(python, "-m", "pip", "install", "--quiet", "--dry-run", f"{wheel}[{extra}]")
    print("release-check: the wheel and the sdist are fit to publish")


def run(*command: object, folder: Path | None = None) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=folder)


def check_contents(wheel: Path) -> None:
    """Sizes and kinds of files, and the licences."""
    with zipfile.ZipFile(wheel) as archive:
        names = {entry.filename: entry.file_size for entry in archive.infolist()}
    size = wheel.stat().st_size
    if size > LARGEST:
        raise SystemExit(f"the wheel has {size:,} bytes, at most {LARGEST:,} are meant to be")
    missing = [name for name in EXPECTED if name not in names]
    missing += [name for name in ("LICENSE", "NOTICE") if not any(path.endswith(f"licenses/{name}") for path in names)]
    if missing:
        raise SystemExit(f"the wheel lacks {', '.join(missing)}")
    odd = [name for name in names if name.startswith("fdbd/") and Path(name).suffix not in ALLOWED]
    if odd or any(name.startswith(("tests", "benchmarks")) for name in names):
        raise SystemExit(f"the wheel holds what no user needs: {', '.join(odd) or 'tests'}")
    print(f"{wheel.name}: {len(names)} files, {size / 1e6:.1f} MB")


def environment(folder: Path) -> Path:
    """The interpreter of a fresh virtual environment."""
    venv.create(folder / "venv", with_pip=True)
    return folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"


def extras() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return [name for name in re.findall(r"^([a-z-]+) = \[", block, re.MULTILINE) if name != "dev"]


def use(python: Path, folder: Path) -> None:
    """The README's quickstart and the benchmark, without extras."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    setup = (
        "import torch\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)).eval()\n"
        "train_loader = [(torch.randn(64, 3, 4, 4), torch.arange(64) % 5) for _ in range(3)]\n"
        "val_loader = [(torch.randn(64, 3, 4, 4), torch.arange(64) % 5) for _ in range(2)]\n"
        "images = torch.randn(6, 3, 4, 4)\n"
        "weight, bias = torch.randn(5, 16), torch.zeros(5)\n"
        "train_features, new_features = torch.randn(100, 16), torch.randn(6, 16)\n"
    )
    script = folder / "quickstart.py"
    script.write_text(setup + "\n".join(blocks), encoding="utf-8")
    run(python, script, folder=folder)
    run(python, "-m", "fdbd", "bench", folder=folder)


if __name__ == "__main__":
    main()
