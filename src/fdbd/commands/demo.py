"""fdbd demo: a guarded model to throw pictures at, from the package alone."""

from __future__ import annotations

import signal
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Any

from fdbd.commands.options import opt

MODEL = "cifar10-ce"
ALPHA = 0.05


def demo(
    port: int = opt(0, "The port to listen on; 0: any free one."),
    no_open: bool = opt(False, "Only say where the page is, and open no browser.", "--no-open"),
) -> None:
    """Open a page with a guarded model that you can throw pictures at. It uses the service, and
    needs nothing but this package.

    The model knows the ten classes of CIFAR-10. Its guard, fDBD, is fitted and calibrated on
    features that come with the package.

    Example: `fdbd demo`
    """
    from fdbd.serve.run import Service, run
    from fdbd.serve.settings import Settings

    # The server ends in order at SIGTERM and then passes it on: the folder would be left behind.
    signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="fdbd-demo-") as folder:
        guard = Path(folder) / "demo.safetensors"
        write_guard(guard)
        service = Service({"demo": str(guard)}, Settings(examples=True), device="cpu")
        run(service, "127.0.0.1", port, when_up=None if no_open else _open_browser)


def write_guard(path: Path) -> None:
    """Fit fDBD on training features of the zoo's model, and calibrate it on features of images that
    neither the network nor the fit has seen."""
    from fdbd.bench.bundle import load_bundle
    from fdbd.core.batch import Batch
    from fdbd.decision.guard import Guard
    from fdbd.networks.by_name import model_by_name

    bundle = load_bundle(MODEL)
    named = model_by_name(MODEL, device="cpu")
    assert bundle.validation is not None
    assert named.preprocess is not None
    guard = Guard(named.model, "fdbd")
    guard.fit(Batch(bundle.train.features.float(), labels=bundle.train.labels), progress=False)
    guard.calibrate(Batch(bundle.validation.features.float()), alpha=ALPHA, progress=False)
    guard.about["model"] = named.origin
    guard.about["preprocess"] = named.preprocess.to_dict()
    guard.about["class_names"] = list(named.class_names)
    guard.save(path)


def _exit(*_: Any) -> None:
    sys.exit(0)


def _open_browser(address: str) -> None:
    """Show an address in the user's browser, if there is one with a window of its own."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return
    # A browser of the terminal (lynx, w3m) would take the terminal over, and run no script.
    if type(browser) is not webbrowser.GenericBrowser:
        browser.open(address)
