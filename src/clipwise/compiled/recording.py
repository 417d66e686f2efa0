"""Work recorded as a CUDA graph: the processor starts all its kernels by one call."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..numerics import without_autocast
from ..streams import current_address

_WARM_UP = 3  # runs before the recording: libraries choose their kernels and allocate what they need
_broken_off: list[torch.cuda.CUDAGraph] = []  # of which torch still thinks that they allocate memory of the host


@lru_cache
def _one_at_a_time(device: torch.device) -> threading.RLock:
    """Everything of a device is recorded on one stream, and replayed as if it were."""
    return threading.RLock()


def captured(run: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()) -> Replay:
    """What `run` starts on a GPU, to be started by calling the result. Nothing is computed yet.

    `generators`: those that it draws from, besides the device's own. What other threads do meanwhile (loaders pin memory) is their business.
    """
    with _one_at_a_time(device):
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # as much memory for the graph as there is
        return captured_in_passing(run, device, generators)


@lru_cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Everything is tried out and recorded on one stream: libraries have room of their own for each (cuBLAS takes 32 MB)."""
    return torch.cuda.Stream(device)


def recorded(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
    """run(*inputs) to be replayed over whatever lies in these inputs, and the tensors in which it leaves its results."""
    outputs: list[Tensor] = []
    device = inputs[0].device
    stream = recording_stream(device)
    with _one_at_a_time(device):
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                begin_with_libraries(device)
                for _ in range(_WARM_UP):
                    run(*inputs)
        finally:
            torch.cuda.current_stream(device).wait_stream(stream)
        return captured(lambda: outputs.extend(run(*inputs)), device), outputs


Pool = Any  # memory that graphs have for themselves, as torch.cuda.graph_pool_handle names it


def recorded_in_passing(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], device: torch.device, pool: Pool
) -> tuple[Callable[[], None], list[Tensor]]:  # fmt: skip
    """As `recorded`, in the midst of a step that was made before."""
    outputs: list[Tensor] = []
    return captured_in_passing(lambda: outputs.extend(run(*inputs)), device, pool=pool), outputs


def captured_in_passing(
    run: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = (), pool: Pool | None = None
) -> Replay:  # fmt: skip
    """As `captured`, in the midst of a step that was made before: nothing is waited for, and what torch keeps for reuse stays, so that the
    tensors of later steps will lie where they lay. The graph's own lie in `pool`: nobody's so far, or that of a graph that is still there, but
    will not be replayed again."""
    with _one_at_a_time(device), _without_collecting(), torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)  # which puts its seed on the device that is current
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        # A recording writes where its generators begin, at once and on its own stream: memory that others may have let go of just now.
        recording_stream(device).wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(recording_stream(device)):
                begin_with_libraries(device)
                try:
                    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                    try:
                        run()
                    finally:
                        graph.capture_end()
                except Exception:
                    _mend(graph, device, pool)
                    raise
        finally:
            # Replays come after what torch has started on the stream of the recording: it puts there where generators begin, and so does every replay, on
            # its own. One that came first would draw from a seed of before.
            torch.cuda.current_stream(device).wait_stream(recording_stream(device))
    return Replay(graph, device)


