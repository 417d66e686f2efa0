"""What the tape notes outside the captured modules: the calls that lead from the inputs of the block to the losses."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .functions import full_name
from .structure import every_tensor, map_values

if TYPE_CHECKING:
    from .marks import Marks
    from .tape import Tape

AUTOCAST = ("cpu", "cuda")  # devices where it rounds
ROOM = 64  # calls that a block without an end may note before it looks which of them are still needed


def dtypes_of_autocast() -> dict[str, torch.dtype]:
    """{device: the precision that autocast multiplies in}, where it is on."""
    if not is_autocast_on():
        return {}
    return {device: torch.get_autocast_dtype(device) for device in AUTOCAST if torch.is_autocast_enabled(device)}


def is_autocast_on() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


@dataclass(frozen=True)
class ProgramCall:
    """A torch function, or a captured module, with what went in and what came out."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any  # what was written, for a function that changes its argument
    from_nothing: bool = False  # no example data and no weight went in
    writes: bool = False  # it changes its result, which may be a view of something else
    is_carried: bool = False  # something went in that was computed from an earlier batch
    autocast_dtypes: dict[str, torch.dtype] = field(default_factory=dtypes_of_autocast)

    @property
    def name(self) -> str:
        return type(self.func).__name__ if isinstance(self.func, nn.Module) else full_name(self.func)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The precision under which the call was made."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast_dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


def module_call(marks: Marks, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> ProgramCall:
    """The call of a captured module."""
    made = marks.made
    may_be = made is not None and not marks.given.isdisjoint(made.ids)
    is_carried = made is not None and may_be and any(made.is_old(tensor) for tensor in every_tensor([args, kwargs]))
    return ProgramCall(module, args, kwargs, output, is_carried=is_carried)


@dataclass(frozen=True)
class RootCall:
    """A call of a captured module, and the graph nodes of the tensors that came out."""

    call: ProgramCall
    output_nodes: list[Any]


def leading_to(calls: list[ProgramCall], targets: list[Tensor]) -> list[ProgramCall]:
    """The calls that the targets depend on, in order: those that made them, or wrote into their memory, and so on."""
    wanted = {id(target) for target in targets}
    some_write = bool([call for call in calls if call.writes])
    memory = set(map(memory_of, targets)) if some_write else set()
    needed = []
    for call in reversed(calls):
        results = every_tensor(call.result)
        if not wanted.isdisjoint(map(id, results)) or (call.writes and not memory.isdisjoint(map(memory_of, results))):
            needed.append(call)
            given = every_tensor([call.args, call.kwargs])
            wanted.update(map(id, given))
            if some_write:
                memory.update(map(memory_of, given))
    return needed[::-1]


def memory_of(tensor: Tensor) -> int:
    """Where it lies, by itself or with others; a place of its own for what lies nowhere."""
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, stand-ins
        return -id(tensor)


def shared_and_written(calls: list[ProgramCall]) -> set[int]:
    """Memory of several tensors, into which one of the calls writes."""
    there: dict[int, set[int]] = {}
    for call in calls:
        for tensor in every_tensor(call.result):
            there.setdefault(memory_of(tensor), set()).add(id(tensor))
    written = {memory_of(tensor) for call in calls if call.writes for tensor in every_tensor(call.result)}
    return {place for place in written if len(there[place]) > 1}


def loose_ends(calls: list[ProgramCall]) -> list[Tensor]:
    """Results that no later call takes in."""
    taken = {id(tensor) for call in calls for tensor in every_tensor([call.args, call.kwargs])}
    return [tensor for call in calls for tensor in every_tensor(call.result) if id(tensor) not in taken]


def drop_dead(tape: Tape) -> None:
    """Forget calls whose results nobody else holds: not the user, not the graph, not a later call.

    Results are let go of first; from the last call to the first, a call stays if one of its results is still there.
    """
    nodes = {id(root.call): root.output_nodes for root in tape.root_calls}
    entries = [(*_let_go(call), nodes.get(id(call))) for call in tape.program]
    tape.program.clear()
    tape.root_calls.clear()
    alive: list[tuple[ProgramCall, list[Any] | None]] = []
    while entries:
        call, results, output_nodes = entries.pop()
        if any(ref() is not None for ref in results):
            alive.append((_take_back(call, results), output_nodes))
    for call, output_nodes in reversed(alive):
        tape.program.append(call)
        if output_nodes is not None:
            tape.root_calls.append(RootCall(call, output_nodes))


def _let_go(call: ProgramCall) -> tuple[ProgramCall, list[Any]]:
    """The call without its results, which may be among its arguments, and weak references to them."""
    results = {id(tensor): weakref.ref(tensor) for tensor in every_tensor(call.result)}

    def weaken(value: Any) -> Any:
        return results.get(id(value), value)

    if any(id(tensor) in results for tensor in every_tensor([call.args, call.kwargs])):
        call = replace(call, args=map_values(call.args, weaken), kwargs={key: map_values(v, weaken) for key, v in call.kwargs.items()})
    return replace(call, result=None), list(results.values())


def _take_back(call: ProgramCall, results: list[Any]) -> ProgramCall:
    def strengthen(value: Any) -> Any:
        return value() if isinstance(value, weakref.ref) else value

    args, kwargs = map_values(call.args, strengthen), {key: map_values(value, strengthen) for key, value in call.kwargs.items()}
    found = [ref() for ref in results]
    return replace(call, args=args, kwargs=kwargs, result=[torch.empty(0) if tensor is None else tensor for tensor in found])
