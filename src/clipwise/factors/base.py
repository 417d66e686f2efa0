"""What a factor is: the gradients of B examples with respect to one tensor, not yet written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from ..numerics import accumulation_dtype


class Grouping(Protocol):
    """Sorts rows into examples: (R, ...) → (B, k, ...), k rows an example, empty places filled with zeros."""

    @property
    def batch(self) -> int: ...

    @property
    def is_trivial(self) -> bool: ...

    def __call__(self, rows: Tensor) -> Tensor: ...

    def owners(self) -> Tensor:
        """(R,): the example each row belongs to, -1 for none."""
        ...


class Factor(ABC):
    """The gradients g_1 … g_B of B examples with respect to one tensor of shape `shape`, in whatever form is cheapest.

    A rule makes a factor whose rows are the rows of the call's output; `merge` then gathers the rows of each example.
    Everything a factor computes is in float32, or in float64 if its tensors are.
    """

    shape: torch.Size
    batch: int

    @abstractmethod
    def dense(self) -> Tensor:
        """Written out: (B, *shape)."""

    @abstractmethod
    def weighted_sum(self, weights: Tensor, *, clean: bool = False) -> Tensor:
        """Σ_i weights[i]·g_i, of shape `shape`. An example of weight zero adds exactly nothing, even if g_i is not finite.

        `clean` says that every g_i is finite, so that nothing needs to be looked for.
        """

    @abstractmethod
    def mass(self) -> Tensor:
        """(B,) ≥ ‖g_i‖: the sum of the norms of the terms that make up g_i, which scales the rounding error of adding them."""

    @abstractmethod
    def merge(self, grouping: Grouping) -> Factor:
        """The same gradients with the rows of each example added up: R rows become B examples."""

    @abstractmethod
    def examples(self, start: int, stop: int) -> Factor:
        """The factor of the examples start … stop-1 alone."""

    @abstractmethod
    def reshaped(self, shape: torch.Size) -> Factor:
        """The same numbers in the same order for a tensor of another shape."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What the factor holds; the first says precision and device."""

    @property
    def signature(self) -> Hashable:
        """What the time it takes depends on, besides the number of examples; lengths that vary from batch to batch are told apart roughly."""
        return type(self), self.shape, *(tensor.shape[1:] for tensor in self.tensors)

    @property
    def summary(self) -> str:
        """What an example's gradient is made of, in a few words."""
        return " × ".join(map(str, self.shape)) or "one number"

    @property
    def elements(self) -> int:
        """How many numbers an example holds in this form."""
        return sum(tensor.numel() for tensor in self.tensors) // max(self.batch, 1)

    @property
    def dense_flops(self) -> int:
        """Floating-point operations an example costs to be written out."""
        return 0

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """Of what it computes."""
        return accumulation_dtype(self.stored_dtype)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of what it holds."""
        return self.tensors[0].dtype

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device
