"""What torch.compile makes of fDBD's score for a GPU, without having one: its Triton kernels are run
by Triton's interpreter, compared with the score of the CPU, and compiled for a Tesla T4.

    pip install triton
    python benchmarks/triton_kernels.py [--rows 37 --width 512 --classes 10]

torch.compile asks Triton for a GPU before it writes a kernel. Here a stand-in answers, which knows
the kind of GPU and nothing else. Prints, and writes no file that stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import triton
from torch import Tensor
from torch._inductor import utils
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

import fdbd

T4 = GPUTarget("cuda", 75, 32)
ROWS_PER_PROGRAM = 8
_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)
_SIGNATURE = re.compile(r"'signature': (\{.*?\})")


class StandIn:
    """Triton's driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return T4

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0


def problem(rows: int, width: int, classes: int) -> tuple[fdbd.FDBD, Tensor, Tensor]:
    """A fitted detector, features and logits; three rows hold a number that is not finite."""
    torch.manual_seed(0)
    head = fdbd.Head(torch.randn(classes, width), torch.randn(classes))
    features = torch.randn(rows, width).relu()
    detector = fdbd.FDBD().fit(fdbd.Batch(features), head)
    logits = head(features)
    features[1, width // 2] = torch.nan
    features[2, 0] = torch.inf
    logits[3, classes - 1] = torch.nan
    return detector, features, logits


def interpreted(detector: fdbd.FDBD, features: Tensor, logits: Tensor) -> tuple[Tensor, str]:
    """The scores by Triton's interpreter, and the code that torch.compile wrote."""

    def score(features: Tensor, logits: Tensor) -> Tensor:
        return detector.score(fdbd.Batch(features, logits))

    with torch._inductor.config.patch(
        cpu_backend="triton", compile_threads=1, force_disable_caches=True
    ):
        compiled = torch.compile(score, fullgraph=True)
        scores, sources = utils.run_and_get_code(compiled, features, logits)
    return scores, "\n".join(sources)


def compile_for_t4(path: Path) -> None:
    """Compile each kernel in a file that torch.compile wrote, and print what it became."""
    for name, source in _KERNEL.findall(path.read_text(encoding="utf-8")):
        # Written for the CPU, it would look for a driver of that.
        source = source.replace("triton_helpers.set_driver_to_cpu()", "")
        place = path.with_name(f"{name[:40]}.py")
        place.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("written", place)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = _SIGNATURE.search(source)
        assert found is not None
        signature = eval(found[1])
        constants = {}
        for argument, kind in signature.items():
            if kind == "constexpr":
                constants[argument] = 1024 if argument.startswith("R") else ROWS_PER_PROGRAM
        kernel = triton.compile(
            ASTSource(getattr(module, name).fn, signature, constants), target=T4
        )
        print(f"  {name}: {len(kernel.asm['cubin']):,} bytes of machine code for sm_75")


def interpret(path: Path, rows: int, width: int, classes: int) -> None:
    """Run the kernels by the interpreter, compare and print; their code goes to a file."""
    detector, features, logits = problem(rows, width, classes)
    scores, code = interpreted(detector, features, logits)
    expected = detector.score(fdbd.Batch(features, logits))
    torch.testing.assert_close(scores, expected)
    finite = expected.isfinite()
    difference = (scores - expected)[finite].abs().max()
    print(
        f"torch {torch.__version__}, Triton {triton.__version__}: {len(_KERNEL.findall(code))} "
        f"kernels, interpreted on {rows} rows: {int((~finite).sum())} of them −inf as on the CPU, "
        f"the others within {difference:.1e}"
    )
    path.write_text(code, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=37)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--step", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is None:
        run_both_steps()
        return
    warnings.simplefilter("ignore")
    driver.set_active(StandIn())
    name, file = options.step
    if name == "interpret":
        interpret(Path(file), options.rows, options.width, options.classes)
    else:
        compile_for_t4(Path(file))


def run_both_steps() -> None:
    """Each in a process of its own: when Triton is imported, it chooses whether it interprets."""
    with tempfile.TemporaryDirectory() as folder:
        for name, interprets in (("interpret", "1"), ("compile", "0")):
            step = ["--step", name, str(Path(folder) / "code.py")]
            environment = {**os.environ, "TRITON_INTERPRET": interprets}
            subprocess.run([sys.executable, *sys.argv, *step], env=environment, check=True)


if __name__ == "__main__":
    main()
