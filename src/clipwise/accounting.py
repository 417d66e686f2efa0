"""ε for what was released: the smaller of two upper bounds, Rényi (RDP) and privacy loss distributions (PLD), by dp-accounting.

PLD rounds losses up to a grid; any grid gives a valid bound, a finer one a tighter bound. It starts at 10⁻² and is refined
tenfold until ε moves by less than half a percent, or the table would become too long. δ is lowered by what rounding in the
library's Fourier transforms may have lost.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from .mechanism import Mechanism

ACCOUNTANTS = ("auto", "pld", "rdp", "rdp_classic")
NAMES = {"pld": "PLD", "rdp": "RDP", "rdp_classic": "RDP, classic conversion"}

Part = tuple[Mechanism, int]  # a mechanism, and how many steps of it

COARSEST, _FINEST = 1e-2, 1e-6
_SETTLED = 5e-3  # ε that moves by less than this share is fine enough
_MOST_CELLS = 3e6  # … of a composed distribution, and
_MOST_CELLS_IN_ONE_STEP = 3e5  # … of a single step's
_QUICKER = 0.2  # the share of them that a search allows itself
MOST_STEPS = 2e6  # the library's composition takes seconds a million
_HOPELESS_CELLS = 2e7  # so many on the coarsest grid mean an ε in the tens of thousands: nobody needs another digit
_USUAL_SLOPE = -1.3  # d ln ε / d ln z around ε = 3
_RELATIVE_ROUNDING, _ABSOLUTE_ROUNDING = 4e-9, 2.0**-51  # that a composed δ may be off by, for each step


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """dp-accounting warns of every order it leaves out where a series converges slowly; fewer orders give a looser bound, not a wrong one."""
    return "Excluding this order" not in str(record.msg)


def require_dp_accounting() -> None:
    try:
        import dp_accounting  # noqa: F401
    except ImportError as error:
        raise ImportError("accounting needs the package dp-accounting: pip install dp-accounting") from error
    logging.getLogger("absl").addFilter(_is_worth_saying)


def epsilon(parts: Sequence[Part], delta: float, accountant: str = "auto") -> tuple[float, str]:
    """The ε of all parts together at this δ, and the accountant that gave it ("pld", "rdp", "rdp_classic")."""
    require_dp_accounting()
    parts = [(mechanism, steps) for mechanism, steps in parts if steps > 0]
    allowed = set(ACCOUNTANTS[1:3]).intersection(*(mechanism.accountants for mechanism, _ in parts))
    wanted = allowed if accountant == "auto" else {accountant.removesuffix("_classic")} & allowed
    if not wanted:
        raise ValueError(
            f"no accountant covers all of these together (asked for {accountant!r}; under replace one, RDP and PLD do not mix)"
        )
    found: dict[str, float] = {}
    if not parts:
        return 0.0, accountant if accountant != "auto" else "pld" if "pld" in wanted else "rdp"
    if "rdp" in wanted:
        found["rdp_classic" if accountant == "rdp_classic" else "rdp"] = rdp_epsilon(parts, delta, classic=accountant == "rdp_classic")
    if "pld" in wanted:
        found["pld"] = pld_epsilon(parts, delta)
    best = min(found, key=lambda name: found[name])
    return found[best], best


def rdp_curve(parts: Sequence[Part]) -> tuple[Any, Any]:
    """(orders α, Rényi divergences) of all parts together."""
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(neighboring_relation=parts[0][0].dpa_relation())
    for mechanism, steps in parts:
        accountant.compose(mechanism.event(steps))
    return accountant._orders, accountant._rdp


def rdp_epsilon(parts: Sequence[Part], delta: float, *, classic: bool = False) -> float:
    """From Rényi divergences; `classic` is the paper's Lemma 1, ε = rdp(α) + ln(1/δ)/(α − 1), which is looser."""
    from dp_accounting.rdp import compute_epsilon

    orders, divergences = rdp_curve(parts)
    if classic:
        return max(0.0, float(min(divergences + math.log(1 / delta) / (orders - 1))))
    return float(compute_epsilon(orders, divergences, delta)[0])


def pld_epsilon(parts: Sequence[Part], delta: float, *, grid: float | None = None) -> float:
    """From privacy loss distributions, on `grid` or on one that is fine enough. Infinite where that cannot be held in memory."""
    if is_hopeless(parts):
        return math.inf
    if grid is not None:
        return _pld_on_grid(parts, delta, grid)[0]
    return settled_grid(parts, delta)[0]


def settled_grid(parts: Sequence[Part], delta: float, *, guess: bool = False, finest: float = _FINEST) -> tuple[float, float]:
    """ε, and the grid on which it settled: refining it tenfold moved ε by less than half a percent.

    With `guess`, a hundredth of the last move is taken for what the next one would bring (the error goes with the grid's square).
    """
    if is_hopeless(parts):
        return math.inf, COARSEST
    grid, patience = COARSEST, 10 / _QUICKER if guess else 10
    best, cells, step_cells = _pld_on_grid(parts, delta, grid)
    while grid > finest * 1.01 and patience * cells <= _MOST_CELLS and patience * step_cells <= _MOST_CELLS_IN_ONE_STEP:
        finer, cells, step_cells = _pld_on_grid(parts, delta, grid / 10)
        grid /= 10
        moved = best - finer
        best = min(best, finer)
        if (moved / 50 if guess else moved) <= _SETTLED * best:
            break
    return best, grid


