"""What a graph depends on besides its inputs: a graph is for one state of the model's modules, and for no other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kept import own_names
from ..numerics import tf32_in_use
from ..structure import PLAIN

_FEW = 64  # entries of a list that are looked at one by one


def signature_of(leaf: Any) -> Any:
    """What must be the same for a graph to take this argument; None for an object of which nobody knows when it changes."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return (type(leaf), leaf) if type(leaf) in PLAIN else None


def surroundings(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Of modules that are told from others elsewhere, their modes, hooks and numbers, the tensors they keep, autocast and TF32. Asked for in every step."""
    found: list[Any] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")]
    found += [torch.get_autocast_dtype("cuda"), *tf32_in_use()]
    for module in modules:
        attributes = module.__dict__
        names = own_names(attributes)
        found += [module.training, names]
        for name in names:
            value = attributes[name]
            found.append(value if type(value) in PLAIN else _value(value))
        before, after = module._forward_pre_hooks, module._forward_hooks
        if before or after:
            found.append((*map(id, before.values()), None, *map(id, after.values())))
    return tuple(found)


def _value(value: Any) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, list | tuple) and len(value) <= _FEW:
        return tuple([_value(item) for item in value])
    if isinstance(value, nn.Parameter | weakref.ref):
        return None  # part of the model's state, which is compared by itself
    return (id(value), value._version) if isinstance(value, Tensor) else id(value)
