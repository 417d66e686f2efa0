"""The two extension points: a *rule* (call → factors) and a *rewrite* (call → simpler calls that have rules)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .factors import Factor
from .functions import full_name
from .layout import to_rows
from .structure import holds_numbers_only, map_values, tensors_in

Function = Callable[..., Any]
Factors = dict[Tensor, Factor]
_F = TypeVar("_F", bound=Function)


class Use:
    """A call of a torch function that was handed trainable weights together with example data."""

    __slots__ = ("__weakref__", "args", "func", "kwargs", "tracked")

    def __init__(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], tracked: list[Tensor]):
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.tracked = tracked

    @property
    def values(self) -> tuple[Any, ...]:
        """The arguments, positional ones first."""
        return (*self.args, *self.kwargs.values()) if self.kwargs else self.args

    def bind(self, *names: str, **defaults: Any) -> list[Any]:
        """The arguments by name, in this order; positional or not, None or the default where absent."""
        given = list(self.args[: len(names)])
        for name in names[len(given) :]:
            given.append(self.kwargs.get(name, defaults.get(name)))
        return given

    def operands(self, *names: str) -> list[Any]:
        """Arguments that several functions call by different names: positional ones first, then those with one of these names."""
        return [*self.args, *(self.kwargs[name] for name in names if name in self.kwargs)]

    def mapped(self, function: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with every value, also inside lists and tuples, put through `function`."""
        args = [map_values(value, function) if isinstance(value, list | tuple) else function(value) for value in self.args]
        return tuple(args), {name: map_values(value, function) for name, value in self.kwargs.items()} if self.kwargs else {}

    def with_others(self, function: Callable[[Tensor], Any]) -> Use:
        """The same call with function(tensor) in place of every tensor that is none of the trainable weights, also inside lists and tuples."""
        args, kwargs = list(self.args), self.kwargs
        for place, value in enumerate(args):
            if isinstance(value, Tensor):
                if not self.tracks(value):
                    args[place] = function(value)
            elif isinstance(value, list | tuple) and not holds_numbers_only(value):
                args[place] = map_values(value, self._on_others(function))
        if kwargs:
            kwargs = {name: map_values(value, self._on_others(function)) for name, value in kwargs.items()}
        return Use(self.func, tuple(args), kwargs, self.tracked)

    def _on_others(self, function: Callable[[Tensor], Any]) -> Callable[[Any], Any]:
        return lambda value: function(value) if isinstance(value, Tensor) and not self.tracks(value) else value

    def tracks(self, value: Any) -> bool:
        """Whether `value` is one of the trainable weights of this call."""
        return id(value) in map(id, self.tracked)

    def upstream(self) -> list[Any]:
        """The autograd nodes that made the example data the call is handed (asked before the call, which may change it in place)."""
        nodes: list[Any] = []
        for value in self.values:
            if isinstance(value, Tensor):
                if value.requires_grad and not self.tracks(value):
                    nodes.append(value.grad_fn)
            elif isinstance(value, list | tuple) and not holds_numbers_only(value):
                nodes += [t.grad_fn for t in tensors_in(value) if t.requires_grad and not self.tracks(t)]
        return nodes


class Call(Use):
    """A use seen again in the backward pass, with rows first.

    `output_grad` has the axis (or axes) that number rows moved to the front; so has every tensor argument that holds
    example data and has those axes too. Weights are as they were. A rule returns the factor of each tracked weight, with
    one gradient a row; which rows belong to which example is not its business.
    """

    def __init__(self, use: Use, output_grad: Tensor, axes: tuple[int, ...], example_data: Iterable[Tensor]):
        shape = output_grad.shape
        example_ids = {id(tensor) for tensor in example_data}

        def rows_first(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) not in example_ids:
                return value
            if not all(axis < value.dim() and value.shape[axis] == shape[axis] for axis in axes):
                return value
            return to_rows(value, axes)

        args, kwargs = (use.args, use.kwargs) if axes == (0,) else use.mapped(rows_first)
        super().__init__(use.func, args, kwargs, use.tracked)
        self.original = use  # as it was called
        self.output_grad = to_rows(output_grad, axes)
        self.axes = axes
        self.output_shape = shape


RowAxes = Callable[[Use, int], tuple[int, ...]]  # (call, number of axes of its output) → axes that may number rows
Reads = Callable[[Use], Iterable[Tensor]]


