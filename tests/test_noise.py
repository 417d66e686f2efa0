"""The noise: its scale, its shape, and that no number is used twice; at level 10⁻⁴ over fixed seeds where there is a seed."""

import pytest
import torch
from scipy import stats
from torch import nn

import clipwise as cw
from clipwise.noise import noised
from clipwise.randomness import Fast, Reproducible, Secure
from training_helpers import data, losses_of, small, small_plan, training

LEVEL = 1e-4
pytestmark = pytest.mark.usefixtures("fixed_entropy")
CPU = torch.device("cpu")
SOURCES = [Fast(), Secure(), Reproducible(11)]


def chi_square(values):
    """Two-sided p-value of Σ values², and of a Kolmogorov–Smirnov test, for standard normals."""
    values = values.double().flatten().numpy()
    tail = stats.chi2.sf((values**2).sum(), len(values))
    return 2 * min(tail, 1 - tail), stats.kstest(values, "norm").pvalue


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_gaussians(source):
    found = source.gaussians(200_001, "noise", 3, CPU)
    assert found.dtype == torch.float64 and len(found) == 200_001
    assert min(chi_square(found)) > LEVEL
    pairs = (found[:-1] * found[1:]).sum() / 200_000**0.5  # no number tells the next
    assert 2 * stats.norm.sf(abs(float(pairs))) > LEVEL
    halves = (found[:100_000] * found[100_001:]).sum() / 100_000**0.5
    assert 2 * stats.norm.sf(abs(float(halves))) > LEVEL


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.name)
def test_tails_are_there(source):
    """torch's float32 Gaussians end at 5.8 on a CPU. Rather than wait for one beyond, look at how the largest are spread."""
    found = source.gaussians(4_000_000, "noise", 0, CPU).abs()
    for threshold in (4.0, 4.5, 5.0):
        assert stats.binomtest(int((found > threshold).sum()), 4_000_000, 2 * stats.norm.sf(threshold)).pvalue > LEVEL


@pytest.mark.parametrize("count", [0, 1, 2, 7, 2**20, 2**20 + 1])
def test_secure_noise_of_any_length(count):
    assert Secure().gaussians(count, "noise", 0, CPU).shape == (count,)


def test_secure_noise_is_a_sum_of_four():
    """Each number has far more than 53 random bits behind it: the grid of a single Box–Muller transform is left."""
    one, other = Secure().gaussians(1000, "noise", 0, CPU), Secure().gaussians(1000, "noise", 0, CPU)
    assert not torch.equal(one, other) and len(set(one.tolist())) == 1000


def test_without_cryptography_there_is_a_message(monkeypatch):
    import builtins

    real = builtins.__import__

    def fake(name, *args, **kwargs):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ImportError, match=r"clipwise\[secure\]"):
        Secure()


def residuals(private, model, optimizer, dataset, count):
    """(released·B̄ − Σ clip)/(z·S) of every step: [step][parameter]"""
    scale = private.plan.noise_multiplier * private.plan.clipping.sensitivity
    found = []
    for (x, y), _ in zip(private.loader(dataset), range(count)):
        private.loss(losses_of(model, x, y)).backward()
        sums = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        found.append([(p.grad * private.plan.batch_size - total) / scale for p, total in zip(model.parameters(), sums)])
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("noise", ["fast", "secure", 11])
@pytest.mark.parametrize("clipping", [cw.flat(0.5), cw.per_layer(2.0), cw.per_group({"0.*": 0.3, "*": 0.4}), cw.automatic(1.5)])
def test_what_a_training_adds(noise, clipping):
    model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 3)).double()
    seeded = isinstance(noise, int)
    private, _, optimizer = training(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), small_plan(clipping=clipping), seed=noise if seeded else None,
        **({} if seeded else {"noise": noise}),
    )  # fmt: skip
    found = residuals(private, model, optimizer, data(), 5)
    for parameter in zip(*found):
        p_values = chi_square(torch.cat([part.flatten() for part in parameter]))
        assert min(p_values) > LEVEL / 4
    flat = torch.stack([torch.cat([part.flatten() for part in step]) for step in found])
    for a in range(5):  # independent from step to step
        for b in range(a):
            assert 2 * stats.norm.sf(abs(float((flat[a] * flat[b]).sum() / flat.shape[1] ** 0.5))) > LEVEL / 10
    first, second = flat[:, :1500], flat[:, 1800:2700]  # … and from parameter to parameter
    assert 2 * stats.norm.sf(abs(float((first[:, :900] * second).sum() / (5 * 900) ** 0.5))) > LEVEL


