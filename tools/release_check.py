"""`make release-check`: build wheel and sdist, check what is in them, and use them as a new user
would.

The wheel is installed without extras into a fresh environment with an empty home, where the
README's quickstart and `fdbd bench` run. Each extra is then installed alone, in an environment on
top of that one, and what needs it is tested. Nothing of this checkout is on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
# Bytes, at most.
LARGEST_WHEEL = 40_000_000
LARGEST_SDIST = 45_000_000
LARGEST_FILE = 10_000_000
SOURCES = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
    "CHANGELOG.md",
    "src/fdbd/__init__.py",
    "tests/conftest.py",
)
"""What the sdist holds, among others."""
EXTRAS = {
    "vision": (
        "import timm, torchvision\n"
        "fdbd.Guard(timm.create_model('resnet18', num_classes=3))\n"
        "fdbd.Guard(torchvision.models.resnet18(num_classes=3))"
    ),
    "knn": "import faiss\nfdbd.KNN(index='ivf').fit(fdbd.Batch(z), head).score(fdbd.Batch(z))",
    "report": (
        "found = fdbd.bench.load_bundle('cifar10-ce').run(['fdbd', 'msp'], latency=False)\n"
        "found.to_pandas(), found.to_html('extra.html')"
    ),
    "onnx": "guard.export_onnx('guard.onnx', images)",
    "ray": (
        "import ray.data\nfrom fdbd.jobs import ray as on_ray\non_ray.connect()\n"
        "rows = ray.data.from_items([{'features': row.tolist()} for row in z])\n"
        "by_ray = on_ray.calibrate(on_ray.fit(fdbd.Guard(head), rows), rows, alpha=0.1)\n"
        "assert on_ray.score(by_ray, rows).count() == len(z)"
    ),
    "monitor": (
        "import prometheus_client as p\nfdbd.Monitor(guard).prometheus(p.CollectorRegistry())"
    ),
    "serve": (
        "import asyncio\n"
        "from fdbd.serve.run import Service, application\n"
        "async def begin_and_end():\n"
        "    process = application(Service({'guard': 'features.safetensors'})).process\n"
        "    await process.begin()\n"
        "    assert process.is_ready\n"
        "    await process.end()\n"
        "asyncio.run(begin_and_end())"
    ),
    "openvino": (
        "from fdbd.export.openvino import export_openvino\nexport_openvino(guard, 'guard.xml',"
        " images)"
    ),
    "hub": (
        "import os, pathlib\nfrom fdbd.decision import hub\nos.environ['HF_HUB_OFFLINE'] ="
        " '1'\ncache = pathlib.Path.home() / '.cache' / 'huggingface' / 'hub' /"
        " 'models--me--guard'\nhub.write_folder(by_features, cache / 'snapshots' / 'abc')\n(cache /"
        " 'refs').mkdir()\n(cache / 'refs' / 'main').write_text('abc')\nfdbd.from_hub('me/guard')"
    ),
    "mlflow": (
        "import fdbd.integrations.mlflow, mlflow.pyfunc\n"
        "fdbd.integrations.mlflow.save_model('features.safetensors', 'logged')\n"
        "assert len(mlflow.pyfunc.load_model('logged').predict(z.numpy())) == len(z)"
    ),
    # The graph is the one that the extra onnx has written.
    "onnx-runtime": "from fdbd.serve.backend import OnnxBackend\nOnnxBackend('guard.onnx')",
}
"""One thing to try for each extra; `SETUP` goes before. What `serve` and `monitor` need is in a plain
install too, except the faster event loop of `serve`."""
SETUP = (
    "import torch\n"
    "from torch import nn\n"
    "model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 5)).eval()\n"
    "train_loader = [(x, model(x).argmax(dim=1)) for x in torch.randn(3, 64, 3, 4, 4)]\n"
    "val_loader = [(x, model(x).argmax(dim=1)) for x in torch.randn(2, 64, 3, 4, 4)]\n"
    "images = torch.randn(6, 3, 4, 4)\n"
    "weight, bias = torch.randn(5, 16), torch.zeros(5)\n"
    "train_features, new_features = torch.randn(100, 16), torch.randn(6, 16)\n"
)
GUARD = (
    "import fdbd, fdbd.bench\n"
    "guard = fdbd.Guard(model)\n"
    "guard.fit(train_loader)\n"
    "guard.calibrate(val_loader)\n"
    "head, z = fdbd.Head(weight, bias), train_features\n"
    "by_features = fdbd.Guard(head).fit([fdbd.Batch(z)]).calibrate([fdbd.Batch(z + 1)])\n"
    "by_features.save('features.safetensors')\n"
)


def main() -> None:
    wheel, sdist = build(DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    # W002: two packages may each have a file of the same few words
    run(Path(sys.executable).with_name("check-wheel-contents"), "--ignore", "W002", wheel)
    check_wheel(wheel)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder) / "plain")
        run(python, "-m", "pip", "install", "--quiet", wheel)
        use(python, Path(folder))
        for extra in extras():
            try_extra(extra, wheel, python, Path(folder))
    print("release-check: the wheel and the sdist are fit to publish")


def build(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist, in a separate folder."""
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def run(*command: object, folder: Path | None = None) -> None:
    """Run a command. If a folder is given, it is also the home, and nothing of this process's
    Python is inherited."""
    print("$", *(str(part).partition("\n")[0] for part in command), flush=True)
    settings = dict(os.environ)
    if folder is not None:
        settings = {
            name: value
            for name, value in settings.items()
            if not name.startswith(("PYTHON", "FDBD"))
        }
        settings |= {"HOME": str(folder), "USERPROFILE": str(folder)}
        settings = {name: value for name, value in settings.items() if not name.startswith("XDG_")}
    subprocess.run([str(part) for part in command], check=True, cwd=folder, env=settings)


