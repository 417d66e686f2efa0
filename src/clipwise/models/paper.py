"""Networks of Lee & Kifer, Section 6.1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


def mlp(inputs: int = 784, hidden: Sequence[int] = (128, 256), classes: int = 10) -> nn.Sequential:
    """Fully connected layers with sigmoids between; the paper's has 128 and 256 hidden units."""
    widths = [inputs, *hidden]
    layers = [layer for d, p in pairwise(widths) for layer in (nn.Linear(d, p), nn.Sigmoid())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(widths[-1], classes))


def deep_mlp(depth: int, inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """The networks of the depth figure: `depth` hidden layers. The paper gives the widths of the first two, 128 and 256; the rest have 128."""
    return mlp(inputs, [128, 256, *[128] * (depth - 2)][:depth], classes)


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


class OverRows(nn.Module):
    """A recurrent layer that reads an image row by row, and a fully connected layer on its last output."""

    def __init__(self, layer: type[nn.RNN] | type[nn.LSTM], features: int, hidden: int, classes: int):
        super().__init__()
        self.layer = layer(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """images: (B, C, H, W), read as H steps of C·W numbers."""
        outputs, _ = self.layer(images.transpose(1, 2).flatten(2))
        return self.head(outputs[:, -1])


def rnn(features: int = 28, hidden: int = 128, classes: int = 10) -> OverRows:
    """One vanilla recurrent layer of 128 units with tanh."""
    return OverRows(nn.RNN, features, hidden, classes)


def lstm(features: int = 28, hidden: int = 128, classes: int = 10) -> OverRows:
    """One LSTM layer of 128 units."""
    return OverRows(nn.LSTM, features, hidden, classes)


class Transformer(nn.Module):
    """Frozen word vectors, sinusoidal positions, one encoder block, the mean over words, a fully connected layer.

    The paper names these parts and the 200 dimensions of its GloVe vectors; eight heads and 512 hidden units are ours.
    """

    vectors: Tensor
    positions: Tensor

    def __init__(self, vectors: Tensor, classes: int = 2, heads: int = 8, hidden: int = 512, longest: int = 2048):
        super().__init__()
        width = vectors.shape[1]
        self.register_buffer("vectors", vectors)
        self.register_buffer("positions", sinusoids(longest, width), persistent=False)
        self.block = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, words: Tensor) -> Tensor:
        """words: (B, T) numbers of words; 0 is padding."""
        there = words != 0
        h = nn.functional.embedding(words, self.vectors) * math.sqrt(self.vectors.shape[1]) + self.positions[: words.shape[1]]
        seen = there | ~there.any(1, keepdim=True)  # a review without a word looks at its padding
        h = self.block(h, src_key_padding_mask=~seen)
        weights = seen.unsqueeze(2).to(h.dtype)
        return self.head((h * weights).sum(1) / weights.sum(1))


def sinusoids(length: int, width: int) -> Tensor:
    """Positions as in Vaswani et al. 2017. (length, width)"""
    angles = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :width]


def transformer(vocabulary: int = 20_000, width: int = 200, classes: int = 2, vectors: Tensor | None = None) -> Transformer:
    """The paper's Transformer on `vectors` (V, width), or on random ones that stay as they are."""
    if vectors is None:
        vectors = torch.randn(vocabulary, width) / math.sqrt(width)
    return Transformer(vectors, classes)
