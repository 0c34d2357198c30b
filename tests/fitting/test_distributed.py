"""A guard fitted by several processes is the guard fitted by one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn

import fdbd


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 4)).eval()


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(301, 6, generator=torch.Generator().manual_seed(1)), torch.arange(301) % 4


def make_guard(name: str) -> fdbd.Guard:
    if name == "mds of layers":
        return fdbd.Guard(make_model(), fdbd.MDS(layers=["0"]))
    return fdbd.Guard(make_model(), name)


def fit_shard(rank: int, folder: str, names: list[str]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    torch.set_num_threads(1)
    inputs, labels = make_data()
    rows = slice(0, 120) if rank == 0 else slice(120, None)
    for name in names:
        guard = make_guard(name).fit([(inputs[rows], labels[rows])], progress=False)
        torch.save(guard.detector.state_dict(), f"{folder}/{name}-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_end_with_the_buffers_of_one(tmp_path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    names = ["fdbd", "vim", "react+mds", "ssd", "mds of layers"]
    torch.multiprocessing.spawn(fit_shard, (str(tmp_path), names), nprocs=2)
    inputs, labels = make_data()
    for name in names:
        expected = make_guard(name).fit([(inputs, labels)], progress=False).detector.state_dict()
        for rank in (0, 1):
            found = torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True)
            assert found.keys() == expected.keys()
            for key in expected:
                torch.testing.assert_close(
                    found[key], expected[key], rtol=1e-5, atol=1e-6, msg=f"{name} {key}"
                )
