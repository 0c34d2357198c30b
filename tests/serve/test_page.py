"""The service's pages in a real browser: an image is dropped and decided; axe-core finds nothing to
complain about."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

axe_core = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
)


@pytest.fixture(scope="module")
def address(images, serving) -> str:
    return serving(images)


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


def open_page(
    browser: Any, address: str, scheme: str, width: int, path: str = "/"
) -> tuple[Any, list[str]]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "request",
        lambda r: said.append(r.url) if not r.url.startswith((address, "data:", "blob:")) else None,
    )
    page.goto(address + path)
    return page, said


def violations(page: Any) -> list[str]:
    found = axe_core.Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_dropped_image_is_decided_on_screen_and_nothing_is_amiss(
    browser, address, images, scheme, width
) -> None:
    page, said = open_page(browser, address, scheme, width)
    image = png(width)
    page.evaluate(
        """bytes => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], "image.png", {type: "image/png"}));
            const drop = new DragEvent("drop", {dataTransfer: transfer, bubbles: true});
            document.getElementById("drop").dispatchEvent(drop);
        }""",
        list(image),
    )
    answers = images.decide(images.prepare(image)[None])
    expected = images.class_names[int(answers.labels[0])]
    page.locator("#answer", has_text=expected).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width, (
        "nothing is wider than the screen"
    )
    assert violations(page) == []
    assert said == []
    page.close()


def test_a_file_that_is_no_image_is_refused_in_words(browser, address) -> None:
    page, _ = open_page(browser, address, "light", 800)
    page.set_input_files(
        "input[type=file]", {"name": "a.png", "mimeType": "image/png", "buffer": b"no image"}
    )
    page.locator("#answer", has_text="image").wait_for()
    assert violations(page) == []
    page.close()


def test_the_interface_page_is_accessible(browser, address) -> None:
    page, said = open_page(browser, address, "light", 1280, "/docs")
    page.wait_for_load_state("networkidle")
    assert violations(page) == []
    assert said == []
    page.close()
