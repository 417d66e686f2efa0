"""Exactness against a float64 loop over examples, and black-box sensitivity."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.testing import clip_and_add, loop_gradients, squared_output

ALL_METHODS = ("bookkeep", "reweight", "multiloss", "nxbp")
# Norms allow for what rounding may add to sums whose terms cancel, 64·2⁻²⁴ of the norms of their terms: 1e-4 where these are thirty
# times the whole, as for convolutions with many places.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}

# In whose words memory ran out: torch's, cuBLAS's, cuDNN's, the host's, Python's.
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."
    ),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    MemoryError(),
]


class Net(nn.Module):
    """Modules and parameters by keyword, and a forward function of (net, *inputs)."""

    def __init__(self, forward: Callable[..., Any], **parts: Any):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs: Any) -> Any:
        return self._forward(self, *inputs)


def examples(batch: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random examples whose sizes spread over a factor of ten, so that some are clipped and some are not."""
    scale = torch.linspace(0.3, 3.0, batch, dtype=dtype).view(-1, *[1] * len(shape))
    return torch.randn(batch, *shape, dtype=dtype) * scale


def clipped(model: nn.Module, inputs: Sequence[Any], bound: float, *, loss=squared_output, method="auto", context=None, fallback=False):
    """(norms, {name: clipped sum}) by clipwise."""
    with cw.capture(model, fallback=fallback) as tape, context() if context else contextlib.nullcontext():
        losses = loss(model(*inputs))
    norms = cw.per_example_norms(tape, losses)
    return norms, cw.clipped_gradients(tape, losses, cw.flat(bound), method=method)


def assert_exact(
    model: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Tensor] = squared_output,
    dtype: torch.dtype = torch.float64,
    methods: Sequence[str] = ("bookkeep", "reweight"),
    tolerance: float | None = None,
    fallback: bool = False,
) -> None:
    """Norms and clipped sums agree with a float64 loop, by every method, also when the captured way was verified before."""
    model = copy.deepcopy(model).to(dtype)
    inputs = tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    reference = loop_gradients(model, inputs, loss)
    norms = clip_and_add(reference, 1.0)[1]
    bound = float(norms.median()) or 1.0
    expected, _ = clip_and_add(reference, bound)
    allowed = tolerance or TOLERANCE[dtype]
    for method in (*methods, methods[0]):
        found_norms, found = clipped(model, inputs, bound, loss=loss, method=method, fallback=fallback)
        scale = max(float(value.norm()) for value in expected.values()) or 1.0
        for name, value in expected.items():
            mine = found[name].double() if name in found else torch.zeros_like(value)
            error = float((mine - value).norm()) / scale
            assert error <= allowed, f"{method}: clipped sum of {name} off by {error:.2e}"
        relative = ((found_norms.double() - norms) / norms.clamp_min(1e-30)).abs().max()
        assert float(relative) <= allowed, f"{method}: norms off by {float(relative):.2e}"


def row_norms(rows: Sequence[Sequence[Tensor | None]]) -> Tensor:
    """The norm of each example's gradient over all parameters. rows: [example][parameter], None where a parameter took no part"""
    return torch.stack([torch.cat([grad.to_dense().flatten() for grad in row if grad is not None]).norm() for row in rows])


def sensitivity(
    model: nn.Module, inputs: Sequence[Tensor], bound: float, *, loss=squared_output, method: str = "auto", context=None, clipping=None
) -> float:
    """max_i ‖f(batch) − f(batch without i)‖ / S, measured from outside."""
    clipping = clipping or cw.flat(bound)

    def release(batch: Sequence[Tensor]) -> dict[str, Tensor]:
        with cw.capture(model) as tape, context() if context else contextlib.nullcontext():
            losses = loss(model(*batch))
        return cw.clipped_gradients(tape, losses, clipping, method=method)

    whole = release(inputs)
    worst = 0.0
    for i in range(len(inputs[0])):
        rest = release([torch.cat([x[:i], x[i + 1 :]]) for x in inputs])
        moved = sum(float((whole[name].double() - rest[name].double()).square().sum()) for name in whole)
        worst = max(worst, moved**0.5 / clipping.sensitivity)
    return worst
