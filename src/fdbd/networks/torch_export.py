"""Models that `torch.export` wrote: a graph, cut before its last linear layer so that features can be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

_LINEAR = torch.ops.aten.linear.default


def load_exported(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """The model in a ``.pt2`` file as ``nn.Sequential(backbone, linear head)``.

    Args:
        path: written by `torch.export.save`, with a dynamic batch size.
        trust: `torch.export.load` unpickles parts of the file, which can run code; without this it is refused.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {os.fspath(path)!r}: no such file")
    if not trust:
        raise ValueError(
            f"{os.fspath(path)!r} is a torch.export file, and torch unpickles those, which can run code: pass "
            "--trust-model if you know where it comes from, or give a factory with a --checkpoint"
        )
    try:
        program = torch.export.load(os.fspath(path))
    except Exception as error:  # a damaged archive raises nearly anything
        raise ValueError(f"{os.fspath(path)!r} is no readable torch.export file: {_first_line(error)}") from None
    return split_exported(program)


def split_exported(program: torch.export.ExportedProgram) -> nn.Module:
    """``nn.Sequential(backbone, linear head)`` of an exported classifier whose output is that of a linear layer."""
    module: Any = program.module()
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {})
    node = _only(output)
    if not isinstance(node, fx.Node) or node.target != _LINEAR:
        what = node.target if isinstance(node, fx.Node) else type(node).__name__
        raise ValueError(f"the exported graph ends in {what}, expected a linear layer that gives the logits")
    features, weight, bias = (*node.args, None)[:3]
    if not isinstance(weight, fx.Node) or weight.op != "get_attr" or not isinstance(features, fx.Node):
        raise ValueError("the exported graph's last linear layer computes its weights, expected stored ones")
    rows = _attribute(module, weight)
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, dtype=rows.dtype)
    with torch.no_grad():
        head.weight.copy_(rows)
        if isinstance(bias, fx.Node):
            head.bias.copy_(_attribute(module, bias))
    graph.output(features)
    backbone = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    backbone.recompile()
    return nn.Sequential(backbone, head)


def _attribute(module: nn.Module, node: fx.Node) -> torch.Tensor:
    value: torch.Tensor = module.get_parameter(str(node.target))
    return value.detach()


def _only(value: Any) -> Any:
    """What is inside tuples and lists of one."""
    while isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    return value


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
