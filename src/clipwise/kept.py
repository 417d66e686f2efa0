"""Tensors that are kept from one batch to the next: by modules without having registered them (ids of virtual tokens, caches, a state carried over), or by the
caller, who may have computed them from examples."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .declared import is_declared_constant
from .errors import StateWrite
from .inventory import named_modules
from .structure import PLAIN, holds_numbers_only, tensors_in
from .weak import WeakTable

_OWN = set(vars(nn.Module()))  # what every module has
_MOST = 4096
_DEPTH = 3
_earlier: WeakTable[str] = WeakTable()  # examples of an earlier batch, and where they are kept


def kept_tensors(modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) of every plain attribute, also inside lists and dicts."""
    for root in modules:
        for path, module in named_modules(root):
            attributes = module.__dict__
            names, values_of = _own(attributes)
            if _HARMLESS.issuperset(map(type, values_of(attributes))):
                continue  # numbers, words, configurations: what most modules hold
            for name in names:
                value = attributes[name]
                kind: Any = type(value)
                if kind in _HARMLESS or ((kind is tuple or kind is list) and holds_numbers_only(value)):
                    continue
                if _may_hold(kind):
                    for tensor in tensors_in(value, _DEPTH):
                        yield (f"{path}.{name}" if path else name), tensor
                elif len(_HARMLESS) < _MOST:
                    _HARMLESS.add(kind)


_HARMLESS: set[Any] = set(PLAIN)  # types of which no attribute holds a tensor that is looked for


def _may_hold(kind: type) -> bool:
    """Whether attributes of this type may hold tensors that are looked for."""
    return issubclass(kind, Tensor | list | tuple | dict | deque)


def own_names(attributes: dict[str, object]) -> tuple[str, ...]:
    """Of the attributes of a module, those that not every module has: a matter of names, which most modules have in common with others."""
    return _own(attributes)[0]


def _own(attributes: dict[str, object]) -> tuple[tuple[str, ...], Callable[[dict[str, object]], Any]]:
    """Those names, and what finds their values."""
    key = tuple(attributes)
    found = _NAMES.get(key)
    if found is None:
        names = tuple([name for name in key if name not in _OWN])
        if len(_NAMES) >= _MOST:
            _NAMES.clear()
        found = _NAMES[key] = (
            names,
            operator.itemgetter(*names, *names[:1]) if names else lambda attributes: (),
        )  # of one it would find no tuple
    return found


_NAMES: dict[tuple[str, ...], tuple[tuple[str, ...], Callable[[dict[str, object]], Any]]] = {}


def remember_examples(modules: Sequence[nn.Module], is_example: Callable[[Tensor], bool]) -> None:
    """At the end of a block: what was computed from examples and is still there belongs to this batch, and to no later one."""
    for name, tensor in kept_tensors(modules):
        if is_example(tensor):
            _earlier.put(tensor, name)


def kept_from_earlier(tensor: Tensor) -> str | None:
    """Where a tensor with examples of an earlier batch is kept, if it is one."""
    return _earlier.get(tensor)


class Age:
    """Of what one block of a training has computed."""

    is_over = False  # its losses were handed in: what is left of it belongs to an earlier batch


class Made:
    """What the blocks of one training have computed from its examples, without gradients, and when."""

    def __init__(self) -> None:
        self._ages: WeakTable[Age] = WeakTable()
        self.ids = self._ages.ids
        self.now = Age()  # of the block that is on

    def put(self, tensor: Tensor, age: Age) -> None:
        if not tensor.requires_grad:
            self._ages.put(tensor, age)

    def is_old(self, tensor: Tensor) -> bool:
        """Whether it was computed from the examples of a block that is over, and nobody vouched for it since."""
        age = self._ages.get(tensor)
        return age is not None and age is not self.now and age.is_over and not is_declared_constant(tensor)

    def age_of(self, dated: list[Tensor], touched: bool, overwritten: Any = None) -> Age | None:
        """Of what a call makes of tensors that were `dated` before: an earlier one, if any is; else the present one, if examples went in (`touched`: others than
        those). Of `overwritten` nothing is left."""
        found = self.now if touched else None
        for tensor in dated:
            if tensor is not overwritten:
                if self.is_old(tensor):
                    return self._ages.get(tensor)
                found = self.now
        return found

    def date(self, args: Any, result: Any, written: Any, age: Age, *, overwrites: bool) -> bool:
        """Note the age of what a call has made. Whether it has brought something of an earlier block together with what carries gradient."""
        is_old = age is not self.now
        for tensor in tensors_in(written) if written is not None else ():
            if is_old or overwrites or not self.is_old(tensor):
                self.put(tensor, age)
            if tensor._base is not None and (is_old or not self.is_old(tensor._base)):
                self.put(tensor._base, age)
        if written is None:
            for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
                if id(tensor) not in self.ids or not any(tensor is given for given in args):
                    self.put(tensor, age)
        return is_old and any(tensor.requires_grad for tensor in tensors_in([result, written]))


def carried(where: str) -> StateWrite:
    return StateWrite(
        f"the losses depend on a tensor that was computed from the examples of an earlier batch ({where}).",
        "Start every batch from fixed or learned values (no running statistics of features, no queue of earlier ones). If no record had a part in it, say so: "
        "clipwise.constant(tensor); if it is written anew in every step, zero_() it first.",
    )
