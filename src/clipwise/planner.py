"""Which way a squared norm is evaluated, by a cost rule, and how much memory a step may spend on it. (trials.py times ways on a GPU.)"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .tracing import is_tracing

_KEEP_UP_TO = 8  # times the numbers an example holds anyway: beyond that a written-out gradient is not worth its memory
_WIDE_PENALTY = 4  # a gram runs in the next wider precision, at about a quarter of the speed; one of bf16 does not
_BALANCE = 125  # operations on bf16 matrices in the time that one byte takes to the memory of a GPU (H200: 600e12 a second, 4.8e12 bytes)
_CPU_BUDGET = 2**30  # bytes of gradients kept written out in one step
_KEEP = "CLIPWISE_KEEP_MB"
_CUDA_SHARE = 4  # … and the share of free device memory, one in so many
_SMALL = 2**26  # bytes that nobody misses
_SHARE_OF_RECORDINGS = 16  # … and of that share, one in so many parts for a recording's inputs
_MUCH = 2**28  # bytes that a recording does not copy, however much is free
_SHARE_OF_UPDATES = 20  # of the most that the training has held so far, one in so many parts for the sums that a recorded update reads
_SLACK = 20  # one in so many parts of what is allocated may be allocated besides …
_LEAST_SLACK = 2**24  # … or so many bytes, or a quarter up to _SMALL, where that is more
_MOMENT = 25  # one in so many parts for what is let go again before anything else is computed
_ABOUT = 16  # one in so many parts more than what is let go in exchange is no more than that
_CHUNK = {"cpu": 2**24, "cuda": 2**26}  # numbers that are looked at, or pulled back, at a time
_AT_ONCE = {"cpu": 2**20, "cuda": 2**24}  # numbers written out at a time, when nothing is kept, or on a CPU
_IN_A_GRAPH = 8  # pieces there may be where each takes calls of its own, if they have less than …
_AT_MOST = 2**24  # … numbers
_IN_A_PASS = 4  # gradients of outputs that a backward pass has at once
_TO_COMPARE = 64  # bytes that are needed meanwhile for each number that is compared with another


def bytes_to_keep(said: str | None) -> int | None:
    """How many bytes of gradients may stay written out in a step, as the environment says in MB; None: it says nothing."""
    if not said:
        return None
    try:
        found = round(float(said) * 2**20)
    except (ValueError, OverflowError):
        found = -1
    if found < 0:
        raise ValueError(f"{_KEEP} must be a number of megabytes, got {said!r}")
    return found


_SET = bytes_to_keep(os.environ.get(_KEEP))  # on every device


def chunk_on(device: torch.device) -> int:
    return _CHUNK.get(device.type, _CHUNK["cpu"])


def compared_at_once(device: torch.device) -> int:
    """Numbers that are compared with others at a time: fewer where there is little room, as beside the graph of a large step."""
    return max(2**16, min(chunk_on(device), room_for_trial(device) // _TO_COMPARE))


def examples_at_once(batch: int, numel: int, device: torch.device) -> int:
    """How many examples' gradients, of so many numbers each, are written out at a time."""
    numel = max(numel, 1)
    few = _AT_ONCE.get(device.type, _AT_ONCE["cpu"]) // numel
    if is_tracing():
        few = max(few, min(-(-batch // _IN_A_GRAPH), _AT_MOST // numel))
    return min(batch, max(1, few))


class Terms(NamedTuple):
    """What gradients are made of: let go, where they are kept written out."""

    gradients: Sequence[Tensor]  # of outputs
    inputs: Sequence[Tensor]  # which other layers may need, too


NOTHING = Terms((), ())


class MemoryBudget:
    """Bytes that one step may spend on gradients that stay written out; first come, first served.

    On a GPU a share of what is free there; and where `most` is given, together with all else that is allocated not more than that.
    """

    def __init__(self, left: int | None = None, device: torch.device | None = None, most: int | None = None):
        self._left = left
        self._device = device
        self._most = most
        self._spent = 0
        self._gone: set[StorageWeakRef] = set()  # memory that was let go in exchange for something; held, so that no other gets its name

    @classmethod
    def on(cls, device: torch.device, most: int | None = None) -> MemoryBudget:
        """What is free is asked for when it is needed, which for small layers is never."""
        return cls(device=device, most=most)

    def has(self, size: int, *, lets_go: Terms = NOTHING) -> bool:
        """Whether so many bytes are there. `lets_go`: what is let go in exchange, and would stay allocated otherwise."""
        if self._most is None:
            return self._is_free(size)
        if self._device is not None and size > room_for_trial(self._device):
            return False  # both are there for a moment
        room = self._most - torch.cuda.memory_allocated(self._device)
        more = size - self._counted(lets_go.gradients, () if room < 0 else lets_go.inputs)  # an input may be another's, too
        return self._is_free(max(more, 0)) and more <= max(room, size // _ABOUT)

    def has_for_a_moment(self, size: int) -> bool:
        """Whether so many bytes are there for what is let go again before anything else is computed."""
        if _SET is not None:
            return size <= _free_on(self._device)
        return self.has(size) or (self._most is not None and size <= self._most // _MOMENT and self._is_free(size))

    def take(self, size: int) -> bool:
        """Reserve `size` bytes if they are there."""
        if not self.has(size):
            return False
        self.spend(size)
        return True

    def spend(self, size: int, *, lets_go: Terms = NOTHING) -> None:
        """They are reserved: that was decided before."""
        if self._most is not None:
            size = max(size - self._counted(*lets_go), 0)
            self._gone.update(StorageWeakRef(tensor.untyped_storage()) for side in lets_go for tensor in side)
        self._spent += size

    def _is_free(self, size: int) -> bool:
        if self._left is None:
            self._left = _free_on(self._device) if _SET is None else _SET
        return size + self._spent <= self._left

    def _counted(self, *sides: Sequence[Tensor]) -> int:
        """Bytes of these, but for what was let go in exchange for something else."""
        found = {StorageWeakRef(tensor.untyped_storage()): _bytes_of(tensor) for side in sides for tensor in side}
        return sum(size for memory, size in found.items() if memory not in self._gone)


def _bytes_of(tensor: Tensor) -> int:
    """What lies in memory: less than it shows, where it shows a number several times."""
    return min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())


def peak_allowed(device: torch.device) -> int | None:
    """Bytes that may be allocated at once in a backward pass that begins now, where that is known.

    Now, before anything is freed, an ordinary step is about at its peak. Gradients that stay written out take the place of what the
    pass gives back as it goes, and a little more. Where somebody has said how much may be kept, that is what counts.
    """
    if device.type != "cuda" or _SET is not None:
        return None
    allocated = torch.cuda.memory_allocated(device)
    return allocated + max(allocated // _SLACK, _LEAST_SLACK, min(allocated // 4, _SMALL))


_for_graphs: dict[torch.device, int] = {}


def _free_on(device: torch.device | None) -> int:
    """For graphs what was free when the first was traced: the same code must give the same graph again."""
    if device is None or device.type != "cuda":
        return _CPU_BUDGET
    if is_tracing():
        return _for_graphs.setdefault(device, _free_now(device))
    return _free_now(device)


def _free_now(device: torch.device) -> int:
    return room_for_trial(device) // _CUDA_SHARE


def room_for_trial(device: torch.device) -> int:
    """Bytes that may be taken for a moment while nothing else is computed: what is free, and what torch keeps for reuse."""
    if device.type != "cuda":
        return _CPU_BUDGET
    free, total = torch.cuda.mem_get_info(device)
    allowed, reserved = torch.cuda.get_per_process_memory_fraction(device), torch.cuda.memory_reserved(device)
    if allowed < 1:
        free = min(free, int(allowed * total) - reserved)
    return max(free, 0) + reserved - torch.cuda.memory_allocated(device)


def room_beside_a_pass(device: torch.device, largest: int) -> MemoryBudget:
    """For what stays allocated while a backward pass runs whose graph stays too; its largest gradient has so many bytes."""
    return MemoryBudget(max(0, room_for_trial(device) - _IN_A_PASS * largest) // _CUDA_SHARE)


def room_for_recording(device: torch.device, parameters: int) -> int:
    """Bytes that the inputs of a recording may take: little beside the model, which has so many bytes of parameters, or beside what is free."""
    share = _free_on(device)
    return min(share, max(_SMALL, 2 * parameters, min(share // _SHARE_OF_RECORDINGS, _MUCH)))


def room_for_update(device: torch.device) -> int:
    """Bytes that sums may take where a recorded update finds them: little beside what the training has held so far."""
    if device.type != "cuda":
        return _SMALL
    return min(_free_on(device), max(_SMALL, torch.cuda.max_memory_allocated(device) // _SHARE_OF_UPDATES))


def may_keep(*, batch: int, numel: int, held: int, element_size: int, budget: MemoryBudget, lets_go: Terms = NOTHING) -> bool:
    """Whether all gradients may stay written out. `held`: numbers that an example's factors hold; `lets_go`: what all of them hold.

    Every other way holds on to the factors until the norms of all parameters are known; this one lets them go.
    """
    return numel <= _KEEP_UP_TO * held and budget.has(batch * numel * element_size, lets_go=lets_go)


def choose_way(*, may_keep: bool, dense_flops: int, gram_flops: int | None, bf16_bytes: int = 0) -> str:
    """`keep`, `gram` or `tiles`, by what an example costs.

    keep: write all gradients out once; their weighted sum then replaces the ordinary weight gradient, so it costs nothing
    extra but the memory traffic. gram: products of the terms, one more weight gradient later. tiles: write out a few examples at a
    time, measure, forget; one more weight gradient later. `gram_flops` is None where no gram exists. Where bf16 is multiplied by
    matrix units, memory is what costs (`bf16_bytes`: of a written-out gradient); elsewhere arithmetic.
    """
    penalty = 1 if bf16_bytes else _WIDE_PENALTY
    costs = {"tiles": 2 * dense_flops + 2 * _BALANCE * bf16_bytes}
    if may_keep:
        costs["keep"] = dense_flops + 3 * _BALANCE * bf16_bytes
    if gram_flops is not None:
        costs["gram"] = penalty * gram_flops + dense_flops
    return min(costs, key=lambda way: costs[way])
