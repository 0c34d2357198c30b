"""What a threshold promises, on real features, through the command line: false alarms on fresh
data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import betabinom

from fdbd.bench import load_bundle

SHARED = Path(__file__).parents[3] / "shared" / "data"
DETECTORS = ("fdbd", "msp", "energy", "knn", "mds", "vim")


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Features of CIFAR-10 from a network of the package: those of its training, and half of the
    test set each to calibrate on and as fresh data."""
    folder = tmp_path_factory.mktemp("features")
    bundle = load_bundle("cifar10-ce")
    np.savez(folder / "head.npz", weight=bundle.head.weight.numpy(), bias=bundle.head.bias.numpy())
    np.savez(
        folder / "train.npz",
        features=bundle.train.features.float().numpy(),
        y=bundle.train.labels.numpy(),
    )
    test = bundle.test.features.float().numpy()
    labels = bundle.test.labels.numpy()
    order = np.random.default_rng(0).permutation(len(test))
    for name, rows in (("calibration", order[::2]), ("fresh", order[1::2])):
        np.savez(folder / f"{name}.npz", features=test[rows], y=labels[rows])
    return folder


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("target", [("--tpr", 0.9), ("--alpha", 0.1)], ids=["tpr", "alpha"])
def test_false_alarms_on_fresh_data_are_those_asked_for(
    detector, target, files, tmp_path, result
) -> None:
    guard = tmp_path / "guard.safetensors"
    out = tmp_path / "scores.csv"
    fitted = result(
        "fit", files / "train.npz", "--head", files / "head.npz", "--calibration", files / "calibration.npz",
        "--detector", detector, *target, "--out", guard,
    )  # fmt: skip
    assert fitted["calibration"]["data"] == "data apart from the fit"
    assert fitted["cautions"] == []
    assert fitted["calibration_accuracy"] > 0.8
    scored = result("score", guard, files / "fresh.npz", "--out", out)
    n, m = fitted["calibration_rows"], scored["rows"]
    # Of n calibration scores a tenth is rejected: m fresh ones then follow the beta-binomial
    # distribution.
    low, high = betabinom.interval(0.999, m, n // 10 + 1, n - n // 10)
    assert low <= scored["ood"] <= high


def test_a_split_takes_the_users_word_and_is_recorded(files, tmp_path, run, result) -> None:
    arguments = (
        "fit",
        files / "calibration.npz",
        "--head",
        files / "head.npz",
        "--out",
        tmp_path / "g.safetensors",
    )
    code, _, err = run(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "seen by neither the network's training nor the fit" in err
    assert "--network-never-saw-data" in err
    found = result(*arguments, "--network-never-saw-data")
    assert found["calibration"]["data"] == "a held-out part of the data of the fit"
    assert found["calibration"]["network_saw_them"] == "no, as the user says"
    assert found["calibration"]["rows"] == found["calibration_rows"]
    import fdbd

    assert fdbd.load(tmp_path / "g.safetensors").about["calibration"] == found["calibration"]
    code, out, err = run(*arguments, "--network-never-saw-data")
    assert "held out, which you confirmed the network never saw" in out
    assert "The model's accuracy: " in out
    assert not err
    code, _, err = run(*arguments, "--calibration", files / "fresh.npz", "--holdout", 0.3)
    assert (code, "--holdout" in err) == (2, True)


def test_a_split_of_data_that_the_network_has_memorised_draws_a_warning(
    tmp_path, monkeypatch, result
) -> None:
    monkeypatch.chdir(tmp_path)
    labels = np.arange(600) % 3
    features = np.eye(3, dtype=np.float32)[labels] * 5 + np.random.default_rng(0).normal(
        0, 0.5, (600, 3)
    )
    np.savez("train.npz", features=features.astype(np.float32), y=labels)
    np.savez("head.npz", weight=np.eye(3, dtype=np.float32), bias=np.zeros(3, np.float32))
    arguments = ("fit", "train.npz", "--head", "head.npz", "--out", "g.safetensors")
    assert (
        "as if it had been trained on them"
        in result(*arguments, "--network-never-saw-data")["cautions"][0]
    )
    found = result(*arguments, "--calibration", "train.npz")
    assert (found["fit_accuracy"], found["calibration_accuracy"], found["cautions"]) == (
        1.0,
        1.0,
        [],
    )


def test_a_calibration_set_of_twelve_draws_a_caution_with_what_it_can_promise(
    tmp_path, monkeypatch, result
) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.savez("head.npz", weight=generator.standard_normal((3, 4)), bias=np.zeros(3))
    for name, count in (("train", 100), ("twelve", 12), ("many", 1000)):
        np.savez(f"{name}.npz", features=generator.standard_normal((count, 4)))
    arguments = (
        "fit",
        "train.npz",
        "--head",
        "head.npz",
        "--out",
        "g.safetensors",
        "--calibration",
    )
    [caution] = result(*arguments, "twelve.npz")["cautions"]
    # The lowest of 12 scores: a share below it of Beta(1, 12), whose 97.5 % point is 1 −
    # 0.025^(1/12).
    assert caution.startswith("only 12 calibration samples: the target is 5 % false alarms")
    assert f"to {100 * (1 - 0.025 ** (1 / 12)):.2g} %" in caution
    assert result(*arguments, "many.npz")["cautions"] == []


@pytest.mark.slow
@pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs the public weights and images beside the repository"
)
@pytest.mark.parametrize("target", [("--tpr", 0.9), ("--alpha", 0.1)], ids=["tpr", "alpha"])
def test_false_alarms_on_fresh_images_are_those_asked_for(
    target, tmp_path, monkeypatch, result
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.load(SHARED / "ood32" / "tiny_imagenet_val.npz")["x"]
    pixels = pixels[np.random.default_rng(0).permutation(len(pixels))]
    for name, rows in (
        ("train", slice(300)),
        ("calibration", slice(300, 900)),
        ("fresh", slice(900, 2700)),
    ):
        np.savez(f"{name}.npz", x=pixels[rows])
    weights = SHARED / "weights" / "resnet20-12fca82f.th"
    for detector in DETECTORS:
        if detector == "mds":
            # Needs labels.
            continue
        fitted = result(
            "fit", "resnet20", "train.npz", "--checkpoint", weights, "--preprocess", "cifar-imagenet-statistics",
            "--calibration", "calibration.npz", "--detector", detector, *target, "--out", f"{detector}.safetensors",
        )  # fmt: skip
        scored = result("score", f"{detector}.safetensors", "fresh.npz", "--out", f"{detector}.csv")
        n, m = fitted["calibration_rows"], scored["rows"]
        low, high = betabinom.interval(0.999, m, n // 10 + 1, n - n // 10)
        assert low <= scored["ood"] <= high, detector
