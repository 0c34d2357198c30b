"""Tables of the choice and of the stress card in a real browser: whole on a screen, and on a phone
their edge says that they go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fdbd
from fdbd.decision.stress import Share, StressCard, Stressed
from fdbd.pages.choosing import write_choice
from fdbd.pages.stress import write_stress


def stress_page(folder: Path) -> Path:
    picture = np.zeros((8, 12, 3), np.uint8)
    share = Share.from_flags(np.arange(10) < 3)
    corruptions = []
    for number in range(30):
        for severity in range(1, 6):
            name = f"corruption {number}"
            corruptions.append(Stressed(name, severity, share, 0.2, 0.1, picture))
    card = StressCard(
        guard_id="0123456789abcdef",
        detector="fdbd",
        data="fresh",
        expected=0.05,
        guarantee="Flags at most 0.05.",
        clean=share,
        clean_picture=picture,
        kinds=tuple(Stressed(name, None, share, 0.2, 0.1, picture) for name in ("tiles", "noise")),
        corruptions=tuple(corruptions),
        errors=(),
    )
    write_stress(card, folder / "stress.html", "guard.safetensors")
    return folder / "stress.html"


def choice_page(folder: Path) -> Path:
    torch.manual_seed(0)
    head = fdbd.Head(torch.randn(4, 8))
    train = fdbd.Batch(torch.randn(200, 8))
    held_out = fdbd.Batch(torch.randn(60, 8))
    kinds = {f"kind {number}": fdbd.Batch(torch.randn(60, 8) + number) for number in range(10)}
    auto = fdbd.Auto(kinds=kinds, pool=("fdbd", "energy", "msp", "knn"))
    advice = fdbd.choose(head, [train], [held_out], auto=auto)
    write_choice(advice, folder / "choice.html", "features")
    return folder / "choice.html"


@pytest.mark.parametrize("write", [stress_page, choice_page])
def test_no_row_is_cut_in_two_and_a_wide_table_says_that_it_goes_on(
    browser, tmp_path: Path, write
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    page = browser.new_page(viewport={"width": 1280, "height": 700})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(write(tmp_path).as_uri())
    for box in page.locator(".scroller").all():
        assert box.evaluate("node => node.scrollHeight <= node.clientHeight")
    page.set_viewport_size({"width": 300, "height": 700})
    table = page.locator(".scroller").first
    expect(table).to_contain_class("more")
    table.evaluate("node => { node.scrollLeft = node.scrollWidth; }")
    expect(table).not_to_contain_class("more")
    assert page.evaluate("document.documentElement.scrollWidth") <= 300
    assert said == []
    page.close()
