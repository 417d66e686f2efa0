"""A graph that is ready to run, for batches of one shape: compiled, and on a GPU recorded once and replayed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..errors import in_one_line
from ..numerics import number_on, without_autocast
from ..tracing import can_be_recorded
from .agreement import coarsest
from .recording import Recording
from .rows import mask
from .state import State
from .trace import Traced

Run = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Variant:
    """Runs outside the caller's autocast: which precision each operation has was decided when it was traced."""

    traced: Traced
    precision: torch.dtype  # the coarsest in which the graph computes
    parameters: list[Tensor]  # that its sums are for
    _run: Run
    _state: list[Tensor]  # parameters and buffers when it was made
    _rows: int
    _device: torch.device
    _last_bound: list[tuple[float, Tensor]]
    trainable: list[Tensor]  # parameters of the model

    @classmethod
    def of(cls, traced: Traced, state: State, batch_and_mask: Sequence[Tensor], backend: str | None) -> Variant:
        """backend None: the graph as it was traced, for a run or two."""
        device = batch_and_mask[-1].device
        tensors = state.distinct
        inputs = [*(tensor.detach() for tensor in tensors), *batch_and_mask, torch.ones((), dtype=torch.float64, device=device)]
        with without_autocast():
            run: Run = _compiled(traced, inputs) if backend == "inductor" and not _is_beyond_inductor(traced.graph) else traced.graph
            if backend is not None and can_be_recorded(device):
                run = Recording(run, inputs, first=len(tensors), last=2)
        parameters = [tensors[place] for place in traced.places]
        last_bound = [(1.0, number_on(device, 1.0))]
        rows = len(batch_and_mask[-1])
        return cls(traced, coarsest(traced.graph, device), parameters, run, tensors, rows, device, last_bound, state.trainable)

    @property
    def names(self) -> list[str]:
        return self.traced.names

    def fits(self, state: State) -> bool:
        """Whether the model still consists of the same tensors."""
        return len(state.distinct) == len(self._state) and all(map(operator.is_, state.distinct, self._state))

    def run(self, batch: Sequence[Tensor], count: int, bound: float) -> list[Tensor]:
        """Clipped sums, weights and which rows were finite, of the first `count` rows of a batch. The next run may write over them."""
        real, inverse_square = mask(count, self._rows, self._device), self._inverse_square(bound)
        if isinstance(self._run, Recording):  # which reads nothing but where they lie
            return list(self._run(*self._state, *batch, real, inverse_square))
        with without_autocast():
            return list(self._run(*(tensor.detach() for tensor in self._state), *batch, real, inverse_square))

    def _inverse_square(self, bound: float) -> Tensor:
        """1/bound², where the graph reads it; mostly that of the run before."""
        last, number = self._last_bound[0]
        if last != bound:
            number = number_on(self._device, bound**-2)
            self._last_bound[0] = bound, number
        return number


_BEYOND_INDUCTOR = {torch.ops.aten._cudnn_rnn.default, torch.ops.aten.mkldnn_rnn_layer.default}


def _is_beyond_inductor(graph: GraphModule) -> bool:
    """Whether it runs a fused recurrent kernel. cuDNN's returns the weights that it was given, for its backward pass, and does not say that it is the same
    memory: Inductor would write something else there in between. That of a CPU it does not know how to call."""
    return any(node.target in _BEYOND_INDUCTOR for node in graph.graph.nodes)


def _compiled(traced: Traced, inputs: Sequence[Tensor]) -> Run:
    """By Inductor; where that fails (no compiler on this machine), the graph as it is, which spares the tape's work at least.

    Fused kernels round to bf16 where the graph says so: a norm and a sum that see different roundings are not of the same gradient.
    """
    try:
        with torch.no_grad():
            run: Run = torch._inductor.compile(traced.graph, list(inputs), options={"emulate_precision_casts": True})
            run(*inputs)
    except Exception as error:
        warnings.warn(f"the graph could not be compiled and runs as it is: {in_one_line(error)}", stacklevel=2)
        return traced.graph

    def without_gradients(*tensors: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return run(*tensors)

    return without_gradients
