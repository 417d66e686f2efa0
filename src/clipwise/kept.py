"""Tensors that modules keep without having registered them: ids of virtual tokens, caches, or a state carried over to the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from .inventory import named_modules
from .structure import tensors_in
from .weak import WeakTable

_OWN = set(vars(nn.Module()))  # what every module has
_HOLDS_NO_TENSOR = {int, float, bool, str, type(None)}
_DEPTH = 3
_earlier: WeakTable[str] = WeakTable()  # examples of an earlier batch, and where they are kept


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every plain attribute, also inside lists and dicts."""
    for root in modules:
        for path, module in named_modules(root):
            for name, value in own_attributes(module):
                if type(value) not in _HOLDS_NO_TENSOR:
                    for tensor in tensors_in(value, _DEPTH):
                        yield (f"{path}.{name}" if path else name), tensor


def own_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Those that not every module has."""
    attributes = vars(module)
    return [(name, attributes[name]) for name in attributes.keys() - _OWN]


def remember_examples(modules: Sequence[nn.Module], is_example: Callable[[Tensor], bool]) -> None:
    """At the end of a block: what was computed from examples and is still there belongs to this batch, and to no later one."""
    for name, tensor in kept_tensors(modules):
        if is_example(tensor):
            _earlier.put(tensor, name)


def kept_from_earlier(tensor: Tensor) -> str | None:
    """Where a tensor with examples of an earlier batch is kept, if it is one."""
    return _earlier.get(tensor)
