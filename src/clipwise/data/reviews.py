"""IMDB's movie reviews as numbers of words: from the aclImdb tree, a CSV or JSONL file, or a list in JSON."""

from __future__ import annotations

import csv
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import BadData
from .images import Examples

_WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
_TAG = re.compile(r"<[^>]*>")
_POSITIVE = {"pos", "positive", "1", "true"}
_NEGATIVE = {"neg", "negative", "0", "false"}
_HOW = "clipwise data fetch imdb, or unpack aclImdb_v1.tar.gz there."


class Words:
    """From words to numbers without looking at the data: 0 is padding.

    With GloVe the numbers are its lines. Without, words are hashed: a vocabulary counted on private reviews would tell about them.
    """

    def __init__(self, lines: dict[str, int] | None = None, size: int = 20_000):
        self._lines = lines
        self.size = len(lines) + 1 if lines is not None else size

    def numbers(self, text: str, longest: int) -> list[int]:
        words = _WORD.findall(_TAG.sub(" ", text.lower()))
        if self._lines is not None:
            return [self._lines[word] for word in words if word in self._lines][:longest]
        return [1 + zlib.crc32(word.encode()) % (self.size - 1) for word in words[:longest]]


def read_glove(path: Path, width: int = 200, limit: int = 100_000) -> tuple[Words, Tensor]:
    """GloVe's text file: a word and its numbers on every line. Returns the words and (V, width) vectors; row 0 is padding."""
    lines: dict[str, int] = {}
    rows = [torch.zeros(width)]
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            word, *values = line.rstrip().split(" ")
            if len(values) != width:
                raise BadData(
                    f"line {number + 1} of {path} has {len(values)} numbers, expected {width}.", "Give a file such as glove.6B.200d.txt."
                )
            lines[word] = len(rows)
            rows.append(torch.tensor([float(value) for value in values]))
            if len(rows) > limit:
                break
    return Words(lines), torch.stack(rows)


def random_vectors(size: int, width: int = 200) -> Tensor:
    """Stand-ins for GloVe, always the same: they stay as they are. (size, width)"""
    return torch.randn(size, width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)


def read_imdb(path: Path, *, train: bool, words: Words | None = None, longest: int = 256) -> Examples:
    """25 000 reviews for training or for test, as (N, longest) numbers of words; label 1 is a positive review."""
    words = words or Words()
    found = list(_reviews(path, train))
    if not found:
        raise BadData(f"{path} holds no reviews for {'training' if train else 'test'}.", _HOW)
    table = torch.zeros(len(found), longest, dtype=torch.long)
    for row, (text, _) in enumerate(found):
        numbers = words.numbers(text, longest)
        table[row, : len(numbers)] = torch.tensor(numbers, dtype=torch.long)
    return Examples(table, torch.tensor([int(positive) for _, positive in found]))


def _reviews(path: Path, train: bool) -> Iterator[tuple[str, bool]]:
    tree = path / "aclImdb" if (path / "aclImdb").is_dir() else path
    split = "train" if train else "test"
    if (tree / split / "pos").is_dir():
        for kind in ("pos", "neg"):
            for file in sorted((tree / split / kind).glob("*.txt")):
                yield file.read_text(encoding="utf-8"), kind == "pos"
        return
    if path.is_dir():
        for name in (f"{split}.jsonl", f"{split}.csv", "reviews.json"):
            if (path / name).exists():
                yield from _from_file(path / name, train)
                return
        raise BadData(f"IMDB is not in {path}: expected aclImdb/{split}/pos, {split}.jsonl, {split}.csv or reviews.json.", _HOW)
    yield from _from_file(path, train)


def _from_file(path: Path, train: bool) -> Iterator[tuple[str, bool]]:
    try:
        if path.suffix == ".csv":
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    yield row.get("review") or row["text"], _positive(row.get("sentiment") or row["label"])
        elif path.suffix == ".jsonl":
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                yield row.get("text") or row["review"], _positive(row.get("label", row.get("sentiment")))
        else:  # a list of all reviews: negative ones first, in each half the test reviews first
            rows = json.loads(path.read_text(encoding="utf-8"))
            quarters = (rows[12_500:25_000], rows[37_500:]) if train else (rows[:12_500], rows[25_000:37_500])
            for row in (row for quarter in quarters for row in quarter):
                yield row["t"], _positive(row["s"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise BadData(
            f"{path} is not a file of reviews ({type(error).__name__}: {error}).", 'A CSV has the columns "review" and "sentiment".'
        ) from None


def _positive(label: object) -> bool:
    word = str(label).strip().lower()
    if word not in _POSITIVE | _NEGATIVE:
        raise ValueError(f"{label!r} is neither positive nor negative")
    return word in _POSITIVE
