"""Distances to learned prototypes, and losses against learned targets: written with entry-wise functions, which are covered."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import rewrite


@rewrite(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """‖x_i − w_j‖_p for every pair. (*, n, d), (*, m, d) → (*, n, m)"""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), ord=p, dim=-1)


@rewrite(F.pairwise_distance, torch.pairwise_distance)
def pairwise_distance(x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(x1 - x2 + eps, ord=p, dim=-1, keepdim=keepdim)


@rewrite(F.cosine_similarity, torch.cosine_similarity)
def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """⟨x, w⟩ / (max(‖x‖, ε)·max(‖w‖, ε))"""
    a, b = torch.broadcast_tensors(x1, x2)
    sizes = [torch.linalg.vector_norm(side, dim=dim, keepdim=True).clamp_min(eps) for side in (a, b)]
    return (a / sizes[0] * (b / sizes[1])).sum(dim)


def _reduced(each: Tensor, reduction: str, weight: Tensor | None) -> Tensor:
    each = each if weight is None else each * weight
    if reduction == "none":
        return each
    if reduction == "sum":
        return each.sum()
    return each.mean() if weight is None else each.sum() / weight.expand_as(each).sum()


@rewrite(F.mse_loss)
def mse_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Tensor | None = None
) -> Any:
    return NotImplemented if (size_average, reduce) != (None, None) else _reduced((input - target).square(), reduction, weight)


@rewrite(F.l1_loss)
def l1_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", weight: Tensor | None = None
) -> Any:
    return NotImplemented if (size_average, reduce) != (None, None) else _reduced((input - target).abs(), reduction, weight)


@rewrite(F.smooth_l1_loss)
def smooth_l1_loss(
    input: Tensor, target: Tensor, size_average: Any = None, reduce: Any = None, reduction: str = "mean", beta: float = 1.0
) -> Any:
    if (size_average, reduce) != (None, None):
        return NotImplemented
    d = (input - target).abs()
    return _reduced(torch.where(d < beta, 0.5 * d.square() / beta, d - 0.5 * beta) if beta else d, reduction, None)


@rewrite(F.huber_loss)
def huber_loss(input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None) -> Tensor:
    d = (input - target).abs()
    return _reduced(torch.where(d < delta, 0.5 * d.square(), delta * (d - 0.5 * delta)), reduction, weight)
