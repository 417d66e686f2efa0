"""What reaches the taps of a step, as inputs of a graph; what such a graph takes for granted, computes, and is held against."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..clipping import Clipping
from ..derived import path_of, standing_in
from ..layout import Layout
from ..marks import Marks
from ..methods.base import Clipped, from_factors, value_of
from ..numerics import accumulation_dtype
from ..passes import Arrival, gradients_from
from ..tape import Tape
from ..taps import Record, Slot
from ..tracing import NotTraceable
from .agreement import agree_each, norms_agree
from .trace import masked_sums

_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def essence(record: Record, marks: Marks) -> tuple[Any, ...]:
    """What a graph takes for granted about a tap, besides the shapes of its tensors: the call, its weights and its numbers."""

    def of(value: Any) -> Any:
        if isinstance(value, Slot):
            return "slot", value.index, value.example
        if isinstance(value, Tensor):
            return (marks.labels[id(value)], value.shape, value.dtype) if id(value) in marks.parameters else "derived"
        if isinstance(value, _PLAIN):
            return type(value), value
        raise NotTraceable(f"{type(value).__name__} among the arguments of a watched call may change unnoticed.")

    if not record.rule.trusted or record.output is not None:
        raise NotTraceable("a rule of the user's may read what changes unnoticed.")
    paths = [path_of(weight, marks)[0] for weight in record.use.tracked if id(weight) not in marks.parameters]
    args, kwargs = record.use.mapped(of)
    return record.key, id(record.rule), id(record.use.func), args, kwargs, paths


def weight_shapes(marks: Marks) -> list[tuple[torch.Size, torch.dtype]]:
    """Of the parameters: what essences tell besides the call itself, which may be the same object as in a step before."""
    return [(parameter.shape, parameter.dtype) for parameter in marks.parameters.values()]


def example_slots(record: Record) -> set[int]:
    """Which of the tensors that a tap kept hold example data."""
    found: set[int] = set()

    def note(value: Any) -> Any:
        if isinstance(value, Slot) and value.example:
            found.add(value.index)
        return value

    record.use.mapped(note)
    return found


def with_row_numbers(arrival: Arrival, marks: Marks) -> Arrival:
    """What reached a tap, and behind it the numbers of rows that its weights were looked up by."""
    record, grad, kept = arrival
    numbers = _row_numbers(record, marks)
    return (record, grad, (*kept, *numbers)) if numbers else arrival


def _row_numbers(record: Record, marks: Marks) -> list[Tensor]:
    found: list[Tensor] = []
    for weight in record.use.tracked:
        if id(weight) not in marks.parameters:
            found += path_of(weight, marks)[1]
    return found


def clipped_sums(
    tape: Tape, records: Sequence[Record], sizes: Sequence[int], layouts: Sequence[Layout], clipping: Clipping, names: list[str]
) -> Callable[..., list[Tensor]]:  # fmt: skip
    """The function of a graph: from what reached each tap (so many tensors), losses, a mask and 1/C² to the sums of `names`, which it fills in,
    the value of the loss, squared norms, the weights of the examples and which of them are finite."""
    row_numbers = [_row_numbers(record, tape.marks) for record in records]

    def function(*inputs: Tensor) -> list[Tensor]:
        *tensors, losses, real, inverse_square = inputs
        given = iter(tensors)
        traced = [(record, next(given), tuple(itertools.islice(given, size - 1))) for record, size in zip(records, sizes)]
        stand_ins = {
            id(numbers): stand_in
            for (_, _, kept), mine in zip(traced, row_numbers)
            for numbers, stand_in in zip(mine, kept[len(kept) - len(mine) :])
        }
        with tape.pause(), standing_in(stand_ins):
            found, squares = masked_sums(gradients_from(tape, traced, layouts, losses), tape, losses, clipping, real, inverse_square)
        names[:] = found.sums
        value = value_of(found.weights, found.finite, losses.to(accumulation_dtype(losses.dtype)))
        return [*found.sums.values(), value, squares, found.weights, found.finite]

    return function


@dataclass(frozen=True)
class Measured:
    """Clipped sums and the squared norms behind them, (parameters, B)."""

    clipped: Clipped
    squares: Tensor


Eagerly = Callable[[Sequence[Arrival], Tensor], Measured]


def eagerly(tape: Tape, layouts: Sequence[Layout], clipping: Clipping) -> Eagerly:
    """The computation that a graph stands for, as an eager step makes it."""

    def measured(arrivals: Sequence[Arrival], losses: Tensor) -> Measured:
        gradients = gradients_from(tape, arrivals, layouts, losses)
        squares = torch.stack(list(gradients.squares_on_host().values()))
        return Measured(from_factors(tape, losses, gradients, clipping), squares)

    return measured


def are_same(found: Measured, expected: Measured, precision: torch.dtype) -> bool:
    """Whether both are of the same examples, all of them finite, up to rounding: each sum and each norm, since in a step any of them may matter most."""
    return _are_same(found.clipped, expected.clipped, precision) and norms_agree(found.squares, expected.squares, precision)


def _are_same(found: Clipped, expected: Clipped, precision: torch.dtype) -> bool:
    weights = [(found.weights.cpu(), expected.weights.cpu())]
    pairs = [(total, expected.sums[name]) for name, total in found.sums.items() if name in expected.sums]
    return (
        len(pairs) == len(found.sums) == len(expected.sums)
        and bool(found.finite.all())
        and bool(expected.finite.all())
        and agree_each(weights, precision)
        and agree_each(pairs, precision)
    )
