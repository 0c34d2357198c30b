"""The gallery of scores: every row, the most suspicious first, and nothing that a file's name could
run."""

from __future__ import annotations

import csv
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fdbd.jobs.formats import cell
from fdbd.jobs.scored import read_scored
from fdbd.pages.gallery import read_scores, write_gallery

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

HOSTILE = "</script><img src=x onerror=alert(1)>.png"
ROWS = [
    {
        "path": "b/two.png",
        "label": 1,
        "class": "bee",
        "score": 0.9,
        "p_value": 0.8,
        "is_ood": False,
        "error": None,
    },
    {
        "path": HOSTILE,
        "label": 0,
        "class": "ant",
        "score": 0.1,
        "p_value": 0.01,
        "is_ood": True,
        "error": None,
    },
    {
        "path": "a/cut.png",
        "label": None,
        "class": None,
        "score": None,
        "p_value": None,
        "is_ood": True,
        "error": "cut",
    },
    {
        "path": "a/one.png",
        "label": 0,
        "class": "ant",
        "score": 0.5,
        "p_value": 0.4,
        "is_ood": False,
        "error": None,
    },
]


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "scores.parquet")
    return tmp_path / "scores.parquet"


def data(page: Path) -> dict:
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])


def test_all_rows_are_there_from_the_most_suspicious_one(scores: Path, tmp_path: Path) -> None:
    assert write_gallery(scores, tmp_path / "g.html") == 4
    found = data(tmp_path / "g.html")
    assert found["names"] == ["a/cut.png", HOSTILE, "a/one.png", "b/two.png"]
    assert found["scores"] == [None, 0.1, 0.5, 0.9]
    assert found["errors"] == {"0": "cut"}
    assert [found["classes"][code] for code in found["classes_of"]] == [
        "unread",
        "ant",
        "ant",
        "bee",
    ]


def test_csv_and_parquet_read_the_same(scores: Path, tmp_path: Path) -> None:
    with open(tmp_path / "scores.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        for row in ROWS:
            # A missing value is written as an empty cell.
            writer.writerow({**row, "is_ood": str(row["is_ood"]).lower()})
    assert read_scores(tmp_path / "scores.csv") == read_scores(scores)


@pytest.mark.parametrize("name", ["=sum.png", "'=sum.png", "''quoted.png"])
def test_names_that_look_like_formulas_are_read_as_they_were_scored(
    name: str, tmp_path: Path
) -> None:
    row = {**ROWS[0], "path": name}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "scores.parquet")
    with open(tmp_path / "scores.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(row)
        writer.writerow([cell(value) for value in row.values()])
    for path in (tmp_path / "scores.parquet", tmp_path / "scores.csv"):
        assert [each["name"] for each in read_scores(path)] == [name]
        assert read_scored(path).names == [name]


def test_thumbnails_are_embedded_for_the_most_suspicious_and_linked_for_the_rest(
    scores: Path, tmp_path: Path
) -> None:
    for name in ("a/one.png", "b/two.png"):
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((300, 200, 3), np.uint8)).save(tmp_path / "images" / name)
    write_gallery(scores, tmp_path / "g.html", tmp_path / "images", embedded=3)
    found = data(tmp_path / "g.html")
    assert found["thumbnails"][:2] == [None, None]
    assert found["thumbnails"][2].startswith("data:image/jpeg;base64,")
    assert len(found["thumbnails"]) == 3
    assert found["folder"] == "images"


def test_what_is_not_of_fdbd_score_is_refused_by_name(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"path": ["x"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="no column 'label'"):
        write_gallery(tmp_path / "other.parquet", tmp_path / "g.html")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a readable file of scores"):
        write_gallery(tmp_path / "broken.parquet", tmp_path / "g.html")
    with pytest.raises(FileNotFoundError, match="no scores"):
        write_gallery(tmp_path / "nowhere.csv", tmp_path / "g.html")


class Page:
    """A gallery in a browser, and what it said."""

    def __init__(self, browser, path: Path) -> None:
        self.page = browser.new_page(accept_downloads=True)
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
        self.page.goto(path.as_uri())

    def names(self) -> list[str]:
        return [text.strip() for text in self.page.locator("#list li label").all_text_contents()]


def test_a_person_filters_moves_the_threshold_and_saves_a_selection(
    browser, scores: Path, tmp_path: Path
) -> None:
    write_gallery(scores, tmp_path / "g.html")
    found = Page(browser, tmp_path / "g.html")
    page = found.page
    assert found.names() == ["a/cut.png", HOSTILE, "a/one.png", "b/two.png"]
    assert (
        page.locator("#sides").text_content() == "2 below (out of distribution), 2 at or above it"
    )
    page.locator("#threshold").fill("1000")
    assert page.locator("#sides").text_content().startswith("3 below")
    page.select_option("#class", label="ant")
    assert found.names() == [HOSTILE, "a/one.png"]
    page.click("#all")
    with page.expect_download() as download:
        page.click("#save")
    rows = list(
        csv.DictReader(Path(download.value.path()).read_text(encoding="utf-8").splitlines())
    )
    assert [row["path"] for row in rows] == [HOSTILE, "a/one.png"]
    assert found.said == []


@pytest.mark.slow
def test_a_hundred_thousand_rows_stay_usable(browser, tmp_path: Path) -> None:
    count = 100_000
    values = np.random.default_rng(0).normal(size=count)
    table = pa.table(
        {
            "path": [f"folder/{index:06d}.png" for index in range(count)],
            "label": np.arange(count) % 10,
            "class": [f"class {index % 10}" for index in range(count)],
            "score": values,
            "p_value": values**2,
            "is_ood": values < -1.6,
            "error": pa.nulls(count, pa.string()),
        }
    )
    parquet.write_table(table, tmp_path / "scores.parquet")
    write_gallery(tmp_path / "scores.parquet", tmp_path / "g.html")
    found = Page(browser, tmp_path / "g.html")
    assert len(found.names()) == 120, "one page of cards, whatever the number of rows"
    found.page.fill("#text", "000042")
    assert found.names() == ["folder/000042.png"]
    assert found.said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_core_finds_nothing_amiss_in_the_gallery(
    browser, scores: Path, tmp_path: Path, scheme: str
) -> None:
    axe_core = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python"
    )
    write_gallery(scores, tmp_path / "g.html")
    page = browser.new_page(color_scheme=scheme)
    page.goto((tmp_path / "g.html").as_uri())
    page.select_option("#group", "class")
    found = axe_core.Axe().run(page).response["violations"]
    page.close()
    assert [f"{rule['id']}: {node['html'][:120]}" for rule in found for node in rule["nodes"]] == []


