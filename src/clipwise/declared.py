"""What only the caller can know of a tensor: that it carries no examples, or which example each of its rows belongs to."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_constants: dict[int, weakref.ref[Tensor]] = {}
_owners: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def constant(tensor: Tensor) -> Tensor:
    """Declare that `tensor` carries no examples: a shared mask, a table of prototypes. Returns the tensor itself."""
    key = id(tensor)
    _constants[key] = weakref.ref(tensor, lambda _: _constants.pop(key, None))
    return tensor


def is_declared_constant(tensor: Tensor) -> bool:
    declared = _constants.get(id(tensor))
    return declared is not None and declared() is tensor


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
    key = id(tensor)
    _owners[key] = (weakref.ref(tensor, lambda _: _owners.pop(key, None)), owner.detach().long().cpu())
    return tensor


def declared_owners(tensor: Tensor) -> Tensor | None:
    """(R,), if they were declared."""
    declared = _owners.get(id(tensor))
    return declared[1] if declared is not None and declared[0]() is tensor else None
