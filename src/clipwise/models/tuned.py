"""Networks that learn well under noise: tanh between few, wide kernels (Papernot et al. 2021, Tempered sigmoid activations)."""

from __future__ import annotations

from torch import nn


def tanh_cnn(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Sequential:
    """For 28 × 28 images: 16 kernels of 8 × 8 and 32 of 4 × 4, stride 2, overlapping max pooling, 32 hidden units."""
    first = (size + 6 - 8) // 2 + 1 - 1
    side = (first - 4) // 2 + 1 - 1
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(32 * side * side, 32), nn.Tanh(), nn.Linear(32, classes),
    )  # fmt: skip


def tanh_vgg(channels: int = 3, classes: int = 10) -> nn.Sequential:
    """For 32 × 32 images: three pairs of 3 × 3 convolutions with 32, 64 and 128 kernels, each pair followed by max pooling, 128 hidden units."""
    layers: list[nn.Module] = []
    inputs = channels
    for width in (32, 64, 128):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        inputs = width
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 128), nn.Tanh(), nn.Linear(128, classes))
