"""Which records a step draws. The cost of a draw grows with the batch, not with the data set: 10⁹ records start at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import PrivacyPlan
from .randomness import Randomness

_WIDE = 2**62  # torch.randint below 2³² takes 32 random bits modulo n, which favours small numbers where n is large
_ROUNDS = 6


class Sampler:
    """Draws the records of one step after the other, as the plan says."""

    def __init__(self, plan: PrivacyPlan, randomness: Randomness):
        self.plan = plan
        self._randomness = randomness
        self._order: tuple[int, Tensor] | None = None  # the pass that is running, and the keys of its order

    def draw(self, step: int) -> list[int]:
        """The records of a step. Steps of `shuffle` must come in their order within a pass."""
        plan = self.plan
        if plan.sampler == "shuffle":
            return self._part_of_a_pass(step)
        generator = self._randomness.generator("draw", step)
        size = plan.batch_size
        if plan.sampler != "fixed_size":
            size = binomial(plan.dataset_size, plan.batch_size / plan.dataset_size, generator)
        if plan.max_batch_size is not None:  # a random part of a random set is a random set
            size = min(size, plan.max_batch_size)
        return distinct(plan.dataset_size, size, generator)

    def _part_of_a_pass(self, step: int) -> list[int]:
        number, place = divmod(step, self.plan.mechanism.steps_in_a_pass)
        if self._order is None or self._order[0] != number:
            self._order = number, order_keys(self._randomness.generator("order", number))
        size = self.plan.dataset_size
        places = torch.arange(place * self.plan.batch_size, min((place + 1) * self.plan.batch_size, size))
        return shuffled(places, size, self._order[1]).tolist()


def binomial(count: int, probability: float, generator: torch.Generator) -> int:
    """How many of `count` records are in a Poisson draw."""
    return int(torch.binomial(torch.tensor(float(count), dtype=torch.float64), torch.tensor(probability, dtype=torch.float64), generator))


def distinct(size: int, count: int, generator: torch.Generator) -> list[int]:
    """`count` different numbers below `size`, every set of them equally likely."""
    if 3 * count >= size:
        return torch.randint(_WIDE, (size,), generator=generator).argsort()[:count].tolist()
    found: dict[int, None] = {}
    fair = _WIDE - _WIDE % size
    while len(found) < count:
        wide = torch.randint(_WIDE, (count - len(found) + 16,), generator=generator)
        found.update(dict.fromkeys((wide[wide < fair] % size).tolist()))
    return list(found)[:count]


def order_keys(generator: torch.Generator) -> Tensor:
    return torch.randint(_WIDE, (_ROUNDS,), generator=generator)


def shuffled(places: Tensor, size: int, keys: Tensor) -> Tensor:
    """Which records stand at these places of a random order, without writing the order out. places: (n,) below `size`

    A Feistel network permutes the numbers below a power of four; those that fall out of range walk on until they fall in.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = 2**half - 1
    found = places.clone()
    outside = torch.ones_like(places, dtype=torch.bool)
    while bool(outside.any()):
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        found[outside] = (left << half) | right
        outside = found >= size
    return found


def _mixed(numbers: Tensor) -> Tensor:
    """Spreads every bit over all others (the constants of splitmix64), modulo 2⁶⁴."""
    numbers = (numbers ^ ((numbers >> 30) & (2**34 - 1))) * -4658895280553007687
    numbers = (numbers ^ ((numbers >> 27) & (2**37 - 1))) * -7723592293110705685
    return numbers ^ ((numbers >> 31) & (2**33 - 1))
