"""The tail of an eager step, recorded: from what reached the taps of a model to clipped sums, by one replay.

    sums, value, weights, finite = tail(gradient and kept tensors of each tap, losses, 1/C²)

Forward and backward pass are the caller's and run as they always do. What clipwise computes from them is the same in every step, up
to how many examples there are; of a small model it is many kernels that take less time than their launching. What reached the taps is
copied to where the graph reads it. A batch with fewer rows than the graph has leaves zeros behind it, and a mask says which rows count.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..clipping import Clipping
from ..layout import Layout
from ..marks import Marks
from ..methods.base import Clipped
from ..numerics import without_autocast
from ..passes import Arrival
from ..tape import Tape
from ..tracing import NotTraceable
from .agreement import coarsest
from .arrivals import Eagerly, Measured, are_same, clipped_sums, essence, example_slots, weight_shapes
from .lending import Lending
from .recording import alike, recorded
from .rows import mask, nobodys
from .trace import graph_of


@dataclass(frozen=True)
class Rows:
    """The axis of a tensor along which the examples lie one after the other, and how many entries each has there."""

    axis: int
    each: int

    def part(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor.narrow(self.axis, start * self.each, (stop - start) * self.each)

    def shape(self, like: Tensor, count: int) -> list[int]:
        return [count * self.each if axis == self.axis else length for axis, length in enumerate(like.shape)]


def rows_of(layout: Layout, shape: torch.Size, batch: int) -> Rows | None:
    """Where the examples of a tap with this layout can be cut off, and others put behind them."""
    if not layout.axes:
        return None
    axis = layout.axes[-1 if layout.order == "strided" else 0]
    length = shape[axis]
    if layout.order == "strided":
        return Rows(axis, 1) if length == batch else None
    return Rows(axis, length // batch) if length % batch == 0 else None


class Tail:
    """One recording, for batches of at most `rows` examples; of exactly so many, where the examples of some tap cannot be told apart.

    `clipping` with norms in units of a bound that each call brings along.
    """

    def __init__(
        self, tape: Tape, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor, clipping: Clipping, rows: int
    ):  # fmt: skip
        batch, tensors = len(losses), _tensors(arrivals, losses)
        if any(tensor.device != losses.device for tensor in tensors):
            raise NotTraceable("it lies on several devices.")
        self._layouts = list(layouts)
        self._essences = [essence(record, tape.marks) for record, _, _ in arrivals]
        self._calls = [weakref.ref(record.use) for record, _, _ in arrivals]  # those that recipes hold come again
        self._weights = weight_shapes(tape.marks)
        self._like = [(tensor.dtype, tensor.device) for tensor in tensors]
        self._alike = alike({place: dtype for place, (dtype, _) in enumerate(self._like)})
        each = [
            _each_tensor(arrival, layout, batch, looks_up=bool(mine[-1]))
            for arrival, layout, mine in zip(arrivals, layouts, self._essences)
        ]
        self._rows = [*(rows for tensors in each for rows in tensors), Rows(0, 1)]
        self.can_be_filled_up = None not in self._rows
        self.rows = rows if self.can_be_filled_up else batch
        self._buffers = [
            tensor.new_zeros(tensor.shape if place is None or place is _WHOLE else place.shape(tensor, self.rows))
            for tensor, place in zip(tensors, self._rows)
        ]
        self._mask = mask(self.rows, self.rows, losses.device).clone()
        self._inverse_square = torch.ones((), dtype=torch.float64, device=losses.device)
        self._bound = 1.0  # that it is for
        self._filled = 0  # rows that hold something
        self._views: dict[int, list[Tensor]] = {}  # where a batch of so many rows is copied to
        self._names: list[str] = []
        self._lending = Lending()
        self._fill(tensors, batch)
        inputs = [*self._buffers, self._mask, self._inverse_square]
        with without_autocast():
            records, sizes = [record for record, _, _ in arrivals], [1 + len(kept) for _, _, kept in arrivals]
            function = clipped_sums(tape, records, sizes, layouts, clipping, self._names)
            self._graph = graph_of(function, inputs)  # it holds the constants that a replay reads
            self._precision = coarsest(self._graph, losses.device)
            self._replay, self._outputs = recorded(self._graph, inputs)

    def fits(self, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor, marks: Marks) -> bool:
        """Whether these are the taps that were recorded, with the examples where they were, and have room."""
        count, given = len(losses), _tensors(arrivals, losses)
        if count > self.rows or (count < self.rows and not self.can_be_filled_up) or len(given) != len(self._like):
            return False
        like = zip(given, self._where(count), self._like)
        if not all(tensor.shape == view.shape and kind == (tensor.dtype, tensor.device) for tensor, view, kind in like):
            return False
        try:
            return (
                self._layouts == list(layouts)
                and self._weights == weight_shapes(marks)
                and all(
                    (record.key == mine[0] and record.use is call()) or essence(record, marks) == mine
                    for (record, _, _), mine, call in zip(arrivals, self._essences, self._calls)
                )
            )
        except NotTraceable:
            return False

    def __call__(self, arrivals: Sequence[Arrival], losses: Tensor, bound: float) -> Clipped:
        """Clipped sums of what `fits`, lent. Norms are measured in units of `bound`."""
        count = len(losses)
        self._lending.take_back()
        self._fill(_tensors(arrivals, losses), count)
        if bound != self._bound:
            self._inverse_square.fill_(bound**-2)
            self._bound = bound
        self._replay()
        *sums, value, _, weights, finite = self._outputs
        lent = dict(zip(self._names, self._lending.lend(sums)))
        return Clipped(lent, weights[:count].clone(), finite[:count].clone(), value.to(losses.dtype, copy=True), is_lent=True)

    def is_right(self, arrivals: Sequence[Arrival], losses: Tensor, bound: float, eagerly: Eagerly) -> bool:
        """Hold the recording against the eager computation on numbers that are nobody's: what is decided here must not depend on a record.

        Where batches can be filled up, one row is left to be.
        """
        dice = torch.Generator().manual_seed(0)
        count = len(losses) - 1 if self.can_be_filled_up and len(losses) > 2 else len(losses)

        def made_up(tensor: Tensor, place: Rows | None) -> Tensor:
            if place is _WHOLE:
                return tensor
            part = tensor if place is None else place.part(tensor, 0, count)
            return nobodys(part, dice)

        places = iter(self._rows)
        others = [
            (record, made_up(grad, next(places)), tuple(made_up(tensor, next(places)) for tensor in kept))
            for record, grad, kept in arrivals
        ]
        other_losses = made_up(losses, next(places))
        found, expected = self(others, other_losses, bound), eagerly(others, other_losses)
        return are_same(Measured(found, self._outputs[-3][:, :count]), expected, self._precision)

    def _where(self, count: int) -> list[Tensor]:
        if count not in self._views:
            self._views[count] = [
                buffer if place is None or place is _WHOLE else place.part(buffer, 0, count)
                for buffer, place in zip(self._buffers, self._rows)
            ]
        return self._views[count]

    def _fill(self, tensors: Sequence[Tensor], count: int) -> None:
        """Put a batch in place, and zeros where the one before it was longer."""
        with torch.no_grad():
            views = self._where(count)
            for places in self._alike:
                torch._foreach_copy_([views[place] for place in places], [tensors[place].detach() for place in places])
            if count != self._filled:
                for buffer, place in zip(self._buffers, self._rows) if count < self._filled else ():
                    if place is not None and place is not _WHOLE:
                        place.part(buffer, count, self._filled).zero_()
                self._mask.copy_(mask(count, self.rows, self._mask.device))
                self._filled = count


_WHOLE = Rows(-1, 0)  # of a tensor that holds no examples


def _tensors(arrivals: Sequence[Arrival], losses: Tensor) -> list[Tensor]:
    return [*(tensor for _, grad, kept in arrivals for tensor in (grad, *kept)), losses]


def _each_tensor(arrival: Arrival, layout: Layout, batch: int, *, looks_up: bool) -> list[Rows | None]:
    """For the gradient of a tap and what it kept: where their examples lie; None: nobody knows. (A weight that was made of another may have
    a row for every example.)"""
    record, grad, kept = arrival
    rows = None if looks_up else rows_of(layout, grad.shape, batch)
    examples = example_slots(record)
    aligned = [all(axis < t.dim() and t.shape[axis] == grad.shape[axis] for axis in layout.axes) for t in kept]
    return [rows, *((rows if fits else None) if place in examples else _WHOLE for place, fits in enumerate(aligned))]
