"""Who is who on the tape: parameters, weights derived from them, constants, and example data.

Example data is what nobody vouched for: everything that enters from outside, and whatever is computed from it. A tensor
counts as constant if it is a buffer, a frozen parameter or another tensor that a module holds, if it was made inside from
nothing (`arange`, `zeros`) or from constants alone, if it has no axes, if its first axis is 1 while other inputs' are longer, or if it was declared so. A
tensor computed from parameters and constants alone that carries gradient is a *derived weight*.

Taking a constant for example data leads to a refusal; taking example data for a constant leads to a derived weight, whose
gradients are exact too, only slower. Neither gives a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from .declared import constant, is_declared_constant
from .errors import StateWrite, UncoveredUse
from .functions import full_name
from .kept import Made, kept_from_earlier, kept_tensors
from .members import members_of
from .structure import tensors_in
from .weak import WeakTable

EXAMPLE, CONSTANT, TRACKED = 0, 1, 2
_RANDOM = 3  # a constant that is drawn anew in every step


STOOD_FOR: WeakTable[int] = WeakTable()  # numbers that stand in for others while a graph is traced, and the versions of those


@dataclass(frozen=True, slots=True, eq=False)
class Derived:
    """How a derived weight was made. `func` is None where it was changed in place afterwards."""

    func: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roots: frozenset[int]  # ids of the parameters it depends on


class Marks:
    """The marks of one tape. They hang on weak references: the id of a freed tensor is taken by the next one."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._members = members = members_of(modules)
        self.parameters, self.names, self.labels = members.parameters, members.names, members.labels
        self.state = members.state  # parameters and buffers: what is released with the model
        self._entries: WeakTable[Derived | int] = WeakTable()
        self.noted = self._entries.ids
        self._made_by_modules: WeakTable[bool] = WeakTable()  # constants that came up while a captured module ran; whether from nothing
        self.lenient = False  # what is not ours is nobody's business until the losses depend on it
        self.made: Made | None = None  # in the block of a training
        self.given: set[int] = set()  # ids of what the captured modules were called with
        self.foreign: set[int] = set()  # ids of trainable parameters that belong to no captured module
        self.doubts_numbers = False  # whether a number from outside may come from examples
        self.has_stale = False  # some module keeps examples of an earlier batch
        self.differentiates = False  # autograd was asked for gradients that can be differentiated again
        self.widest = 1  # longest first axis among the inputs
        self.derived_dtypes: set[torch.dtype] = set()
        for _, tensor in kept_tensors(modules):
            if kept_from_earlier(tensor) is not None:
                self.has_stale = True
            else:
                self._put(tensor, CONSTANT)

    def remember_constants(self) -> None:
        """Constants that a module made and kept somewhere (a cached table of positions) are constants in the next block too."""
        for tensor, _ in self._made_by_modules.items():
            if self._entries.get(tensor) == CONSTANT:
                constant(tensor)

    def refuse_stale(self, tensor: Tensor) -> None:
        """Refuse examples of an earlier batch: a record would get into later gradients, where nothing clips or counts it."""
        where = kept_from_earlier(tensor)
        if where is not None:
            raise StateWrite(
                f"{where} holds data of an earlier batch, and is used again.",
                "Start every batch from a fixed or learned state, or pass what belongs to an example along with that example.",
            )

    @cached_property
    def _state_storages(self) -> dict[int, str]:
        return self._members.storages()

    def name_of(self, value: Any) -> str | None:
        """The dotted name of a parameter or buffer."""
        if not isinstance(value, Tensor) or id(value) not in self.state:
            return None
        return self.names.get(id(value)) or self._state_storages.get(value.untyped_storage().data_ptr())

    def is_ours(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a parameter or buffer of the captured modules is among the arguments of a torch call."""
        return any(id(tensor) in self.state or self.derived(tensor) is not None for tensor in tensors_in([args, kwargs]))

    def names_of(self, weights: Iterable[Tensor]) -> list[str]:
        """The trainable parameters that these weights are, or are made of."""
        roots = {key for weight in weights for key in self.roots(weight)}
        return [self.names[key] for key in self.parameters if key in roots and self.parameters[key].requires_grad]

    def keys_of(self, weights: Iterable[Tensor]) -> list[int]:
        """Of the parameters that these weights are, or are made of; once for each weight."""
        return [key for weight in weights for key in ((id(weight),) if id(weight) in self.parameters else self.roots(weight))]

    def trainable(self) -> dict[str, Tensor]:
        return {self.names[key]: parameter for key, parameter in self.parameters.items() if parameter.requires_grad}

    def kind(self, tensor: Tensor) -> int:
        """EXAMPLE, CONSTANT or TRACKED (a trainable parameter or a derived weight)."""
        key = id(tensor)
        if key in self.state:
            return TRACKED if tensor.requires_grad else CONSTANT
        mark = self._entries.get(tensor)
        if mark is not None:
            if isinstance(mark, Derived):
                return TRACKED
            if mark == EXAMPLE:
                return EXAMPLE
            if tensor.requires_grad:  # a weight was written into it, or into a view of it
                self._put(tensor, Derived(None, (), {}, frozenset(self.parameters)))
                return TRACKED
            return CONSTANT
        if tensor.requires_grad:
            if type(tensor) is nn.Parameter and torch.is_grad_enabled():
                if not self.lenient:
                    raise foreign_parameter(tensor)
                self.foreign.add(id(tensor))
            return EXAMPLE
        return self._kind_from_outside(tensor)

    def varies(self, tensor: Tensor) -> bool:
        """Whether the values of `tensor` may differ from step to step: example data, or a random draw."""
        return self._entries.get(tensor) == _RANDOM or self.kind(tensor) == EXAMPLE

    def enters(self, tensors: Iterable[Tensor]) -> None:
        """These are handed to a captured module: example data, even if they were made from nothing inside the block."""
        given = list(tensors)
        self.given.update(map(id, given))
        for tensor in given:
            self.kind(tensor)  # notes how long the batch is
        for tensor in given:
            if self._entries.get(tensor) in (CONSTANT, _RANDOM):
                if self._kind_from_outside(tensor) == EXAMPLE:
                    self._put(tensor, EXAMPLE)
            elif _holds_integers(tensor) and self.kind(tensor) == EXAMPLE:
                self._put(tensor, EXAMPLE)

    def _kind_from_outside(self, tensor: Tensor) -> int:
        if is_declared_constant(tensor) or (tensor.dim() == 0 and not self.doubts_numbers):
            return CONSTANT
        if tensor.dim() == 0:
            return EXAMPLE
        length = tensor.shape[0]
        if length == 1:
            return CONSTANT if self.widest > 1 else EXAMPLE
        if length > self.widest:
            self.widest = length
        return EXAMPLE

    def derived(self, tensor: Tensor) -> Derived | None:
        mark = self._entries.get(tensor)
        return mark if isinstance(mark, Derived) else None

    def roots(self, tensor: Tensor) -> frozenset[int]:
        """Ids of the parameters that `tensor` is or depends on."""
        if id(tensor) in self.parameters:
            return frozenset([id(tensor)])
        derived = self.derived(tensor)
        return derived.roots if derived is not None else frozenset()

    def roots_in_order(self, weights: Iterable[Tensor]) -> list[int]:
        """Ids of the parameters that these weights are, or depend on, in the model's order: a set of ids has another one in every graph."""
        roots = frozenset().union(*map(self.roots, weights))
        return [key for key in self.parameters if key in roots]

    def _put(self, tensor: Tensor, mark: Derived | int) -> None:
        if id(tensor) not in self.state:
            self._entries.put(tensor, mark)

    def mark_constant(self, result: Any, *, random: bool = False, by_module: bool = False, from_nothing: bool = False) -> None:
        for tensor in tensors_in(result):
            self._put(tensor, _RANDOM if random else CONSTANT)
            if by_module:
                self._made_by_modules.put(tensor, from_nothing)

    def mark_example(self, result: Any) -> None:
        """Made from example data: what has no axes, a first axis of one, or integers could be taken for something else."""
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if not tensor.requires_grad and (tensor.dim() == 0 or tensor.shape[0] == 1 or _holds_integers(tensor)):
                self._put(tensor, EXAMPLE)

    def was_made_inside(self, tensor: Tensor) -> bool:
        """Whether it is a constant that a captured module has made in this pass, from nothing."""
        return self._made_by_modules.get(tensor) is True and self._entries.get(tensor) == CONSTANT

    def look_at(self, tensor: Tensor) -> None:
        """Example data whose memory may be somebody else's: what is done with it is looked at each time."""
        self._put(tensor, EXAMPLE)

    def is_foreign(self, tensor: Tensor) -> bool:
        """Whether these integers came from nowhere the tape has seen: neither an input of a module, nor made from one."""
        return _holds_integers(tensor) and self._entries.get(tensor) is None and id(tensor) not in self.state

    def version_of(self, number: Tensor) -> int:
        """Tells whether a buffer or frozen weight was changed: a coefficient that a schedule sets, an order of rows."""
        stood_for = STOOD_FOR.get(number)
        return (number._version if stood_for is None else stood_for) if id(number) in self.state else 0

    def name_of_storage(self, tensor: Tensor) -> str | None:
        """The parameter or buffer whose memory this is, or a part of."""
        if nn.parameter.is_lazy(tensor) or tensor.numel() == 0:
            return None
        return self._state_storages.get(tensor.untyped_storage().data_ptr()) or self.names.get(id(tensor))

    def mark_derived(
        self, result: Any, func: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any], tracked: list[Tensor]
    ) -> None:
        """`result` was computed from `tracked` and constants."""
        derived = None
        for tensor in tensors_in(result):
            if not tensor.requires_grad:
                self._put(tensor, CONSTANT)
            elif id(tensor) not in self.state and not any(tensor is source for source in tracked):
                if derived is None:
                    derived = Derived(func, args, kwargs, frozenset().union(*map(self.roots, tracked)))
                    self.derived_dtypes.add(tensor.dtype)
                self._put(tensor, derived)
                base = tensor._base
                if base is not None and id(base) not in self.state and self.derived(base) is None:
                    self._put(base, Derived(None, (), {}, derived.roots))  # a tensor that only exists inside the function

    def changed_in_place(self, target: Tensor, tracked: list[Tensor]) -> None:
        """`target` took in weights: how it was made says no longer what it is."""
        if not target.requires_grad or id(target) in self.state:
            return
        roots = frozenset().union(*map(self.roots, tracked), self.roots(target))
        self._put(target, Derived(None, (), {}, roots))
        if target._is_view() and target._base is not None:
            self._put(target._base, Derived(None, (), {}, roots))

    def took_example_data(self, target: Tensor, by: Callable[..., Any]) -> None:
        """Example data is about to be written into `target` by this function."""
        if target.numel() == 0:
            return
        storage, name = target.untyped_storage().data_ptr(), self.name_of_storage(target)
        if name is not None:
            raise _state_write(full_name(by), name)
        for other, mark in self._entries.items():
            if mark in (CONSTANT, _RANDOM) and other.numel() and other.untyped_storage().data_ptr() == storage:
                self._entries.put(other, EXAMPLE)

    def check_buffers(self) -> None:
        """Refuse if a buffer was replaced by a tensor made from example data."""
        for path, kind, buffers, name, before in self._members.buffers:
            now = buffers.get(name)
            if now is not None and now is not before and self.kind(now) == EXAMPLE:
                raise _state_write(f"{kind}.forward", path)

    def describe(self, tensors: Iterable[Tensor]) -> str:
        """Dotted names of the parameters behind `tensors`."""
        keys = frozenset().union(*map(self.roots, tensors))
        return ", ".join(sorted(self.names[key] for key in keys)) or "a derived weight"

    def where(self, tensors: Iterable[Tensor]) -> str:
        """` (in encoder.proj, a GatedLinear)` for the first parameter behind `tensors`."""
        for key in sorted(frozenset().union(*map(self.roots, tensors)), key=lambda key: self.names[key]):
            path, kind = self._members.owners[key]
            return f" (in {path or 'the model itself'}, {with_article(kind)})"
        return ""


def foreign_parameter(parameter: Tensor) -> UncoveredUse:
    return UncoveredUse(
        f"a trainable parameter of shape {tuple(parameter.shape)} is used that belongs to none of the captured modules.",
        "Capture its module too, capture([model, criterion]) or PrivateTraining([model, criterion], …), freeze it, or run that part under torch.no_grad().",
    )


def _holds_integers(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def with_article(name: str) -> str:
    """a Linear, an Embedding, an LSTM."""
    spelt_out = len(name) > 1 and name[:2].isupper()
    return f"{'an' if name[0] in ('AEFHILMNORSX' if spelt_out else 'AEIOaeio') else 'a'} {name}"


def _state_write(by: str, name: str) -> StateWrite:
    return StateWrite(
        f"{by} writes example data into {name}, which is released with the model.",
        "Switch that statistic off (track_running_stats=False, eval()), or compute it without the training records.",
    )
