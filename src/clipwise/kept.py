"""Tensors that modules keep without having registered them: ids of virtual tokens, caches, or a state carried over to the next batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

_OWN = set(vars(nn.Module()))  # what every module has
_DEPTH = 3
_earlier: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # examples of an earlier batch, and where they are kept


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every plain attribute, also inside lists and dicts."""
    for root in modules:
        for path, module in root.named_modules():
            for name, value in vars(module).items():
                if name not in _OWN:
                    for tensor in _inside(value, _DEPTH):
                        yield (f"{path}.{name}" if path else name), tensor


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, depth - 1)


def remember_examples(modules: Sequence[nn.Module], is_example: Callable[[Tensor], bool]) -> None:
    """At the end of a block: what was computed from examples and is still there belongs to this batch, and to no later one."""
    for name, tensor in kept_tensors(modules):
        if is_example(tensor):
            key = id(tensor)
            _earlier[key] = (weakref.ref(tensor, lambda _, key=key: _earlier.pop(key, None)), name)  # type: ignore[misc]


def kept_from_earlier(tensor: Tensor) -> str | None:
    """Where a tensor with examples of an earlier batch is kept, if it is one."""
    found = _earlier.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None
