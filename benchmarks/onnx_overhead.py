"""What a guard costs in ONNX Runtime compared with the plain classifier: ResNet-18 at 224 × 224,
batch 1.

Run ``python benchmarks/onnx_overhead.py``; it writes the section "ONNX" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import onnxruntime
import torch
from _common import interleaved, machine, seconds_text, table, write_section
from torchvision.models import resnet18

import fdbd
from fdbd.export.onnx import OPSET

LIMIT = 0.03
BASE = "classifier alone"


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def cpu_seconds(
    contenders: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """CPU time of this thread for each call: a session with one thread does its work in it."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders)[:: 1 if number % 2 else -1]:
            start = time.thread_time()
            contenders[name]()
            seconds[name].append(time.thread_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--detectors", nargs="+", default=["fdbd", "react+fdbd", "energy"])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calibration", type=int, default=5000, help="calibration scores")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = resnet18(num_classes=1000).eval()
    features = fdbd.Batch(torch.rand(512, 512), None, torch.arange(512))
    image = torch.randn(1, 3, 224, 224)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain.onnx")
        batch = torch.export.Dim("N")
        program = torch.onnx.export(
            model,
            (image.repeat(2, 1, 1, 1),),
            dynamo=True,
            dynamic_shapes=({0: batch},),
            opset_version=OPSET,
            verbose=False,
        )
        program.save(plain, external_data=False)
        sessions = {BASE: session(plain)}
        for name in options.detectors:
            guard = fdbd.Guard(model, name).fit(features, progress=False)
            guard.set_threshold(guard.score(fdbd.Batch(torch.rand(options.calibration, 512))))
            path = Path(folder, "guard.onnx")
            guard.export_onnx(path, image)
            sessions[name] = session(path)
    feeds = {name: {one.get_inputs()[0].name: image.numpy()} for name, one in sessions.items()}
    contenders = {
        name: lambda one=one, feed=feeds[name]: one.run(None, feed)
        for name, one in sessions.items()
    }
    times = interleaved(contenders, rounds=options.rounds, calls=4)
    own = cpu_seconds(contenders, options.rounds * 3)
    rows = []
    for name in sessions:
        wall = times.ratio(name, BASE) - 1
        cpu = median(a / b for a, b in zip(own[name], own[BASE])) - 1
        overheads = ["", ""]
        if name != BASE:
            overheads = [f"{wall:+.2%}", f"{cpu:+.2%}"]
        rows.append(
            [
                name,
                seconds_text(times.seconds(name)),
                overheads[0],
                seconds_text(median(own[name])),
                overheads[1],
            ]
        )
        print(*rows[-1])
    write_section(
        "ONNX",
        "`python benchmarks/onnx_overhead.py`: ONNX Runtime on the CPU, 1 thread, ResNet-18 at 224"
        f" × 224, 1,000 classes, batch 1, opset {OPSET}, {options.calibration:,} calibration"
        " scores. A guard's graph gives logits, label, score, p_value and is_ood. An overhead is"
        " the median ratio to the classifier alone, run in the same round: wall-clock time over"
        f" {options.rounds} interleaved rounds, and CPU time of the thread over"
        f" {options.rounds * 3} rounds, which other programs on the machine disturb less. Target:"
        f" at most {LIMIT:.0%}.\n\n"
        + table(["graph", "wall clock", "overhead", "CPU time", "overhead"], rows)
        + "\n"
        + machine(("torch", "onnxruntime", "onnx"))
        + "\n",
    )


if __name__ == "__main__":
    main()
