"""A graph cut into stages: each is run as soon as its inputs are there, and what later stages do not need is let go.

A stage is plain Python, one line an operation. Operations that write to memory stay behind those that read what was there before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..kernels.operators import PLAIN
from .views import memory_of, with_fewer_operations, writes

_aten = torch.ops.aten
_BINDINGS: dict[Any, Callable[..., Any]] = {  # the same operations; Python reaches them sooner
    _aten.add.Tensor: torch.add,
    _aten.as_strided.default: torch.as_strided,
    _aten.bmm.default: torch.bmm,
    _aten.linalg_vector_norm.default: torch.linalg.vector_norm,
    _aten.masked_fill.Scalar: torch.masked_fill,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.mv.default: torch.mv,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.view.default: torch.Tensor.view,
}


@dataclass(frozen=True)
class Stage:
    """run(*values of `needs`) gives the values of `makes`; those that are needed for the last time are in `last`."""

    run: Callable[..., tuple[Any, ...]]
    needs: list[str]
    makes: list[str]
    last: list[str]


class Stages:
    """`graph`, whose inputs come in groups: `sizes` says how many there are in each. The last group completes it."""

    def __init__(self, graph: GraphModule, sizes: Sequence[int]):
        graph = with_fewer_operations(graph)
        inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        names = iter(inputs)
        self._inputs = [list(itertools.islice(names, size)) for size in sizes]
        self._stages = _cut(graph, self._inputs)

    def begin(self) -> Running:
        return Running(self._inputs, self._stages)


class Running:
    """One run. Groups of inputs may come in any order."""

    def __init__(self, inputs: Sequence[Sequence[str]], stages: Sequence[Stage]):
        self._inputs, self._stages = inputs, stages
        self._values: dict[str, Any] = {}
        self._came: set[int] = set()
        self._next = 0

    def give(self, group: int, tensors: Sequence[Tensor]) -> None:
        self._values.update(zip(self._inputs[group], tensors))
        self._came.add(group)
        while self._next in self._came:
            self._run(self._stages[self._next])
            self._next += 1

    def _run(self, stage: Stage) -> None:
        values = self._values
        made = stage.run(*[values[name] for name in stage.needs])
        for name in stage.last:
            del values[name]
        values.update(zip(stage.makes, made))

    def outputs(self) -> list[Tensor] | None:
        """What the graph returns, if all groups have come."""
        return self._values["output"] if self._next == len(self._stages) else None


def _cut(graph: GraphModule, inputs: Sequence[Sequence[str]]) -> list[Stage]:
    nodes = list(graph.graph.nodes)
    stage_of = _placed(nodes, {name: number for number, names in enumerate(inputs) for name in names}, len(inputs) - 1)
    last_use = {node: stage_of[node] for node in nodes}
    for node in nodes:
        for source in node.all_input_nodes:
            last_use[source] = max(last_use[source], stage_of[node])
    return [_stage(graph, nodes, stage_of, last_use, number) for number in range(len(inputs))]


def _placed(nodes: Sequence[Node], groups: dict[str, int], last: int) -> dict[Node, int]:
    """In which stage each operation runs: when its inputs are there, and after all that must come before it."""
    stage_of: dict[Node, int] = {}
    memory = memory_of(nodes)
    read: dict[Node, int] = {}  # in which stage it is read for the last time so far …
    written: dict[Node, int] = {}  # … and was written to
    for node in nodes:
        sources = node.all_input_nodes
        owners = [memory[source] for source in sources]
        stage = max([stage_of[source] for source in sources] + [written.get(owner, 0) for owner in owners], default=0)
        if node.op == "placeholder":
            stage = groups[node.name]
        elif node.op == "output":
            stage = last
        if writes(node):
            stage = max([stage, *(read.get(owner, 0) for owner in owners)])
            written.update(dict.fromkeys(owners, stage))
        for owner in owners:
            read[owner] = max(read.get(owner, 0), stage)
        stage_of[node] = stage
    return stage_of


def _stage(graph: GraphModule, nodes: Sequence[Node], stage_of: dict[Node, int], last_use: dict[Node, int], number: int) -> Stage:
    mine = [node for node in nodes if stage_of[node] == number]
    here = Graph()
    copies: dict[Node, Node] = {}
    from_before = dict.fromkeys(source for node in mine for source in node.all_input_nodes if stage_of[source] < number)
    given = [*(node for node in mine if node.op == "placeholder"), *from_before]
    for node in given:
        copies[node] = here.placeholder(node.name)
    for node in mine:
        if node.op not in ("placeholder", "output"):
            copies[node] = copy = here.node_copy(node, copies.__getitem__)
            copy.target = PLAIN.get(node.target) or _BINDINGS.get(node.target) or node.target
    made = [node for node in mine if node.op not in ("placeholder", "output") and last_use[node] > number]
    ended = [node for node in mine if node.op == "output"]
    results = [copies[node] for node in made] + [torch.fx.node.map_arg(node.args[0], copies.__getitem__) for node in ended]
    here.output(tuple(results))
    return Stage(
        GraphModule(graph, here).forward,
        [node.name for node in given],
        [node.name for node in [*made, *ended]],
        [node.name for node in given if last_use[node] == number],
    )
