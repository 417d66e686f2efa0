"""Clipped sums by graphs: one for every shape of batch, traced when eager steps have verified the model."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..again import randomness_besides_torch
from ..attributes import Same
from ..bounds import WithinBounds
from ..clipping import Clipping, is_fixed
from ..counts import check_count
from ..errors import in_one_line
from ..experience import experience_of
from ..inventory import as_modules, numbered_modules
from ..layout import Layout
from ..methods import Clipped
from ..release import clip
from ..still import Still
from ..tape import capture
from ..tracing import NeverTraceable, NotTraceable, told_to_be_compiled
from .agreement import agree
from .constants import check_not_read
from .patience import ATTEMPTS, STEPS, Patience
from .rows import Batch, Leaves, made_up, part_of
from .state import State
from .surroundings import signature_of, surroundings
from .trace import Losses, Traced, trace
from .variant import Variant

BACKENDS = ("inductor", "eager")
_MOST_VARIANTS = 8  # shapes that get a graph of their own
_CHANGED = (
    "its losses depend on something besides the model and its arguments (a number that changes from step to step, how many rows there are), "
    "which a graph does not follow: pass it as a tensor."
)


class GraphSums:
    """Σ clip(g_i) of a batch by a graph, where there is one."""

    def __init__(self, model: Any, losses_of: Losses, clipping: Clipping, *, rows: int, backend: str, fallback: bool = False):
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
        self.rows = check_count(rows, "rows")
        self.clipping = clipping
        self._model = model
        self._modules: list[nn.Module] = as_modules(model, "compile")
        self._losses_of = losses_of
        self._backend = backend
        self._fallback = fallback
        self._leaves = Leaves()
        self._attempts: dict[Any, int] = {}
        self._revision = 0  # of what was verified, when these graphs were made
        self._is_given_up = self._is_full = False
        self._overwritten: dict[
            tuple[int, str], Same
        ] = {}  # attributes of modules in which every forward pass leaves another tensor, and what was there
        self._changes = 0  # traces that left other numbers in the model
        self._patience = Patience()
        self._doubted: tuple[Any, str] | None = None  # what could not be traced (None: what was, and cannot be any more), and why
        self.variants: dict[Any, Variant] = {}

    def batch(self, given: Any, count: int, *, may_be_refilled: bool = False) -> Batch:
        """`given`: the arguments of step(). Tensors on the host go where the model is; of those that may be refilled after the step, it waits for that."""
        leaves, structure, has_rows = self._leaves.flat(given, count)
        inputs = [leaf for leaf, is_one in zip(leaves, has_rows) if is_one]
        serials, everyone = numbered_modules(self._modules)
        home = _home(everyone)
        if home.type != "cpu":
            leaves = [leaf.to(home, non_blocking=not may_be_refilled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return Batch(leaves, structure, has_rows, count, self.rows, inputs, everyone, serials)

    def remember(self, batch: Batch) -> None:
        """A step was made with this batch."""
        self._leaves.remember(batch.structure, batch.has_rows)
        doubted, self._doubted = self._doubted, None
        if doubted is not None:
            key, why = doubted
            (self.give_up if key is None else _warn)(why)

    def due(self, batch: Batch) -> Variant | None:
        """The graph that this step is to be made by; None: by the tape. Eager steps verify the model now and then; then the graph is
        looked at too: it must be what would be traced today."""
        if self._doubted is not None:  # no step could be made of that batch either
            self._attempts.pop(self._doubted[0], None)
            self._doubted = None
        if self._is_given_up or not batch.count:
            return None
        experience = experience_of(self._modules)
        if experience.revision != self._revision:  # the examples lie elsewhere than these graphs take them to
            self._revision = experience.revision
            self.variants.clear()
            self._attempts.clear()
        state = State.of(self._modules, batch.modules)
        first, _ = batch.parts[0]
        signatures = tuple(map(signature_of, first))
        if not is_fixed(self.clipping):
            self.give_up(f"{type(self.clipping).__name__} is a clipping of your own, of which nobody knows when it changes.")
            return None
        if None in signatures:
            odd = type(first[signatures.index(None)]).__name__
            self.give_up(f"an argument is of type {odd}, of which nobody knows when it changes: pass tensors, numbers and strings.")
            return None
        never = self._patience.why_never(batch, is_verified=bool(experience.layouts))
        if never is not None:
            self.give_up(never)
            return None
        key = (
            self._leaves.name_of(batch.structure),
            signatures,
            batch.has_rows,
            state.signature,
            batch.serials,
            surroundings(batch.modules, self._overwritten),
            self.clipping,
        )
        found = self.variants.get(key)
        if found is not None and not found.fits(state):
            found = None
            self._patience.replaced += 1
        if experience.will_look_again:
            if found is not None:
                self._look_again(found, state, batch)
            return None
        if found is None:
            self._make(key, state, batch)
            return None  # this step is made by the tape: it tells whether the losses are what the graph takes them for
        experience.steps += 1
        self._patience.replaced = 0
        return found

    def _make(self, key: Any, state: State, batch: Batch) -> None:
        experience = experience_of(self._modules)
        attempts = self._attempts.get(key, 0)
        is_early = not (experience.layouts or (experience.steps > STEPS and not experience.was_open))
        if is_early or attempts >= ATTEMPTS:
            return
        if key not in self._attempts and len(self._attempts) >= _MOST_VARIANTS:
            if not self._is_full:
                self._is_full = True
                _warn(
                    f"{_MOST_VARIANTS} shapes of batches, or states of the model's modules, have been traced. Those are still compiled, others are not."
                )
            return
        self._attempts[key] = attempts + 1
        try:
            known = len(self._overwritten)
            with state.kept(self._overwritten):
                traced = self._traced(state, batch)
            check_not_read(traced.graph, self._overwritten.values())
            if len(self._overwritten) > known:  # this state is that of one step alone
                del self._attempts[key]
                return
            with state.kept(self._overwritten):
                variant = self._variant(traced, state, batch, self._backend)
                self._try_out(variant, state, batch)
            self.variants[key] = variant
            self._attempts[key] = 0
        except NeverTraceable as error:
            self._changes += 1
            del self._attempts[key]
            if self._changes > 1:  # not only something that is worked out once
                self.give_up(error)
        except NotTraceable as error:
            if self._attempts[key] == ATTEMPTS:
                _warn(error)
        except Exception as error:
            self._attempts[key] = ATTEMPTS
            self._doubted = key, _told(error)

    def _traced(self, state: State, batch: Batch, layouts: dict[int, Layout] | None = None) -> Traced:
        first, _ = batch.parts[0]
        before, given = randomness_besides_torch(), (first, batch.structure, batch.whole_mask)
        traced = trace(self._model, state, self._losses_of, *given, self.clipping, fallback=self._fallback, layouts=layouts)
        if randomness_besides_torch() != before:
            raise NeverTraceable(
                "it draws random numbers of Python's or numpy's, which a graph would hold as they are: draw them by torch."
            )
        return traced

    def _variant(self, traced: Traced, state: State, batch: Batch, backend: str | None) -> Variant:
        first, _ = batch.parts[0]
        return Variant.of(traced, state, [*_tensors(first), batch.whole_mask], backend)

    def _try_out(self, variant: Variant, state: State, batch: Batch) -> None:
        """Hold the graph against the tape, on numbers that are nobody's: what is decided here must not depend on a record.

        One row is left to be filled up, so that losses which depend on how many rows there are do not pass. In place of a graph that draws random
        numbers the same one is compared with these held still.
        """
        still: AbstractContextManager[Any] = contextlib.nullcontext()
        if variant.traced.is_random:
            still = Still(everything=True)
            with still:
                traced = self._traced(state, batch, variant.traced.layouts)
            if traced.is_random:
                raise NotTraceable(
                    "it draws random numbers by a function that nobody knows how to hold still, so that it cannot be tried out."
                )
            variant = self._variant(traced, state, batch, None)
        count = max(1, self.rows - 1)
        try:
            few, expected = self._by_tape(batch, count, still, as_shares=False)
        except NotTraceable:
            raise
        except Exception:  # there are functions that take shares only
            try:
                few, expected = self._by_tape(batch, count, still, as_shares=True)
            except Exception as error:
                raise NotTraceable(f"it cannot be tried out, since it does not take made-up numbers: {in_one_line(error)}") from error
        found = self.clipped(variant, few, 1.0)
        if expected.weights.shape != found.weights.shape:
            raise NotTraceable(f"its losses for {count} rows are not {count} numbers.")
        pairs = [(total, expected.sums[name]) for name, total in found.sums.items()]
        if not agree(pairs, variant.precision, count * self.clipping.sensitivity):
            raise NotTraceable(f"the graph's clipped sums are not those of the tape: {_CHANGED}")

    def _by_tape(self, batch: Batch, count: int, still: AbstractContextManager[Any], *, as_shares: bool) -> tuple[Batch, Clipped]:
        """`count` rows of made-up numbers, and their clipped sums."""
        leaves = made_up(batch.parts[0][0], batch.has_rows, as_shares=as_shares)
        few = replace(batch, leaves=part_of(leaves, batch.has_rows, 0, count, count), count=count)
        experience = experience_of(self._modules)
        steps, experience.steps = experience.steps, 2  # not a step on which the model is verified
        try:
            with still, told_to_be_compiled():
                with WithinBounds(), capture(self._modules, fallback=self._fallback) as tape:
                    losses = self._losses_of(self._model, *few.arguments)
                return few, clip(tape, losses, self.clipping, "bookkeep")
        except IndexError as error:  # a graph does not raise it on a GPU, it stops the device
            raise NotTraceable(
                "it computes indices from real numbers, so that it cannot be tried out on made-up ones: pass what numbers something as integers."
            ) from error
        finally:
            experience.steps = steps

    def _look_again(self, variant: Variant, state: State, batch: Batch) -> None:
        """Trace once more, and give the graph up if it is another one by now. Data do not matter for that."""
        try:
            with state.kept(self._overwritten):
                again = self._traced(state, batch)
            if variant.traced.is_same_as(again):
                return
            self.give_up(_CHANGED)
        except Exception as error:
            self._doubted = None, _told(error)

    def give_up(self, why: object) -> None:
        """No graph from now on."""
        self._is_given_up = True
        self.variants, self._attempts = {}, {}
        _warn(why)

    def clipped(self, variant: Variant, batch: Batch, bound: float) -> Clipped:
        """The sums of a whole draw, part by part, where the graph leaves them: the next run writes over them.

        `bound`: norms are measured in units of it.
        """
        totals: list[Tensor] = []
        weights, finite = [], []
        for leaves, count in batch.parts:
            *sums, scale, good = variant.run(_tensors(leaves), count, bound)
            weights.append(scale if count == self.rows else scale[:count])
            finite.append(good if count == self.rows else good[:count])
            if len(batch.parts) > 1:
                totals = list(torch._foreach_add(sums, totals or 0.0))  # of its own: two outputs of a graph may be one tensor
                weights[-1], finite[-1] = weights[-1].clone(), finite[-1].clone()
        if totals:
            torch._foreach_copy_(sums, totals)
        if len(weights) > 1:
            weights, finite = [torch.cat(weights)], [torch.cat(finite)]
        return Clipped(dict(zip(variant.names, sums)), weights[0], finite[0])


def _home(modules: Sequence[nn.Module]) -> torch.device:
    """Where the first parameter is."""
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                return parameter.device
    return torch.device("cpu")


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, NotTraceable) else f"{type(error).__name__}: {error}"


def _warn(why: object) -> None:
    warnings.warn(f"this step is not compiled and runs eagerly, with the same numbers: {str(why).splitlines()[0]}", stacklevel=5)
