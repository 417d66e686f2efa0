"""The update of an eager loop as a CUDA graph (update.py): noise and optimizer by one replay, out of the hook before optimizer.step().

Of a small model the many kernels of both take less time than their launching. The hook makes the step and leaves no gradient behind, so that
optimizer.step() itself finds nothing to do; after it p.grad is what was released, as after every eager step, in tensors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..noise import room_for_sums
from ..numerics import accumulation_dtype
from ..planner import room_for_update
from ..updates import Updates, updated_by
from .update import RecordedUpdate

_PATIENCE = 8  # steps before a recording is worth its making


class UpdateInLoop:
    """Of one optimizer."""

    def __init__(self, number: int, updates: Updates):
        self._number = number
        self._updates = updates
        self._steps = 0
        self._has_room = True
        self._update: RecordedUpdate | None = None
        self._parameters: list[Tensor] = []  # those that there is room for, …
        self._room: list[Tensor] = []  # … and where a replay finds their sums

    def is_ready(self) -> bool:
        """Whether `release` may be called in this step; else it is to be made eagerly."""
        parameters, device = updated_by(self._updates.optimizers[self._number]), self._updates.device_of(self._number)
        self._steps += 1
        if (
            self._steps < _PATIENCE
            or not self._has_room
            or self._updates.has_scaler
            or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        ):
            return False
        if not self._fits(parameters) and not self._make_room(parameters, device):
            return False
        self._update = self._update or RecordedUpdate(self._number, self._updates, in_loop=True)
        return self._update.is_ready(dict(zip(map(id, parameters), self._room)))

    def _fits(self, parameters: list[Tensor]) -> bool:
        return len(parameters) == len(self._parameters) and all(
            mine is other and mine.shape == room.shape and accumulation_dtype(mine.dtype) == room.dtype
            for mine, other, room in zip(parameters, self._parameters, self._room)
        )

    def _make_room(self, parameters: list[Tensor], device: torch.device) -> bool:
        """Where that takes little of the memory; if not, it is not asked for again."""
        self._parameters, self._room = [], []
        needed = sum(parameter.numel() * accumulation_dtype(parameter.dtype).itemsize for parameter in parameters)
        self._has_room = needed <= room_for_update(device) and all(parameter.device == device for parameter in parameters)
        if self._has_room:
            self._parameters, self._room = parameters, room_for_sums(parameters)
        return self._has_room

    def release(
        self, number: int, optimizer: Optimizer, sums: Mapping[int, Tensor], penalties: Mapping[int, Tensor], sensitivity: float, step: int
    ) -> None:  # fmt: skip
        """Make the step, with new noise."""
        assert self._update is not None, "is_ready comes first"
        given = [sums.get(id(parameter)) for parameter in self._parameters]
        with torch.no_grad():  # all of it was written over by the step before
            there = [(room, total) for room, total in zip(self._room, given) if total is not None]
            torch._foreach_copy_([room for room, _ in there], [total for _, total in there])
            if len(there) < len(given):
                torch._foreach_zero_([room for room, total in zip(self._room, given) if total is None])
        self._updates.take_gradients_away(number)
        self._update.release(number, optimizer, sums, penalties, sensitivity, step)
        self._updates.show_after_step(number, self._released)

    def _released(self) -> list[Tensor]:
        """Of each parameter, in tensors of their own: the next replay writes over those of this one."""
        assert self._update is not None
        with torch.no_grad():
            return list(torch._foreach_add(self._update.released, 0.0))
