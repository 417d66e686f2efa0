"""Clipped sums by graphs: one for every shape of batch, traced when eager steps have verified the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..clipping import Clipping
from ..experience import experience_of
from ..methods import Clipped
from ..tape import as_modules
from ..tracing import NotTraceable
from .agreement import agree
from .rows import Leaves, mask, part_of
from .trace import Losses, State, trace
from .variant import Variant

BACKENDS = ("inductor", "eager")
_MOST_VARIANTS = 8  # shapes that get a graph of their own
_PATIENCE = 8  # steps after which nothing is left to hope for, if no way through the model has been verified
_ATTEMPTS = 3  # at tracing one shape: the first steps may not have verified enough


@dataclass(frozen=True)
class Batch:
    """What a step is given, flat and where the model is."""

    leaves: list[Any]
    structure: Any
    has_rows: tuple[bool, ...]
    count: int
    inputs: list[Tensor]  # those with one row an example, as they were given

    @property
    def arguments(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.structure)

    def part(self, start: int, stop: int, rows: int) -> list[Any]:
        return part_of(self.leaves, self.has_rows, start, stop, rows)


class GraphSums:
    """Σ clip(g_i) of a batch by a graph, where there is one."""

    def __init__(self, model: Any, losses_of: Losses, clipping: Clipping, *, rows: int, backend: str):
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows must be a whole number of at least 1, got {rows!r}")
        self.rows = rows
        self._model = model
        self._modules: list[nn.Module] = as_modules(model, "compile")
        self._losses_of = losses_of
        self._clipping = clipping
        self._backend = backend
        self._leaves = Leaves()
        self._attempts: dict[Any, int] = {}
        self.variants: dict[Any, Variant] = {}

    def batch(self, given: Any, count: int) -> Batch:
        """`given`: the arguments of step(). Tensors on the host go where the model is."""
        leaves, structure, has_rows = self._leaves.flat(given, count)
        inputs = [leaf for leaf, is_one in zip(leaves, has_rows) if is_one]
        home = next((parameter.device for module in self._modules for parameter in module.parameters()), torch.device("cpu"))
        if home.type != "cpu":
            leaves = [leaf.to(home, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Batch(leaves, structure, has_rows, count, inputs)

    def due(self, batch: Batch) -> tuple[Variant | None, bool]:
        """The graph for batches of this shape, if there is one, and whether this step is to be made by it.

        A graph that was made just now has yet to be compared with an eager step; and eager steps verify the model now and then.
        """
        experience = experience_of(self._modules)
        looks_again = experience.will_look_again
        variant, is_new = self._variant(batch)
        by_graph = variant is not None and not is_new and not looks_again
        experience.steps += by_graph
        return variant, by_graph

    def _variant(self, batch: Batch) -> tuple[Variant | None, bool]:
        """The graph for batches of this shape, if there is one, and whether it was made just now."""
        if not batch.count or not any(batch.has_rows):
            return None, False
        state = State.of(self._modules)
        first = batch.part(0, min(self.rows, batch.count), self.rows)
        trained = tuple(tensor.requires_grad for tensor in state.distinct())
        key = (str(batch.structure), tuple(map(_signature, first)), batch.has_rows, trained, _surroundings(self._modules))
        found = self.variants.get(key)
        if found is not None and found.fits(state):
            return found, False
        experience = experience_of(self._modules)
        is_early = experience.will_look_again or not (experience.layouts or experience.steps > _PATIENCE)
        if is_early or self._attempts.get(key, 0) >= _ATTEMPTS or len(self._attempts) > _MOST_VARIANTS:
            return None, False
        return self._traced(key, state, first, batch), True

    def _traced(self, key: Any, state: State, first: list[Any], batch: Batch) -> Variant | None:
        self._attempts[key] = self._attempts.get(key, 0) + 1
        try:
            real = mask(self.rows, self.rows, first[batch.has_rows.index(True)].device)
            traced = trace(self._model, state, self._losses_of, first, batch.structure, real, self._clipping)
            self.variants[key] = Variant.of(traced, state, [*_tensors(first), real], self._backend)
        except Exception as error:
            if not isinstance(error, NotTraceable) or self._attempts[key] == _ATTEMPTS:
                self._attempts[key] = _ATTEMPTS
                _warn(error if isinstance(error, NotTraceable) else f"{type(error).__name__}: {error}")
            return None
        return self.variants[key]

    def clipped(self, variant: Variant, batch: Batch, bound: float) -> Clipped:
        """The sums of a whole draw, part by part. `bound`: norms are measured in units of it."""
        sums: list[Tensor] = []
        weights, finite = [], []
        for start in range(0, batch.count, self.rows):
            stop = min(start + self.rows, batch.count)
            found = variant.run(_tensors(batch.part(start, stop, self.rows)), stop - start, bound)
            if sums:
                torch._foreach_add_(sums, found[:-2])
            else:
                sums = found[:-2] if stop == batch.count else [total.clone() for total in found[:-2]]  # a replay writes over the last one
            weights.append(found[-2][: stop - start])
            finite.append(found[-1][: stop - start])
        return Clipped(dict(zip(variant.names, sums)), torch.cat(weights), torch.cat(finite))

    def compare(self, variant: Variant, found: Clipped, expected: dict[str, Tensor], most: float) -> None:
        """Give the graph up if its sums are not those of the eager step. `most`: examples times bound."""
        if not agree([(total, expected[name]) for name, total in found.sums.items()], variant.precision, most):
            self.variants = {key: other for key, other in self.variants.items() if other is not variant}
            self._attempts = dict.fromkeys(self._attempts, _ATTEMPTS)
            _warn(
                "the graph's clipped sums are not those of the eager step. Its losses depend on something besides its arguments (a number that "
                "changes from step to step, how many rows there are), which a graph does not follow: pass it as a tensor."
            )


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def _surroundings(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """What else a forward pass depends on: modes of modules, autocast."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return tuple(module.training for root in modules for module in root.modules()), *autocast


def _warn(why: object) -> None:
    warnings.warn(f"this step is not compiled and runs eagerly, with the same numbers: {str(why).splitlines()[0]}", stacklevel=5)
