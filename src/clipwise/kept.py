"""Tensors that modules keep without having registered them: ids of virtual tokens, caches, or a state carried over to the next batch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .inventory import named_modules
from .structure import PLAIN, holds_numbers_only, tensors_in
from .weak import WeakTable

_OWN = set(vars(nn.Module()))  # what every module has
_MOST = 4096
_DEPTH = 3
_earlier: WeakTable[str] = WeakTable()  # examples of an earlier batch, and where they are kept


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every plain attribute, also inside lists and dicts."""
    for root in modules:
        for path, module in named_modules(root):
            attributes = module.__dict__
            names, values_of = _own(attributes)
            if _HARMLESS.issuperset(map(type, values_of(attributes))):
                continue  # numbers, words, configurations: what most modules hold
            for name in names:
                value = attributes[name]
                kind: Any = type(value)
                if kind in _HARMLESS or ((kind is tuple or kind is list) and holds_numbers_only(value)):
                    continue
                if _may_hold(kind):
                    for tensor in tensors_in(value, _DEPTH):
                        yield (f"{path}.{name}" if path else name), tensor
                elif len(_HARMLESS) < _MOST:
                    _HARMLESS.add(kind)


_HARMLESS: set[Any] = set(PLAIN)  # types of which no attribute holds a tensor that is looked for


def _may_hold(kind: type) -> bool:
    """Whether attributes of this type may hold tensors that are looked for."""
    return issubclass(kind, Tensor | list | tuple | dict)


def own_names(attributes: dict[str, object]) -> tuple[str, ...]:
    """Of the attributes of a module, those that not every module has: a matter of names, which most modules have in common with others."""
    return _own(attributes)[0]


def _own(attributes: dict[str, object]) -> tuple[tuple[str, ...], Callable[[dict[str, object]], Any]]:
    """Those names, and what finds their values."""
    key = tuple(attributes)
    found = _NAMES.get(key)
    if found is None:
        names = tuple([name for name in key if name not in _OWN])
        if len(_NAMES) >= _MOST:
            _NAMES.clear()
        found = _NAMES[key] = (
            names,
            operator.itemgetter(*names, *names[:1]) if names else lambda attributes: (),
        )  # of one it would find no tuple
    return found


_NAMES: dict[tuple[str, ...], tuple[tuple[str, ...], Callable[[dict[str, object]], Any]]] = {}


def remember_examples(modules: Sequence[nn.Module], is_example: Callable[[Tensor], bool]) -> None:
    """At the end of a block: what was computed from examples and is still there belongs to this batch, and to no later one."""
    for name, tensor in kept_tensors(modules):
        if is_example(tensor):
            _earlier.put(tensor, name)


def kept_from_earlier(tensor: Tensor) -> str | None:
    """Where a tensor with examples of an earlier batch is kept, if it is one."""
    return _earlier.get(tensor)
