"""What a graph depends on besides its inputs: a graph is for one state of the model's modules, and for no other."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..block import OwnHook
from ..kept import own_names
from ..numerics import tf32_in_use
from ..structure import PLAIN, holds_numbers_only

_FEW = 256  # entries of a list or dict that are looked at one by one
_DEPTH = 3  # of lists and dicts inside each other

_OF_ALL_MODULES = [
    vars(nn.modules.module)[f"_global_{kind}_hooks"] for kind in ("forward_pre", "forward", "backward_pre", "backward")
]  # which torch calls for every module


class Same:
    """Equal to another if both are of one and the same object, which is still there: the id of one that is gone is the next one's.

    What can be is referred to weakly: a model may hold a tensor with all that it was computed from.
    """

    __slots__ = ("_hash", "_of", "_version")

    def __init__(self, value: Any):
        try:
            self._of: Any = weakref.ref(value)
        except TypeError:
            self._of = lambda: value
        self._hash = id(value)
        self._version = value._version if isinstance(value, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._hash != other._hash or self._version != other._version:
            return False
        mine = self._of()
        return mine is not None and mine is other._of()

    def __hash__(self) -> int:
        return self._hash


def signature_of(leaf: Any) -> Any:
    """What must be the same for a graph to take this argument; None for an object of which nobody knows when it changes."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return (type(leaf), leaf) if type(leaf) in PLAIN else None


def surroundings(modules: Iterable[nn.Module], overwritten: Collection[tuple[int, str]] = ()) -> tuple[Any, ...]:
    """Of modules that are told from others elsewhere, their modes, hooks and numbers, the tensors they keep, autocast and TF32. Asked for in every step.

    `overwritten`: (id of a module, name) of tensors that each forward pass puts there.
    """
    found: list[Any] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")]
    found += [torch.get_autocast_dtype("cuda"), *tf32_in_use()]
    for hooks in _OF_ALL_MODULES:
        if hooks:
            found.append(_hooks(hooks))
    for module in modules:
        attributes = module.__dict__
        names = own_names(attributes)
        found += [type(module), module.training, names]
        for name in names:
            value = attributes[name]
            kind = type(value)
            if kind in PLAIN or (kind is tuple and holds_numbers_only(value)):
                found.append(value)
            elif not overwritten or (id(module), name) not in overwritten:
                found.append(_value(value, _DEPTH))
        before, after = module._forward_pre_hooks, module._forward_hooks
        if before or after:
            found.append(_hooks(before, after))
        if module._backward_hooks or module._backward_pre_hooks:
            found.append(_hooks(module._backward_pre_hooks, module._backward_hooks))
    return tuple(found)


def _hooks(*kinds: dict[int, Any]) -> tuple[Any, ...]:
    """Those that are not ours, kind after kind."""
    return tuple(
        [Same(hook) if hook is not None else None for hooks in kinds for hook in (*hooks.values(), None) if type(hook) is not OwnHook]
    )


def _value(value: Any, depth: int) -> Any:
    if type(value) in PLAIN:
        return value
    if isinstance(value, numbers.Number | str):  # of numpy's, or of a class of the user's
        return type(value), value
    if isinstance(value, nn.Parameter | weakref.ref):
        return None  # part of the model's state, which is compared by itself
    if depth and isinstance(value, list | tuple) and len(value) <= _FEW:
        return tuple([_value(item, depth - 1) for item in value])
    if depth and isinstance(value, dict) and len(value) <= _FEW:
        return tuple([(_value(key, 0), _value(item, depth - 1)) for key, item in value.items()])
    return Same(value)
