"""Other rows in the place of some examples': copies of the others, rows that no record has, or the same ones moved by a rounding."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .numerics import accumulation_dtype, unit_roundoff
from .reading import Reading, own


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
        if not self.strange and (torch.equal(owners, torch.arange(len(owners))) or _goes_by_more_than_numbers(value, owners)):
            dice = random.Random()
            copies = torch.tensor([dice.choice(kept.tolist()) for _ in others], device=value.device)
            new = value.detach().index_select(axis, copies)
        else:  # a record's group may be among the inputs, so records do not change hands between examples that stay and others
            new = made_up(value.detach().index_select(axis, others.to(value.device)), axis)
        changed = value.detach().index_copy(axis, others.to(value.device), new)
        return changed.index_select(axis, self.reading.rows_of(value, axis, self.few))

    def _list(self, value: Any) -> Any:
        copies = random.Random().choices(sorted(self.kept), k=len(value))  # of what nothing can be made up
        other = lambda i: made_up(value[i].detach()) if isinstance(value[i], Tensor) else value[copies[i]]
        return type(value)(own(value[i]) if i in self.kept else other(i) for i in self.few)


def _goes_by_more_than_numbers(value: Tensor, owners: Tensor) -> bool:
    """Whether these integers, one for each example in some order, are neither the examples' numbers nor that order. Shuffled among the others (lengths, by
    which rows were sorted) they would leave every rank as it was."""
    order = owners.argsort()
    if value.is_floating_point() or value.dim() != 1 or not torch.equal(owners[order], torch.arange(len(owners))):
        return False
    return not any(torch.equal(value.cpu(), numbers) for numbers in (owners, order))


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
