"""What one training step releases, as accounting sees it: how its batch is drawn, and how much noise it gets.

| sampler             | what it draws                                        | neighbouring relations              |
|---------------------|------------------------------------------------------|-------------------------------------|
| `poisson`           | each record by itself with probability q = B/N       | add or remove one, replace special, replace one |
| `truncated_poisson` | the same; above `max_batch_size` a random part of it | replace special, replace one        |
| `shuffle`           | a random order, cut into N/B parts: no amplification | replace special, replace one        |
| `fixed_size`        | B of N records without replacement                   | replace one                         |

`replace_special` replaces a record by one that contributes nothing: the data set's size is public and constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

RELATIONS = {
    "poisson": ("add_or_remove_one", "replace_special", "replace_one"),
    "truncated_poisson": ("replace_special", "replace_one"),
    "shuffle": ("replace_special", "replace_one"),
    "fixed_size": ("replace_one",),
}  # the first is the default
IN_WORDS = {
    "add_or_remove_one": "one {unit} added or removed",
    "replace_special": "one {unit} replaced by one that contributes nothing",
    "replace_one": "one {unit} replaced by any other",
}


@dataclass(frozen=True)
class Mechanism:
    """One step's release: Σ clip(g_i) over a drawn batch, plus Gaussian noise of `noise_multiplier` sensitivities."""

    sampler: str
    dataset_size: int
    batch_size: int
    noise_multiplier: float
    relation: str
    max_batch_size: int | None = None

    @property
    def sampling_rate(self) -> float:
        return self.batch_size / self.dataset_size

    @property
    def steps_in_a_pass(self) -> int:
        return -(-self.dataset_size // self.batch_size)

    def releases(self, steps: int) -> int:
        """How many releases a single record may take part in: every step, or with `shuffle` every pass that was begun."""
        return -(-steps // self.steps_in_a_pass) if self.sampler == "shuffle" else steps

    @property
    def accountants(self) -> tuple[str, ...]:
        """Those whose analysis covers this sampler under this relation; under replace one RDP and PLD are never mixed, for they
        disagree on what a Gaussian event means."""
        if self.sampler == "fixed_size":
            return ("rdp",)
        if self.sampler == "truncated_poisson" or self.relation == "replace_one":
            return ("pld",)
        return ("pld", "rdp")

    def event(self, steps: int) -> Any:
        """The dp_accounting event of so many steps."""
        import dp_accounting as dpa

        z, q = self.noise_multiplier, self.sampling_rate
        if self.sampler == "poisson":
            one = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
        elif self.sampler == "truncated_poisson":
            assert self.max_batch_size is not None
            one = dpa.TruncatedSubsampledGaussianDpEvent(self.dataset_size, q, self.max_batch_size, z)
        elif self.sampler == "shuffle":
            one = dpa.GaussianDpEvent(z)
        else:  # replacing one record moves the sum by twice the bound
            one = dpa.SampledWithoutReplacementDpEvent(self.dataset_size, self.batch_size, dpa.GaussianDpEvent(z / 2))
        return dpa.SelfComposedDpEvent(one, self.releases(steps))

    def dpa_relation(self) -> Any:
        import dp_accounting as dpa

        return getattr(dpa.NeighboringRelation, self.relation.upper())

    def privacy_loss(self, steps: int, grid: float) -> Any:
        """The privacy loss distribution of so many steps, rounded up to multiples of `grid`."""
        from dp_accounting.pld import privacy_loss_distribution as pld

        options: dict[str, Any] = {"value_discretization_interval": grid, "neighboring_relation": self.dpa_relation()}
        if self.sampler == "shuffle":  # Gaussians compose to a Gaussian
            return pld.from_gaussian_mechanism(self.noise_multiplier / math.sqrt(self.releases(steps)), **options)
        return _one_step(self, grid).self_compose(steps)

    def truncation_probability(self) -> float:
        """The chance that a step's draw of the others fills the cap, so that truncation touches a given record that was drawn."""
        from scipy import stats

        assert self.max_batch_size is not None
        return float(stats.binom.sf(self.max_batch_size - 1, self.dataset_size - 1, self.sampling_rate))


_losses: dict[tuple[Mechanism, float], Any] = {}  # privacy loss distributions of one step: costly to make, cheap to compose
_KEPT = 8


def _one_step(mechanism: Mechanism, grid: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    key = (mechanism, grid)
    if key not in _losses:
        options: dict[str, Any] = {"value_discretization_interval": grid, "neighboring_relation": mechanism.dpa_relation()}
        if len(_losses) >= _KEPT:
            del _losses[next(iter(_losses))]
        if mechanism.sampler == "truncated_poisson":
            _losses[key] = pld.from_truncated_subsampled_gaussian_mechanism(
                mechanism.dataset_size, mechanism.sampling_rate, mechanism.max_batch_size, mechanism.noise_multiplier, **options
            )
        else:
            assert mechanism.sampler == "poisson"
            _losses[key] = pld.from_gaussian_mechanism(mechanism.noise_multiplier, sampling_prob=mechanism.sampling_rate, **options)
    return _losses[key]


def default_cap(batch_size: int) -> int:
    """B + 8√B, which a Poisson draw passes about once in 10¹³ steps, so that truncating there costs nothing; more for small batches.

    Below B = 100 the tail is heavier: there Chernoff's bound e^(−B)·(eB/c)^c must be below 10⁻¹⁵.
    """
    cap = batch_size + math.ceil(8 * math.sqrt(batch_size))
    while batch_size < 100 and -batch_size + cap * (1 + math.log(batch_size / cap)) > math.log(1e-15):
        cap += 1
    return cap
