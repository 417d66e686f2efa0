"""An LSTM or GRU layer on a CPU: the stock kernel on the inputs themselves, and a backward pass of our own to its pre-activations.

To be fed pre-activations through an identity costs these kernels more than the layer does. But what a backward pass needs is in the outputs:
with h_{t-1} known, the gates of all steps are one product, a_t = u_t + W_hh h_{t-1} + b_hh. What is left for each step, from the last to the first, is

    GRU     dh_{t-1} += W_hhᵀ dg_t + z_t ⊙ dh_t,     dz = dh ⊙ [a_n r(1-r)(1-z)(1-n²), (h_{t-1}-n) z(1-z), (1-z)(1-n²)],   dg as dz, with r ⊙ in its last part
    LSTM    dh_{t-1} += W_hhᵀ dz_t,  dc_t += dh ⊙ o(1-tanh²c),  dc_{t-1} = f_t ⊙ dc_t,
            dz = [dc ⊙ g i(1-i), dc ⊙ c_{t-1} f(1-f), dc ⊙ i(1-g²), dh ⊙ tanh(c) o(1-o)]

where dz is the gradient of u, and dg that of the hidden side's product. Both passes are operators, which graphs hold as one node, however many steps there are.
Rows lie by time: those of the first step, then those of the second …; later steps may have fewer (sequences of different lengths, sorted).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..taps import applied
from .operators import operator

# Rows of a step times width²: where it is less, an identity costs less than what is started for every step.
_LEAST_WORK: dict[Callable[..., Any], int] = {torch.lstm: 2**21, torch.gru: 0}

_of_sigmoid, _of_tanh = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward  # (gradient, output): in one pass over memory


def pays(kernel: Callable[..., Any], u: Tensor, sizes: Sequence[int]) -> bool:
    """Whether a layer with these pre-activations is faster this way. sizes: rows of every step."""
    is_plain = u.device.type == "cpu" and u.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled("cpu")
    work = sizes[0] * u.shape[-1] ** 2 if sizes else 0
    return is_plain and work > 0 and work >= _LEAST_WORK.get(kernel, math.inf)


def through_time(
    kernel: Callable[..., Any], x: Tensor, u: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor | None], sizes: Sequence[int]
) -> tuple[Tensor, ...]:  # fmt: skip
    """(outputs, final state …) of one layer in one direction. They depend on u, the state and the weights of the hidden side.

    x: (N, d) and u = x W_ihᵀ + b_ih: (N, p), rows by time. state: (1, B, H) each. weights: w_ih, w_hh, b_ih, b_hh.
    """
    w_ih, w_hh, b_ih, b_hh = weights
    outputs: tuple[Tensor, ...] = applied(_ThroughTime, kernel is torch.lstm, list(sizes), (x, w_ih, b_ih), u, w_hh, b_hh, *state)
    return outputs[: 1 + len(state)]


class _ThroughTime(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, is_lstm: bool, sizes: list[int], inner: tuple[Tensor | None, ...], u: Tensor, w_hh: Tensor, b_hh: Tensor | None, *state: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """inner: x, w_ih, b_ih, whose gradients go through u. They are no arguments of autograd's."""
        x, w_ih, b_ih = inner
        outputs: tuple[Tensor, ...] = _forward(is_lstm, x, state, _given((w_ih, w_hh, b_ih, b_hh)), sizes)
        ctx.is_lstm, ctx.sizes = is_lstm, sizes
        ctx.save_for_backward(u, w_hh, b_hh, outputs[0], *state)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        u, w_hh, b_hh, output, *state = ctx.saved_tensors
        arriving = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, (output, *state))]
        of_hidden = ctx.next_functions[1 : 2 if b_hh is None else 3]
        wanted = any(_is_asked_for(node) for node, _ in of_hidden)
        with torch._C.DisableTorchFunction():  # a tape that is on would ask for a rule
            du, dh, dc, dw, db = _backward(ctx.is_lstm, u, output, state, _given((w_hh, b_hh)), arriving, ctx.sizes, wanted)
        return None, None, None, du, dw if wanted else None, db if wanted and b_hh is not None else None, *(dh, dc)[: len(state)]


def _is_asked_for(node: Any) -> bool:
    """Whether this backward pass goes on to there: passes to the taps alone want no gradients of weights."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch says no more of a leaf that the pass was asked about
        return True


def _given(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _run_forward(
    is_lstm: bool, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs (N, H) and final states (1, B, H); an empty tensor for the memory that only an LSTM has."""
    kernel: Callable[..., Any] = torch.lstm if is_lstm else torch.gru
    given = tuple(state) if is_lstm else state[0]
    middle = list(weights), len(weights) == 4, 1, 0.0, False, False
    with torch.no_grad():
        if sizes[0] == sizes[-1]:
            output, *final = kernel(x.reshape(len(sizes), sizes[0], -1), given, *middle, False)
        else:
            output, *final = kernel(x, torch.tensor(sizes), given, *middle)
    return output.reshape(len(x), -1), final[0], final[1] if is_lstm else x.new_empty(0)


