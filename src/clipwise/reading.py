"""How tensors outside the taps are read as rows of examples: model inputs, outputs, targets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .declared import declared_owners, is_declared_constant
from .layout import EvenGrouping, Layout, Table
from .numerics import accumulation_dtype, unit_roundoff


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

    def choices(self, tensors: Sequence[Tensor]) -> list[Reading]:
        """Ways to read these inputs, the likeliest first: one row an example in order; then what lengths may mean by chance."""
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
        ragged = [reading for reading in found if any(reading.is_ragged(tensor) for tensor in tensors if tensor.is_floating_point())]
        if any(not tensor.is_floating_point() for tensor in tensors):
            found += [replace(reading, indices_fixed=True) for reading in ragged]
        return found

    def is_ragged(self, tensor: Tensor) -> bool:
        """Whether rows of `tensor` are told by a table, not one for each example in order."""
        axis = self.axis(tensor)
        return axis is not None and (self.reordered is not None or tensor.shape[axis] != self.batch)

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
        return (
            isinstance(value, list | tuple)
            and len(value) == self.batch > 1
            and all(isinstance(item, Tensor) and self.axis(item) is None for item in value)
        )

    def select(self, value: Any, examples: Sequence[int]) -> Any:
        """The rows of these examples."""
        if isinstance(value, Tensor):
            if id(value) in self.fixed:
                return value
            axis = self.axis(value)
            return value.detach().clone() if axis is None else value.detach().index_select(axis, self.rows_of(value, axis, examples))
        return type(value)(value[i].detach().clone() for i in examples) if self.is_list_of_examples(value) else value

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


def _two(tensor: Tensor) -> range:
    """The axes along which examples may lie."""
    return range(min(2, tensor.dim()))


@dataclass(frozen=True)
class Exchange:
    """Other examples' rows replaced: by copies of the examples that are kept, or by rows that no record has.

    It takes the tensors of the whole batch and leaves the examples `few`. `outputs` reads what comes out for those.
    """

    reading: Reading
    kept: frozenset[int]
    strange: bool
    few: Sequence[int]
    outputs: Reading

    @classmethod
    def draw(cls, reading: Reading, strange: bool, trials: int, few: Sequence[int], outputs: Reading) -> Iterator[Exchange]:
        """Exchanges of a random half, and next of the other half, so that no example stays in every one of them."""
        kept: frozenset[int] = frozenset()
        for trial in range(trials):
            others = frozenset(few) - kept
            kept = others if trial % 2 and others else frozenset(random.Random().sample(list(few), (len(few) + 1) // 2))
            yield cls(reading, kept, strange, few, outputs)

    def kept_rows(self, size: int) -> Tensor:
        """Rows of an output that belong to the examples that are kept."""
        owners = self.outputs.owners(size)
        assert owners is not None
        whole = len(self.few) == self.reading.batch
        return torch.nonzero(_among(owners, [i if whole else self.few.index(i) for i in sorted(self.kept)]))[:, 0]

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return self._list(value) if self.reading.is_list_of_examples(value) else value
        axis = self.reading.axis(value)
        if axis is None:
            return self.reading.select(value, self.few)
        owners = self.reading.owners(value.shape[axis])
        assert owners is not None
        is_kept = _among(owners, sorted(self.kept))
        kept, others = (torch.nonzero(mask)[:, 0] for mask in (is_kept, _among(owners, self.few) & ~is_kept))  # a row of nobody stays
        if not len(others) or not len(kept):
            return self.reading.select(value, self.few)
        if torch.equal(owners, torch.arange(len(owners))) and not self.strange:
            dice = random.Random()
            copies = torch.tensor([dice.choice(kept.tolist()) for _ in others], device=value.device)
            new = value.detach().index_select(axis, copies)
        else:  # a record's group may be among the inputs, so records do not change hands between examples that stay and others
            new = made_up(value.detach().index_select(axis, others.to(value.device)), axis)
        changed = value.detach().index_copy(axis, others.to(value.device), new)
        return changed.index_select(axis, self.reading.rows_of(value, axis, self.few))

    def _list(self, value: Any) -> Any:
        return type(value)(value[i].detach().clone() if i in self.kept else made_up(value[i].detach()) for i in self.few)


def _among(owners: Tensor, examples: Sequence[int]) -> Tensor:
    return torch.isin(owners, torch.tensor(list(examples), dtype=torch.long))


def made_up(rows: Tensor, axis: int = 0) -> Tensor:
    """Rows no record has: numbers shuffled, and some four to a hundred times as large, of either sign.

    Integers change rows but not their place in them, where there are several: each place may number categories of its own. rows: along `axis`
    """
    dice = torch.Generator().manual_seed(random.SystemRandom().getrandbits(63))
    if not rows.is_floating_point() and rows.dim() and rows.shape[axis] > 1:
        return rows.gather(axis, torch.rand(rows.shape, generator=dice).argsort(axis).to(rows.device))
    shuffled = rows.flatten()[torch.randperm(rows.numel(), generator=dice).to(rows.device)].view(rows.shape)
    if not rows.is_floating_point():
        return shuffled
    reach = 4.0 ** random.SystemRandom().uniform(1, 3.5)
    return shuffled * (reach * (2 * torch.rand(rows.shape, generator=dice) - 1)).to(shuffled)


def shaken(autocast: Mapping[str, torch.dtype]) -> Callable[[Any], Any]:
    """Moves every number by about one rounding, the coarsest at hand. autocast: device type → precision, where it was on."""

    def shake(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        amount = max(unit_roundoff(value.dtype), unit_roundoff(autocast.get(value.device.type, value.dtype)))
        wide = value.detach().to(accumulation_dtype(value.dtype))
        dice = torch.Generator().manual_seed(random.SystemRandom().getrandbits(63))
        moved = 2 * torch.rand(value.shape, generator=dice).to(wide) - 1
        return (wide * (1 + 2 * amount * moved)).to(value.dtype)

    return shake
