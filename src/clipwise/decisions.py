"""How norms are evaluated, decided once for each parameter and shape: later steps need not ask, and the same code gives the same graph again."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from .factors import FactorSum
from .factors.ways import way_of
from .planner import MemoryBudget, peak_allowed
from .trials import roughly

Decision = tuple[str, float | None]  # a way of factors/ways.py, and the seconds it took when it was tried

_TOLD_APART = 3  # leading bits of the number of examples: what was decided holds for an eighth more of them


class Decisions:
    """What was decided for one model, and how much may be allocated at once. Graphs have their own, which stay."""

    def __init__(self) -> None:
        self.found: dict[Hashable, Decision] = {}
        self.peaks: dict[torch.device, int | None] = {}

    def clear(self) -> None:
        self.found.clear()
        self.peaks.clear()

    def budget(self, device: torch.device) -> MemoryBudget:
        """Of a backward pass that begins now: within the peak that was allowed when the first of these decisions was made."""
        if device not in self.peaks:
            self.peaks[device] = peak_allowed(device)
        return MemoryBudget.on(device, self.peaks[device])


class Deciding:
    """Decisions of one step. Unless the way to the losses is known, they are made for this step alone."""

    def __init__(self, decisions: Decisions, budget: MemoryBudget, *, is_known: bool):
        self._found: dict[Hashable, Decision] = decisions.found if is_known else {}
        self.budget = budget
        self.is_new = not is_known  # something was decided in this step

    def way(self, what: Hashable, total: FactorSum) -> Decision:
        size = total.batch * total.shape.numel() * total.dtype.itemsize
        case = what, total.signature, total.device
        return self._decided(case, total.batch, lambda: way_of(total, self.budget), lambda: self.budget.spend(size, lets_go=total.terms))

    def may_keep(self, what: Hashable, batch: int, size: int) -> bool:
        """Whether so many bytes may stay written out."""
        way, _ = self._decided(what, batch, lambda: ("keep" if self.budget.take(size) else "tiles", None), lambda: self.budget.spend(size))
        return way == "keep"

    def _decided(self, what: Hashable, batch: int, decide: Callable[[], Decision], spend: Callable[[], None]) -> Decision:
        case = what, roughly(batch, _TOLD_APART), torch.are_deterministic_algorithms_enabled()
        decision = self._found.get(case)
        if decision is None:
            self.is_new = True
            decision = self._found[case] = decide()
        elif decision[0].startswith("keep"):
            spend()
        return decision
