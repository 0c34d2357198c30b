"""Screenshots of the pages that fdbd writes: `python tools/screenshots.py`.

Writes docs/screenshots: the pictures of the documentation and of the README. `--all FOLDER` writes
every page instead, light and dark, 1280 and 390 pixels wide, to be looked at. Needs playwright and
Chromium, and says so if they are missing.
"""

from __future__ import annotations

import argparse
import html
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fdbd import cli
from fdbd.bench import load_bundle

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs" / "screenshots"
EXAMPLES = ROOT / "src/fdbd/serve/assets/examples"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DETECTORS = ["fdbd", "energy", "knn", "vim", "msp", "ash-b+energy"]
WIDTHS = (1280, 390)
SCHEMES = ("light", "dark")


def write_report(folder: Path) -> Path:
    """The report of a short benchmark on the features in the package."""
    results = load_bundle().run(DETECTORS, latency=False, progress=False)
    return results.to_html(folder / "report.html")


def write_pictures(folder: Path) -> None:
    """Digits, colour fields and noise: to fit on, to calibrate on, and to score."""
    from PIL import Image
    from sklearn.datasets import load_digits

    generator = np.random.default_rng(0)
    digits = (load_digits().images[:240] * 15.9).astype(np.uint8)
    for number, digit in enumerate(digits):
        group = ("photos", "fresh", "inbox")[number % 3]
        picture = np.kron(digit, np.ones((4, 4), np.uint8))[..., None].repeat(3, axis=2)
        if group == "inbox" and number % 5 == 0:
            picture = generator.integers(0, 255, (32, 32, 3), np.uint8)
        (folder / group).mkdir(exist_ok=True)
        Image.fromarray(picture).save(folder / group / f"{number:04d}.png")


def write_guard(folder: Path) -> Path:
    guard = folder / "guard.safetensors"
    photos = folder / "photos"
    fresh = folder / "fresh"
    _fdbd("fit", "cifar10-ce", photos, "--calibration", fresh, "--out", guard)
    return guard


def write_gallery(folder: Path, guard: Path) -> Path:
    """The gallery, as the CIFAR-10 network of the package sees the pictures."""
    scores = folder / "scores.csv"
    page = folder / "gallery.html"
    images = folder / "inbox"
    _fdbd("score", guard, images, "--out", scores)
    _fdbd("gallery", scores, "--images", images, "--out", page)
    return page


def write_disagreements(folder: Path, guard: Path) -> Path:
    """Two guards on the same pictures."""
    other = folder / "other.safetensors"
    photos = folder / "photos"
    fresh = folder / "fresh"
    _fdbd(
        *("fit", "cifar10-ce", photos, "--calibration", fresh),
        *("--detector", "msp", "--out", other),
    )
    for name, each in (("old", guard), ("new", other)):
        _fdbd("score", each, folder / "inbox", "--out", folder / f"{name}.parquet")
    page = folder / "disagreements.html"
    _fdbd("compare", folder / "old.parquet", folder / "new.parquet", "--out", page)
    return page


def write_stress(folder: Path, guard: Path) -> Path:
    page = folder / "stress.html"
    _fdbd("stress", guard, folder / "fresh", "--out", page)
    return page


def write_decisions(folder: Path) -> Path:
    """The pictures of the demo, each with the decision of the demo's guard, for the README."""
    import fdbd
    from fdbd.commands.demo import MODEL
    from fdbd.commands.demo import write_guard as write_demo_guard
    from fdbd.core.pixels import decode
    from fdbd.networks.by_name import model_by_name

    named = model_by_name(MODEL, device="cpu")
    assert named.preprocess is not None
    write_demo_guard(folder / "demo.safetensors")
    guard = fdbd.load(folder / "demo.safetensors", named.model)
    cards = []
    for name in ("cat", "ship", "airplane", "car", "galaxies", "bricks", "chart", "rocket"):
        path = EXAMPLES / f"{name}.jpg"
        decision = guard(named.preprocess(named.preprocess.fit(decode(path))[None]))
        label = named.class_names[int(decision.labels[0])]
        is_ood = bool(decision.is_ood[0])
        verdict = "unknown" if is_ood else html.escape(label)
        kind = "out" if is_ood else "in"
        p_value = float(decision.p_values[0])
        model = f"model: {html.escape(label)}<br>p = {p_value:.3f}"
        cards.append(
            f'<figure><img src="{path.as_uri()}" alt=""><figcaption><b class="{kind}">{verdict}</b>'
            f"<br>{model}</figcaption></figure>"
        )
    page = folder / "decisions.html"
    page.write_text(DECISIONS.replace("CARDS", "\n".join(cards)), encoding="utf-8")
    return page


