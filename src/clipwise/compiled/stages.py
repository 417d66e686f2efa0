"""A graph cut into stages: each is run as soon as its inputs are there, and what later stages do not need is let go.

A stage is plain Python, one line an operation, and on a GPU, once its inputs lie where they lay before, one graph (in_place.py). Operations
that write to memory stay behind those that read what was there before. What would let go of nothing is left for the last stage.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..kernels.operators import PLAIN
from ..tracing import can_be_recorded
from .in_place import InPlace, Room
from .leaving import Places, Run, left_in
from .views import is_view, memory_of, starts_a_kernel, values_of, with_fewer_operations, writes, written_by

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
_SMALL = 2**20  # bytes that nobody misses


@dataclass(frozen=True)
class Stage:
    """run(*values of `needs`) gives the values of `makes`; those that are needed for the last time are in `last`. None: there is nothing to do."""

    run: Run | None
    needs: list[str]
    makes: list[str]
    last: list[str]
    may_be_replayed: bool  # several kernels, tensors alone, and it writes to none that it is given
    makes_at_once: int  # bytes of what it makes that are there at the same time, at most …
    works_in: int  # … if its results do not stay there to the end
    done: list[str]  # for each of `makes` the operation after which nobody writes to it


class Stages:
    """`graph`, whose inputs come in groups: `sizes` says how many there are in each. The last group completes it, and what it returns is lent."""

    def __init__(self, graph: GraphModule, sizes: Sequence[int], room: Room | None = None, places: Places | None = None):
        graph = with_fewer_operations(graph)
        inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
        names = iter(inputs)
        self._inputs = [list(itertools.islice(names, size)) for size in sizes]
        self._stages = _cut(graph, self._inputs)
        self._in_place = (
            self._stages if room is None else [_in_place(stage, room, places, is_last=stage is self._stages[-1]) for stage in self._stages]
        )

    def forget_recordings(self) -> None:
        """Stages that became graphs are recorded, and held against what they do, once more."""
        for stage in self._in_place:
            if isinstance(stage.run, InPlace):
                stage.run.forget()

    def begin(self, *, in_place: bool = True) -> Running:
        """One run; `in_place` if its inputs are those of a step, which come again."""
        return Running(self._inputs, self._in_place if in_place else self._stages)


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
        made = stage.run(*[values[name] for name in stage.needs]) if stage.run is not None else ()
        for name in stage.last:
            del values[name]
        values.update(zip(stage.makes, made))

    def outputs(self) -> list[Tensor] | None:
        """What the graph returns, if all groups have come."""
        return [self._values[name] for name in self._stages[-1].makes] if self._next == len(self._stages) else None


def _cut(graph: GraphModule, inputs: Sequence[Sequence[str]]) -> list[Stage]:
    memory = memory_of(list(graph.graph.nodes))  # which also has the nodes in their order
    groups = {name: number for number, names in enumerate(inputs) for name in names}
    at_once = _placed(memory, groups, memory.keys())
    stage_of = _placed(memory, groups, _early(memory, at_once))
    last_use = _last_uses(stage_of)
    return [_stage(graph, memory, stage_of, last_use, number) for number in range(len(inputs))]


def _early(memory: dict[Node, Node], stage_of: dict[Node, int]) -> Set[Node]:
    """The operations after which something large can be let go before the last stage, and what they need.

    That is what reached a tap, and what is made of it for a moment.
    """
    last, last_use = max(stage_of.values()), dict[Node, int]()
    for node, stage in _last_uses(stage_of).items():
        last_use[memory[node]] = max(last_use.get(memory[node], 0), stage)
    passing = {
        node
        for node, stage in last_use.items()
        if stage < last and (node.op == "placeholder" or stage_of[node] == stage) and _nbytes(node) > _SMALL
    }
    early, before = {node for node in memory if node.op == "placeholder"}, -1
    while len(early) != before:
        before = len(early)
        for node in memory:
            if any(memory[source] in passing and memory[source] in early for source in node.all_input_nodes):
                early.add(node)
        for node in reversed(memory):
            if node in early:
                early.update(node.all_input_nodes)
    return early


def _last_uses(stage_of: dict[Node, int]) -> dict[Node, int]:
    found = dict(stage_of)
    for node, stage in stage_of.items():
        for source in node.all_input_nodes:
            found[source] = max(found[source], stage)
    return found


def _nbytes(node: Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in values_of(node))


def _placed(memory: dict[Node, Node], groups: dict[str, int], early: Set[Node]) -> dict[Node, int]:
    """In which stage each operation runs: when its inputs are there, and after all that must come before it; in the last, if it is not `early`."""
    stage_of: dict[Node, int] = {}
    last = max(groups.values())
    constants: dict[Node, None] = {}
    read: dict[Node, int] = {}  # in which stage it is read for the last time so far …
    written: dict[Node, int] = {}  # … and was written to
    for node in memory:
        sources = node.all_input_nodes
        owners = [memory[source] for source in sources]
        stage = max([stage_of[source] for source in sources] + [written.get(owner, 0) for owner in owners], default=0)
        if node.op == "placeholder":
            stage = groups[node.name]
        elif node.op == "output":
            stage = last
        elif all(source in constants and memory[source] not in written for source in sources) and not writes(node):
            constants[node] = None
        else:
            if writes(node):
                stage = max([stage, *(read.get(owner, 0) for owner in owners)])
            stage = stage if node in early else last
            if node.target is operator.getitem:  # what has several results does not leave its stage in one piece
                stage = stage_of[sources[0]]
        if writes(node):
            written.update(dict.fromkeys(owners, stage))
        for owner in owners:
            read[owner] = max(read.get(owner, 0), stage)
        stage_of[node] = stage
    movable = [node for node in reversed(memory) if node in constants or is_view(node)]
    for node in movable:  # not before it is needed
        stage_of[node] = min([stage_of[user] for user in node.users], default=0)
    before: dict[Node, int] = {}
    while stage_of != before:
        before = dict(stage_of)
        for node in constants:  # not behind a write to what it reads …
            stage_of[node] = min([stage_of[node], *(stage_of[source] for source in node.all_input_nodes if memory[source] in written)])
        for node in movable:  # … and not behind those that need it
            stage_of[node] = min([stage_of[node], *(stage_of[user] for user in node.users)])
    return stage_of


def _stage(graph: GraphModule, memory: dict[Node, Node], stage_of: dict[Node, int], last_use: dict[Node, int], number: int) -> Stage:
    mine = [node for node, stage in stage_of.items() if stage == number]
    operations = dict.fromkeys(node for node in mine if node.op not in ("placeholder", "output"))
    here = Graph()
    copies: dict[Node, Node] = {}
    from_before = dict.fromkeys(source for node in mine for source in node.all_input_nodes if stage_of[source] < number)
    given = [*(node for node in mine if node.op == "placeholder"), *from_before]
    for node in given:
        copies[node] = here.placeholder(node.name)
    for node in operations:
        copies[node] = copy = here.node_copy(node, copies.__getitem__)
        copy.target = PLAIN.get(node.target) or _BINDINGS.get(node.target) or node.target
    results = [node for node in operations if last_use[node] > number]
    returned = [copies[node] for node in results]
    for node in mine:
        if node.op == "output":
            (results,) = cast(tuple[list[Node]], node.args)
            returned = [  # what an earlier stage has made may be written over in the next step
                copies[result] if memory[result] in operations else here.call_function(torch.clone, (copies[result],)) for result in results
            ]
    here.output(tuple(returned))
    order = {node: place for place, node in enumerate(operations)}
    written = {memory[target]: node for node in operations for target in written_by(node)}  # and by whom last

    def done(result: Node, copy: Node) -> Node:
        """The operation after which nobody writes to this result; of what is copied at the end, that."""
        return copies[max(result, written.get(memory[result], result), key=order.__getitem__)] if memory[result] in operations else copy

    return Stage(
        GraphModule(graph, here).forward if operations or results else None,
        [node.name for node in given],
        [node.name for node in results],
        [node.name for node in given if last_use[node] == number],
        may_be_replayed=sum(map(starts_a_kernel, operations)) > 1
        and all(isinstance(node.meta.get("val"), Tensor) for node in [*given, *results])
        and all(
            memory[target] in operations and memory[target].op == "call_function" for node in operations for target in written_by(node)
        ),
        makes_at_once=_most_at_once(list(operations), memory, results),
        works_in=_most_at_once(list(operations), memory, []),
        done=[done(result, copy).name for result, copy in zip(results, returned)],
    )


def _most_at_once(operations: Sequence[Node], memory: dict[Node, Node], results: Sequence[Node]) -> int:
    """Bytes that these allocate, at the moment when it is most; libraries may take room besides. Results stay to the end."""
    last: dict[Node, int] = {}
    for place, node in enumerate(operations):
        last.update(dict.fromkeys((memory[one] for one in (node, *node.all_input_nodes)), place))
    last.update(dict.fromkeys((memory[node] for node in results), len(operations)))
    made, now, most = set(operations), 0, 0
    for place, node in enumerate(operations):
        now += _nbytes(node) if memory[node] is node else 0
        most = max(most, now)
        gone = {memory[one] for one in (node, *node.all_input_nodes) if last[memory[one]] == place}
        now -= sum(_nbytes(owner) for owner in gone if owner in made)
    return most


def _in_place(stage: Stage, room: Room, places: Places | None, *, is_last: bool) -> Stage:
    if stage.run is None or not stage.may_be_replayed or not can_be_recorded(room.device):
        return stage
    leave = None if places is None or not is_last else left_in(stage.run, stage.done, places)
    in_place = InPlace(stage.run, room, hands_over=is_last, takes=stage.makes_at_once, works_in=stage.works_in, leave=leave)
    return replace(stage, run=in_place)
