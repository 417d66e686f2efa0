"""What the tape notes outside the captured modules: the calls that lead from the inputs of the block to the losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .structure import every_tensor


def _autocast_dtypes() -> dict[str, torch.dtype]:
    return {device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)}


@dataclass(frozen=True)
class ProgramCall:
    """A torch function, or a captured module, with what went in and what came out."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # what was written, for a function that changes its argument
    from_nothing: bool = False  # no example data and no weight went in
    autocast_dtypes: dict[str, torch.dtype] = field(default_factory=_autocast_dtypes)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision under which the call was made."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast_dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def leading_to(calls: list[ProgramCall], targets: list[Tensor]) -> list[ProgramCall]:
    """The calls that the targets depend on, in order."""
    wanted = {id(target) for target in targets}
    needed = []
    for call in reversed(calls):
        if any(id(tensor) in wanted for tensor in every_tensor(call.result)):
            needed.append(call)
            wanted.update(id(tensor) for tensor in every_tensor([call.args, call.kwargs]))
    return needed[::-1]


def loose_ends(calls: list[ProgramCall]) -> list[Tensor]:
    """Results that no later call takes in."""
    taken = {id(tensor) for call in calls for tensor in every_tensor([call.args, call.kwargs])}
    return [tensor for call in calls for tensor in every_tensor(call.result) if id(tensor) not in taken]
