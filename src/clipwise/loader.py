"""A DataLoader whose batches are drawn as the plan says, and a queue of draws that the losses are held against."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from .batches import without_rows
from .errors import BadPlan, WrongDraw
from .plan import PrivacyPlan
from .sampling import Sampler

_OURS = {
    "batch_size": "the plan says how many records are drawn",
    "shuffle": "the plan says how records are drawn",
    "sampler": "the plan says how records are drawn",
    "batch_sampler": "the plan says how records are drawn",
    "drop_last": "every draw counts",
}


@dataclass(frozen=True)
class Draw:
    """The records of one step."""

    size: int  # how many were drawn
    rows: int  # how many arrive: one placeholder for an empty draw, unless zero rows were asked for


class Draws:
    """Draws that were made and not yet used for a step, oldest first. All loaders of a training share it."""

    def __init__(self, plan: PrivacyPlan, sampler: Sampler, position: Callable[[], int], left: Callable[[], int]):
        self.plan = plan
        self._sampler = sampler
        self._position = position  # how far the training is
        self._left = left  # steps that the budget still allows
        self._waiting: deque[Draw] = deque()

    @property
    def current(self) -> Draw | None:
        """The draw that the next step consumes."""
        return self._waiting[0] if self._waiting else None

    def consume(self) -> None:
        """The step for the current draw was taken, or the draw is given up."""
        if self._waiting:
            self._waiting.popleft()

    @property
    def is_placeholder(self) -> bool:
        """Whether the row at hand stands for an empty draw."""
        return self.current is not None and self.current.size == 0

    def check_room(self, entries: int, more: int) -> None:
        """Losses must be those of the draw that is due: `more` beside the `entries` that were handed in."""
        if self.current is None:
            raise WrongDraw(
                "these losses belong to no draw of private.loader.",
                "Iterate over private.loader(dataset), one step for each of its batches; or state with own_batches=True that you draw them as "
                "the plan says.",
            )
        if entries + more > self.current.rows:
            raise WrongDraw(
                f"{entries + more} losses for a draw of {self.current.rows} rows.",
                "Each row of a draw has one loss, and a step takes one draw, in their order. After an exception: private.discard().",
            )

    def check_complete(self, entries: int) -> None:
        rows = self.current.rows if self.current is not None else 0
        if self.current is None or entries != rows:
            raise WrongDraw(
                f"step() after {entries} of the {rows} rows of its draw.", "Send every row of the draw through private.loss, once."
            )

    def steps_to_come(self) -> int:
        """Until the end of the present epoch. Epochs end at ceil(k·N/B), so that all of them together have the plan's steps."""
        position, size, batch = self._position(), self.plan.dataset_size, self.plan.batch_size
        if self.plan.sampler == "shuffle":
            in_a_pass = self.plan.mechanism.steps_in_a_pass
            end = (position // in_a_pass + 1) * in_a_pass
        else:
            end = -(-(position * batch // size + 1) * size // batch)
        return max(0, min(end - position, self._left()))

    def epoch(self, placeholder: bool) -> Iterator[list[int]]:
        """The records of every step until the end of the epoch. Draws of an earlier iteration that nobody used are void."""
        self._waiting.clear()
        first, count = self._position(), self.steps_to_come()
        if not count:
            warnings.warn(f"the budget of {self.plan.steps} steps is spent: this loader yields nothing", stacklevel=3)
        for step in range(first, first + count):
            records = self._sampler.draw(step)
            self._waiting.append(Draw(len(records), len(records) if records else int(placeholder)))
            yield records or [0] * int(placeholder)


class CallersDraws:
    """Batches that the caller draws, on their word: nothing to hold losses against."""

    is_placeholder = False

    def consume(self) -> None:
        pass

    def check_room(self, entries: int, more: int) -> None:
        pass

    def check_complete(self, entries: int) -> None:
        pass


class _BatchSampler:
    """What DataLoader asks for the records of each batch."""

    def __init__(self, draws: Draws, placeholder: bool):
        self._draws = draws
        self._placeholder = placeholder

    def __iter__(self) -> Iterator[list[int]]:
        return self._draws.epoch(self._placeholder)

    def __len__(self) -> int:
        return self._draws.steps_to_come()


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
    return DataLoader(dataset, batch_sampler=_BatchSampler(draws, placeholder), **options)
