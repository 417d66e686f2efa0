"""ε against published numbers, a certified accountant, closed forms, and itself."""

import math
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import clipwise as cw
from clipwise.accounting import epsilon, find_root, pld_epsilon, rdp_curve, rdp_epsilon
from clipwise.mechanism import RELATIONS, Mechanism, default_cap

warnings.filterwarnings("ignore", "delta .* is not below")
STEPS = 14063  # 60 epochs of 60 000 records, 256 at a time
HALF = settings(max_examples=settings.default.max_examples // 2)  # each takes seconds


def mechanism(sampler="poisson", *, size=60_000, batch=256, z=1.1, relation=None, cap=None):
    return Mechanism(sampler, size, batch, z, relation or RELATIONS[sampler][0], cap)


def plan(**changes):
    fields = dict(dataset_size=60_000, batch_size=256, epochs=60, delta=1e-5, clipping=cw.flat(1.0), noise_multiplier=1.1)
    return cw.PrivacyPlan(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "expected", "accountant"),
    [
        (dict(), 2.382, "PLD"),
        (dict(relation="replace_one"), 4.221, "PLD"),
        (dict(sampler="truncated_poisson", max_batch_size=384), 2.382, "PLD"),
        (dict(sampler="truncated_poisson"), 2.382, "PLD"),  # the default cap is free
        (dict(sampler="truncated_poisson", max_batch_size=320), 2.409, "PLD"),
        (dict(sampler="truncated_poisson", max_batch_size=288), 4.68, "PLD"),
        (dict(sampler="truncated_poisson", max_batch_size=256), 12.6, "PLD"),
        (dict(sampler="fixed_size"), 24.08, "RDP"),
        (dict(sampler="shuffle"), 54.05, "PLD"),
        (dict(accountant="rdp"), 2.5966555, "RDP"),
    ],
)
def test_each_sampler_has_its_event(changes, expected, accountant):
    budget = plan(**changes).budget()
    assert budget.epsilon == pytest.approx(expected, rel=4e-3 if expected == 12.6 else 1e-3)
    assert budget.accountant == accountant


@pytest.mark.parametrize(
    ("rate", "z", "steps", "delta", "expected"),
    [
        ((8, 100), 9.0, 2000, 1e-5, 1.5561),
        ((1, 100), 4.0, 10_000, 1e-5, 0.9470),
        ((1, 1000), 1.0, 100_000, 1e-6, 1.8620),
        ((4, 100), 1.5, 2250, 1e-5, 6.7688),
        ((128, 60_000), 0.5, 9375, 1e-5, 9.1267),
        ((128, 60_000), 6.4, 9375, 1e-5, 0.1009),
    ],
)
def test_privacy_loss_distributions(rate, z, steps, delta, expected):
    parts = [(mechanism(size=rate[1], batch=rate[0], z=z), steps)]
    on_grid = pld_epsilon(parts, delta, grid=1e-4)
    assert on_grid == pytest.approx(expected, abs=6e-5)
    found, name = epsilon(parts, delta)
    assert name == "pld" and found <= on_grid * 1.005  # never much worse than on that grid, and better where it is too coarse


@pytest.mark.parametrize(
    ("size", "batch", "z", "steps", "delta", "expected", "relative"),
    [
        (60_000, 256, 1.1, STEPS, 1e-5, 2.5966555, 1e-7),
        (60_000, 150, 1.3, 15 * 400, 1e-5, 0.7242234026109595, 1e-10),
        (100_000, 100, 1.0, 30_000, 1e-7, 1.4154988495444842, 1e-10),
        (100, 4, 1.5, 2250, 1e-5, 7.32911117143, 1e-4),  # found with other orders
    ],
)
def test_renyi(size, batch, z, steps, delta, expected, relative):
    assert rdp_epsilon([(mechanism(size=size, batch=batch, z=z), steps)], delta) == pytest.approx(expected, rel=relative)


def test_renyi_divergences_of_the_sampled_gaussian():
    import numpy as np
    from dp_accounting import rdp

    expected = {1.5: 6.70579741e-4, 2.5: 1.08548710e-3, 5: 2.18075656e-3, 50: 2.38460375e-2}
    orders, divergences = rdp_curve([(mechanism(size=100, batch=1, z=2.5), 50)])
    for order, value in expected.items():
        assert divergences[np.isclose(orders, order)][0] == pytest.approx(value, rel=1e-6)
    accountant = rdp.RdpAccountant([100])
    accountant.compose(mechanism(size=100, batch=1, z=2.5).event(50))
    assert accountant._rdp[0] == pytest.approx(167.416308, rel=1e-6)


@pytest.mark.parametrize(("epochs", "expected"), [(1, 1.03), (2, 1.11), (60, 3.01)])
def test_the_papers_conversion(epochs, expected):
    assert plan(epochs=epochs, accountant="rdp_classic").budget().epsilon == pytest.approx(expected, abs=6e-3)


