"""Records of decisions come back: into the gallery, a person's review in a real browser, and a new
threshold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fdbd.data.records import read_records
from fdbd.decision.guard_file import OpenedGuard
from fdbd.pages.gallery import read_scores, write_gallery
from fdbd.serve.decisions import DecisionLog
from fdbd.serve.torch_backend import TorchBackend

from .conftest import CLASSES, WIDTH, app_of, client_of

pytest.importorskip("pyarrow")
ROWS = 60


@pytest.fixture
def guard_file(feature_guard, tmp_path: Path) -> Path:
    path = tmp_path / "guard.safetensors"
    feature_guard.save(path)
    return path


@pytest.fixture
def records(feature_guard, tmp_path: Path) -> tuple[Path, list[dict]]:
    """A folder that a service wrote, and what it answered, in order."""
    folder = tmp_path / "records"
    backend = TorchBackend(OpenedGuard(feature_guard, None, tuple("abcd"[:CLASSES])))
    log = DecisionLog(folder, 10**9, lambda _: None)
    rows = np.random.default_rng(3).normal(size=(ROWS, WIDTH)).tolist()
    with client_of(app_of(backend, decisions=log)) as client:
        answers = []
        for number in range(ROWS // 2):
            pair = rows[2 * number : 2 * number + 2]
            headers = {"x-request-id": f"request-{number}"}
            answer = client.post("/decide", json={"features": pair}, headers=headers)
            answers += answer.json()["decisions"]
    log.stop()
    return folder, answers


def lines_of(folder: Path) -> list[dict]:
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def test_records_whose_file_was_removed_go_into_a_new_one(tmp_path: Path) -> None:
    dropped: list[int] = []
    log = DecisionLog(tmp_path, 10**9, dropped.append)
    log.add({"row": 0})
    deadline = time.monotonic() + 20
    while not lines_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    for path in tmp_path.iterdir():
        path.unlink()

    log.add({"row": 1})
    log.stop()

    assert lines_of(tmp_path) == [{"row": 1}]
    assert not dropped


FULL = """
import resource, sys, time
from pathlib import Path
from fdbd.serve.decisions import DecisionLog

resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
dropped = []
log = DecisionLog(Path(sys.argv[1]), 10**9, dropped.append)
for number in range(25):
    log.add({"row": number, "text": "x" * 1000})
    if number == 4:
        time.sleep(2)
log.stop()
print(sum(dropped))
"""


@pytest.mark.skipif(os.name == "nt", reason="needs limits of files")
def test_records_that_a_full_disk_did_not_take_are_counted_and_none_is_cut_off(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )

    kept = lines_of(tmp_path)
    assert [line["row"] for line in kept] == list(range(len(kept)))
    assert len(kept) >= 5
    assert len(kept) + int(done.stdout) == 25


def test_records_are_rows_by_request_the_lowest_scores_first(records) -> None:
    folder, answers = records
    with (folder / "decisions-0-0.jsonl").open("a") as file:
        file.write(json.dumps({"role": "shadow", "score": -99.0}) + "\n")
        file.write('{"request": "cut off')
    found = read_records(folder)
    assert [row["name"] for row in found[:3]] == ["request-0", "request-0#1", "request-1"]
    assert [row["score"] for row in found[:ROWS]] == [answer["score"] for answer in answers]
    lowest = read_records(folder, 5)
    assert [row["score"] for row in lowest] == sorted(row["score"] for row in found)[:5]


@pytest.mark.parametrize("name", ["sample.parquet", "sample.csv"])
def test_a_random_part_of_the_records_is_reviewed_like_scores(
    records, guard_file: Path, tmp_path: Path, result, name: str
) -> None:
    folder, _ = records
    sample = tmp_path / name
    drawn = result("sample", folder, "--count", 20, "--out", sample)
    assert (drawn["rows"], drawn["of"]) == (20, ROWS)
    rows = read_scores(sample)
    scores = {row["name"]: row["score"] for row in read_records(folder)}
    assert len({row["name"] for row in rows}) == 20
    assert [row["score"] for row in rows] == [scores[row["name"]] for row in rows]
    review = tmp_path / "review.json"
    verdicts = {row["name"]: "id" for row in rows}
    review.write_text(json.dumps({"version": 1, "reviews": verdicts}))
    found = result("calibrate", guard_file, "--data", folder, "--reviewed", review)
    assert found["reviewed"]["id"] == 20


def test_a_folder_without_records_is_refused_in_words(tmp_path: Path, run) -> None:
    (tmp_path / "decisions-0-0.jsonl").write_text("no record\n")
    code, _, err = run("gallery", tmp_path, "--out", tmp_path / "g.html")
    assert code == 2
    assert "holds no records of decisions" in err


def test_a_review_in_the_browser_sets_a_new_threshold(
    browser, records, guard_file: Path, tmp_path: Path, result
) -> None:
    folder, answers = records
    page_file = tmp_path / "gallery.html"
    number = write_gallery(folder, page_file)
    page = browser.new_page()
    page.goto(page_file.as_uri())
    page.locator("#list li").first.focus()
    for place in range(number):
        page.keyboard.press("o" if place < 3 else "i")
    with page.expect_download() as download:
        page.click("#save-review")
    review = tmp_path / "review.json"
    review.write_text(Path(download.value.path()).read_text(encoding="utf-8"), encoding="utf-8")
    page.close()
    new = tmp_path / "new.safetensors"
    costs = ("--review-cost", "1", "--miss-cost", "20", "--ood-share", "0.05")
    found = result(
        *("calibrate", guard_file, "--data", folder, "--reviewed", review),
        *(*costs, "--out", new),
    )
    assert found["reviewed"]["ood"] == 3
    scores = sorted(answer["score"] for answer in answers)
    kept = np.array(scores[3:])
    assert found["new"]["threshold"][0] in kept.astype(np.float32)
    for row in found["costs"]:
        spent = row["false_alarms"] + row["found"] + 20 * row["missed"]
        assert row["cost"] == pytest.approx(spent)
        assert row["found"] + row["missed"] == pytest.approx(50)
    assert new.is_file()
