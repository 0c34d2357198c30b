"""Two processes that share each batch are one process with the joint batch."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from fdbd import train
from fdbd.train.distributed import rows_of

SCRIPT = """
import json, os, sys
import numpy as np, torch
torch.set_num_threads(1)
from fdbd import train
data = np.load(sys.argv[1])
options = json.loads(sys.argv[2])
result = train.train(options.pop("recipe"), (data["x"], data["y"]), device="cpu", progress=False, log="none", **options)
if os.environ["RANK"] == "0":
    torch.save({"history": result.history, "state": result.model.state_dict()}, sys.argv[3])
"""


def slow(recipe):
    return pytest.param(recipe, marks=pytest.mark.slow)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize("recipe", [slow("zoo-ce"), "zoo-supcon", slow("csi-small")])
def test_two_processes_have_the_loss_curve_of_one(recipe, networks, data, tmp_path):
    np.savez(tmp_path / "data.npz", x=data[0], y=data[1])
    (tmp_path / "run.py").write_text(SCRIPT)
    options = {
        "model": "tiny_networks:still", "num_classes": 4, "epochs": 3, "batch_size": 16, "lr": 0.05,
        "whiten": False,
        "start": "", "sizes": [], "ema": 0.9, "linear_epochs": 5,
    }  # fmt: skip
    arguments = [
        str(tmp_path / "data.npz"),
        json.dumps({"recipe": recipe, **options}),
        str(tmp_path / "two.pt"),
    ]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    workers = subprocess.Popen(
        [*torchrun, f"--master-port={free_port()}", str(tmp_path / "run.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(networks), "OMP_NUM_THREADS": "1"},
    )
    one = train.train(recipe, data, device="cpu", progress=False, log="none", **options)
    assert workers.wait(200) == 0
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for a, b in zip(one.history, two["history"], strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
    for key, value in one.model.state_dict().items():
        torch.testing.assert_close(two["state"][key], value, atol=2e-4, rtol=1e-3)


def test_rows_of_a_joint_batch():
    assert [rows_of(rank, 2, 8) for rank in range(2)] == [slice(0, 4), slice(4, 8)]
    with pytest.raises(ValueError, match="a batch of 9 does not divide among 2 processes"):
        rows_of(0, 2, 9)
