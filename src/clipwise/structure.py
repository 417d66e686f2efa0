"""Tensors inside whatever people pass around: lists, dicts, named tuples, dataclasses, objects with attributes."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import lru_cache
from types import MappingProxyType, ModuleType
from typing import Any

import torch
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
    """`value` with every tensor replaced by function(tensor); `function` is asked about lists first and may answer for the whole list.

    Arrays of numpy's are tensors here.
    """
    if isinstance(value, Tensor):
        return function(value)
    if is_array(value):
        given = _as_tensor(value)
        found = function(given)
        return value if found is given else found.numpy().astype(value.dtype, copy=False)
    if not depth or not _is_container(value):
        return value
    if isinstance(value, list | tuple):
        answered = function(value)
        if answered is not value:
            return answered
        mapped = [map_tensors(item, function, depth - 1) for item in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if isinstance(value, deque):
        return deque((map_tensors(item, function, depth - 1) for item in value), value.maxlen)
    if isinstance(value, MappingProxyType):
        return MappingProxyType({name: map_tensors(item, function, depth - 1) for name, item in value.items()})
    if isinstance(value, dict):
        out = copy.copy(value)
        for name, item in value.items():
            out[name] = map_tensors(item, function, depth - 1)
        return out
    out = copy.copy(value)
    for name, item in _attributes(value).items():
        object.__setattr__(out, name, map_tensors(item, function, depth - 1))
    return out


def is_array(value: Any) -> bool:
    """Whether it is an array of numbers of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "fiub" and value.dtype.itemsize <= 8


def _as_tensor(array: Any) -> Tensor:
    """A copy that torch can read, whatever the array's layout, byte order and kind of integers."""
    kind = "int64" if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array.dtype.newbyteorder("=")
    return torch.from_numpy(sys.modules["numpy"].array(array, dtype=kind, order="C"))


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


_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, MappingProxyType)


def _is_container(value: Any) -> bool:
    if isinstance(value, (*_SEQUENCES, *_MAPPINGS)):
        return True
    if isinstance(value, type | nn.Module | Enum | ModuleType) or callable(value):
        return False
    kind: Any = type(value)
    return hasattr(value, "__dict__") or bool(_slots(kind))


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, _SEQUENCES):
        return value
    if isinstance(value, _MAPPINGS):
        return value.values()
    return _attributes(value).values() if _is_container(value) else ()


def _attributes(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    slots = {name: getattr(value, name) for name in _slots(kind) if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


@lru_cache(4096)
def _slots(kind: Any) -> tuple[str, ...]:
    """Names of slots of a class that was written in Python."""
    declared = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return tuple([name for name in names if not name.startswith("__")])
