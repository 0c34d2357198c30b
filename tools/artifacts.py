"""Write the files that a release leaves behind to tests/artifacts/VERSION: guards, a monitor, an ONNX graph, results.

`python tools/artifacts.py` runs once per release; tests/test_artifacts.py loads the files of all releases.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fdbd

CLASSES = 4
WIDTH = 6
FIELDS = ("labels", "scores", "p_values", "is_ood")
THRESHOLDS: tuple[dict[str, float | bool], ...] = (
    {"tpr": 0.9},
    {"alpha": 0.1},
    {"tpr": 0.9, "per_class": True},
)


def main() -> None:
    # The guards have few calibration samples, on purpose.
    warnings.simplefilter("ignore")
    folder = Path(__file__).parents[1] / "tests" / "artifacts" / fdbd.__version__
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    expected: dict[str, Tensor] = {}
    _features(folder, generator, expected)
    _images(folder, generator, expected)
    save_file(expected, folder / "expected.safetensors")
    for path in folder.iterdir():
        path.chmod(0o644)


def _features(folder: Path, generator: torch.Generator, expected: dict[str, Tensor]) -> None:
    """A guard of each detector on features, one with an ensemble, a monitor and an ONNX graph."""
    centres = 3 * torch.randn(CLASSES, WIDTH, generator=generator)

    def sample(count: int) -> fdbd.Batch:
        labels = torch.arange(count) % CLASSES
        return fdbd.Batch(
            (centres[labels] + torch.randn(count, WIDTH, generator=generator)).relu(), None, labels
        )

    head = fdbd.Head(
        torch.randn(CLASSES, WIDTH, generator=generator), torch.randn(CLASSES, generator=generator)
    )
    train = sample(80)
    calibration = sample(60)
    others = sample(60)
    far = 20 * torch.rand(3, WIDTH, generator=generator)
    probe = torch.cat([sample(6).features, far, torch.full((1, WIDTH), torch.nan)])
    expected["probe"] = probe
    shapings = fdbd.list_shapings()
    names = []
    for name in fdbd.list_detectors():
        # A shaping alone is not a detector.
        is_shaping = name in shapings
        names.append(f"{name}+fdbd" if is_shaping else name)
    alone = [name for name in names if not fdbd.create(name).needs.network]
    for index, name in enumerate([*alone, "react+energy", "scale+knn"]):
        guard = fdbd.Guard(head, fdbd.create(name)).fit([train])
        guard.calibrate([calibration], **THRESHOLDS[index % 3])  # type: ignore[arg-type]
        _keep(folder, name, guard, guard.decide(fdbd.Batch(probe)), expected)
    ensemble = fdbd.Ensemble(["fdbd", "energy"])
    guard = fdbd.Guard(head, ensemble).fit([train])
    ensemble.calibrate([calibration])
    guard.calibrate([others], alpha=0.1)
    _keep(folder, "ensemble", guard, guard.decide(fdbd.Batch(probe)), expected)
    guard = fdbd.Guard(head, "fdbd").fit([train]).calibrate([calibration], alpha=0.1)
    guard.save(folder / "monitored.safetensors")
    monitor = fdbd.Monitor(guard)
    monitor.update(guard.decide(fdbd.Batch(sample(50).features)))
    monitor.save(folder / "monitor.safetensors")
    (folder / "monitor-snapshot.json").write_text(
        json.dumps(monitor.snapshot(), indent=1) + "\n", encoding="utf-8"
    )
    guard.export_onnx(folder / "guard.onnx", fdbd.Batch(probe[:3]))


def _images(folder: Path, generator: torch.Generator, expected: dict[str, Tensor]) -> None:
    """Guards around a small network: plain, with input noise, with views, with several layers."""
    torch.manual_seed(0)
    backbone = (
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, WIDTH),
        nn.ReLU(),
    )
    model = nn.Sequential(*backbone, nn.Linear(WIDTH, CLASSES)).eval()
    save_file(model.state_dict(), folder / "model-weights.safetensors")
    images, fresh, asked = (
        torch.rand(count, 3, 8, 8, generator=generator) for count in (60, 40, 4)
    )
    expected["images"] = asked
    detectors = {name: fdbd.create(name) for name in ("fdbd", "odin", "adascale")}
    for name, detector in {**detectors, "mds-layers": fdbd.MDS(layers=("0", "4"))}.items():
        guard = (
            fdbd.Guard(model, detector)
            .fit([(images, torch.arange(60) % CLASSES)])
            .calibrate([fresh], alpha=0.1)
        )
        decision = guard(asked)
        _keep(folder, f"images-{name}", guard, decision, expected)
        expected[f"images-{name}/logits"] = decision.logits.detach().contiguous()


def _keep(
    folder: Path, name: str, guard: fdbd.Guard, decision: fdbd.Decision, expected: dict[str, Tensor]
) -> None:
    guard.save(folder / f"{name}.safetensors")
    expected |= {
        f"{name}/{field}": getattr(decision, field).detach().contiguous() for field in FIELDS
    }


if __name__ == "__main__":
    main()