def test_restarts_do_not_repeat_the_noise():
    """Not even when the program's own seed is the same, and a checkpoint is loaded."""

    def first_release(state=None):
        torch.manual_seed(0)
        private, model, optimizer = training(small(), seed=None, own_batches=True)
        if state is not None:
            private.load_state_dict(state)
        x, y = data().tensors
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()]), private.state_dict()

    one, state = first_release()
    two, _ = first_release(state)
    three, _ = first_release(state)
    assert len({float(value) for value in torch.cat([one, two, three])}) == 3 * len(one)


def test_noise_does_not_move_the_global_generator():
    _private, _model, _optimizer = training(seed=None)
    before = torch.get_rng_state()
    noised([None], [nn.Parameter(torch.zeros(5))], deviation=1.0, divisor=1.0, randomness=Fast(), purpose="noise", step=0)
    assert torch.equal(before, torch.get_rng_state())


def test_many_parameters_and_large_ones_share_no_number(monkeypatch):
    import clipwise.noise

    monkeypatch.setattr(clipwise.noise, "_CHUNK", 50)
    parameters = [nn.Parameter(torch.zeros(n)) for n in (30, 30, 1, 200, 49, 1, 50)]
    for source in (Fast(), Reproducible(4)):
        found = noised([None] * 7, parameters, deviation=2.0, divisor=4.0, randomness=source, purpose="noise", step=0)
        assert [tuple(f.shape) for f in found] == [tuple(p.shape) for p in parameters]
        values = torch.cat([f.flatten() for f in found])
        assert len(set(values.tolist())) == len(values)
        assert min(chi_square(values * 2)) > LEVEL


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_once_to_the_parameters_type(dtype):
    parameter, total = nn.Parameter(torch.zeros(1000, dtype=dtype)), torch.linspace(-3, 3, 1000)
    [found] = noised([total], [parameter], deviation=0.5, divisor=7.0, randomness=Reproducible(1), purpose="noise", step=2)
    exact = (total.double() + 0.5 * Reproducible(1).gaussians(1000, "noise 0", 2, CPU)) / 7.0
    assert found.dtype == dtype and torch.equal(found, exact.to(dtype))


@pytest.mark.parametrize("sizes", [(8, 4, 12), (8, 3, 12)], ids=["aligned", "not aligned"])
def test_what_is_released_has_a_version_of_its_own_and_no_sum_is_touched(sizes):
    """By versions a gradient that somebody changes is told from others. A step that fails may be tried again with the same sums."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    sums = [torch.full((size,), 4.0) for size in sizes]
    found = noised(sums, parameters, deviation=1.0, divisor=2.0, randomness=Reproducible(1), purpose="noise", step=0)
    one_by_one = [
        noised([total], [parameter], deviation=0.0, divisor=2.0, randomness=Reproducible(1), purpose="noise", step=0)[0]
        for total, parameter in zip(sums, parameters)
    ]
    assert all(bool((total == 4).all()) for total in sums) and all(bool((alone == 2).all()) for alone in one_by_one)
    before = [(gradient.clone(), gradient._version) for gradient in found]
    found[1].add_(1)
    for gradient, (value, version), is_other in zip(found, before, (True, False, True)):
        assert (gradient._version == version and torch.equal(gradient, value)) == is_other
        assert not gradient._is_view()
