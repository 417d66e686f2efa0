"""A DataLoader whose batches are drawn as the plan says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .batches import without_rows
from .draws import Draw, Draws
from .errors import BadPlan

_OURS = {
    "batch_size": "the plan says how many records are drawn",
    "shuffle": "the plan says how records are drawn",
    "sampler": "the plan says how records are drawn",
    "batch_sampler": "the plan says how records are drawn",
    "drop_last": "every draw counts",
}


class _BatchSampler:
    """What DataLoader asks for the records of each batch."""

    def __init__(self, draws: Draws, placeholder: bool):
        self._draws = draws
        self._placeholder = placeholder
        self.made: deque[Draw] = deque()  # of the loop that begins

    def __iter__(self) -> Iterator[list[int]]:
        return self._draws.epoch(self._placeholder, self.made)

    def __len__(self) -> int:
        return self._draws.steps_to_come()


class PrivateLoader(DataLoader[Any]):
    """A DataLoader that says which draw it hands out."""

    draws: Draws

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        sampler = self.batch_sampler
        assert isinstance(sampler, _BatchSampler)
        made = sampler.made = deque()
        self.draws.begin(made)
        for batch in super().__iter__():
            self.draws.arrives(made, batch)
            yield batch


class _CollateNone:
    """A collate function that knows what a batch of nothing looks like."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]):
        self._dataset = dataset
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        return self._collate(items) if items else without_rows(self._collate([self._dataset[0]]))


def private_loader(draws: Draws, dataset: Any, placeholder: bool, options: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader over one epoch of draws. options: whatever else DataLoader takes."""
    for name, why in _OURS.items():
        if name in options:
            raise TypeError(f"private.loader takes no {name}: {why}")
    if options.get("in_order") is False:
        raise TypeError("private.loader needs in_order=True: losses are held against the draws in the order of the draws")
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"private.loader draws records by number: it needs a map-style data set with a length, got {type(dataset).__name__}"
        )
    if isinstance(dataset, Tensor) and dataset.dim() == 0:
        raise TypeError("private.loader needs a data set, got a tensor without axes")
    if len(dataset) != draws.plan.dataset_size:
        raise BadPlan(
            f"the data set has {len(dataset)} records, the plan says {draws.plan.dataset_size}.",
            "The sampling rate, and so ε, rests on that number: make a plan for this data set.",
        )
    if not placeholder:
        options["collate_fn"] = _CollateNone(dataset, options.get("collate_fn") or default_collate)
    loader = PrivateLoader(dataset, batch_sampler=_BatchSampler(draws, placeholder), **options)
    loader.draws = draws
    return loader
