"""Noise drawn, scaled and added to clipped sums in one pass over them.

    gradient = sum/B̄ + (σ/B̄)·N(0, 1), in float64, rounded once

A pair of Gaussians comes from four words of a Philox counter (Salmon et al. 2011, ten rounds, as torch draws on a GPU) by the method of
Box and Muller: uniforms of 53 bits, so that the tails end at 8.6 standard deviations.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

_BLOCK = 512  # pairs that a program draws
_MULTIPLIERS, _INCREMENTS = (0xCD9E8D57, 0xD2511F53), (0x9E3779B9, 0xBB67AE85)  # of Philox, on words of 32 bits
_ROUNDS, _WORD = 10, 0xFFFFFFFF


@triton.jit
def _uniform(high, low):  # type: ignore[no-untyped-def]
    """In [0, 1), of 53 bits."""
    upper = (high.to(tl.uint32, bitcast=True) >> 5).to(tl.float64)
    lower = (low.to(tl.uint32, bitcast=True) >> 6).to(tl.float64)
    return (upper * 67108864.0 + lower) * 1.1102230246251565e-16  # 2²⁶, 2⁻⁵³


@triton.jit
def _noised(sums, seed, scale, deviation, turn, noised_out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = tl.randint4x(tl.load(seed), pair)
    radius = tl.sqrt(-2.0 * tl.log(1.0 - _uniform(a, b)))
    angle = _uniform(c, d) * tl.load(turn)
    first = tl.program_id(0).to(tl.int64) * 2 * BLOCK + tl.arange(0, BLOCK)
    for half in tl.static_range(2):
        at = first + half * BLOCK
        normal = radius * (tl.cos(angle) if half == 0 else tl.sin(angle))
        total = tl.load(sums + at, mask=at < count, other=0.0).to(tl.float64) * tl.load(scale) + normal * tl.load(deviation)
        tl.store(noised_out + at, total.to(noised_out.dtype.element_ty), mask=at < count)


def noised(sums: Tensor, seed: Tensor, scale: Tensor, deviation: Tensor, found: Tensor) -> Tensor:
    """scale·sums + deviation·N(0, I), written to `found`. sums and found: (n,), seed: () int64, scale and deviation: () float64, all on one device

    `found` may be `sums`: each number is read and written by one program. Pairs are numbered by 31 bits, so n may be 2³².
    """
    turn = torch.full((), 2 * math.pi, dtype=torch.float64, device=sums.device)  # a number in the code of a kernel has 24 bits
    if len(sums):
        grid = (triton.cdiv(len(sums), 2 * _BLOCK),)
        launch(_noised, grid, sums.contiguous(), seed, scale, deviation, turn, found, len(sums), BLOCK=_BLOCK)
    return found


def plain_normals(seed: int, count: int) -> Tensor:
    """The same draw by plain operations, (n,) in float64 on the host: the kernel's twin, for comparison."""
    pair = torch.arange(-(-count // (2 * _BLOCK)) * _BLOCK, device="cpu")
    zeros = torch.zeros_like(pair)
    words, keys = [pair, zeros, zeros, zeros], [seed & _WORD, seed >> 32]
    for _ in range(_ROUNDS):
        b, a = (multiplier * word for multiplier, word in zip(_MULTIPLIERS, (words[2], words[0])))  # 64 bits, modulo 2⁶⁴
        words = [(b >> 32) & _WORD ^ words[1] ^ keys[0], b & _WORD, (a >> 32) & _WORD ^ words[3] ^ keys[1], a & _WORD]
        keys = [(key + increment) & _WORD for key, increment in zip(keys, _INCREMENTS)]
    radius, angle = (((high >> 5).double() * 2**26 + (low >> 6).double()) * 2.0**-53 for high, low in (words[:2], words[2:]))
    radius, angle = (-2 * (1 - radius).log()).sqrt(), angle * (2 * math.pi)
    return torch.stack([(radius * f(angle)).view(-1, _BLOCK) for f in (torch.cos, torch.sin)], 1).flatten()[:count]
