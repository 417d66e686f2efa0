"""Rows sorted by expert, each group multiplied with its own matrix: the grouped products of mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import rewrite

_FUNCTIONS = [function for place in (torch, F) for name in ("_grouped_mm", "grouped_mm") if (function := getattr(place, name, None))]


@rewrite(*_FUNCTIONS)
def grouped_mm(rows: Tensor, matrices: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None) -> Any:
    """Rows offs[e-1] … offs[e]-1 times matrix e. Every matrix is a part of the weight with a use of its own."""
    if offs is None or rows.dim() != 2 or matrices.dim() != 3 or bias is not None:
        return NotImplemented
    place = torch.arange(len(rows), device=rows.device)
    expert = torch.searchsorted(offs.to(place.dtype), place, right=True)
    out = rows.new_zeros(len(rows), matrices.shape[2], dtype=out_dtype or rows.dtype)
    for number in range(matrices.shape[0]):
        mine = (expert == number).nonzero()[:, 0]
        out = out.index_copy(0, mine, (rows[mine] @ matrices[number]).to(out.dtype))
    return out
