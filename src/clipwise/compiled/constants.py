"""Tensors that a graph holds: which it may, and when two graphs hold the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..attributes import Same
from ..declared import is_declared_constant
from ..structure import tensors_in
from ..tracing import NeverTraceable, NotTraceable

_COPY, _TO = torch.ops.aten.lift_fresh_copy.default, torch.ops.aten._to_copy.default


def put_in_place(graph: GraphModule) -> None:
    """A tensor of numbers that goes to another device or type before it is used is held there: a graph that is recorded cannot wait for the host."""
    for number, node in enumerate(graph.graph.find_nodes(op="call_function", target=_TO)):
        made: Any = node.args[0]
        if made.target is not _COPY or len(made.users) > 1 or made.args[0].op != "get_attr":
            continue
        name = f"_in_place_{number}"
        setattr(graph, name, _TO(getattr(graph, made.args[0].target), **node.kwargs))
        with graph.graph.inserting_before(node):
            held = graph.graph.get_attr(name)
            copy = graph.graph.call_function(_COPY, (held,))
            copy.meta = node.meta
        node.replace_all_uses_with(copy)
        for gone in (node, made, *([made.args[0]] if len(made.args[0].users) == 1 else [])):
            graph.graph.erase_node(gone)
    graph.recompile()


def constants_of(graph: GraphModule) -> list[Tensor]:
    """Numbers that are baked in. (Fused attention hands empty tensors from its forward to its backward pass: they hold none.)"""
    found = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    return [tensor for tensor in found if tensor.numel()]


def check_constants(graph: GraphModule, declared: Sequence[Tensor]) -> None:
    """Example data may come in as an argument only: what is baked into a graph stays what it was, and would reach later steps.

    A tensor that the forward pass makes of one number, or for one row that all examples share, is as good as the number in its code (to the
    tape it is nobody's).
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        tensor = getattr(graph, node.target)
        if (
            tensor.numel()
            and not is_declared_constant(tensor)
            and not (_is_made_inside(node) and (_is_nobodys(tensor) or any(_holds_the_same(tensor.to(one.dtype), one) for one in declared)))
        ):
            raise NotTraceable(
                f"a tensor of shape {tuple(tensor.shape)} comes from outside the arguments: pass it to step(), register it as a buffer, or declare it "
                "with clipwise.constant(x)."
            )


def check_not_read(graph: GraphModule, overwritten: Iterable[Same]) -> None:
    """Raise NeverTraceable where the graph holds a tensor that the forward pass puts another in the place of: the next step would read that one."""
    held = {tensor.untyped_storage().data_ptr() for tensor in constants_of(graph)}
    if any(tensor.untyped_storage().data_ptr() in held for before in overwritten for tensor in tensors_in(before.value)):
        raise NeverTraceable("its forward pass reads a tensor that a module holds, and puts another in its place.")


def _is_made_inside(node: torch.fx.Node) -> bool:
    """torch.tensor(0.5), x[:, [-1]], x[0] = 3: torch says so of what it makes from numbers of Python's."""
    return all(user.target is _COPY for user in node.users)


def _is_nobodys(tensor: Tensor) -> bool:
    return not tensor.dim() or len(tensor) == 1


def are_one(mine: Tensor, other: Tensor) -> bool:
    """The same tensor, or one that is made anew in every forward pass and holds the same."""
    if mine is other or is_declared_constant(mine):
        return mine is other
    return _holds_the_same(mine, other)


def _holds_the_same(mine: Tensor, other: Tensor) -> bool:
    return mine.shape == other.shape and mine.dtype == other.dtype and repr(mine.tolist()) == repr(other.tolist())
