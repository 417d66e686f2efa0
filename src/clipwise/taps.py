"""A tap: an identity in the graph behind a watched call, where the backward pass hands over the output's gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .registry import Rule, Use


class Slot:
    """Stands in a recorded call for a tensor that autograd keeps (checkpointing and offloading may move it meanwhile)."""

    __slots__ = ("example", "index")

    def __init__(self, index: int, example: bool):
        self.index = index
        self.example = example


@lru_cache
def slot(index: int, example: bool) -> Slot:
    """The same for every call: what a step makes and keeps for a while, Python's collector looks through again and again."""
    return Slot(index, example)


class Record:
    """One watched call, as the tap behind it remembers it."""

    __slots__ = ("__weakref__", "hands_over", "key", "output", "row_axes", "rule", "switch", "upstream", "use")

    def __init__(
        self, use: Use, rule: Rule, row_axes: tuple[int, ...], key: int, switch: Switch, upstream: list[Any], output: Tensor | None,
        hands_over: int | None,
    ):  # fmt: skip
        self.use = use  # arguments, with a Slot for every kept tensor
        self.rule = rule
        self.row_axes = row_axes  # axes of the output that may number rows
        self.key = key  # the path of calls that led here
        self.switch = switch
        self.upstream = upstream  # autograd nodes of the example data that went in
        self.hands_over = hands_over  # hash of the shapes and types of the gradient and of what was kept; None: not known yet
        self.output = output  # kept only where the call is differentiated example by example

    def restored(self, kept: tuple[Tensor, ...]) -> tuple[Use, list[Tensor]]:
        """The call with its tensors back in place, and those that hold example data."""
        examples: list[Tensor] = []

        def fill(value: Any) -> Any:
            if isinstance(value, Slot):
                if value.example:
                    examples.append(kept[value.index])
                return kept[value.index]
            return value

        return Use(self.use.func, *self.use.mapped(fill), self.use.tracked), examples


class Switch:
    """Whether the taps of a tape hand anything over. One backward pass of ours turns it on; any other passes through."""

    __slots__ = ("receive",)

    def __init__(self) -> None:
        self.receive: Callable[[Record, Tensor, tuple[Tensor, ...]], None] | None = None


class Deposit:
    """Tensors that a tap needs and that exist only after it was made: what a recurrent kernel returns.

    `Keep` behind the kernel hands them over at the beginning of a backward pass, the tap before the kernel takes them out.
    """

    __slots__ = ("prepare", "tensors")

    def __init__(self, prepare: Callable[..., tuple[Tensor, ...]]):
        self.prepare = prepare
        self.tensors: tuple[Tensor, ...] | None = None

    def fill(self, kept: tuple[Tensor, ...]) -> None:
        self.tensors = self.prepare(*kept)

    def take(self) -> tuple[Tensor, ...]:
        tensors, self.tensors = self.tensors, None
        assert tensors is not None, "the kernel's outputs reach the backward pass before its inputs do"
        return tensors


class Keep(torch.autograd.Function):
    """A kernel's outputs, of which the first is copied, since it is saved too; in the backward pass the deposit is filled. Saved like anything autograd saves.

    The weights that went into the kernel lie behind it: their gradients come from the tap before the kernel (`record` says
    what else went in).
    """

    @staticmethod
    def forward(ctx: Any, record: Record, deposit: Deposit, kept: tuple[Tensor, ...], *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.record, ctx.deposit = record, deposit
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        return (outputs[0].clone(), *[output.detach() for output in outputs[1:]])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.record.switch.receive is not None:
            kept = ctx.saved_tensors
            with torch._C.DisableTorchFunction(), torch.no_grad():
                ctx.deposit.fill(kept)
        return None, None, None, *grads


def has_saving_hooks() -> bool:
    """Whether tensors that are saved here go through hooks, which may compute them again: activation checkpointing does so."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class Tap(torch.autograd.Function):
    """y = x, and in the backward pass `receive(record, dL/dy, kept tensors)`.

    `anchor` is a scalar leaf that requires grad: asking autograd for the gradient of the losses with respect to it alone
    visits every tap and computes no weight gradient. The output shares x's memory but is no view of it, so it may be
    changed in place.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, record: Record, kept: tuple[Tensor, ...] | Deposit) -> Tensor:
        ctx.record = record
        ctx.deposit = kept if isinstance(kept, Deposit) else None
        ctx.save_for_backward(*(kept if isinstance(kept, tuple) else ()))
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        receive = ctx.record.switch.receive
        if receive is not None and grad is not None:
            # asking for what was saved may compute a checkpointed region again, under the tape
            kept = ctx.saved_tensors if ctx.deposit is None else ctx.deposit.take()
            with torch._C.DisableTorchFunction():  # autograd keeps no graph here
                receive(ctx.record, grad, kept)
        return grad, None, None, None


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """function.apply, past what torch looks for where a transform of torch.func may be on: none is."""
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


tap = super(torch.autograd.Function, Tap).apply  # as `applied`, found once: a step makes hundreds of taps