def test_the_papers_conversion_on_abadi_2016():
    found, name = epsilon([(mechanism(size=100, batch=1, z=4.0), 10_000)], 1e-5, "rdp_classic")
    assert found == pytest.approx(1.2586, abs=1e-4) and name == "rdp_classic"


def exact_delta(eps, sigma):
    """Of one Gaussian mechanism (Balle & Wang 2018)."""
    first, second = norm.logcdf(0.5 / sigma - eps * sigma), eps + norm.logcdf(-0.5 / sigma - eps * sigma)
    return math.exp(first) * -math.expm1(second - first)


def test_one_gaussian():
    once = [(mechanism("shuffle", size=10, batch=10, z=1.0), 1)]
    assert epsilon(once, 1e-5)[0] == pytest.approx(4.377178, rel=1e-4)
    found = cw.PrivacyPlan.calibrate(
        epsilon=1.0, delta=1e-5, dataset_size=10, batch_size=10, steps=1, clipping=cw.flat(1.0), sampler="shuffle"
    )
    assert found.noise_multiplier == pytest.approx(3.730632, rel=1e-3)


@pytest.mark.parametrize("steps", [10**3, 10**5, 10**6])
@pytest.mark.parametrize("delta", [1e-5, 1e-8])
def test_rounding_in_the_library_never_makes_epsilon_too_small(steps, delta):
    """Full batches compose to one Gaussian, whose ε is known: what Fourier transforms lose must be covered."""
    z = math.sqrt(steps)
    found = pld_epsilon([(mechanism(size=10, batch=10, z=z), steps)], delta, grid=1e-4)
    assert exact_delta(found, z / math.sqrt(steps)) <= delta
    assert exact_delta(found * 0.95, z / math.sqrt(steps)) >= delta or not math.isfinite(found)


@pytest.mark.parametrize(
    ("q", "z", "steps", "delta"),
    [(256 / 60_000, 1.1, STEPS, 1e-5), (0.01, 4.0, 10_000, 1e-5), (0.04, 1.5, 2250, 1e-5), (0.02, 0.8, 500, 1e-6)],
)
def test_never_below_a_certified_lower_bound(q, z, steps, delta):
    dpsgd = pytest.importorskip("prv_accountant.dpsgd")
    oracle = dpsgd.DPSGDAccountant(noise_multiplier=z, sampling_probability=q, eps_error=0.01, delta_error=delta * 1e-4, max_steps=steps)
    lower, _, upper = oracle.compute_epsilon(delta=delta, num_steps=steps)
    found = epsilon([(Mechanism("poisson", 10**6, round(q * 10**6), z, "add_or_remove_one"), steps)], delta)[0]
    assert lower <= found <= upper * 1.01


def test_shuffled_batches_are_not_accounted_as_poisson():
    """Chua et al. 2024: T = 1000, σ = 0.5, one epoch: Poisson 3.24, shuffling at least 9.997."""
    poisson, shuffled = (mechanism(name, size=1000, batch=1, z=0.5) for name in ("poisson", "shuffle"))
    assert epsilon([(poisson, 1000)], 1e-5)[0] == pytest.approx(3.24, abs=0.01)
    assert epsilon([(shuffled, 1000)], 1e-5)[0] >= 9.997


def test_a_begun_pass_counts_whole():
    shuffled = plan(sampler="shuffle")
    assert shuffled.steps == 60 * 235
    assert shuffled.budget(1).epsilon == shuffled.budget(235).epsilon < shuffled.budget(236).epsilon


@HALF
@given(
    z=st.floats(0.6, 4.0), batch=st.integers(1, 200), steps=st.integers(1, 3000), delta=st.sampled_from([1e-4, 1e-5, 1e-6]),
    sampler=st.sampled_from(["poisson", "truncated_poisson", "shuffle"]),
)  # fmt: skip
def test_monotone(z, batch, steps, delta, sampler):
    def of(z=z, batch=batch, steps=steps, delta=delta):
        cap = default_cap(batch) if sampler == "truncated_poisson" else None
        return epsilon([(Mechanism(sampler, 10_000, batch, z, RELATIONS[sampler][0], cap), steps)], delta)[0]

    here, slack = of(), 1 + 1e-2  # the grid settles to half a percent
    assert of(z=1.3 * z) <= here * slack
    assert here <= of(steps=2 * steps) * slack
    assert here <= of(delta=delta / 10) * slack
    if sampler != "shuffle":
        assert here <= of(batch=2 * batch) * slack


