"""The page as text: whole, self-contained, and safe whatever the names are."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fdbd.bench import Results
from fdbd.bench.figures import accepting_score, bin_counts
from fdbd.bench.measures import METRICS
from fdbd.bench.page import html
from fdbd.bench.rows import Row
from fdbd.bench.runner import Benchmark
from fdbd.detectors import FDBD, MSP, Deviation
from fdbd.metrics import as_percent
from fdbd.util.pages import score_range

VOID = {"meta", "input", "br", "img", "hr", "link"}


class Page(HTMLParser):
    """Elements with their attributes and the text inside them; complains about tags that do not
    match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
            self.text.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.text[tag][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text["script"][0])
        return found


@pytest.fixture(scope="module")
def text(results: Results) -> str:
    return html(results)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_every_detector_appears_in_the_table_and_in_the_data(results: Results, page: Page) -> None:
    finished = [row.name for row in results.ranked()]
    assert len(finished) == 7
    assert [detector["name"] for detector in page.data["detectors"]] == finished
    picks = [attributes for attributes in page.all("button") if attributes.get("class") == "pick"]
    assert len(picks) == len(finished)
    for name in finished:
        assert any(cell.startswith(name) for cell in page.text["th"])


def test_cells_hold_every_metric_with_its_interval(results: Results, text: str) -> None:
    for row in results.finished:
        for column in [*results.setting.ood, *results.groups]:
            for metric in METRICS:
                value = results.value(row, column, metric)
                assert f">{as_percent(value)}<" in text
                assert f"<small>{as_percent(value.low)}–{as_percent(value.high)}</small>" in text


def test_the_best_is_marked_once_a_column_and_metric(results: Results, text: str) -> None:
    columns = len(results.setting.ood) + len(results.groups)
    for metric in METRICS:
        assert len(re.findall(rf'class="v {metric} best"', text)) == columns


def test_nothing_is_loaded_from_anywhere(page: Page) -> None:
    for tag, attributes in page.elements:
        assert tag not in {
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "video",
            "audio",
            "source",
        }
        assert "src" not in attributes
        assert "srcset" not in attributes
        href = attributes.get("href")
        assert href is None or href.startswith("#")
        assert not any(name.startswith("on") for name in attributes)
    style = page.text["style"][0]
    assert "@import" not in style
    assert "url(" not in style


