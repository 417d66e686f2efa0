"""A table from tensors to values that keeps no tensor alive, and makes no cycle; and numbers of modules that keep none alive."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

from torch import Tensor, nn

_V = TypeVar("_V")


class _Key(weakref.ref[Tensor]):
    """A weak reference that remembers the id of its tensor."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, tensor: Tensor, callback: Callable[[_Key], None]) -> _Key:
        self = super().__new__(cls, tensor, callback)
        self.key = id(tensor)
        return self


class WeakTable(Generic[_V]):
    """{tensor: value} by identity. The id of a freed tensor is taken by the next one, so an entry goes with its tensor.

    The callback that removes it holds the table weakly too: a cycle would keep a graph alive until someone collects garbage.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[_Key, _V]] = {}
        owner = weakref.ref(self)

        def forget(ref: _Key) -> None:
            table = owner()
            entry = table._entries.get(ref.key) if table is not None else None
            if table is not None and entry is not None and entry[0] is ref:
                del table._entries[ref.key]

        self._forget = forget

    @property
    def ids(self) -> Collection[int]:
        """Of the tensors that have an entry, at every time."""
        return self._entries.keys()

    def put(self, tensor: Tensor, value: _V) -> None:
        self._entries[id(tensor)] = (_Key(tensor, self._forget), value)

    def get(self, tensor: Tensor) -> _V | None:
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def items(self) -> Iterator[tuple[Tensor, _V]]:
        """Those that are still there."""
        for ref, value in list(self._entries.values()):
            tensor = ref()
            if tensor is not None:
                yield tensor, value


_serials: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()


def serial_of(module: nn.Module) -> int:
    """A number that no other module has, nor will have: one that takes another's place is told from it."""
    return _serials.setdefault(module, next(_counter))
