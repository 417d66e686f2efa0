"""The three verbs over a captured tape: measure the norms, hand out the clipped gradients, or wrap them as a loss."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from .clipping import Clipping
from .collect import collect
from .handout import handed_out
from .methods import METHODS, Clipped, bookkeep
from .numerics import accumulation_dtype, without_autocast
from .tape import Tape


@overload
def per_example_norms(tape: Tape, losses: Tensor, *, by: None = None) -> Tensor: ...
@overload
def per_example_norms(tape: Tape, losses: Tensor, *, by: Literal["parameter"]) -> dict[str, Tensor]: ...
def per_example_norms(tape: Tape, losses: Tensor, *, by: str | None = None) -> Tensor | dict[str, Tensor]:
    """‖∂ℓ_i/∂θ‖ for every example, (B,); with by="parameter" {name: (B,)}. Private data: do not show or log them.

    Never less than the true norm of what clipping releases. May be followed by `clipped_loss` on the same losses, which
    then re-uses the work.
    """
    _check_tape(tape)
    if by not in (None, "parameter"):
        raise ValueError(f'by must be None or "parameter", got {by!r}')
    with tape.pause(), without_autocast():
        squares = collect(tape, losses, keep_graph=True).squared_norms()
        dtype = accumulation_dtype(losses.dtype)
        if by == "parameter":
            return {name: square.sqrt().to(dtype) for name, square in squares.items()}
        return torch.stack(list(squares.values())).sum(0).sqrt().to(dtype)


def clipped_gradients(tape: Tape, losses: Tensor, clipping: Clipping, *, method: str = "auto") -> dict[str, Tensor]:
    """{name: Σ_i clip(∂ℓ_i/∂θ)} for every parameter the losses depend on; float32 also for bf16 parameters. A sum, never a mean."""
    clipped = clip(tape, losses, clipping, method)
    return {name: total.clone() for name, total in clipped.sums.items()} if clipped.is_lent else clipped.sums


def clipped_loss(tape: Tape, losses: Tensor, clipping: Clipping, *, method: str = "auto") -> Tensor:
    """A scalar whose `.backward()` adds Σ_i clip(∂ℓ_i/∂θ) to every p.grad. A sum, never a mean.

    Its value is Σ_i ν_i·ℓ_i over the examples whose gradient is finite (with several groups, ν_i is their mean). An
    example whose gradient is NaN or Inf contributes exactly zero; `tape.nonfinite` says which (private data).
    """
    clipped = clip(tape, losses, clipping, method)
    with tape.pause():
        value = clipped.value(losses)
    return handed_out(value, clipped.sums, tape.marks.trainable())


def _check_tape(tape: Tape) -> None:
    if not isinstance(tape, Tape):
        raise TypeError(f"the first argument is the tape of `with capture(model) as tape:`, got {type(tape).__name__}")


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")


def can_be_compiled(method: str) -> bool:
    return METHODS[method] is bookkeep


def clip(tape: Tape, losses: Tensor, clipping: Clipping, method: str) -> Clipped:
    """Everything a method gives back. The losses are used up."""
    _check_tape(tape)
    check_method(method)
    if not isinstance(clipping, Clipping):
        raise TypeError(f"clipping must be flat(C), per_layer(C), per_group({{pattern: C}}) or automatic(C), got {clipping!r}")
    clipping.groups(list(tape.marks.trainable()))  # a pattern that fits nothing is refused before any work
    with tape.pause(), without_autocast():
        clipped = METHODS[method](tape, losses, clipping)
        tape.finite = clipped.finite
        tape.consume(losses)
    return clipped
