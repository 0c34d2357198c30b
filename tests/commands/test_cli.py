"""The program: exit codes, one line on bad input, files that appear whole."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from typer.main import get_command

from fdbd import cli


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize("command", [command.__name__ for command in cli.COMMANDS])
def test_every_command_has_help_with_an_example(command: str, capsys) -> None:
    code, out, _ = run(capsys, command, "--help")
    assert code == 0
    assert f"fdbd {command}" in " ".join(out.split())


@pytest.mark.parametrize("command", [command.__name__ for command in cli.COMMANDS])
def test_help_cuts_off_no_option_in_80_columns(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, command, "--help")
    program: Any = get_command(cli.app)
    options = [
        name
        for each in program.commands[command].params
        for name in each.opts
        if name.startswith("--")
    ]
    assert [name for name in options if name not in out.split()] == []


@pytest.mark.parametrize("command", [None, *(command.__name__ for command in cli.COMMANDS)])
def test_help_shows_no_type_for_an_option_without_a_value(command: str | None, capsys) -> None:
    given = [] if command is None else [command]
    _, out, _ = run(capsys, *given, "--help")
    assert "<bool>" not in out


def test_the_version_is_the_packages(capsys) -> None:
    import fdbd

    assert run(capsys, "--version")[:2] == (0, f"{fdbd.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench", "nowhere.toml"),
        ("bench", "--model", "no-such-model"),
        ("bench", "--format", "docx"),
        ("bench", "--init", "example.txt"),
        ("data", "no-such-set"),
        ("train", "no-such-preset"),
        ("train", "ce-small", "--set", "epochs"),
        ("train", "ce-small", "--set", "epochs=many"),
        ("no-such-command",),
        ("bench", "--no-such-option"),
    ],
)
def test_bad_input_ends_in_exit_code_2_and_no_traceback(
    arguments: tuple[str, ...], capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in err
    assert err.strip()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "--model", "timm:resnet18"), "config with fdbd bench --init my.toml"),
        (
            ("fit", "cifar10-ce", "photos", "--calibration", "fresh", "--detector", "mine:Mine"),
            "fdbd bench --detectors mine:Mine",
        ),
    ],
)
def test_what_another_command_does_is_said(
    arguments: tuple[str, ...], sentence: str, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert sentence in err


def test_an_example_config_is_written_once(capsys, tmp_path) -> None:
    path = tmp_path / "bench.toml"
    assert run(capsys, "bench", "--init", str(path))[0] == 0
    content = path.read_text()
    code, _, err = run(capsys, "bench", "--init", str(path))
    assert code == 2
    assert "exists already" in err
    assert path.read_text() == content


def test_the_tracebacks_are_there_for_those_who_ask(monkeypatch) -> None:
    monkeypatch.setenv("FDBD_DEBUG", "1")
    with pytest.raises(ValueError, match="no training preset"):
        cli.main(["train", "no-such-preset"])


def make_config(folder) -> str:
    """A config over small files: a model from a factory, CIFAR-like arrays."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (60, 8, 8, 3), np.uint8)
    images[:, :, :, 0] = (np.arange(60) % 3 * 100)[:, None, None]
    np.savez(folder / "inside.npz", x=images, y=np.arange(60) % 3)
    np.savez(folder / "outside.npz", x=generator.integers(0, 255, (40, 8, 8, 3), np.uint8))
    (folder / "factory.py").write_text(
        "import torch\n\n\ndef tiny(num_classes=3):\n    torch.manual_seed(0)\n    return"
        " torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 6), torch.nn.ReLU(),"
        " torch.nn.Linear(6, num_classes))\n"
    )
    path = folder / "bench.toml"
    path.write_text(
        f'title = "tiny"\nmodel = "factory:tiny"\nnum_classes = 3\nid = "{folder}/inside.npz"\n'
        f'ood = ["{folder}/outside.npz", "svhn"]\ndetectors = ["fdbd", "msp"]\n'
        "preprocess = { size = 8, mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }\n"
    )
    return str(path)


