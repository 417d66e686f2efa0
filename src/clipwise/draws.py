"""Draws that were handed out, and that losses are held against: one step takes one draw, in their order, once."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import WrongDraw
from .footprints import storages
from .sampling import Sampler
from .structure import every_tensor

if TYPE_CHECKING:
    from .progress import Progress


@dataclass
class Draw:
    """The records of one step."""

    step: int  # for which it was made
    size: int  # how many were drawn
    rows: int  # how many arrive: one placeholder for an empty draw, unless zero rows were asked for
    storages: list[StorageWeakRef] = field(default_factory=list)  # memory of the batch that was handed out


class Draws:
    """Draws that were handed out and not yet used for a step, oldest first. All loaders of a training share it."""

    def __init__(self, sampler: Sampler, progress: Progress):
        self.plan = sampler.plan
        self._sampler = sampler
        self._progress = progress
        self._waiting: deque[Draw] = deque()
        self._running: deque[Draw] | None = None  # draws of the loop that is running, made ahead of it

    @property
    def current(self) -> Draw | None:
        """The draw that the next step consumes."""
        return self._waiting[0] if self._waiting else None

    def consume(self) -> Draw | None:
        """The step for the current draw was taken, or the draw is given up."""
        return self._waiting.popleft() if self._waiting else None

    def begin(self, made: deque[Draw]) -> None:
        """A loop begins. Draws of an earlier one that nobody used are void, and that loop may not go on."""
        while self._waiting:
            self._progress.move_past(self._waiting.popleft())
        self._running = made

    def arrives(self, made: deque[Draw], batch: Any) -> None:
        """A batch is handed out. `made`: the draws of its loop."""
        if made is not self._running:
            raise WrongDraw(
                "an older loop over private.loader goes on while a newer one runs.", "One loop at a time: records must not be drawn twice."
            )
        draw = made.popleft()
        draw.storages = storages(every_tensor(batch))
        self._waiting.append(draw)

    def steps_to_come(self) -> int:
        """Until the end of the present epoch. Epochs end at ceil(k·N/B), so that all of them together have the plan's steps."""
        position, size, batch = self._progress.position, self.plan.dataset_size, self.plan.batch_size
        if self.plan.sampler == "shuffle":
            in_a_pass = self.plan.mechanism.steps_in_a_pass
            end = (position // in_a_pass + 1) * in_a_pass
        else:
            end = -(-(position * batch // size + 1) * size // batch)
        return max(0, min(end - position, self._progress.left))

    def epoch(self, placeholder: bool, made: deque[Draw]) -> Iterator[list[int]]:
        """The records of every step until the end of the epoch; each draw is noted in `made`, ahead of its arrival."""
        first, count = self._progress.position, self.steps_to_come()
        if not count:
            warnings.warn(f"the budget of {self.plan.steps} steps is spent: this loader yields nothing", stacklevel=3)
        for step in range(first, first + count):
            records = self._sampler.draw(step)
            made.append(Draw(step, len(records), len(records) if records else int(placeholder)))
            yield records or [0] * int(placeholder)

    @property
    def is_placeholder(self) -> bool:
        """Whether the row at hand stands for an empty draw."""
        return self.current is not None and self.current.size == 0

    def check_memory(self, tensors: Iterable[Tensor]) -> None:
        """Losses of these must not come from a batch whose turn it is not."""
        later_ones = list(self._waiting)[1:]
        theirs = set(storages(tensors)) if later_ones else set()
        for later in later_ones:
            if not theirs.isdisjoint(later.storages):
                raise WrongDraw(
                    "these losses come from a batch that was handed out after one that no step was taken for.",
                    "A step for every batch, in their order; private.discard(draw=True) gives one up.",
                )

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
                "Each row of a draw has one loss, and a step takes one draw, in their order. After an exception: private.discard(), or with draw=True "
                "to go on with the next draw.",
            )

    def check_complete(self, entries: int) -> None:
        rows = self.current.rows if self.current is not None else 0
        if self.current is None or entries != rows:
            raise WrongDraw(
                f"step() after {entries} of the {rows} rows of its draw.",
                'Send every row of the draw through private.loss, once, with one loss an example (reduction="none"); a compiled step takes the whole draw '
                "(private.compile(…, rows=n) computes n rows at a time). To give a draw up: private.discard(draw=True).",
            )


class CallersDraws:
    """Batches that the caller draws, on their word: nothing to hold losses against."""

    current = None
    is_placeholder = False

    def consume(self) -> None:
        return None

    def check_memory(self, tensors: Iterable[Tensor]) -> None:
        pass

    def check_room(self, entries: int, more: int) -> None:
        pass

    def check_complete(self, entries: int) -> None:
        pass
