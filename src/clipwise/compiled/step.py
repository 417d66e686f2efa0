"""private.compile: one call for a whole step. Same numbers, refusals and ledger as the eager loop; a graph does the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..adaptive import Adaptive
from ..clipping import Clipping
from ..errors import Refusal, WrongDraw, not_copied
from ..structure import every_tensor
from ..tracing import told_to_be_compiled
from .rows import Batch, default_rows
from .sums import GraphSums
from .trace import Losses
from .update import RecordedUpdate

if TYPE_CHECKING:
    from ..intake import Intake
    from ..training import PrivateTraining
    from ..updates import Updates


class CompiledStep:
    """step(*batch) makes the whole step for one draw: losses, clipping, noise, ledger, optimizer, zero_grad.

    Eager steps come first, and again on steps 4, 8, 16 …: they verify the model, and the graph is looked at again. In between the
    clipped sums come from the graph, and go the way of all clipped sums: held against the draw, counted, noised, released.
    """

    def __init__(
        self, training: PrivateTraining, intake: Intake, updates: Updates, losses_of: Losses, *, rows: int | None, backend: str
    ):  # fmt: skip
        self._training = training
        self._intake = intake
        self._updates = updates
        self._losses_of = losses_of
        rows = default_rows(training.plan) if rows is None else rows
        self._is_cut = True  # batches that are larger than a graph's
        self._recorded = [RecordedUpdate(number, updates) for number in range(len(updates.optimizers))]
        self.graphs = GraphSums(training.model, losses_of, self._clipping, rows=rows, backend=backend, fallback=intake.block.fallback)

    __deepcopy__ = not_copied

    def __call__(self, *given: Any, **named: Any) -> None:
        if named:
            raise TypeError(
                f"step() takes what the loader yields, in its order, step(*batch), or a dict as it is, step(batch); got {', '.join(named)} by name"
            )
        self._training.check_open()
        if self._intake.pending.handed:  # it lies in tensors that a replay writes over, and belongs to another draw
            raise WrongDraw(
                "what was clipped before this step has not been released: the step before it failed, or private.loss was called.",
                "private.discard() forgets it; a compiled step takes a whole draw.",
            )
        self._intake.block.close()  # what ran before this step has nothing to do with it
        rows_due = self._intake.rows_due(list(every_tensor(given)))
        batch = self.graphs.batch(given, rows_due, may_be_refilled=self._training.own_batches)
        self.graphs.clipping = clipping = self._clipping
        with self._intake.block.asleep():
            variant = None if self._intake.draws.is_placeholder else self.graphs.due(batch)
        if variant is None:
            self._eager_step(batch)
        else:
            bound = self._training.clipping.sensitivity / clipping.sensitivity
            self._intake.hand_in(self.graphs.clipped(variant, batch, bound), variant.parameters, batch.inputs)
        for number, (optimizer, update) in enumerate(zip(self._updates.optimizers, self._recorded)):
            recorded = None
            if variant is not None and not self._training.has_regularizers:
                recorded = update.ready(self._intake.pending.sums, update.numbers())
            if variant is not None and recorded is not None:
                self._training.take_step(number, recorded.release, variant.trainable)
            else:
                optimizer.step()
                optimizer.zero_grad()
        self.graphs.remember(batch)

    @property
    def _clipping(self) -> Clipping:
        """What the graph clips by. A bound that moves is an input of the graph, which then clips to one."""
        planned = self._training.plan.clipping
        return planned.at(1.0) if isinstance(planned, Adaptive) else self._training.clipping

    def _eager_step(self, batch: Batch) -> None:
        """In parts no larger than a graph's: that is how much memory there is, and these are the sizes that are verified.

        Whole, where a part has other losses than one a row: what was cut then are no examples, and each of them would count once for every part.
        """
        if not (self._is_cut and self._handed_in_parts(batch)):
            self._hand_in(batch)
            self._is_cut = False

    def _handed_in_parts(self, batch: Batch) -> bool:
        for number, part in enumerate(batch.cut()):
            if not self._hand_in(part, is_whole=part is batch, is_first=not number):
                if number:
                    self._is_cut = False
                    raise WrongDraw(
                        f"the parts of a batch of {batch.count} rows have other losses than one a row: its first axis does not hold the examples.",
                        f"private.discard(), and give it again: it is computed whole from now on. Or private.compile(…, rows={batch.count}).",
                    )
                return False
        return True

    def _hand_in(self, part: Batch, *, is_whole: bool = True, is_first: bool = True) -> bool:
        """Whether there was a loss for each row; a part that is not the whole batch is handed in only then."""
        self._intake.block.begin()  # the graph is traced from here on too
        try:
            with told_to_be_compiled():
                try:
                    losses = self._losses_of(self._training.model, *part.arguments)
                except Exception as error:  # it may be for whole batches only
                    if is_whole or not is_first or isinstance(error, Refusal):
                        raise
                    return False
                if not is_whole and isinstance(losses, Tensor) and losses.shape != (part.count,):
                    return False
                private_loss = self._training.loss(losses)
            private_loss.backward()
        finally:
            self._intake.block.close()  # also if something was refused: no tape stays on
        if len(losses) != part.count:
            self.graphs.give_up(f"{len(losses)} losses for a batch whose first tensor has {part.count} rows.")
        return True
