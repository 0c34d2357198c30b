"""The service's pages in a real browser: an image is dropped and decided; axe-core finds nothing to
complain about."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the Python package playwright")
axe_core = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
)
expect = sync_api.expect


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
    expect(page.locator("#guard")).to_contain_text("version")
    assert page.locator("img").count() == page.locator("#samples img").count(), "no broken icon"
    choose = {"name": "a.png", "mimeType": "image/png"}
    page.set_input_files("input[type=file]", {**choose, "buffer": png(3)})
    page.locator("#boundaries tbody tr").first.wait_for()
    expect(page.locator("#place .here")).to_have_count(1)
    page.set_input_files("input[type=file]", {**choose, "buffer": b"no image"})
    page.locator("#answer", has_text="Refused").wait_for()
    expect(page.locator("#shown img")).to_have_count(0)
    expect(page.locator("#boundaries tbody tr")).to_have_count(0)
    expect(page.locator("#place .here")).to_have_count(0)
    assert not [line for line in said if "400" not in line]
    page.close()


def score_of(images, image: bytes) -> re.Pattern[str]:
    """How the page shows the score of an image: its first digits."""
    score = float(images.decide(images.prepare(image)[None]).scores[0])
    digits = f"{score:.4g}"[:-1]
    return re.compile(f"Score {re.escape(digits)}")


def test_an_answer_that_comes_before_the_status_is_shown(browser, address, images) -> None:
    page = browser.new_page()
    held: list[Any] = []
    page.route("**/status*", lambda route: held.append(route))
    with page.expect_request("**/status*"):
        page.goto(address)
    choose = {"name": "a.png", "mimeType": "image/png", "buffer": png(3)}
    page.set_input_files("input[type=file]", choose)
    expect(page.locator("#answer")).to_contain_text(score_of(images, png(3)))
    expect(page.locator("#place .here")).to_have_count(0)
    for route in list(held):
        route.continue_()
    expect(page.locator("#place .here")).to_have_count(1)
    page.close()


def test_a_late_answer_to_an_earlier_image_does_not_replace_a_newer_one(
    browser, address, images
) -> None:
    page, said = open_page(browser, address, "light", 1280)
    held: list[Any] = []
    page.route("**/decide*", lambda route: held.append(route), times=1)
    choose = {"name": "a.png", "mimeType": "image/png"}
    with page.expect_request("**/decide*"):
        page.set_input_files("input[type=file]", {**choose, "buffer": png(3)})
    page.set_input_files("input[type=file]", {**choose, "buffer": png(4)})
    newer = score_of(images, png(4))
    expect(page.locator("#answer")).to_contain_text(newer)
    with page.expect_response("**/decide*") as late:
        held[0].continue_()
    late.value.finished()
    # What the page makes of the answer comes before this.
    page.evaluate("new Promise((done) => setTimeout(done, 50))")
    expect(page.locator("#answer")).to_contain_text(newer)
    assert said == []
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
    expect(page.locator("#drift-chart .level")).to_have_text("alarm")
    expect(page.locator("#drift-about")).to_contain_text("The alarm went off")
    assert violations(page) == []
    page.fill("#note", "the camera was turned")
    page.click("#acknowledge button")
    page.locator("#drift", has_text="No alarm").wait_for()
    expect(page.locator("#drift-about")).to_contain_text("the camera was turned")
    page.close()


def test_the_interface_page_is_accessible(browser, address) -> None:
    page, said = open_page(browser, address, "light", 1280, "/docs")
    page.get_by_text("/decide").first.wait_for()
    assert violations(page) == []
    assert said == []
    page.close()
