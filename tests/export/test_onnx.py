"""Guards as ONNX graphs, run in ONNX Runtime and compared with torch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fdbd
from fdbd import Batch, Guard, Head
from fdbd.decision import onnx_export
from fdbd.detectors import Detector
from fdbd.export import onnx as deploy
from fdbd.util.extras import MissingExtraError

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

P, C = 24, 5
QUICK = ["fdbd", "ash-b+fdbd", "knn"]
SHAPED = [f"{shaping}+fdbd" for shaping in fdbd.list_shapings()]
ALL = sorted(
    {*fdbd.list_detectors(), *SHAPED, "ash-s+energy", "react+energy", "react+knn", "vra+mds"}
    - set(QUICK)
)
NETWORK = {name for name in (*ALL, *QUICK) if fdbd.create(name).needs.network}


def features(count: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % C
    centres = 2 * torch.randn(C, P, generator=torch.Generator().manual_seed(99))
    return Batch(
        (centres[labels] + torch.randn(count, P, generator=generator)).relu(), None, labels
    )


def head_guard(detector: str | Detector = "fdbd", calibration: int = 200, **options) -> Guard:
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(C, P, generator=generator), torch.randn(C, generator=generator))
    guard = Guard(head, detector).fit(features(300, 1), progress=False)
    if isinstance(detector, fdbd.Ensemble):
        guard.detector.calibrate(features(100, 3))
    return guard.calibrate(features(calibration, 2), progress=False, **options)


def model_guard(model: nn.Module, shape: tuple[int, ...], detector: str = "fdbd") -> Guard:
    generator = torch.Generator().manual_seed(0)
    guard = Guard(model, detector)
    labels = torch.arange(24) % guard.classifier.head.num_classes
    guard.fit([(torch.randn(24, *shape, generator=generator), labels)], progress=False)
    return guard.calibrate([torch.randn(20, *shape, generator=generator)], progress=False)


def run(path: Path, **inputs: torch.Tensor) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    results = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
    return dict(zip([output.name for output in session.get_outputs()], results))


def assert_same(got: dict[str, np.ndarray], decision: fdbd.Decision) -> None:
    assert list(got) == ["logits", "label", "score", "p_value", "is_ood"]
    for name, expected in zip(got, decision):
        np.testing.assert_allclose(got[name], expected.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)
    assert got["label"].dtype == np.int64
    assert got["is_ood"].dtype == np.bool_


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Guard, Path]:
    guard = head_guard()
    path = tmp_path_factory.mktemp("onnx") / "guard.onnx"
    guard.export_onnx(path, Batch(features(3, 5).features), class_names=["a", "b", "c", "d", "é"])
    return guard, path


# ── one graph
# ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_head_alone_decides_like_torch_at_any_batch_size(exported, rows):
    guard, path = exported
    batch = Batch(features(rows, 6).features + 0.5)
    assert_same(run(path, features=batch.features), guard.decide(batch))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_ood_in_the_graph_and_spoils_no_other(exported, bad):
    path = exported[1]
    clean = features(3, 6).features
    broken = clean.clone()
    broken[1, 4] = bad
    got = run(path, features=broken)
    expected = run(path, features=clean)
    assert got["score"][1] == -np.inf
    assert got["is_ood"][1]
    assert got["p_value"][1] == np.float32(1 / 201)
    assert (got["score"][[0, 2]] == expected["score"][[0, 2]]).all()


def test_the_file_says_what_it_is(exported):
    guard, path = exported
    found = deploy.metadata(path)
    assert found["version"] == fdbd.__version__
    assert found["class_names"] == ["a", "b", "c", "d", "é"]
    assert found["detector"] == guard.detector.to_config()
    assert found["head"] == guard.detector.head.fingerprint()
    assert found["threshold"]["kind"] == "quantile"
    assert found["threshold"]["target"] == 0.95
    assert found["threshold"]["value"] == guard.threshold.value.tolist()
    model = onnx.load(str(path))
    assert found["opset"] == 18
    assert [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")] == [
        18
    ]


def test_the_file_holds_no_trace_of_the_machine_that_made_it(exported):
    content = exported[1].read_bytes()
    assert b"stack_trace" not in content
    assert str(Path(fdbd.__file__).parent).encode() not in content
    assert str(Path(torch.__file__).parent).encode() not in content


def test_all_boundaries_cost_one_gather(exported):
    # Folded: beside the head's own product nothing grows with the number of classes.
    operators = [node.op_type for node in onnx.load(str(exported[1])).graph.node]
    assert operators.count("Gemm") + operators.count("MatMul") == 1
    assert operators.count("ArgMax") <= 2
    assert sum(name.startswith("Gather") for name in operators) <= 4
    assert len(operators) < 70


def test_only_the_file_appears(exported):
    assert [entry.name for entry in exported[1].parent.iterdir()] == ["guard.onnx"]


# ── every detector that can
# ─────────────────────────────────────────────────────────────────────────────────────────


def check_detector(name: str, path: Path) -> None:
    guard = head_guard(name)
    guard.export_onnx(path, features(4, 5))
    batch = features(9, 6)._replace(labels=None)
    assert_same(run(path, features=batch.features), guard.decide(batch))


@pytest.mark.parametrize("name", QUICK)
def test_detectors_give_the_same_scores_in_onnx_runtime(name, tmp_path):
    check_detector(name, tmp_path / "guard.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in NETWORK])
def test_all_detectors_give_the_same_scores_in_onnx_runtime(name, tmp_path):
    check_detector(name, tmp_path / "guard.onnx")


@pytest.mark.slow
@pytest.mark.parametrize(
    "detector",
    [
        fdbd.Ensemble(["fdbd", "energy"]),
        fdbd.Ensemble(["fdbd", "energy", "vim"], "fisher", weights=[3.0, 1.0, 0.5]),
        fdbd.FDBD(nearest=2),
        fdbd.FDBD("norm"),
        fdbd.FDBD(None),
        fdbd.KNN(5, index="flat"),
    ],
    ids=["ensemble", "weighted", "nearest", "norm", "no-normalizer", "flat"],
)
def test_variants_give_the_same_scores_in_onnx_runtime(detector, tmp_path):
    check_detector(detector, tmp_path / "guard.onnx")


def test_detectors_that_need_the_gradient_say_that_they_cannot(tmp_path):
    assert sorted(NETWORK) == ["adascale", "adascale+fdbd", "odin"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    perturbed = Guard(model, "energy", perturb=fdbd.InputPerturbation(0.001))
    perturbed.fit([torch.randn(20, 3, 2, 2)], progress=False).calibrate(
        [torch.randn(20, 3, 2, 2)], progress=False
    )
    for guard in (model_guard(model, (3, 2, 2), "odin"), perturbed):
        with pytest.raises(
            deploy.ExportError, match=r"(odin|perturbation) follows the network's gradient"
        ):
            guard.export_onnx(tmp_path / "guard.onnx", torch.randn(2, 3, 2, 2))
    assert not list(tmp_path.iterdir())


def test_an_approximate_index_is_refused(tmp_path):
    pytest.importorskip("faiss")
    for detector in (
        fdbd.KNN(5, index="ivf"),
        fdbd.Shaped(fdbd.ReAct(), fdbd.KNN(5, index="hnsw")),
    ):
        with pytest.raises(deploy.ExportError, match="searches its neighbours approximately"):
            head_guard(detector).export_onnx(tmp_path / "guard.onnx", features(4, 5))


# ── thresholds
# ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_many_calibration_scores_leave_p_values_and_decisions_exact(tmp_path):
    guard = head_guard("msp", calibration=4000, alpha=0.03)
    guard.export_onnx(tmp_path / "guard.onnx", features(4, 5))
    batch = features(500, 7)._replace(labels=None)
    got = run(tmp_path / "guard.onnx", features=batch.features)
    expected = guard.decide(batch)
    scores = torch.from_numpy(got["score"])
    assert np.abs(got["p_value"] - guard.threshold.p_values(scores).numpy()).max() < 1e-6
    assert (got["is_ood"] == guard.threshold.is_ood(scores).numpy()).all()
    assert (got["is_ood"] == (got["p_value"] <= 0.03)).all()
    assert 0 < expected.is_ood.sum() < 500
    assert deploy.metadata(tmp_path / "guard.onnx")["p_value_resolution"] == 0


def test_a_threshold_by_class_is_in_the_graph(tmp_path):
    guard = head_guard("energy", per_class=True)
    guard.export_onnx(tmp_path / "guard.onnx", features(4, 5))
    batch = features(50, 7)._replace(labels=None)
    got = run(tmp_path / "guard.onnx", features=batch.features)
    assert_same(got, guard.decide(batch))
    assert len(deploy.metadata(tmp_path / "guard.onnx")["threshold"]["value"]) == C


# ── models
# ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_model(
    model: nn.Module, shape: tuple[int, ...], path: Path, detector: str = "fdbd"
) -> None:
    guard = model_guard(model, shape, detector)
    guard.export_onnx(path, torch.randn(1, *shape))
    images = torch.randn(5, *shape)
    assert_same(run(path, images=images), guard(images))
    images[2].view(-1)[0] = float("nan")
    got = run(path, images=images)
    assert got["score"][2] == -np.inf
    assert got["is_ood"][2]
    assert np.isfinite(got["score"][[0, 1, 3, 4]]).all()


def test_a_cifar_resnet_is_one_graph_with_its_guard(tmp_path):
    torch.manual_seed(0)
    check_model(fdbd.networks.create("resnet20").eval(), (3, 32, 32), tmp_path / "guard.onnx")


def test_a_vision_transformer_is_one_graph_with_its_guard(tmp_path):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    vit = models.VisionTransformer(
        32, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=6
    )
    # Zero as built: no boundaries.
    nn.init.normal_(vit.heads.head.weight)
    check_model(vit.eval(), (3, 32, 32), tmp_path / "guard.onnx", "react+fdbd")


@pytest.mark.slow
def test_a_torchvision_resnet_is_one_graph_with_its_guard(tmp_path):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    check_model(models.resnet18(num_classes=10).eval(), (3, 64, 64), tmp_path / "guard.onnx")


def test_a_model_of_several_inputs_keeps_their_names_and_its_training_mode(tmp_path):
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(30, 12)
            self.dropout = nn.Dropout(0.5)
            self.classifier = nn.Linear(12, 4)

        def forward(self, input_ids, attention_mask):
            weight = attention_mask.unsqueeze(2).to(torch.float32)
            return self.classifier(
                self.dropout((self.embed(input_ids) * weight).sum(1) / weight.sum(1))
            )

    torch.manual_seed(0)

    def item(count: int, length: int = 7) -> dict[str, torch.Tensor]:
        return {
            "input_ids": torch.randint(0, 30, (count, length)),
            "attention_mask": torch.ones(count, length, dtype=torch.int64),
        }

    model = Tokens().train()
    guard = Guard(model).fit([item(60)], progress=False).calibrate([item(60)], progress=False)
    guard.export_onnx(tmp_path / "guard.onnx", item(2))
    assert model.training
    assert model.dropout.training
    for length in (7, 4, 19):
        new = item(5, length)
        assert_same(run(tmp_path / "guard.onnx", **new), guard(new))


def test_an_example_in_any_memory_layout_will_do(tmp_path):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()
    guard = model_guard(model, (3, 6, 6))
    images = torch.randn(3, 3, 6, 6)
    guard.export_onnx(tmp_path / "guard.onnx", images.to(memory_format=torch.channels_last))
    assert_same(run(tmp_path / "guard.onnx", images=images), guard(images))


def test_a_model_in_bfloat16_is_refused_in_one_sentence(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()
    guard = (
        Guard(model).fit([torch.randn(60, 6).bfloat16()]).calibrate([torch.randn(60, 6).bfloat16()])
    )
    with pytest.raises(deploy.ExportError, match=r"in bfloat16.*call model.float\(\)"):
        guard.export_onnx(tmp_path / "guard.onnx", torch.randn(2, 6).bfloat16())


# ── refusals
# ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Liar(Detector):
    """Scores one thing, exports another."""

    def formula(self, batch: Batch) -> torch.Tensor:
        return batch.features.sum(dim=1) + (0.01 if torch.compiler.is_compiling() else 0.0)


class TwoFaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x * 1.5 if torch.compiler.is_compiling() else x)


def test_a_graph_whose_score_differs_is_refused_and_the_old_file_stays(tmp_path):
    path = tmp_path / "guard.onnx"
    path.write_text("what was here before")
    with pytest.raises(
        deploy.ExportError, match=r"score differs from torch on the example \(ONNX Runtime\)"
    ):
        head_guard(Liar()).export_onnx(path, features(4, 5))
    assert path.read_text() == "what was here before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["guard.onnx"]


def test_a_graph_whose_logits_differ_is_refused(tmp_path):
    with pytest.raises(deploy.ExportError, match="logits differs"):
        model_guard(TwoFaced().eval(), (6,)).export_onnx(tmp_path / "guard.onnx", torch.randn(2, 6))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["label", "p_value", "is_ood"])
def test_what_follows_from_the_score_is_compared_too(name):
    threshold = fdbd.Threshold.quantile(torch.arange(10.0))
    logits = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    scores = torch.tensor([0.5, 7.0])
    right = dict(zip(deploy.OUTPUTS, (logits, logits.argmax(1), scores, *threshold(scores))))
    onnx_export._compare([*right.values()], [*right.values()], threshold, "a test")
    wrong = {**right, name: 1 - right[name].float()}
    with pytest.raises(deploy.ExportError, match=f"{name} differs"):
        onnx_export._compare([*wrong.values()], [*right.values()], threshold, "a test")


def test_a_model_that_cannot_be_traced_is_refused_with_a_reason(tmp_path):
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x):
            return self.fc(x if x.sum() > 0 else -x)

    with pytest.raises(deploy.ExportError, match=r"torch cannot export the guard \(fdbd\)"):
        model_guard(Branching().eval(), (6,)).export_onnx(
            tmp_path / "guard.onnx", torch.randn(2, 6)
        )


def test_an_uncalibrated_guard_is_refused(tmp_path):
    guard = head_guard()
    guard.threshold = None
    with pytest.raises(fdbd.NotCalibratedError, match="calibrate"):
        guard.export_onnx(tmp_path / "guard.onnx", features(2, 0))


def test_an_unfitted_guard_is_refused(tmp_path):
    with pytest.raises(fdbd.NotFittedError):
        Guard(Head(torch.eye(3))).export_onnx(tmp_path / "guard.onnx", Batch(torch.zeros(2, 3)))


@pytest.mark.parametrize("names", [["a", "b"], "abcde"])
def test_class_names_that_do_not_fit_are_refused(names, tmp_path):
    with pytest.raises(ValueError, match="expected a list of 5 names"):
        head_guard().export_onnx(tmp_path / "guard.onnx", features(2, 0), class_names=names)


@pytest.mark.parametrize("example", [torch.zeros(0, P), torch.tensor(1.0), "image.png"])
def test_an_example_without_samples_is_refused(example, tmp_path):
    with pytest.raises(ValueError, match="one row per sample"):
        head_guard().export_onnx(tmp_path / "guard.onnx", example)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        head_guard().export_onnx(tmp_path / "nowhere" / "guard.onnx", features(2, 0))


def test_a_guard_beyond_the_size_of_an_onnx_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_export, "_LARGEST_FILE", 100)
    with pytest.raises(deploy.ExportError, match="at most 2 GB"):
        head_guard().export_onnx(tmp_path / "guard.onnx", features(2, 0))


@pytest.mark.parametrize("package", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_package_is_named_with_its_pip_command(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtraError, match=rf"{package} is not installed; run: pip install 'fdbd\[onnx\]'"
    ):
        head_guard().export_onnx(tmp_path / "guard.onnx", features(2, 0))


def test_metadata_of_other_files_is_an_error_that_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="no ONNX file"):
        deploy.metadata(tmp_path / "missing.onnx")
    garbage = tmp_path / "garbage.onnx"
    garbage.write_bytes(b"\xff\x00 no protobuf")
    with pytest.raises(ValueError, match=r"is not an ONNX file|not exported by fdbd"):
        deploy.metadata(garbage)
    other = tmp_path / "other.onnx"
    onnx.save_model(onnx.helper.make_model(onnx.helper.make_graph([], "empty", [], [])), str(other))
    with pytest.raises(ValueError, match="not exported by fdbd"):
        deploy.metadata(other)


@pytest.mark.parametrize("opset", [-1, 0, 6, 10_000, 10**400])
def test_an_operator_set_that_does_not_exist_is_refused_before_any_work(
    exported, tmp_path, opset
) -> None:
    guard, _ = exported
    with pytest.raises(ValueError, match=r"expected a version of the ONNX operators, 7 to \d+"):
        deploy.export(guard, tmp_path / "guard.onnx", Batch(features(3, 5).features), opset=opset)
    assert not list(tmp_path.iterdir())


def test_an_operator_set_that_torch_cannot_convert_to_is_not_claimed(exported) -> None:
    model = onnx.load(str(exported[1]))
    onnx_export._check_written(model, 18)
    with pytest.raises(deploy.ExportError, match="opset 18 and cannot convert it to 7"):
        onnx_export._check_written(model, 7)


# ── maps


class Segmenter(nn.Module):
    """Maps of half the images' sides. With `end` "sized", an offset for each position of one size of
    images; with "rounded", the size is computed in Python's numbers on the way."""

    def __init__(self, end: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.head = nn.Conv2d(8, C, 1)
        self.offsets = nn.Parameter(torch.randn(8, 12, 12))
        self.end = end

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = self.body(images).relu()
        if self.end == "sized":
            maps = maps + self.offsets
        if self.end == "rounded":
            side = float(int(images.shape[2]))
            maps = maps * (side / 24)
        return self.head(maps)


def map_guard(end: str = "") -> Guard:
    generator = torch.Generator().manual_seed(1)
    guard = Guard(Segmenter(end).eval())
    guard.fit([torch.randn(30, 3, 24, 24, generator=generator)], progress=False)
    fresh = torch.randn(40, 3, 24, 24, generator=generator)
    return guard.calibrate([fresh], alpha=0.1, progress=False)


@pytest.mark.parametrize("size", [(24, 24), (40, 18), (3, 2)])
def test_a_graph_of_maps_decides_like_torch_on_images_of_any_size(map_graph, size) -> None:
    guard, record = map_graph
    assert "images of another size" in record.trials
    assert record.note == "takes images of any size that the model takes"
    images = torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(2))
    got = run(record.path, images=images)
    decision = guard(images)
    assert tuple(got) == deploy.MAP_OUTPUTS
    for name, expected in zip(got, decision):
        assert got[name].shape == tuple(expected.shape)
        np.testing.assert_allclose(got[name], expected.numpy(), rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.fixture(scope="module")
def map_graph(tmp_path_factory):
    guard = map_guard()
    path = tmp_path_factory.mktemp("maps") / "guard.onnx"
    return guard, guard.export_onnx(path, torch.randn(2, 3, 24, 24))


@pytest.mark.parametrize("end", ["sized", "rounded"])
def test_a_graph_of_maps_of_one_size_says_so(end, tmp_path) -> None:
    guard = map_guard(end)
    record = guard.export_onnx(tmp_path / "guard.onnx", torch.randn(2, 3, 24, 24))
    assert str(record).endswith("; takes images of 24 × 24 pixels alone")
    images = torch.randn(2, 3, 24, 24)
    got = run(record.path, images=images)
    assert np.array_equal(got["is_ood"], guard(images).is_ood.numpy())
    with pytest.raises(Exception, match="Got: 40 Expected: 24"):
        run(record.path, images=torch.randn(2, 3, 40, 40))
