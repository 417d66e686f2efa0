"""Whether p.grad is what the private loss left there. What a step releases is made from the clipped sums themselves, never from
p.grad; but a gradient that came from elsewhere, or was changed, is a misunderstanding that must not pass in silence.

No values are compared where the state of the tensor tells: after n backward passes of ours p.grad is the tensor it was, written
to n times; where there was none, it is the first gradient itself, or a copy of it, written to n − 1 times. A tensor that was there
before must have been zero; that alone is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import ForeignGradient

_ZERO_GRAD = "Call optimizer.zero_grad() after every step."
_ONLY_PRIVATE = (
    "Send every loss of examples through private.loss; a penalty on the weights alone goes through private.regularizer(function); "
    "clipping is the plan's business, clip_grad_norm_ has no place here."
)


@dataclass(slots=True)
class _Seen:
    before: Tensor | None  # p.grad when our first gradient was about to come
    version: int
    first: int = 0  # where our first gradient lay, which autograd takes over or copies
    ours: int = 0  # backward passes of ours that added to it


class Witness:
    """Follows p.grad of every parameter from one step to the next."""

    def __init__(self, name_of: Callable[[Tensor], str]):
        self._name_of = name_of
        self._seen: dict[int, _Seen] = {}
        self._must_be_zero: list[tuple[Tensor, Tensor]] = []  # parameter, whether the gradient it had before was anything else

    def about_to_add(self, parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> None:
        """A backward pass of ours is about to add these gradients to those of the parameters."""
        pairs = list(zip(parameters, gradients))
        for parameter, _ in pairs if self._seen else ():
            seen = self._seen.get(id(parameter))
            if seen is not None and not self._is_as_left(parameter, seen, extra=0):
                raise self._refusal(parameter)
        for parameter, ours in pairs:
            seen = self._seen.get(id(parameter))
            if seen is None:
                seen = self._seen[id(parameter)] = self._first_sight(parameter)
                seen.first = ours.data_ptr()
            seen.ours += 1

    def _first_sight(self, parameter: Tensor) -> _Seen:
        grad = parameter.grad
        if grad is None:
            return _Seen(None, 0)
        if grad.numel():
            largest = grad.coalesce().values() if grad.is_sparse else grad
            self._must_be_zero.append((parameter, largest.detach().abs().amax() != 0))
        return _Seen(grad, grad._version)

    def _is_as_left(self, parameter: Tensor, seen: _Seen, extra: int) -> bool:
        """Whether p.grad is what it was plus our additions. `extra`: further writes that are allowed (a scaler's unscaling)."""
        grad = parameter.grad
        if seen.ours == 0:
            return grad is seen.before and (grad is None or grad._version == seen.version)
        if grad is None or (seen.before is not None and grad is not seen.before):
            return False
        if seen.before is None:
            expected = seen.ours - 1
            extra += int(grad.data_ptr() != seen.first)  # a copy was made, which may count as a write
        else:
            expected = seen.version + seen.ours
        return expected <= grad._version <= expected + extra

    def check(self, parameters: Iterable[Tensor], *, unscaled: bool) -> None:
        """Refuse if anything but our backward passes has touched these gradients since the last step."""
        for parameter in parameters:
            seen = self._seen.get(id(parameter))
            if seen is None:
                if parameter.grad is not None:
                    self._seen[id(parameter)] = self._first_sight(parameter)
            elif not self._is_as_left(parameter, seen, extra=int(unscaled)):
                raise self._refusal(parameter)
        if self._must_be_zero:
            parameters, found = zip(*self._must_be_zero)
            together = torch.stack([was_something.to(found[0].device) for was_something in found])
            for parameter, was_something in zip(parameters, together.tolist()):  # which waits for the device
                if was_something:
                    raise ForeignGradient(
                        f"{self._name_of(parameter)}.grad was not zero before the private loss added to it.",
                        f"{_ZERO_GRAD} {_ONLY_PRIVATE}",
                    )

    def taken_away(self, parameters: Iterable[Tensor]) -> None:
        """The step itself has cleared these gradients; if it fails after that, it may be tried again."""
        self._seen.update({id(parameter): _Seen(None, 0) for parameter in parameters})

    def _refusal(self, parameter: Tensor) -> ForeignGradient:
        name = self._name_of(parameter)
        if parameter.grad is None:
            return ForeignGradient(
                f"{name}.grad was cleared between backward() and step().", "Call zero_grad() after step(), not before it."
            )
        return ForeignGradient(
            f"{name}.grad was changed by something other than the backward pass of the private loss (another loss, clip_grad_norm_, a hook).",
            _ONLY_PRIVATE,
        )

    def forget(self) -> None:
        """A new step begins."""
        self._seen.clear()
        self._must_be_zero.clear()
