"""Small numerical pieces that every factor shares: which precision to add in, and norms that neither overflow nor vanish."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .kernels import are_available
from .tracing import is_tracing, is_tracing_in_one, made_once

_UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
_WORKING = (torch.float32, torch.float64)
_BLOCK = 1024  # elements added in working precision before the sum moves to float64
_SMALL = 2**16  # numbers that are converted to float64 outright
_WORTH_STARTING_ONE = 2**24  # numbers of a sum that a kernel of our own adds up sooner, though it takes longer to start
_WORTH_A_KERNEL = 2**18  # numbers that torch takes longer to copy to float64 than Python takes to start a kernel
_SAFE_SQUARE = 1e-30  # below this a float32 sum of squares may have lost terms to underflow


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the gap between 1 and the next number: the largest relative error of one rounding to nearest."""
    return _UNIT_ROUNDOFF[dtype]


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Our own products run in the precision of their inputs, also where the user's code around them runs under autocast."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over examples and time run in float32, or in float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_accumulate(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _WORKING else tensor.to(torch.float32)


_MIXED_PRODUCTS = {"cuda"} if torch.version.hip is None else set()  # devices that multiply bf16 matrices into float32 ones


def to_multiply(*tensors: Tensor) -> list[Tensor]:
    """As matrices that are multiplied: bf16 stays bf16 where products leave it in float32, all else is in working precision.

    (float16 does not: scaled down it may underflow.)
    """
    if all(tensor.dtype == torch.bfloat16 and tensor.device.type in _MIXED_PRODUCTS for tensor in tensors):
        return list(tensors)
    wide = [to_accumulate(tensor) for tensor in tensors]
    common = torch.float64 if any(tensor.dtype == torch.float64 for tensor in wide) else torch.float32
    return [tensor.to(common) for tensor in wide]


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in working precision: products of two bf16 numbers are exact in float32, and added up there."""
    if left.dtype in _WORKING:
        return left @ right
    if not left.is_cuda:
        return left.float() @ right.float()
    if left.dim() == 2:
        return torch.mm(left, right, out_dtype=torch.float32)
    shape = left.shape[:-2]
    return torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32).unflatten(0, shape)


def wider_dtype(tensor: Tensor) -> torch.dtype:
    """The precision in which products of two entries of `tensor` are exact (float64 stays float64)."""
    low = tensor.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low or tensor.device.type == "mps" else torch.float64


def product_roundoff(dtype: torch.dtype, device: torch.device, *, convolution: bool = False) -> float:
    """The unit roundoff of the *inputs* of a matrix product: TF32 rounds float32 inputs to 11 bits where it is switched on.

    For matrix products it is off by default, for convolutions by cuDNN it is on.
    """
    tf32 = dtype == torch.float32 and device.type == "cuda" and rounds_to_tf32(by_cudnn=convolution)
    return 2.0**-11 if tf32 else unit_roundoff(dtype)


def rounds_to_tf32(*, by_cudnn: bool) -> bool:
    """Whether matrix products, or what cuDNN computes, may round float32 on a GPU."""
    products, *cudnn = tf32_in_use()
    return products or (by_cudnn and any(cudnn))


def tf32_in_use() -> tuple[bool, bool, bool]:
    """By matrix products, cuDNN's convolutions, its recurrent layers. (`allow_tf32` raises where they were set apart.)"""
    precision: Any = (
        torch._C._get_fp32_precision_getter
    )  # as torch.backends.cuda.matmul.fp32_precision and its like, asked for in every step
    return precision("cuda", "matmul") == "tf32", precision("cuda", "conv") == "tf32", precision("cuda", "rnn") == "tf32"


@made_once
def number_on(device: torch.device, value: float) -> Tensor:
    """A number where kernels read it, in float64. Nobody writes to it."""
    return torch.full((), value, dtype=torch.float64, device=device)


def flat_rows(rows: Tensor) -> Tensor:
    """(R, ...) → (R, m), also where R is zero or there is nothing behind it."""
    if rows.dim() == 2:
        return rows
    return rows.reshape(rows.shape[0], -1) if rows.numel() else rows.unsqueeze(-1).flatten(1)


def is_worth_a_kernel(tensor: Tensor, *, eagerly_beyond: float | None = None) -> bool:
    """Whether a kernel of our own reads these numbers sooner than torch: in a graph it costs nothing to start."""
    beyond = _WORTH_A_KERNEL if eagerly_beyond is None else eagerly_beyond
    return tensor.numel() > (0 if is_tracing_in_one() else beyond) and are_available(tensor.device, tensor.dtype)


def _is_for_the_host(rows: Tensor) -> bool:
    """Whether a graph on a CPU does better to look at these numbers than to copy them."""
    return rows.device.type == "cpu" and is_tracing_in_one() and rows.dtype == torch.float32 and rows.numel() > _SMALL


def row_norms(rows: Tensor) -> Tensor:
    """‖rows[i]‖ for every i, in float64, as exact as `squared_norms`. rows: (B, ...) → (B,)"""
    found, is_square = measure_rows(rows)
    return found.sqrt() if is_square else found


def squared_norms(rows: Tensor) -> Tensor:
    """‖rows[i]‖² for every i, in float64. rows: (B, ...) → (B,)

    The relative error stays near 1e-7 for float32 whatever the length, and a gradient of 1e30 is measured (and clipped), not lost. The
    result is not finite only for a row that holds NaN or Inf, or whose norm passes 1e154; such an example contributes zero.
    """
    found, is_square = measure_rows(rows)
    return found if is_square else found.square()


