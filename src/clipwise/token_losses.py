"""One loss a sequence, from the logits of its tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int = -100, *, causal: bool = False, reduction: str = "mean") -> Tensor:
    """(B,): the cross-entropy of each sequence, over its own tokens whose label is not `ignore_index`.

    logits: (B, T, V), labels: (B, T). Masked and sequence-to-sequence models predict the label at its own place. A causal model
    predicts the next token: pass `causal=True` with labels as Hugging Face takes them, not shifted. `reduction` is "mean"
    over a sequence's counted tokens (zero where it has none) or "sum". Computed in float32 or wider.

        losses = clipwise.token_losses(model(**batch).logits, labels, causal=True)
    """
    if logits.dim() < 3 or logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"token_losses takes logits of shape (B, T, V) and labels of shape (B, T), got {tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    if causal:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    if logits.dtype.itemsize < 4:
        logits = logits.float()
    each = F.cross_entropy(logits.movedim(-1, 1), labels, ignore_index=ignore_index, reduction="none").flatten(1)
    total = each.sum(1)
    return total if reduction == "sum" else total / (labels != ignore_index).flatten(1).sum(1).clamp(min=1)
