"""Models in files of torch.export, as a backbone and a linear head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fdbd.util.terminal import one_line


def load_exported(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """The model in a ``.pt2`` file of `torch.export.save`, with a dynamic batch size, that ends in
    a linear layer, as ``nn.Sequential(backbone, linear head)``. Torch unpickles parts of the file:
    without `trust` it is refused."""
    name = os.fspath(path)
    if not Path(path).is_file():
        raise FileNotFoundError(f"no model at {name!r}: no such file")
    if not trust:
        why = f"{name!r} is a torch.export file, and torch unpickles those, which can run code"
        advice = (
            "pass --trust-model if you know where it comes from, or give a factory with a"
            " --checkpoint"
        )
        raise ValueError(f"{why}: {advice}")
    try:
        program = torch.export.load(name)
    except Exception as error:
        # A damaged archive raises nearly anything.
        raise ValueError(
            f"{name!r} is not a readable torch.export file: {one_line(error)[:200]}"
        ) from None
    module: Any = program.module()
    graph = fx.Graph()
    # The copy of a graph returns what its output node gave.
    last: Any = graph.graph_copy(module.graph, {})
    while isinstance(last, (tuple, list)) and len(last) == 1:
        last = last[0]
    head, features = _split_last_linear(last, module)
    graph.output(features)
    backbone = fx.GraphModule(module, graph)
    graph.eliminate_dead_code()
    backbone.recompile()
    return nn.Sequential(backbone, head)


def _split_last_linear(last: Any, module: Any) -> tuple[nn.Linear, fx.Node]:
    """The linear layer that gives the logits, and the node of what it is applied to."""
    if not isinstance(last, fx.Node) or last.target != torch.ops.aten.linear.default:
        what = last.target if isinstance(last, fx.Node) else type(last).__name__
        raise ValueError(
            f"the exported graph ends in {what}, expected a linear layer that gives the logits"
        )
    features = last.args[0]
    assert isinstance(features, fx.Node)
    tensors = []
    for stored in last.args[1:]:
        if stored is None:
            continue
        if not isinstance(stored, fx.Node) or stored.op != "get_attr":
            raise ValueError(
                "the exported graph's last linear layer computes its weights, expected stored ones"
            )
        tensors.append(module.get_parameter(str(stored.target)).detach())
    weight = tensors[0]
    has_bias = len(tensors) > 1
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, dtype=weight.dtype)
    state = {"weight": weight}
    if has_bias:
        state["bias"] = tensors[1]
    head.load_state_dict(state)
    return head, features
