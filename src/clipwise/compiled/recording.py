"""Work recorded as a CUDA graph: the processor starts all its kernels by one call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..numerics import without_autocast

_WARM_UP = 3  # runs before the recording: libraries choose their kernels and allocate what they need


def captured(run: Callable[[], None], device: torch.device, generators: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """What `run` starts on a GPU, to be started by calling the result. Nothing is computed yet.

    `generators`: those that it draws from, besides the device's own. What other threads do meanwhile (loaders pin memory) is their business.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=recording_stream(device), capture_error_mode="thread_local"):
        run()
    _wait_for_recording(device)
    return graph.replay


def _wait_for_recording(device: torch.device) -> None:
    """Replays come after what torch has started on the stream of the recording: it puts there where generators begin, and so does every replay, on its
    own. One that came first would draw from a seed of before."""
    torch.cuda.current_stream(device).wait_stream(recording_stream(device))


@lru_cache
def recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Everything is tried out and recorded on one stream: libraries have room of their own for each (cuBLAS takes 32 MB)."""
    return torch.cuda.Stream(device)


def recorded(run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> tuple[Callable[[], None], list[Tensor]]:
    """run(*inputs) to be replayed over whatever lies in these inputs, and the tensors in which it leaves its results."""
    outputs: list[Tensor] = []
    device = inputs[0].device
    stream = recording_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            run(*inputs)
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
) -> Callable[[], None]:  # fmt: skip
    """As `captured`, in the midst of a step that was made before: nothing is waited for, and what torch keeps for reuse stays, so that the
    tensors of later steps will lie where they lay. The graph's own lie in `pool`: nobody's so far, or that of a graph that is still there, but
    will not be replayed again."""
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    # A recording writes where its generators begin, at once and on its own stream: memory that others may have let go of just now.
    recording_stream(device).wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(recording_stream(device)):
        _begin_with_libraries(device)
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            try:
                run()
            finally:
                graph.capture_end()
        except Exception:  # where CUDA itself broke off, torch would go on allocating for a graph
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(device.index, pool)
            raise
    _wait_for_recording(device)
    return graph.replay


def _begin_with_libraries(device: torch.device) -> None:
    """cuBLAS takes room for each thread and stream when it is first called there: that must not belong to a graph."""
    if device not in (begun := _begun.__dict__.setdefault("devices", set())):
        begun.add(device)
        torch.mm(torch.ones(16, 16, device=device), torch.ones(16, 16, device=device))


_begun = threading.local()


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
