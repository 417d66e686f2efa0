"""private.compile: one call for a whole step. Same numbers, refusals and ledger as the eager loop; a graph does the arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..adaptive import Adaptive
from ..errors import NothingClipped
from ..experience import experience_of
from ..methods import Clipped
from ..structure import every_tensor
from ..tape import as_modules
from ..tracing import NotTraceable
from .agreement import agree
from .rows import Leaves, default_rows, mask, part_of
from .trace import Losses, State, trace
from .variant import Variant

if TYPE_CHECKING:
    from ..intake import Intake
    from ..training import PrivateTraining
    from ..updates import Updates

BACKENDS = ("inductor", "eager")
_MOST_VARIANTS = 8  # shapes that get a graph of their own
_PATIENCE = 8  # steps after which nothing is left to hope for, if no way through the model has been verified
_ATTEMPTS = 3  # at tracing one shape: the first steps may not have verified enough


class CompiledStep:
    """step(*batch) makes the whole step for one draw: losses, clipping, noise, ledger, optimizer, zero_grad.

    Eager steps come first, and again on steps 4, 8, 16 …: they verify the model, and the graph is compared with them. In between the
    clipped sums come from the graph, and go the way of all clipped sums: held against the draw, counted, noised, released.
    """

    def __init__(
        self, training: PrivateTraining, intake: Intake, updates: Updates, losses_of: Losses, *, rows: int | None, backend: str
    ):  # fmt: skip
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
            raise ValueError(f"rows must be a whole number of at least 1, got {rows!r}")
        self._training = training
        self._intake = intake
        self._updates = updates
        self._losses_of = losses_of
        self._backend = backend
        self.rows = rows or default_rows(training.plan)
        self._modules = as_modules(training.model, "compile")
        self._leaves = Leaves()
        self._variants: dict[Any, Variant] = {}
        self._attempts: dict[Any, int] = {}

    def __call__(self, *batch: Any) -> None:
        if self._training.is_closed:
            raise NothingClipped("this training is closed.", "Make a new PrivateTraining; what this one spent stays spent.")
        count = self._intake.rows_due(list(every_tensor(batch)))
        leaves, structure, has_rows = self._leaves.flat(batch, count)
        experience = experience_of(self._modules)
        looks_again = experience.will_look_again
        variant, is_new = self._variant(
            leaves, structure, has_rows, count, may_trace=not looks_again and (bool(experience.layouts) or experience.steps > _PATIENCE)
        )
        if variant is None or self._intake.draws.is_placeholder or is_new or looks_again:
            self._eager_step(batch, leaves, has_rows, count, variant)
        else:
            experience.steps += 1
            with self._intake.block.asleep():
                sums, weights, finite = self._clipped(variant, leaves, has_rows, count)
            parameters = self._updates.by_name()
            inputs = [leaf for leaf, is_one in zip(leaves, has_rows) if is_one]
            clipped = Clipped(dict(zip(variant.names, sums)), weights, finite)
            self._intake.hand_in(clipped, [parameters[name] for name in variant.names], inputs)
        for optimizer in self._updates.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _variant(
        self, leaves: Sequence[Any], structure: Any, has_rows: Sequence[bool], count: int, *, may_trace: bool
    ) -> tuple[Variant | None, bool]:
        """The graph for batches of this shape, if there is one, and whether it was made just now."""
        state = State.of(self._modules)
        first = part_of(leaves, has_rows, 0, min(self.rows, count), self.rows) if count and any(has_rows) else None
        if first is None:
            return None, False
        trained = tuple(tensor.requires_grad for tensor in state.distinct())
        key = (str(structure), tuple(map(_signature, first)), has_rows, trained, _surroundings(self._modules), repr(self._clipping()))
        found = self._variants.get(key)
        if found is not None and found.fits(state):
            return found, False
        if not may_trace or self._attempts.get(key, 0) >= _ATTEMPTS or len(self._attempts) > _MOST_VARIANTS:
            return None, False
        self._attempts[key] = self._attempts.get(key, 0) + 1
        try:
            with self._intake.block.asleep():
                real = mask(self.rows, self.rows, first[list(has_rows).index(True)].device)
                traced = trace(self._training.model, state, self._losses_of, first, structure, real, self._clipping())
            self._variants[key] = Variant.of(traced, state, [*_tensors(first), real], self._backend)
        except Exception as error:
            if not isinstance(error, NotTraceable) or self._attempts[key] == _ATTEMPTS:
                self._attempts[key] = _ATTEMPTS
                _warn_eager(error if isinstance(error, NotTraceable) else f"{type(error).__name__}: {error}")
            return None, False
        return self._variants[key], True

    def _clipping(self) -> Any:
        """What the graph clips by. A bound that moves is an input of the graph, which then clips to one."""
        clipping = self._training.plan.clipping
        return clipping.at(1.0) if isinstance(clipping, Adaptive) else clipping

    def _clipped(
        self, variant: Variant, leaves: Sequence[Any], has_rows: Sequence[bool], count: int
    ) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
        """Clipped sums of the whole draw, part by part, and the weights of its examples."""
        moving = isinstance(self._training.plan.clipping, Adaptive)
        bound = self._training.clipping.sensitivity if moving else 1.0
        sums: list[Tensor] = []
        weights, finite = [], []
        for start in range(0, count, self.rows):
            stop = min(start + self.rows, count)
            found = variant.run(_tensors(part_of(leaves, has_rows, start, stop, self.rows)), stop - start, bound)
            if sums:
                torch._foreach_add_(sums, found[:-2])
            else:
                sums = found[:-2] if stop == count else [total.clone() for total in found[:-2]]  # a replay writes over the last one
            weights.append(found[-2][: stop - start])
            finite.append(found[-1][: stop - start])
        return sums, torch.cat(weights), torch.cat(finite)

    def _eager_step(self, batch: Any, leaves: Sequence[Any], has_rows: Sequence[bool], count: int, variant: Variant | None) -> None:
        """By the tape; the graph, if there is one, is held against it."""
        expected = None
        if variant is not None and not variant.is_random and not self._intake.draws.is_placeholder:
            with self._intake.block.asleep():
                expected = self._clipped(variant, leaves, has_rows, count)[0]
        self._intake.block.begin()  # the graph is traced from here on too
        losses = self._losses_of(self._training.model, *batch)
        self._training.loss(losses).backward()
        if variant is not None and expected is not None:
            parameters, found = self._updates.by_name(), self._intake.pending.sums
            pairs = [(total, found[id(parameters[name])]) for name, total in zip(variant.names, expected)]
            if not agree(pairs, variant.precision, count * self._training.clipping.sensitivity):
                self._variants = {key: other for key, other in self._variants.items() if other is not variant}
                self._attempts = dict.fromkeys(self._attempts, _ATTEMPTS)
                _warn_eager(
                    "the graph's clipped sums are not those of the eager step. Its losses depend on something besides its arguments (a number that "
                    "changes from step to step, how many rows there are), which a graph does not follow: pass it as a tensor."
                )


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def _surroundings(modules: Sequence[torch.nn.Module]) -> tuple[Any, ...]:
    """What else a forward pass depends on: modes of modules, autocast."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return tuple(module.training for root in modules for module in root.modules()), *autocast


def _warn_eager(why: object) -> None:
    warnings.warn(f"this step is not compiled and runs eagerly, with the same numbers: {str(why).splitlines()[0]}", stacklevel=4)
