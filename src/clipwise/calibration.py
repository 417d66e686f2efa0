"""The noise, the number of steps or the batch size that meets an ε. Whatever is returned was evaluated and meets it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .accounting import (
    COARSEST,
    MOST_STEPS,
    Part,
    epsilon,
    find_root,
    is_hopeless,
    is_quick,
    pld_epsilon,
    rdp_epsilon,
    require_dp_accounting,
    settled_grid,
)
from .errors import BadPlan

if TYPE_CHECKING:
    from .plan import PrivacyPlan

_LEAST_NOISE, _MOST_NOISE = 1e-2, 1e6
_SETTLED = 1e-3  # noise that moves by less than this share from one grid to the next is found
_MOST = 10**8  # steps, or records in a batch


def noise(cls: type[PrivacyPlan], target: float, fields: dict[str, Any]) -> PrivacyPlan:
    """The least noise, to about a thousandth: roughly by RDP, then by PLD."""
    require_dp_accounting()
    plan = cls(noise_multiplier=_LEAST_NOISE, **fields)

    def part(z: float) -> list[Part]:
        return [(replace(plan.mechanism, noise_multiplier=z), plan.steps)]

    found = _find(lambda z: _rough(part(z), plan.delta, plan.accountant), target, start=1.0)
    if _uses_pld(plan) and not is_hopeless(part(found)):
        found, grid = _refined(part, plan.delta, target, found)
        while settled_grid(part(found), plan.delta, finest=grid)[0] > target:  # `budget` may settle on a coarser grid
            found *= 1.002
    elif not _uses_rdp(plan):
        raise BadPlan(
            f"{plan.steps} steps are too many for the only accountant of {plan.sampler} sampling under {plan.relation}.",
            f"Take at most {int(MOST_STEPS)} steps, or another sampler.",
        )
    return cls(**(fields | {"noise_multiplier": math.ceil(found * 1e6) / 1e6}))


def _uses_pld(plan: PrivacyPlan) -> bool:
    return "pld" in plan.mechanism.accountants and plan.accountant in ("auto", "pld")


def _uses_rdp(plan: PrivacyPlan) -> bool:
    return "rdp" in plan.mechanism.accountants and plan.accountant != "pld"


def _refined(part: Callable[[float], list[Part]], delta: float, target: float, found: float) -> tuple[float, float]:
    """The least noise by PLD, and the grid it was found on: finer and finer ones until that no longer helps. A grid too coarse for so small an ε is passed over."""
    grid = COARSEST
    while True:
        last = not is_quick(part(found), delta, grid / 10)
        if last or pld_epsilon(part(found), delta, grid=grid) <= 2 * target:
            better = _find(lambda z: pld_epsilon(part(z), delta, grid=grid), target, start=found)
            last = last or abs(math.log(better / found)) < _SETTLED
            found = better
        if last:
            return found, grid
        grid /= 10


def _rough(parts: list[Part], delta: float, accountant: str) -> float:
    """A quick bound in the right region: RDP where there is one, else RDP of a draw that is at least as exposed, on the same scale."""
    mechanism, steps = parts[0]
    if "rdp" in mechanism.accountants:
        return rdp_epsilon(parts, delta, classic=accountant == "rdp_classic")
    sampler = "shuffle" if mechanism.sampler == "shuffle" else "poisson"
    return rdp_epsilon([(replace(mechanism, sampler=sampler, relation="replace_special", max_batch_size=None), steps)], delta)


def _find(function: Callable[[float], float], target: float, start: float) -> float:
    def bounded(z: float) -> float:
        if not _LEAST_NOISE <= z <= _MOST_NOISE:
            raise BadPlan(
                f"ε = {target:g} would take a noise multiplier {'below' if z < 1 else 'above'} {_LEAST_NOISE if z < 1 else _MOST_NOISE:g}.",
                "Ask for a smaller ε: this one protects nothing." if z < 1 else "Ask for a larger ε or δ, or fewer steps.",
            )
        return function(z)

    return find_root(bounded, target, start)


def steps(cls: type[PrivacyPlan], target: float, fields: dict[str, Any]) -> PrivacyPlan:
    """The largest number of steps, to about a thousandth, whose ε is within the target."""
    one = cls(steps=1, **fields)
    stride = one.mechanism.steps_in_a_pass if one.sampler == "shuffle" else 1  # a pass that was begun counts whole
    most = _largest(lambda count: (one.mechanism, count * stride), one, target, "one step alone costs")
    return cls(**(fields | {"steps": most * stride}))


def batch_size(cls: type[PrivacyPlan], target: float, fields: dict[str, Any]) -> PrivacyPlan:
    """The largest batch size, to about a thousandth, whose ε is within the target."""

    most_at_all = min(fields["dataset_size"], fields["max_batch_size"] or fields["dataset_size"])

    def part(size: int) -> Part:
        plan = cls(**(fields | {"batch_size": min(size, most_at_all)}))
        return plan.mechanism, plan.steps

    smallest = cls(**(fields | {"batch_size": 1}))
    most = _largest(part, smallest, target, "even batches of one cost")
    return cls(**(fields | {"batch_size": min(most, most_at_all)}))


def _largest(part: Callable[[int], Part], plan: PrivacyPlan, target: float, too_much: str) -> int:
    """The largest number whose part meets the target: roughly first, then by the plan's accountant. What is returned was evaluated."""
    require_dp_accounting()
    known: dict[int, float] = {}
    grids: list[float] = []

    def exact(count: int) -> float:
        if count not in known:
            parts = [part(count)]
            found = [pld_epsilon(parts, plan.delta, grid=grids[0])] if grids else []
            if _uses_rdp(plan):
                found.append(rdp_epsilon(parts, plan.delta, classic=plan.accountant == "rdp_classic"))
            known[count] = min(found)
        return known[count]

    def search(function: Callable[[int], float], start: float) -> int:
        return _whole(find_root(lambda x: function(_whole(x)), target, start))

    if _rough([part(1)], plan.delta, plan.accountant) > target and epsilon([part(1)], plan.delta, plan.accountant)[0] > target:
        raise BadPlan(f"{too_much} more than ε = {target:g}.", "Use more noise, or fewer or smaller draws.")
    near = search(lambda count: _rough([part(count)], plan.delta, plan.accountant) if count > 1 else 0.0, 1e-2)
    if _uses_pld(plan):
        while is_hopeless([part(near)]) and near > 1:
            near //= 2
        grids.append(settled_grid([part(near)], plan.delta, guess=True)[1])
    return search(lambda count: exact(count) if count > 1 else 0.0, 1 / near)


def _whole(x: float) -> int:
    return max(1, min(_MOST, math.floor(1 / x * (1 + 1e-12))))
