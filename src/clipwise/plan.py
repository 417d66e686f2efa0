"""PrivacyPlan: every privacy number of a training in one place, so that sampler, clipping, noise and accountant cannot drift apart."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from . import calibration, plan_file
from .accounting import ACCOUNTANTS
from .budget import Budget, compose
from .clipping import Clipping, flat
from .errors import BadPlan
from .mechanism import RELATIONS, Mechanism, default_cap


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a private training promises. Each step releases (Σ_{i∈batch} clip(g_i) + N(0, (z·S)²)) / B, B the expected batch size.

    dataset_size      N, how many records there are
    batch_size        B, how many a step draws on average; records are drawn with probability B/N
    epochs or steps   how long; `steps` is ceil(epochs·N/B) for the whole run, and the hard limit of the training
    delta             δ, well below 1/N
    clipping          flat(C), per_layer(C), per_group({…}), automatic(C), adaptive(C): its `sensitivity` is S
    noise_multiplier  z
    sampler           "poisson", "truncated_poisson" (at most `max_batch_size` records), "shuffle" (no amplification), "fixed_size"
    accountant        "auto" (the smaller of RDP and PLD), "pld", "rdp", "rdp_classic" (the paper's conversion)
    relation          what neighbouring data sets are; follows from the sampler unless given
    unit              what one entry of `losses` stands for: an example, a user, a document
    """

    dataset_size: int
    batch_size: int
    delta: float
    clipping: Clipping
    noise_multiplier: float
    epochs: int | float | None = None
    steps: int = None  # type: ignore[assignment]
    sampler: str = "poisson"
    max_batch_size: int | None = None
    accountant: str = "auto"
    relation: str = None  # type: ignore[assignment]
    unit: str = "example"

    def __post_init__(self) -> None:
        for name in ("dataset_size", "batch_size"):
            self._set(name, _count(getattr(self, name), name))
        if self.batch_size > self.dataset_size:
            raise BadPlan(
                f"batch_size {self.batch_size} is larger than dataset_size {self.dataset_size}.", "Draw at most the whole data set."
            )
        self._set("delta", _number(self.delta, "delta", below=1.0))
        self._set("noise_multiplier", _number(self.noise_multiplier, "noise_multiplier"))
        if not isinstance(self.clipping, Clipping):
            raise BadPlan(f"clipping must be a clipping, got {self.clipping!r}.", "For example clipping=clipwise.flat(1.0).")
        self.clipping.noise_of_sums(self.noise_multiplier)  # refuses what does not fit together
        if not isinstance(self.unit, str) or not self.unit:
            raise BadPlan(f"unit must say what is protected, got {self.unit!r}.", 'For example unit="example" or unit="user".')
        self._check_sampler()
        self._set_length()
        if self.delta >= 1 / self.dataset_size:
            warnings.warn(
                f"delta {self.delta:g} is not below 1/N = {1 / self.dataset_size:.2g}: it would allow to publish whole records",
                stacklevel=3,
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_sampler(self) -> None:
        if self.sampler not in RELATIONS:
            raise BadPlan(f"there is no accounting for the sampler {self.sampler!r}.", f"Choose one of {', '.join(RELATIONS)}.")
        relations = RELATIONS[self.sampler]
        if self.relation is None:
            self._set("relation", relations[0])
        if self.relation not in relations:
            raise BadPlan(
                f"{self.sampler} sampling is not accounted for under {self.relation!r}.", f"It is under {' or '.join(relations)}."
            )
        if self.accountant not in ACCOUNTANTS:
            raise BadPlan(f"there is no accountant {self.accountant!r}.", f"Choose one of {', '.join(ACCOUNTANTS)}.")
        if self.accountant not in ("auto", *self.mechanism.accountants, *(f"{name}_classic" for name in self.mechanism.accountants)):
            raise BadPlan(
                f"{self.accountant} does not cover {self.sampler} sampling under {self.relation}.",
                f'Use "auto" or {" or ".join(self.mechanism.accountants)}.',
            )
        if self.sampler == "truncated_poisson":
            cap = default_cap(self.batch_size) if self.max_batch_size is None else _count(self.max_batch_size, "max_batch_size")
            if cap < self.batch_size:
                raise BadPlan(f"max_batch_size {cap} is below batch_size {self.batch_size}.", "Leave it out for B + 8√B, which is free.")
            self._set("max_batch_size", min(cap, self.dataset_size))
        elif self.max_batch_size is not None:
            raise BadPlan(f"max_batch_size means nothing to {self.sampler} sampling.", 'Choose sampler="truncated_poisson".')

    def _set_length(self) -> None:
        if self.epochs is None and self.steps is None:
            raise BadPlan("the plan says neither epochs nor steps.", "Give one of them: without an end there is no ε.")
        if self.epochs is not None and not isinstance(self.epochs, Integral):
            self._set("epochs", _number(self.epochs, "epochs"))
        elif self.epochs is not None:
            self._set("epochs", _count(self.epochs, "epochs"))
        if self.steps is None:
            self._set("steps", self._steps_of(self.epochs))
        else:
            self._set("steps", _count(self.steps, "steps"))
            begun = (self.steps - 1) * self.batch_size // self.dataset_size + 1
            if self.sampler == "shuffle":
                begun = -(-self.steps // self.mechanism.steps_in_a_pass)
            if self.epochs is None:
                self._set("epochs", begun)
            elif self.steps != self._steps_of(self.epochs) and self.epochs != begun:
                raise BadPlan(
                    f"{self.epochs} epochs are {self._steps_of(self.epochs)} steps, not {self.steps}.", "Give epochs or steps, not both."
                )

    def _steps_of(self, epochs: Any) -> int:
        """Once for the whole run: rounding up every epoch by itself would overrun the budget."""
        if self.sampler == "shuffle":
            return math.ceil(epochs * self.mechanism.steps_in_a_pass)
        exact = isinstance(epochs, int)
        return -(-epochs * self.dataset_size // self.batch_size) if exact else math.ceil(epochs * self.dataset_size / self.batch_size)

    @property
    def mechanism(self) -> Mechanism:
        """What one step releases, for the accountant."""
        cap = self.max_batch_size if self.sampler == "truncated_poisson" else None
        return Mechanism(self.sampler, self.dataset_size, self.batch_size, self.noise_multiplier, self.relation, cap)

    def budget(self, steps: int | None = None) -> Budget:
        """What the whole run costs, or its first `steps` steps."""
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 0):
            raise BadPlan(f"steps must be a whole number, none or more, got {steps!r}.", "Leave it out for the whole plan.")
        return compose([(self, self.steps if steps is None else steps)], delta=self.delta, accountant=self.accountant)

    @classmethod
    def calibrate(
        cls,
        *,
        epsilon: float,
        delta: float,
        dataset_size: int,
        clipping: Clipping,
        batch_size: int | None = None,
        epochs: int | float | None = None,
        steps: int | None = None,
        noise_multiplier: float | None = None,
        sampler: str = "poisson",
        max_batch_size: int | None = None,
        accountant: str = "auto",
        relation: str | None = None,
        unit: str = "example",
    ) -> PrivacyPlan:
        """The plan that spends at most `epsilon`: finds the noise, or where the noise is given the number of steps or the batch size.

        Give all but one of noise_multiplier, batch_size and epochs (or steps). The plan's ε was evaluated, not extrapolated.
        """
        fixed = dict(delta=delta, dataset_size=dataset_size, clipping=clipping, sampler=sampler, max_batch_size=max_batch_size,
                     accountant=accountant, relation=relation, unit=unit)  # fmt: skip
        target = _number(epsilon, "epsilon")
        length = dict(epochs=epochs, steps=steps)
        has_length = epochs is not None or steps is not None
        if noise_multiplier is None and batch_size is not None and has_length:
            return calibration.noise(cls, target, dict(fixed, batch_size=batch_size, **length))
        if noise_multiplier is not None and batch_size is not None and not has_length:
            return calibration.steps(cls, target, dict(fixed, batch_size=batch_size, noise_multiplier=noise_multiplier))
        if noise_multiplier is not None and batch_size is None and has_length:
            return calibration.batch_size(cls, target, dict(fixed, noise_multiplier=noise_multiplier, **length))
        raise BadPlan(
            "calibrate solves for exactly one of noise_multiplier, batch_size and epochs (or steps).",
            "Give the other two and leave that one out.",
        )

    @classmethod
    def from_paper(cls, *, sigma: float, batch_size: int, clipping: Clipping | None = None, **others: Any) -> PrivacyPlan:
        """Lee & Kifer's Algorithm 1 adds N(0, σ²) to the *mean* clipped gradient of a batch of τ: z = σ·τ/C.

        from_paper(sigma=0.05, batch_size=128, clipping=flat(1.0), …) has the noise multiplier 6.4, not 0.05.
        """
        clipping = flat(1.0) if clipping is None else clipping
        z = _number(sigma, "sigma") * _count(batch_size, "batch_size") / clipping.sensitivity
        return cls(noise_multiplier=z, batch_size=batch_size, clipping=clipping, **others)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return plan_file.as_dict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PrivacyPlan:
        return plan_file.from_dict(cls, values)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        plan_file.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> PrivacyPlan:
        return plan_file.load(cls, path)


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise BadPlan(f"{name} must be a whole number of at least 1, got {value!r}.", f"For example {name}=256.")
    return int(value)


def _number(value: Any, name: str, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < below:
        limit = "a positive, finite number" if below == math.inf else f"between 0 and {below:g}"
        raise BadPlan(f"{name} must be {limit}, got {value!r}.", "Without it there is no guarantee to speak of.")
    return float(value)
