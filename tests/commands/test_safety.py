"""No command writes over what it reads, and none waits for what is no file."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fdbd import cli
from fdbd.commands.safety import OUTPUTS, checked


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> Path:
    """A folder of images, a folder of parts, and a file; none of them is what it should be."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "parts").mkdir()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "images" / "0.png")
    (tmp_path / "parts" / "part-000000.parquet").write_bytes(b"part")
    (tmp_path / "file").write_bytes(b"file")
    (tmp_path / "link").symlink_to("file")
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        ("gallery", "file", "--out", "file"),
        ("gallery", "file", "--out", "link"),
        ("gallery", "file", "--images", "images", "--out", "images/0.png"),
        ("gallery", "parts", "--out", "parts/part-000000.parquet"),
        ("score", "file", "images", "--out", "file"),
        ("score", "guard", "images", "--out", "images"),
        ("score", "guard", "parts/part-000000.parquet", "--out", "parts", "--restart"),
        ("fit", "cifar10-ce", "file", "--calibration", "images", "--out", "file"),
        ("fit", "cifar10-ce", "images", "--calibration", "file", "--out", "link"),
        ("explain", "guard", "images/0.png", "--out", "images/0.png"),
        ("export", "file", "--out", "file"),
        ("export", "guard", "--example", "images/0.png", "--out", "images/0.png"),
        ("bench", "file", "--out", "file"),
    ],
    ids=" ".join,
)
def test_an_output_that_is_an_input_is_refused_and_stays(arguments, inputs, run) -> None:
    before = {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()}
    code, _, err = run(*arguments)
    assert (code, err.count("\n")) == (2, 1), err
    assert "choose another --out" in err
    assert {path: path.read_bytes() for path in inputs.rglob("*") if path.is_file()} == before


def test_an_output_among_the_images_that_is_no_image_may_be_replaced(inputs) -> None:
    (inputs / "images" / "scores.parquet").write_bytes(b"old scores")
    called = []

    def command(data: str, out: Path) -> None:
        called.append(out)

    checked(command)(data="images", out=Path("images/scores.parquet"))
    assert called == [Path("images/scores.parquet")]


def test_what_commands_write_is_known_to_the_check() -> None:
    """A parameter whose help speaks of writing has one of the names that are checked."""
    for command in cli.COMMANDS:
        for name, parameter in inspect.signature(command).parameters.items():
            text = str(getattr(parameter.default, "help", ""))
            if text.startswith(("Write ", "The page.", "The guard's file.", "Folder for")):
                assert name in OUTPUTS, f"{command.__name__} --{name}: {text}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "arguments",
    [
        ("gallery", "fifo.csv", "--out", "page.html"),
        ("sample", "fifo.csv", "--out", "rows.csv"),
        ("compare", "fifo.csv", "file"),
        ("compare", "file", "fifo.json"),
        ("calibrate", "fifo.safetensors", "--data", "file", "--out", "guard.safetensors"),
        ("calibrate", "file", "--data", "fifo.npz", "--out", "guard.safetensors"),
        ("score", "file", "fifo.csv", "--text", "text", "--out", "scores.csv"),
        ("score", "file", "fifo.jsonl", "--text", "text", "--out", "scores.csv"),
        ("fit", "hf:model", "fifo.csv", "--text", "text", "--out", "guard.safetensors"),
        ("stress", "fifo.safetensors", "images"),
        ("choose", "fifo.npz", "--held-out", "images"),
        ("explain", "file", "fifo.png"),
        ("export", "fifo.safetensors", "--out", "guard.onnx"),
        ("inspect", "fifo.safetensors"),
        ("bench", "fifo.toml"),
    ],
)
def test_no_command_waits_for_a_fifo(run, inputs, arguments) -> None:
    for name in arguments:
        if name.startswith("fifo"):
            os.mkfifo(inputs / name)
    code, _, said = run(*arguments)
    assert code == 2
    assert "is neither a regular file nor a folder" in said
    assert len(said.strip().splitlines()) == 1