def test_links_inside_the_page_lead_somewhere(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {href[1:] for a in page.all("a") if (href := a.get("href"))} <= set(ids)


def test_only_the_pages_own_script_may_run(page: Page) -> None:
    assert [attributes.get("type") for attributes in page.all("script")] == [
        "application/json",
        None,
    ]
    digest = base64.b64encode(hashlib.sha256(page.text["script"][1].encode()).digest()).decode()
    policy = next(
        meta["content"]
        for meta in page.all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_hostile_names_stay_text(page: Page, text: str, hostile: str) -> None:
    assert "<img" not in text
    assert "\u2028" not in page.text["script"][0]
    assert page.text["h1"] == [f"A test {hostile}"]
    # A dataset's name.
    assert any(hostile in cell for cell in page.text["th"])
    # Notes, papers, errors.
    assert any(hostile in item for item in page.text["li"])
    assert page.data["ood"][2] == hostile
    assert not page.all("i")
    assert page.text["b"].count("here") == 0


def test_failures_are_told_with_their_reason(page: Page) -> None:
    assert any("cannot be fitted <b>here</b>" in item for item in page.text["li"])
    assert page.text["summary"] == ["1 could not run"]


def test_papers_are_listed_once_and_referred_to(results: Results, page: Page) -> None:
    papers = {str(row.paper) for row in results.finished}
    listed = [
        attributes
        for attributes in page.all("li")
        if (attributes.get("id") or "").startswith("paper-")
    ]
    assert len(listed) == len(papers)
    # A shaped detector cites its shaping.
    assert any("ReAct" in item for item in page.text["li"])


def test_histograms_count_every_sample(results: Results, page: Page) -> None:
    for detector in page.data["detectors"]:
        row = results.row(detector["name"])
        assert sum(detector["id"]) == len(row.id_scores)
        for counts, ranks, scores in zip(
            detector["ood"], detector["ranks"], row.ood_scores.values()
        ):
            assert sum(counts) == len(scores)
            assert sum(ranks) == pytest.approx(10_000, abs=40)


def test_the_area_under_a_drawn_curve_is_the_auroc(page: Page) -> None:
    for detector in page.data["detectors"]:
        for name, flat in zip(page.data["ood"], detector["roc"]):
            fpr, tpr = np.array(flat).reshape(-1, 2).T / 1000
            area = float(np.sum(np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2))
            assert area == pytest.approx(detector["auroc"][name], abs=0.004)


def test_ranks_of_ood_samples_are_counted_below_the_id_samples_they_trail(
    results: Results, page: Page
) -> None:
    detector = next(d for d in page.data["detectors"] if d["name"] == "fdbd")
    row = results.row("fdbd")
    inside = row.id_scores.tolist()
    for ranks, scores in zip(detector["ranks"], row.ood_scores.values()):
        share = [sum(i < s for i in inside) / len(inside) for s in scores.tolist()]
        below_half = sum(value < 0.5 for value in share) / len(share)
        assert sum(ranks[:20]) / 10_000 == pytest.approx(below_half, abs=0.02)


@pytest.mark.parametrize("positive", ["id", "ood"])
def test_thresholds_are_those_of_fpr95(build: Callable[..., Benchmark], positive: str) -> None:
    results = build(("one", "two"), positive=positive).run(
        [FDBD(), MSP()], latency=False, progress=False
    )
    page = Page(html(results))
    for detector in page.data["detectors"]:
        row = results.row(detector["name"])
        for name, threshold in zip(page.data["ood"], detector["thresholds"]):
            # seven digits are kept, so a sample at the very threshold may fall on either side of it
            inside = row.id_scores.double()
            outside = row.ood_scores[name].double()
            rate = (
                (outside >= threshold).double().mean()
                if positive == "id"
                else (inside <= threshold).double().mean()
            )
            assert float(rate) == pytest.approx(float(row.evaluations[name].fpr95), abs=0.01)
    shown = "OOD samples accepted" if positive == "id" else "ID samples flagged"
    assert any(shown in line for line in page.text["li"])


def test_the_headline_tells_a_tie_from_a_margin(build: Callable[..., Benchmark]) -> None:
    benchmark = build(("one", "two"))
    tied = " ".join(
        Page(html(benchmark.run([MSP(), MSP()], latency=False, progress=False))).text["p"]
    )
    assert (
        "0.00 points behind, which these samples cannot tell from chance: count the two as equal"
        in tied
    )
    apart = " ".join(
        Page(html(benchmark.run([FDBD(), Deviation()], latency=False, progress=False))).text["p"]
    )
    assert "more than chance explains" in apart


def test_one_set_without_latency_labels_or_title_gives_a_page(
    build: Callable[..., Benchmark],
) -> None:
    benchmark = build(("only",))
    benchmark.test = benchmark.test.__class__("inside", benchmark.test.features)
    page = Page(html(benchmark.run([FDBD()], latency=False, progress=False)))
    assert page.text["h1"] == ["Out-of-distribution detection, compared"]
    assert page.data["columns"] == ["only"]
    assert page.data["detectors"][0]["latency"] == {}


def test_results_without_figures_or_without_any_detector_give_a_page(results: Results) -> None:
    assert Page(html(Results(results.setting, results.rows))).data["figures"] == {}
    nothing = Page(html(Results(results.setting, [Row("x", error="why not")])))
    assert any("No detector gave a result" in paragraph for paragraph in nothing.text["p"])
    assert any("why not" in item for item in nothing.text["li"])


def test_scores_of_minus_infinity_and_constant_scores_are_drawn(results: Results) -> None:
    row = results.row("fdbd")
    outside = {name: torch.full_like(scores, -torch.inf) for name, scores in row.ood_scores.items()}
    closed = Row("closed", None, 0.0, row.evaluations, (), row.id_scores, outside)
    flat = Row(
        "flat",
        None,
        0.0,
        row.evaluations,
        (),
        torch.ones(9),
        {n: torch.ones(5) for n in row.ood_scores},
    )
    for other in (closed, flat):
        setting = replace(results.setting, correct=None)
        detector = Page(html(Results(setting, [other]))).data["detectors"][0]
        assert detector["low"] < detector["high"]
        assert sum(detector["ood"][0]) == len(other.ood_scores["near set"])


def test_the_file_is_written_whole(results: Results, tmp_path: Path) -> None:
    path = results.to_html(tmp_path / "report.html")
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


def test_helpers_survive_outliers() -> None:
    scores = np.array([*np.linspace(0, 1, 1000), 1e9, -np.inf])
    low, high = score_range([scores])
    assert 0 <= low < 0.01
    assert high < 1.01
    assert sum(bin_counts(scores, low, high, 10)) == len(scores)
    assert score_range([np.array([np.inf])]) == (0.0, 1.0)
    assert accepting_score(np.array([3.0, 1.0, 2.0, 4.0]), 0.5) == 3.0
    assert accepting_score(np.arange(1.0, 101.0), 0.95) == 6.0
    assert bin_counts(np.array([-np.inf, 0.1, 0.9, 7.0]), 0.0, 1.0, 2) == [2, 2]
