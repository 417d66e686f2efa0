"""Gradients of a part of a tensor: a slice, a chunk, a transposed block of a weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..declared import constant
from ..tracing import outside_graphs
from .base import Factor, Grouping
from .dense import Dense

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Storage:
    """Shape and strides of a tensor that fills its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Storage:
        return cls(tuple(tensor.shape), tensor.stride())

    @property
    def extent(self) -> int:
        """Numbers between the first element and the last, gaps included."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride)) if 0 not in self.shape else 0


@dataclass(frozen=True)
class Region:
    """A view of a tensor: shape, strides and offset into the whole's storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor, whole: Tensor) -> Region:
        return cls(tuple(view.shape), view.stride(), int(view.storage_offset() - whole.storage_offset()))


@lru_cache(maxsize=32)
def positions(region: Region, whole: Storage, device: torch.device = _CPU) -> Tensor:
    """Where each element of the region lies in the flattened whole: a constant, also of graphs. (numel of the region,)"""
    with outside_graphs():
        numbers = torch.empty_strided(whole.shape, whole.stride, dtype=torch.long)
        numbers.copy_(torch.arange(numbers.numel()).view(whole.shape))
        return constant(numbers.as_strided(region.shape, region.stride, region.offset).flatten().to(device))


@lru_cache(maxsize=1024)
def are_disjoint(regions: frozenset[Region], whole: Storage) -> bool:
    """Whether no element of the whole lies in two of the regions, or twice in one (an expanded view repeats its elements)."""
    with outside_graphs():
        index = torch.cat([positions(region, whole) for region in regions])
        return index.unique().numel() == index.numel()


def is_injective(region: Region, whole: Storage) -> bool:
    return are_disjoint(frozenset([region]), whole)


class Placed(Factor):
    """The factor `inner` of a view `region` that repeats no element, as a factor of the whole tensor: zero outside the view."""

    def __init__(self, inner: Factor, region: Region, whole: Storage):
        self.inner = inner
        self.region = region
        self.whole = whole
        self.shape = torch.Size(whole.shape)
        self.batch = inner.batch

    def dense(self) -> Tensor:
        extent = self.whole.extent
        out = torch.zeros(self.batch * extent, dtype=self.dtype, device=self.device)
        out.as_strided((self.batch, *self.region.shape), (extent, *self.region.stride), self.region.offset).copy_(self.inner.dense())
        return out.as_strided((self.batch, *self.whole.shape), (extent, *self.whole.stride))

    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        out = torch.zeros(self.whole.extent, dtype=self.dtype, device=self.device)
        out.as_strided(self.region.shape, self.region.stride, self.region.offset).copy_(self.inner.weighted_sum(weights, clean=clean))
        return out.as_strided(self.whole.shape, self.whole.stride)

    def mass(self) -> Tensor:
        return self.inner.mass()

    def merge(self, grouping: Grouping) -> Placed:
        return Placed(self.inner.merge(grouping), self.region, self.whole)

    def examples(self, start: int, stop: int) -> Placed:
        return Placed(self.inner.examples(start, stop), self.region, self.whole)

    def reshaped(self, shape: torch.Size) -> Factor:
        return Dense(self.dense()).reshaped(shape)

    @property
    def dense_flops(self) -> int:
        return self.inner.dense_flops

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors
