"""Image data sets: MNIST, Fashion-MNIST, CIFAR-10 from their standard files, and a part of Fashion-MNIST in the package."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import BadData
from .files import decode_picture, decompressed, find, parse_idx, read_cifar_batch, read_idx


class Examples(NamedTuple):
    """Inputs of a network, one row an example, and their labels."""

    inputs: Tensor  # (N, C, H, W) float32, normalised; or (N, T) int64, numbers of words
    labels: Tensor  # (N,) int64


@dataclass(frozen=True)
class ImageSet:
    """What is known of a data set before it is read: constants, published with it, that tell nothing about a record."""

    name: str
    title: str
    channels: int
    size: int
    classes: int
    counts: tuple[int, int]  # training, test
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalised(self, pixels: Tensor, labels: Tensor) -> Examples:
        """pixels: (N, C, H, W) bytes"""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.mean, self.std))
        return Examples((pixels.float() / 255 - mean) / std, labels.long())


MNIST = ImageSet("mnist", "MNIST", 1, 28, 10, (60_000, 10_000), (0.1307,), (0.3081,))
FASHION_MNIST = ImageSet("fashion-mnist", "Fashion-MNIST", 1, 28, 10, (60_000, 10_000), (0.2860,), (0.3530,))
CIFAR10 = ImageSet("cifar10", "CIFAR-10", 3, 32, 10, (50_000, 10_000), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
LSUN = ImageSet("lsun", "LSUN", 3, 64, 10, (0, 0), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def fashion_mnist(*, train: bool) -> Examples:
    """10 000 training or 2 000 test images of Fashion-MNIST, ten kinds of clothing, 28 × 28 pixels, embedded in the package."""
    name = "train" if train else "t10k"
    folder = resources.files(__package__) / "fashion_mnist"
    pixels, labels = (
        parse_idx(lzma.decompress((folder / f"{name}-{kind}.xz").read_bytes()), name) for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    return FASHION_MNIST.normalised(pixels.unsqueeze(1), labels)


def read_idx_images(known: ImageSet, folder: Path, *, train: bool) -> Examples:
    """train-images-idx3-ubyte and its like, packed or not, in the folder or where torchvision puts them (raw/)."""
    how = f"clipwise data fetch {known.name} --to {folder}"
    name = "train" if train else "t10k"
    parts = []
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
        names = [f"{place}{name}-{kind}{packed}" for place in ("", "raw/") for packed in ("", ".gz", ".xz")]
        parts.append(read_idx(find(folder, names, f"{known.title}'s {name}-{kind}", how)))
    pixels, labels = parts
    _check(known, pixels.unsqueeze(1), labels, folder, train)
    return known.normalised(pixels.unsqueeze(1), labels)


def read_cifar10(folder: Path, *, train: bool) -> Examples:
    """data_batch_1 … data_batch_5 and test_batch, in the folder or in cifar-10-batches-py/; or the sheets of PNG with their labels."""
    names = [f"data_batch_{k}" for k in range(1, 6)] if train else ["test_batch"]
    if any((folder / f"{name}.png").exists() for name in names):
        found = [_sheet(find(folder, [f"{name}.png"], f"CIFAR-10's {name}", "clipwise data fetch cifar10")) for name in names]
        pixels = torch.cat(found)
        labels = torch.tensor(json.loads((folder / f"{'train' if train else 'test'}_lables.json").read_text()))
    else:
        how = f"clipwise data fetch cifar10 --to {folder}, or unpack cifar-10-python.tar.gz there."
        paths = [find(folder, [name, f"cifar-10-batches-py/{name}"], f"CIFAR-10's {name}", how) for name in names]
        batches = [read_cifar_batch(decompressed(path), str(path)) for path in paths]
        pixels, labels = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    _check(CIFAR10, pixels, labels, folder, train)
    return CIFAR10.normalised(pixels, labels)


def _sheet(path: Path) -> Tensor:
    """A PNG whose rows are whole images: (N, 3, 32, 32)"""
    flat = decode_picture(path, str(path)).permute(1, 2, 0).reshape(-1, 32, 32, 3)
    return flat.permute(0, 3, 1, 2).contiguous()


def _check(known: ImageSet, pixels: Tensor, labels: Tensor, folder: Path, train: bool) -> None:
    expected = known.counts[0 if train else 1]
    shape = (known.channels, known.size, known.size)
    if len(labels) != len(pixels) or pixels.shape[1:] != shape or len(pixels) != expected or int(labels.max()) >= known.classes:
        raise BadData(
            f"{known.title} in {folder} has {len(pixels)} images of {tuple(pixels.shape[1:])} and {len(labels)} labels; expected {expected} of {shape}.",
            f"Remove the files and fetch them again: clipwise data fetch {known.name} --to {folder}",
        )
