"""An ε that says what it is worth: its δ, accountant, sampler, neighbouring relation and number of steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .accounting import NAMES, Part, epsilon
from .errors import BadPlan
from .mechanism import IN_WORDS

if TYPE_CHECKING:
    from .plan import PrivacyPlan


@dataclass(frozen=True)
class Budget:
    """(ε, δ), and what it rests on."""

    epsilon: float
    delta: float
    accountant: str
    sampler: str
    relation: str
    steps: int

    def rounded_up(self) -> str:
        """ε with four digits, never less than it is."""
        return rounded_up(self.epsilon)

    def __str__(self) -> str:
        relation = IN_WORDS[self.relation].format(unit="record")
        label = f"{self.sampler.replace('_', ' ')}{' without amplification' if 'shuffle' in self.sampler else ''}"
        return f"ε = {self.rounded_up()} at δ = {self.delta:g} after {self.steps} steps ({self.accountant}; {label} sampling; {relation})"


def rounded_up(value: float, digits: int = 4) -> str:
    """So many significant digits, never less than the value."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "∞"
    scale = 10.0 ** (math.floor(math.log10(abs(value))) - digits + 1)
    up = math.ceil(value / scale - 1e-9) * scale
    return f"{up:.{digits}g}" if up < 10**6 else f"{up:.3e}"


def compose(plans: Sequence[PrivacyPlan | tuple[PrivacyPlan, int]], *, delta: float | None = None, accountant: str = "auto") -> Budget:
    """What several trainings on one data set cost together; each a plan, or (plan, steps that were taken).

    All must protect the same unit under the same relation, on a data set of the same size. δ is the largest of theirs unless given.

        clipwise.compose([search_plan, final_plan])
    """
    taken = [(entry, entry.steps) if not isinstance(entry, tuple) else entry for entry in plans]
    if not taken:
        raise BadPlan("compose needs at least one plan.", "compose([plan, plan]) or compose([(plan, steps), …]).")
    first = taken[0][0]
    for plan, _ in taken[1:]:
        for name in ("relation", "unit", "dataset_size"):
            if getattr(plan, name) != getattr(first, name):
                raise BadPlan(
                    f"plans with {name} {getattr(first, name)!r} and {getattr(plan, name)!r} do not compose.",
                    "Account for all of them under one relation, unit and data set: replace(plan, relation=…).",
                )
    parts: list[Part] = [(plan.mechanism, steps) for plan, steps in taken]
    at = delta if delta is not None else max(plan.delta for plan, _ in taken)
    try:
        value, name = epsilon(parts, at, accountant)
    except ValueError as error:
        raise BadPlan(str(error) + ".", "Choose samplers that share an accountant, or give each its own ε and δ and add them up.") from None
    samplers = " + ".join(dict.fromkeys(plan.sampler for plan, _ in taken))
    return Budget(value, at, NAMES[name], samplers, first.relation, sum(steps for _, steps in taken))
