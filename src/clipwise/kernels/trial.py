"""Whether the kernels that nothing is timed against run on a device, and find what torch finds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..errors import in_one_line

_ROWS, _TERMS, _WIDTH = 5, 300, 10
_FEW, _FEWER, _SHORT = 70, 20, 300  # terms and columns where each takes a while in Triton's interpreter
_SEED = 0x1234567890ABCDEF


def agrees_with_torch(device: torch.device) -> str | None:
    """None, or what is wrong. Twice: a kernel that was started before is started another way. The numbers are nobody's."""
    return _wrong(device) or (_wrong(device) if device.type == "cuda" else None)


def _wrong(device: torch.device) -> str | None:
    """No generator is asked for numbers."""
    try:
        from .gram import gram_squares
        from .noise import noised, plain_normals
        from .normalization import normalized_sums
        from .rows import row_squares
        from .scaling import kept_rows, scaled_rows, weighted_row_sum
        from .segments import segment_squares
        from .terms import masses
        from .windows import windows_of

        with torch.no_grad():
            numbers = torch.arange(_ROWS * _TERMS * _WIDTH, dtype=torch.float64, device=device)
            exact = (numbers % 31 - 15).view(_ROWS, -1)  # integers: no rounding in sums
            weights = torch.tensor([1.0, 0.0, 0.5, 0.25, 2.0], device=device)
            half, seed = torch.full((), 0.5, dtype=torch.float64, device=device), torch.full((), _SEED, device=device)
            wide, rows = weights.double()[:, None], exact.float()
            terms, exact_terms = (side.view(_ROWS, _TERMS, _WIDTH)[:, :_FEW] for side in (rows, exact))
            ids, order = (torch.arange(_ROWS * _FEW, device=device) * 7 % 11).view(_ROWS, _FEW).sort(1)
            places = torch.zeros_like(ids).scatter_(1, order, ids)[..., None].expand_as(exact_terms)
            summed = exact_terms.new_zeros(_ROWS, 11, _WIDTH).scatter_add_(1, places, exact_terms)
            fewer, exact_fewer = terms[:, :_FEWER], exact_terms[:, :_FEWER]
            scales, shifts = normalized_sums(fewer, fewer, 1e-5, True)
            sums, normal = exact.flatten().clone(), plain_normals(_SEED, exact.numel()).to(device)
            exactly = terms.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
            images = rows.view(_ROWS, 2, 15, -1)[..., :_WIDTH]
            slid = windows_of(images, [3, 2], [8, _WIDTH - 1], [2, 1], [1, 0], [1, 1])
            written = torch.einsum("bti,btj->bij", exact_terms, exact_terms).square().sum((1, 2))
            found = [  # what a kernel finds, what torch does, and how far they may be apart
                (row_squares(rows), exact.square().sum(1), 0),
                (scaled_rows(rows, weights, torch.float32), exact * wide, 0),
                (kept_rows(rows, weights), exact * (wide != 0), 0),
                (weighted_row_sum(rows[:, :_SHORT], weights), (exact * wide)[:, :_SHORT].sum(0), 0),
                (gram_squares(exactly, exactly, 64)[0], written, 1e-5 * float(written.max())),
                (masses(terms, terms), exact_terms.square().sum((1, 2)), 1e-6),
                (scales, (exact_fewer * F.layer_norm(exact_fewer, (_WIDTH,))).sum(1), 0.1),
                (shifts, exact_fewer.sum(1), 0),
                (slid.flatten(1, 3).flatten(2), F.unfold(images.double(), (3, 2), 1, (1, 0), (2, 1)), 0),
                (segment_squares(ids, order, terms), summed.square().sum((1, 2)), 0),
                (noised(sums, seed, half, half, sums), (exact.flatten() + normal) / 2, 1e-12),  # in place
            ]
        same = all(torch.allclose(mine.double(), its, rtol=0, atol=apart) for mine, its, apart in found)
        return None if same else "they find other numbers than torch"
    except Exception as error:
        return in_one_line(error)
