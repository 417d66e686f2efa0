"""What a stage finds, left where somebody wants it: each result is copied there as soon as it is done, and takes no room of its own for long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .lending import Lending
from .sums_room import SumsRoom

SMALL_RESULT = 2**16  # bytes: results that are copied rather than lent

Run = Callable[..., tuple[Tensor, ...]]
Places = Callable[[int, Tensor], tuple[SumsRoom, Tensor] | None]  # for the result of this number, if it is like this one


@dataclass(frozen=True)
class Left:
    """A run whose results lie where they are wanted, as far as they are."""

    run: Run
    nbytes: int = 0  # of those
    lent_by: Mapping[int, Lending] = field(default_factory=dict)  # … and who lends them, by their numbers

    def make_way(self) -> None:
        """Before it runs: whoever holds what lies there keeps it."""
        for lending in set(self.lent_by.values()):
            lending.take_back()


Leave = Callable[[Sequence[Tensor]], Left]  # is told what results are like


def left_in(run: Run, done: Sequence[str], places: Places) -> Leave:
    """`done`: for each result the operation of `run`, a graph's, after which nobody writes to it."""

    def leave(made: Sequence[Tensor]) -> Left:
        large = [number for number, result in enumerate(made) if result.nbytes > SMALL_RESULT]
        found = {number: place for number in large if (place := places(number, made[number])) is not None}
        tensors = {number: tensor for number, (_, tensor) in found.items()}
        lent_by = {number: room.lending for number, (room, _) in found.items()}
        return (
            Left(_with_results_in(tensors, run, done), sum(tensor.nbytes for tensor in tensors.values()), lent_by) if found else Left(run)
        )

    return leave


def _with_results_in(places: Mapping[int, Tensor], run: Run, done: Sequence[str]) -> Run:
    module: GraphModule = cast(Any, run).__self__
    here, copies = Graph(), dict[Node, Node]()
    nodes = {node.name: node for node in module.graph.nodes}
    spots = {number: here.placeholder(f"place_{number}") for number in places}
    [(results,)] = [node.args for node in module.graph.find_nodes(op="output")]
    finished: dict[Node, list[int]] = {}
    for number in places:
        finished.setdefault(nodes[done[number]], []).append(number)
    for node in nodes.values():
        if node.op != "output":
            copies[node] = here.node_copy(node, copies.__getitem__)
        for number in finished.get(node, ()):
            here.call_function(torch.Tensor.copy_, (spots[number], copies[results[number]]))
    here.output(tuple([spots.get(number, copies[result]) for number, result in enumerate(results)]))
    return partial(GraphModule(module, here).forward, *places.values())
