"""private.compile: one call for a whole step. Same numbers, refusals and ledger as the eager loop; a graph does the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..adaptive import Adaptive
from ..structure import every_tensor
from .rows import default_rows
from .sums import Batch, GraphSums
from .trace import Losses
from .variant import Variant

if TYPE_CHECKING:
    from ..intake import Intake
    from ..training import PrivateTraining
    from ..updates import Updates


class CompiledStep:
    """step(*batch) makes the whole step for one draw: losses, clipping, noise, ledger, optimizer, zero_grad.

    Eager steps come first, and again on steps 4, 8, 16 …: they verify the model, and the graph is compared with them. In between the
    clipped sums come from the graph, and go the way of all clipped sums: held against the draw, counted, noised, released.
    """

    def __init__(
        self, training: PrivateTraining, intake: Intake, updates: Updates, losses_of: Losses, *, rows: int | None, backend: str
    ):  # fmt: skip
        self._training = training
        self._intake = intake
        self._updates = updates
        self._losses_of = losses_of
        clipping = training.plan.clipping
        self._moves = isinstance(clipping, Adaptive)  # a bound that moves is an input of the graph, which then clips to one
        rows = default_rows(training.plan) if rows is None else rows
        self.graphs = GraphSums(
            training.model, losses_of, clipping.at(1.0) if isinstance(clipping, Adaptive) else clipping, rows=rows, backend=backend
        )

    def __call__(self, *given: Any) -> None:
        self._training.check_open()
        batch = self.graphs.batch(given, self._intake.rows_due(list(every_tensor(given))))
        if self._intake.draws.is_placeholder:
            self._eager_step(batch, None)
        else:
            self._step(batch)
        for optimizer in self._updates.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _step(self, batch: Batch) -> None:
        with self._intake.block.asleep():
            variant, by_graph = self.graphs.due(batch)
        if variant is None or not by_graph:
            self._eager_step(batch, variant)
        else:
            clipped = self.graphs.clipped(variant, batch, self._bound)
            parameters = self._updates.by_name()
            self._intake.hand_in(clipped, [parameters[name] for name in variant.names], batch.inputs)

    @property
    def _bound(self) -> float:
        return self._training.clipping.sensitivity if self._moves else 1.0

    def _eager_step(self, batch: Batch, variant: Variant | None) -> None:
        """By the tape; the graph, if there is one, is held against it."""
        found = self.graphs.clipped(variant, batch, self._bound) if variant is not None and not variant.is_random else None
        self._intake.block.begin()  # the graph is traced from here on too
        losses = self._losses_of(self._training.model, *batch.arguments)
        self._training.loss(losses).backward()
        if variant is not None and found is not None:
            sums = self._intake.pending.sums
            expected = {name: sums[id(p)] for name, p in self._updates.by_name().items() if id(p) in sums}
            self.graphs.compare(variant, found, expected, batch.count * self._training.clipping.sensitivity)
