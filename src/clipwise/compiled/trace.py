"""From a model and its losses to a graph that computes clipped sums: plain torch operations, no tape, no Python.

    sums, weights, finite = graph(parameters, buffers, rows of a batch, mask, 1/C²)

The graph is traced with the tape on, over tensors that stand in for the parameters, by the very code of the eager step; so it
clips by the same rules, at places that eager steps have verified.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..clipping import Clipping
from ..collect import collect_for_graph
from ..declared import noting_declarations
from ..gradients import ExampleGradients
from ..layout import Layout
from ..methods.base import Clipped, mean_weights
from ..numerics import without_autocast
from ..tape import Tape, capture
from ..tracing import NotTraceable, told_to_be_compiled, tracing
from .constants import are_one, check_constants, constants_of, put_in_place
from .foreseen import Foreseen
from .once import make_each_call_once, may_draw
from .state import State

Losses = Callable[..., Tensor]

_one_at_a_time = threading.RLock()  # torch traces by exchanging functions of its own

_LIBRARIES = tuple(str(Path(file).parent) + os.sep for file in (torch.__file__, Path(__file__).parent))  # whose code is not the user's


@dataclass(frozen=True)
class Traced:
    """A graph, the names of the parameters whose sums it returns and their places in its state, and whether it draws random numbers."""

    graph: GraphModule
    names: list[str]
    places: list[int]
    is_random: bool
    layouts: dict[int, Layout]  # where the examples lie at its taps

    def is_same_as(self, other: Traced) -> bool:
        """Whether both compute the same, whatever the data: a graph holds no numbers but those in its code and its constants."""
        mine, others = constants_of(self.graph), constants_of(other.graph)
        return self.names == other.names and self.graph.code == other.graph.code and all(map(are_one, mine, others))


def trace(
    model: Any, state: State, losses_of: Losses, leaves: Sequence[Any], structure: Any, mask: Tensor, clipping: Clipping,
    *, fallback: bool = False, layouts: dict[int, Layout] | None = None,
) -> Traced:  # fmt: skip
    """Trace the clipped sums of a batch of this shape. Raises NotTraceable, or whatever the model raises. `layouts`: where they are known from another graph."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    count = len(state.distinct)
    names: list[str] = []
    owners: list[int] = []
    computes_again = False  # in activation checkpointing

    def clipped_sums(*inputs: Tensor) -> list[Tensor]:
        nonlocal computes_again, layouts
        stand_ins = [
            given.detach().requires_grad_(True) if tensor.requires_grad else given for given, tensor in zip(inputs[:count], state.distinct)
        ]
        batch = list(leaves)
        for place, tensor in zip(places, inputs[count:-2]):
            batch[place] = tensor
        with state.replaced_by(stand_ins):
            with Foreseen(), capture(state.modules, fallback=fallback) as tape:
                losses = losses_of(model, *pytree.tree_unflatten(batch, structure))
            computes_again = tape.computes_again
            if not isinstance(losses, Tensor) or losses.shape != mask.shape:
                raise NotTraceable(f"its losses for {len(mask)} rows are not {len(mask)} numbers.")
            with tape.pause(), without_autocast():
                gradients, layouts = collect_for_graph(tape, losses, layouts)
                found, _ = masked_sums(gradients, tape, losses.detach(), clipping, inputs[-2], inputs[-1])
        names[:] = found.sums
        number_of, key_of = {id(one): number for number, one in enumerate(stand_ins)}, {name: key for key, name in tape.marks.names.items()}
        owners[:] = [number_of[key_of[name]] for name in names]
        return [*found.sums.values(), found.weights, found.finite]

    inverse_square = torch.ones((), dtype=torch.float64, device=mask.device)
    tensors = [tensor.detach() if tensor.requires_grad else tensor.detach().clone() for tensor in state.distinct]  # the forward pass runs
    inputs = [*tensors, *(leaves[place].clone() for place in places), mask, inverse_square]  # which it may write to before it is noticed
    with told_to_be_compiled():
        graph = graph_of(clipped_sums, inputs)
    is_random = any(_is_random(node) for node in graph.graph.nodes)
    if computes_again and is_random:
        raise NotTraceable("it draws random numbers beside activation checkpointing, which a graph would draw once more, and others.")
    if not computes_again:
        make_each_call_once(graph)
    assert layouts is not None
    return Traced(graph, names, owners, is_random, layouts)


def masked_sums(
    gradients: ExampleGradients, tape: Tape, losses: Tensor, clipping: Clipping, mask: Tensor, inverse_square: Tensor
) -> tuple[Clipped, Tensor]:  # fmt: skip
    """What an eager step computes from its factors, in a graph: nothing is fetched, and a row that is not real counts for nothing. And the squared
    norms, (parameters, B).

    `inverse_square`: norms are measured in units of C, this is 1/C².
    """
    found = gradients.squared_norms()
    together = torch.stack(list(found.values()))
    squares = dict(zip(found, (together * inverse_square).unbind(0)))
    gradients.forget_terms()
    real = torch.where(mask, losses.double(), float("nan"))
    weights, finite = clipping.weights(squares, list(tape.marks.trainable()), real)
    return Clipped(gradients.weighted_sums(weights), mean_weights(weights), finite), together


def graph_of(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor], *, in_steps: bool = False) -> GraphModule:
    """`function` as it computes from these inputs. Raises NotTraceable, or whatever it raises.

    `in_steps`: each kernel will be started by Python. These inputs are stand-ins that hold no numbers.
    """
    versions = [tensor._version for tensor in inputs]
    with _one_at_a_time, tracing(in_steps=in_steps), _fetches_named(), noting_declarations() as declared:
        graph: GraphModule = make_fx(function, tracing_mode="fake" if in_steps else "real", _allow_non_fake_inputs=in_steps)(*inputs)
    if [tensor._version for tensor in inputs] != versions:
        raise NotTraceable("its forward pass writes to buffers or to the batch.")
    dynamic = next((str(node.target) for node in graph.graph.nodes if _has_a_size_of_its_own(node)), None)
    if dynamic is not None:
        raise NotTraceable(f"the size of what {dynamic} returns depends on the data.")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if not in_steps:
        put_in_place(graph)
    check_constants(graph, declared)
    return graph


@contextlib.contextmanager
def _fetches_named() -> Iterator[None]:
    """Code that wants a number of a tensor on the host is told by its place."""
    try:
        yield
    except RuntimeError as error:
        if "value out of a tracing tensor" not in str(error):
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_LIBRARIES)]
        where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}: {frames[-1].line})" if frames else ""
        raise NotTraceable(
            f"it fetches a number from a tensor, to decide by it or to compute with it{where}: write it with tensors (torch.where), or pass it to step()."
        ) from error


def _has_a_size_of_its_own(node: torch.fx.Node) -> bool:
    """Whether the size of a result depends on numbers. Of an index that does by masks alone."""
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    indices: Any = node.args[1] if node.target is torch.ops.aten.index.Tensor else ()
    dtypes = [getattr(index.meta.get("val", index.meta.get("tensor_meta")), "dtype", None) for index in indices if index is not None]
    return not dtypes or any(dtype in (torch.bool, torch.uint8, None) for dtype in dtypes)


def _is_random(node: torch.fx.Node) -> bool:
    """Whether it draws numbers. Fused attention and recurrent kernels do only where they drop something."""
    operator: Any = node.target
    if not may_draw(node):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            return not (isinstance(given, int | float) and given == 0)
    return True
