"""How tensors outside the taps are read as rows of examples: model inputs, outputs, targets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .declared import declared_owners, is_declared_constant
from .layout import EvenGrouping, Layout, Table
from .structure import holds_numbers_only, is_array, map_tensors


def _permutation(owners: Tensor) -> Tensor | None:
    """The owners of as many rows as there are examples, each example's row once; None if some have several and others none that is known.

    Rows that nobody was seen to own go to the examples that are left, in place where that is possible. A reading that said nothing of
    most examples would hold whatever the model does with them.
    """
    known = owners[owners >= 0]
    if len(known.unique()) < len(known):
        return owners if len(known) == len(owners) else None
    left = set(range(len(owners))) - set(known.tolist())
    found = owners.clone()
    for row in torch.nonzero(owners < 0)[:, 0].tolist():
        if row in left:
            found[row] = row
            left.remove(row)
    for row in torch.nonzero(found < 0)[:, 0].tolist():
        found[row] = left.pop()
    return found


@dataclass(frozen=True)
class Reading:
    """Who owns the rows of an axis of a given length. The taps say it for lengths other than the batch's.

    `swapped` reads axis 1 before axis 0, for tensors where both are as long as the batch. `squares_shared` takes matrices
    with the batch's length on both axes for something shared, such as a mask. `tables` are owners of axes of other lengths;
    `reordered`, if set, of an axis as long as the batch.
    """

    batch: int
    tables: dict[int, Tensor] = field(default_factory=dict)
    reordered: Tensor | None = None
    swapped: bool = False
    squares_shared: bool = False
    fixed: frozenset[int] = frozenset()  # ids of tensors that number rows and are no rows themselves
    indices_fixed: bool = False  # integers are indices, which a run with other rows must leave alone
    outputs_in_order: bool = False  # `reordered` speaks of inputs only
    not_rows: frozenset[tuple[int, int]] = frozenset()  # (id of a tensor, axis) whose length does not follow the batch's
    shared_words: frozenset[int] = frozenset()  # lengths of lists of words or numbers that do not follow the batch's
    numbers_too: bool = False  # there are no tensors, so that a list of numbers has one for each example, and is no order of theirs
    lists_first: bool = False  # a list of as many tensors as there are examples has one for each, whatever their lengths

    @classmethod
    def from_taps(cls, batch: int, placements: Iterable[tuple[Layout | Table, int]]) -> Reading:
        """placements: where the examples lie at each tap, and the number of rows there, from the losses downwards."""
        tables = {}
        for placement, rows in placements:
            if isinstance(placement, Table):
                tables[rows] = placement.table.cpu()
            elif rows != batch:
                tables[rows] = EvenGrouping(rows, batch, placement.order).owners()
        others = {size: owners for size, owners in tables.items() if size != batch}
        return cls(batch, others, _permutation(tables[batch]) if batch in tables else None)

    def with_declared(self, tensors: Iterable[Tensor]) -> Reading:
        """The caller's word goes before what the taps say."""
        declared = {len(tensor): found for tensor in tensors if (found := declared_owners(tensor)) is not None}
        for size, owners in declared.items():
            if bool((owners >= self.batch).any()):
                raise ValueError(
                    f"clipwise.owners names example {int(owners.max())} for one of {size} rows, but there are {self.batch} losses"
                )
        others = {size: owners for size, owners in declared.items() if size != self.batch}
        return replace(self, tables={**self.tables, **others}, reordered=declared.get(self.batch, self.reordered)) if declared else self

    def owners(self, size: int) -> Tensor | None:
        """(size,): the example of each row, -1 for none; None if an axis of this length holds no examples."""
        if size == self.batch:
            return torch.arange(size) if self.reordered is None else self.reordered
        return self.tables.get(size)

    def choices(self, tensors: Sequence[Tensor], values: Any = ()) -> list[Reading]:
        """Ways to read these inputs, the likeliest first: one row an example in order; then what lengths may mean by chance.

        `values`: what they lie in.
        """
        tensors = [tensor for tensor in tensors if id(tensor) not in self.fixed and not is_declared_constant(tensor)]
        exact = any(
            tensor.shape[axis] == self.batch and (id(tensor), axis) not in self.not_rows for tensor in tensors for axis in _two(tensor)
        )
        straight = replace(self, reordered=None, tables={} if exact else self.tables)
        found = [straight]
        if any(tensor.dim() > 1 and tensor.shape[0] == tensor.shape[1] == self.batch for tensor in tensors):
            found += [replace(straight, swapped=True), replace(straight, squares_shared=True)]
        if exact and any(tensor.dim() and tensor.shape[0] in self.tables for tensor in tensors):
            found.append(replace(straight, tables=self.tables))
        if self.reordered is not None:
            found += [replace(straight, reordered=self.reordered, outputs_in_order=in_order) for in_order in (False, True)]
        ragged = [reading for reading in found if any(reading.has_several(tensor) for tensor in tensors if tensor.is_floating_point())]
        if any(not tensor.is_floating_point() for tensor in tensors):
            found += [replace(reading, indices_fixed=True) for reading in ragged]
        by_lists = replace(straight, lists_first=True)
        return [*found, by_lists] if by_lists.has_lists(values) and not straight.has_lists(values) else found

    def has_rows(self, values: Any) -> bool:
        """Whether there is anything to exchange in these inputs. A test in which nothing was exchanged has shown nothing."""
        return self._finds(
            values, lambda value: self.axis(value) is not None if isinstance(value, Tensor) else self.is_list_of_examples(value)
        )

    def has_lists(self, values: Any) -> bool:
        return self._finds(values, self.is_list_of_examples)

    def _finds(self, values: Any, is_one: Callable[[Any], bool]) -> bool:
        found = False

        def look(value: Any) -> Any:
            nonlocal found
            found = found or is_one(value)
            return value

        map_tensors(values, look)
        return found

    def is_ragged(self, tensor: Tensor) -> bool:
        """Whether rows of `tensor` are told by a table, not one for each example in order."""
        return self.has_several(tensor) or (self.reordered is not None and self.axis(tensor) is not None)

    def has_several(self, tensor: Tensor) -> bool:
        """Whether examples have more or fewer rows of `tensor` than one, so that integers beside it may say which are whose."""
        axis = self.axis(tensor)
        return axis is not None and tensor.shape[axis] != self.batch

    def of_outputs(self) -> Reading:
        return replace(self, reordered=None) if self.outputs_in_order else self

    def axis(self, tensor: Tensor) -> int | None:
        """The axis of `tensor` that holds examples: the first or the second."""
        if id(tensor) in self.fixed or is_declared_constant(tensor) or (self.indices_fixed and not tensor.is_floating_point()):
            return None
        if self.squares_shared and tensor.shape == (self.batch, self.batch):
            return None
        for axis in (1, 0) if self.swapped else (0, 1):
            if axis < tensor.dim() and (id(tensor), axis) not in self.not_rows and self.owners(tensor.shape[axis]) is not None:
                return axis
        return None

    def is_list_of_examples(self, value: Any) -> bool:
        """A list with an entry an example, whose entries hold no batch themselves."""
        if not isinstance(value, list | tuple) or len(value) != self.batch or self.batch < 2:
            return False
        if all(isinstance(item, Tensor) for item in value):
            if self.lists_first and isinstance(value, list):
                return len({len(item) if item.dim() else 0 for item in value}) > 1
            return all(self.axis(item) is None for item in value)
        if len(value) in self.shared_words:
            return False
        return is_list_of_words(value) or (self.numbers_too and isinstance(value, list) and holds_numbers_only(value))

    def select(self, value: Any, examples: Sequence[int]) -> Any:
        """The rows of these examples."""
        if isinstance(value, Tensor):
            if id(value) in self.fixed:
                return value
            axis = self.axis(value)
            return value.detach().clone() if axis is None else value.detach().index_select(axis, self.rows_of(value, axis, examples))
        return type(value)(own(value[i]) for i in examples) if self.is_list_of_examples(value) else value

    def other_order(self) -> Tensor:
        """(B,): another order of the examples, in which none of several is where it was."""
        start = random.SystemRandom().randint(1, max(1, self.batch - 1))
        return torch.arange(self.batch).roll(start)

    def in_order(self, value: Any, order: Tensor) -> Any:
        """The examples in another order, where there is one row for each."""
        if not isinstance(value, Tensor):
            return type(value)(own(value[i]) for i in order.tolist()) if self.is_list_of_examples(value) else value
        axis = self.axis(value)
        if axis is None or value.shape[axis] != self.batch:
            return value
        return value.detach().index_select(axis, order.to(value.device))

    def rows_of(self, tensor: Tensor, axis: int, examples: Sequence[int]) -> Tensor:
        owners = self.owners(tensor.shape[axis])
        assert owners is not None
        if len(examples) == self.batch:
            return torch.arange(len(owners), device=tensor.device)
        return torch.nonzero(torch.isin(owners, torch.tensor(examples)))[:, 0].to(tensor.device)

    def among(self, examples: Sequence[int], sizes: Iterable[int]) -> Reading:
        """The reading of what `select` leaves, with examples numbered anew. sizes: lengths of axes before."""
        if len(examples) == self.batch:
            return self
        number = torch.full((self.batch + 1,), -1)
        number[torch.tensor(examples)] = torch.arange(len(examples))
        tables, reordered = {}, None
        for size in sizes:
            owners = self.owners(size)
            if owners is not None:
                kept = number[owners[torch.isin(owners, torch.tensor(examples))]]
                if len(kept) == len(examples):
                    reordered = None if torch.equal(kept, torch.arange(len(kept))) else kept
                else:
                    tables[len(kept)] = kept
        return replace(self, batch=len(examples), tables=tables, reordered=reordered)


def is_list_of_words(value: Any) -> bool:
    """Something that may have an entry for each example, and no tensor."""
    return isinstance(value, list | tuple) and all(map(_is_one_thing, value))


def _is_one_thing(item: Any) -> bool:
    """What may stand for an example without being a tensor: words, an array, a list of numbers."""
    return isinstance(item, str | bytes) or is_array(item) or (isinstance(item, list) and bool(item) and holds_numbers_only(item))


def own(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, Tensor) else item


def _two(tensor: Tensor) -> range:
    """The axes along which examples may lie."""
    return range(min(2, tensor.dim()))
