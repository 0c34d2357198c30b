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


def test_nothing_of_an_earlier_image_stays_when_a_file_is_refused(browser, address) -> None:
    page, said = open_page(browser, address, "light", 1280)
    page.wait_for_load_state("networkidle")
    assert page.locator("img").count() == page.locator("#samples img").count(), "no broken icon"
    choose = {"name": "a.png", "mimeType": "image/png"}
    page.set_input_files("input[type=file]", {**choose, "buffer": png(3)})
    page.locator("#boundaries tbody tr").first.wait_for()
    assert page.locator("#place .here").count() == 1
    page.set_input_files("input[type=file]", {**choose, "buffer": b"no image"})
    page.locator("#answer", has_text="Refused").wait_for()
    page.wait_for_function("document.querySelectorAll('#shown img').length === 0")
    assert page.locator("#boundaries tbody tr").count() == 0
    assert page.locator("#place .here").count() == 0
    assert not [line for line in said if "400" not in line]
    page.close()


@pytest.mark.filterwarnings("ignore:this batch lies outside of the inputs of the fit:UserWarning")
def test_an_alarm_is_explained_and_acknowledged_by_the_button(browser, images, serving) -> None:
    url = serving(images)
    page, _ = open_page(browser, url, "dark", 1280)
    width = images.row_shape[-1]
    for value in (9.0, 5.0, 8.0, 6.0):
        tensor = np.full((64, 3, width, width), value, np.float32)
        tensor += np.random.default_rng(0).normal(size=tensor.shape).astype(np.float32)
        body = {"name": "images", "shape": list(tensor.shape), "datatype": "FP32"}
        body["data"] = tensor.ravel().tolist()
        answer = page.request.post(f"{url}/v2/models/guard/infer", data={"inputs": [body]})
        assert answer.ok, answer.text()
    page.locator("#drift", has_text="ALARM").wait_for(timeout=20_000)
    assert page.locator("#drift-chart .level").text_content() == "alarm"
    assert page.locator("#drift-about", has_text="The alarm went off").count() == 1
    assert violations(page) == []
    page.fill("#note", "the camera was turned")
    page.click("#acknowledge button")
    page.locator("#drift", has_text="No alarm").wait_for()
    assert page.locator("#drift-about", has_text="the camera was turned").count() == 1
    page.close()


def test_the_interface_page_is_accessible(browser, address) -> None:
    page, said = open_page(browser, address, "light", 1280, "/docs")
    page.wait_for_load_state("networkidle")
    assert violations(page) == []
    assert said == []
    page.close()
