"""The gradients of a convolution's kernel for every example, and their squared norms, as products over the places of the windows.

    g[o, c, k] = Σ_l still[o, l] · slid[c, window(l) + k]

A program forms one tile (channels out × channels in) at one offset k of one example, adding over all places l of its images, and reads the
images where they lie, whatever their layout; no window is copied. 1D, 2D and 3D, strides, padding, dilation, groups. Of a transposed
convolution the output slides and the input is still.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tracing import is_tracing
from .launch import launch
from .operators import operator
from .outer import added_up, precision_of, tile_squares

_PLACES = 32  # that are multiplied at once


@triton.jit
def _gradients(  # type: ignore[no-untyped-def]
    still, slid, largest_out, squares_out, kept_out, images, outs, ins, groups,
    places_d, places_h, places_w, size_d, size_h, size_w, kernel_d, kernel_h, kernel_w, stride_d, stride_h, stride_w,
    pad_d, pad_h, pad_w, dilation_d, dilation_h, dilation_w,
    still_n, still_c, still_d, still_h, still_w, slid_n, slid_c, slid_d, slid_h, slid_w,
    PRECISION: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    example, tile = tl.program_id(0).to(tl.int64), tl.program_id(2)
    offset, group = tl.program_id(1) // groups, tl.program_id(1) % groups
    kd, kh, kw = offset // (kernel_h * kernel_w), (offset // kernel_w) % kernel_h, offset % kernel_w
    tiles = tl.cdiv(ins, TILE)
    out, inp = (tile // tiles) * TILE + tl.arange(0, TILE), (tile % tiles) * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), dtype=tl.float32)
    places = places_d * places_h * places_w
    for image in range(images):
        still_image = still + (example * images + image) * still_n + group * outs * still_c
        slid_image = slid + (example * images + image) * slid_n + group * ins * slid_c
        for start in range(0, places, STEP):
            at = start + tl.arange(0, STEP)
            ld, lh, lw = at // (places_h * places_w), (at // places_w) % places_h, at % places_w
            sd, sh, sw = (
                ld * stride_d - pad_d + kd * dilation_d,
                lh * stride_h - pad_h + kh * dilation_h,
                lw * stride_w - pad_w + kw * dilation_w,
            )
            inside = (at < places) & (sd >= 0) & (sd < size_d) & (sh >= 0) & (sh < size_h) & (sw >= 0) & (sw < size_w)
            a = tl.load(
                still_image + out[:, None] * still_c + (ld * still_d + lh * still_h + lw * still_w)[None, :],
                mask=(out < outs)[:, None] & inside[None, :],
                other=0.0,
            )
            b = tl.load(
                slid_image + inp[None, :] * slid_c + (sd * slid_d + sh * slid_h + sw * slid_w)[:, None],
                mask=inside[:, None] & (inp < ins)[None, :],
                other=0.0,
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    tile_squares(acc, largest_out, squares_out, (example * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tile)
    if KEEP:  # (B, groups·outs, ins, *kernel)
        offsets = kernel_d * kernel_h * kernel_w
        row = (example * groups + group) * outs + out
        where = kept_out + (row[:, None] * ins + inp[None, :]) * offsets + offset
        tl.store(where, acc, mask=(out < outs)[:, None] & (inp < ins)[None, :])


def three(numbers: list[int], missing: int) -> list[int]:
    """As in three dimensions."""
    return [missing] * (3 - len(numbers)) + list(numbers)


def in_three_dimensions(images: Tensor) -> Tensor:
    """(B·k, C, *S) → (B·k, C, D, H, W)"""
    for _ in range(5 - images.dim()):
        images = images.unsqueeze(2)
    return images


def convolution_gradients(
    still: Tensor, slid: Tensor, shape: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, tile: int, tf32: bool, keep: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """still: (B, k, C, *L), slid: (B, k, C', *S), shape of the kernel → squared norms, (B,) in float64, and the gradients, (B, *shape), if kept"""
    return (_operator if is_tracing() else _run)(still, slid, shape, stride, padding, dilation, groups, tile, tf32, keep)


def _run(
    still: Tensor, slid: Tensor, shape: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, tile: int, tf32: bool, keep: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    examples, images = still.shape[:2]
    outs, ins, *kernel = shape[0] // groups, shape[1], *three(shape[2:], 1)
    still, slid = (in_three_dimensions(side.flatten(0, 1)) for side in (still, slid))
    offsets, tiles = kernel[0] * kernel[1] * kernel[2], triton.cdiv(outs, tile) * triton.cdiv(ins, tile)
    largest, squares = (still.new_empty(examples * offsets * groups * tiles, dtype=torch.float32) for _ in range(2))
    kept = still.new_empty((examples, *shape) if keep else (0,), dtype=torch.float32)
    arguments: tuple[Any, ...] = (
        still, slid, largest, squares, kept, images, outs, ins, groups, *still.shape[2:], *slid.shape[2:], *kernel, *three(stride, 1),
        *three(padding, 0), *three(dilation, 1), *still.stride(), *slid.stride(),
    )  # fmt: skip
    grid = (examples, offsets * groups, tiles)
    launch(_gradients, grid, *arguments, PRECISION=precision_of(still, tf32), TILE=tile, STEP=_PLACES, KEEP=keep)
    return added_up(largest, squares, examples), kept


_operator = operator("convolution_gradients", _run)


@_operator.register_fake
def _(
    still: Tensor, slid: Tensor, shape: list[int], stride: list[int], padding: list[int], dilation: list[int], groups: int, tile: int, tf32: bool, keep: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    kept = still.new_empty((still.shape[0], *shape) if keep else (0,), dtype=torch.float32)
    return still.new_empty(still.shape[0], dtype=torch.float64), kept
