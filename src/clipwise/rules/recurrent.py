"""RNN, LSTM and GRU layers through the stock fused kernels, and their cells (paper, Sections 5.3 and 5.4).

The kernel is fed pre-activations instead of inputs: u = x W_ihᵀ + b_ih by one matrix product, then the same kernel on u with
the identity as its input weights. The gradient of its input is then the gradient dz of the pre-activations at every time
step, from the kernel's own backward pass, and with h_{t-1} from its outputs

    W_ih ← Σ_t dz_t ⊗ x_t,   W_hh ← Σ_t dz_t ⊗ h_{t-1},   b_ih, b_hh ← Σ_t dz_t.

GRU: on the hidden side the new gate's gradient is r ⊙ dz_n, with the reset gate r computed again from h_{t-1}. A projected
LSTM, h = W_hr m, is the unprojected one with recurrent weights W_hh W_hr. Stacked and bidirectional layers run layer by
layer, direction by direction.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..declared import constant
from ..factors import Dense, Outer
from ..functions import trait_of
from ..kernels.through_time import pays, through_time
from ..marks import TRACKED
from ..registry import Call, Factors, Rule, Use, all_but_last, inside, rewrite
from ..taps import Deposit, Keep, Record, applied, slot
from ..tracing import is_tracing, made_once_for_graphs_too, outside_graphs
from .timeline import Packed, Padded, Timeline

if TYPE_CHECKING:
    from ..watch import Watch

_KERNELS: list[Callable[..., Any]] = [torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru]  # in cuDNN's order

_IN_ONE_PIECE = {"cuda"}  # devices whose kernels want their weights one behind the other


@dataclass(frozen=True)
class Weights:
    """Of one layer in one direction, in PyTorch's order."""

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None  # projection of an LSTM's output

    @classmethod
    def of(cls, tensors: list[Tensor], biases: bool) -> Weights:
        ih, hh, *rest = tensors
        b_ih, b_hh = (rest.pop(0), rest.pop(0)) if biases else (None, None)
        return cls(ih, hh, b_ih, b_hh, rest[0] if rest else None)


@inside(*_KERNELS)
def recurrent(watch: Watch, use: Use) -> Any:
    """torch.lstm and its relatives, on padded or packed sequences."""
    packed = isinstance(use.args[3], list | tuple)
    x, *middle = use.args
    timeline: Timeline = Packed(middle.pop(0)) if packed else Padded(bool(use.args[8]))
    if packed:  # whose rows are whose is said by the data, also where they were packed before
        watch.tape.moves.lengths.add(len(x))
    state, tensors, biases, layers, dropout, training, both, *_ = middle
    hidden, memory = state if isinstance(state, list | tuple) else (state, None)
    directions = 2 if both else 1
    each = len(tensors) // (layers * directions)
    finals: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = Weights.of(list(tensors[place * each : (place + 1) * each]), biases)
            start = [part if len(tensors) == each else part[place : place + 1] for part in (hidden, memory) if part is not None]
            output, *final = _Layer(watch, use.func, weights, timeline, reverse=direction == 1).run(x, start)
            outputs.append(output)
            finals.append(tuple(final))
        x = torch.cat(outputs, -1) if both else outputs[0]
        if dropout and training and layer < layers - 1:
            x = F.dropout(x, dropout)
    return (x, *(torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*finals)))


