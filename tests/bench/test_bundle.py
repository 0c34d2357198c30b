"""The features in the package: small files, whole numbers of codes, and what they say of the
paper."""

from __future__ import annotations

import pytest
import torch

from fdbd.bench import list_bundles, load_bundle
from fdbd.bench.bundle import DEFAULT, FOLDER, decode, encode
from fdbd.detectors import create
from fdbd.metrics import auroc


def test_codes_keep_features_to_half_a_step_and_zeros_to_zero() -> None:
    features = (
        torch.rand(50, 300, generator=torch.Generator().manual_seed(0)) ** 4
        * torch.logspace(-3, 3, 50)[:, None]
    )
    features[:, :20] = 0
    features[7] = 0
    codes, scales = encode(features)
    assert codes.dtype == torch.uint8
    found = decode(codes, scales)
    assert not found[:, :20].any()
    assert not found[7].any()
    step = (found.sqrt() - features.sqrt()).abs() / scales.sqrt()[:, None]
    assert step.max() <= 0.5 / 255 + 1e-6
    with pytest.raises(ValueError, match="non-negative"):
        encode(torch.tensor([[-1.0, 1.0]]))


def test_the_package_has_real_networks_in_small_files() -> None:
    assert DEFAULT in list_bundles()
    assert {"cifar10-ce", "cifar10-supcon"} <= set(list_bundles())
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.safetensors")}
    assert max(sizes.values()) < 10e6
    assert sum(size for name, size in sizes.items() if name.startswith(DEFAULT)) < 20e6


def test_resnet50_has_a_thousand_classes_and_other_photographs_for_the_fit_than_for_the_test() -> (
    None
):
    bundle = load_bundle()
    assert (bundle.head.num_classes, bundle.head.num_features) == (1000, 2048)
    assert bundle.train.labels is not None
    assert bundle.train.labels.bincount().tolist() == [2] * 1000
    assert bundle.test.labels is not None
    assert bundle.test.labels.bincount().tolist() == [1] * 1000
    for row in bundle.test.features[::97]:
        assert (bundle.train.features - row).abs().amax(dim=1).min() > 0.1
    accuracy = (
        (bundle.head(bundle.test.features).argmax(dim=1) == bundle.test.labels).float().mean()
    )
    assert 0.72 < accuracy < 0.79
    assert [samples.name for samples in bundle.ood] == ["textures", "sun", "sun-near"]


def test_on_resnet50_the_division_and_shaping_help_as_the_paper_says() -> None:
    bundle = load_bundle()
    fit = bundle.train.rows(slice(None))
    detectors = {
        "avgDistDB": create("fdbd", normalizer=None),
        "fdbd": create("fdbd"),
        "react": create("react+fdbd", percentile=80, mean="shaped"),
        "energy": create("energy"),
    }
    averages = {}
    for name, detector in detectors.items():
        detector.fit(fit, bundle.head)
        inside, *outside = (
            detector.score(s.rows(slice(None))) for s in (bundle.test, *bundle.ood[:2])
        )
        averages[name] = sum(float(auroc(inside, scores)) for scores in outside) / 2
    assert averages["avgDistDB"] < averages["fdbd"] < averages["react"]
    assert averages["energy"] < averages["fdbd"]
