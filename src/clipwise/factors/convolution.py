"""Gradients of convolution kernels, 1D to 3D, transposed or not (paper, Section 5.2)."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import are_available
from ..numerics import drop_rows, in_working_precision, rounds_to_tf32, scale_rows, squared_norms, to_accumulate
from ..tracing import is_tracing_in_one
from .base import Factor, Grouping
from .outer import Outer

_WINDOWS_THAT_FIT_A_CACHE = 16 * 2**20  # bytes; beyond it copying every window out costs more than a grouped convolution
_FEW_PLACES = 100  # of a window in an image: with so few, a GPU spends a grouped convolution on starting it
KERNELS = ("windows", "groups")


@dataclass(frozen=True)
class Geometry:
    """How a convolution slides: one number an axis, as in torch.convolution."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()


class Convolution(Factor):
    """g_i is the gradient of the kernel for the images of example i. grad: (B, k, Cout, *L), input: (B, k, Cin, *S), k images an example.

    Two ways to write it out: copy all windows and multiply (few windows), or one convolution with groups = B, whose
    weight gradient is the gradients of all examples side by side (many windows).
    """

    def __init__(self, grad: Tensor, input: Tensor, shape: torch.Size, geometry: Geometry):
        self.grad = to_accumulate(grad)
        self.input = to_accumulate(input).to(self.grad.dtype)
        self.shape = torch.Size(shape)
        self.geometry = geometry
        self.batch = grad.shape[0]
        self.kernel = ""  # one of KERNELS; as a rule says where it is empty

    @classmethod
    def of_rows(cls, grad: Tensor, input: Tensor, shape: torch.Size, geometry: Geometry) -> Convolution:
        """One image a row. grad: (R, Cout, *L), input: (R, Cin, *S)"""
        return cls(grad.unsqueeze(1), input.unsqueeze(1), shape, geometry)

    def dense(self) -> Tensor:
        if self.batch == 0:
            return self.grad.new_zeros(0, *self.shape)
        if self._is_pointwise:
            grad, input = (side.flatten(3).transpose(1, 2).flatten(2) for side in (self.grad, self.input))  # (B, C, k·L)
            return torch.bmm(grad, input.mT).view(self.batch, *self.shape)
        if (self.kernel or self.kernel_by_rule) == "windows":
            return self._from_windows() if self.geometry.groups == 1 and self.grad.shape[1] == 1 else self.as_outer().dense()
        grad, input = (side.transpose(0, 1).flatten(1, 2) for side in (self.grad, self.input))  # (k, B·C, *)
        kernels = torch.Size((self.batch * self.shape[0], *self.shape[1:]))
        return self._kernel_gradient(grad, input, kernels, self.geometry.groups * self.batch).view(self.batch, *self.shape)

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        if self.batch == 0:
            return self.grad.new_zeros(self.shape)
        exact = in_working_precision(weights, self.dtype)
        grad, input = scale_rows(self.grad, exact, clean=clean), self.input if clean else drop_rows(self.input, exact)
        return self._kernel_gradient(grad.flatten(0, 1), input.flatten(0, 1), self.shape, self.geometry.groups)

    def _kernel_gradient(self, grad: Tensor, input: Tensor, shape: torch.Size, groups: int) -> Tensor:
        how, dimensions = self.geometry, len(self.shape) - 2
        like_kernel = grad.new_empty(()).expand(shape)  # only its shape is read
        output_padding = how.output_padding or (0,) * dimensions
        return torch.ops.aten.convolution_backward(
            grad, input, like_kernel, None, how.stride, how.padding, how.dilation, how.transposed, output_padding, groups,
            [False, True, False],
        )[1]  # fmt: skip

    def _from_windows(self) -> Tensor:
        """(values, places) · (places, window) for each image: `as_outer().dense()` without its detours."""
        slid, still = (self.grad, self.input) if self.geometry.transposed else (self.input, self.grad)
        windows = self._windows(slid[:, 0], still.shape[3:]).reshape(self.batch, self.shape[1:].numel(), -1)  # (B, d, L)
        return torch.bmm(still.reshape(self.batch, self.shape[0], -1), windows.mT).view(self.batch, *self.shape)

    def by_kernel(self, tile: int, keep: bool) -> tuple[Tensor, Tensor | None]:
        """Squared norms, (B,) in float64, and the gradients, (B, *shape), if they are kept."""
        from ..kernels.convolution import convolution_gradients

        slid, still = (self.grad, self.input) if self.geometry.transposed else (self.input, self.grad)
        how, tf32 = self.geometry, rounds_to_tf32(by_cudnn=True)
        shape, stride, padding, dilation = (list(sizes) for sizes in (self.shape, how.stride, how.padding, how.dilation))
        squares, kept = convolution_gradients(still, slid, shape, stride, padding, dilation, how.groups, tile, tf32, keep)
        return squares, kept if keep else None

    def as_outer(self) -> Outer:
        """The same gradients as Σ over windows of (values at the window's place) ⊗ (window).

        A transposed convolution is the ordinary one with input and output exchanged: its kernel (Cin, Cout/groups, *K)
        slides over the output gradient, and the input stands where the output did.
        """
        slid, still = (self.grad, self.input) if self.geometry.transposed else (self.input, self.grad)
        batch, images, groups = self.batch, slid.shape[1], self.geometry.groups
        places = still.shape[3:]
        windows = self._windows(slid.flatten(0, 1), places)  # (B·k, C, *K, *L)
        kernel = self.shape[1] * self.shape[2:].numel()
        right = windows.reshape(batch, images, groups, kernel, places.numel()).transpose(1, 2).mT  # (B, G, k, L, d)
        left = still.reshape(batch, images, groups, -1, places.numel()).transpose(1, 2).mT  # (B, G, k, L, p)
        return Outer(left, right, self.shape, groups=True)

    def _windows(self, images: Tensor, places: torch.Size) -> Tensor:
        """Every window. (N, C, *S) → (N, C, *K, *L)

        A view of the padded images by strides; where a kernel of our own runs, a copy, which the view would become as soon as something is done with
        it (unless a window is a pixel). In a graph a copy in any case: a compiler may lay the images out otherwise, and a view by strides would read
        beyond them.
        """
        how, kernel = self.geometry, self.shape[2:]
        if not self._is_pointwise and are_available(images.device, images.dtype):
            from ..kernels.windows import windows_of

            return windows_of(images, list(kernel), list(places), list(how.stride), list(how.padding), list(how.dilation))
        # The last window may need zeros beyond the padding (transposed, output_padding) or stop short of the edge.
        reach = [(place - 1) * s + (k - 1) * d + 1 for place, s, k, d in zip(places, how.stride, kernel, how.dilation)]
        pads = [(p, end - size - p) for p, end, size in zip(how.padding, reach, images.shape[2:])]
        if any(amount for pair in pads for amount in pair):
            images = F.pad(images, [amount for pair in reversed(pads) for amount in pair])
        if is_tracing_in_one():
            whole = (slice(None), slice(None))
            slices = [
                tuple(slice(k * d, k * d + (place - 1) * s + 1, s) for k, d, s, place in zip(offset, how.dilation, how.stride, places))
                for offset in itertools.product(*map(range, kernel))
            ]
            return torch.stack([images[whole + one] for one in slices], 2).unflatten(2, kernel)
        steps = images.stride()[2:]
        return images.as_strided(
            (*images.shape[:2], *kernel, *places),
            (*images.stride()[:2], *(step * d for step, d in zip(steps, how.dilation)), *(step * s for step, s in zip(steps, how.stride))),
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """Ways to write the gradients out, if there are several."""
        return () if self._is_pointwise or self.batch == 0 else KERNELS

    @property
    def kernel_by_rule(self) -> str:
        if self.device.type == "cuda":
            return "windows" if self.terms <= _FEW_PLACES else "groups"
        return "windows" if self.windows_bytes <= _WINDOWS_THAT_FIT_A_CACHE else "groups"

    @property
    def _is_pointwise(self) -> bool:
        """A kernel of one pixel, at every pixel: a matrix product."""
        how = self.geometry
        still = how.groups == 1 and not how.transposed and not any(how.padding)
        return still and self.shape[2:].numel() == 1 and all(step == 1 for step in how.stride)

    @property
    def windows_bytes(self) -> int:
        still = self.input if self.geometry.transposed else self.grad
        windows = still.shape[0] * still.shape[1] * still.shape[3:].numel()
        return windows * self.geometry.groups * self.shape[1:].numel() * still.element_size()

    def mass(self) -> Tensor:
        """Σ over windows of ‖values‖·‖window‖ ≤ ‖all values‖·‖all windows‖ (Cauchy–Schwarz), and a pixel lies in at most |K| windows."""
        return (squared_norms(self.grad) * squared_norms(self.input) * self.shape[2:].numel()).sqrt()

    def merge(self, grouping: Grouping) -> Convolution:
        return Convolution(grouping(self.grad).flatten(1, 2), grouping(self.input).flatten(1, 2), self.shape, self.geometry)

    def examples(self, start: int, stop: int) -> Convolution:
        some = Convolution(self.grad[start:stop], self.input[start:stop], self.shape, self.geometry)
        some.kernel = self.kernel
        return some

    def reshaped(self, shape: torch.Size) -> Factor:
        return self.as_outer().reshaped(shape)

    @property
    def terms(self) -> int:
        still = self.input if self.geometry.transposed else self.grad
        return still.shape[1] * still.shape[3:].numel()

    @property
    def blocks(self) -> int:
        return self.geometry.groups

    @property
    def widths(self) -> int:
        """p + d of the matrix form, for one group."""
        return self.shape[0] // self.geometry.groups + self.shape[1:].numel()

    @property
    def summary(self) -> str:
        return f"{self.terms} windows of {super().summary}"

    @property
    def dense_flops(self) -> int:
        return 2 * self.terms * self.numel

    @property
    def signature(self) -> Hashable:
        return super().signature, self.geometry

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.grad, self.input
