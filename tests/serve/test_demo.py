"""`fdbd demo` in a real browser: its own pictures are decided as the page says, and so is any other."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import webbrowser
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from fdbd.commands.demo import _open_browser

KNOWN = {"Cat": "cat", "Ship": "ship", "Plane": "airplane", "Car": "automobile"}
STRANGE = ("Galaxies", "Bricks", "Chart")


@pytest.fixture(scope="module")
def address(tmp_path_factory) -> Iterator[str]:
    """The demo as a user starts it, in an empty folder, without a browser of its own."""
    folder = tmp_path_factory.mktemp("empty")
    command = [sys.executable, "-m", "fdbd", "demo", "--no-open"]
    temporary = tmp_path_factory.mktemp("temporary")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"serving on (http://127\.0\.0\.1:\d+)", line)
            if found:
                yield found[1]
                break
        else:
            pytest.fail("the demo said nowhere where it is")
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert list(folder.iterdir()) == []
    assert not list(temporary.glob("fdbd-demo-*")), "the demo's guard is left behind"


def wait_for_width(page, width: int) -> None:
    """Until the picture on the page has this width in pixels."""
    # Not everybody has Playwright, and the `browser` fixture skips then.
    from playwright.sync_api import expect

    # A predicate in JavaScript would be a string to evaluate, which the page's policy forbids.
    expect(page.locator("#picture")).to_have_js_property("naturalWidth", width)


def test_a_newcomer_clicks_the_pictures_and_drops_one_of_their_own(browser, address) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(address)
    page.locator("#demo", has_text="airplane, automobile, bird").wait_for()
    for title, name in KNOWN.items():
        page.get_by_role("button", name=title, exact=True).click()
        page.locator("#answer", has_text=f"In distribution: {name}").wait_for()
    for title in STRANGE:
        page.get_by_role("button", name=title, exact=True).click()
        page.locator("#answer", has_text="Out of distribution").wait_for()
        page.wait_for_function("document.querySelector('#picture').naturalWidth === 192")
        # The next click is answered by its own words, not by those of this one.
        page.get_by_role("button", name="Cat", exact=True).click()
        page.locator("#answer", has_text="In distribution: cat").wait_for()
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    own = {"name": "own.png", "mimeType": "image/png", "buffer": buffer.getvalue()}
    page.set_input_files("input[type=file]", own)
    wait_for_width(page, 64)
    page.locator("#boundaries tbody tr").first.wait_for()
    page.close()


def test_only_the_demos_own_pictures_are_given(browser, address) -> None:
    page = browser.new_page()
    for name in ("cat.jpg", "rocket.jpg"):
        assert page.request.get(f"{address}/examples/{name}").ok
    for name in ("examples.json", "..%2Fpage.html", "none.jpg"):
        assert page.request.get(f"{address}/examples/{name}").status == 404
    page.close()


def test_a_browser_of_the_terminal_is_not_opened(monkeypatch) -> None:
    of_the_terminal = webbrowser.GenericBrowser("lynx")
    monkeypatch.setattr(webbrowser, "get", lambda: of_the_terminal)
    monkeypatch.setattr(of_the_terminal, "open", lambda _: pytest.fail("lynx was started"))
    _open_browser("http://127.0.0.1:1")