DECISIONS = """<!doctype html><meta charset="utf-8"><title>Decisions</title><style>
body { margin: 0; padding: 16px; font: 15px/1.4 system-ui, sans-serif; background: #fff; color: #1b1f24; }
main { display: grid; grid-template-columns: repeat(8, 1fr); gap: 12px; }
figure { margin: 0; } img { width: 100%; aspect-ratio: 1; border-radius: 6px; display: block; }
figcaption { margin-top: 6px; font-size: 12.5px; color: #57606a; } b { font-size: 15px; }
.in { color: #0b6b3a; } .out { color: #b3261e; }
</style><main>CARDS</main>"""


@contextmanager
def demo(folder: Path) -> Iterator[str]:
    """The address of a running `fdbd demo`."""
    log = folder / "demo.log"
    with log.open("w") as file:
        command = [sys.executable, "-m", "fdbd", "demo", "--no-open"]
        process = subprocess.Popen(command, stderr=file)
    try:
        found = None
        while found is None:
            if process.poll() is not None:
                raise RuntimeError(f"the demo did not start: {log.read_text()}")
            found = re.search(r"serving on (http://127\.0\.0\.1:\d+)", log.read_text())
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(timeout=60)


def _fdbd(*arguments: object) -> None:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        if end.code:
            raise


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser, or the end of this program with a reason."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("no screenshots: they need the Python package playwright")
    found = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if found is None:
        sys.exit("no screenshots: they need Chromium or Chrome on the path")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


def click_example(view: Any, title: str = "Cat") -> None:
    """Have the demo decide one of its pictures."""
    view.get_by_role("button", name=title, exact=True).click()
    view.locator("#boundaries tbody tr").first.wait_for()
    view.wait_for_function("document.querySelector('#picture').naturalWidth > 0")


def photograph(
    browser: Any,
    address: str,
    path: Path,
    *,
    width: int = 1100,
    height: int = 800,
    scheme: str = "light",
    whole: bool = False,
) -> None:
    """One screenshot of a page, once it is quiet."""
    view = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    view.goto(address)
    view.wait_for_timeout(500)
    if view.locator("#example-buttons").count():
        click_example(view)
    view.screenshot(path=path, full_page=whole)
    view.close()


def for_documentation(browser: Any, folder: Path, out: Path) -> None:
    """The pictures of docs/screenshots."""
    out.mkdir(exist_ok=True)
    write_pictures(folder)
    guard = write_guard(folder)
    photograph(browser, write_report(folder).as_uri(), out / "report.png")
    # High enough for the first cards.
    gallery = write_gallery(folder, guard).as_uri()
    photograph(browser, gallery, out / "gallery.png", height=1300)
    photograph(
        browser, write_decisions(folder).as_uri(), out / "decisions.png", width=1200, height=240
    )
    with demo(folder) as address:
        photograph(browser, address, out / "demo.png")


def for_looking(browser: Any, folder: Path, out: Path) -> None:
    """Every page, light and dark, wide and narrow."""
    out.mkdir(exist_ok=True)
    write_pictures(folder)
    guard = write_guard(folder)
    pages = {
        "report": write_report(folder).as_uri(),
        "gallery": write_gallery(folder, guard).as_uri(),
        "disagreements": write_disagreements(folder, guard).as_uri(),
        "stress": write_stress(folder, guard).as_uri(),
    }
    with demo(folder) as address:
        for name, page in {**pages, "demo": address, "interface": f"{address}/docs"}.items():
            for width in WIDTHS:
                for scheme in SCHEMES:
                    path = out / f"{name}-{width}-{scheme}.png"
                    photograph(browser, page, path, width=width, scheme=scheme, whole=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="every page, to be looked at")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        if options.all is None:
            for_documentation(browser, Path(folder), OUT)
        else:
            for_looking(browser, Path(folder), options.all)


if __name__ == "__main__":
    main()
