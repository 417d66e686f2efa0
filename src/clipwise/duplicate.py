"""Copies of modules as copy.deepcopy makes them, in a fraction of its time: a verification runs a model on twenty of them."""

from __future__ import annotations

import copy
import copyreg
import types
import weakref
from collections import OrderedDict
from functools import lru_cache
from typing import Any

from torch import nn

from .structure import PLAIN, holds_numbers_only

_SHARED = PLAIN | {
    bytes,
    complex,
    range,
    type,
    types.BuiltinFunctionType,
    types.FunctionType,
    weakref.ref,
    type(Ellipsis),
}  # as copy.deepcopy does
_OWN_WAYS = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def duplicate(value: Any, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy(value, memo): what `memo` has for the id of an object takes its place.

    Modules whose class leaves it to Python how they are copied, and the dicts that they hold, are copied here; all else by copy.deepcopy.
    """
    kind: Any = type(value)
    if kind in _SHARED:
        return value
    key = id(value)
    found = memo.get(key)
    if found is not None:
        return found
    if (kind is dict or (kind is OrderedDict and not vars(value))) and _SHARED.issuperset(map(type, value)):
        made = memo[key] = kind()
        for name, item in value.items():
            made[name] = item if type(item) in _SHARED else duplicate(item, memo)
        return made
    if kind is set and _SHARED.issuperset(map(type, value)):
        memo[key] = found = set(value)
        return found
    if kind is tuple and holds_numbers_only(value):
        return value
    if isinstance(value, nn.Module) and _is_plain(kind) and "__deepcopy__" not in vars(value):
        made = memo[key] = kind.__new__(kind)
        state = value.__getstate__()  # without what was compiled: that would run the original
        made.__setstate__({name: item if type(item) in _SHARED else duplicate(item, memo) for name, item in state.items()})
        return made
    return copy.deepcopy(value, memo)


@lru_cache(4096)
def _is_plain(kind: type) -> bool:
    """Whether modules of this class are copied by their attributes."""
    if kind in copyreg.dispatch_table or any(vars(each).get("__slots__") for each in kind.__mro__):
        return False
    return all(getattr(kind, way, None) is getattr(nn.Module, way, None) for way in _OWN_WAYS)
