"""Inclusion counts and batch sizes against their distributions, at level 10⁻⁴ over fixed seeds."""

import itertools

import pytest
import torch
from scipy import stats

import clipwise as cw
from clipwise.randomness import Fast, Reproducible, fresh_generator
from clipwise.sampling import Sampler, binomial, distinct, order_keys, shuffled

LEVEL = 1e-4
pytestmark = pytest.mark.usefixtures("fixed_entropy")
SIZE, BATCH, STEPS = 500, 40, 3000


def draws(sampler, randomness=None, *, size=SIZE, batch=BATCH, steps=STEPS, **options):
    plan = cw.PrivacyPlan(
        dataset_size=size,
        batch_size=batch,
        steps=steps,
        delta=1e-4,
        clipping=cw.flat(1.0),
        noise_multiplier=1.0,
        sampler=sampler,
        **options,
    )
    source = Sampler(plan, randomness or Reproducible(5))
    return [source.draw(step) for step in range(steps)]


def counts(drawn, size=SIZE):
    return torch.bincount(torch.tensor([i for draw in drawn for i in draw]), minlength=size).double()


def is_likely(statistic, degrees):
    """A chi-square statistic, two-sided."""
    p = stats.chi2.sf(statistic, degrees)
    return LEVEL / 2 < p < 1 - LEVEL / 2


@pytest.mark.parametrize("randomness", [Reproducible(5), Fast()])
def test_poisson(randomness):
    drawn = draws("poisson", randomness)
    q = BATCH / SIZE
    sizes = torch.tensor([len(draw) for draw in drawn]).double()
    variance = SIZE * q * (1 - q)
    assert is_likely(float(((sizes - BATCH) ** 2 / variance).sum()), STEPS)  # dispersion of batch sizes
    assert abs(float(sizes.mean()) - BATCH) < stats.norm.isf(LEVEL / 2) * (variance / STEPS) ** 0.5
    included = counts(drawn)
    assert is_likely(float(((included - STEPS * q) ** 2 / (STEPS * q * (1 - q))).sum()), SIZE)  # … and of how often each was drawn
    together = sum(1 for draw in drawn if 0 in draw and 1 in draw)  # independently of each other
    assert stats.binomtest(together, STEPS, q * q).pvalue > LEVEL
    again = sum(1 for a, b in itertools.pairwise(drawn) if 7 in a and 7 in b)  # … and of the step before
    assert stats.binomtest(again, STEPS - 1, q * q).pvalue > LEVEL
    assert all(len(set(draw)) == len(draw) for draw in drawn)


def test_truncated_poisson():
    drawn = draws("truncated_poisson", max_batch_size=45)
    sizes = [len(draw) for draw in drawn]
    tail = stats.binom.sf(44, SIZE, BATCH / SIZE)
    assert max(sizes) == 45 and stats.binomtest(sizes.count(45), STEPS, tail).pvalue > LEVEL
    rate = sum(sizes) / STEPS / SIZE
    assert is_likely(float(((counts(drawn) - STEPS * rate) ** 2 / (STEPS * rate * (1 - rate))).sum()), SIZE)


def test_fixed_size():
    drawn = draws("fixed_size")
    q = BATCH / SIZE
    assert all(len(draw) == len(set(draw)) == BATCH for draw in drawn)
    spread = float(((counts(drawn) - STEPS * q) ** 2 / (STEPS * q * (1 - q))).sum()) * (SIZE - 1) / SIZE
    assert is_likely(spread, SIZE - 1)


@pytest.mark.parametrize("batch", [40, 7, 500])
def test_shuffle(batch):
    drawn = draws("shuffle", batch=batch, steps=3 * -(-SIZE // batch))
    passes = [drawn[i : i + -(-SIZE // batch)] for i in range(0, len(drawn), -(-SIZE // batch))]
    orders = [[i for draw in one for i in draw] for one in passes]
    assert all(sorted(order) == list(range(SIZE)) for order in orders)  # each record once in every pass
    assert orders[0] != orders[1] != orders[2]
    assert all(len(draw) <= batch for draw in drawn)


def test_orders_look_random():
    """Where record 0 stands, over many orders; and whether neighbours stay neighbours."""
    places, neighbours = [], 0
    for seed in range(3000):
        order = shuffled(torch.arange(50), 50, order_keys(Reproducible(seed).generator("order", 0)))
        places.append(int((order == 0).nonzero()))
        neighbours += int((order.diff() == 1).sum())
    observed = torch.bincount(torch.tensor(places), minlength=50).double()
    assert is_likely(float(((observed - 60) ** 2 / 60).sum()), 49)
    assert abs(neighbours - 3000 * 49 / 50) < stats.norm.isf(LEVEL / 2) * (3000 * 0.98) ** 0.5


@pytest.mark.parametrize(("size", "count"), [(30, 3), (30, 25), (10**9, 50)])
def test_distinct_numbers_are_equally_likely(size, count):
    generator = Reproducible(1).generator("test", 0)
    found = torch.tensor([distinct(size, count, generator) for _ in range(4000)])
    assert found.shape == (4000, count) and all(len(set(row)) == count for row in found[:50].tolist())
    bins = torch.bincount(found.flatten() * 30 // size, minlength=30).double()
    expected = 4000 * count / 30
    assert is_likely(float(((bins - expected) ** 2 / expected).sum() / (1 - count / size)), 29)


def test_large_ranges_are_not_biased():
    """torch.randint below 2³² takes 32 bits modulo n: with n = 3·2³⁰ the first third would be drawn twice as often."""
    size = 3 * 2**30
    found = torch.tensor(distinct(size, 20_000, Reproducible(2).generator("test", 0)))
    low = int((found < 2**30).sum())
    assert stats.binomtest(low, 20_000, 1 / 3).pvalue > LEVEL


@pytest.mark.parametrize(("size", "rate"), [(20, 0.1), (60_000, 256 / 60_000), (10**9, 1e-6), (100, 0.9)])
def test_batch_sizes_are_binomial(size, rate):
    generator = Reproducible(3).generator("test", 0)
    found = sorted(binomial(size, rate, generator) for _ in range(4000))
    edges = sorted(set(stats.binom.ppf([0.1, 0.3, 0.5, 0.7, 0.9], size, rate)))
    shares = [stats.binom.cdf(edge, size, rate) for edge in edges]
    for edge, share in zip(edges, shares):
        assert LEVEL / len(edges) < stats.binomtest(sum(value <= edge for value in found), 4000, share).pvalue


def test_the_global_seed_decides_nothing():
    def first():
        torch.manual_seed(0)
        return draws("poisson", Fast(), steps=1)[0]

    assert first() != first()


def test_drawing_does_not_move_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    draws("poisson", Fast(), steps=3)
    draws("shuffle", Fast(), steps=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_generators_whole_state_comes_from_the_operating_system():
    """A seed has 32 bits on a CPU: 2³² streams are few enough to try them all."""
    one, two = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**32)
    assert torch.equal(torch.rand(3, generator=one), torch.rand(3, generator=two))  # the reason
    states = [fresh_generator().get_state()[24 : 24 + 8 * 624].view(torch.int64) for _ in range(20)]
    words = torch.stack(states)
    assert len({tuple(state.tolist()) for state in states}) == 20
    assert int(words.min()) >= 0 and int(words.max()) < 2**32
    ones = sum(int(((words >> bit) & 1).sum()) for bit in range(32))
    assert stats.binomtest(ones, 20 * 624 * 32, 0.5).pvalue > LEVEL
