"""The stress card: shares with intervals, kinds, corruptions, the command, page and exit code."""

from __future__ import annotations

import json

import numpy as np
import pytest

import fdbd
from fdbd.data.corruptions import CORRUPTIONS
from fdbd.data.pseudo_ood import KINDS
from fdbd.decision.guard_file import open_guard
from fdbd.decision.stress import Share, stress_files
from fdbd.jobs.fitting import fit_files
from fdbd.jobs.scoring import Engine
from fdbd.networks.by_name import model_by_name

QUIET = Engine(device="cpu", progress=False, batch_size=64)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A guard's file around a shipped model, and in-distribution images as a folder and as NPZ."""
    folder = tmp_path_factory.mktemp("stress")
    generator = np.random.default_rng(0)
    coarse = generator.integers(0, 256, (90, 4, 4, 3), dtype=np.uint8)
    images = coarse.repeat(8, axis=1).repeat(8, axis=2)
    np.savez(folder / "fit.npz", x=images[:40])
    np.savez(folder / "fresh.npz", x=images[40:60])
    np.savez(folder / "other.npz", x=images[60:])
    model = model_by_name("cifar10-ce", device="cpu")
    fitted = fit_files(model, str(folder / "fit.npz"), str(folder / "fresh.npz"), QUIET, alpha=0.1)
    fitted.guard.save(folder / "guard.safetensors")
    return folder


def test_a_share_has_an_exact_interval() -> None:
    # Of 10 samples without one: 1 − (1 − p)^10 = 0.975 at the upper end.
    none = Share.from_flags(np.zeros(10, bool))
    assert (none.flagged, none.low) == (0, 0.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 10))
    every = Share.from_flags(np.ones(10, bool))
    assert (every.share, every.high) == (1.0, 1.0)
    assert every.low == pytest.approx(0.025 ** (1 / 10))


def test_the_card_has_every_kind_and_every_corruption_asked_for(files) -> None:
    opened = open_guard(files / "guard.safetensors", device="cpu")
    card = stress_files(
        opened, str(files / "other.npz"), 6, 20, progress=False, corruptions=["fog", "contrast"]
    )
    assert [kind.name for kind in card.kinds] == list(KINDS)
    found = [(corruption.name, corruption.severity) for corruption in card.corruptions]
    assert found == [(name, severity) for name in ("fog", "contrast") for severity in range(1, 6)]
    assert card.clean.total == 20
    assert all(kind.flagged.total == 6 for kind in card.kinds)
    assert card.expected == 0.1
    assert all(kind.missed <= kind.changed for kind in card.kinds)
    least = min(kind.flagged.share for kind in card.kinds[:8])
    assert card.weakest.flagged.share == least


def test_the_shares_are_those_of_the_guard_itself(files) -> None:
    opened = open_guard(files / "guard.safetensors", device="cpu")
    card = stress_files(opened, str(files / "other.npz"), 6, 30, progress=False, corruptions=[])
    with np.load(files / "other.npz") as arrays:
        decision = opened.guard(opened.preprocess(arrays["x"]))
    assert card.clean.flagged == int(decision.is_ood.sum())


def test_the_command_prints_json_writes_a_page_and_fails_under_a_share(files, run) -> None:
    arguments = ["stress", files / "guard.safetensors", files / "other.npz", "--count", 2]
    page = files / "stress.html"
    options = ["--clean", 10, "--json", "--out", page, "--fail-under", 1.0, "--device", "cpu"]
    code, out, err = run(*arguments, *options)
    found = json.loads(out.splitlines()[-1])
    assert len(found["corruptions"]) == 5 * len(CORRUPTIONS)
    assert found["failed"] == (found["weakest_share"] < 1)
    assert code == int(found["failed"])
    text = page.read_text(encoding="utf-8")
    assert text.count("<img") == 1 + len(KINDS)
    assert "data:image/jpeg" in text
    if found["failed"]:
        assert "--fail-under" in err


def test_a_guard_of_features_is_refused(files, run, tmp_path) -> None:
    import torch

    head = fdbd.Head(torch.eye(3))
    guard = fdbd.Guard(head).fit([fdbd.Batch(torch.rand(50, 3))])
    guard.calibrate([fdbd.Batch(torch.rand(60, 3))]).save(tmp_path / "features.safetensors")
    code, _, err = run("stress", tmp_path / "features.safetensors", files / "other.npz")
    assert code == 2
    assert "fitted on features" in err
