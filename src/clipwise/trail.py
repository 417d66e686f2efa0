"""The trail of a tape: a hash of the calls so far, with their numbers and words, by which taps are known from step to step."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

OPEN, CLOSE = object(), object()  # around the entries of a list or tuple
WHOLE = frozenset({int})
SMALL = range(-8, 8)  # integers that are axes and flags rather than sizes: part of the path that names a tap


def further(trail: int, said: Iterable[Any]) -> int:
    """The trail behind a call that says this."""
    return hash((trail, hash(tuple(said))))


def told_apart(value: Any) -> Any:
    """hash(-1) is hash(-2): the last axis would be the one before it. And hash(True) is hash(1), a flag would be an axis; and what is not a number is told by
    its address: float("nan") would be another each time."""
    if value.__class__ is bool:
        return "true" if value else "false"
    if value != value:
        return "nan"
    return value if value != -1 else "-1"


def like(tensor: Tensor) -> int:
    """How many axes it has, and whether gradient comes through it: which of two tensors a call takes."""
    return tensor.dim() if tensor.requires_grad else 64 + tensor.dim()


def are_axes(values: tuple[Any, ...]) -> bool:
    """Whether these are integers whose hashes tell them apart, as they stand."""
    return WHOLE.issuperset(map(type, values)) and -1 not in values


def as_number(value: Any) -> int | None:
    """An integer of numpy's; None for what only looks like one."""
    try:
        return operator.index(value)
    except Exception:
        return None
