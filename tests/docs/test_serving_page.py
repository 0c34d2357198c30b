"""The commands of docs/serving.md, run word for word against a service that they start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def commands(start: str) -> list[list[str]]:
    """Lines of the page's code blocks that start with a word, as arguments."""
    blocks = re.findall(r"```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return [
        shlex.split(line)
        for block in blocks
        for line in block.splitlines()
        if line.startswith(start)
    ]


def wait_until_ready(address: str, service: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        assert service.poll() is None, "the service ended"
        try:
            urllib.request.urlopen(f"{address}/v2/health/ready", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail("the service is not ready after two minutes")


@pytest.mark.slow
def test_the_commands_on_the_page_run_as_they_stand(tmp_path: Path) -> None:
    from PIL import Image

    for module in (
        "onnxruntime",
        "onnxscript",
        "uvicorn",
        "starlette",
        "prometheus_client",
        "tritonclient",
    ):
        pytest.importorskip(module)
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    generator = np.random.default_rng(0)
    for folder in ("train", "fresh"):
        for name in CLASSES:
            (tmp_path / folder / name).mkdir(parents=True)
            for number in range(3):
                picture = Image.fromarray(generator.integers(0, 255, (32, 32, 3), np.uint8))
                picture.save(tmp_path / folder / name / f"{number}.png")
    program = [sys.executable, "-m", "fdbd"]
    for _, *arguments in [*commands("fdbd fit"), *commands("fdbd export")]:
        subprocess.run(
            [*program, *arguments], cwd=tmp_path, check=True, timeout=300, capture_output=True
        )
    codes = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (client_code,) = [code for code in codes if "tritonclient" in code]
    served = [each for each in commands("fdbd serve") if "cats=cats.onnx" not in each]
    assert [arguments[2] for arguments in served] == ["guard.safetensors", "guard.onnx"]
    for _, *arguments in served:
        # The page's own may be taken.
        port = free_port()
        if "--port" in arguments:
            arguments = arguments[: arguments.index("--port")]
        asked = [*program, *arguments, "--port", str(port)]
        service = subprocess.Popen(
            asked, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", service)
            for curl in commands("curl"):
                explains = any("explain=true" in part for part in curl)
                if explains and "guard.onnx" in arguments:
                    # An ONNX file cannot explain.
                    continue
                there = [part.replace("127.0.0.1:8000", f"127.0.0.1:{port}") for part in curl]
                done = subprocess.run(
                    [*there, "--silent", "--fail"], cwd=tmp_path, capture_output=True, timeout=60
                )
                assert done.returncode == 0, (curl, done.stdout, done.stderr)
                if any("/decide" in part for part in there):
                    answer = json.loads(done.stdout)
                    assert {"label", "class", "score", "p_value", "is_ood"} <= set(answer), answer
            client = client_code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            done = subprocess.run(
                [sys.executable, "-c", client], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("[") == 2, done.stdout
        finally:
            service.terminate()
            service.wait(timeout=60)