@dataclass(frozen=True)
class Rule:
    """How the factors of a call are made. `row_axes`: axes of the output that may number rows. `reads`: arguments `factors` needs."""

    factors: Callable[[Call], Factors]
    row_axes: RowAxes
    reads: Reads | None = None
    trusted: bool = False  # one of ours, tested against a float64 loop
    is_product: bool = False  # autocast rounds its arguments
    known_by: int = 1  # the place of the weight by which a layer's calls are found again


Spread = Callable[[Use, Callable[[Tensor, torch.Size | None], Tensor]], tuple[tuple[Any, ...], dict[str, Any]] | None]

RULES: dict[Function, Rule] = {}
REWRITES: dict[Function, Function] = {}
SPREADS: dict[Function, Spread] = {}
INSIDE: dict[Function, Callable[[Any, Use], Any]] = {}  # functions that run another way under the tape: (watch, use) → result


def all_but_last(count: int) -> RowAxes:
    return lambda use, dims: tuple(range(dims - count))


def rule(*functions: Function, features: int = 1, replace: bool = False) -> Callable[[_F], _F]:
    """Register how a torch function's weights get their per-example gradients.

    The decorated function takes a `Call` and returns {weight: factor}. `features` is the number of trailing axes of the
    output that belong to one row (1 for `linear`, 3 for `conv2d`). On first use the factors are compared with autograd's
    own gradient, so a wrong rule is refused, not believed. A function that clipwise covers itself needs `replace=True`.

        @clipwise.rule(my_function)
        def my_rule(call):
            return {call.args[1]: clipwise.Outer(call.output_grad, call.args[0])}
    """
    covered = [function for function in functions if function in REWRITES or function in SPREADS or function in RULES]
    if covered and not replace:
        raise ValueError(f"{', '.join(map(full_name, covered))} is covered already; pass replace=True to use your own rule instead")
    return _register(functions, partial(Rule, row_axes=all_but_last(features)))


_EVERYTHING_BUT_FEATURES = all_but_last(1)


def own_rule(
    *functions: Function, row_axes: RowAxes = _EVERYTHING_BUT_FEATURES, reads: Reads | None = None, is_product: bool = False, known_by: int = 1
) -> Callable[[_F], _F]:  # fmt: skip
    """`rule` for the rules that clipwise brings along. `is_product`: one of the functions that autocast runs in low precision."""
    return _register(functions, partial(Rule, row_axes=row_axes, reads=reads, trusted=True, is_product=is_product, known_by=known_by))


def _register(functions: tuple[Function, ...], make: Callable[[Any], Rule]) -> Callable[[_F], _F]:
    if not functions:
        raise TypeError("name the torch function: @clipwise.rule(torch.lerp)")

    def decorate(factors: _F) -> _F:
        for function in functions:
            RULES[function] = made = make(factors)
            if not made.trusted:
                REWRITES.pop(function, None)
                SPREADS.pop(function, None)
        return factors

    return decorate


def rewrite(*functions: Function) -> Callable[[_F], _F]:
    """Register simpler torch calls to run in place of a function that is handed a trainable weight.

    The decorated function takes the same arguments and returns the same result; the tape watches what it calls. It may
    return NotImplemented to leave a call to the function's rule.

        @clipwise.rewrite(torch.addmv)
        def addmv(input, mat, vec):
            return input + torch.mv(mat, vec)
    """

    def decorate(replacement: _F) -> _F:
        for function in functions:
            REWRITES[function] = replacement
        return replacement

    return decorate


def inside(*functions: Function) -> Callable[[_F], _F]:
    """Register how a function runs under the tape, where taps of its own are needed: (watch, use) → its result."""

    def decorate(run: _F) -> _F:
        INSIDE.update(dict.fromkeys(functions, run))
        return run

    return decorate


def spread(*functions: Function) -> Callable[[_F], _F]:
    """Register a function whose weights are watched on their own side: each is expanded to where it meets the examples.

    The decorated function takes a `Use` and a callback `tap(weight, shape)`, and returns the arguments to call with, or
    None to leave the call to the function's rule.
    """

    def decorate(spread_out: _F) -> _F:
        for function in functions:
            SPREADS[function] = spread_out
        return spread_out

    return decorate
