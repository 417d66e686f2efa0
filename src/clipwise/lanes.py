"""Short cuts for calls of which nothing needs to be looked up: functions of activations, of constants that the model holds, and of numbers.

Most calls of a forward pass are such, and a model makes hundreds of them. A call that takes the short cut is marked, and noted on the trail, as the
long way would; whatever is out of the ordinary (a weight, something marked, a number in a tensor, a broadcast) goes the long way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions import TAKES_MEMORY, Trait
from .guards import GUARDS
from .kinds import ATTENTION, kind_of
from .trail import CLOSE, OPEN, SMALL, WHOLE, are_axes, further, like, told_apart

if TYPE_CHECKING:
    from .tape import Tape

NONE, PLAIN, ENTRYWISE, IN_EVALUATION, NOTED = range(5)
LANES: dict[Callable[..., Any], int] = {}  # of functions that were met before
MISSED: Any = object()  # the call must go the long way

_IF_NOT_TRAINING = (F.batch_norm, torch.batch_norm)  # its sixth argument in both


def lane_of(func: Callable[..., Any], trait: Trait) -> int:
    """Which calls of this function may take the short cut."""
    lane = LANES.get(func)
    if lane is None:
        lane = LANES[func] = _examine(func, trait)
    return lane


def _examine(func: Callable[..., Any], trait: Trait) -> int:
    if trait.ignored or trait.runs_backward or trait.payload or trait.blank or trait.borrows or trait.name in TAKES_MEMORY:
        return NONE
    if func in GUARDS:
        return IN_EVALUATION if func in _IF_NOT_TRAINING else NONE
    if trait.name in ATTENTION:
        return NOTED
    return {"plain": PLAIN, "entrywise": ENTRYWISE}.get(kind_of(trait.name), NONE)


def passed(tape: Tape, func: Callable[..., Any], trait: Trait, lane: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call inside a captured module, or MISSED: then nothing was done."""
    marks = tape.marks
    if marks.has_stale or not args:
        return MISSED
    if lane == IN_EVALUATION and (args[5] if len(args) > 5 else kwargs.get("training")):
        return MISSED
    if lane == ENTRYWISE and _may_repeat((*args, *kwargs.values()) if kwargs else args):
        return MISSED
    said: list[Any] = [trait.name]
    activations = _activations(args, said, trait.takes_sizes, marks.noted, marks.state)
    if kwargs:
        if "out" in kwargs:
            return MISSED
        said.extend(kwargs)
        more = _activations(kwargs.values(), said, trait.takes_sizes, marks.noted, marks.state)
        activations = activations + more if activations >= 0 and more >= 0 else -1
    if activations <= 0 or (trait.writes and id(args[0]) in marks.state):
        return MISSED
    tape.trail = further(tape.trail, said)
    result = func(*args, **kwargs)
    if lane == NOTED and not tape.is_looking_back:
        tape.moves.note(trait.name, args, kwargs, marks, result)
    if type(result) is not Tensor or not result.requires_grad:
        marks.mark_example(result)
        if marks.made is not None:
            marks.made.date((), result, None, marks.made.now, overwrites=False)
    return result


def _may_repeat(values: Iterable[Any]) -> bool:
    """Whether one of several tensors may be repeated along an axis of another."""
    first: torch.Size | None = None
    count = 0
    for value in values:
        if isinstance(value, Tensor):
            count += 1
            if count == 1:
                first = value.shape
            elif count > 2 or value.shape != first:
                return True
    return False


def _activations(values: Iterable[Any], said: list[Any], takes_sizes: bool, noted: Any, state: Any) -> int:
    """How many of these tensors carry gradient and were marked by nobody; -1 where a value is out of the ordinary. Numbers and words go into `said`."""
    count = 0
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            key = id(value)
            if key in state:
                if value.requires_grad or not value.dim() or not value.is_floating_point():
                    return -1
                said.append(like(value))
            elif kind is Tensor and value.requires_grad and key not in noted:
                said.append(like(value))
                count += 1
            else:
                return -1
        elif kind is int or kind is bool:
            if not takes_sizes or value in SMALL:
                said.append(told_apart(value))
        elif kind is float or kind is str:
            said.append(told_apart(value))
        elif value is None:
            said.append(None)
        elif kind is tuple and not takes_sizes and are_axes(value):
            said.append(value)
        elif takes_sizes and kind in _SIZES and WHOLE.issuperset(map(type, value)):
            said.extend((OPEN, *[told_apart(size) for size in value if size in SMALL], CLOSE))
        else:
            return -1
    return count


_SIZES = frozenset({tuple, list, torch.Size})
