"""The ways in which the squared norms of one tensor's gradients can be evaluated, and which of them is taken.

written, rows, product   there is nothing to choose: gradients that lie there, tables of rows, a single term an example
keep                     write all gradients out once; their weighted sum replaces the ordinary weight gradient
tiles                    write out a few examples at a time, measure, forget; one more weight gradient later
gram                     products of the terms; one more weight gradient later

kernel, gram kernel      form them, or the products of the terms, inside the chip, measure, forget (Triton); one more weight gradient later

A convolution's gradients are written out `by windows` (copied, then one product), `by groups` (a convolution with groups = B) or
`by kernel`. A kernel's tiles may have several sizes: `kernel of 64`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import in_one_line
from ..kernels import CONVOLUTION_TILES, GRAM_TILES, OUTER_TILES, are_available
from ..machine import is_out_of_memory
from ..planner import MemoryBudget, choose_way, examples_at_once, may_keep
from ..trials import TRIALS, Unusable
from .convolution import Convolution
from .dense import Dense
from .inner import has_gram_kernel, inner_products_are_cheap
from .outer import Outer
from .rows import Rows
from .squares import Squares

if TYPE_CHECKING:
    from .sums import FactorSum

_TWINS = 2e-2  # a kernel and its plain twin differ by rounding alone; bf16 and TF32 round coarsely
_HOPELESS = 16  # a gram that takes so many times the operations of writing out is not tried


def way_of(total: FactorSum, budget: MemoryBudget) -> tuple[str, float | None]:
    """The way to take, and the seconds it took when it was tried. What stays written out is taken from the budget."""
    factors = total.factors
    single = factors[0] if len(factors) == 1 else None
    if isinstance(single, Dense):
        return "written", None
    if all(isinstance(factor, Rows) for factor in factors):
        return "rows", None
    if isinstance(single, Outer) and single.terms <= 1:
        return "product", None
    numel, element_size = total.shape.numel(), total.dtype.itemsize
    held, flops = sum(factor.elements for factor in factors), sum(factor.dense_flops for factor in factors)
    keep = may_keep(batch=total.batch, numel=numel, held=held, element_size=element_size, budget=budget, lets_go=total.terms)
    gram = _gram_flops(total) if inner_products_are_cheap(factors) else None
    written = numel * element_size if all(factor.stored_dtype == torch.bfloat16 for factor in factors) else 0
    rule = choose_way(may_keep=keep, dense_flops=flops, gram_flops=None if _fits_at_once(total) else gram, bf16_bytes=written)
    way, seconds = rule, None
    if TRIALS.times(total.device) and total.batch:
        names = _writing_out(total, keep, budget)
        if gram is not None and gram < _HOPELESS * flops and budget.has_for_a_moment(_gram_bytes(total)):
            names.append("gram")
        names += _kernels(total, keep, budget)
        plain = [name for name in names if "kernel" not in name]  # nothing else is believed untried
        if not budget.has_for_a_moment(_tile_bytes(total)):
            names = [name for name in names if not name.startswith("tiles")] or plain
        rule = next((name for name in plain if name.startswith(rule)), plain[0])
        way, seconds = TRIALS.fastest(total.signature, total.batch, {name: _trial(total, name) for name in names}, rule, total.device)
    if way.startswith("keep"):
        budget.spend(total.batch * numel * element_size, lets_go=total.terms)
    return way, seconds


def _writing_out(total: FactorSum, keep: bool, budget: MemoryBudget) -> list[str]:
    """The likeliest first."""
    ways = ["keep", "tiles"] if keep else ["tiles"]
    [single, *others] = total.factors
    if others or not isinstance(single, Convolution) or not single.kernels:
        return ways
    kernels = sorted(single.kernels, key=lambda kernel: kernel != single.kernel_by_rule)
    copied = {"keep": single.windows_bytes, "tiles": single.windows_bytes * _in_a_tile(total) // total.batch}
    return [f"{way} by {kernel}" for way in ways for kernel in kernels if kernel != "windows" or budget.has_for_a_moment(copied[way])]


def _kernels(total: FactorSum, keep: bool, budget: MemoryBudget) -> list[str]:
    """One name for each size of tiles."""
    [single, *others] = total.factors
    if others or not isinstance(single, Outer | Convolution) or not are_available(single.device, single.stored_dtype):
        return []
    grams = [f"gram kernel of {tile}" for tile in GRAM_TILES.get(single.stored_dtype, ())] if has_gram_kernel(single) else []
    if isinstance(single, Convolution):
        names = [f"{way} of {tile}" for way in (["keep by kernel", "kernel"] if keep else ["kernel"]) for tile in CONVOLUTION_TILES]
        return names + (grams if budget.has_for_a_moment(single.windows_bytes) else [])
    fitting = [tile for tile in OUTER_TILES if tile <= max(OUTER_TILES[0], *single.widths_of_sides)]
    return [f"kernel of {tile}" for tile in fitting[-2:]] + grams  # smaller tiles read the same numbers more often


def _checked(total: FactorSum, way: str) -> Squares:
    """What a kernel finds, held against its plain twin."""
    try:
        found = total.measured_by(way)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Unusable(f"{way}: {in_one_line(error)}") from error
    a, b = found.bare, type(total)(total.factors).measured_by("tiles").bare
    agree = torch.isclose(a, b, rtol=_TWINS, atol=_TWINS * float(b.nan_to_num(0, 0, 0).amax())) | ~b.isfinite()
    if not bool(agree.all()):
        raise Unusable(f"{way} finds other norms than its plain twin")
    return found


def _trial(total: FactorSum, way: str) -> Callable[[], Tensor]:
    """Norms and weighted sum: what a step needs. A kernel is checked on its first run."""
    unchecked = "kernel" in way

    def run() -> Tensor:
        nonlocal unchecked
        other = type(total)(total.factors)
        squares = _checked(other, way) if unchecked else other.measured_by(way)
        unchecked = False
        weights = torch.ones(total.batch, dtype=total.dtype, device=total.device)
        return squares.value.sum() + other.weighted_sum(weights, clean=True).sum()

    return run


def _fits_at_once(total: FactorSum) -> bool:
    """On a GPU a gram takes many kernels; where all gradients can be written out at once, that takes one."""
    return total.device.type == "cuda" and _in_a_tile(total) == total.batch


def _gram_flops(total: FactorSum) -> int:
    matrices = [f for f in total.factors if isinstance(f, Outer | Convolution)]
    return 2 * _terms(total) ** 2 * max(f.widths * f.blocks for f in matrices)


def _gram_bytes(total: FactorSum) -> int:
    """Two products of all terms with all terms, in float64."""
    return 16 * total.batch * _terms(total) ** 2 * max(f.blocks for f in total.factors if isinstance(f, Outer | Convolution))


def _tile_bytes(total: FactorSum) -> int:
    """What lies written out for a moment, and what a library takes to write it."""
    return 2 * _in_a_tile(total) * total.shape.numel() * total.dtype.itemsize


def _in_a_tile(total: FactorSum) -> int:
    return examples_at_once(total.batch, total.shape.numel(), total.device)


def _terms(total: FactorSum) -> int:
    matrices = sum(f.terms for f in total.factors if isinstance(f, Outer | Convolution))
    return matrices + sum(f.ids.shape[1] for f in total.factors if isinstance(f, Rows))
