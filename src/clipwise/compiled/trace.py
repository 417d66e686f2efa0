"""From a model and its losses to a graph that computes clipped sums: plain torch operations, no tape, no Python.

    sums, weights, finite = graph(parameters, buffers, rows of a batch, mask, 1/C²)

The graph is traced with the tape on, over tensors that stand in for the parameters, by the very code of the eager step; so it
clips by the same rules, at places that eager steps have verified.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..again import random_states_kept
from ..clipping import Clipping
from ..collect import collect_for_graph
from ..declared import is_declared_constant
from ..gradients import ExampleGradients
from ..inventory import all_modules
from ..methods.base import Clipped, mean_weights
from ..numerics import without_autocast
from ..tape import Tape, capture
from ..tracing import NotTraceable, tracing
from .once import make_each_call_once, may_draw

Losses = Callable[..., Tensor]


@dataclass(frozen=True)
class State:
    """Parameters and buffers of some modules: what a graph takes as its first inputs."""

    modules: Sequence[nn.Module]
    places: list[tuple[dict[str, Any], str]]  # (a module's _parameters or _buffers, name there)
    tensors: list[Tensor]  # at each of them
    parameters: list[int]  # places of each module that are for parameters

    @classmethod
    def of(cls, modules: Sequence[nn.Module], everyone: Sequence[nn.Module] | None = None) -> State:
        """`everyone`: these and the modules below them, where they are known."""
        places, tensors, parameters = [], [], []
        for module in all_modules(modules) if everyone is None else everyone:
            for members in (module._parameters, module._buffers):
                for name, tensor in members.items():
                    if tensor is not None:
                        places.append((members, name))
                        tensors.append(tensor)
            parameters.append(len(module._parameters))
        return cls(modules, places, tensors, parameters)

    @property
    def signature(self) -> tuple[Any, ...]:
        return (*self.parameters, *[(t.requires_grad, t.dtype, t.device, t.shape, t.stride()) for t in self.distinct])

    @cached_property
    def distinct(self) -> list[Tensor]:
        """Every tensor once: tied weights are one input."""
        return list({id(tensor): tensor for tensor in self.tensors}.values())

    @property
    def trainable(self) -> list[Tensor]:
        """Parameters of the modules that are trained, once."""
        parameters = dict.fromkeys(p for module in all_modules(self.modules) for p in module._parameters.values() if p is not None)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def _put(self, tensors: Iterable[Tensor]) -> None:
        """Let the modules hold these, one for each place."""
        for (members, name), tensor in zip(self.places, tensors):
            members[name] = tensor

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever a forward pass inside this block writes to buffers, or puts in their place, is undone."""
        values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in self.distinct if not tensor.requires_grad]
        try:
            with random_states_kept():
                yield
        finally:
            self._put(self.tensors)
            with torch.no_grad():
                for tensor, version, value in values:
                    if tensor._version != version:
                        tensor.copy_(value)

    @contextlib.contextmanager
    def replaced_by(self, stand_ins: Sequence[Tensor]) -> Iterator[None]:
        """Inside this block the modules hold these tensors in place of `distinct()`."""
        by_id = dict(zip(map(id, self.distinct), stand_ins))
        in_place = [by_id[id(tensor)] for tensor in self.tensors]
        recurrent = [module for root in self.modules for module in root.modules() if isinstance(module, nn.RNNBase)]
        lists = [(module, module._flat_weights, module._flat_weight_refs) for module in recurrent]
        try:
            self._put(in_place)
            for module, weights, _ in lists:  # they keep lists of their weights, and would copy all of them if one were another
                module._flat_weights = [by_id.get(id(weight), weight) for weight in weights]
                module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in module._flat_weights]
            yield
            if any(members.get(name) is not tensor for (members, name), tensor in zip(self.places, in_place)):
                raise NotTraceable("its forward pass replaces parameters or buffers.")
        finally:
            self._put(self.tensors)
            for module, weights, references in lists:
                module._flat_weights, module._flat_weight_refs = weights, references