def measure_rows(rows: Tensor) -> tuple[Tensor, bool]:
    """Norms or squared norms, whichever takes fewer kernels here, and whether they are squares."""
    flat = flat_rows(rows if rows.is_cuda else to_accumulate(rows))
    if is_worth_a_kernel(flat):
        from .kernels.rows import row_squares

        return row_squares(flat), True
    if _is_for_the_host(flat):
        from .kernels import host

        return host.row_squares(flat), True
    if (flat.is_cuda or is_tracing()) and flat.shape[1]:
        return torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64), False
    return squares_in_blocks(to_accumulate(flat)), True


def squares_in_blocks(flat: Tensor) -> Tensor:
    """Blocks are added in working precision, blocks among each other in float64; what overflows or underflows is added again in float64."""
    if flat.device.type == "mps":
        return torch.linalg.vector_norm(flat, dim=1).square()
    if flat.shape[1] == 0:
        return flat.new_zeros(flat.shape[0], dtype=torch.float64)
    if flat.dtype == torch.float64:
        return torch.linalg.vector_norm(flat, dim=1).square()
    if flat.numel() <= _SMALL:
        return flat.double().square_().sum(1)
    whole = flat.shape[1] - flat.shape[1] % _BLOCK
    squares = flat.new_zeros(flat.shape[0], dtype=torch.float64)
    if whole:
        blocks = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
        squares += blocks.double().square().sum(1)
    if whole < flat.shape[1]:
        squares += torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    doubtful = ~(squares.isfinite() & (squares > _SAFE_SQUARE))
    if bool(doubtful.any()):
        squares[doubtful] = flat[doubtful].double().square().sum(1)
    return squares


def scale_rows(rows: Tensor, weights: Tensor, *, clean: bool = False) -> Tensor:
    """weights[i]·rows[i]; a row of weight zero becomes exactly zero even where it holds NaN or Inf. rows: (B, ...), weights: (B,)

    `clean` says that no row holds NaN or Inf.
    """
    dtype = accumulation_dtype(rows.dtype)
    exact = in_working_precision(weights, dtype)
    if _is_for_a_kernel(rows):
        return _scaled(rows, exact, dtype)
    scaled = rows * exact.view(-1, *[1] * (rows.dim() - 1))
    return scaled if clean else drop_rows(scaled, weights)


def _is_for_a_kernel(rows: Tensor) -> bool:
    """In a graph alone: there a kernel saves the copies that guard against rows that are not finite."""
    return is_worth_a_kernel(rows, eagerly_beyond=_WORTH_A_KERNEL if is_tracing() else math.inf)


def _scaled(rows: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    from .kernels.scaling import scaled_rows

    return scaled_rows(flat_rows(rows), exact, dtype).view(rows.shape)


def scale_stored(rows: Tensor, weights: Tensor, *, clean: bool = False) -> Tensor:
    """`scale_rows`, in the precision of the rows: each product is rounded once, from float32."""
    if rows.dtype in _WORKING:
        return scale_rows(rows, weights, clean=clean)
    if _is_for_a_kernel(rows):
        return _scaled(rows, in_working_precision(weights, torch.float32), rows.dtype)
    if is_tracing():
        return scale_rows(rows, weights, clean=clean).to(rows.dtype)
    scaled = torch.empty_like(rows)
    torch.mul(rows, in_working_precision(weights, torch.float32).view(-1, *[1] * (rows.dim() - 1)), out=scaled)
    return scaled if clean else drop_rows(scaled, weights)


def weighted_row_sum(rows: Tensor, weights: Tensor, *, clean: bool = False) -> Tensor:
    """Σ_i weights[i]·rows[i]; a row of weight zero adds nothing even where it holds NaN or Inf. rows: (B, n), weights: (B,) of one type"""
    if is_worth_a_kernel(rows, eagerly_beyond=_WORTH_STARTING_ONE):
        from .kernels.scaling import weighted_row_sum as by_kernel

        return by_kernel(rows, weights)
    if _is_for_the_host(rows) and not clean:
        from .kernels import host

        return host.weighted_row_sum(rows, weights)
    return torch.mv((rows if clean else drop_rows(rows, weights)).t(), weights)  # (n, B) · (B,)


def in_working_precision(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in another precision, never larger than they were; below its smallest normal number they are zero.

    A denormal weight is rounded by up to half its size, which would let an example of norm 1e44 through at twice the bound.
    Weights that have this precision already are taken as they are.
    """
    if weights.dtype == dtype:
        return weights
    kept_bits = -int(unit_roundoff(dtype) / unit_roundoff(torch.float64))  # all but those that dtype has no room for
    cut = (weights.double().view(torch.int64) & kept_bits).view(torch.float64)
    if dtype == torch.float16:
        cut = cut.clamp(max=torch.finfo(dtype).max)
    return torch.threshold(cut, torch.finfo(dtype).tiny, 0.0).to(dtype)


def drop_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """`rows` with the rows of weight zero set to zero (0·Inf is NaN, so a product alone would not do)."""
    if _is_for_a_kernel(rows):
        from .kernels.scaling import kept_rows

        return kept_rows(flat_rows(rows), weights).view(rows.shape)
    kept = weights != 0
    if not rows.is_cuda and not is_tracing() and bool(kept.all()):
        return rows
    return rows.masked_fill(~kept.view(-1, *[1] * (rows.dim() - 1)), 0.0)
