"""Batches of a fixed size: draws vary, graphs do not.

A draw is cut into parts of at most `rows` rows; a part that is shorter is filled up with copies of its first row, and a mask
says which rows are real.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..declared import is_declared_constant
from ..plan import PrivacyPlan
from ..streams import current_address

_MULTIPLE = 8  # rows are padded to a multiple, which matrix units like


def default_rows(plan: PrivacyPlan) -> int:
    """As many as hold nearly every draw: B for draws of one size, else B + 2√B; a larger draw takes two replays."""
    if plan.sampler in ("fixed_size", "shuffle"):
        return plan.batch_size
    room = math.ceil(plan.batch_size + 2 * math.sqrt(plan.batch_size))
    room = to_multiple(room)
    return min(room, plan.max_batch_size or room, plan.dataset_size)


class Leaves:
    """The tensors and numbers of a batch, flat, and which of them have one row an example.

    A tensor counts as such if its first axis was as long as the draw in every step so far, unless it was declared constant.
    """

    def __init__(self) -> None:
        self._shared: set[tuple[str, int]] = set()  # (structure, place) of tensors that have no rows
        self._tuples: dict[int, tuple[Any, str]] = {}  # the structure of so many tensors side by side, and its name

    def flat(self, batch: Any, count: int) -> tuple[list[Any], Any, tuple[bool, ...]]:
        """(leaves, structure, which of them have rows)"""
        if all(type(leaf) is Tensor for leaf in batch):
            if len(batch) not in self._tuples:
                structure = pytree.tree_structure(batch)
                self._tuples[len(batch)] = structure, str(structure)
            leaves, structure = list(batch), self._tuples[len(batch)][0]
        else:
            leaves, structure = pytree.tree_flatten(batch)
        name = self.name_of(structure)
        return (
            [leaf.resolve_conj().resolve_neg() if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            structure,
            tuple([_may_have_rows(leaf, count) and (name, place) not in self._shared for place, leaf in enumerate(leaves)]),
        )

    def name_of(self, structure: Any) -> str:
        """By which structures are told apart."""
        known, name = self._tuples.get(structure.num_leaves, (None, ""))
        return name if known is structure else str(structure)

    def remember(self, structure: Any, has_rows: Sequence[bool]) -> None:
        """A step was made with such leaves."""
        if not all(has_rows):
            name = self.name_of(structure)
            self._shared |= {(name, place) for place, is_one in enumerate(has_rows) if not is_one}


def _may_have_rows(leaf: Any, count: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count and not is_declared_constant(leaf)


def made_up(leaves: Sequence[Any], has_rows: Sequence[bool], *, as_shares: bool = False) -> list[Any]:
    """The same shapes with numbers that nobody's record had a part in, where they are real numbers; integers (labels, tokens) stay, as copies.

    `as_shares`: between zero and one, for functions that take no others (probabilities, their logarithms).
    """
    dice = torch.Generator().manual_seed(0)
    found = [nobodys(leaf, dice) if is_one else leaf for leaf, is_one in zip(leaves, has_rows)]
    found = [leaf.sigmoid() if as_shares and is_one and leaf.is_floating_point() else leaf for leaf, is_one in zip(found, has_rows)]
    return [leaf.clone() if isinstance(leaf, Tensor) and not is_declared_constant(leaf) else leaf for leaf in found]


def nobodys(tensor: Tensor, dice: torch.Generator) -> Tensor:
    """As many numbers that nobody's record had a part in, laid out alike; integers stay."""
    return (
        torch.empty_like(tensor).copy_(torch.randn(tensor.shape, generator=dice, device=dice.device))
        if tensor.is_floating_point()
        else tensor
    )


