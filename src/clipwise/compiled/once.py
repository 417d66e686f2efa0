"""Calls that a graph makes twice with the same arguments are made once: two biases of a recurrent layer have one gradient, a layer's weight and its bias
need the norm of the same rows. (Inductor does so too; a graph that is replayed as it was traced has nobody else who would.)"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch.fx import GraphModule, Node


def make_each_call_once(graph: GraphModule) -> None:
    """In place. Several outputs may then be one tensor, or views of one.

    Only calls after the last one that changes its arguments, and with them whatever shares their memory, are looked at. Not for graphs in which something
    is computed again to save memory.
    """
    nodes = list(graph.graph.nodes)
    last = max([place for place, node in enumerate(nodes) if _changes_something(node)], default=-1)
    first: dict[Hashable, Node] = {}
    for node in nodes[last + 1 :]:
        if node.op in ("placeholder", "output") or may_draw(node):
            continue
        same = first.setdefault((node.target, _told_apart(node.args), _told_apart(node.kwargs)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.graph.erase_node(node)
    graph.recompile()


def _changes_something(node: Node) -> bool:
    """Or may do so, for all that is known."""
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    return node.op not in ("placeholder", "output", "get_attr") and node.target is not operator.getitem


def may_draw(node: Node) -> bool:
    """Whether it is a call that may draw random numbers: two such calls are two."""
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _told_apart(value: Any) -> Hashable:
    """Equal for the same nodes and the same numbers of one type: 1 is neither 1.0 nor True, and 0.0 not -0.0."""
    if isinstance(value, list | tuple):
        return tuple([_told_apart(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _told_apart(item)) for name, item in value.items()])
    return value if isinstance(value, Node) else (type(value), repr(value) if isinstance(value, float) else value)
