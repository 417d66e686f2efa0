"""Rows that go through the model twice in one step. Told by memory, never by value: two records may well be equal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .errors import WrongDraw


@dataclass(frozen=True)
class Footprint:
    """Where the rows of an input begin in its memory."""

    storage: StorageWeakRef
    starts: range

    @classmethod
    def of(cls, tensor: Tensor) -> Footprint:
        first, stride = tensor.storage_offset(), tensor.stride(0)
        return cls(StorageWeakRef(tensor.untyped_storage()), range(first, first + stride * len(tensor), stride))

    def overlaps(self, other: Footprint) -> bool:
        if self.storage != other.storage or self.storage.expired():
            return False
        return not set(self.starts).isdisjoint(other.starts)


def footprints(tensors: Iterable[Tensor], rows: int) -> list[Footprint]:
    """Of the inputs that have one row an example."""
    return [
        Footprint.of(t)
        for t in tensors
        if t.layout.__str__() == "torch.strided" and t.dim() and len(t) == rows and t.stride(0) > 0 and rows
    ]


def check_new_rows(now: list[Footprint], before: list[Footprint]) -> None:
    for footprint in now:
        if any(footprint.overlaps(other) for other in before):
            raise WrongDraw(
                "rows that already went through private.loss in this step go through it again: an example would count twice.",
                "Give every row of a draw to private.loss once: for part in clipwise.microbatches(batch, n): … An input that all parts share "
                "and that happens to be as long as a part is declared with clipwise.constant(x).",
            )
