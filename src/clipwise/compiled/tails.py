"""When an eager step's tail (tail.py) is recorded and replayed: the same step of a small model, again and again, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..clipping import Clipping, Flat, is_fixed
from ..collect import Route, check_heard
from ..layout import Layout
from ..methods.base import Clipped, from_factors
from ..numerics import tf32_in_use
from ..passes import Arrival, arrivals_at, gradients_from
from ..planner import room_for_recording
from ..tape import Tape
from ..tracing import is_tracing
from .arrivals import Eagerly, eagerly, with_row_numbers
from .programs import Programs, Step, clipped_by_program
from .rows import to_multiple
from .tail import Tail

_PATIENCE = 6  # steps of one kind before it is worth a recording
_ATTEMPTS = 3  # at recording one kind of step: batches may turn out larger
_MOST_KINDS = 8  # that are remembered
_MOST_ATTEMPTS = 16  # for one model: then something changes again and again


@dataclass
class _Kind:
    """Steps that take the same way, clipped the same up to the bound."""

    sizes: set[int] = field(default_factory=set)  # of their batches
    steps: int = 0
    attempts: int = 0
    tail: Tail | None = None
    looked_at: int = 0  # how often the model had been verified when the tail was last held against the eager step
    needs_much_room: bool = False
    programs: Programs = field(default_factory=Programs)  # where a recording needs too much room

    def rows(self) -> int:
        """For the next recording: of batches that vary in size, some will be larger than those so far."""
        largest = max(self.sizes)
        return largest if len(self.sizes) == 1 else to_multiple(math.ceil(largest + math.sqrt(largest)))


class Tails:
    """Recordings of one model's steps."""

    def __init__(self) -> None:
        self.kinds: dict[Hashable, _Kind] = {}  # those that were used last come last
        self._attempts = 0

    def kind(self, key: Hashable) -> _Kind:
        found = self.kinds.pop(key, None) or _Kind()
        if len(self.kinds) >= _MOST_KINDS:
            del self.kinds[next(iter(self.kinds))]
        self.kinds[key] = found
        return found

    def may_record(self, kind: _Kind) -> bool:
        return kind.steps >= _PATIENCE and kind.attempts < _ATTEMPTS and self._attempts < _MOST_ATTEMPTS

    def count(self, kind: _Kind) -> None:
        kind.attempts += 1
        self._attempts += 1


def clipped_by_tail(tape: Tape, losses: Tensor, clipping: Clipping, route: Route) -> Clipped | None:
    """The clipped sums by a recording, or None: nothing has been done yet, and the step is to be made as always."""
    experience = tape.experience
    known = route.layouts
    if known is None or not _may_be_recorded(tape, losses, clipping):
        return None
    tails = experience.tails = experience.tails or Tails()
    unit, bound = (Flat(1.0), clipping.bound) if isinstance(clipping, Flat) else (clipping, 1.0)
    kind = tails.kind((route.way, unit, losses.dtype, losses.device, tf32_in_use(), torch.are_deterministic_algorithms_enabled()))
    kind.sizes.add(len(losses))
    kind.steps += 1
    if kind.tail is None and not (tails.may_record(kind) and _has_room(kind, tape, losses, tape.reaching)):
        if not kind.needs_much_room:
            return None
        return clipped_by_program(kind.programs, Step(tape, losses, clipping, unit, bound, known))  # its gradients are let go as they come
    tape.marks.check_buffers()
    experience.steps += 1
    arrivals = [with_row_numbers(arrival, tape.marks) for arrival in arrivals_at(tape, losses)]
    check_heard(tape, losses, [record for record, _, _ in arrivals])
    layouts = [known[record.key] for record, _, _ in arrivals]
    verified = experience.times_verified

    with tape.pause():
        tail = kind.tail if kind.tail is not None and kind.tail.fits(arrivals, layouts, losses, tape.marks) else None
        if tail is None and tails.may_record(kind):
            tails.count(kind)
            tail = kind.tail = _recorded(kind, tape, arrivals, layouts, losses.detach(), unit)
            kind.looked_at = 0
        if tail is not None and kind.looked_at != verified:
            kind.looked_at = verified
            if not _is_right(tail, arrivals, losses.detach(), bound, eagerly(tape, layouts, clipping)):
                tail = kind.tail = None
                kind.attempts = _ATTEMPTS
        if tail is not None:
            return tail(arrivals, losses.detach(), bound)
        return from_factors(tape, losses, gradients_from(tape, arrivals, layouts, losses), clipping)


def _may_be_recorded(tape: Tape, losses: Tensor, clipping: Clipping) -> bool:
    """Whether all that follows the backward pass depends on what reached the taps alone, and the model is not verified in this step."""
    return (
        len(losses) > 1
        and is_fixed(clipping)
        and not tape.experience.will_look_again
        and tape.recall(losses) is None
        and not (tape.needs_graph or tape.computes_again or tape.fallback or is_tracing())
    )


def _has_room(kind: _Kind, tape: Tape, losses: Tensor, reached: int) -> bool:
    """Whether a recording with inputs of so many bytes, for these losses, is small enough; if not, no other is tried for such steps."""
    parameters = sum(parameter.nbytes for parameter in tape.marks.trainable().values())
    if reached * kind.rows() <= len(losses) * room_for_recording(losses.device, parameters):
        return True
    kind.attempts, kind.needs_much_room = _ATTEMPTS, True
    return False


def _recorded(
    kind: _Kind, tape: Tape, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor, clipping: Clipping
) -> Tail | None:  # fmt: skip
    """A recording for steps of this kind, or None where it cannot be made or would take too much memory."""
    if not _has_room(kind, tape, losses, sum(tensor.nbytes for _, grad, kept in arrivals for tensor in (grad, *kept))):
        return None
    try:
        return Tail(tape, arrivals, layouts, losses, clipping, kind.rows())
    except Exception:  # the step is made as always: a recording only saves time
        return None


def _is_right(tail: Tail, arrivals: Sequence[Arrival], losses: Tensor, bound: float, eagerly: Eagerly) -> bool:
    try:
        return tail.is_right(arrivals, losses, bound, eagerly)
    except Exception:  # what is wrong with the model will show in the step itself
        return False
