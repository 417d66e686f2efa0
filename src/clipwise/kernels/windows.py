"""Every window of an image that a kernel slides over, written out in one pass.

    out[n, c, k, l] = images[n, c, window(l) + k], zero beyond the edge

A program writes some places l of a few channels, for a few offsets k. (torch pads, views by strides and copies what it cannot view; in a graph it joins
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

_MOST_OFFSETS, _ROWS = 12, 2  # of a program
_WASTE = 1.1  # places that programs have room for, over those that there are


@triton.jit
def _windows(  # type: ignore[no-untyped-def]
    images, windows_out, rows, channels, offsets, places, places_h, places_w, size_d, size_h, size_w, kernel_h, kernel_w,
    stride_d, stride_h, stride_w, pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w,
    image_n, image_c, image_d, image_h, image_w, PLACES: tl.constexpr, OFFSETS: tl.constexpr, ROWS: tl.constexpr, IS_FLAT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(places, PLACES)
    at = tl.program_id(0) % blocks * PLACES + tl.arange(0, PLACES)
    line = at // places_w
    from_w = (at - line * places_w) * stride_w - pad_w
    from_h = (line if IS_FLAT else line % places_h) * stride_h - pad_h
    from_d = line // places_h * stride_d - pad_d
    for number in range(ROWS):
        row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + number
        image = images + row // channels * image_n + row % channels * image_c
        for step in tl.static_range(OFFSETS):  # so that one need not wait for the other
            offset = tl.program_id(1) * OFFSETS + step
            h = from_h + (offset // kernel_w) % kernel_h * dilation_h
            w = from_w + offset % kernel_w * dilation_w
            is_there = at < tl.where((row < rows) & (offset < offsets), places, 0)
            inside = is_there & (h >= 0) & (h < size_h) & (w >= 0) & (w < size_w)
            where = h * image_h + w * image_w
            if not IS_FLAT:
                d = from_d + offset // (kernel_h * kernel_w) * dilation_d
                inside = inside & (d >= 0) & (d < size_d)
                where += d * image_d
            numbers = tl.load(image + where, mask=inside, other=0.0)
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
    if found.numel():
        at_once, steps = _places_of_a_program(count), triton.cdiv(offsets, triton.cdiv(offsets, _MOST_OFFSETS))
        grid = (triton.cdiv(examples * channels, _ROWS) * triton.cdiv(count, at_once), triton.cdiv(offsets, steps))
        flat = images.shape[2] == 1 and offsets == kernel_h * kernel_w and count == places_h * places_w and not three(padding, 0)[0]
        launch(_windows, grid, *arguments, PLACES=at_once, OFFSETS=steps, ROWS=_ROWS, IS_FLAT=flat, num_warps=max(1, at_once // 128))
    return found


def _places_of_a_program(count: int) -> int:
    """A power of two: many, and little of it beyond the last place."""
    fitting = [size for size in (512, 256, 128, 64) if triton.cdiv(count, size) * size <= _WASTE * count]
    return max(fitting, default=min(64, triton.next_power_of_2(max(count, 32))))


_operator = operator("windows_of", _run)


@_operator.register_fake
def _(images: Tensor, kernel: list[int], places: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    return images.new_empty((*images.shape[:2], *kernel, *places))
