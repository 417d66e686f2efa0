"""What a graph depends on besides its inputs: a graph is for one state of the model's modules, and for no other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..kept import own_attributes
from ..numerics import tf32_in_use
from ..weak import serial_of

_PLAIN = {int, float, bool, str, type(None)}
_FEW = 64  # entries of a list that are looked at one by one


def signature_of(leaf: Any) -> Any:
    """What must be the same for a graph to take this argument; None for an object of which nobody knows when it changes."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return (type(leaf), leaf) if type(leaf) in _PLAIN else None


def surroundings(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Modules (all of them), their modes, hooks and numbers, the tensors they keep, autocast and TF32."""
    autocast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    return tuple(map(_of, modules)), *autocast, tf32_in_use()


def _of(module: nn.Module) -> tuple[Any, ...]:
    hooks = *map(id, module._forward_pre_hooks.values()), None, *map(id, module._forward_hooks.values())
    values = tuple([(name, value if type(value) in _PLAIN else _value(value)) for name, value in own_attributes(module)])
    return serial_of(module), module.training, hooks, values


def _value(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple) and len(value) <= _FEW:
        return tuple([_value(item) for item in value])
    if isinstance(value, nn.Parameter | weakref.ref):
        return None  # part of the model's state, which is compared by itself
    return (id(value), value._version) if isinstance(value, Tensor) else id(value)
