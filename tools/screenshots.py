"""Screenshots of the report and the gallery for the documentation: `python tools/screenshots.py`.

Writes docs/screenshots/report.png and gallery.png. Needs playwright and Chromium, and says so if
they are missing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from fdbd import cli
from fdbd.bench import load_bundle

OUT = Path(__file__).parents[1] / "docs" / "screenshots"
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
DETECTORS = ["fdbd", "energy", "knn", "vim", "msp", "ash-b+energy"]


def write_report(folder: Path) -> Path:
    """The report of a short benchmark on the features in the package."""
    return (
        load_bundle().run(DETECTORS, latency=False, progress=False).to_html(folder / "report.html")
    )


def write_gallery(folder: Path) -> Path:
    """The gallery of digits, colour fields and noise, as the CIFAR-10 network of the package sees
    them."""
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
    guard, scores, page = (
        folder / "guard.safetensors",
        folder / "scores.csv",
        folder / "gallery.html",
    )
    images = folder / "inbox"
    _fdbd("fit", "cifar10-ce", folder / "photos", "--calibration", folder / "fresh", "--out", guard)
    _fdbd("score", guard, images, "--out", scores)
    _fdbd("gallery", scores, "--images", images, "--out", page)
    return page


def _fdbd(*arguments: object) -> None:
    try:
        cli.main([str(argument) for argument in arguments])
    except SystemExit as end:
        if end.code:
            raise


def main() -> None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("no screenshots: they need the Python package playwright")
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if chromium is None:
        sys.exit("no screenshots: they need Chromium or Chrome on the path")
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, page in (
            ("report", write_report(Path(folder))),
            ("gallery", write_gallery(Path(folder))),
        ):
            view = browser.new_page(viewport={"width": 1100, "height": 800})
            view.goto(page.as_uri())
            view.wait_for_timeout(500)
            view.screenshot(path=OUT / f"{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
