"""The page in a real browser: it draws, sorts and selects, says nothing on the console, and sends
nothing."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fdbd.bench import Results
from fdbd.bench.build import benchmark_of
from fdbd.bench.bundle import load_bundle
from fdbd.bench.cache import FeatureCache
from fdbd.bench.config import Config
from fdbd.data.datasets import info


@pytest.fixture(scope="module")
def path(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results.to_html(tmp_path_factory.mktemp("report") / "report.html")


class Watched:
    """A page, what it said, and what it asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", self._dismiss)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def order(self) -> list[str]:
        found: list[str] = self.page.locator("#results .pick").all_text_contents()
        return found

    def column(self, number: int) -> list[float]:
        """Visible numbers of a metric's column, from the top; the first after the names is 1."""
        cells = self.page.locator(f"#results tbody tr td:nth-child({number + 1}) .v:visible").all()
        return [float(cell.evaluate("node => node.firstChild.textContent")) for cell in cells]

    def _dismiss(self, dialog: Any) -> None:
        self.said.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def drawn(self, selector: str) -> str:
        found: str = self.page.locator(selector).inner_html()
        return found


@pytest.fixture
def watched(browser: Any, path: Path) -> Iterator[Watched]:
    found = Watched(browser, path)
    yield found
    found.context.close()
    assert found.said == []
    assert all(url.startswith(("file:", "data:")) for url in found.requests)


