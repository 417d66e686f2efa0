"""When an eager step's tail (tail.py) is recorded and replayed: the same step of a small model, again and again, on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..clipping import Clipping
from ..collect import check_heard, check_losses, known_layouts, way_to
from ..gradients import ExampleGradients
from ..layout import Layout
from ..methods.base import Clipped, from_factors
from ..numerics import tf32_in_use
from ..passes import Arrival, arrivals_at
from ..tape import Tape
from ..tracing import is_tracing
from .tail import Tail

_PATIENCE = 6  # steps of one kind before it is worth a recording
_ATTEMPTS = 3  # at recording one kind of step: batches may turn out larger
_MOST_KINDS = 16  # then something changes with every step
_ROOM = 2**26  # bytes that reach the taps of a small model …
_ROOM_BY_PARAMETERS = 2  # … or so many times those of its parameters


@dataclass
class _Kind:
    """Steps that take the same way, clipped the same."""

    sizes: set[int] = field(default_factory=set)  # of their batches
    steps: int = 0
    attempts: int = 0
    tail: Tail | None = None

    @property
    def is_due(self) -> bool:
        return self.tail is not None or (self.steps >= _PATIENCE and self.attempts < _ATTEMPTS)

    def rows(self) -> int:
        """For the next recording: of batches that vary in size, some will be larger than those so far."""
        largest = max(self.sizes)
        return largest if len(self.sizes) == 1 else -(-math.ceil(largest + math.sqrt(largest)) // 8) * 8


def clipped_by_tail(tape: Tape, losses: Tensor, clipping: Clipping) -> Clipped | None:
    """The clipped sums by a recording, or None: nothing has been done yet, and the step is to be made as always."""
    if not _may_be_recorded(tape, losses):
        return None
    check_losses(tape, losses)
    tape.marks.check_buffers()
    experience = tape.experience
    if experience.will_look_again or tape.recall(losses) is not None:
        return None
    way = way_to(tape, losses)
    known = known_layouts(tape, losses, way)
    if known is None:
        return None
    key = way, repr(clipping), losses.dtype, losses.device, tf32_in_use(), torch.are_deterministic_algorithms_enabled()
    if len(experience.tails) >= _MOST_KINDS and key not in experience.tails:
        return None
    kind: _Kind = experience.tails.setdefault(key, _Kind())
    kind.sizes.add(len(losses))
    kind.steps += 1
    if not kind.is_due:
        return None
    experience.steps += 1
    arrivals = arrivals_at(tape, losses)
    check_heard(tape, losses, [record for record, _, _ in arrivals])
    layouts = [known[record.key] for record, _, _ in arrivals]
    with tape.pause():
        fits = kind.tail is not None and kind.tail.fits(arrivals, losses, tape.marks)
        if not fits and kind.attempts < _ATTEMPTS:
            kind.tail = _recorded(kind, tape, arrivals, layouts, losses, clipping)
            fits = kind.tail is not None
        return (
            kind.tail(arrivals, losses.detach()) if kind.tail is not None and fits else _eagerly(tape, arrivals, layouts, losses, clipping)
        )


def _may_be_recorded(tape: Tape, losses: Tensor) -> bool:
    """Whether all that follows the backward pass depends on what reached the taps alone, on one device."""
    return losses.dim() == 1 and len(losses) > 1 and not (tape.needs_graph or tape.computes_again or is_tracing())


def _recorded(
    kind: _Kind, tape: Tape, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor, clipping: Clipping
) -> Tail | None:  # fmt: skip
    """A recording for steps of this kind, or None where it cannot be made, would be wrong, or would take too much memory."""
    kind.attempts += 1
    rows = kind.rows()
    reached = sum(tensor.numel() * tensor.element_size() for _, grad, kept in arrivals for tensor in (grad, *kept))
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in tape.marks.trainable().values())
    if reached * rows / len(losses) > max(_ROOM, _ROOM_BY_PARAMETERS * parameters):
        return None
    try:
        tail = Tail(tape, arrivals, layouts, losses.detach(), clipping, rows)
        if tail.fits(arrivals, losses, tape.marks) and tail.is_right(
            tape, arrivals, layouts, losses.detach(), lambda others: _eagerly(tape, others, layouts, losses, clipping)
        ):
            return tail
    except Exception:  # the step is made as always: a recording only saves time
        pass
    kind.attempts = _ATTEMPTS
    return None


def _eagerly(tape: Tape, arrivals: Sequence[Arrival], layouts: Sequence[Layout], losses: Tensor, clipping: Clipping) -> Clipped:
    gradients = ExampleGradients(tape, len(losses), losses.device, is_known=True, is_last=True)
    for (record, grad, kept), layout in zip(arrivals, layouts):
        gradients.add(record, grad, kept, layout)
    gradients.finish()
    return from_factors(tape, losses, gradients, clipping)