def _mend(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Pool) -> None:
    """Where CUDA itself broke a recording off, torch would go on allocating for it, keep that memory for ever, and take the device's generator for one that
    records: no number could be drawn outside a graph. A recording that comes to its end tells it otherwise."""
    with contextlib.suppress(Exception):
        torch._C._cuda_endAllocateToPool(device.index, pool)  # raises where it was torch that ended the recording
        torch._C._cuda_releasePool(device.index, pool)
        _broken_off.append(graph)  # which the host's allocator goes on asking
    with contextlib.suppress(Exception):
        number, another = torch.zeros((), device=device), torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        try:
            number.add_(1)
        finally:
            another.capture_end()


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """A graph that dies while another is recorded may break that off, and takes away from it the room of libraries."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def begin_with_libraries(device: torch.device) -> None:
    """On the stream of recordings, before anything is computed there.

    cuBLAS works in memory that it takes for each thread and stream, and graphs hold its address. Torch lets go of it while they live: when another graph
    of that stream dies (from 2.12 on, pytorch issue 193402), and whenever Inductor records one. So it lies in a pool where nobody else asks for memory,
    as long as the process lives; the next recording finds it there again. What is tried out there is no replay, but works in the same memory.
    """
    _in_turn(device)
    left = torch.ones(16, 16, device=device)
    product = torch.empty_like(left)
    try:
        _call_libraries(left, product)
    except torch.OutOfMemoryError:  # while a pool is in use, torch does not ask what it keeps for reuse
        torch.cuda.empty_cache()
        _call_libraries(left, product)


def _call_libraries(left: Tensor, product: Tensor) -> None:
    with _in_room_of_libraries(left.device):
        torch.mm(left, left, out=product)
        torch.addmm(left[0], left, left, out=product)  # by cuBLASLt, which may have room of its own


def _in_room_of_libraries(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Other allocators than torch's own have no pools."""
    is_torchs = torch.cuda.get_allocator_backend() == "native"
    return torch.cuda.use_mem_pool(_room_of_libraries(device), device) if is_torchs else contextlib.nullcontext()


@lru_cache
def _room_of_libraries(device: torch.device) -> Any:
    return torch.cuda.MemPool()


_last: dict[torch.device, tuple[int, torch.cuda.Stream]] = {}  # of each device: the stream whose turn it is, and its address


def _in_turn(device: torch.device) -> None:
    """The stream that is current goes on after the one that worked in the libraries' room before it, and before the next."""
    here, last = current_address(device), _last.get(device)
    if last is None or last[0] != here:
        stream = torch.cuda.current_stream(device)
        if last is not None:
            stream.wait_stream(last[1])
        _last[device] = here, stream


class Replay:
    """A graph. Calling it starts what was recorded, on the stream that is current.

    Graphs of one device are replayed one after the other, whatever streams they are replayed on: their libraries have one room.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device):
        self._graph, self._device = graph, device
        self._in_turn = _one_at_a_time(device)

    def __call__(self) -> None:
        with self._in_turn:
            _in_turn(self._device)
            self._graph.replay()


def alike(dtypes: Mapping[int, torch.dtype]) -> list[list[int]]:
    """Numbers of tensors of one type: kernels that copy many at once want one."""
    return [[number for number, mine in dtypes.items() if mine == dtype] for dtype in dict.fromkeys(dtypes.values())]


class Recording:
    """run(*tensors), replayed. The first tensors are read where they lie (and must lie there still), the others are copied in, the last
    ones only where they are not those of the call before: nobody may write to them.

    What it returns is written over by the next call.
    """

    def __init__(self, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], *, first: int, last: int):
        self._run = run
        self._first, self._last = first, len(inputs) - last
        self._record(inputs)

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [*inputs[: self._first], *(tensor.clone() for tensor in inputs[self._first :])]
        self._steady = list(inputs[self._last :])
        self._places = [tensor.data_ptr() for tensor in inputs[: self._first]]
        self._replay, self._outputs = recorded(self._run, self._inputs)

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if [tensor.data_ptr() for tensor in inputs[: self._first]] != self._places:
            with without_autocast():  # which precision each operation has was decided when it was traced
                self._record([tensor.detach() for tensor in inputs])
        for mine, given in zip(self._inputs[self._first : self._last], inputs[self._first : self._last]):
            mine.copy_(given, non_blocking=True)
        for place, (mine, given) in enumerate(zip(self._inputs[self._last :], inputs[self._last :])):
            if given is not self._steady[place]:
                mine.copy_(given, non_blocking=True)
                self._steady[place] = given
        self._replay()
        return self._outputs
