"""What a graph does to large matrices on a CPU, as operators that may look at numbers: in a graph of plain operations nobody may, so that every row is copied
to float64 to be measured, and once more to be guarded against what is not finite. The functions are those of the eager step."""

from __future__ import annotations

import torch
from torch import Tensor

from .operators import operator


def _row_squares(rows: Tensor) -> Tensor:
    from ..numerics import squares_in_blocks

    return squares_in_blocks(rows)


def _weighted_row_sum(rows: Tensor, weights: Tensor) -> Tensor:
    from ..numerics import drop_rows

    return torch.mv(drop_rows(rows, weights).t(), weights)


row_squares = operator("row_squares_on_host", _row_squares)
weighted_row_sum = operator("weighted_row_sum_on_host", _weighted_row_sum)


@row_squares.register_fake
def _(rows: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], dtype=torch.float64)


@weighted_row_sum.register_fake
def _(rows: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1])
