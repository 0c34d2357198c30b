"""Models that `torch.export` wrote: a graph, cut before its last linear layer so that features can be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fdbd.util.terminal import one_line


def load_exported(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """The model in a ``.pt2`` file as ``nn.Sequential(backbone, linear head)``.

    Args:
        path: written by `torch.export.save`, with a dynamic batch size.
        trust: `torch.export.load` unpickles parts of the file, which can run code; without this it is refused.
    """
    name = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {name!r}: no such file")
    if not trust:
        raise ValueError(
            f"{name!r} is a torch.export file, and torch unpickles those, which can run code: pass --trust-model if "
            "you know where it comes from, or give a factory with a --checkpoint"
        )
    try:
        program = torch.export.load(name)
    except Exception as error:  # a damaged archive raises nearly anything
        raise ValueError(f"{name!r} is no readable torch.export file: {one_line(error)[:200]}") from None
    return split_exported(program)


def split_exported(program: torch.export.ExportedProgram) -> nn.Module:
    """``nn.Sequential(backbone, linear head)`` of an exported classifier whose output is that of a linear layer."""
    module: Any = program.module()
    graph = fx.Graph()
    node: Any = graph.graph_copy(module.graph, {})
    while isinstance(node, (tuple, list)) and len(node) == 1:
        node = node[0]
    if not isinstance(node, fx.Node) or node.target != torch.ops.aten.linear.default:
        what = node.target if isinstance(node, fx.Node) else type(node).__name__
        raise ValueError(f"the exported graph ends in {what}, expected a linear layer that gives the logits")
    features, *stored = (each for each in node.args if each is not None)
    if any(not isinstance(each, fx.Node) or each.op != "get_attr" for each in stored):
        raise ValueError("the exported graph's last linear layer computes its weights, expected stored ones")
    weight, *bias = (module.get_parameter(str(each.target)).detach() for each in stored)  # type: ignore[union-attr]
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias), dtype=weight.dtype)
    head.load_state_dict({"weight": weight, **({"bias": bias[0]} if bias else {})})
    graph.output(features)
    backbone = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    backbone.recompile()
    return nn.Sequential(backbone, head)
