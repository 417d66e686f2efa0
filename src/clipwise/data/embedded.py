"""A small real data set inside the package, so that the first command needs nothing else."""

from __future__ import annotations

import lzma
import struct
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

_IMAGES, _LABELS = 2051, 2049  # the magic numbers of idx files
_MEAN, _STD = 0.2860, 0.3530  # of the 60 000 training images


class Images(NamedTuple):
    """Normalised images and their labels."""

    pixels: Tensor  # (N, 1, 28, 28), float32
    labels: Tensor  # (N,), int64


def fashion_mnist(*, train: bool) -> Images:
    """10 000 training or 2 000 test images of Fashion-MNIST, ten kinds of clothing, 28 × 28 pixels."""
    name = "train" if train else "t10k"
    pixels = _read(f"{name}-images-idx3-ubyte.xz", _IMAGES)
    labels = _read(f"{name}-labels-idx1-ubyte.xz", _LABELS)
    return Images((pixels.unsqueeze(1).float() / 255 - _MEAN) / _STD, labels.long())


def _read(name: str, magic: int) -> Tensor:
    """An idx file: magic number, one big-endian length an axis, bytes."""
    raw = lzma.decompress((resources.files(__package__) / "fashion_mnist" / name).read_bytes())
    found, *_ = struct.unpack(">I", raw[:4])
    if found != magic:
        raise ValueError(f"{name} begins with {found}, not with {magic}: not the idx file it should be")
    dimensions = magic & 0xFF
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    return torch.frombuffer(bytearray(raw[4 + 4 * dimensions :]), dtype=torch.uint8).view(shape)