@HALF
@given(
    target=st.floats(0.3, 10.0), batch=st.sampled_from([16, 256, 2000]), epochs=st.integers(1, 20), sampler=st.sampled_from(list(RELATIONS))
)
def test_calibrated_noise_meets_its_target(target, batch, epochs, sampler):
    found = cw.PrivacyPlan.calibrate(
        epsilon=target, delta=1e-6, dataset_size=50_000, batch_size=batch, epochs=epochs, clipping=cw.flat(1.0), sampler=sampler
    )
    assert 0.97 * target <= found.budget().epsilon <= target


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_special", "replace_one"])
def test_calibrate_under_every_relation(relation):
    found = cw.PrivacyPlan.calibrate(
        epsilon=2.0, delta=1e-6, dataset_size=50_000, batch_size=200, epochs=3, clipping=cw.flat(1.0), relation=relation
    )
    assert 1.97 <= found.budget().epsilon <= 2.0 and found.relation == relation


def test_calibrate_steps_and_batch_size():
    common = dict(epsilon=3.0, delta=1e-5, dataset_size=60_000, clipping=cw.flat(1.0), noise_multiplier=1.1)
    longest = cw.PrivacyPlan.calibrate(batch_size=256, **common)
    assert 2.99 <= longest.budget().epsilon <= 3.0 < longest.budget(int(longest.steps * 1.01)).epsilon
    largest = cw.PrivacyPlan.calibrate(epochs=10, **common)
    assert 2.98 <= largest.budget().epsilon <= 3.0
    passes = cw.PrivacyPlan.calibrate(batch_size=256, sampler="shuffle", **(common | {"noise_multiplier": 20.0}))
    assert passes.steps % 235 == 0 and passes.budget().epsilon <= 3.0 < passes.budget(passes.steps + 1).epsilon
    with pytest.raises(cw.BadPlan, match="one step alone costs"):
        cw.PrivacyPlan.calibrate(batch_size=60_000, **(common | {"noise_multiplier": 0.5}))
    with pytest.raises(cw.BadPlan, match="exactly one of"):
        cw.PrivacyPlan.calibrate(**common)


def test_huge_noise_and_hardly_any():
    assert plan(noise_multiplier=0.05, batch_size=128, epochs=20).budget().epsilon == pytest.approx(8098, rel=1e-3)
    assert plan(noise_multiplier=1e-3).budget().epsilon > 1e6
    with pytest.raises(cw.BadPlan, match="below"):
        cw.PrivacyPlan.calibrate(epsilon=1e7, delta=1e-5, dataset_size=1000, batch_size=10, epochs=1, clipping=cw.flat(1.0))


def test_composition():
    first, second = plan(epochs=2), plan(epochs=3, noise_multiplier=1.4)
    both = cw.compose([first, second])
    assert max(first.budget().epsilon, second.budget().epsilon) < both.epsilon < first.budget().epsilon + second.budget().epsilon
    assert both.steps == first.steps + second.steps
    again = cw.compose([(plan(), 100), (plan(), 200)])
    assert again.epsilon == pytest.approx(plan().budget(300).epsilon, rel=5e-3)
    mixed = cw.compose([plan(relation="replace_special"), plan(sampler="shuffle", epochs=1)])
    assert mixed.sampler == "poisson + shuffle" and mixed.relation == "replace_special"
    with pytest.raises(cw.BadPlan, match="relation"):
        cw.compose([plan(), plan(sampler="shuffle")])
    with pytest.raises(cw.BadPlan, match="no accountant covers"):
        cw.compose([plan(relation="replace_one"), plan(sampler="fixed_size")])


def test_no_step_costs_nothing():
    assert plan().budget(0).epsilon == 0.0


@given(st.floats(1e-3, 1e3), st.floats(0.1, 10.0), st.floats(0.5, 3.0))
def test_find_root(target, start, power):
    calls = []

    def function(x):
        calls.append(x)
        return x**-power

    found = find_root(function, target, start)
    assert found in calls and target * (1 - 3e-3) <= found**-power <= target


def test_millions_of_steps():
    """PLD would take minutes: RDP answers, and where there is none, a message."""
    common = dict(epsilon=0.5, delta=1e-6, dataset_size=10**6, batch_size=16, clipping=cw.flat(1.0))
    longest = cw.PrivacyPlan.calibrate(noise_multiplier=1.1, **common)
    assert longest.steps > 10**7 and 0.495 <= longest.budget().epsilon <= 0.5 and longest.budget().accountant == "RDP"
    quiet = cw.PrivacyPlan.calibrate(steps=5 * 10**6, **common)
    assert 0.495 <= quiet.budget().epsilon <= 0.5
    with pytest.raises(cw.BadPlan, match="too many for the only accountant"):
        cw.PrivacyPlan.calibrate(steps=5 * 10**6, relation="replace_one", **common)


def test_a_cap_bounds_the_batch_size_that_is_sought():
    found = cw.PrivacyPlan.calibrate(
        epsilon=8, delta=1e-5, dataset_size=60_000, max_batch_size=300, noise_multiplier=1.0, epochs=1, sampler="truncated_poisson", clipping=cw.flat(1.0)
    )  # fmt: skip
    assert found.batch_size <= found.max_batch_size == 300 and found.budget().epsilon <= 8
