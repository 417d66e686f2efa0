"""Parameters behind weights that only autograd can pull back (W + BA, weight norm): every example is pulled back, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from .decisions import Deciding
from .derived import example_gradients
from .factors import Dense, FactorSum, PartSum
from .numerics import squared_norms, to_accumulate
from .planner import chunk_on

Watching = Callable[[], AbstractContextManager[None]]


def chunked_gradients(outputs: list[Tensor], inputs: list[Tensor], sums: list[FactorSum | PartSum], watching: Watching) -> list[Tensor]:
    """Pull every example back, a chunk at a time. Returns (B, *input) each."""
    chunks = _chunks(outputs, inputs, sums[0].batch)
    found = [example_gradients(outputs, inputs, [s.dense(a, b) for s in sums], watching) for a, b in chunks]
    return [torch.cat(column) for column in zip(*found)]


def _chunks(outputs: list[Tensor], inputs: list[Tensor], batch: int) -> list[tuple[int, int]]:
    step = max(1, chunk_on(outputs[0].device) // max(1, *(tensor.numel() for tensor in [*outputs, *inputs])))
    return [(start, min(start + step, batch)) for start in range(0, batch, step)]


class PulledBack:
    """Parameters behind weights that only autograd can pull back: written out, and kept if memory allows, else made again."""

    def __init__(
        self,
        outputs: list[Tensor],
        sums: list[FactorSum | PartSum],
        inputs: dict[int, Tensor],
        extra: dict[int, FactorSum | PartSum],
        batch: int,
        watching: Watching,
    ):
        self._watching = watching
        self.outputs = outputs
        self.inputs = inputs
        self._sums = sums
        self._extra = extra  # the same parameters' factors from direct uses
        self._batch = batch
        self._kept: dict[int, list[Tensor]] | None = None
        self._norms: dict[int, Tensor] | None = None

    def squared_norms(self, deciding: Deciding) -> dict[int, Tensor]:
        if self._norms is None:
            sizes = [parameter.numel() for parameter in self.inputs.values()]
            keep = deciding.may_keep(("pulled back", *sizes), self._batch, 4 * self._batch * sum(sizes))
            kept: dict[int, list[Tensor]] | None = {key: [] for key in self.inputs} if keep else None
            norms: dict[int, list[Tensor]] = {key: [] for key in self.inputs}
            for _, _, gradients in self._each_chunk():
                for key, gradient in gradients.items():
                    norms[key].append(squared_norms(gradient))
                    if kept is not None:
                        kept[key].append(gradient)
            self._kept = kept
            self._norms = {key: torch.cat(parts) for key, parts in norms.items()}
        return self._norms

    def masses(self, deciding: Deciding) -> dict[int, Tensor]:
        """As large as the terms behind the derived weights, at least: what autograd adds up on the way may cancel."""
        terms = torch.stack([total.mass().to(self._sums[0].device) for total in self._sums]).sum(0)
        return {key: norms.sqrt() + terms.to(norms.device) for key, norms in self.squared_norms(deciding).items()}

    def weighted_sums(self, weights: dict[int, Tensor]) -> dict[int, Tensor]:
        if self._kept is not None:
            return {key: Dense(torch.cat(parts)).weighted_sum(weights[key]) for key, parts in self._kept.items()}
        sums: dict[int, Tensor] = {}
        for start, stop, gradients in self._each_chunk():
            for key, gradient in gradients.items():
                part = Dense(gradient).weighted_sum(weights[key][start:stop])
                sums[key] = sums[key] + part if key in sums else part
        return sums

    def rounding(self, weights: Tensor) -> dict[int, float]:
        """How far Jᵀ Σ_i s_i g_i is from Σ_i s_i Jᵀ g_i, which are the same number but for what J rounds on its way."""
        at_once = [total.weighted_sum(weights).unsqueeze(0) for total in self._sums]
        pulled = example_gradients(self.outputs, list(self.inputs.values()), at_once, self._watching)
        apart = self.weighted_sums(dict.fromkeys(self.inputs, weights))
        found = {}
        for key, (whole,) in zip(self.inputs, pulled):
            direct = self._extra[key].weighted_sum(weights) if key in self._extra else 0.0
            found[key] = float((whole + direct - apart[key]).norm())
        return found

    def _each_chunk(self) -> Iterator[tuple[int, int, dict[int, Tensor]]]:
        """(start, stop, {parameter: (n, *shape)}) over chunks of examples."""
        inputs = list(self.inputs.values())
        for start, stop in _chunks(self.outputs, inputs, self._batch):
            found = example_gradients(self.outputs, inputs, [total.dense(start, stop) for total in self._sums], self._watching)
            gradients = {}
            for key, gradient in zip(self.inputs, found):
                gradient = to_accumulate(gradient)
                gradients[key] = gradient + self._extra[key].dense(start, stop) if key in self._extra else gradient
            yield start, stop, gradients
