"""The page of advice: it is what the tool writes from the results, and the results bear it out."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
tool = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "which_detector.py")))
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def averages(start: str) -> list[dict[str, float]]:
    """Average AUROC by detector, of each network whose section's name starts with some text."""
    found = []
    for name, measured in tool.read_results(RESULTS).items():
        if name.startswith(start):
            found.append({detector: row[tool.AUROC] for detector, row in measured.items()})
    assert found
    return found


def test_the_page_is_written_from_the_results() -> None:
    page = (ROOT / "docs" / "which-detector.md").read_text(encoding="utf-8")
    assert page == tool.render(RESULTS), "run: python tools/which_detector.py"


def test_a_table_is_read_with_its_marks_removed() -> None:
    text = (
        "# Results\n<!-- one -->\n## A network: x\n\n| detector | average AUROC ↑ | far |\n"
        "|---|---:|---:|\n| a+b † | **91.5** | ~3 |\n| c †! | 90.25 |  |\n\nSome text.\n"
    )
    expected = {"a+b": {"average AUROC ↑": 91.5, "far": 3.0}, "c": {"average AUROC ↑": 90.25}}
    assert tool.read_results(text) == {"one": expected}


def test_advice_that_the_results_do_not_bear_out_is_refused(tmp_path, monkeypatch, capsys) -> None:
    rows = [line for line in RESULTS.splitlines() if line.startswith("| fdbd |")]
    average = rows[0].split("|")[2]
    worse = RESULTS.replace(rows[0], rows[0].replace(average, " 80.00 ", 1))
    with pytest.raises(
        ValueError, match=r"advises fdbd, which on cifar10-ce is 14\.1 points below"
    ):
        tool.render(worse)
    (tmp_path / "results.md").write_text(worse, encoding="utf-8")
    page = tmp_path / "page.md"
    shutil.copy(ROOT / "docs" / "which-detector.md", page)
    before = page.read_text(encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["tool", str(tmp_path / "results.md"), str(page)])
    with pytest.raises(SystemExit, match="does not follow from the results"):
        tool.main()
    assert page.read_text(encoding="utf-8") == before


def test_nothing_is_advised_for_imagenet_that_was_seen_on_one_architecture() -> None:
    networks = [name for name in tool.read_results(RESULTS) if name.startswith("imagenet")]
    assert {name.partition("-")[2].partition("-")[0] for name in networks} >= {
        "resnet50",
        "efficientnet",
    }
    for advice in tool.ADVICE:
        known = ("cifar10", "imagenet", "cifar10-supcon", "transformer", "text")
        assert advice.networks in known, "all of a dataset or of a kind"


def test_what_the_page_says_of_shaping_before_fdbd_is_so() -> None:
    for measured in averages("cifar10"):
        for shaping in ("react", "ash-s", "scale"):
            assert measured["fdbd"] > measured[f"{shaping}+fdbd"]
    for network in ("imagenet-efficientnet-lite1", "imagenet-efficientnet-lite2"):
        (measured,) = averages(network)
        for shaping in ("ash-s", "scale"):
            assert measured["fdbd"] > measured[f"{shaping}+fdbd"]
    (resnet,) = averages("imagenet-resnet50")
    for shaping in ("react", "ash-s", "scale"):
        assert resnet[f"{shaping}+fdbd"] > resnet["fdbd"] + 3


def test_what_the_page_says_of_near_ood_is_so() -> None:
    results = tool.read_results(RESULTS)
    networks = [name for name in results if name.startswith("cifar10")]

    def largest(detector: str) -> float:
        return max(tool.regrets(results, detector, networks, "near AUROC ↑").values())

    assert max(largest("energy"), largest("ash-p+energy")) < largest("fdbd")


def test_what_the_page_says_of_imagenet_is_so() -> None:
    behind_react = []
    networks = [name for name in tool.read_results(RESULTS) if name.startswith("imagenet")]
    for name in networks:
        (measured,) = averages(name)
        assert measured["optfs"] > measured["fdbd"]
        if measured["react+fdbd"] > measured["fdbd"]:
            behind_react.append(name)
    assert set(networks) - set(behind_react) == {"imagenet-efficientnet-lite2"}
