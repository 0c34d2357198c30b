"""Everything runs on the model's device: tried on a device on which any mixture with the CPU's
memory is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import fdbd
from fdbd.bench import benchmark_of
from fdbd.bench.cache import FeatureCache
from fdbd.bench.config import Config
from fdbd.paper.image_detectors import image_results
from fdbd.paper.models import EvaluatedModel
from fdbd.paper.settings import ModelEntry
from fdbd.util.devices import choose_device

DEVICE = torch.device("privateuseone:0")


class Elsewhere(Tensor):
    """A tensor that says it is on another device; its numbers are in `inner`."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __deepcopy__(self, memo: Any) -> Elsewhere:
        return Elsewhere(self.inner.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return StrictDevice().__torch_dispatch__(func, types, args, kwargs)


class StrictDevice(TorchDispatchMode):
    """While it is active there is a device `DEVICE`, and an operation on tensors of it and of the
    CPU is refused."""

    has_float64 = True
    """Without it no operation may read or give float64 there, nor cast to it on the way to the CPU,
    as on Apple's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wrappers: dict[int, Elsewhere] = {}
        here = there = False

        def unwrap(value: Any) -> Any:
            nonlocal here, there
            if isinstance(value, Elsewhere):
                there = True
                wrappers[id(value.inner)] = value
                return value.inner
            here = here or (isinstance(value, Tensor) and value.ndim > 0)
            return value

        inner_args, inner_kwargs = pytree.tree_map(unwrap, (args, kwargs))
        target = kwargs.get("device")
        is_there = there if target is None else torch.device(target).type == DEVICE.type
        if target is not None:
            inner_kwargs["device"] = torch.device("cpu")
        is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if here and there and not is_copy:
            raise RuntimeError(f"{func} mixes tensors of two devices")
        result = func(*inner_args, **inner_kwargs)
        if not self.has_float64 and (there or is_there):
            for value in pytree.tree_leaves((inner_args, inner_kwargs, result)):
                if getattr(value, "dtype", value) is torch.float64:
                    raise TypeError(f"{func} with float64, which this device does not have")
        if is_copy and func is torch.ops.aten.copy_.default:
            is_there = isinstance(args[0], Elsewhere)

        def wrap(value: Any) -> Any:
            if not is_there or not isinstance(value, Tensor):
                return value
            return wrappers[id(value)] if id(value) in wrappers else Elsewhere(value)

        return pytree.tree_map(wrap, result)


@pytest.fixture(params=["with float64", "without float64"])
def device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.device]:
    monkeypatch.setattr(StrictDevice, "has_float64", request.param == "with float64")
    # Tensors written in Python know no inference mode.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch takes no devices written in Python")
    if not hasattr(torch, DEVICE.type):
        backend_registration._setup_privateuseone_for_python_backend()
    with StrictDevice():
        yield DEVICE


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def data(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 2, 2, generator=generator), torch.arange(count) % 4


def test_the_device_of_these_tests_refuses_a_mixture(device: torch.device) -> None:
    there = torch.ones(3).to(device)
    assert there.device == device
    assert (there + there).device == device
    assert torch.zeros(2, device=device).device == device
    assert (there + 1).cpu().tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="mixes tensors of two devices"):
        there + torch.ones(3)
    with pytest.raises((RuntimeError, TypeError)):
        there.numpy()
    if not StrictDevice.has_float64:
        for ask in (
            there.double,
            lambda: there.to("cpu", torch.float64),
            lambda: torch.ones(1).double().to(device),
        ):
            with pytest.raises(TypeError, match="float64"):
                ask()
        assert there.cpu().double().dtype == torch.float64


def test_a_device_by_its_name_is_taken_as_it_is(device: torch.device) -> None:
    assert choose_device(str(device)) == device


@pytest.mark.parametrize(
    "name", ["fdbd", "msp", "energy", "mds", "vim", "knn", "react+energy", "react+fdbd"]
)
def test_a_guard_fits_calibrates_decides_and_explains_where_its_model_is(
    name: str, device: torch.device, tmp_path: Path
) -> None:
    new = data(9, 3)[0]
    expected = fdbd.Guard(make_model(), name).fit([data(200, 1)]).calibrate([data(100, 2)])
    guard = fdbd.Guard(make_model().to(device), name).fit([data(200, 1)]).calibrate([data(100, 2)])
    decision = guard(new)
    assert all(part.device == device for part in decision)
    for there, here in zip(decision, expected(new)):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)
    features = guard.classifier(new)
    torch.testing.assert_close(
        guard.decide(fdbd.Batch(features.features.cpu())).scores.cpu(), decision.scores.cpu()
    )
    explanation = guard.explain(new)
    assert explanation.shares.device == device
    guard.save(tmp_path / "guard.safetensors")
    around = fdbd.load(tmp_path / "guard.safetensors", make_model().to(device))
    torch.testing.assert_close(around(new).scores.cpu(), decision.scores.cpu())
    loaded = fdbd.load(tmp_path / "guard.safetensors").to(device)
    assert torch.equal(
        loaded.decide(fdbd.Batch(features.features)).is_ood.cpu(), decision.is_ood.cpu()
    )


def test_a_guard_that_was_fitted_under_autocast_is_loaded_so(tmp_path: Path) -> None:
    classifier = fdbd.Classifier(make_model(), autocast=torch.bfloat16)
    guard = fdbd.Guard(classifier).fit([data(200, 1)]).calibrate([data(100, 2)])
    new = data(9, 3)[0]
    guard.save(tmp_path / "guard.safetensors")
    loaded = fdbd.load(tmp_path / "guard.safetensors", make_model())
    assert torch.equal(loaded(new).scores, guard(new).scores)
    plain = fdbd.load(tmp_path / "guard.safetensors", fdbd.Classifier(make_model()))
    assert not torch.equal(plain(new).scores, guard(new).scores)
    torch.testing.assert_close(plain(new).scores, guard(new).scores, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="autocast"):
        guard.export_onnx(tmp_path / "guard.onnx", new)


@pytest.mark.parametrize("name", ["fdbd", "msp", "react+energy"])
def test_features_too_large_for_float32_are_rescued_on_every_device(
    name: str, device: torch.device
) -> None:
    guard = fdbd.Guard(make_model().to(device), name).fit([data(200, 1)])
    features = guard.classifier(data(3, 3)[0]).features * 1e38
    scores = guard.detector.score(fdbd.Batch(features))
    assert scores.device == device
    expected = (
        fdbd.Guard(make_model(), name)
        .fit([data(200, 1)])
        .detector.score(fdbd.Batch(features.cpu()))
    )
    torch.testing.assert_close(scores.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A benchmark of a small network on files of random images of more and of less contrast."""
    monkeypatch.setenv("FDBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fdbd.bench.test_network", make_model, raising=False)
    generator = np.random.default_rng(0)
    for name, count, range_ in (("train", 80, 255), ("test", 40, 255), ("outside", 30, 60)):
        pixels = generator.integers(0, range_, (count, 2, 2, 3), np.uint8)
        np.savez(tmp_path / f"{name}.npz", x=pixels, y=np.arange(count) % 4)
    return Config.from_dict(
        {
            "model": "fdbd.bench:test_network",
            "id": str(tmp_path / "test.npz"),
            "train": str(tmp_path / "train.npz"),
            "ood": [str(tmp_path / "outside.npz")],
            "preprocess": {"size": 2, "mean": [0.5] * 3, "std": [0.5] * 3},
            "batch_size": 16,
        }
    )


def test_a_benchmark_and_an_experiment_run_their_network_on_the_device(
    config: Config, device: torch.device, tmp_path: Path
) -> None:
    def run(where: torch.device) -> tuple[Tensor, list[float]]:
        cache = FeatureCache(tmp_path / where.type)
        benchmark = benchmark_of(config, cache, lambda line: None, device=where)
        model = EvaluatedModel("tiny", benchmark, ModelEntry(title="tiny"), config, str(where))
        assert all(part.device == where for part in model.network[0].parameters())
        results = image_results(model, ["csi"], limit=20)
        assert benchmark.forward is not None
        assert benchmark.forward(4).median > 0
        return benchmark.test.features, [
            float(row.evaluations["outside"].auroc) for row in results.rows
        ]

    features, metrics = run(torch.device("cpu"))
    there_features, there_metrics = run(device)
    torch.testing.assert_close(there_features, features)
    assert there_metrics == pytest.approx(metrics, abs=1e-3)


def test_the_cache_tells_features_under_autocast_from_others(
    config: Config, tmp_path: Path
) -> None:
    plain, rounded = (
        benchmark_of(
            config,
            FeatureCache(tmp_path / "both"),
            lambda line: None,
            device="cpu",
            autocast=precision,
        )
        for precision in (None, torch.bfloat16)
    )
    assert rounded.test.features.dtype == torch.float32
    assert not torch.equal(rounded.test.features, plain.test.features)
    torch.testing.assert_close(rounded.test.features, plain.test.features, rtol=0.05, atol=0.05)


SCORED_BLINDLY = [
    name
    for name in fdbd.list_detectors()
    if not fdbd.create(name).needs.network and fdbd.create(name).__module__.startswith("fdbd.")
]


@pytest.mark.parametrize("name", [*SCORED_BLINDLY, "react+fdbd", "ash-s+fdbd", "scale+knn"])
def test_a_score_on_an_accelerator_never_waits_for_a_number(name: str) -> None:
    # A tensor on the meta device has no numbers: whatever asks for one, and would make the host
    # wait for a GPU, is an error.
    from fdbd.testing import fitted, trial_data

    options = {"k": 3} if name.split("+")[-1] in ("knn", "nnguide") else {}
    detector = fdbd.create(name, **options)
    data = trial_data(detector, torch.float32, views=False)
    learner = fitted(detector, data)
    queries = data.queries._replace(logits=data.head(data.queries.features))
    there = learner.to("meta")
    scores = there.score(queries.to("meta"))
    assert scores.device.type == "meta"
    assert scores.shape == (16,)


class HostTensors(TorchDispatchMode):
    """Notes the operations that are given a tensor in the CPU's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.given_to: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(value, Tensor) and value.is_cpu:
                self.given_to.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("name", ["fdbd", "energy", "mds", "vim", "knn", "react+fdbd"])
def test_a_guard_on_an_accelerator_reads_no_number_and_copies_none(
    name: str, per_class: bool
) -> None:
    guard = fdbd.Guard(make_model(), name).fit([data(200, 1)])
    guard.calibrate([data(200, 2)], tpr=0.9, per_class=per_class)
    guard.to("meta")
    images = torch.empty(7, 3, 2, 2, device="meta")
    # Whatever reads a number, and would make the host wait for a GPU, is an error here.
    decision = guard(images)
    assert decision.logits.shape == (7, 4)
    assert all(part.device.type == "meta" for part in decision)
    # A copy from the host to the device is no error, so that it is looked for.
    with torch.no_grad(), HostTensors() as seen:
        guard(images)
    assert seen.given_to == []
