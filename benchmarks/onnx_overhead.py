"""What a guard costs in ONNX Runtime: its graph against the plain classifier's, ResNet-18 at 224 × 224, batch 1.

Run ``python benchmarks/onnx_overhead.py``; it writes the section "ONNX" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

import onnxruntime
import torch
from _common import interleaved, machine, seconds_text, table, write_section
from torchvision.models import resnet18

import fdbd
from fdbd.deploy.onnx import OPSET

LIMIT = 0.03


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--detectors", nargs="+", default=["fdbd", "react+fdbd", "energy"])
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1, help="of ONNX Runtime; one is steadier on a busy machine")
    parser.add_argument(
        "--calibration", type=int, default=5000, help="calibration scores: above 1,024 p-values interpolate"
    )
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
        sessions = {"classifier alone": session(plain, options.threads)}
        for name in options.detectors:
            guard = fdbd.Guard(model, name).fit(features, progress=False)
            guard.set_threshold(guard.score(fdbd.Batch(torch.rand(options.calibration, 512))))
            path = Path(folder, "guard.onnx")
            guard.export_onnx(path, image)
            sessions[name] = session(path, options.threads)
    feeds = {name: {one.get_inputs()[0].name: image.numpy()} for name, one in sessions.items()}
    contenders = {name: (lambda one=one, feed=feeds[name]: one.run(None, feed)) for name, one in sessions.items()}
    times = interleaved(contenders, rounds=options.rounds, calls=4)
    rows = []
    for name in sessions:
        extra = times.ratio(name, "classifier alone") - 1
        best = min(times.rounds[name])
        rows.append(
            [
                name,
                seconds_text(times.seconds(name)),
                seconds_text(best),
                "" if name == "classifier alone" else f"{extra:+.2%}",
            ]
        )
        print(*rows[-1])
    write_section(
        "ONNX",
        f"`python benchmarks/onnx_overhead.py`: ONNX Runtime on the CPU, {options.threads} thread, "
        "ResNet-18 at 224 × 224, 1,000 classes, "
        f"batch 1, opset {OPSET}, {options.calibration:,} calibration scores. A guard's graph "
        "gives logits, label, score, "
        f"p_value and is_ood. The overhead is the median over {options.rounds} interleaved rounds "
        "of the ratio within a "
        f"round; at most {LIMIT:.0%} is asked for.\n\n"
        + table(["graph", "median", "fastest", "overhead"], rows)
        + "\n"
        + machine(("torch", "onnxruntime", "onnx"))
        + "\n",
    )


if __name__ == "__main__":
    main()
