"""Rows that go through the model twice in one step. Told by memory, never by value: two records may well be equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import WrongDraw


@dataclass(slots=True, eq=False)
class Footprint:
    """Where the rows of an input begin in its memory."""

    storage: StorageWeakRef
    starts: range

    @classmethod
    def of(cls, tensor: Tensor) -> Footprint:
        first, stride = tensor.storage_offset(), tensor.stride(0)
        return cls(StorageWeakRef(tensor.untyped_storage()), range(first, first + stride * tensor.shape[0], stride))

    def overlaps(self, other: Footprint) -> bool:
        if self.storage != other.storage or self.storage.expired():
            return False
        return not set(self.starts).isdisjoint(other.starts)


def is_plain(tensor: Tensor) -> bool:
    """Whether rows of it lie in ordinary memory."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dim() > 0 and not tensor.is_meta


def storages(tensors: Iterable[Tensor]) -> list[StorageWeakRef]:
    """The memory that these tensors lie in."""
    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)]


def footprints(tensors: Iterable[Tensor], rows: int, only_in: Sequence[StorageWeakRef] | None = None) -> list[Footprint]:
    """Of the tensors that have one row an example; with `only_in`, of those that lie in the memory of a batch."""
    found = []
    for tensor in tensors:
        if rows and is_plain(tensor) and tensor.shape[0] == rows and tensor.stride(0) > 0:
            footprint = Footprint.of(tensor)
            if only_in is None or footprint.storage in only_in:
                found.append(footprint)
    return found


def check_new_rows(now: list[Footprint], before: list[Footprint]) -> None:
    for footprint in now:
        if any(footprint.overlaps(other) for other in before):
            raise WrongDraw(
                "rows that already went through private.loss go through it again: an example would count twice.",
                "Give every row of a draw to private.loss once: for part in clipwise.microbatches(batch, n): … An input that all parts share "
                "and that happens to be as long as a part is declared with clipwise.constant(x).",
            )
