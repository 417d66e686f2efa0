"""What modules hold besides parameters, buffers and modules below them: taken down before a forward pass that does not count, and put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from .kept import own_names
from .structure import PLAIN

_MISSING: Any = object()


class Attributes:
    """Of some modules, as they are now. Lists, dicts and sets that modules hold are taken down with their entries."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._before = [
            (module, {name: vars(module)[name] for name in (*own_names(vars(module)), "training") if name in vars(module)})
            for module in modules
        ]
        self._entries = [(held, held.copy()) for _, values in self._before for held in values.values() if type(held) in (list, dict, set)]

    def put_back(self) -> tuple[list[tuple[nn.Module, str]], list[tuple[nn.Module, str]]]:
        """Undo what has changed. Returns where: what tells one step from the next, and tensors that were put in the place of others."""
        entries_of = {id(held): (held, before) for held, before in self._entries}
        changed: list[tuple[nn.Module, str]] = []
        tensors: list[tuple[nn.Module, str]] = []
        for module, values in self._before:
            attributes = vars(module)
            for name in {**values, **dict.fromkeys(own_names(attributes))}:
                before, now = values.get(name, _MISSING), attributes.get(name, _MISSING)
                held, earlier = entries_of.get(id(before), (None, None))
                if _is_same(before, now) and (held is None or _same_entries(held, earlier)):
                    continue
                are_tensors = isinstance(now, Tensor) and (before is _MISSING or before is None or isinstance(before, Tensor))
                (tensors if are_tensors else changed).append((module, name))
                if held is not None:
                    _put_entries_back(held, earlier)
                if before is _MISSING:
                    del attributes[name]
                else:
                    attributes[name] = before
        return changed, tensors


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in PLAIN and a == b)


def _same_entries(a: Any, b: Any) -> bool:
    if isinstance(a, set) or len(a) != len(b):
        return bool(a == b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_is_same, a.values(), b.values()))
    return all(map(_is_same, a, b))


def _put_entries_back(held: Any, before: Any) -> None:
    held.clear()
    if isinstance(held, list):
        held.extend(before)
    else:
        held.update(before)


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
