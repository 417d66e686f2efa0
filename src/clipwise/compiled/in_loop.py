"""The update of an eager loop as a CUDA graph (update.py): noise and optimizer by one replay, out of the hook before optimizer.step().

Of a small model the many kernels of both take less time than their launching. The hook makes the step and leaves no gradient behind, so that
optimizer.step() itself finds nothing to do; after it p.grad is what was released, as after every eager step, in tensors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..numerics import accumulation_dtype
from ..planner import room_for_update
from ..updates import Release, Updates, updated_by
from .optimizers import steps_to_host
from .sums_room import SumsRoom
from .update import Recorded, RecordedUpdate

_PATIENCE = 8  # steps with the same numbers before a recording is worth its making


class UpdateInLoop:
    """Of one optimizer."""

    def __init__(self, number: int, updates: Updates):
        self._number = number
        self._updates = updates
        self._optimizer = updates.optimizers[number]
        self._update = RecordedUpdate(number, updates, in_loop=True)
        self._numbers: tuple[Any, ...] | None = None  # of the optimizer, in the step before …
        self._steps = 0  # … and so many before it
        self._has_room = True
        self._like: list[Any] = []  # the parameters that there is room for, and how they lie
        self._room: SumsRoom | None = None  # where a replay finds their sums
        self._is_replayed = False  # in the step before

    def ready(self, sums: Mapping[int, Tensor], *, has_penalties: bool) -> Release | None:
        """Noise and step for these sums, by one replay; None: it is to be made eagerly."""
        parameters = updated_by(self._optimizer)
        recorded = None if has_penalties or self._updates.has_scaler or not self._has_room else self._recorded(parameters)
        if recorded is None and self._is_replayed:
            steps_to_host(self._optimizer)  # an eager step would fetch each of them
        self._is_replayed = recorded is not None
        return (
            None if recorded is None else lambda *told: self._make(recorded, [sums.get(id(parameter)) for parameter in parameters], *told)
        )

    def _recorded(self, parameters: list[Tensor]) -> Recorded | None:
        numbers = self._update.numbers()
        self._steps = self._steps + 1 if numbers is not None and numbers == self._numbers else 0
        self._numbers = numbers
        device = self._updates.device_of(self._number)
        if numbers is None or self._steps < _PATIENCE - 1 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return None
        like = [(id(parameter), parameter.shape, parameter.stride(), parameter.dtype, parameter.device) for parameter in parameters]
        if like != self._like:
            self._make_room(parameters, like, device)
        recorded = None if self._room is None else self._update.ready(dict(zip(map(id, parameters), self._room.places)), numbers)
        if self._update.is_given_up:
            self._has_room, self._like, self._room = False, [], None
        return recorded

    def _make_room(self, parameters: list[Tensor], like: list[Any], device: torch.device) -> None:
        """Where that takes little of the memory; if not, it is not asked for again."""
        needed = sum(parameter.numel() * accumulation_dtype(parameter.dtype).itemsize for parameter in parameters)
        self._has_room = needed <= room_for_update(device)
        self._like, self._room = (like, SumsRoom(parameters)) if self._has_room else ([], None)

    def _make(self, recorded: Recorded, sums: list[Tensor | None], sensitivity: float, step: int) -> None:
        """Make the step, with new noise."""
        self._updates.take_gradients_away(self._number)  # they take as much memory as the sums
        assert self._room is not None
        self._room.lending.take_back(but={id(total) for total in sums})
        with torch.no_grad():
            given = list(zip(self._room.places, sums))
            elsewhere = [(place, total) for place, total in given if total is not None and total.data_ptr() != place.data_ptr()]
            if elsewhere:
                torch._foreach_copy_([place for place, _ in elsewhere], [total for _, total in elsewhere])
            nothing = [place for place, total in given if total is None]
            if nothing:
                torch._foreach_zero_(nothing)
        recorded.release(sensitivity, step)
        self._updates.show_after_step(self._number, lambda: _copies(recorded.gradients))


def _copies(gradients: list[Tensor]) -> list[Tensor]:
    """The next replay writes over these."""
    with torch.no_grad():
        return list(torch._foreach_add(gradients, 0.0))
