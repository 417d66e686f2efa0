"""A function recorded as a CUDA graph: the processor starts all its kernels by one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_WARM_UP = 3  # runs before the recording: libraries choose their kernels and allocate what they need


class Recording:
    """run(*tensors), replayed. The first tensors are read where they lie (and must lie there still), the others are copied in.

    What it returns is written over by the next call.
    """

    def __init__(self, run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], *, first: int):
        self._run = run
        self._first = first
        self._record(inputs)

    def _record(self, inputs: Sequence[Tensor]) -> None:
        self._inputs = [*inputs[: self._first], *(tensor.clone() for tensor in inputs[self._first :])]
        self._places = [tensor.data_ptr() for tensor in inputs[: self._first]]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._run(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = list(self._run(*self._inputs))

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if [tensor.data_ptr() for tensor in inputs[: self._first]] != self._places:
            self._record(inputs)
        for mine, given in zip(self._inputs[self._first :], inputs[self._first :]):
            mine.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs
