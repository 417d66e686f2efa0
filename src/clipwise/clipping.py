"""From norms to weights, and the sensitivity that follows.

A clipping puts the parameters into groups, measures each example's gradient in each group and scales it down. It knows its
own `sensitivity` S: adding or removing one example moves the sum of the scaled gradients by at most S in the 2-norm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from .errors import BadClipping
from .tracing import is_tracing


@dataclass(frozen=True)
class Group:
    """Parameters whose gradients are measured together, and the bound on their joint norm."""

    names: tuple[str, ...]
    bound: float


class Clipping(ABC):
    """How much of each example's gradient may pass."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """The most that one example can move the clipped sum."""

    def noise_of_sums(self, noise_multiplier: float) -> float:
        """The noise multiplier of the clipped sums, where something else that a step releases takes a part of the budget."""
        return noise_multiplier

    @abstractmethod
    def groups(self, names: Sequence[str]) -> list[Group]:
        """A partition of the trainable parameters `names`."""

    def scale(self, norms: Tensor, bound: float) -> Tensor:
        """The weight of an example whose gradient has this norm: ν = min(1, C/‖g‖) (paper, Equation 2)."""
        return (bound / norms).clamp(max=1.0)

    def weights(
        self, squared_norms: Mapping[str, Tensor], names: Sequence[str], losses: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """{name: (B,)} and which examples are finite. An example with NaN or Inf anywhere, its loss included, gets weight zero everywhere."""
        whole = _total(list(squared_norms.values()))
        told = whole if losses is None else whole + losses.detach()
        # 0·Inf and 0·NaN are NaN: one operation, but a compiler takes 0·x for 0
        finite = told.isfinite() if is_tracing() else 0 * told == 0
        weights: dict[str, Tensor] = {}
        for group in self.groups(names):
            present = [squared_norms[name] for name in group.names if name in squared_norms]
            if present:
                squares = whole if len(present) == len(squared_norms) else _total(present)
                scale = self.scale(squares.sqrt(), group.bound).masked_fill(~finite, 0.0)
                weights |= {name: scale for name in group.names if name in squared_norms}
        return weights, finite


def _total(squares: Sequence[Tensor]) -> Tensor:
    return squares[0] if len(squares) == 1 else torch.stack(list(squares)).sum(0)


def check_positive(value: float, what: str = "the clipping bound") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise BadClipping(
            f"{what} must be a positive, finite number, got {value!r}.", "Pass the largest norm a gradient may keep, e.g. flat(1.0)."
        )
    return value


@dataclass(frozen=True)
class Flat(Clipping):
    bound: float

    def __post_init__(self) -> None:
        check_positive(self.bound)

    @property
    def sensitivity(self) -> float:
        return self.bound

    def groups(self, names: Sequence[str]) -> list[Group]:
        return [Group(tuple(names), self.bound)]


@dataclass(frozen=True)
class PerLayer(Clipping):
    bound: float

    def __post_init__(self) -> None:
        check_positive(self.bound)

    @property
    def sensitivity(self) -> float:
        return self.bound

    def groups(self, names: Sequence[str]) -> list[Group]:
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return [Group(tuple(members), self.bound / math.sqrt(len(layers))) for members in layers.values()]


@dataclass(frozen=True)
class PerGroup(Clipping):
    bounds: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.bounds:
            raise BadClipping("per_group needs at least one pattern.", 'For example per_group({"encoder.*": 1.0, "*": 0.5}).')
        for pattern, bound in self.bounds:
            check_positive(bound, f"the bound of {pattern!r}")

    @property
    def sensitivity(self) -> float:
        return math.hypot(*(bound for _, bound in self.bounds))

    def groups(self, names: Sequence[str]) -> list[Group]:
        members: dict[str, list[str]] = {pattern: [] for pattern, _ in self.bounds}
        for name in names:
            pattern = next((pattern for pattern in members if fnmatchcase(name, pattern)), None)
            if pattern is None:
                raise BadClipping(
                    f"no pattern of per_group matches the parameter {name}.", 'Add a pattern for it; "*" last takes the rest.'
                )
            members[pattern].append(name)
        idle = [pattern for pattern, found in members.items() if not found]
        if idle:
            raise BadClipping(f"the pattern {idle[0]!r} of per_group gets no parameter.", f"Parameters are named {', '.join(names[:4])} …")
        return [Group(tuple(members[pattern]), bound) for pattern, bound in self.bounds]


@dataclass(frozen=True)
class Automatic(Clipping):
    bound: float
    stability: float

    def __post_init__(self) -> None:
        check_positive(self.bound)
        check_positive(self.stability, "the stability constant")

    @property
    def sensitivity(self) -> float:
        return self.bound

    def groups(self, names: Sequence[str]) -> list[Group]:
        return [Group(tuple(names), self.bound)]

    def scale(self, norms: Tensor, bound: float) -> Tensor:
        """ν = C / (‖g‖ + γ)."""
        return bound / (norms + self.stability)


def flat(bound: float) -> Clipping:
    """The whole gradient of an example is scaled down to norm `bound` (Abadi et al. 2016). Sensitivity: bound."""
    return Flat(bound)


def per_layer(bound: float) -> Clipping:
    """Each of the m layers (modules that own trainable parameters) is scaled down to bound/√m (McMahan et al. 2018). Sensitivity: bound."""
    return PerLayer(bound)


def per_group(bounds: Mapping[str, float]) -> Clipping:
    """Parameters whose name matches a pattern share that pattern's bound; the first match counts. Sensitivity: √Σ bound².

    clipwise.per_group({"encoder.*": 1.0, "*.bias": 0.1, "*": 0.5})
    """
    return PerGroup(tuple(bounds.items()))


def automatic(bound: float = 1.0, *, stability: float = 0.01) -> Clipping:
    """Every gradient is normalised: bound·g/(‖g‖ + stability) (Bu et al. 2023). Sensitivity: bound."""
    return Automatic(bound, stability)


def is_fixed(clipping: Clipping) -> bool:
    """Whether it is one of these, which nobody can change: a graph that has it baked in is right as long as it is the same."""
    return type(clipping) in (Flat, PerLayer, PerGroup, Automatic)
