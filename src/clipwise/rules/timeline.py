"""Where time lies in the tensors of a recurrent layer: along an axis, or packed (sequences of different lengths, no padding)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class Timeline(ABC):
    @abstractmethod
    def reversed(self, x: Tensor) -> Tensor:
        """Every sequence backwards."""

    @abstractmethod
    def previous(self, output: Tensor, start: Tensor) -> Tensor:
        """h_{t-1} for every t, from h_1 … and the initial state (1, B, H)."""

    @abstractmethod
    def add_to_first_step(self, u: Tensor, extra: Tensor) -> Tensor:
        """u with `extra` (1, B, p) added where every sequence begins."""

    @abstractmethod
    def sizes(self, x: Tensor) -> list[int]:
        """How many rows every step has."""

    @abstractmethod
    def by_time(self, x: Tensor) -> Tensor:
        """Rows of the first step, then those of the second …: (N, p)"""

    @abstractmethod
    def from_time(self, rows: Tensor, like: Tensor) -> Tensor:
        """`rows` by time, as they lie in `like`."""

    @abstractmethod
    def arguments(self, u: Tensor, state: Any, weights: list[Tensor], biases: bool) -> tuple[Any, ...]:
        """What one layer of a fused kernel is called with. Backward passes of cuDNN need its training mode."""


class Padded(Timeline):
    """(T, B, p), or (B, T, p) with batch_first."""

    def __init__(self, batch_first: bool):
        self.batch_first = batch_first
        self.axis = 1 if batch_first else 0

    def reversed(self, x: Tensor) -> Tensor:
        return x.flip(self.axis)

    def previous(self, output: Tensor, start: Tensor) -> Tensor:
        first = start.transpose(0, 1) if self.batch_first else start
        return torch.cat([first.to(output.dtype), output.narrow(self.axis, 0, output.shape[self.axis] - 1)], self.axis)

    def add_to_first_step(self, u: Tensor, extra: Tensor) -> Tensor:
        first, rest = u.split([1, u.shape[self.axis] - 1], self.axis)
        return torch.cat([first + (extra.transpose(0, 1) if self.batch_first else extra), rest], self.axis)

    def sizes(self, x: Tensor) -> list[int]:
        return [x.shape[1 - self.axis]] * x.shape[self.axis]

    def by_time(self, x: Tensor) -> Tensor:
        return x.movedim(self.axis, 0).reshape(-1, x.shape[-1])

    def from_time(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows.unflatten(0, (like.shape[self.axis], like.shape[1 - self.axis])).movedim(0, self.axis)

    def arguments(self, u: Tensor, state: Any, weights: list[Tensor], biases: bool) -> tuple[Any, ...]:
        return u, state, weights, biases, 1, 0.0, True, False, self.batch_first


class Packed(Timeline):
    """(N, p): the rows of the first step of every sequence, then those of the second, … Sequences are sorted by length."""

    def __init__(self, batch_sizes: Tensor):
        self.batch_sizes = batch_sizes
        self._sizes = batch_sizes.tolist()

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For every row its step and its sequence, (N,); the first row of every step, (T,); the length of every sequence, (B,)."""
        sizes = torch.tensor(self._sizes, device=device)
        steps = torch.arange(len(sizes), device=device).repeat_interleave(sizes)
        first = sizes.cumsum(0) - sizes
        sequence = torch.arange(len(steps), device=device) - first[steps]
        return steps, sequence, first, (sizes.unsqueeze(1) > torch.arange(self._sizes[0], device=device)).sum(0)

    def reversed(self, x: Tensor) -> Tensor:
        steps, sequence, first, lengths = self._places(x.device)
        return x[first[lengths[sequence] - 1 - steps] + sequence]

    def previous(self, output: Tensor, start: Tensor) -> Tensor:
        steps, sequence, first, _ = self._places(output.device)
        count = start.shape[1]
        rows = torch.where(steps > 0, count + first[(steps - 1).clamp(min=0)] + sequence, sequence)
        return torch.cat([start[0].to(output.dtype), output])[rows]

    def add_to_first_step(self, u: Tensor, extra: Tensor) -> Tensor:
        first, rest = u.split([self._sizes[0], len(u) - self._sizes[0]])
        return torch.cat([first + extra[0, : self._sizes[0]], rest])

    def sizes(self, x: Tensor) -> list[int]:
        return self._sizes

    def by_time(self, x: Tensor) -> Tensor:
        return x

    def from_time(self, rows: Tensor, like: Tensor) -> Tensor:
        return rows

    def arguments(self, u: Tensor, state: Any, weights: list[Tensor], biases: bool) -> tuple[Any, ...]:
        return u, self.batch_sizes, state, weights, biases, 1, 0.0, True, False