def check_wheel(wheel: Path) -> None:
    """Size, contents against the list, and a word in NOTICE about each file of weights and
    features."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        notice = next(
            (archive.read(name).decode() for name in sizes if name.endswith("licenses/NOTICE")), ""
        )
    check_size(wheel, LARGEST_WHEEL)
    expected = package_files()
    found = {name for name in sizes if not name.split("/")[0].endswith(".dist-info")}
    missing = sorted(expected - found)
    if missing:
        raise SystemExit(f"the wheel lacks {', '.join(missing)}")
    unexpected = sorted(found - expected)
    if unexpected:
        raise SystemExit(f"the wheel holds what git does not: {', '.join(unexpected)}")
    large = [name for name, size in sizes.items() if size > LARGEST_FILE]
    if large:
        raise SystemExit(f"more than {LARGEST_FILE:,} bytes: {', '.join(large)}")
    stems = {
        re.sub(r"-(train|test)$", "", Path(name).stem)
        for name in sizes
        if name.endswith(".safetensors")
    }
    unnamed = sorted(stem for stem in stems if stem not in notice)
    if unnamed:
        raise SystemExit(
            f"NOTICE does not say where these weights or features come from: {', '.join(unnamed)}"
        )
    print(f"{wheel.name}: {len(sizes)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def package_files() -> set[str]:
    """The package's files as git knows them, by their names in a wheel: what a wheel is to hold."""
    listed = subprocess.run(
        ["git", "ls-files", "src/fdbd"], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.splitlines()
    return {name.removeprefix("src/") for name in listed}


def check_sdist(sdist: Path) -> None:
    check_size(sdist, LARGEST_SDIST)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = [name for name in SOURCES if name not in names]
    if missing:
        raise SystemExit(f"the sdist lacks {', '.join(missing)}")
    print(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 1e6:.1f} MB")


def check_size(path: Path, largest: int) -> None:
    if path.stat().st_size > largest:
        raise SystemExit(
            f"{path.name} has {path.stat().st_size:,} bytes, more than the limit of {largest:,}"
        )


def environment(folder: Path, below: str | None = None) -> Path:
    """The interpreter of a fresh virtual environment; what is in the folder `below` can be
    imported, too."""
    venv.create(folder, with_pip=True)
    scripts = "Scripts" if sys.platform == "win32" else "bin"
    python = folder / scripts / "python"
    if below is not None:
        Path(packages(python), "below.pth").write_text(f"{below}\n", encoding="utf-8")
    return python


def packages(python: Path) -> str:
    """The folder of an interpreter's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True
    ).stdout.strip()


def extras() -> list[str]:
    """Extras for users."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return [
        name
        for name in re.findall(r"^([a-z-]+) = \[", block, re.MULTILINE)
        if name not in ("dev", "docs")
    ]


def try_extra(extra: str, wheel: Path, plain: Path, folder: Path) -> None:
    """An extra alone, above the environment that has the library without extras."""
    if extra not in EXTRAS:
        raise SystemExit(f"EXTRAS has nothing to try for the extra {extra!r}")
    python = environment(folder / extra, below=packages(plain))
    run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{extra}]")
    run(python, "-c", SETUP + GUARD + EXTRAS[extra], folder=folder)
    shutil.rmtree(folder / extra)


def use(python: Path, folder: Path) -> None:
    """The README's quickstart, the benchmark, and the demo."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    script = folder / "quickstart.py"
    script.write_text(SETUP + "\n".join(blocks), encoding="utf-8")
    run(python, script, folder=folder)
    run(python, "-m", "fdbd", "bench", folder=folder)
    try_demo(python, folder)


def try_demo(python: Path, folder: Path) -> None:
    """Start `fdbd demo`, and have it decide one of its own pictures."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    settings["HOME"] = str(folder)
    command = [str(python), "-m", "fdbd", "demo", "--no-open"]
    print("$", *command, flush=True)
    process = subprocess.Popen(command, cwd=folder, env=settings, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"serving on (http://127\.0\.0\.1:\d+)", line)
            if found:
                decide_example(found[1])
                return
    finally:
        process.terminate()
        process.communicate(timeout=60)
    raise SystemExit("fdbd demo ended by itself:\n" + "".join(said))


def decide_example(address: str) -> None:
    with urllib.request.urlopen(f"{address}/examples/cat.jpg", timeout=60) as answer:
        picture = answer.read()
    request = urllib.request.Request(
        f"{address}/decide", data=picture, headers={"content-type": "image/jpeg"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        decided = json.loads(answer.read())
    if decided["class"] != "cat" or decided["is_ood"]:
        raise SystemExit(f"fdbd demo takes its own cat for something else: {decided}")


if __name__ == "__main__":
    main()