def test_a_person_reviews_with_the_keyboard_and_the_marks_are_kept(
    browser, scores: Path, tmp_path: Path
) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    write_gallery(scores, tmp_path / "g.html")
    found = Page(browser, tmp_path / "g.html")
    page = found.page
    page.locator("#list li").first.focus()
    # Each mark goes on to the next card; u takes one back and stays.
    for key in ("o", "i", "ArrowRight", "w", "u", "w"):
        page.keyboard.press(key)
    expected = {"a/cut.png": "ood", HOSTILE: "id", "b/two.png": "wrong-class"}
    with page.expect_download() as download:
        page.click("#save-review")
    saved = Path(download.value.path()).read_text(encoding="utf-8")
    assert json.loads(saved) == {"version": 1, "reviews": expected}
    assert page.locator("#reviewed").text_content().startswith("3 reviewed: 1 in distribution")
    # The browser keeps what a page stores a moment later, in another process.
    deadline = time.monotonic() + 20
    page.reload()
    while page.locator("#list li[data-review]").count() == 0 and time.monotonic() < deadline:
        page.wait_for_timeout(200)
        page.reload()
    assert page.locator("#list li[data-review]").count() == 3
    page.select_option("#verdict", "unreviewed")
    assert found.names() == ["a/one.png"]
    page.click("#clear-review")
    assert page.locator("#list li").count() == 4
    (tmp_path / "reviews.json").write_text(saved, encoding="utf-8")
    # A chosen file is read in the background: wait for what the page says of it.
    page.set_input_files("#load-review", tmp_path / "reviews.json")
    expect(page.locator("#reviewed")).to_contain_text("3 reviewed")
    page.select_option("#verdict", "reviewed")
    assert len(found.names()) == 3
    (tmp_path / "other.json").write_text('{"reviews": [1]}', encoding="utf-8")
    page.set_input_files("#load-review", tmp_path / "other.json")
    expect(page.locator("#reviewed")).to_contain_text("holds no review")
    assert found.said == []


def test_on_a_touch_screen_the_marks_are_buttons(browser, scores: Path, tmp_path: Path) -> None:
    expect = pytest.importorskip("playwright.sync_api").expect
    write_gallery(scores, tmp_path / "g.html")
    phone = browser.new_context(
        viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True
    )
    page = phone.new_page()
    page.goto((tmp_path / "g.html").as_uri())
    card = page.locator("#list li").first
    card.get_by_role("button", name="out of distribution").tap()
    expect(page.locator("#reviewed")).to_have_text(re.compile("1 reviewed: .*1 out of"))
    card.get_by_role("button", name="wrong class").tap()
    expect(page.locator("#reviewed")).to_have_text(re.compile("1 reviewed: .*1 wrong class"))
    expect(card.locator("[aria-pressed=true]")).to_have_count(1)
    card.get_by_role("button", name="wrong class").tap()
    expect(page.locator("#reviewed")).to_have_text("none reviewed")
    phone.close()
    with_mouse = Page(browser, tmp_path / "g.html").page
    assert with_mouse.locator("#list .marks button").first.is_hidden()


def test_filters_stand_on_one_line_and_nothing_is_wider_than_a_phone(
    browser, scores: Path, tmp_path: Path
) -> None:
    write_gallery(scores, tmp_path / "g.html")
    page = Page(browser, tmp_path / "g.html").page
    boxes = [field.bounding_box() for field in page.locator(".filters :is(select, input)").all()]
    visible = [box for box in boxes if box is not None]
    assert len({box["height"] for box in visible}) == 1
    rows = {}
    for box in visible:
        rows.setdefault(round(box["y"]), []).append(box["x"])
    assert len(rows) <= 2
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_an_unreadable_file_is_named_once_on_its_card(browser, tmp_path: Path) -> None:
    rows = [{**ROWS[2], "error": "a/cut.png: the file ends in the middle of the image"}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "scores.parquet")
    write_gallery(tmp_path / "scores.parquet", tmp_path / "g.html")
    page = Page(browser, tmp_path / "g.html").page
    text = page.locator("#list li").first.text_content()
    assert text.count("cut.png") == 1
    assert "the file ends in the middle of the image" in text
