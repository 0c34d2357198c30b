"""Files, reruns, the command and the page."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fdbd import cli, paper
from fdbd.paper import experiment as experiments
from fdbd.paper import runner
from fdbd.paper.finding import Finding, Statement, TextTable, tally

page = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tools" / "paper_page.py")))
FAST = ("proposition-1", "theorem-bound")


@pytest.fixture
def quick(monkeypatch):
    """Two experiments with few points; counts how often something is run."""
    calls: list[str] = []
    few = {
        "proposition-1": {"sizes": [[3, 4]], "points": 100, "biases": [3.0]},
        "theorem-bound": {"sizes": [[4, 3]], "samples": 5, "tries": 10},
    }

    def counted(program):
        def run(finding: Finding, settings: object) -> None:
            name = finding.experiment.name
            calls.append(name)
            program(finding, replace(settings, **few[name]))

        return run

    for kind in ("proposition-1", "theorem"):
        monkeypatch.setitem(runner.PROGRAMS, kind, counted(runner.PROGRAMS[kind]))
    return calls


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(["paper", *arguments])
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_a_run_leaves_a_table_in_three_formats_and_a_figure_in_two(quick, tmp_path, capsys) -> None:
    code, out, _ = command(
        capsys, "proposition-1", "--out", str(tmp_path / "new" / "folder"), "--json"
    )
    assert code == 0
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"proposition-1.{suffix}" for suffix in ("json", "md", "png", "svg", "tex")
    ]
    record = json.loads((folder / "proposition-1.json").read_text())
    assert record == json.loads(out)
    text = (folder / "proposition-1.md").read_text()
    assert record["claim"] in text
    assert all(item["measured"] in text for item in record["checks"])
    assert "\\toprule" in (folder / "proposition-1.tex").read_text()
    assert (folder / "proposition-1.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_of_all_goes_on_where_the_first_one_ended(quick, tmp_path) -> None:
    runner.run_all(FAST[:1], tmp_path, progress=False)
    records = runner.run_all(FAST, tmp_path, progress=False)
    assert quick == list(FAST)
    assert [record["name"] for record in records] == list(FAST)
    assert "theorem-bound" in (tmp_path / "README.md").read_text()
    runner.run_all(FAST, tmp_path, fresh=True, progress=False)
    assert quick == [*FAST, *FAST]


def test_new_features_in_the_package_make_old_results_stale(quick, tmp_path, monkeypatch) -> None:
    runner.run_all(FAST[:1], tmp_path, progress=False)
    monkeypatch.setattr("fdbd.bench.bundle.FOLDER", tmp_path)
    runner.run_all(FAST[:1], tmp_path, progress=False)
    assert len(quick) == 2


def test_an_experiment_without_data_is_a_line_and_the_others_are_run(
    quick, tmp_path, monkeypatch
) -> None:
    def without(finding: Finding, settings: object) -> None:
        raise runner.MissingData("theorem-bound needs numbers: invent some")

    def trivial(finding: Finding, settings: object) -> None:
        finding.decide("one is one", True, "1.")
        finding.table(["a"], [["1"]])

    monkeypatch.setitem(runner.PROGRAMS, "theorem", without)
    monkeypatch.setitem(runner.PROGRAMS, "proposition-1", trivial)
    records = runner.run_all(FAST, tmp_path, progress=False)
    assert [record["verdict"] for record in records] == ["holds", "not run"]
    assert not (tmp_path / "theorem-bound.json").exists()
    assert "invent some" in (tmp_path / "README.md").read_text()


def test_the_command_lists_runs_and_refuses_in_one_line(
    quick, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command(capsys, "--json")
    assert code == 0
    assert [entry["name"] for entry in json.loads(out)] == experiments.list_experiments()
    code, out, _ = command(capsys)
    assert "complexity" in out
    for arguments in (("table-cifar11",), ("table-cifar10", "--scale", "large"), ("nowhere.toml",)):
        code, _, err = command(capsys, *arguments)
        assert code == 2
        assert len(err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())
    code, out, _ = command(capsys, "theorem-bound")
    assert (code, (tmp_path / "paper" / "theorem-bound.md").exists()) == (0, True)
    assert "holds" in out


def test_at_the_papers_scale_missing_weights_and_data_are_named(
    nowhere, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(capsys, "table-cifar10", "--scale", "paper")
    assert code == 2
    assert "written" not in out
    assert "run: fdbd train ce-resnet18" in err
    assert "run: fdbd train supcon-resnet18" in err
    assert not list(tmp_path.glob("paper/*"))


def test_the_page_shows_each_statement_with_the_scales_side_by_side(tmp_path, monkeypatch) -> None:
    small = tmp_path / "small"
    public = tmp_path / "public"
    target = tmp_path / "docs" / "paper.md"
    target.parent.mkdir()
    for folder, scale, model in ((small, "small", "zoo"), (public, "public", "ResNet-50")):
        folder.mkdir()
        for name in experiments.list_experiments():
            experiment = experiments.find(name, scale)
            if getattr(experiment.settings, "untested", ""):
                continue
            statement = Statement.from_outcome(
                f"water is wet ({model})", name != "complexity", f"42 for {name}."
            )
            table = TextTable("a title", ["a", "b"], [["1", f"**{scale}**"]])
            finding = Finding(experiment, statements=[statement], tables=[table])
            (folder / f"{name}.json").write_text(json.dumps(finding.record(1.0)))
            (folder / f"{name}.svg").write_text(f"<svg>{scale}</svg>")
    monkeypatch.setattr("sys.argv", ["page", str(small), str(public), str(target)])
    page.main()
    text = target.read_text()
    for name in experiments.list_experiments():
        assert f"## {name}\n" in text
        assert f"(paper/{name}.svg)" in text
        assert (target.parent / "paper" / f"{name}.svg").read_text() == "<svg>public</svg>"
    assert (
        "| water is wet | ✓ zoo: 42 for table-cifar10. | ✓ ResNet-50: 42 for table-cifar10. |"
        in text
    )
    assert "| water is wet | ✗ zoo: 42 for complexity. | ✗ ResNet-50: 42 for complexity. |" in text
    assert re.search(r"`table-vit`.*\| not tested \| holds \|", text)
    assert "Slips" in text
    (small / "complexity.json").unlink()
    assert page.read(small)[-1]["missing"] == ["no results; run: fdbd paper complexity"]
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path), str(tmp_path), str(target)])
    with pytest.raises(FileNotFoundError, match="have no results"):
        page.main()


def test_cells_are_escaped_for_latex_and_bold_is_kept() -> None:
    text = TextTable("50 % of a_b", ["x & y"], [["**1_0**"]]).latex()
    assert r"50 \% of a\_b" in text
    assert r"x \& y" in text
    assert r"\textbf{1\_0}" in text


def test_the_page_in_the_documentation_shows_every_experiment() -> None:
    source = Path(__file__).parents[2] / "docs" / "paper.md"
    text = source.read_text(encoding="utf-8")
    for name in experiments.list_experiments():
        assert f"## {name}\n" in text
    for shown in re.findall(r"\(paper/(\S+\.svg)\)", text):
        assert (source.with_suffix("") / shown).stat().st_size < 500_000


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (
            "table-regularization",
            "put resnet50-0676ba61.pth from https://download.pytorch.org/models/",
        ),
        (
            "table-vit",
            "get model.safetensors from "
            "https://huggingface.co/timm/vit_base_patch16_384.orig_in21k_ft_in1k",
        ),
    ],
)
def test_published_weights_that_are_missing_are_named_with_file_address_and_folder(
    name: str, where: str, nowhere, tmp_path, capsys, monkeypatch
) -> None:
    pytest.importorskip("torchvision")
    pytest.importorskip("timm")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, name, "--scale", "paper")
    assert code == 2
    assert f"downloads are off: {where}" in err
    if name == "table-regularization":
        assert str(tmp_path / "torch" / "hub" / "checkpoints") in err


def test_a_device_that_is_not_there_is_one_line(tmp_path, capsys) -> None:
    code, _, err = command(capsys, "proposition-1", "--device", "cuda:99", "--out", str(tmp_path))
    assert code == 2
    assert "the device 'cuda:99' is not available here" in err


def test_a_run_tells_what_it_does(quick, tmp_path: Path) -> None:
    lines: list[str] = []
    runner.run("theorem-bound", tmp_path, "small", lines.append)
    assert lines == ["4 classes in 3 dimensions"]


def test_only_what_was_tested_is_counted_and_our_own_questions_apart() -> None:
    verdicts = ["holds", "holds", "does not hold", "undecided", "not tested", "not tested"]
    statements = [Statement(str(number), verdict, "") for number, verdict in enumerate(verdicts)]
    expected = "2 hold, 1 does not hold, 1 undecided, 2 not tested"
    assert tally(statements) == expected
    own = Statement("ours", "holds", "", ours=True)
    assert tally([*statements, own]) == f"{expected}; of 1 question of our own: holds"
    assert tally([statements[0], statements[1]]) == "holds"
    assert tally([]) == "not run"


@pytest.mark.parametrize(
    ("old", "new"), [("Result", "Finding"), ("Check", "Statement"), ("Table", "TextTable")]
)
def test_the_names_of_0_2_still_work_with_a_warning(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"fdbd.paper.{new}"):
        assert getattr(paper, old) is getattr(paper, new)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = paper.Nothing
