"""What was verified about a model, and is remembered from one step to the next."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .decisions import Decisions
from .explain import Explained
from .layout import Layout, Table, same_owners
from .reading import is_list_of_words
from .recipes import Recipes
from .structure import map_tensors

if TYPE_CHECKING:
    from .compiled.tails import Tails


@dataclass
class Experience:
    """For each way the losses are computed, where the examples lie at each tap, and how long the inputs were."""

    layouts: dict[int, dict[int, Layout]] = field(default_factory=dict)
    revision: int = 0  # how often one of these turned out to be another
    zeros: set[tuple[int, int]] = field(default_factory=set)  # taps whose gradient was zero for every single example
    examples_tried: int = 0  # in reruns that found no mixing
    steps: int = 0
    was_open: bool = False  # the last verification said nothing for sure: some examples were not finite
    explained: list[Explained] = field(default_factory=list)  # how norms were evaluated when that was decided
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)  # who uses a parameter
    ways: Decisions = field(default_factory=Decisions)  # how norms are evaluated; decided anew after each verification
    ways_in_graphs: Decisions = field(default_factory=Decisions)
    tails: Tails | None = None  # recordings of what follows the backward pass
    recipes: Recipes | None = None
    _fitted: tuple[Any, ...] | None = None  # the last taps whose examples lie where they are known to lie
    _word_lists: dict[int, set[int]] = field(default_factory=dict)  # length → sizes of batches
    _lengths: dict[tuple[int, ...], set[tuple[int, int]]] = field(default_factory=dict)  # (inputs, which, axis) → {(batch, length)}

    def compare(self, way: int, places: Iterable[tuple[int, Layout | Table, torch.Size]], batch: int) -> None:
        """Where the examples lie in this batch, by the keys of taps. What was remembered otherwise is forgotten, and graphs made by it are void."""
        known = self.layouts.get(way, {})
        for key, place, shape in places:
            layout = known.get(key)
            if layout is not None and layout.fits(shape, batch) and not same_owners(layout, place, shape, batch):
                del known[key]
                self.revision += 1

    def learn(self, way: int, layouts: Mapping[int, Layout]) -> None:
        """Where the examples lie at taps from now on."""
        self._fitted = None
        self.layouts.setdefault(way, {}).update(layouts)

    def fit(self, way: int, batch: int, created: dict[int, torch.Size]) -> None:
        """What is known of this way fits all taps that were made, with so many examples."""
        self._fitted = way, self.revision, batch, dict(created)

    def has_fitted(self, way: int, batch: int, created: dict[int, torch.Size]) -> bool:
        """Whether that was found of the last ones, and these are like them."""
        return self._fitted is not None and self._fitted == (way, self.revision, batch, created)

    def recipes_for(self, labels: Mapping[int, Any]) -> Recipes:
        """Those of the last tape, if it met the same parameters."""
        if self.recipes is None or (self.recipes.labels is not labels and self.recipes.labels != labels):
            self.recipes = Recipes(labels)
        return self.recipes

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

    @property
    def times_verified(self) -> int:
        """By the step that was counted last."""
        return self.steps.bit_length()

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

    def shared_words(self, values: Any, batch: int) -> frozenset[int]:
        """Lengths of lists of words that were the same when the batch had another size: names of classes."""
        found: set[int] = set()

        def look(value: Any) -> Any:
            if is_list_of_words(value):
                seen = self._word_lists.setdefault(len(value), set())
                seen.add(batch)
                if len(seen) > 1:
                    found.add(len(value))
            return value

        map_tensors(values, look)
        return frozenset(found)


_experience: weakref.WeakKeyDictionary[nn.Module, Experience] = weakref.WeakKeyDictionary()


def experience_of(modules: Sequence[nn.Module]) -> Experience:
    found = _experience.get(modules[0])
    return _experience.setdefault(modules[0], Experience()) if found is None else found
