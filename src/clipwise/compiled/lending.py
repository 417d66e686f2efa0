"""Results of a graph that are lent instead of being copied: the next replay writes over them.

Of the sums of a step nobody needs anything when the next one is made, so that they can stay where the graph leaves them. Whoever still holds them
then (a draw that goes through in parts) keeps them, in tensors of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch
from torch import Tensor


class Lending:
    """What one graph has lent. Who takes a view of something lent must copy it: it is the tensors themselves that are followed."""

    def __init__(self) -> None:
        self._lent: list[weakref.ref[Tensor]] = []

    def lend(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The same numbers, by names that nobody else has. What is not of floating point is copied."""
        # .data: with version counters of their own, since a replay is no write that autograd must know of
        lent = [result.data if result.is_floating_point() else result.clone() for result in results]
        self._lent = [weakref.ref(tensor) for tensor in lent if tensor.is_floating_point()]
        return lent

    def take_back(self, *, but: Collection[int] = ()) -> None:
        """Before the graph is replayed. What is still held moves to memory of its own; if there is none, it stays lent. `but`: ids of those that
        are used up by what is written there."""
        held = [tensor for reference in self._lent if (tensor := reference()) is not None and id(tensor) not in but]
        if held:
            with torch.no_grad():
                for tensor, own in zip(held, torch._foreach_add(held, 0.0)):
                    tensor.data = own
        self._lent = []