def _run_backward(
    is_lstm: bool, u: Tensor, output: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor], sizes: Sequence[int],
    of_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of u, of both states, of w_hh and b_hh; empty tensors for what there is not, or is not wanted. grads: those of outputs and final states."""
    w_hh, *bias = weights
    of_state, of_weight, of_bias = (u.new_empty(0) for _ in range(3))
    with torch.no_grad():
        before = torch.cat([state[0][0], *[rows[:count] for rows, count in zip(output.split(list(sizes)), sizes[1:])]])  # h_{t-1}
        of_hidden = torch.addmm(bias[0], before, w_hh.t()) if bias else before @ w_hh.t()
        dh = _arriving(grads, sizes)
        if is_lstm:
            of_state = grads[2].clone()
            du = dg = _lstm(u, of_hidden, state[1][0], dh, of_state[0], w_hh, sizes)
        else:
            du, dg = _gru(u, of_hidden, before, dh, w_hh, sizes)
        if of_weights:
            of_weight, of_bias = dg.t() @ before, dg.sum(0) if bias else of_bias
        return du, dh[0].clone().unsqueeze(0), of_state, of_weight, of_bias


def _arriving(grads: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Where the gradients of h_0, h_1, … h_T are added up: so far what comes from outputs, and from the final state of every sequence."""
    everything = torch.cat([grads[0].new_zeros(sizes[0], grads[0].shape[1]), grads[0]])
    dh = list(everything.split([sizes[0], *sizes]))
    for rows, count, following in zip(dh[1:], sizes, [*sizes[1:], 0]):
        if count > following:
            rows[following:] += grads[1][0, following:count]
    return dh


def _gru(u: Tensor, of_hidden: Tensor, before: Tensor, dh: list[Tensor], w_hh: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    (u_r, u_z, u_n), (h_r, h_z, h_n) = u.chunk(3, -1), of_hidden.chunk(3, -1)
    r, z = (u_r + h_r).sigmoid_(), (u_z + h_z).sigmoid_()
    n = torch.addcmul(u_n, r, h_n).tanh_()
    of_n = _of_tanh(1 - z, n)
    factors = torch.stack([_of_sigmoid(of_n * h_n, r), _of_sigmoid(before - n, z), of_n], 1)  # (N, 3, H)
    gated = factors.clone()
    gated[:, 2] *= r
    du = torch.empty_like(factors)
    steps = zip(itertools.pairwise(dh), *(rows.split(list(sizes)) for rows in (factors, gated, z, du)))
    for (earlier, here), factor, gate, keep, out in reversed(list(steps)):
        torch.mul(here.unsqueeze(1), factor, out=out)
        gate *= here.unsqueeze(1)
        earlier[: len(out)].addmm_(gate.flatten(1), w_hh).addcmul_(keep, here)
    return du.flatten(1), gated.flatten(1)


def _lstm(u: Tensor, of_hidden: Tensor, start: Tensor, dh: list[Tensor], dc: Tensor, w_hh: Tensor, sizes: Sequence[int]) -> Tensor:
    """start: c_0. dc: (B, H), gradient of the memory behind every sequence; becomes that of c_0."""
    i, f, g, o = (gate.contiguous() for gate in (u + of_hidden).chunk(4, -1))
    i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
    memories = [start]
    for new, forget in zip((i * g).split(list(sizes)), f.split(list(sizes))):
        memories.append(torch.addcmul(new, forget, memories[-1][: len(new)]))
    squashed = torch.cat(memories[1:]).tanh_()
    earlier_memory = torch.cat([memory[:count] for memory, count in zip(memories, sizes)])
    of_memory = torch.stack([_of_sigmoid(g, i), _of_sigmoid(earlier_memory, f), _of_tanh(i, g)], 1)  # (N, 3, H)
    of_output, reaching = _of_sigmoid(squashed, o), _of_tanh(o, squashed)
    du = u.new_empty(len(u), 4, f.shape[1])
    steps = zip(itertools.pairwise(dh), *(rows.split(list(sizes)) for rows in (of_memory, of_output, reaching, f, du)))
    for (earlier, here), factor, factor_o, reach, forget, out in reversed(list(steps)):
        memory = dc[: len(out)].addcmul_(here, reach)
        torch.mul(memory.unsqueeze(1), factor, out=out[:, :3])
        torch.mul(here, factor_o, out=out[:, 3])
        memory *= forget
        earlier[: len(out)].addmm_(out.flatten(1), w_hh)
    return du.flatten(1)


_forward = operator("recurrent_on_host", _run_forward)
_backward = operator("recurrent_on_host_backward", _run_backward)


@_forward.register_fake
def _(is_lstm: bool, x: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], sizes: Sequence[int]) -> tuple[Tensor, ...]:
    output = x.new_empty(len(x), weights[1].shape[1])
    return output, state[0].new_empty(state[0].shape), state[1].new_empty(state[1].shape) if is_lstm else x.new_empty(0)


@_backward.register_fake
def _(
    is_lstm: bool, u: Tensor, output: Tensor, state: Sequence[Tensor], weights: Sequence[Tensor], grads: Sequence[Tensor], sizes: Sequence[int],
    of_weights: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    hidden, *memory = state
    wanted = [memory[:1], weights[:1] if of_weights else [], weights[1:] if of_weights else []]
    return (
        u.new_empty(u.shape),
        hidden.new_empty(hidden.shape),
        *[one[0].new_empty(one[0].shape) if one else u.new_empty(0) for one in wanted],
    )
