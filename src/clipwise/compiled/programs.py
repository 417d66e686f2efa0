"""When the tail of an eager step becomes a program (staged.py): steps that reach the same taps, with batches of one size, of a model that is too
large to be recorded."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from ..clipping import Clipping
from ..collect import check_heard
from ..coverage import taps_behind
from ..errors import ConsumedTape
from ..layout import Layout
from ..methods.base import Clipped, from_factors
from ..passes import evaluate
from ..planner import room_for_trial
from ..tape import Tape
from ..taps import Record
from .arrivals import eagerly
from .staged import Noted, Staged

_Key = tuple[int, frozenset[int]]  # examples, and keys of taps
_PATIENCE = 3  # steps with batches of one size before they are worth a program
_MOST = 8  # programs that are made for one kind of step
_MOST_REPLAYED = 2  # of them may become graphs, which keep memory of their own
_ROOM = 4  # times what reaches the taps must be free for holding a program against the eager step


@dataclass
class Programs:
    """Of one kind of steps, by the size of the batch and the taps behind the losses."""

    steps: Counter[_Key] = field(default_factory=Counter)
    made: dict[_Key, Staged] = field(default_factory=dict)
    looked_at: dict[_Key, int] = field(default_factory=dict)  # how often the model had been verified when they were last found right
    attempts: int = 0

    def may_make(self, key: _Key) -> bool:
        return key not in self.made and self.steps[key] >= _PATIENCE and self.attempts < _MOST

    def give_up(self) -> None:
        self.made.clear()
        self.attempts = _MOST


@dataclass
class Step:
    """Losses whose way is known, and how their gradients are clipped: `unit` with norms in units of `bound`."""

    tape: Tape
    losses: Tensor
    clipping: Clipping
    unit: Clipping
    bound: float
    layouts: dict[int, Layout]

    @cached_property
    def key(self) -> _Key:
        return len(self.losses), taps_behind(self.losses)


def clipped_by_program(programs: Programs, step: Step) -> Clipped | None:
    """The clipped sums by a program, or by an eager step from which one is made, or None: nothing has been done yet."""
    if programs.attempts >= _MOST and not programs.made:
        return None
    tape, losses, key = step.tape, step.losses, step.key
    programs.steps[key] += 1
    program = programs.made.get(key)
    if program is None and not programs.may_make(key):
        return None
    tape.marks.check_buffers()
    tape.experience.steps += 1
    is_known = program is not None and program.fits(tape, losses, step.layouts)
    if program is None or not is_known or programs.looked_at[key] != tape.experience.times_verified:
        if not is_known:
            programs.made.pop(key, None)
        return _eagerly(programs, step)
    try:
        clipped, heard = program(tape, losses, step.bound)
    except ConsumedTape:
        programs.give_up()
        raise
    check_heard(tape, losses, heard)
    return clipped


def _eagerly(programs: Programs, step: Step) -> Clipped:
    """The step as always. What its taps heard is noted, and a program made of it, or held against it."""
    tape, losses, layouts = step.tape, step.losses, step.layouts
    noted: list[Noted] = []

    def note(record: Record, grad: Tensor, kept: tuple[Tensor, ...]) -> None:
        noted.append(Noted.of((record, grad, kept), tape.marks))

    gradients, heard = evaluate(tape, losses, lambda record: layouts[record.key], keep_graph=False, known=True, noting=note)
    check_heard(tape, losses, heard)
    clipped = from_factors(tape, losses, gradients, step.clipping)
    del gradients
    with tape.pause():
        _prepare(programs, step, noted)
    return clipped


def _prepare(programs: Programs, step: Step, noted: Sequence[Noted]) -> None:
    """A program for batches of this size that is right, if there can be one."""
    tape, losses, key = step.tape, step.losses.detach(), step.key
    layouts = [step.layouts[tap.record.key] for tap in noted]
    program = programs.made.get(key)
    if program is None and not programs.may_make(key):
        return
    try:
        if _ROOM * sum(tap.nbytes for tap in noted) > room_for_trial(losses.device):
            programs.give_up()
            return
        if program is None:
            programs.attempts += 1
            program = Staged(tape, noted, layouts, losses, step.unit, replays=len(programs.made) < _MOST_REPLAYED)
            gc.collect()  # tracing leaves cycles, which hold this step's tensors
        if program.is_right(noted, losses, step.bound, eagerly(tape, layouts, step.clipping)):
            programs.made[key] = program
            programs.looked_at[key] = tape.experience.times_verified
        else:
            programs.give_up()
    except Exception:  # the step is made as always: a program only saves time
        programs.give_up()