def test_a_heading_sorts_best_first_and_a_second_click_turns_the_order(
    watched: Watched, results: Results
) -> None:
    assert watched.order() == [row.name for row in results.ranked()]
    heading = watched.page.locator("#results thead th").nth(4)
    heading.locator("button").click()
    once = watched.column(4)
    assert once == sorted(once, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.locator("button").click()
    assert watched.column(4) == once[::-1]
    assert heading.get_attribute("aria-sort") == "ascending"
    assert watched.page.locator("#results thead th[aria-sort]").count() == 1


def test_sorting_works_from_the_keyboard_and_by_name(watched: Watched) -> None:
    watched.page.locator("#results thead button").first.focus()
    watched.page.keyboard.press("Enter")
    assert watched.order() == sorted(watched.order(), key=str.lower)
    before = watched.order()
    watched.page.keyboard.press("Enter")
    assert watched.order() == before[::-1]


def test_choosing_fpr_shows_it_lowest_first(watched: Watched, results: Results) -> None:
    watched.page.locator("input[value=fpr95] + span").click()
    column = watched.column(1)
    assert column == sorted(column)
    best = results.ranked("average", "fpr95")[0]
    assert column[0] == pytest.approx(100 * results.value(best, "average", "fpr95"), abs=0.006)


def test_intervals_show_on_hover_and_all_at_once(watched: Watched) -> None:
    cell = watched.page.locator("#results td .v.auroc").first
    interval = cell.locator("small").text_content()
    assert not cell.locator("small").is_visible()
    cell.hover()
    assert watched.page.locator("#tip").text_content() == f"95 % interval {interval}"
    watched.page.locator("#intervals").check()
    assert cell.locator("small").is_visible()


def test_selecting_a_detector_redraws_every_figure_that_shows_it(watched: Watched) -> None:
    assert watched.page.locator("#histograms figure").count() == 3
    before = {box: watched.drawn(box) for box in ("#histograms", "#roc-chart", "#latency-chart")}
    watched.page.locator("#scores select.detector").select_option(index=3)
    for box, drawing in before.items():
        assert watched.drawn(box) != drawing
    assert watched.page.locator("#roc select.detector").input_value() == "3"
    watched.page.locator("#results .pick").nth(5).click()
    assert watched.page.locator("#scores select.detector").input_value() == "5"
    assert watched.page.locator("#results tr.selected .pick").all_text_contents() == [
        watched.order()[5]
    ]


@pytest.mark.parametrize(
    ("choice", "box"),
    [
        ("#roc-set", "#roc-chart"),
        ("#deviation-set", "#deviation-chart"),
        ("#samples-set", "#sample-cards"),
        ("#latency-column", "#latency-chart"),
        ("#latency-batch", "#latency-chart"),
    ],
)
def test_choices_redraw_their_figure(watched: Watched, choice: str, box: str) -> None:
    before = watched.drawn(box)
    watched.page.locator(choice).select_option(index=0 if choice == "#latency-batch" else 1)
    assert watched.drawn(box) != before


def test_the_percentile_scale_redraws_the_histograms(watched: Watched) -> None:
    before = watched.drawn("#histograms")
    watched.page.locator("input[value=rank] + span").click()
    assert watched.drawn("#histograms") != before


def test_the_front_holds_those_that_none_is_faster_and_better_than(
    watched: Watched, results: Results
) -> None:
    points = [
        (row.latencies[-1].median, float(results.value(row, "average", "auroc")))
        for row in results.finished
    ]

    def is_beaten(point: tuple[float, float]) -> bool:
        time, auroc = point
        return any(other[0] <= time and other[1] >= auroc for other in points if other != point)

    best = [point for point in points if not is_beaten(point)]
    # Equal values in the data's five digits count once.
    assert watched.page.locator("#latency-chart .front").count() in (len(best), len(best) - 1)


def test_hovering_over_figures_shows_names_as_text(watched: Watched, hostile: str) -> None:
    for box in (
        "#histograms figure:nth-child(3) svg",
        "#roc-chart svg",
        "#deviation-chart svg",
        "#latency-chart svg",
    ):
        node = watched.page.locator(box)
        node.scroll_into_view_if_needed()
        frame = node.bounding_box()
        for step in range(1, 12):
            watched.page.mouse.move(
                frame["x"] + frame["width"] * step / 12, frame["y"] + frame["height"] * step / 12
            )
    assert watched.page.locator("img").count() == 0
    watched.page.locator("#histograms figure:nth-child(3) svg").hover()
    shown = watched.page.locator("#tip").text_content()
    assert hostile in shown


def test_the_theme_follows_the_system_and_the_button(browser: Any, path: Path) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        watched = Watched(browser, path, scheme=scheme)
        background = "getComputedStyle(document.body).backgroundColor"
        colors[scheme] = watched.page.evaluate(background)
        watched.page.locator("#theme").click()
        colors[f"not {scheme}"] = watched.page.evaluate(background)
        watched.context.close()
        assert watched.said == []
    assert colors["light"] != colors["dark"]
    assert colors["not light"] == colors["dark"]
    assert colors["not dark"] == colors["light"]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_as_wide_as_the_screen_and_the_table_scrolls_inside_its_box(
    browser: Any, path: Path, width: int
) -> None:
    watched = Watched(browser, path, width)
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= width
    box = watched.page.locator(".scroller")
    box.evaluate("node => { node.scrollLeft = 200; }")
    left = watched.page.locator("#results tbody th").first.bounding_box()["x"]
    assert abs(left - box.bounding_box()["x"]) < 2
    for chart in watched.page.locator("svg.plot").all():
        frame = chart.bounding_box()
        assert frame["x"] >= 0
        assert frame["x"] + frame["width"] <= width
    watched.page.set_viewport_size({"width": 700, "height": 900})
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 700
    watched.context.close()
    assert watched.said == []


def test_a_page_without_figures_or_detectors_draws_what_there_is(
    browser: Any, results: Results, tmp_path: Path
) -> None:
    bare = Results(results.setting, results.rows)
    broken = Results(results.setting, results.rows, {"deviation": {"error": "why <b>not</b>"}})
    nothing = Results(results.setting, results.failures)
    for name, case, sections in (("bare", bare, 7), ("broken", broken, 8), ("nothing", nothing, 3)):
        watched = Watched(browser, case.to_html(tmp_path / f"{name}.html"))
        assert watched.page.locator("main > section").count() == sections, name
        if name == "broken":
            assert (
                watched.page.locator("#deviation")
                .text_content()
                .count("Not drawn: why <b>not</b>.")
                == 1
            )
        watched.context.close()
        assert watched.said == []


@pytest.mark.slow
def test_at_1280_pixels_no_column_of_the_packages_benchmark_is_cut_off(
    browser: Any, tmp_path: Path
) -> None:
    results = load_bundle("cifar10-ce").run(["fdbd", "react+energy", "knn"], progress=False)
    watched = Watched(browser, results.to_html(tmp_path / "report.html"))
    page = watched.page
    assert (
        page.evaluate("(s => s.scrollWidth - s.clientWidth)(document.querySelector('.scroller'))")
        <= 0
    )
    assert "automobile" in page.locator("#sample-cards").inner_text()
    assert page.locator(".cite").first.inner_text().startswith("[")
    phone = Watched(browser, tmp_path / "report.html", width=390).page
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    assert phone.evaluate("document.querySelector('.scroller').classList.contains('more')")


def test_a_benchmark_over_image_files_shows_the_right_ones_with_their_classes(
    browser: Any, tmp_path: Path
) -> None:
    colours: dict[str, tuple[int, ...]] = {}
    generator = np.random.default_rng(0)
    for folder, count in (("train", 3), ("inside", 3), ("outside", 1)):
        for label, name in enumerate(info("cifar10").classes):
            if folder == "outside":
                name = "stripes"
            place = tmp_path / folder / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                colour = tuple(generator.integers(0, 256, 3).tolist())
                file = f"{label}-{number}.png"
                Image.new("RGB", (40, 40), colour).save(place / file)
                if folder != "train":
                    colours[f"{name}/{file}"] = colour
    # Rows after it must not shift.
    (tmp_path / "outside" / "stripes" / "0-broken.png").write_bytes(b"no image")
    train, inside, outside = (str(tmp_path / name) for name in ("train", "inside", "outside"))
    config = Config("cifar10-ce", id=inside, ood={"outside": outside}, train=train, batch_size=10)
    benchmark = benchmark_of(config, FeatureCache(tmp_path / "cache"), lambda line: None)
    results = benchmark.run(["fdbd"], latency=False, progress=False)
    shown = []
    for entry in results.figures["samples"]["sets"]:
        shown += entry["samples"]
    assert len(shown) == 6
    for sample in shown:
        pixels = Image.open(io.BytesIO(base64.b64decode(sample["image"].partition(",")[2])))
        np.testing.assert_allclose(pixels.getpixel((5, 5)), colours[sample["file"]], atol=6)

    again = Results.from_json(results.to_json(tmp_path / "results.json"))
    watched = Watched(browser, again.to_html(tmp_path / "report.html"), width=390)
    pictures = watched.page.locator("#sample-cards img")
    assert pictures.count() == 6
    assert min(pictures.evaluate_all("all => all.map(image => image.naturalWidth)")) == 40
    text = watched.page.locator("#sample-cards").inner_text()
    assert all(sample["file"] in text for sample in shown)
    assert benchmark.class_names[shown[0]["predicted"]] in text
    assert not watched.page.locator("#samples-remark").is_visible()
    assert watched.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert watched.said == []
    watched.context.close()


def test_a_report_on_features_alone_says_why_it_has_no_pictures(watched: Watched) -> None:
    assert watched.page.locator("#sample-cards img").count() == 0
    assert "terms do not allow it" in watched.page.locator("#samples-remark").inner_text()


def test_results_from_a_file_without_scores_have_a_page_without_their_figures(
    browser: Any, tmp_path: Path
) -> None:
    old = Path(__file__).parents[2] / "artifacts" / "0.1.0" / "results.json"
    watched = Watched(browser, Results.from_json(old).to_html(tmp_path / "report.html"))
    assert watched.said == []
    assert watched.page.locator("#roc").count() == 0
    assert len(watched.order()) > 1
