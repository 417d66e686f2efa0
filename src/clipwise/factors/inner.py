"""Inner products between the gradients of the same example in two factors, without writing either out.

They are evaluated in the precision where products of two entries are exact, and come with a bound on the rounding that
remains: a squared norm made of inner products subtracts, so it must never be trusted to the last digit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import GRAM_COLUMNS, GRAM_TILES, are_available
from ..numerics import flat_rows, product, to_accumulate, to_multiply, unit_roundoff, wider_dtype
from .base import Factor
from .convolution import Convolution
from .dense import Dense
from .outer import Outer
from .rows import Rows

# terms whose products a kernel forms; those of float32 take three times as long
_LONGEST_GRAM = {torch.bfloat16: 2**11, torch.float32: 2**8}
_ADDED_IN_A_TILE = 64  # additions one after the other, at most
_LEFT_OUT = 96  # units of float32, for two sides: a number cut to TF32 twice lacks 2⁻²⁰ of it, and what the two products of its parts leave out is as small
_TENSOR_CORES = 4  # they cut sums off where others round them to the nearest number (Fasi et al. 2021), and keep two bits more


def inner(a: Factor, b: Factor) -> Tensor:
    """⟨a_i, b_i⟩ for every example, in float64. (B,)"""
    a, b = (f.as_outer() if isinstance(f, Convolution) else f for f in (a, b))
    if isinstance(a, Outer) and isinstance(b, Outer) and a.same_blocks(b):
        return _outer_outer(a, b)
    if isinstance(a, Rows) and isinstance(b, Rows):
        return _rows_rows(a, b)
    if isinstance(a, Rows) and isinstance(b, Outer):
        a, b = b, a
    if isinstance(a, Outer) and isinstance(b, Rows) and a.blocks == 1 and a.left.shape[3] == b.shape[0]:
        return _outer_rows(a, b)
    if isinstance(a, Dense) and isinstance(b, Rows):
        a, b = b, a
    if isinstance(a, Rows) and isinstance(b, Dense):
        return _rows_dense(a, b)
    return flat_rows(a.dense().double() * b.dense().double()).sum(1)


def has_gram_kernel(factor: Outer | Convolution) -> bool:
    """Whether the products of its terms are few enough to be formed without leaving the chip."""
    longest = _LONGEST_GRAM.get(factor.stored_dtype, 0)
    return factor.blocks == 1 and factor.terms <= longest and are_available(factor.device, factor.stored_dtype)


def inner_products_are_cheap(factors: list[Factor]) -> bool:
    """Whether `inner` of any two of these needs nothing written out."""
    kinds = (Outer, Convolution, Rows)
    if not all(isinstance(factor, kinds) for factor in factors):
        return False
    matrices = [factor for factor in factors if not isinstance(factor, Rows)]
    return len(matrices) == len(factors) or all(isinstance(m, Outer) and m.blocks == 1 for m in matrices)


def inner_roundoff(factors: list[Factor]) -> float:
    """c·u such that |Σ_ab ⟨a, b⟩ computed − true| ≤ c·u·(Σ_a mass_a)².

    A product of two sums of p and d exact products, each added in precision u, is off by at most (p + d + 2)·u relative
    to the product of the norms (Higham, Accuracy and Stability, Section 3.1); the sums over terms run in float64, those of a tile of a
    kernel in float32.
    """
    lengths = [factor.widths if isinstance(factor, Outer | Convolution) else factor.shape[1:].numel() for factor in factors]
    stored = {factor.stored_dtype for factor in factors}
    if torch.bfloat16 in stored:
        return _added_in_float32(max(lengths))
    wide = unit_roundoff(wider_dtype(torch.empty((), dtype=factors[0].dtype, device="meta")))
    return (max(lengths) + 2) * wide


def gram_kernel_roundoff(factor: Outer | Convolution) -> float:
    """The same for the kernel: tensor cores add a few columns of each side, float32 adds these sums.

    Of float32 they add three products of TF32 each, the two small ones first: what is lost there is a thousand times smaller.
    """
    by_cores = _TENSOR_CORES * min(factor.widths, 2 * GRAM_COLUMNS)
    left_out = _LEFT_OUT if factor.stored_dtype == torch.float32 else 0
    return (by_cores + factor.widths // GRAM_COLUMNS + 4 + _ADDED_IN_A_TILE + left_out) * unit_roundoff(torch.float32)


def _added_in_float32(length: int) -> float:
    """For so many products of two bf16 numbers."""
    return _TENSOR_CORES * (length + 2 + _ADDED_IN_A_TILE) * unit_roundoff(torch.float32)


def _outer_outer(a: Outer, b: Outer) -> Tensor:
    """Σ_ts ⟨left_t, left'_s⟩·⟨right_t, right'_s⟩, the gram of the paper's Section 5.5 for a = b."""
    if a is b and a.stored_dtype == torch.bfloat16 and has_gram_kernel(a):
        small, large = GRAM_TILES[a.stored_dtype]
        return a.by_gram_kernel(large if a.terms > small else small)[0]
    a_left, b_left, a_right, b_right = to_multiply(a.left, b.left, a.right, b.right)
    lefts, rights = product(_wide(a_left), _wide(b_left).mT), product(_wide(a_right), _wide(b_right).mT)  # (B, G, T, T')
    return (lefts * rights).double().flatten(1).sum(1)


def _outer_rows(a: Outer, b: Rows) -> Tensor:
    """Σ_ts left_t[ids_s]·⟨right_t, rows_s⟩: a head tied to its embedding."""
    ids = b.ids[:, None, :].expand(-1, a.terms, -1)  # (B, T, S)
    picked = a.left[:, 0].gather(2, ids)
    rights = torch.matmul(_wide(to_accumulate(a.right[:, 0])), _wide(b.rows).mT)  # (B, T, S)
    return (picked.double() * rights).flatten(1).sum(1)


def _rows_rows(a: Rows, b: Rows) -> Tensor:
    """Σ_ts [ids_t = ids'_s]·⟨rows_t, rows'_s⟩."""
    same = a.ids[:, :, None] == b.ids[:, None, :]  # (B, T, S)
    products = torch.matmul(_wide(a.rows), _wide(b.rows).mT)
    return torch.where(same, products, 0).double().flatten(1).sum(1)


def _rows_dense(a: Rows, b: Dense) -> Tensor:
    """Σ_t ⟨rows_t, dense[ids_t]⟩."""
    table = b.grad.flatten(2)  # (B, V, d)
    picked = table.gather(1, a.ids[..., None].expand(-1, -1, table.shape[2]))
    return (a.rows.double() * picked.double()).flatten(1).sum(1)


def _wide(tensor: Tensor) -> Tensor:
    """In the precision where products are exact; bf16 stays as it is, its products leave it in that precision."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.to(wider_dtype(tensor))
