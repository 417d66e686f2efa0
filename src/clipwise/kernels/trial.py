"""Whether the kernels that nothing is timed against run on a device, and find what torch finds."""

from __future__ import annotations

import torch

from ..errors import in_one_line

_ROWS, _LENGTH = 5, 3000


def agrees_with_torch(device: torch.device) -> str | None:
    """None, or what is wrong. The numbers are nobody's, and no generator is asked for them."""
    try:
        from .rows import row_squares
        from .scaling import kept_rows, scaled_rows, weighted_row_sum

        with torch.no_grad():
            numbers = torch.arange(_ROWS * _LENGTH, dtype=torch.float64, device=device)
            exact = (numbers % 31 - 15).view(_ROWS, _LENGTH)  # integers: no rounding
            weights = torch.tensor([1.0, 0.0, 0.5, 0.25, 2.0], device=device)
            wide, rows = weights.double()[:, None], exact.float()
            pairs = [
                (row_squares(rows), exact.square().sum(1)),
                (scaled_rows(rows, weights, torch.float32), exact * wide),
                (kept_rows(rows, weights), exact * (wide != 0)),
                (weighted_row_sum(rows, weights), (exact * wide).sum(0)),
            ]
        return None if all(torch.equal(found.double(), expected) for found, expected in pairs) else "they find other numbers than torch"
    except Exception as error:
        return in_one_line(error)