def test_a_config_runs_from_files_to_a_report_and_skips_what_is_missing(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = make_config(tmp_path)
    code, out, err = run(
        capsys,
        "bench",
        config,
        "--trust-model",
        "--format",
        "html,json,csv,md,tex",
        "--out",
        "results",
        "--json",
    )
    assert code == 0, err
    assert "svhn is left out" in err
    found = json.loads(out)
    assert [entry["name"] for entry in found["detectors"]] == ["fdbd", "msp"]
    assert found["setting"]["ood"] == {"outside": 40}
    written = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert written == ["report.html", "results.csv", "results.json", "results.md", "results.tex"]
    code, out, _ = run(capsys, "cache", "--json")
    assert code == 0
    assert all(entry["complete"] for entry in json.loads(out))
    assert run(capsys, "cache", "verify")[0] == 0
    assert "freed" in run(capsys, "cache", "clear")[1]


def test_datasets_are_listed(capsys) -> None:
    code, out, _ = run(capsys, "data", "--json")
    assert code == 0
    assert {"cifar10", "svhn", "textures", "mnist"} <= {entry["name"] for entry in json.loads(out)}


def test_the_list_says_which_datasets_are_here(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    (tmp_path / "mnist_train.npz").touch()
    code, out, _ = run(capsys, "data")
    assert code == 0
    here = {line.split()[1] for line in out.splitlines() if "yes" in line.split()}
    # A package of the system may have brought this one.
    assert here - {"fashion-mnist"} == {"mnist"}


def test_the_lists_of_datasets_and_features_fit_80_columns_and_cut_no_key(
    capsys, tmp_path, monkeypatch
) -> None:
    from fdbd.data.datasets import list_datasets

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FDBD_OFFLINE", "1")
    monkeypatch.setenv("FDBD_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "data")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert all(entry.name in out for entry in list_datasets())
    monkeypatch.syspath_prepend(tmp_path)
    assert run(capsys, "bench", make_config(tmp_path), "--trust-model", "--out", "results")[0] == 0
    entries = json.loads(run(capsys, "cache", "--json")[1])
    code, out, _ = run(capsys, "cache")
    assert code == 0
    assert {entry["key"] for entry in entries} <= set(out.splitlines())


def test_the_module_is_the_program() -> None:
    import subprocess
    import sys
    from pathlib import Path

    import fdbd

    environment = {"PYTHONPATH": str(Path(fdbd.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-m", "fdbd", "--version"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, f"{fdbd.__version__}\n")


def test_without_arguments_a_newcomer_sees_where_to_begin(capsys) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    assert all(f"fdbd {command}" in out for command in ("bench", "fit", "score"))
    assert max(map(len, out.splitlines())) <= 80


def test_the_doctor_names_versions_devices_and_what_is_missing(capsys, monkeypatch) -> None:
    from fdbd.commands import doctor

    named = doctor.packages_of_extras()
    assert {"vision", "report", "knn", "onnx", "ray", "serve", "openvino", "hub"} <= set(named)
    assert not {"dev", "docs"} & set(named)
    monkeypatch.setattr(doctor, "packages_of_extras", lambda: {"vision": ["no-such-package"]})
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert "missing no-such-package: pip install 'fdbd[vision]'" in out
    found = json.loads(run(capsys, "doctor", "--json")[1])
    assert torch.__version__.startswith(found["Versions"]["torch"])
    assert found["Kernels"]["compiled"] == "yes"


def test_a_benchmark_says_first_what_matters_and_shows_all_on_request(
    capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    chosen = "energy,react+energy,gen,maxlogit,knn,fdbd,msp,mds"
    code, out, err = run(capsys, "bench", "--model", "cifar10-ce", "--detectors", chosen)
    lines = out.splitlines()
    assert code == 0, err
    assert "8,000 ID and 7,519 OOD samples" in err
    assert max(map(len, lines)) <= 80
    found = json.loads((tmp_path / "results.json").read_text())
    by_quality = sorted(
        found["detectors"], key=lambda entry: -entry["groups"]["average"]["auroc"]["value"]
    )
    said = " ".join(out.partition("┏")[0].split())
    assert f"{by_quality[0]['name']} separates ID from OOD best" in said
    assert f"{by_quality[1]['name']} is next" in said
    assert re.search(r"fdbd (is \d\w\w of 8|separates)", said)
    assert re.search(r"fdbd costs [\d.,]+ µs per sample", said)
    assert "report.html" in said
    shown = [entry["name"] for entry in by_quality[:5]]
    if "fdbd" not in shown:
        shown.append("fdbd")
    assert [line.split()[1] for line in lines if line.startswith("│")] == shown
    assert f"{8 - len(shown)} further detectors" in out
    code, out, _ = run(
        capsys,
        "bench",
        "--model",
        "cifar10-ce",
        "--detectors",
        chosen,
        "--all",
        "--no-latency",
        "--format",
        "json",
    )
    assert code == 0
    assert sum(line.startswith("│") for line in out.splitlines()) == 8
    assert "costs" not in out
