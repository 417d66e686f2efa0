"""How the inputs of a captured module are read as rows of examples, and called again with other rows."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .marks import is_declared_constant
from .still import Still
from .tape import RootCall, outputs_in

Axes = dict[int, tuple[int, int]]  # {id of an input: (its batch axis, the length of that axis)}


@dataclass(frozen=True)
class Numbering:
    """How rows are numbered: `block` (row r belongs to example r // k) or `strided` (to r mod B)."""

    batch: int
    order: str

    def rows(self, size: int, examples: Sequence[int]) -> Tensor:
        """Rows of an axis of this length for a sequence of examples (some may come twice), numbered as before."""
        each, chosen = size // self.batch, torch.tensor(examples)
        if self.order == "block" or each == 1:
            return (chosen[:, None] * each + torch.arange(each)).flatten()
        return (chosen + self.batch * torch.arange(each)[:, None]).flatten()


def ways_to_read(call: RootCall, batch: int, usual: int) -> Iterator[Axes]:
    """Which inputs have a batch axis, and where: the likeliest way first.

    Exactly one row an example if any input has that, else a multiple. Axis 0 before the axis the taps have (`usual`). If
    that fails, the first input alone: others may share the batch's length by chance.
    """
    tensors = [tensor for tensor in outputs_in([call.args, call.kwargs]) if tensor.dim() and not is_declared_constant(tensor)]
    for multiple in (False, True):
        found: list[Axes] = []
        for first in dict.fromkeys((0, usual, 1)):
            axes: Axes = {}
            for tensor in tensors:
                fits = [axis for axis in (first, 0, 1) if axis < tensor.dim() and _fits(tensor.shape[axis], batch, multiple)]
                if fits:
                    axes[id(tensor)] = (fits[0], tensor.shape[fits[0]])
            if axes and axes not in found:
                found.append(axes)
        if found:
            yield from found
            yield from [dict([next(iter(axes.items()))]) for axes in found if len(axes) > 1]
            return


def _fits(size: int, batch: int, multiple: bool) -> bool:
    return size > 0 and (size % batch == 0 if multiple else size == batch)


def call_again(call: RootCall, axes: Axes, numbering: Numbering, examples: Sequence[int]) -> list[Tensor]:
    """The outputs of the module on these examples, with random draws held still."""

    def pick(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in axes:
                return value.detach().clone()
            axis, size = axes[id(value)]
            return value.detach().index_select(axis, numbering.rows(size, examples).to(value.device))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(pick, value))
        if isinstance(value, list | tuple):
            return type(value)(map(pick, value))
        return {name: pick(item) for name, item in value.items()} if isinstance(value, dict) else value

    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    with call.autocast(), Still():
        return outputs_in(call.module(*pick(tuple(call.args)), **pick(dict(call.kwargs))))
