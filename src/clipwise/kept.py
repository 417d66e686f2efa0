"""Tensors that modules keep without having registered them: ids of virtual tokens, caches, or a state carried over to the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from .inventory import named_modules
from .structure import tensors_in
from .weak import WeakTable

_OWN = set(vars(nn.Module()))  # what every module has
_MOST = 4096
_seen: dict[tuple[object, ...], list[str]] = {}
_own_names: dict[tuple[str, ...], tuple[str, ...]] = {}
_DEPTH = 3
_earlier: WeakTable[str] = WeakTable()  # examples of an earlier batch, and where they are kept


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every plain attribute, also inside lists and dicts."""
    for root in modules:
        for path, module in named_modules(root):
            attributes = vars(module)
            for name in _may_hold(attributes):
                for tensor in tensors_in(attributes[name], _DEPTH):
                    yield (f"{path}.{name}" if path else name), tensor


def _may_hold(attributes: dict[str, object]) -> list[str]:
    """Names of those that may hold tensors: a matter of names and types, which most modules have in common, with themselves a step before at least."""
    key = (*attributes, *map(type, attributes.values()))
    names = _seen.get(key)
    if names is None:
        if len(_seen) > _MOST:
            _seen.clear()
        own = attributes.keys() - _OWN
        names = _seen[key] = [name for name in attributes if name in own and isinstance(attributes[name], Tensor | list | tuple | dict)]
    return names


def own_names(attributes: dict[str, object]) -> tuple[str, ...]:
    """Of the attributes of a module, those that not every module has."""
    key = tuple(attributes)
    names = _own_names.get(key)
    if names is None:
        if len(_own_names) > _MOST:
            _own_names.clear()
        names = _own_names[key] = tuple([name for name in key if name not in _OWN])
    return names


def remember_examples(modules: Sequence[nn.Module], is_example: Callable[[Tensor], bool]) -> None:
    """At the end of a block: what was computed from examples and is still there belongs to this batch, and to no later one."""
    for name, tensor in kept_tensors(modules):
        if is_example(tensor):
            _earlier.put(tensor, name)


def kept_from_earlier(tensor: Tensor) -> str | None:
    """Where a tensor with examples of an earlier batch is kept, if it is one."""
    return _earlier.get(tensor)