def to_multiple(rows: int) -> int:
    return -(-rows // _MULTIPLE) * _MULTIPLE


def part_of(leaves: Sequence[Any], has_rows: Sequence[bool], start: int, stop: int, rows: int) -> list[Any]:
    """The rows start … stop-1 of every tensor that has rows, filled up with copies of the first of them, and laid out row by row."""
    return [
        _filled(leaf if stop - start == len(leaf) else leaf[start:stop], rows) if is_one else leaf for leaf, is_one in zip(leaves, has_rows)
    ]


def _filled(part: Tensor, rows: int) -> Tensor:
    strides = _row_by_row(part)
    if len(part) == rows and (strides is None or part.stride() == strides):
        return part
    out = part.new_empty_strided((rows, *part.shape[1:]), strides) if strides is not None else part.new_empty((rows, *part.shape[1:]))
    out[: len(part)] = part
    out[len(part) :] = part[:1]
    return out


def _row_by_row(part: Tensor) -> tuple[int, ...] | None:
    """Strides of the same tensor with one row behind the other, each laid out as it is here; None: it is contiguous. A compiled graph is for one layout, and
    a batch that is cut and filled up must not have several."""
    if part.is_contiguous():
        return None
    strides, step = [0] * part.dim(), 1
    for axis in sorted(range(1, part.dim()), key=lambda axis: (part.stride(axis), -axis)):
        strides[axis] = step
        step *= part.shape[axis]
    strides[0] = step
    return tuple(strides)


def mask(count: int, rows: int, device: torch.device) -> Tensor:
    """(rows,), true for the first `count`. Nobody writes to it."""
    return _mask(count, rows, device, current_address(device))


@lru_cache(maxsize=64)
def _mask(count: int, rows: int, device: torch.device, stream: int) -> Tensor:
    """For one stream: another might read it before it is there."""
    return torch.arange(rows, device=device) < count


@dataclass(slots=True)
class Batch:
    """What a step is given, flat and where the model is. Made in every step: nobody writes to it, but none of Python's time is spent on that."""

    leaves: list[Any]
    structure: Any
    has_rows: tuple[bool, ...]
    count: int
    rows: int  # of a part
    inputs: list[Tensor]  # those with one row an example, as they were given
    modules: list[nn.Module]  # of the model, as they are in this step
    serials: Hashable  # by which they are told from others
    _parts: list[tuple[list[Any], int]] | None = field(default=None, init=False)

    @property
    def arguments(self) -> Any:
        return pytree.tree_unflatten(self.leaves, self.structure)

    @property
    def parts(self) -> list[tuple[list[Any], int]]:
        """(leaves of `rows` rows, how many of these are real), one after the other."""
        if self._parts is None:
            bounds = [(start, min(start + self.rows, self.count)) for start in range(0, self.count, self.rows)]
            self._parts = [(part_of(self.leaves, self.has_rows, start, stop, self.rows), stop - start) for start, stop in bounds]
        return self._parts

    def cut(self) -> Iterator[Batch]:
        """Batches of up to `rows` rows, as they are; this one, where something in it may hold examples otherwise than row by row.

        They are of two sizes at least, the odd one first: if each has as many losses as rows, it is the examples that were cut apart, and no other axis.
        """
        tensors = [
            is_one
            for leaf, is_one in zip(self.leaves, self.has_rows)
            if isinstance(leaf, Tensor) and leaf.dim() and not is_declared_constant(leaf)
        ]
        rows = max(self.rows, 2)  # of a single one nothing is learned
        if self.count <= rows or not tensors or not all(tensors):
            yield self
            return
        odd = self.count % rows
        first = odd if odd > 1 else max(rows - 2, 1)
        start, stop = 0, first + (2 * first == self.count)
        while start < self.count:
            yield replace(self, leaves=part_of(self.leaves, self.has_rows, start, stop, stop - start), count=stop - start)
            start, stop = stop, min(stop + rows, self.count)

    @property
    def whole_mask(self) -> Tensor:
        """Of a part of which every row is real."""
        return mask(self.rows, self.rows, self.leaves[self.has_rows.index(True)].device)
