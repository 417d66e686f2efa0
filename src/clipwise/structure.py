"""Tensors inside whatever people pass around: lists, dicts, named tuples, dataclasses, objects with attributes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

_DEPTH = 6


def every_tensor(value: Any, depth: int = _DEPTH) -> list[Tensor]:
    """The tensors in `value`, in a fixed order."""
    found: list[Tensor] = []
    _add_tensors(value, depth, found)
    return found


def _add_tensors(value: Any, depth: int, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif depth and type(value) not in PLAIN:
        for item in _items(value):
            _add_tensors(item, depth - 1, found)


def row_numbers(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors that say which rows belong to whom, in structures known to hold such: packed sequences."""
    if isinstance(value, PackedSequence):
        yield from (tensor for tensor in value[1:] if tensor is not None)
    elif depth:
        for item in _items(value):
            yield from row_numbers(item, depth - 1)


def map_tensors(value: Any, function: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """`value` with every tensor replaced by function(tensor); `function` is asked about lists first and may answer for the whole list."""
    if isinstance(value, Tensor):
        return function(value)
    if not depth or not _is_container(value):
        return value
    if isinstance(value, list | tuple):
        answered = function(value)
        if answered is not value:
            return answered
        mapped = [map_tensors(item, function, depth - 1) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, dict):
        out = copy.copy(value)
        for name, item in value.items():
            out[name] = map_tensors(item, function, depth - 1)
        return out
    out = copy.copy(value)
    for name, item in vars(value).items():
        object.__setattr__(out, name, map_tensors(item, function, depth - 1))
    return out


def tensors_in(value: Any, depth: int = -1) -> Iterator[Tensor]:
    """The tensors in lists, tuples and dicts: the arguments or the result of a torch call. A negative depth sets no limit."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) is not int:  # the sizes and strides that most tuples hold
                yield from tensors_in(item, depth - 1)


_NUMBERS = frozenset({int, bool, float, type(None)})
PLAIN = _NUMBERS | {str}


def holds_numbers_only(values: list[Any] | tuple[Any, ...]) -> bool:
    """Strides, sizes, paddings: what most tuples among the arguments of a torch call are."""
    return _NUMBERS.issuperset(map(type, values))


def map_values(value: Any, function: Callable[[Any], Any]) -> Any:
    """`value` with every entry that is no list or tuple replaced by function(entry): the arguments of a torch call."""
    if isinstance(value, list):
        return [map_values(item, function) for item in value]
    return tuple([map_values(item, function) for item in value]) if isinstance(value, tuple) else function(value)


def _is_container(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, type | nn.Module | Enum | ModuleType) and not callable(value)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict):
        return value.values()
    return vars(value).values() if _is_container(value) else ()
