"""Networks of Lee & Kifer, Section 6.1."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(inputs: int = 784, hidden: Sequence[int] = (128, 256), classes: int = 10) -> nn.Sequential:
    """Fully connected layers with sigmoids between; the paper's has 128 and 256 hidden units."""
    widths = [inputs, *hidden]
    layers = [layer for d, p in pairwise(widths) for layer in (nn.Linear(d, p), nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


def cnn(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Sequential:
    """20 and 50 kernels of 5 × 5 without padding, each followed by 2 × 2 max pooling, then 128 hidden units.

    The paper does not name the activation between these layers; ReLU is used.
    """
    side = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * side * side, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip
