"""Data sets by name. A stand-in of random numbers exists for every one, for speed figures only; it is asked for by name and says what it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadData
from .images import CIFAR10, FASHION_MNIST, LSUN, MNIST, Examples, ImageSet, fashion_mnist, read_cifar10, read_idx_images
from .lsun import read_lsun
from .reviews import random_vectors, read_glove, read_imdb

NAMES = ("embedded", "mnist", "fashion-mnist", "cifar10", "imdb", "lsun")
SYNTHETIC = "synthetic-"
_KNOWN: dict[str, ImageSet] = {known.name: known for known in (MNIST, FASHION_MNIST, CIFAR10, LSUN)}


@dataclass(frozen=True)
class DataSet:
    """Training examples, held-out examples, and what to call them."""

    name: str
    title: str  # as it stands in every output
    train: Examples
    test: Examples
    classes: int
    vectors: Tensor | None = None  # (V, d) word vectors, for text

    @property
    def is_synthetic(self) -> bool:
        return self.name.startswith(SYNTHETIC)


def default_folder(name: str) -> Path:
    """$CLIPWISE_DATA/name, or ~/.cache/clipwise/name."""
    root = os.environ.get("CLIPWISE_DATA")
    return (Path(root) if root else Path.home() / ".cache" / "clipwise") / name


def load(
    name: str, folder: str | Path | None = None, *, size: int = 64, glove: str | Path | None = None, limit: int | None = None
) -> DataSet:
    """A data set by name, read from `folder`.

    size: side of LSUN's pictures. glove: GloVe's text file of 200 dimensions for IMDB; without it the word vectors are random and stay so.
    limit: at most so many pictures of LSUN, or examples of a stand-in.
    """
    if name.startswith(SYNTHETIC):
        return _synthetic(name, size, limit or 2048)
    if name not in NAMES:
        raise BadData(
            f"there is no data set {name!r}.", f"Choose one of {', '.join(NAMES)}, or {SYNTHETIC}NAME for random numbers of its shape."
        )
    place = Path(folder) if folder is not None else default_folder(name)
    if name == "embedded":
        title = "Fashion-MNIST, the 10 000 + 2 000 images in the package"
        return DataSet(name, title, fashion_mnist(train=True), fashion_mnist(train=False), 10)
    if name == "imdb":
        return _imdb(place, Path(glove) if glove else None)
    if name == "lsun":
        train, test, classes = read_lsun(place, size=size, limit=limit)
        return DataSet(name, f"pictures from {place}, {size} × {size}", train, test, classes)
    if name == "cifar10":
        train, test = (read_cifar10(place, train=part) for part in (True, False))
    else:
        train, test = (read_idx_images(_KNOWN[name], place, train=part) for part in (True, False))
    return DataSet(name, _KNOWN[name].title, train, test, _KNOWN[name].classes)


def _imdb(place: Path, glove: Path | None) -> DataSet:
    words, vectors = read_glove(glove) if glove is not None else (None, random_vectors(20_000))
    note = f"word vectors of {glove.name}" if glove is not None else "random, frozen word vectors"
    train, test = (read_imdb(place, train=part, words=words) for part in (True, False))
    return DataSet("imdb", f"IMDB, {note}", train, test, 2, vectors)


def _synthetic(name: str, size: int, count: int) -> DataSet:
    """Random numbers of the right shape: good for measuring time, for nothing else."""
    base = name.removeprefix(SYNTHETIC)
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...]
    if base == "imdb":
        shape, classes, vectors = (256,), 2, random_vectors(20_000)
    elif base in _KNOWN:
        known = _KNOWN[base]
        side = size if base == "lsun" else known.size
        shape, classes, vectors = (known.channels, side, side), known.classes, None
    else:
        raise BadData(f"there is no data set {base!r} to stand in for.", f"Choose one of {', '.join((*_KNOWN, 'imdb'))}.")

    def part(rows: int) -> Examples:
        inputs = (
            torch.randn(rows, *shape, generator=generator)
            if vectors is None
            else torch.randint(1, 20_000, (rows, *shape), generator=generator)
        )
        return Examples(inputs, torch.randint(0, classes, (rows,), generator=generator))

    return DataSet(
        name, f"SYNTHETIC stand-in for {base}: random numbers, for speed only", part(count), part(max(1, count // 5)), classes, vectors
    )
