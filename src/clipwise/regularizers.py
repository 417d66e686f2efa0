"""Penalties on the weights alone. They see no examples, so their gradient needs neither clipping nor noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .errors import ForeignGradient
from .marks import TRACKED
from .tape import capture


class Regularizers:
    """The penalties of a training, and the gradient of their sum at the step at hand."""

    def __init__(self, modules: Sequence[nn.Module]):
        self._modules = modules
        self._penalties: list[Callable[[], Tensor]] = []
        self.gradients: dict[int, Tensor] = {}  # by id of the parameter

    @property
    def is_empty(self) -> bool:
        return not self._penalties

    def add(self, penalty: Callable[[], Tensor]) -> None:
        if not callable(penalty):
            raise TypeError("a regularizer is a function without arguments that returns a scalar: lambda: 1e-4 * model.w.square().sum()")
        self._penalties.append(penalty)

    def evaluate(self) -> None:
        """Take the gradients at the present weights. Refuse a penalty that anything but weights and constants went into."""
        self.gradients = {}
        for penalty in self._penalties:
            with torch.enable_grad(), capture(self._modules) as tape:
                tape.marks.doubts_numbers = True
                value = penalty()
            if not isinstance(value, Tensor) or value.dim() or tape.marks.kind(value) != TRACKED or tape.created:
                raise ForeignGradient(
                    "a regularizer must be a scalar made of the model's parameters and constants alone.",
                    "What depends on examples goes through private.loss. Tensors from outside are declared with clipwise.constant(x).",
                )
            parameters = list(tape.marks.trainable().values())
            for parameter, grad in zip(parameters, torch.autograd.grad(value, parameters, allow_unused=True)):
                if grad is not None:
                    before = self.gradients.get(id(parameter))
                    self.gradients[id(parameter)] = grad if before is None else before + grad
