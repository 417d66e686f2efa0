"""All factors of one tensor together: a weight that is used once, twice, or by two kinds of call."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from ..numerics import flat_rows, product_roundoff, unit_roundoff
from ..planner import MemoryBudget, Terms, examples_at_once
from .base import Factor
from .convolution import Convolution
from .dense import Dense
from .inner import gram_kernel_roundoff, inner, inner_roundoff
from .outer import Outer
from .pieces import Pieces
from .rows import Rows
from .squares import Squares, known, of_rows, one_behind_the_other
from .ways import way_of

_T = TypeVar("_T")
_ACCUMULATION = 64  # how many unit roundoffs a long sum may drift; products of matrices stay well below


class FactorSum:
    """g_i = Σ_a a_i over factors a of one tensor. Evaluates squared norms by the cheapest way that cannot under-estimate.

    Guarantee: √squared_norms()[i] bounds the norm of what `weighted_sum` adds for example i at weight 1, rounding
    included. Where the sum is formed anew after the norm was taken, its inputs are rounded once more (a factor 1 + 4u),
    and terms that cancel leave an error as large as κ·mass (κ: precision of that sum), so κ·mass is added to the norm; where
    the written-out gradient itself is kept and released, nothing is.
    """

    def __init__(self, factors: Sequence[Factor]):
        self.factors = _joined(list(factors)) if len(factors) > 1 else list(factors)
        first = self.factors[0]
        self.shape, self.batch, self.device, self.dtype = first.shape, first.batch, first.device, first.dtype
        self._kept: Dense | None = None
        self._mass: Tensor | None = None
        self._summary = ""  # of factors that are forgotten
        self.way = ""  # how the norms were evaluated
        self.seconds: float | None = None  # that this took when it was tried, with the weighted sum

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        """Σ_i weights[i]·g_i. `clean`: every g_i is finite."""
        if self._kept is not None:
            return self._kept.weighted_sum(weights, clean=clean)
        if len(self.factors) == 1:
            return self.factors[0].weighted_sum(weights, clean=clean)
        first, *rest = (factor.weighted_sum(weights, clean=clean) for factor in self.factors)
        for other in rest:
            first = first + other
        return first

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The gradients of some examples, written out."""
        stop = self.batch if stop is None else stop
        if self._kept is not None:
            return self._kept.part(start, stop)
        whole = (start, stop) == (0, self.batch)
        first, *rest = ((factor if whole else factor.examples(start, stop)).dense() for factor in self.factors)
        for other in rest:
            first = first + other
        return first

    def mass(self) -> Tensor:
        if self._mass is None:
            first, *rest = (factor.mass() for factor in self.factors)
            self._mass = torch.stack([first, *rest]).sum(0) if rest else first
        return self._mass

    def squared_norms(self, budget: MemoryBudget) -> Tensor:
        """(B,) in float64."""
        return self.measure(budget).now()

    def measure(self, budget: MemoryBudget, *, second_pass: torch.dtype | None = None) -> Squares:
        """`second_pass` names the precision of a backward pass that will form the sum instead of this object.

        Its gradients are those of scaled losses, rounded anew: a factor 1 + 4u.
        """
        if second_pass is not None:
            self.way = "tiles"
            return self._as_added(self._measured("tiles"), self._rounded(second_pass))
        return self.measure_by(way_of(self, budget))

    def measure_by(self, decision: tuple[str, float | None]) -> Squares:
        """By a way that was decided on, and the seconds that it took when it was tried."""
        self.way, self.seconds = decision
        return self.measured_by(self.way)

    @property
    def signature(self) -> Hashable:
        """Of all its factors, and their precision."""
        return tuple([(factor.signature, factor.stored_dtype) for factor in self.factors])

    def measured_by(self, named: str) -> Squares:
        """By a way of ways.py: `keep`, `tiles`, `gram` …, or `keep by windows` where a convolution's gradients are written out."""
        way, _, kernel = named.partition(" by ")
        if "kernel of " in named:
            tile = int(named.rpartition(" ")[2])
            return self._by_gram_kernel(tile) if way.startswith("gram") else self._by_kernel(way == "keep", tile)
        if kernel:
            for factor in self.factors:
                assert isinstance(factor, Convolution)
                factor.kernel = kernel
        if way == "keep":
            return self._keep()
        measured = self._measured(way)
        if way == "written":
            return measured
        rounded = self._rounded()
        return measured.rounded_up(1 + 4 * rounded) if way == "product" else self._as_added(measured, rounded)

    def _keep(self) -> Squares:
        if self._kept is None:
            in_pieces = self.device.type == "cpu" and self.batch > 0
            self._kept = (
                Pieces(self._a_few_at_a_time(lambda start, stop: Dense(self.dense(start, stop)))) if in_pieces else Dense(self.dense())
            )
        return self._kept.squares()

    def _by_kernel(self, keep: bool, tile: int) -> Squares:
        [factor] = self.factors
        assert isinstance(factor, Outer | Convolution)
        squares, kept = factor.by_kernel(tile, keep)
        if kept is not None:
            self._kept = Dense(kept)
            return known(squares).rounded_up(1 + _ACCUMULATION * unit_roundoff(torch.float32))
        return self._as_added(known(squares), self._rounded())

    def _by_gram_kernel(self, tile: int) -> Squares:
        [factor] = self.factors
        assert isinstance(factor, Outer | Convolution)
        off = gram_kernel_roundoff(factor)
        if isinstance(factor, Convolution):  # libraries may add otherwise than window by window: what they round has the mass of all
            squares, mass = factor.as_outer().by_gram_kernel(tile)
            return self._as_added(known(squares + mass.square() * off), self._rounded())
        squares, self._mass = factor.by_gram_kernel(tile)
        return self._as_added(Squares(squares, mass=self._mass, mass_factor=off, is_square=True), self._rounded())

    def measures(self, budget: MemoryBudget, *, second_pass: torch.dtype | None = None) -> list[Squares]:
        """Squared norms that add up to that of the whole: here one."""
        return [self.measure(budget, second_pass=second_pass)]

    def _rounded(self, second_pass: torch.dtype | None = None) -> float:
        """How far the inputs of the products that make up the sum are rounded."""
        rounded = product_roundoff(self.dtype, self.device, convolution=any(isinstance(f, Convolution) for f in self.factors))
        if any(factor.stored_dtype == torch.bfloat16 for factor in self.factors):
            rounded = max(rounded, unit_roundoff(torch.bfloat16) / 2)  # one of the two inputs, by being scaled
        return rounded if second_pass is None else max(unit_roundoff(second_pass), rounded)

    def _drift(self, rounded: float) -> float:
        """How far a sum of terms that were rounded once more may be off, relative to its mass."""
        return 2 * rounded + _ACCUMULATION * unit_roundoff(self.dtype)

    def _as_added(self, measured: Squares, rounded: float) -> Squares:
        """What a sum of terms that were rounded once more may come to."""
        return measured.rounded_up(1 + 4 * rounded).with_drift(self._drift(rounded), self.mass())

    def row_matrices(self, second_pass: torch.dtype | None = None) -> tuple[list[Tensor], float] | None:
        """Where the squared norm is a product of row norms: the matrices, and what to multiply with for rounding; else None.

        The mass of a single term is its norm, so what a second pass may add is in proportion to that, too.
        """
        if not self.is_measured_with_others:
            return None
        [factor] = self.factors
        if isinstance(factor, Dense) and second_pass is None:
            self.way = "written"
            return [factor.grad], 1.0
        rounded = self._rounded(second_pass)
        added = (math.sqrt(1 + 4 * rounded) + (self._drift(rounded) if second_pass is not None else 0.0)) ** 2
        if isinstance(factor, Dense):
            self.way = "written"
            return ([factor.grad], added) if factor.is_one_term else None
        self.way = "product"
        return list(factor.tensors), added

    @property
    def is_measured_with_others(self) -> bool:
        """Whether the squared norm may be a product of row norms, which are measured for many parameters at once."""
        if len(self.factors) > 1 or self.batch == 0:
            return False
        factor = self.factors[0]
        return (isinstance(factor, Dense) and factor.is_whole) or (isinstance(factor, Outer) and (factor.blocks, factor.terms) == (1, 1))

    @property
    def written(self) -> Tensor | None:
        """The gradients, (B, n), where they lie written out in one piece."""
        found = self._kept or (self.factors[0] if len(self.factors) == 1 else None)
        return flat_rows(found.grad) if isinstance(found, Dense) and found.is_whole else None

    def forget_terms(self) -> None:
        """Free what a written-out gradient was made of. No mass is known any more."""
        if self._kept is not None:
            if self.factors[0] is not self._kept:
                self._summary, self.factors = self.summary, [self._kept]
        elif isinstance(self.factors[0], Dense) and len(self.factors) == 1 and not self.factors[0].is_one_term:
            self.factors = [Dense(self.factors[0].grad)]

    @property
    def terms(self) -> Terms:
        """What is let go where the gradients are kept written out."""
        sides = [factor.tensors for factor in self.factors]
        return Terms([side[0] for side in sides], [tensor for side in sides for tensor in side[1:]])

    @property
    def kept_bytes(self) -> int:
        """Of gradients that lie written out until the clipped sum is formed."""
        written = self._kept if self._kept is not None else next((factor for factor in self.factors if isinstance(factor, Dense)), None)
        return 0 if written is None else sum(tensor.nbytes for tensor in written.tensors)

    @property
    def summary(self) -> str:
        return self._summary or " + ".join(factor.summary for factor in self.factors)

    def _measured(self, way: str) -> Squares:
        single = self.factors[0]
        if self.batch == 0:
            return known(torch.zeros(0, dtype=torch.float64, device=single.device))
        if len(self.factors) == 1 and isinstance(single, Rows):
            return known(single.squared_norms())
        if len(self.factors) == 1 and isinstance(single, Outer) and single.terms <= 1:
            return single.single_term_squares()
        if len(self.factors) == 1 and isinstance(single, Dense):
            return single.squares()
        if way == "gram":
            return self._gram()
        return one_behind_the_other(self._a_few_at_a_time(lambda start, stop: of_rows(self.dense(start, stop))))

    def _a_few_at_a_time(self, make: Callable[[int, int], _T]) -> list[_T]:
        """Of examples start … stop-1 each."""
        step = examples_at_once(self.batch, self.shape.numel(), self.device)
        return [make(start, min(start + step, self.batch)) for start in range(0, self.batch, step)]

    def _gram(self) -> Squares:
        """Σ_ab ⟨a, b⟩ plus the most that rounding may have taken away from it."""
        total = torch.zeros(self.batch, dtype=torch.float64, device=self.device)
        for i, a in enumerate(self.factors):
            total += inner(a, a)
            for b in self.factors[i + 1 :]:
                total += 2 * inner(a, b)
        total = total.clamp(min=0).masked_fill(~total.isfinite(), math.inf)  # −∞ is no rounding
        return Squares(total, mass=self.mass(), mass_factor=inner_roundoff(self.factors), is_square=True)


def _joined(factors: list[Factor]) -> list[Factor]:
    """Factors of one kind become one: terms stand side by side, so that what cancels is added before it is squared."""
    dense = [factor for factor in factors if isinstance(factor, Dense)]
    rows = [factor for factor in factors if isinstance(factor, Rows)]
    matrices = [factor for factor in factors if isinstance(factor, Outer | Convolution)]
    others = [factor for factor in factors if not isinstance(factor, Dense | Rows | Outer | Convolution)]
    joined: list[Factor] = list(others)
    if len(matrices) > 1:
        outers = [factor.as_outer() if isinstance(factor, Convolution) else factor for factor in matrices]
        while outers:
            first = outers[0]
            for other in [o for o in outers[1:] if first.same_blocks(o)]:
                first = first.joined(other)
            joined.append(first)
            outers = [o for o in outers[1:] if not outers[0].same_blocks(o)]
    else:
        joined += matrices
    if rows:
        table = rows[0]
        for more in rows[1:]:
            table = table.joined(more)
        joined.append(table)
    if dense:
        total = dense[0]
        for summand in dense[1:]:
            total = total.plus(summand)
        joined.append(total)
    return joined
