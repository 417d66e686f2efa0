"""Scaled dot-product attention with learned queries, keys, values or biases. Its projections are linear calls of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..registry import Use, spread


@spread(F.scaled_dot_product_attention)
def attention(use: Use, tap: Any) -> Any:
    """Each weight is expanded over the batch and the heads, and tapped there."""
    names = ("query", "key", "value", "attn_mask")
    given = dict(zip(names, use.args), **{name: use.kwargs[name] for name in names if name in use.kwargs})
    leading = torch.broadcast_shapes(*(given[name].shape[:-2] for name in ("query", "key", "value")))
    for name, value in given.items():
        if use.tracks(value):
            given[name] = tap(value, torch.Size((*leading, *value.shape[-2:])))
    rest = {name: value for name, value in use.kwargs.items() if name not in names}
    return tuple(given.get(name) for name in names) + tuple(use.args[4:]), rest
