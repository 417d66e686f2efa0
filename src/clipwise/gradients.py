"""The per-example gradients of every parameter for one vector of losses, as factors."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .decisions import Deciding
from .derived import pull_back
from .errors import WrongRule
from .explain import Explained
from .factors import (
    Dense,
    Diagonal,
    Factor,
    FactorSum,
    Outer,
    PartSum,
    Squares,
    finish,
    known,
    products,
    products_of_columns,
    row_squares_of_each,
    row_squares_together,
    sum_of,
    weighted_sums_together,
)
from .functions import full_name
from .layout import Layout, Table, to_rows
from .numerics import in_working_precision, unit_roundoff
from .planner import MemoryBudget
from .pulled import PulledBack, Watching, chunked_gradients
from .registry import Call
from .rules.spread import spread_rule
from .taps import Record
from .tracing import is_tracing, is_tracing_in_one

if TYPE_CHECKING:
    from .tape import Tape


def _watching(tape: Tape) -> Watching:
    """tape.looking_back, held weakly: the tape keeps the gradients, and a cycle would keep the graph until someone collects garbage."""
    weak = weakref.ref(tape)

    def watching() -> AbstractContextManager[None]:
        tape = weak()
        assert tape is not None, "the tape lives as long as its gradients are asked for"
        return tape.looking_back()

    return watching


class ExampleGradients:
    """g_1 … g_B for every parameter: squared norms, and weighted sums over the batch.

    Factors that belong to a parameter outright are added per parameter. Weights that autograd must pull back (W + BA,
    weight norm) are collected as they are; the parameters behind them are evaluated together, a chunk of examples at a
    time, and written out.

    is_known  the way to the losses was verified before
    is_last   nothing else will be asked of the graph: norms are measured as soon as a parameter's factors are there, and what is not
              needed any more is let go while the backward pass goes on
    """

    def __init__(self, tape: Tape, batch: int, device: torch.device, *, is_known: bool = False, is_last: bool = False):
        self.batch = batch
        self._marks = tape.marks
        self._watching = _watching(tape)
        self._device = device
        self._experience = tape.experience
        decisions = tape.experience.ways_in_graphs if is_tracing_in_one() else tape.experience.ways
        self._deciding = Deciding(decisions, decisions.budget(device) if is_last else MemoryBudget.on(device), is_known=is_known)
        measures_early = is_last and not tape.needs_graph and not tape.computes_again
        self._awaited = Counter(key for keys in tape.tapped for key in keys) if measures_early else {}  # taps of a parameter
        self._direct: dict[int, list[Factor]] = {}
        self._indirect: dict[int, tuple[Tensor, list[Factor]]] = {}
        self._sums: dict[int, FactorSum | PartSum] = {}
        self._measured: dict[int, list[Squares]] = {}
        self._seconds: dict[int, float | None] = {}
        self.pulled: PulledBack | None = None
        self.precision = torch.float64  # the lowest precision in which a gradient arrived
        self.is_known = is_known
        self._calls: dict[int, list[str]] = {}  # where the way is new: who uses a parameter …
        self._normalises: dict[int, bool] = {}  # … and whether rules of ours for normalisations alone do

    def add(self, record: Record, grad: Tensor, kept: tuple[Tensor, ...], placement: Layout | Table) -> None:
        """Take over the gradient that reached one tap. grad: shape of the watched call's output."""
        self.precision = max(self.precision, grad.dtype, key=unit_roundoff)
        use, example_data = record.restored(kept)
        if not self.is_known:
            by = "entry by entry" if record.rule is spread_rule else full_name(use.func)
            for key in frozenset().union(*map(self._marks.roots, use.tracked)):
                self._calls.setdefault(key, []).append(by)
                self._normalises[key] = self._normalises.get(key, True) and record.rule.trusted and "norm" in by
        rows = to_rows(grad, placement.axes).shape[0]
        grouping = placement.grouping(rows, self.batch)
        if record.output is not None:
            pieces = Diagonal(grad, placement.axes).merge(grouping)
            found = chunked_gradients([record.output], list(use.args[0]), [FactorSum([pieces])], self._watching)
            factors: dict[Tensor, Factor] = {weight: Dense(g) for weight, g in zip(use.tracked, found)}
        else:
            call = Call(use, grad, placement.axes, example_data)
            factors = self._checked(call, record.rule.factors(call))
            if not grouping.is_trivial:
                factors = {weight: factor.merge(grouping) for weight, factor in factors.items()}
        for weight, factor in factors.items():
            self.add_factor(weight, factor)
        self._arrived(use.tracked)

    def _arrived(self, weights: Iterable[Tensor]) -> None:
        """A tap of these has been heard. After the last one of a parameter its norms are measured, and its terms let go if they can be."""
        for key in self._marks.keys_of(weights) if self._awaited else ():
            self._awaited[key] = left = self._awaited.get(key, 0) - 1
            if left == 0 and self._direct.get(key):
                total = self._sums[key] = sum_of(self._direct.pop(key))
                if not isinstance(total, FactorSum) or not total.is_measured_with_others:
                    self._measured[key] = self._measures(key, total)
                total.forget_terms()

    def _measures(self, key: int, total: FactorSum | PartSum, second_pass: torch.dtype | None = None) -> list[Squares]:
        """By the way that was decided on for these shapes, or is now."""
        start = time.perf_counter()
        if second_pass is not None:
            found = total.measures(self._deciding.budget, second_pass=second_pass)
        else:
            parts = [total] if isinstance(total, FactorSum) else total.parts.values()
            name = self._marks.names[key]
            found = [part.measure_by(self._deciding.way((name, place), part)) for place, part in enumerate(parts)]
        self._seconds[key] = total.seconds if self._device.type != "cpu" else time.perf_counter() - start
        return found

    def _checked(self, call: Call, factors: Any) -> dict[Tensor, Factor]:
        rows = call.output_grad.shape[0]
        for weight in call.tracked:
            factor = factors.get(weight) if isinstance(factors, dict) else None
            if not isinstance(factor, Factor) or factor.shape != weight.shape or factor.batch != rows:
                got = "none" if not isinstance(factor, Factor) else f"one of shape {tuple(factor.shape)} with {factor.batch} rows"
                raise WrongRule(
                    f"the rule of {full_name(call.func)} owes {self._marks.describe([weight])} a factor of shape "
                    f"{tuple(weight.shape)} with {rows} rows, and returned {got}.",
                    "Return {weight: factor} for every tracked weight; clipwise.testing.check_rule tries a rule out.",
                )
        return factors

    def add_factor(self, weight: Tensor, factor: Factor) -> None:
        self.precision = max(self.precision, weight.dtype, key=unit_roundoff)
        weight, factor = pull_back(weight, factor, self._marks)
        if id(weight) in self._marks.parameters:
            self._direct.setdefault(id(weight), []).append(factor)
        else:
            self._indirect.setdefault(id(weight), (weight, []))[1].append(factor)

    def add_zero(self, record: Record) -> None:
        """The gradient that reached this tap is zero throughout: its parameters take part, with nothing."""
        for key in self._marks.roots_in_order(record.use.tracked):
            self._direct.setdefault(key, [])
        self._arrived(record.use.tracked)

    def finish(self) -> None:
        """All taps have been heard."""
        for key, factors in self._direct.items():
            if not factors:
                parameter = self._marks.parameters[key]
                nothing = parameter.new_zeros(self.batch, 0, 1)
                factors.append(Outer(nothing.expand(-1, -1, parameter.numel()), nothing, parameter.shape))
        self._sums |= {key: sum_of(factors) for key, factors in self._direct.items()}
        if self._indirect:
            outputs = [weight for weight, _ in self._indirect.values()]
            sums = [sum_of(factors) for _, factors in self._indirect.values()]
            inputs = {
                key: self._marks.parameters[key] for key in self._marks.roots_in_order(outputs) if self._marks.parameters[key].requires_grad
            }
            extra = {key: self._sums.pop(key) for key in inputs if key in self._sums}
            self.pulled = PulledBack(outputs, sums, inputs, extra, self.batch, self._watching)
        self._direct.clear()
        self._indirect.clear()

    def names(self) -> list[str]:
        """Parameters that the losses depend on."""
        keys = [*self._sums, *(self.pulled.inputs if self.pulled else ())]
        return [name for key, name in self._marks.names.items() if key in keys]

    def normalisations(self) -> set[str]:
        """Parameters that rules of ours for normalisations alone speak of, where the way is new."""
        return {self._marks.names[key] for key, is_one in self._normalises.items() if is_one}

    def ways(self) -> dict[str, str]:
        """{name: how its norms were evaluated}, after they were."""
        pulled = dict.fromkeys(self.pulled.inputs, "pulled back") if self.pulled else {}
        return {self._marks.names[key]: way for key, way in [*((key, s.way) for key, s in self._sums.items()), *pulled.items()]}

    def squared_norms(self) -> dict[str, Tensor]:
        """{name: (B,)} in float64, beside the losses; never less than what a weighted sum really adds."""
        return {name: squares.to(self._device) for name, squares in self.squares_on_host().items()}

    def squares_on_host(self, *, second_pass: torch.dtype | None = None) -> dict[str, Tensor]:
        """{name: (B,)} in float64, or what a second pass in that precision may add.

        A handful of numbers an example: on the host, what follows from them takes no kernels.
        """
        waiting = {key: total for key, total in self._sums.items() if key not in self._measured}
        parts = {
            key: found for key, total in waiting.items() if isinstance(total, FactorSum) and (found := total.row_matrices(second_pass))
        }
        if is_tracing_in_one() or len(parts) < 2:
            parts = {}
        parts = dict(sorted(parts.items(), key=lambda part: -len(part[1][0])))  # products of two come first
        matrices = [side[0] for side, _ in parts.values()] + [side[1] for side, _ in parts.values() if len(side) == 2]
        together = row_squares_together(matrices) if parts and not is_tracing() else None
        traced = row_squares_of_each(matrices) if parts and is_tracing() else None
        alone = dict(self._measured)
        for key, total in waiting.items():
            if (together is None and traced is None) or key not in parts:
                alone[key] = self._measures(key, total, second_pass)
        if self._deciding.is_new:
            self._explain()
        if self.pulled is not None:
            alone |= {key: [known(squares)] for key, squares in self.pulled.squared_norms(self._deciding).items()}
        norms = _added_up(alone)
        factors = [factor for _, factor in parts.values()]
        if together is not None:
            norms |= dict(zip(parts, products_of_columns(together.on_host(), factors)))
        if traced is not None:
            norms |= dict(zip(parts, products(traced, factors)))
        return {name: norms[key] for key, name in self._marks.names.items() if key in norms}

    def _explain(self) -> None:
        names, experience = self._marks.names, self._experience
        experience.calls |= {names[key]: tuple(dict.fromkeys(calls)) for key, calls in self._calls.items()}

        def row(key: int, name: str) -> Explained | None:
            calls, total = experience.calls.get(name, ()), self._sums.get(key)
            if total is not None:
                return Explained(name, calls, total.summary, total.way, self._seconds.get(key), total.kept_bytes // max(self.batch, 1))
            pulled = self.pulled is not None and key in self.pulled.inputs
            return Explained(name, calls, "through other weights", "pulled back", None, 0) if pulled else None

        if not is_tracing():
            experience.explained = [found for key, name in names.items() if (found := row(key, name)) is not None]

    def masses(self) -> dict[str, Tensor]:
        masses = {key: total.mass() for key, total in self._sums.items()}
        if self.pulled is not None:
            masses |= self.pulled.masses(self._deciding)
        return {name: masses[key].to(self._device) for key, name in self._marks.names.items() if key in masses}

    def forget_terms(self) -> None:
        """Free what is no longer needed once norms are known."""
        for total in self._sums.values():
            total.forget_terms()

    def weighted_sums(self, weights: Mapping[str, Tensor], *, clean: bool = False) -> dict[str, Tensor]:
        """{name: Σ_i weights[name][i]·g_i}, in float32 or float64. `clean`: every g_i is finite."""
        names = self._marks.names
        cast: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

        def prepared(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
            """Weights that several parameters share are rounded once."""
            found = cast.get(key := (id(weights[name]), dtype, device))
            if found is None:
                found = cast[key] = in_working_precision(weights[name], dtype).to(device)
            return found

        sums: dict[int, Tensor] = {}
        alike: dict[int, tuple[Tensor, list[int], list[Tensor]]] = {}  # by what they are weighed with
        for key, total in self._sums.items():
            rows = total.written if isinstance(total, FactorSum) and (clean or is_tracing()) and not is_tracing_in_one() else None
            exact = prepared(names[key], total.dtype if rows is None else rows.dtype, total.device)
            if rows is None:
                sums[key] = total.weighted_sum(exact, clean=clean)
            else:
                _, keys, matrices = alike.setdefault(id(exact), (exact, [], []))
                keys.append(key)
                matrices.append(rows)
        for exact, keys, matrices in alike.values():
            found = weighted_sums_together(matrices, exact, clean=clean)
            sums |= {key: total.view(self._sums[key].shape) for key, total in zip(keys, found)}
        if self.pulled is not None:
            sums |= self.pulled.weighted_sums({key: weights[names[key]].to(p.device) for key, p in self.pulled.inputs.items()})
        return {name: sums[key] for key, name in names.items() if key in sums}


def _added_up(measured: dict[int, list[Squares]]) -> dict[int, Tensor]:
    """Squared norms on the host; those of a parameter's parts are added."""
    rows = iter(finish([squares for parts in measured.values() for squares in parts]) if measured else ())
    found = {}
    for key, parts in measured.items():
        found[key], *rest = (next(rows) for _ in parts)
        for other in rest:
            found[key] = found[key] + other
    return found
