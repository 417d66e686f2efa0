"""What goes into a step: losses, or sums that a graph has clipped. Held against the draw that is due, each row once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .block import Block
from .clipping import Clipping
from .collect import check_losses
from .deferred import check_deferred
from .draws import CallersDraws, Draw, Draws
from .errors import LossIndependent, NothingClipped, UnhookedParameter
from .footprints import Footprint, check_new_rows, footprints
from .handout import handed_out
from .kept import Age, carried
from .marks import EXAMPLE
from .methods import Clipped
from .ownership import let_go
from .pending import Handed, Pending
from .program import ProgramCall, leading_to
from .progress import Progress
from .release import clip
from .streams import check_not_recorded
from .structure import every_tensor
from .tape import Tape
from .updates import Updates, held_by

_RECENT_ROWS = 64  # inputs of earlier steps that are remembered


class Intake:
    """Everything between a module that runs and clipped sums that wait for a step."""

    def __init__(self, modules: Sequence[nn.Module], draws: Draws | CallersDraws, progress: Progress, updates: Updates, *, fallback: bool):
        self.draws = draws
        self.pending = Pending()
        self.block = Block(modules, fallback=fallback)
        self._progress = progress
        self._updates = updates
        self._recent: list[Footprint] = []  # rows of the last steps
        self._ages: list[Age] = []  # of the blocks since the last step, given up or not
        self.unreleased: list[Tensor] = []  # parameters that have sums without noise in p.grad

    def loss(self, losses: Tensor, clipping: Clipping, method: str) -> Tensor:
        """A scalar whose backward pass hands in the clipped sums of these losses."""
        inputs, tape = self.block.inputs, self.block.close()
        if tape is None:
            raise LossIndependent(
                "no module of this training has run with gradients since the last private.loss.",
                "Compute new losses from model(x) for every call: of the module itself, not by one of its methods, a copy or a compiled "
                "version of it; not under torch.no_grad().",
            )
        self._progress.check_budget()
        check_losses(tape, losses)
        calls = leading_to(tape.program, [losses])
        check_deferred(tape, losses, calls)
        old = [call.name for call in calls if call.is_carried]
        if old:
            raise carried(f"in {', '.join(dict.fromkeys(old))}")
        self._check_due(len(losses))
        rows = self._rows(tape, losses, calls, inputs)
        del calls  # they hold what came between the model and the losses
        counts = not self.draws.is_placeholder
        with self.block.asleep():
            clipped = clip(tape, losses, clipping, method) if counts else self._nothing(tape, losses)
        self.block.made.now.is_over = True
        self._ages.append(self.block.made.now)
        parameters = tape.marks.trainable()
        with tape.pause():
            value = clipped.value(losses)
            handed = Handed(len(losses), [parameters[name] for name in clipped.sums], clipped, rows, counts, self._progress.position)
        return handed_out(value, clipped.sums, parameters, lambda grad, added: self._receive(handed, grad, added))

    def hand_in(self, clipped: Clipped, parameters: list[Tensor], inputs: Sequence[Tensor]) -> None:
        """Sums that a graph has clipped, of a batch with these inputs."""
        self._progress.check_budget()
        entries = len(clipped.weights)
        self._check_due(entries)
        rows = footprints(inputs, entries)
        check_new_rows(rows, [*self.pending.rows, *self._recent])
        self.pending.add(Handed(entries, parameters, clipped, rows, True, self._progress.position))

    def rows_due(self, inputs: Sequence[Tensor]) -> int:
        """How many rows the draw that is due has, of a batch with these inputs."""
        self.draws.check_memory(inputs)
        if self.draws.current is not None:
            return self.draws.current.rows
        return next((len(tensor) for tensor in inputs if tensor.dim()), 0)

    def _check_due(self, entries: int) -> None:
        check_not_recorded()
        if self.pending.stepped:
            raise NothingClipped(
                "another optimizer of this training has not stepped for the last draw.",
                "Call step() of every optimizer once for each draw.",
            )
        self.draws.check_room(self.pending.entries, entries)

    def _rows(self, tape: Tape, losses: Tensor, calls: list[ProgramCall], inputs: list[Footprint]) -> list[Footprint]:
        """Where the rows behind these losses lie in memory; refused if they went through before, or are not those of the draw."""
        draw = self.draws.current
        examples = [
            t for root in tape.root_calls for t in every_tensor([root.call.args, root.call.kwargs]) if tape.marks.kind(t) == EXAMPLE
        ]
        rows = footprints(examples, len(losses)) + [footprint for footprint in inputs if len(footprint.starts) == len(losses)]
        if draw is not None:
            tensors = [t for call in calls for t in every_tensor([call.args, call.kwargs])]
            self.draws.check_memory(tensors)
            rows += footprints(tensors, len(losses), draw.storages)
        check_new_rows(rows, [*self.pending.rows, *self._recent])
        return rows

    def _nothing(self, tape: Tape, losses: Tensor) -> Clipped:
        """The placeholder of an empty draw: weight zero."""
        tape.consume(losses)
        zero = torch.zeros_like(losses.detach())
        sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in tape.marks.trainable().items()}
        return Clipped(sums, zero, torch.zeros_like(losses, dtype=torch.bool))

    def _receive(self, handed: Handed, grad: Tensor, added: list[Tensor]) -> None:
        """The private loss is being back-propagated."""
        if handed.done:
            raise NothingClipped("the private loss was back-propagated twice.", "Call backward() once for each private.loss.")
        if handed.position != self._progress.position:
            raise NothingClipped(
                "this private loss was computed before the last step.",
                "Call backward() before step(): its gradient was clipped for that step.",
            )
        self.draws.check_room(self.pending.entries, handed.entries)
        check_new_rows(handed.rows, [*self.pending.rows, *self._recent])
        self._updates.about_to_add(handed.parameters, added, grad)
        self.pending.add(handed)
        self.unreleased += handed.parameters

    def finish_step(self) -> Draw | None:
        """A step was taken. Returns the draw it was for."""
        draw = self.draws.consume()
        if draw is not None:
            self._recent = [*self._recent, *self.pending.rows][-_RECENT_ROWS:]
        for age in self._ages:
            age.is_over = True
        self._ages = []
        self.forget()
        return draw

    def take_back(self, *, again: bool = False) -> None:
        """Clipped sums that will not be noised must not lie where an optimizer finds them. Where the draw is tried `again`, it may use what was computed of it."""
        released = self._released()
        for parameter in self.unreleased:
            if id(parameter) not in released:
                parameter.grad = None
        for age in self._ages:
            age.is_over = not again

    def close(self) -> None:
        """Nothing of it stays on the model, in p.grad or with the optimizers."""
        self.take_back()
        self.block.remove()
        let_go(self)

    def _released(self) -> set[int]:
        """Ids of the parameters whose optimizers have taken their part of the step in the making."""
        optimizers = [self._updates.optimizers[number] for number in self.pending.stepped]
        return {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}

    def check_stranger(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse the step of an optimizer that is none of ours where it would find a clipped sum that is not noised yet."""
        for one in self._updates.optimizers:
            if one is optimizer:
                return
        released = self._released()
        for parameter in held_by(optimizer):
            if parameter.grad is not None and id(parameter) in self.pending.sums and id(parameter) not in released:
                raise UnhookedParameter(
                    f"a {type(optimizer).__name__} that this training does not know steps on {self._updates.name_of(parameter)}, whose gradient is clipped and "
                    "has no noise yet: it would be released as it is, and not counted.",
                    "Step with the optimizer that PrivateTraining was given, or make the training anew with this one (which may be a wrapper of that).",
                )

    def forget(self) -> None:
        """What was clipped since the last step is void."""
        self.pending = Pending()
        self.unreleased.clear()

    @property
    def nonfinite(self) -> int:
        return sum(int((~handed.clipped.finite).sum()) for handed in self.pending.handed if handed.counts)