@dataclass(frozen=True)
class Traced:
    """A graph, the names of the parameters whose sums it returns and their places in its state, and whether it draws random numbers."""

    graph: GraphModule
    names: list[str]
    places: list[int]
    is_random: bool

    def is_same_as(self, other: Traced) -> bool:
        """Whether both compute the same, whatever the data: a graph holds no numbers but those in its code and its constants."""
        mine, others = _constants(self.graph), _constants(other.graph)
        return self.names == other.names and self.graph.code == other.graph.code and all(a is b for a, b in zip(mine, others))


def trace(
    model: Any, state: State, losses_of: Losses, leaves: Sequence[Any], structure: Any, mask: Tensor, clipping: Clipping
) -> Traced:  # fmt: skip
    """Trace the clipped sums of a batch of this shape. Raises NotTraceable, or whatever the model raises."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    count = len(state.distinct)
    names: list[str] = []
    owners: list[int] = []
    computes_again = False  # in activation checkpointing

    def clipped_sums(*inputs: Tensor) -> list[Tensor]:
        nonlocal computes_again
        stand_ins = [
            given.detach().requires_grad_(True) if tensor.requires_grad else given for given, tensor in zip(inputs[:count], state.distinct)
        ]
        batch = list(leaves)
        for place, tensor in zip(places, inputs[count:-2]):
            batch[place] = tensor
        with state.replaced_by(stand_ins):
            with capture(state.modules) as tape:
                losses = losses_of(model, *pytree.tree_unflatten(batch, structure))
            computes_again = tape.computes_again
            if not isinstance(losses, Tensor) or losses.shape != mask.shape:
                raise NotTraceable(f"its losses for {len(mask)} rows are not {len(mask)} numbers.")
            with tape.pause(), without_autocast():
                found, _ = masked_sums(collect_for_graph(tape, losses), tape, losses.detach(), clipping, inputs[-2], inputs[-1])
        names[:] = found.sums
        number_of, key_of = {id(one): number for number, one in enumerate(stand_ins)}, {name: key for key, name in tape.marks.names.items()}
        owners[:] = [number_of[key_of[name]] for name in names]
        return [*found.sums.values(), found.weights, found.finite]

    inverse_square = torch.ones((), dtype=torch.float64, device=mask.device)
    tensors = [tensor.detach() if tensor.requires_grad else tensor.detach().clone() for tensor in state.distinct]  # the forward pass runs
    inputs = [*tensors, *(leaves[place] for place in places), mask, inverse_square]
    graph = graph_of(clipped_sums, inputs)
    if not computes_again:
        make_each_call_once(graph)
    return Traced(graph, names, owners, any(_is_random(node) for node in graph.graph.nodes))


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
    with tracing(in_steps=in_steps):
        graph: GraphModule = make_fx(function, tracing_mode="fake" if in_steps else "real", _allow_non_fake_inputs=in_steps)(*inputs)
    if [tensor._version for tensor in inputs] != versions:
        raise NotTraceable("its forward pass writes to buffers or to the batch.")
    _check_constants(graph)
    dynamic = next((str(n.target) for n in graph.graph.nodes if torch.Tag.dynamic_output_shape in getattr(n.target, "tags", ())), None)
    if dynamic is not None:
        raise NotTraceable(f"the size of what {dynamic} returns depends on the data.")
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _constants(graph: GraphModule) -> list[Tensor]:
    """Numbers that are baked in. (Fused attention hands empty tensors from its forward to its backward pass: they hold none.)"""
    found = [getattr(graph, node.target) for node in graph.graph.find_nodes(op="get_attr")]
    return [tensor for tensor in found if tensor.numel()]


def _check_constants(graph: GraphModule) -> None:
    """Example data may come in as an argument only: what is baked into a graph stays what it was, and would reach later steps."""
    for tensor in _constants(graph):
        if not is_declared_constant(tensor):
            raise NotTraceable(
                f"a tensor of shape {tuple(tensor.shape)} comes from outside the arguments: pass it to step(), register it as a buffer, or declare it "
                "with clipwise.constant(x)."
            )


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
