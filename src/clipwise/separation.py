"""Which rows belong to which example, measured: a backward pass with known weights on the losses.

If row r of a tap belongs to example i alone, then weighting the losses with s multiplies its gradient by s_i, exactly when
s_i is a power of two. Each example gets its own sequence of powers over a few passes, so any two examples are told apart,
whatever their number, and a gradient that mixes two of them fits neither.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import MixedExamples
from .functions import full_name
from .layout import EvenGrouping, Layout, Table, to_rows
from .marks import Marks
from .numerics import accumulation_dtype, flat_rows, to_accumulate
from .passes import Heard
from .planner import compared_at_once
from .rules.spread import spread_rule

# How far a gradient may be off its power of two. Nothing moves it but the order of atomic additions, on a GPU, anywhere on
# its way; so the coarsest precision of all taps counts. Near zero, numbers have fewer digits: that much is allowed on top.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_TOLERANCE_ON_GPU = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
_NOISE_ON_GPU = 1e-3  # entries this much below the largest of their row are not decoded


@dataclass(frozen=True)
class Codes:
    """A sequence of powers of two for each example; no two examples have the same."""

    base: int
    lowest: int
    digits: list[list[int]]  # [pass][example]

    @classmethod
    def draw(cls, batch: int, half: bool) -> Codes:
        base, lowest = (4, -2) if half else (16, -8)  # float16 has little room below and above
        passes = max(1, math.ceil(math.log(batch, base) - 1e-9))
        numbers = list(range(batch))
        random.Random().shuffle(numbers)
        return cls(base, lowest, [[number // base**k % base for number in numbers] for k in range(passes)])

    def weights(self, like: Tensor) -> Iterator[Tensor]:
        """(B,) for each pass."""
        for digits in self.digits:
            yield torch.tensor([2.0 ** (self.lowest + digit) for digit in digits], dtype=like.dtype, device=like.device)

    def owner_of(self) -> Tensor:
        """The example of each number that a sequence of digits spells, -1 for none."""
        numbers = [sum(digits[i] * self.base**k for k, digits in enumerate(self.digits)) for i in range(len(self.digits[0]))]
        table = torch.full((self.base ** len(self.digits),), -1)
        table[torch.tensor(numbers)] = torch.arange(len(numbers))
        return table


def _spacing_near_zero(dtype: torch.dtype) -> float:
    """What is lost of a number near zero: numbers below the smallest normal one may count as zero (on a GPU, in TF32, by
    set_flush_denormal), and a sum has many such terms. float16 keeps them, and needs them."""
    found = torch.finfo(dtype)
    return float(found.tiny * found.eps if dtype == torch.float16 else 256 * found.tiny)


class Measurement:
    """What the passes say about one tap, of which `heard` holds the gradient at weights one. `dtypes`: the precisions on its way."""

    def __init__(self, heard: Heard, batch: int, coarsest: torch.dtype, dtypes: set[torch.dtype]):
        self.record = heard.record
        self.grad = grad = heard.grad
        self.batch = batch
        self._tolerance = (_TOLERANCE_ON_GPU if heard.home.type == "cuda" else _TOLERANCE)[coarsest]
        self._spacing = max(map(_spacing_near_zero, dtypes))
        self._vanishing = 0.0 if torch.float16 in dtypes else 256 * self._spacing / self._tolerance  # smaller entries prove nothing
        self.is_zero = not bool((grad != 0).any())
        self.stays_zero = self.is_zero
        self.says_nothing = not bool((grad.isfinite() & (grad != 0)).any())
        self.candidates = [] if self.is_zero else list(self._candidates())
        self._readings: list[Tensor] = []

    def _axes(self) -> Iterator[tuple[int, ...]]:
        for count in (1, 2, 3):
            yield from itertools.combinations(self.record.row_axes, count)

    def _candidates(self) -> Iterator[Layout]:
        for axes in self._axes():
            rows = math.prod(self.grad.shape[axis] for axis in axes)
            if rows == self.batch:
                yield Layout(axes, "single")
            elif rows and rows % self.batch == 0:
                yield Layout(axes, "block")
                yield Layout(axes, "strided")

    def compare(self, weighted: Tensor, weights: Tensor) -> None:
        """Drop the candidates that this pass contradicts."""
        if self.stays_zero:
            self.stays_zero = not bool((weighted != 0).any())
        self.candidates = [layout for layout in self.candidates if self._agrees(layout, weighted, weights)]

    def _owners(self, layout: Layout, rows: int) -> Tensor:
        return EvenGrouping(rows, self.batch, layout.order).owners()

    def _agrees(self, layout: Layout, weighted: Tensor, weights: Tensor) -> bool:
        """Whether every row is scaled by its owner's weight, a few rows at a time. An entry that is not finite says nothing."""
        plain, scaled = to_rows(self.grad, layout.axes), to_rows(weighted, layout.axes)  # (R, ...)
        factors = weights.to(scaled.device, accumulation_dtype(scaled.dtype))[self._owners(layout, len(scaled)).to(scaled.device)]
        step = max(1, compared_at_once(scaled.device) * len(scaled) // max(scaled.numel(), 1))
        return all(
            self._rows_agree(plain[a : a + step].to(scaled.device), scaled[a : a + step], factors[a : a + step])
            for a in range(0, len(scaled), step)
        )

    def _rows_agree(self, plain: Tensor, scaled: Tensor, factors: Tensor) -> bool:
        plain, scaled = flat_rows(to_accumulate(plain)), flat_rows(to_accumulate(scaled))  # (r, m)
        expected = factors[:, None] * plain
        error, size = (scaled - expected).abs(), expected.abs()
        finite = error.isfinite() & size.isfinite()
        error, size = (torch.where(finite, side, 0.0).amax(1) for side in (error, size))
        return bool((error <= self._tolerance * size + self._slack(factors)).all())

    def _slack(self, factor: Tensor) -> Tensor:
        """What rounding near zero may do to a number and to its multiple: a few spacings of each, over the length of a backward pass."""
        return 64 * self._spacing * (1 + factor)

    def settled(self) -> tuple[Layout | None, bool]:
        """The one layout that agrees with everything, and whether at least two examples speak for it.

        Without two, it fits this batch (whatever says anything agrees), but need not fit the next. Where no entry says
        anything at all (all are NaN, Inf or zero), the likeliest layout serves.
        """
        if self.says_nothing:
            return (self.candidates[0] if self.candidates else None), False
        fewest = min((len(layout.axes) for layout in self.candidates), default=0)
        simplest = [layout for layout in self.candidates if len(layout.axes) == fewest]
        if len(simplest) != 1:
            return None, False
        rows = flat_rows(to_rows(self.grad, simplest[0].axes))
        speaking = (rows.isfinite() & (rows.abs() > self._vanishing)).any(1)
        return simplest[0], self._owners(simplest[0], len(rows))[speaking.cpu()].unique().numel() > 1

    def read(self, weighted: Tensor) -> None:
        """Keep the power of two of every entry, for `table`."""
        plain, scaled = to_accumulate(self.grad.to(weighted.device)), to_accumulate(weighted)
        usable = plain.isfinite() & scaled.isfinite() & (plain.abs() > 256 * self._spacing / self._tolerance)
        if plain.is_cuda and plain.dim() > 1:
            usable &= plain.abs() > _NOISE_ON_GPU * plain.abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)
        ratio = torch.where(usable, scaled / plain, 1.0)
        exponent = ratio.abs().log2().round()
        exact = (ratio * torch.exp2(-exponent) - 1).abs() <= self._tolerance
        reading = torch.where(exact, exponent, float("nan"))
        self._readings.append(torch.where(usable, reading, float("inf")))  # inf: nothing to read, nan: no power of two

    def table(self, codes: Codes) -> Table | None:
        """The owner of every row, decoded; None if some entry belongs to no single example.

        A row of which nothing can be decoded (it is NaN or Inf, or vanishingly small) goes to whom the likeliest layout
        gives it, if there is one.
        """
        number = torch.zeros_like(self._readings[0], dtype=torch.long)
        silent = torch.stack([reading == float("inf") for reading in self._readings]).any(0)
        for k, reading in enumerate(self._readings):
            digit = reading - codes.lowest
            if bool((~silent & ~((digit >= 0) & (digit < codes.base))).any()):
                return None
            number += torch.where(silent, 0, digit).long() * codes.base**k
        owners = codes.owner_of().to(number.device)[number]
        if bool((~silent & (owners < 0)).any()):
            return None
        owners = torch.where(silent, -1, owners)
        for axes in [*self._axes(), *([()] if not self.record.row_axes else [])]:
            rows = flat_rows(to_rows(owners, axes))
            largest = rows.amax(1, keepdim=True)
            if bool(((rows == largest) | (rows < 0)).all()):
                table = largest[:, 0]
                likely = next((layout for layout in self.candidates if layout.axes == axes), None)
                return Table(
                    axes, table if likely is None else torch.where(table < 0, self._owners(likely, len(table)).to(table.device), table)
                )
        return None

    def refusal(self, marks: Marks) -> MixedExamples:
        use = self.record.use
        called = "an entry-wise function" if self.record.rule is spread_rule else full_name(use.func)
        return MixedExamples(
            f"where {called} uses {marks.describe(use.tracked)}{marks.where(use.tracked)}, the gradient of one loss reaches rows "
            f"that other losses reach too (shape {tuple(self.grad.shape)}, {self.batch} losses).",
            "Let every loss depend on its own example alone: no batch statistics, no contrastive terms, one entry of `losses` an "
            "example. If what enters there carries no examples (a shared mask, position ids), declare it with clipwise.constant(x).",
        )
