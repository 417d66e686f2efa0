"""Calls that bring the examples of a batch together, and to which no gradient came: a choice that fell the other way.

`torch.where(x.isnan(), h.mean(0), h)` mixes examples only where a number is missing. On a batch without one, the gradient that reaches `h.mean(0)` is zero
throughout, and no test by gradients sees what it does. Another batch may wake it: from such a pass nothing is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .moving import holds
from .taps import Keep, Tap

_ALONG_AN_AXIS = ("Cum", "Logcum")  # begins the names of functions that join along an axis which they keep
_OWN = {f"{function.__name__}Backward" for function in (Tap, Keep)}


class Dormant:
    """Listens to one backward pass over these nodes of autograd's."""

    def __init__(self, nodes: Iterable[Any], batch: int):
        self._awake: dict[Any, bool] = {node: False for node in nodes if _joins(node, batch)}
        self._hooks = [node.register_prehook(self._listener(node)) for node in self._awake]

    def _listener(self, node: Any) -> Any:
        def listen(grads: tuple[Tensor | None, ...]) -> None:
            with torch._C.DisableTorchFunction(), torch.no_grad():  # none of a tape's business
                self._awake[node] = any(grad is not None and bool(grad.any()) for grad in grads)

        return listen

    def names(self) -> set[str]:
        """What has slept, after the pass; it is not listened to any longer."""
        for hook in self._hooks:
            hook.remove()
        return {node.name().rstrip("0123456789").removesuffix("Backward") for node, awake in self._awake.items() if not awake}


def _joins(node: Any, batch: int) -> bool:
    """Whether an axis that may hold the examples goes in and does not come out."""
    name = node.name()
    if name in _OWN:
        return False
    came_out = min((_held(of.shape, batch) for of in getattr(node, "_input_metadata", ())), default=0)
    went_in = max((_held(_shape(*edge), batch) for edge in node.next_functions), default=0)
    return went_in > came_out or (went_in > 0 and name.startswith(_ALONG_AN_AXIS))


def _held(shape: Iterable[int], batch: int) -> int:
    return sum(holds(length, batch) for length in shape)


def _shape(node: Any, place: int) -> Iterable[int]:
    metadata = getattr(node, "_input_metadata", ()) if node is not None else ()
    return metadata[place].shape if place < len(metadata) else ()
