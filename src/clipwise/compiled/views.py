"""Chains of views become one view: in a program that Python runs, each costs as much to start as a kernel.

as_strided(x, shape, strides)   for a view of an input, whose strides are known, that begins where the input does
view(x, shape)                  for a reshape of a reshape of anything
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_aten = torch.ops.aten
_SMALL = 2**16  # numbers that nobody misses
_RESHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims}
_VIEWS = _RESHAPES | {
    _aten.transpose.int, _aten.t.default, _aten.permute.default, _aten.expand.default, _aten.alias.default, _aten.detach.default,
    _aten.select.int, _aten.slice.Tensor,
}  # fmt: skip

_BLANKS: dict[Any, Callable[..., Any]] = {
    _aten.new_zeros.default: _aten.zeros.default,
    _aten.zeros_like.default: _aten.zeros.default,
    _aten.ones_like.default: _aten.ones.default,
}


def writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def written_by(node: Node) -> list[Node]:
    """Those of its inputs to whose memory it writes."""
    if not writes(node):
        return []
    arguments: list[Any] = node.target._schema.arguments  # type: ignore[union-attr]
    given = [*zip(arguments, node.args), *((one, node.kwargs.get(one.name)) for one in arguments[len(node.args) :])]
    values = [value for one, value in given if one.alias_info is not None and one.alias_info.is_write]
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Node)]


def starts_a_kernel(node: Node) -> bool:
    return node.op == "call_function" and not shares_memory(node)


def shares_memory(node: Node) -> bool:
    """Whether its value may lie in the memory of its first input."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (schema is not None and any(result.alias_info is not None for result in schema.returns))


def is_view(node: Node) -> bool:
    """Whether it is one tensor that lies in the memory of another, and no more."""
    return shares_memory(node) and not writes(node) and node.target is not operator.getitem and isinstance(node.meta.get("val"), Tensor)


def memory_of(nodes: Sequence[Node]) -> dict[Node, Node]:
    """For each node the one whose memory its value lies in."""
    found: dict[Node, Node] = {}
    for node in nodes:
        sources = written_by(node) or node.all_input_nodes
        found[node] = found[sources[0]] if sources and shares_memory(node) else node
    return found


def with_fewer_operations(graph: GraphModule) -> GraphModule:
    """The same graph with one view in place of several, and without what it computes twice."""
    for node in list(graph.graph.nodes):
        if node.target in _VIEWS:
            _shorten(graph, node)
        elif node.target in _BLANKS:
            _detach(graph, node)
    _share(list(graph.graph.nodes))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _share(nodes: Sequence[Node]) -> None:
    """Of operations that find the same from the same, keep the first: of views and of what is small, for it lives on until the last use.

    What is written to is left alone, and so is what is returned: others may write to that.
    """
    memory = memory_of(nodes)
    written = {memory[source] for node in nodes if writes(node) or node.op == "output" for source in node.all_input_nodes}
    seen: dict[str, Node] = {}
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if not shares_memory(node) and not all(tensor.numel() <= _SMALL for tensor in values_of(node)):
            continue
        if not any(memory[one] in written for one in (node, *node.all_input_nodes)):
            first = seen.setdefault(f"{node.target}{node.args}{node.kwargs}", node)  # nodes go by their names, which are unique
            if first is not node:
                node.replace_all_uses_with(first)


def values_of(node: Node) -> list[Tensor]:
    """What it computes, without the numbers."""
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, list | tuple) else [value]) if isinstance(one, Tensor)]


def _shorten(graph: GraphModule, node: Node) -> None:
    """Look through the views before this one. (Those before it have been shortened already.)"""
    source, value = _first(node), node.meta["val"]
    if _is_ours(source):
        source = _first(source)
    if source.op == "placeholder":
        whole = source.meta["val"]
        if value.storage_offset() != whole.storage_offset():
            return
        if (value.shape, value.stride()) == (whole.shape, whole.stride()):
            node.replace_all_uses_with(source)
            return
        _replace(graph, node, _aten.as_strided.default, source, list(value.shape), list(value.stride()))
    elif node.target in _RESHAPES:
        while source.target in _RESHAPES:
            source = _first(source)
        if value.shape == source.meta["val"].shape:
            node.replace_all_uses_with(source)
        else:
            _replace(graph, node, _aten.view.default, source, list(value.shape))


def _detach(graph: GraphModule, node: Node) -> None:
    """Zeros like a tensor need no tensor."""
    value = node.meta["val"]
    if value.is_contiguous():
        _replace(graph, node, _BLANKS[node.target], list(value.shape), dtype=value.dtype, device=value.device)


def _is_ours(node: Node) -> bool:
    """Whether it is a view of an input that begins where the input does."""
    return node.target is _aten.as_strided.default and len(node.args) == 3 and _first(node).op == "placeholder"


def _first(node: Node) -> Node:
    """What it is a view of."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _replace(graph: GraphModule, node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    with graph.graph.inserting_before(node):
        new = graph.graph.call_function(target, args, kwargs)
    new.meta = node.meta
    node.replace_all_uses_with(new)
