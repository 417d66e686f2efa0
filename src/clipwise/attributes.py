"""What modules hold besides parameters, buffers and modules below them: when it is the same, and put back after forward passes that do not count."""

from __future__ import annotations

import contextlib
import copy
import numbers
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn

from .kept import own_names
from .structure import PLAIN, holds_numbers_only

_DEPTH = 3  # of lists and dicts inside each other
_FEW = {_DEPTH: 256}  # entries of one that are looked at one by one …
_FEW_INSIDE = 32  # … inside another
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MISSING: Any = object()


_TOLD_BY_VALUE = {torch.device, torch.dtype, torch.Size}


def is_short(value: Sized, depth: int) -> bool:
    """Whether its entries are looked at."""
    return len(value) <= _FEW.get(depth, _FEW_INSIDE)


class Same:
    """Equal to another if both are of one and the same object, which is still there: the id of one that is gone is the next one's.

    What can be is referred to weakly: a model may hold a tensor with all that it was computed from.
    """

    __slots__ = ("_hash", "_of", "_version")

    def __init__(self, value: Any):
        try:
            self._of: Any = weakref.ref(value)
        except TypeError:
            self._of = lambda: value
        self._hash = id(value)
        self._version = value._version if isinstance(value, Tensor) and not value.is_inference() else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._hash != other._hash or self._version != other._version:
            return False
        mine = self._of()
        return mine is not None and mine is other._of()

    def __hash__(self) -> int:
        return self._hash

    @property
    def value(self) -> Any:
        """None where it is gone."""
        return self._of()


_YES, _NO, _NOT_A_NUMBER = object(), object(), object()
_INTEGERS = frozenset({int})


def told(value: Any) -> Any:
    """A number or a word as what is equal to no other: True is not 1, nor is 1.0; and what is not a number is the same as ever."""
    kind = type(value)
    if kind is bool:
        return _YES if value else _NO
    if kind is float:
        return (value,) if value == value else _NOT_A_NUMBER
    return value


def essence(value: Any, *, tensors: bool = True, depth: int = _DEPTH) -> Any:
    """What can be compared and hashed in place of a value: numbers and words as they are, lists and dicts by their entries, anything else by who it is.
    Without `tensors` one is as good as another."""
    kind = type(value)
    if kind in PLAIN:
        return told(value)
    if kind in _TOLD_BY_VALUE or (kind is tuple and is_short(value, depth) and _INTEGERS.issuperset(map(type, value))):
        return value
    if isinstance(value, nn.Parameter):
        return None  # part of the model's state, which is compared by itself
    if isinstance(value, Tensor):
        return Same(value) if tensors else Tensor
    if isinstance(value, weakref.ref):
        return essence(value(), tensors=tensors, depth=0)
    if isinstance(value, numbers.Number | str) and kind.__hash__ is not None:  # of numpy's, or of a class of the user's
        return kind, value if value == value else _NOT_A_NUMBER
    if depth and isinstance(value, _CONTAINERS) and is_short(value, depth):
        if isinstance(value, dict):
            return tuple([(essence(key, depth=0), essence(item, tensors=tensors, depth=depth - 1)) for key, item in value.items()])
        found = [essence(item, tensors=tensors, depth=depth - 1) for item in value]
        return frozenset(found) if isinstance(value, set | frozenset) else tuple(found)
    return Same(value)


class Attributes:
    """Of some modules, as they are now. Lists, dicts and sets that modules hold are taken down with their entries."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._before = []
        self._entries: list[tuple[Any, Any]] = []  # a list or dict, and what was in it
        for module in modules:
            held = {name: vars(module)[name] for name in (*own_names(vars(module)), "training") if name in vars(module)}
            self._before.append((module, {name: (value, essence(value), essence(value, tensors=False)) for name, value in held.items()}))
            for value in held.values():
                self._take_down(value, _DEPTH)

    def _take_down(self, value: Any, depth: int) -> None:
        if (
            not depth
            or not isinstance(value, _CONTAINERS)
            or not is_short(value, depth)
            or (type(value) is tuple and holds_numbers_only(value))
        ):
            return
        if not isinstance(value, tuple | frozenset):
            self._entries.append((value, copy.copy(value)))
        for item in value.values() if isinstance(value, dict) else value:
            self._take_down(item, depth - 1)

    def put_back(self) -> tuple[list[tuple[nn.Module, str]], list[tuple[nn.Module, str, Any]]]:
        """Undo what has changed. Returns where: what tells one step from the next; and where nothing but tensors took the place of others, with what was there."""
        changed: list[tuple[nn.Module, str]] = []
        tensors: list[tuple[nn.Module, str, Any]] = []
        for module, values in self._before:
            attributes = vars(module)
            for name in {**values, **dict.fromkeys(own_names(attributes))}:
                before, whole, without_tensors = values.get(name, (_MISSING, None, None))
                now = attributes.get(name, _MISSING)
                if now is not _MISSING and before is not _MISSING and essence(now) == whole:
                    continue
                is_new_tensor = isinstance(now, Tensor) and (before is _MISSING or before is None)
                if is_new_tensor or (now is not _MISSING and before is not _MISSING and essence(now, tensors=False) == without_tensors):
                    tensors.append((module, name, before))
                else:
                    changed.append((module, name))
                if before is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = before
        for held, earlier in self._entries:
            if essence(held, depth=1) != essence(earlier, depth=1):
                held.clear()
                (held.extend if isinstance(held, list | deque) else held.update)(earlier)
        return changed, tensors


@contextlib.contextmanager
def attributes_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Whatever forward passes inside this block leave in attributes of these modules is undone."""
    attributes = Attributes(modules)
    try:
        yield
    finally:
        attributes.put_back()


def names_of(changed: Iterable[tuple[nn.Module, str]]) -> str:
    """`calls and log of Net`"""
    names: dict[str, list[str]] = {}
    for module, name in changed:
        names.setdefault(type(module).__name__, []).append(name)
    return "; ".join(f"{' and '.join(dict.fromkeys(found))} of {module}" for module, found in names.items())
