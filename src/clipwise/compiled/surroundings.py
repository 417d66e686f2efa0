"""What a graph depends on besides its inputs: a graph is for one state of the model's modules, and for no other."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..attributes import Same, essence, told
from ..block import OwnHook
from ..kept import own_names
from ..numerics import tf32_in_use
from ..structure import PLAIN
from ..weak import serial_of

_OF_ALL_MODULES = [
    vars(nn.modules.module)[f"_global_{kind}_hooks"] for kind in ("forward_pre", "forward", "backward_pre", "backward")
]  # which torch calls for every module


def signature_of(leaf: Any) -> Any:
    """What must be the same for a graph to take this argument; None for an object of which nobody knows when it changes."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    return (type(leaf), told(leaf)) if type(leaf) in PLAIN else None


def surroundings(modules: Iterable[nn.Module], overwritten: Collection[tuple[int, str]] = ()) -> tuple[Any, ...]:
    """Of modules that are told from others elsewhere, their modes, hooks and numbers, the tensors they keep, autocast and TF32. Asked for in every step.

    `overwritten`: (number of a module, name) of tensors that each forward pass puts there.
    """
    found: list[Any] = [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cuda")]
    found += [torch.get_autocast_dtype("cuda"), *tf32_in_use()]
    for hooks in _OF_ALL_MODULES:
        if hooks:
            found.append(_hooks(hooks))
    for module in modules:
        attributes = module.__dict__
        names = own_names(attributes)
        found += [type(module), type(module).forward, module.training, names]
        for name in names:
            value = attributes[name]
            if type(value) in PLAIN:
                found.append(told(value))
            else:
                found.append(essence(value, tensors=not overwritten or (serial_of(module), name) not in overwritten))
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
