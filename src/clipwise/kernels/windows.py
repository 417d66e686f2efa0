"""Every window of an image that a kernel slides over, written out in one pass.

    out[n, c, k, l] = images[n, c, window(l) + k], zero beyond the edge

A program writes some places l, of one channel or several, for a few offsets k. (torch pads, views by strides and copies what it cannot view; in a graph it joins
one slice for each offset; F.unfold starts a kernel for each image.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .convolution import in_three_dimensions, three
from .launch import launch
from .operators import operator

_PLACES, _OFFSETS = 1024, 8  # of a program


@triton.jit
def _windows(  # type: ignore[no-untyped-def]
    images, windows_out, rows, channels, offsets, places, places_h, places_w, size_d, size_h, size_w, kernel_h, kernel_w,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w,
    image_n, image_c, image_d, image_h, image_w, PLACES: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    row, at = index // places, (index % places).to(tl.int32)
    from_d = at // (places_h * places_w) * stride_d - pad_d
    from_h = (at // places_w) % places_h * stride_h - pad_h
    from_w = at % places_w * stride_w - pad_w
    image = images + row // channels * image_n + row % channels * image_c
    for step in tl.static_range(OFFSETS):  # so that one need not wait for the other
        offset = tl.program_id(1) * OFFSETS + step
        d = from_d + offset // (kernel_h * kernel_w) * dilation_d
        h = from_h + (offset // kernel_w) % kernel_h * dilation_h
        w = from_w + offset % kernel_w * dilation_w
        is_there = (row < rows) & (offset + 0 * at < offsets)
        inside = is_there & (d >= 0) & (d < size_d) & (h >= 0) & (h < size_h) & (w >= 0) & (w < size_w)
        numbers = tl.load(image + d * image_d + h * image_h + w * image_w, mask=inside, other=0.0)
        tl.store(windows_out + (row * offsets + offset) * places + at, numbers, mask=is_there)


def windows_of(images: Tensor, kernel: list[int], places: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """(N, C, *S) → (N, C, *kernel, *places)"""
    return (_operator if is_tracing() else _run)(images, kernel, places, stride, padding, dilation)


def _run(images: Tensor, kernel: list[int], places: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    found = images.new_empty((*images.shape[:2], *kernel, *places))
    count, offsets, examples, channels = torch.Size(places).numel(), torch.Size(kernel).numel(), *images.shape[:2]
    images = in_three_dimensions(images)
    _, places_h, places_w = three(places, 1)
    _, kernel_h, kernel_w = three(kernel, 1)
    arguments: tuple[Any, ...] = (
        images, found, examples * channels, channels, offsets, count, places_h, places_w, *images.shape[2:], kernel_h, kernel_w,
        *three(stride, 1), *three(padding, 0), *three(dilation, 1), *images.stride(),
    )  # fmt: skip
    at_once, steps = min(_PLACES, triton.next_power_of_2(max(examples * channels * count, 32))), min(_OFFSETS, offsets)
    if found.numel():
        grid = (triton.cdiv(examples * channels * count, at_once), triton.cdiv(offsets, steps))
        launch(_windows, grid, *arguments, PLACES=at_once, OFFSETS=steps)
    return found


_operator = operator("windows_of", _run)


@_operator.register_fake
def _(images: Tensor, kernel: list[int], places: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    return images.new_empty((*images.shape[:2], *kernel, *places))
