"""An example whose gradient is not finite contributes exactly zero, is counted, and touches nobody else. So does no example at all."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import clipwise as cw
from clipwise.methods.nxbp import _RunningSum
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import ALL_METHODS, Net, examples

NETWORKS = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "sequence": (
        lambda: Net(lambda s, x: s.n(s.a(x) * s.w).mean(1), a=nn.Linear(4, 3), w=nn.Parameter(torch.randn(3)), n=nn.LayerNorm(3)),
        (6, 4),
    ),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(4, 3, 2), nn.GroupNorm(1, 3), nn.Flatten()), (4, 5)),
    "derived": (lambda: Net(lambda s, x: F.linear(x, F.normalize(s.w, dim=1)), w=nn.Parameter(torch.randn(3, 4))), (4,)),
    "checkpointed": (
        lambda: Net(lambda s, x: s.b(checkpoint(lambda h: s.a(h).tanh(), x, use_reentrant=False)), a=nn.Linear(4, 3), b=nn.Linear(3, 2)),
        (4,),
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_examples_contribute_nothing_and_touch_nobody(network, method, value):
    build, shape = NETWORKS[network]
    model, x = build().double(), examples(6, *shape)
    good = [0, 1, 3, 4]
    expected, norms = clip_and_add(loop_gradients(model, (x[good],)), 0.5)
    x[2], x[5] = value, value
    for _ in range(2):  # when it is new, and when it is known
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found_norms = cw.per_example_norms(tape, losses)
        loss = cw.clipped_loss(tape, losses, cw.flat(0.5), method=method)
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])
        torch.testing.assert_close(found_norms[good], norms)
        assert tape.nonfinite.tolist() == [False, False, True, False, False, True]
        assert loss.isfinite()


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_gradient_that_explodes_behind_a_finite_loss(method):
    """√x at zero: the loss is fine, its gradient is not."""
    model = Net(lambda s, x: s.a(x).abs().sqrt(), a=nn.Linear(4, 3)).double()
    x = examples(5, 4)
    with torch.no_grad():
        model.a.bias.zero_()
    x[1] = 0
    good = [0, 2, 3, 4]
    expected, _ = clip_and_add(loop_gradients(model, (x[good],), loss=lambda out: out.sum(1)), 0.5)
    with cw.capture(model) as tape:
        losses = model(x).sum(1)
    found = cw.clipped_gradients(tape, losses, cw.flat(0.5), method=method)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_all_examples_bad(method):
    model = nn.Linear(4, 3)
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.full((5, 4), float("nan"))))
    found = cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method)
    assert all(not grad.any() for grad in found.values()) and set(found) == {"weight", "bias"}


def test_a_huge_but_finite_gradient_is_clipped_not_dropped():
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    x[1] *= 1e25
    reference = loop_gradients(model, (x,), loss=lambda out: out.sum(1))
    expected, _ = clip_and_add(reference, 1.0)
    for method in ALL_METHODS:
        with cw.capture(model) as tape:
            losses = model(x).sum(1)
        found = cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method)
        assert not tape.nonfinite.any()
        torch.testing.assert_close(found["weight"].double(), expected["weight"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("known", [True, False])
def test_an_empty_batch_gives_zeros(network, method, known):
    build, shape = NETWORKS[network]
    model = build().double()
    for batch in [4, 0] if known else [0]:
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(batch, *shape)))
        model.zero_grad()
        cw.clipped_loss(tape, losses, cw.flat(1.0), method=method).backward()
    for parameter in model.parameters():
        assert parameter.grad.shape == parameter.shape and not parameter.grad.any()


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_batch_of_one(network, method):
    build, shape = NETWORKS[network]
    model, x = build().double(), examples(1, *shape)
    expected, norms = clip_and_add(loop_gradients(model, (x,)), 0.05)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
    found = cw.clipped_gradients(tape, losses, cw.flat(0.05), method=method)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_row_that_is_nobodys():
    """Its gradient is NaN throughout, so that nobody can be found who owns it; nothing of it gets into the sum."""

    class Permuted(nn.Module):
        def __init__(self, batch):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(batch, 64) + 0.5)

        def forward(self, x, order):
            return torch.sqrt(x[order] * self.weight).sum(1)

    torch.manual_seed(0)
    order = torch.randperm(16)
    model, x = Permuted(16), torch.rand(16, 64) + 0.5
    x[2] = 0
    with cw.capture(model) as tape:
        losses = model(x, order)[order.argsort()]
    assert losses.isfinite().all()
    assert cw.clipped_gradients(tape, losses, cw.flat(1.0))["weight"].isfinite().all()


@pytest.mark.parametrize("method", ALL_METHODS)
def test_an_infinite_loss_with_a_finite_gradient(method):
    """It contributes nothing, by every method, and the scalar's value stays finite."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    offset = torch.tensor([0.0, torch.inf, 0.0, 0.0])

    def clipped(rows):
        with cw.capture(model) as tape:
            losses = model(x[rows])[:, 0] + offset[rows]
        return tape, cw.clipped_loss(tape, losses, cw.flat(0.1), method=method)

    tape, loss = clipped([0, 1, 2, 3])
    assert tape.nonfinite.tolist() == [False, True, False, False] and loss.isfinite()
    loss.backward()
    found = model.weight.grad.clone()
    model.zero_grad()
    clipped([0, 2, 3])[1].backward()
    torch.testing.assert_close(found, model.weight.grad)


def test_one_at_a_time_rounds_no_weight_up():
    """The first parameter's precision is not the others'."""
    running = _RunningSum(cw.flat(6.6e-4), ["a", "b"])
    running.add([torch.zeros(1, dtype=torch.float64), torch.full((10**6,), 3e38)], torch.zeros(1))
    assert float(running.sums["b"].double().norm()) <= 6.6e-4
