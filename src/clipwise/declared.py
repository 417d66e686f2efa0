"""What only the caller can know of a tensor: that it carries no examples, or which example each of its rows belongs to."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from .weak import WeakTable

_constants: WeakTable[bool] = WeakTable()
_owners: WeakTable[Tensor] = WeakTable()


def constant(tensor: Tensor) -> Tensor:
    """Declare that `tensor` carries no examples: a shared mask, a table of prototypes. Returns the tensor itself."""
    _constants.put(tensor, True)
    inside = _declared_inside.get()
    if inside is not None and type(tensor) is Tensor:  # no stand-in that holds no numbers
        inside.append(tensor)
    return tensor


_declared_inside: ContextVar[list[Tensor] | None] = ContextVar("clipwise_declared_inside", default=None)


@contextlib.contextmanager
def noting_declarations() -> Iterator[list[Tensor]]:
    """What is declared a constant inside this block."""
    found: list[Tensor] = []
    token = _declared_inside.set(found)
    try:
        yield found
    finally:
        _declared_inside.reset(token)


def is_declared_constant(tensor: Tensor) -> bool:
    return _constants.get(tensor) is not None


def owners(tensor: Tensor, owner: Tensor) -> Tensor:
    """Declare which example each row of an input belongs to, where an example has no fixed number of rows: nodes of graphs,
    records of users, tokens without padding. Returns the tensor itself.

    owner: (len(tensor),) integers, the place of the example in `losses`; -1 for a row that belongs to nobody. Where the
    rows meet a weight, their owners are measured and need not be declared; this tells the tests for mixing, which exchange
    whole examples, what an example is.

        model(clipwise.owners(nodes, graph_of_node), edges, graph_of_node)
    """
    if owner.dim() != 1 or not tensor.dim() or len(owner) != len(tensor) or owner.is_floating_point() or owner.dtype == torch.bool:
        raise ValueError(
            f"owners must be a vector of integers, one for each of the {len(tensor) if tensor.dim() else 1} rows, got a {owner.dtype} tensor "
            f"of shape {tuple(owner.shape)}"
        )
    _owners.put(tensor, owner.detach().long().cpu())
    return tensor


def declared_owners(tensor: Tensor) -> Tensor | None:
    """(R,), if they were declared."""
    return _owners.get(tensor)