class _Layer:
    """One layer in one direction."""

    def __init__(self, watch: Watch, kernel: Callable[..., Any], weights: Weights, timeline: Timeline, reverse: bool):
        self.watch, self.kernel, self.weights, self.timeline, self.reverse = watch, kernel, weights, timeline, reverse

    def run(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        """(outputs, final state …)"""
        weights, marks = self.weights, self.watch.tape.marks
        u = F.linear(x, weights.w_ih, weights.b_ih)
        if self.reverse:
            u = self.timeline.reversed(u)
        if weights.w_hr is not None and not (marks.was_made_inside(state[0]) and _is_zero(state[0])):
            u = self.timeline.add_to_first_step(u, F.linear(state[0], weights.w_hh))
        state = [self.watch.tap_weight(part) if marks.kind(part) == TRACKED else part for part in state]
        if weights.w_hr is not None:
            state[0] = state[1].new_zeros(state[1].shape)
        with torch._C.DisableTorchFunction():  # the tape would be asked about every attribute
            output, *final = self._through_kernel(x, u, state)
        if weights.w_hr is not None:
            output, final[0] = F.linear(output, weights.w_hr), F.linear(final[0], weights.w_hr)
        return (self.timeline.reversed(output) if self.reverse else output), *final

    def _through_kernel(self, x: Tensor, u: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        """The stock kernel on pre-activations of x, between a tap and the `Keep` that brings the tap what it needs."""
        watch, weights = self.watch, self.weights
        tracked = [w for w in (weights.w_hh, weights.b_hh, weights.w_hr) if w is not None and watch.tape.marks.kind(w) == TRACKED]
        state = [part if part.dtype == u.dtype else part.to(u.dtype) for part in state]
        if not tracked:
            return tuple([output.clone() if output._is_view() else output for output in self._kernel(x, u, state)])
        deposit = Deposit(self._prepare)
        names = {"w_hh": weights.w_hh, "b_hh": weights.b_hh, "w_hr": weights.w_hr}
        slots = (slot(0, True), slot(1, True), slot(2, False))
        use = Use(self.kernel, slots, {name: w for name, w in names.items() if any(w is t for t in tracked)}, tracked)
        u = watch.insert_tap(u, use, _RULE, [u.grad_fn] if u.requires_grad else [], deposit=deposit)
        outputs = self._kernel(x, u, state)
        upstream = [part.grad_fn for part in (u, *state) if part.requires_grad]
        record = Record(use, _RULE, (), 0, watch.tape.switch, upstream, None, None)
        kept = [outputs[0], state[0], u, weights.w_hh, weights.b_hh, weights.w_hr]
        return applied(Keep, record, deposit, tuple([t for t in kept if t is not None]), *outputs)

    def _kernel(self, x: Tensor, u: Tensor, state: list[Tensor]) -> tuple[Tensor, ...]:
        on_host = self.weights.w_hr is None and pays(self.kernel, u, self.timeline.sizes(u))
        call, args = self._on_host(x, u, state) if on_host else self._through_identity(u, state)
        with _without_advice() if u.is_cuda and is_tracing() else contextlib.nullcontext():
            outputs = call(*args)
        self.watch.tape.hidden_dtypes.add(outputs[0].dtype)  # under autocast cuDNN computes in float16, whatever was asked for
        self.watch.note(call, trait_of(self.kernel), args, {}, outputs)
        return outputs

    def _on_host(self, x: Tensor, u: Tensor, state: list[Tensor]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        w = self.weights
        weights = [None if weight is None else weight.to(u.dtype) for weight in (w.w_ih, w.w_hh, w.b_ih, w.b_hh)]
        return _layer_on_host, (self.kernel, self.timeline, self.reverse, x, u, state, weights)

    def _through_identity(self, u: Tensor, state: list[Tensor]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        weights = self.weights
        w_hh = weights.w_hh if weights.w_hr is None else weights.w_hh @ weights.w_hr
        tensors = [_identity(u.shape[-1], u.dtype, u.device), w_hh.to(u.dtype)]
        if weights.b_hh is not None:
            tensors += [_no_bias(u.shape[-1], u.dtype, u.device), weights.b_hh.to(u.dtype)]
        if u.device.type in _IN_ONE_PIECE and not is_tracing():
            tensors = _one_behind_the_other(tensors)
        if is_tracing() and isinstance(self.timeline, Padded) and torch.backends.cudnn.is_acceptable(u):
            return _cudnn, (self.kernel, u, state, tensors, self.timeline.batch_first)
        given = tuple(state) if self.kernel is torch.lstm else state[0]
        return self.kernel, self.timeline.arguments(u, given, tensors, weights.b_hh is not None)

    def _prepare(self, output: Tensor, start: Tensor, u: Tensor, w_hh: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """What the rule reads: h_{t-1}, a second tensor of rows, and the recurrent weights."""
        previous = self.timeline.previous(output, start).to(u.dtype)
        if self.weights.w_hr is not None:
            return previous @ rest[-1].to(previous.dtype).mT, previous, w_hh
        if self.kernel is not torch.gru:
            return previous, previous, w_hh
        width = w_hh.shape[1]
        bias = rest[0][:width].to(u.dtype) if self.weights.b_hh is not None else None
        reset = torch.sigmoid(u[..., :width] + F.linear(previous, w_hh[:width].to(u.dtype), bias))
        return previous, reset, w_hh


def _layer_on_host(
    kernel: Callable[..., Any], timeline: Timeline, reverse: bool, x: Tensor, u: Tensor, state: list[Tensor], weights: list[Tensor | None]
) -> tuple[Tensor, ...]:  # fmt: skip
    rows = timeline.by_time(timeline.reversed(x) if reverse else x)
    output, *final = through_time(kernel, rows, timeline.by_time(u), state, weights, timeline.sizes(u))
    return timeline.from_time(output, u), *final


def _is_zero(made_inside: Tensor) -> bool:
    """Of a constant that the forward pass has made from nothing, in every step alike, a graph may know what is in it."""
    with outside_graphs():
        return not bool(made_inside.any())


@made_once_for_graphs_too
def _identity(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return constant(torch.eye(width, dtype=dtype, device=device))


@made_once_for_graphs_too
def _no_bias(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return constant(torch.zeros(width, dtype=dtype, device=device))


def _in_one_piece(weights: list[Tensor]) -> Tensor:
    """As cuDNN wants them: by one kernel, where it would copy each of them."""
    return torch._C._nn.flatten_dense_tensors(weights)


def _one_behind_the_other(weights: list[Tensor]) -> list[Tensor]:
    return list(torch._C._nn.unflatten_dense_tensors(_in_one_piece(weights), weights))


def _cudnn(kernel: Callable[..., Any], u: Tensor, state: list[Tensor], weights: list[Tensor], batch_first: bool) -> tuple[Tensor, ...]:
    """The same kernel by cuDNN's own name. On the way there the stock call looks for one storage of all weights, and graphs hold no storages."""
    piece = None
    if _takes_one_piece(kernel, tuple([weight.shape for weight in weights]), u.dtype, u.device):
        with torch.no_grad():  # it differentiates with regard to the weights themselves
            piece = _in_one_piece(weights)
    output, *final = _run_cudnn(kernel, u, state, weights, piece, batch_first)
    return (output, *final[: len(state)])


def _run_cudnn(
    kernel: Callable[..., Any], u: Tensor, state: list[Tensor], weights: list[Tensor], piece: Tensor | None, batch_first: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """(outputs, final hidden state, final memory, what it reserves, its weights in one piece); `piece`: the last, where it is there already."""
    hidden, *memory = state
    shape = (_KERNELS.index(kernel), weights[1].shape[1], 0, 1, batch_first)  # no projection, one layer
    found: tuple[Tensor, ...] = torch._cudnn_rnn(
        u, weights, len(weights), piece, hidden, memory[0] if memory else None, *shape, 0.0, True, False, [], None
    )
    return found


@lru_cache
def _takes_one_piece(kernel: Callable[..., Any], shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether cuDNN itself puts weights of these shapes one behind the other: looked at once, on numbers that tell them apart."""
    with outside_graphs(), torch.no_grad(), _without_advice():
        count = sum(shape.numel() for shape in shapes)
        numbers = (torch.arange(count, device=device) * 7919 % 2039).to(dtype)
        weights = [piece.view(shape) for piece, shape in zip(numbers.split([shape.numel() for shape in shapes]), shapes)]
        apart = [weight.clone() for weight in weights]
        inner, hidden = shapes[0][1], shapes[1][1]
        u, state = numbers.new_zeros(1, 1, inner), [numbers.new_zeros(1, 1, hidden)] * (2 if kernel is torch.lstm else 1)
        *_, made = _run_cudnn(kernel, u, state, apart, None, batch_first=True)
        return torch.equal(made, numbers)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """PyTorch's advice to call flatten_parameters() is for the user's own layer, not for weights that are put together here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        yield


def _factors(call: Call) -> Factors:
    """From dz, the gradient of the pre-activations."""
    previous, second, w_hh = call.args
    w, bias, projection = (call.kwargs.get(name) for name in ("w_hh", "b_hh", "w_hr"))
    grad = call.output_grad
    if call.func is torch.gru:
        width = second.shape[-1]
        grad = torch.cat([grad[..., : 2 * width], grad[..., 2 * width :] * second], -1)
    factors: Factors = {}
    if w is not None:
        factors[w] = Outer(grad, previous)
    if bias is not None:
        factors[bias] = Dense.summed(grad, bias.shape)
    if projection is not None:
        factors[projection] = Outer(grad @ w_hh.to(grad.dtype), second)
    return factors


_RULE = Rule(_factors, row_axes=all_but_last(1), trusted=True)


def _gates(x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)


@rewrite(torch.lstm_cell)
def lstm_cell(x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> tuple[Tensor, Tensor]:
    of_x, of_h = _gates(x, hx[0], w_ih, w_hh, b_ih, b_hh)
    i, f, g, o = (of_x + of_h).chunk(4, -1)
    c = f.sigmoid() * hx[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


@rewrite(torch.gru_cell)
def gru_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    (r, z, n), (hr, hz, hn) = (part.chunk(3, -1) for part in _gates(x, hx, w_ih, w_hh, b_ih, b_hh))
    z = (z + hz).sigmoid()
    return (1 - z) * (n + (r + hr).sigmoid() * hn).tanh() + z * hx


@rewrite(torch.rnn_tanh_cell)
def rnn_tanh_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    return torch.add(*_gates(x, hx, w_ih, w_hh, b_ih, b_hh)).tanh()


@rewrite(torch.rnn_relu_cell)
def rnn_relu_cell(x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Tensor:
    return torch.add(*_gates(x, hx, w_ih, w_hh, b_ih, b_hh)).relu()
