"""What a tap keeps of a call, worked out once: in the next step the same function is called with the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .marks import CONSTANT, EXAMPLE, Marks
from .registry import INSIDE, REWRITES, SPREADS, Rule, Use
from .structure import PLAIN, holds_numbers_only
from .taps import Slot, slot
from .trail import like


class Recipe:
    """Of calls of one function with the very same parameters and numbers, and other tensors of the same kinds in the same places."""

    __slots__ = (
        "_count",
        "_names",
        "_others",
        "_plain",
        "_weights",
        "leads_to",
        "others",
        "parameters",
        "read",
        "recorded",
        "row_axes",
        "rule",
        "said",
    )

    def __init__(self, use: Use, rule: Rule, said: Sequence[Any], dims: int, marks: Marks):
        self.rule = rule
        self.said = hash(tuple(said))
        self.recorded, _ = recorded_call(use, rule, marks)
        self.row_axes = rule.row_axes(use, dims)
        self.parameters = [id(weight) for weight in use.tracked]
        self.leads_to = hash((dims, *(marks.labels[key] for key in self.parameters)))
        values = use.values
        self.others = [place for place, value in enumerate(values) if isinstance(value, Tensor) and not use.tracks(value)]
        self.read = [place for place in self.others if isinstance(self.recorded.values[place], Slot)]
        self._count, self._names = len(values), tuple(use.kwargs)
        self._plain = [(place, value) for place, value in enumerate(values) if not isinstance(value, Tensor)]
        self._weights = [(place, weight, weight.dim()) for place, weight in enumerate(values) if use.tracks(weight)]
        self._others = [(place, like(values[place]), marks.kind(values[place])) for place in self.others]

    def fits(self, values: tuple[Any, ...], names: tuple[str, ...], marks: Marks) -> bool:
        """Whether it is for a call with these values, of which the last have names."""
        if len(values) != self._count or names != self._names:
            return False
        for place, value in self._plain:
            if values[place] is not value:
                return False
        for place, weight, dims in self._weights:
            if values[place] is not weight or not weight.requires_grad or weight.dim() != dims:
                return False
        for place, is_like, kind in self._others:
            other = values[place]
            if type(other) is Tensor and other.requires_grad and id(other) not in marks.noted and id(other) not in marks.state:
                found: int | None = EXAMPLE  # like most tensors that a model computes with
            else:
                found = marks.kind(other) if isinstance(other, Tensor) else None
            if found != kind or like(other) != is_like:
                return False
        return True


class Recipes:
    """Of modules with these parameters, which are held here: of each function with each of them, the last call."""

    def __init__(self, labels: Mapping[int, Any]) -> None:
        self.labels = labels
        self._made: dict[tuple[Any, int], Recipe] = {}

    def find(self, func: Any, rule: Rule, values: tuple[Any, ...], names: tuple[str, ...], marks: Marks) -> Recipe | None:
        """The recipe for a call with these values, of which the last have names, if it was made like this before."""
        if len(values) <= rule.known_by or func in REWRITES or func in SPREADS or func in INSIDE:  # which look at each call anew
            return None
        recipe = self._made.get((func, id(values[rule.known_by])))
        return recipe if recipe is not None and recipe.rule is rule and recipe.fits(values, names, marks) else None

    def add(self, use: Use, rule: Rule, said: Sequence[Any], dims: int, marks: Marks) -> None:
        """For such calls from now on, if all that the rule may ask for shows in a recipe. `dims`: axes of the output."""
        values = use.values
        plain = [value for value in values if not isinstance(value, Tensor)]
        others = [value for value in values if isinstance(value, Tensor) and not use.tracks(value)]
        if (
            rule.trusted
            and len(values) > rule.known_by
            and use.tracks(values[rule.known_by])
            and all(id(weight) in marks.parameters for weight in use.tracked)
            and all(other.is_floating_point() and other.dim() for other in others)
            and all(type(value) in PLAIN or (type(value) is tuple and holds_numbers_only(value)) for value in plain)
        ):
            self._made[use.func, id(values[rule.known_by])] = Recipe(use, rule, said, dims, marks)


def recorded_call(use: Use, rule: Rule, marks: Marks) -> tuple[Use, tuple[Tensor, ...]]:
    """The call with a Slot for each tensor that the rule reads, and these tensors."""
    wanted = None if rule.reads is None else [id(tensor) for tensor in rule.reads(use)]
    kept: list[Tensor] = []

    def put_away(tensor: Tensor) -> Slot | None:
        if wanted is not None and id(tensor) not in wanted:
            return None
        kept.append(tensor)
        return slot(len(kept) - 1, marks.kind(tensor) != CONSTANT)

    return use.with_others(put_away), tuple(kept)


def each_weight_once(use: Use, marks: Marks) -> Use:
    """The call with views of a weight where it comes a second time: rules speak of each weight once."""
    tracked: list[Tensor] = []

    def of(value: Any) -> Any:
        if not use.tracks(value):
            return value
        if any(value is weight for weight in tracked):
            alias = value.view_as(value)
            marks.mark_derived(alias, Tensor.view_as, (value, value), {}, [value])
            value = alias
        tracked.append(value)
        return value

    return Use(use.func, *use.mapped(of), tracked)
