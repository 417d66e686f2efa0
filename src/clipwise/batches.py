"""Batches as loaders hand them out: tensors and lists of examples inside tuples, dicts and the like."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .counts import check_count
from .structure import every_tensor


def microbatches(batch: Any, size: int) -> Iterator[Any]:
    """Split a batch into parts of at most `size` examples, whatever it is made of; an empty batch is one empty part.

    Tensors and lists as long as the batch are cut along their first axis, everything else goes with every part.

        for batch in private.loader(data):
            for x, y in clipwise.microbatches(batch, 64):
                private.loss(F.cross_entropy(model(x), y, reduction="none")).backward()
            optimizer.step(); optimizer.zero_grad()
    """
    check_count(size, "the size of a microbatch")
    rows = count_rows(batch)
    for start in range(0, max(rows, 1), size):
        yield _cut(batch, rows, lambda value: value[start : start + size])


def without_rows(batch: Any) -> Any:
    """The same kind of batch with no example in it."""
    return _cut(batch, count_rows(batch), lambda value: value[:0])


def count_rows(batch: Any) -> int:
    """How long the first tensor with an axis is; without one, the first list."""
    for tensor in every_tensor(batch):
        if tensor.dim():
            return len(tensor)
    for value in _lists(batch):
        return len(value)
    raise TypeError(f"a batch needs a tensor or a list of examples, got {type(batch).__name__}")


def _lists(value: Any) -> Iterator[list[Any]]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _lists(item)
    elif isinstance(value, list | tuple):
        if not any(isinstance(item, list | tuple | Mapping) for item in value):
            yield list(value)
        for item in value:
            yield from _lists(item)


def _cut(value: Any, rows: int, part: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return part(value) if value.dim() and len(value) == rows else value
    if isinstance(value, PackedSequence):
        raise TypeError("a packed sequence cannot be cut into microbatches: cut first, pack then")
    if isinstance(value, Mapping):
        out = copy.copy(value)
        for name in value:
            out[name] = _cut(value[name], rows, part)  # type: ignore[index]
        return out
    if isinstance(value, list | tuple):
        holds_batches = any(isinstance(item, Tensor) and item.dim() and len(item) == rows for item in value)
        holds_batches = holds_batches or any(isinstance(item, Mapping | list | tuple) and len(item) == rows for item in value)
        if len(value) == rows and not holds_batches:
            return part(value)
        cut = [_cut(item, rows, part) for item in value]
        return type(value)(*cut) if hasattr(value, "_fields") else type(value)(cut)
    if hasattr(value, "__dict__") and any(True for _ in every_tensor(value)):
        out = copy.copy(value)
        for name, item in vars(value).items():
            object.__setattr__(out, name, _cut(item, rows, part))
        return out
    return value
