"""What was verified about a model, and is remembered from one step to the next."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .decisions import Decisions
from .explain import Explained
from .layout import Layout


@dataclass
class Experience:
    """For each way the losses are computed, where the examples lie at each tap, and how long the inputs were."""

    layouts: dict[int, dict[int, Layout]] = field(default_factory=dict)
    zeros: set[tuple[int, int]] = field(default_factory=set)  # taps whose gradient was zero for every single example
    examples_tried: int = 0  # in reruns that found no mixing
    steps: int = 0
    explained: list[Explained] = field(default_factory=list)  # how norms were evaluated when that was decided
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)  # who uses a parameter
    ways: Decisions = field(default_factory=Decisions)  # how norms are evaluated; decided anew after each verification
    ways_in_graphs: Decisions = field(default_factory=Decisions)
    tails: dict[Hashable, Any] = field(default_factory=dict)  # recordings of eager steps (compiled/tails.py)
    _lengths: dict[tuple[int, ...], set[tuple[int, int]]] = field(default_factory=dict)  # (inputs, which, axis) → {(batch, length)}

    def is_time_to_look_again(self) -> bool:
        """On steps 1, 2, 4, 8, 16 … what was verified is verified once more: content may hide what structure allows."""
        due = self.will_look_again
        self.steps += 1
        if due:
            self.ways.clear()
        return due

    @property
    def will_look_again(self) -> bool:
        """Whether the next step is one of those."""
        return (self.steps + 1) & self.steps == 0

    def not_rows(self, inputs: Sequence[Tensor], batch: int) -> frozenset[tuple[int, int]]:
        """(id of a tensor, axis) where a length that now equals the batch's was the same when the batch had another size: a feature."""
        found = set()
        for number, tensor in enumerate(inputs):
            for axis, length in enumerate(tensor.shape[:2]):
                seen = self._lengths.setdefault((len(inputs), number, tensor.dim(), axis), set())
                if any(length == before and batch != other for other, before in seen):
                    found.add((id(tensor), axis))
                seen.add((batch, length))
        return frozenset(found)


_experience: weakref.WeakKeyDictionary[nn.Module, Experience] = weakref.WeakKeyDictionary()


def experience_of(modules: Sequence[nn.Module]) -> Experience:
    return _experience.setdefault(modules[0], Experience())
