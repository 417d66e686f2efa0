"""What can be said while a graph is traced of numbers that code wants on the host, so that it need not be given up.

A model that asks a tensor for a number (`if coin < self.layerdrop:`, `F.one_hot`) cannot become a graph: the answer would be baked in. Here are the questions
whose answer does not depend on any data, and one way out that torch does not close by itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..declared import constant
from ..functions import trait_of
from ..tracing import NotTraceable, made_once_for_graphs_too
from ..weak import WeakTable

_OUT_OF_SIGHT = {"numpy", "__array__", "tolist", "__dlpack__"}  # numbers that leave torch, and may come back as somebody's
_ALWAYS = {  # of a number in [0, 1): whether it is below or above, for the bounds that decide it
    "lt": (lambda bound: bound >= 1, lambda bound: bound <= 0),
    "le": (lambda bound: bound >= 1, lambda bound: bound < 0),
    "gt": (lambda bound: bound < 0, lambda bound: bound >= 1),
    "ge": (lambda bound: bound <= 0, lambda bound: bound >= 1),
}


class Foreseen(TorchFunctionMode):
    """Lies below the tape, which sees the calls as they were made in the steps that verified the model."""

    def __init__(self) -> None:
        super().__init__()
        self._coins: WeakTable[int] = WeakTable()  # and their versions: one that is written to is none any more

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = trait_of(func).name
        if name in _OUT_OF_SIGHT and args[0].numel():
            raise NotTraceable(
                f"it takes the numbers of a tensor out of torch (.{name.strip('_')}()), where no graph follows: write it with tensors, or pass them to step()."
            )
        if func is F.one_hot:
            return _one_hot(*args, **kwargs)
        if name in _ALWAYS and len(args) == 2 and isinstance(args[1], int | float) and self._coins.get(args[0]) == args[0]._version:
            certain, impossible = (is_so(args[1]) for is_so in _ALWAYS[name])
            if certain or impossible:
                return _known(certain, args[0].shape, args[0].device)
        result = func(*args, **kwargs)
        if name == "rand" and result.numel() == 1:
            self._coins.put(result, result._version)
        return result


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Torch's own looks whether every class is below `num_classes`, or how many there are."""
    if num_classes < 1:
        return F.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


@made_once_for_graphs_too
def _known(answer: bool, shape: torch.Size, device: torch.device) -> Tensor:
    return constant(torch.full(shape, answer, device=device))