def is_quick(parts: Sequence[Part], delta: float, grid: float) -> bool:
    """Whether a search may use this grid: told from a coarser one."""
    if is_hopeless(parts):
        return False
    _, cells, step_cells = _pld_on_grid(parts, delta, 10 * grid)
    return 10 * cells <= _QUICKER * _MOST_CELLS and 10 * step_cells <= _QUICKER * _MOST_CELLS_IN_ONE_STEP


def curve(parts: Sequence[Part], delta: float, accountant: str, points: int = 16) -> list[tuple[int, float]]:
    """(steps, ε) from none to all of a single part, on one grid; for a picture."""
    [(mechanism, steps)] = parts
    found = [(0, 0.0)]
    use_pld = accountant in ("auto", "pld") and "pld" in mechanism.accountants and not is_hopeless(parts)
    grid = settled_grid(parts, delta, guess=True)[1] if use_pld else None
    for point in sorted({max(1, round(steps * (k / points) ** 1.5)) for k in range(1, points)}):
        part = [(mechanism, point)]
        values = [pld_epsilon(part, delta, grid=grid)] if use_pld else []
        if "rdp" in mechanism.accountants and accountant != "pld":
            values.append(rdp_epsilon(part, delta, classic=accountant == "rdp_classic"))
        found.append((point, min(values, default=math.inf)))
    return [*found, (steps, epsilon(parts, delta, accountant)[0])]


def _pld_on_grid(parts: Sequence[Part], delta: float, grid: float) -> tuple[float, int, int]:
    """ε, the number of cells of the composed distribution, and of the longest single step's."""
    parts, delta = _without_idle_caps(parts, delta)
    steps = sum(mechanism.releases(count) for mechanism, count in parts)
    delta = delta * (1 - _RELATIVE_ROUNDING * steps) - _ABSOLUTE_ROUNDING * steps
    if delta <= 0:
        return math.inf, 1, 1
    together, longest = None, 1
    for mechanism, count in parts:
        loss = mechanism.privacy_loss(count, grid)
        longest = max(longest, _cells(mechanism.privacy_loss(1, grid)))
        together = loss if together is None else together.compose(loss)
    assert together is not None
    return max(0.0, float(together.get_epsilon_for_delta(delta))), _cells(together), longest


def _without_idle_caps(parts: Sequence[Part], delta: float) -> tuple[list[Part], float]:
    """A cap that is hardly ever met is paid for in δ: δ_truncated(ε) ≤ δ_Poisson(ε) + T·P[the cap is met].

    The library's distribution of a truncated draw is a mixture: with the probability τ that the cap is met, something worse. Taking that for
    no privacy at all costs τ a step, and saves making its distribution. Done where all of it is below a twentieth of δ.
    """
    lean: list[Part] = []
    for mechanism, steps in parts:
        if mechanism.sampler == "truncated_poisson":
            price = steps * mechanism.truncation_probability()
            if price <= delta / 20 / len(parts):
                delta -= price
                mechanism = replace(mechanism, sampler="poisson", max_batch_size=None)
        lean.append((mechanism, steps))
    return lean, delta


def is_hopeless(parts: Sequence[Part]) -> bool:
    """Whether PLD would take minutes, or more memory than there is."""
    steps = sum(mechanism.releases(count) for mechanism, count in parts if mechanism.sampler != "shuffle")
    return steps > MOST_STEPS or sum(_mean_loss(*part) for part in parts) / COARSEST > _HOPELESS_CELLS


def _mean_loss(mechanism: Mechanism, steps: int) -> float:
    """Roughly how far the privacy loss reaches: the mean over steps in which a record takes part, and one step's own tail."""
    rate = 1.0 if mechanism.sampler == "shuffle" else mechanism.sampling_rate
    return (mechanism.releases(steps) * rate + 1) * 2 / mechanism.noise_multiplier**2


def _cells(distribution: Any) -> int:
    return max(distribution._pmf_remove.size, distribution._pmf_add.size)


def find_root(function: Callable[[float], float], target: float, start: float, *, tolerance: float = 1e-3) -> float:
    """The smallest x, to within `tolerance` of the target, with function(x) ≤ target. function: positive, decreasing in x > 0.

    What is returned was evaluated and met the target. Steps are secants of ln function over ln x, kept inside a bracket.
    """
    good, bad = math.inf, -math.inf  # ln x of the smallest that met the target, and of the largest that did not
    last: tuple[float, float] | None = None  # (ln x, ln function − ln target)
    x, slope = math.log(start), _USUAL_SLOPE
    for _ in range(80):
        value = function(math.exp(x))
        gap = math.log(max(value, 1e-300) / target) if value < math.inf else math.inf
        good, bad = (min(good, x), bad) if gap <= 0 else (good, max(bad, x))
        if (gap <= 0 and gap >= -tolerance) or good - bad < tolerance / 8:
            break
        if last is not None and math.isfinite(gap + last[1]) and x != last[0]:
            slope = min(-0.05, (gap - last[1]) / (x - last[0]))
        last = x, gap
        x += max(-1.0, min(1.0, (gap + tolerance / 2) / -slope)) if math.isfinite(gap) else 1.0
        if not bad < x < good:
            x = (bad + good) / 2 if math.isfinite(bad + good) else x
    if good == math.inf:
        raise ValueError("no value meets the target")
    return math.exp(good)
