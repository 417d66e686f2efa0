"""Honest models that were once refused, or verified on every step: long sums, lengths that agree by chance, everyday functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import clipwise as cw
from clipwise.verify import verified_gradients
from helpers import Net

P = nn.Parameter


def train(model, losses_of, batches=(20, 20, 20, 20)):
    """Steps that must not be refused. losses_of: (model, B) → losses"""
    for batch in batches:
        with cw.capture(model) as tape:
            losses = losses_of(model, batch)
        cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()


def ce(output):
    return F.cross_entropy(output, torch.randint(0, output.shape[1], (len(output),)), reduction="none")


# --- long sums: autograd's own rounding grows with the number of terms

LONG = {
    "mean of a layer norm": (
        lambda: Net(lambda s, x: s.h(s.norm(s.i(x)).mean(1)), i=nn.Linear(8, 64), norm=nn.LayerNorm(64), h=nn.Linear(64, 3)),
        (512, 8),
        64,
    ),
    "mean of a convolution": (
        lambda: Net(lambda s, x: s.h(s.c(x).relu().mean((2, 3))), c=nn.Conv2d(3, 16, 3, padding=1), h=nn.Linear(16, 3)),
        (3, 32, 32),
        64,
    ),
    "encoder": (
        lambda: Net(
            lambda s, x: s.h(s.e(x).mean(1)), e=nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0), h=nn.Linear(32, 3)
        ),
        (128, 32),
        64,
    ),
    "positive everywhere": (
        lambda: Net(lambda s, x: s.h((s.i(x).square() + s.b).mean(1)), i=nn.Linear(8, 16), b=P(torch.ones(16)), h=nn.Linear(16, 3)),
        (1024, 8),
        32,
    ),
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_sums(name, dtype):
    build, shape, batch = LONG[name]
    for _ in range(3):
        train(build().to(dtype), lambda model, b: ce(model(torch.randn(b, *shape, dtype=dtype))), (batch, batch))


# --- lengths that agree by chance


def time_first(model, b, time=8):
    return ce(model(torch.randn(time, b, 4)))


def test_as_many_time_steps_as_examples_in_a_rerun():
    model = Net(lambda s, x: s.h(torch.tanh(s.a(x)).mean(0)), a=nn.Linear(4, 6), h=nn.Linear(6, 3))
    train(model, time_first)


@pytest.mark.parametrize("declared", [True, False])
def test_a_mask_as_long_as_a_rerun(declared):
    model = Net(
        lambda s, x, m: s.h(s.e(x, src_mask=m).mean(1)),
        e=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0),
        h=nn.Linear(8, 3),
    )
    mask = torch.triu(torch.full((8, 8), float("-inf")), 1)
    if declared:
        cw.constant(mask)
    train(model, lambda model, b: ce(model(torch.randn(b, 8, 8), mask)))


def test_a_shared_vector_as_long_as_a_rerun():
    model = Net(lambda s, x, t: s.h(torch.tanh(s.a(x + t))), a=nn.Linear(8, 6), h=nn.Linear(6, 3))
    vector = torch.randn(8)
    train(model, lambda model, b: ce(model(torch.randn(b, 8), vector)))


def test_as_many_users_as_features():
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    train(model, lambda model, users: ce(model(torch.randn(users * 4, 20))).view(users, 4).mean(1))


def test_two_towers_in_one_batch():
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))

    def losses_of(model, b):
        a, z = model(torch.randn(2 * b, 20)).chunk(2)
        return (a - z).square().sum(1)

    train(model, losses_of)


SHARED = {
    "added to the inputs": lambda model, x, t: ce(model(x + t)),
    "weights of features in the loss": lambda model, x, t: (F.linear(model(x), torch.ones(20, 3)) * t).square().sum(1),
    "prior of the logits": lambda model, x, t: ce(F.linear(model(x), torch.ones(20, 3)) + t),
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("sizes", [(19, 21, 18, 20, 20, 20, 20, 20), (20, 20, 20, 20)])
def test_shared_vectors_as_long_as_the_batch(name, sizes):
    """Known from other batch sizes; where every batch has this size, it must be said."""
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    vector = torch.randn(20)
    if len(set(sizes)) == 1:
        cw.constant(vector)
    train(model, lambda model, b: SHARED[name](model, torch.randn(b, 20), vector), sizes)


def test_images_whose_mean_has_as_many_channels_as_examples():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    mean = torch.rand(3, 1, 1)
    train(model, lambda model, b: ce(model(torch.randn(b, 3, 8, 8) - mean)), (5, 4, 6, 3, 3, 3, 3, 3))


def test_slices_of_a_data_set_inside_the_block():
    model = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 3))
    data = torch.randn(100, 20)
    train(model, lambda model, b: ce(model(data[40 : 40 + b])), (18, 19, 22, 20, 20, 20, 20, 20))


# --- functions of every day do not ask for a measurement on every step

EVERYDAY = {
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)), lambda m, x: m(x)),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)).eval(), nn.Linear(8, 3)), lambda m, x: m(x)),
    "low rank": (
        lambda: Net(lambda s, x: s.h(F.linear(x, s.w + s.b @ s.a)), w=P(torch.randn(8, 6)), a=P(torch.randn(2, 6)), b=P(torch.randn(8, 2)), h=nn.Linear(8, 3)),
        lambda m, x: m(x),
    ),
    "masks by operators": (lambda: nn.Linear(6, 3), lambda m, x: m(x * ~((x == 0) & (x > 1) | (x < -9) ^ (x > 9)))),
    "numbers on the left": (lambda: nn.Linear(6, 3), lambda m, x: m(1 - (1 / (2 ** x.abs() + 1)))),
    "log sigmoid": (lambda: nn.Linear(6, 3), lambda m, x: F.logsigmoid(m(x))),
    "fourier": (lambda: nn.Linear(4, 3), lambda m, x: m(torch.fft.rfft(x).abs())),
    "floor division": (lambda: nn.Linear(6, 3), lambda m, x: m(x // 0.5)),
    "einsum attention": (
        lambda: nn.Linear(6, 3),
        lambda m, x: m(torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", x[:, None] * torch.ones(4, 1), x[:, None] * torch.ones(4, 1)).softmax(-1), x[:, None] * torch.ones(4, 1)).mean(1)),
    ),
    "lstm": (lambda: Net(lambda s, x: s.h(s.a(x.unflatten(1, (2, 3)))[0][:, -1]), a=nn.LSTM(3, 4, batch_first=True), h=nn.Linear(4, 3)), lambda m, x: m(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_verified_on_few_steps_only(name, monkeypatch):
    verified = []
    monkeypatch.setattr("clipwise.collect.verified_gradients", lambda *a: verified.append(1) or verified_gradients(*a))
    build, forward = EVERYDAY[name]
    train(build(), lambda model, b: ce(forward(model, torch.randn(b, 6))), [20] * 10)
    assert len(verified) == 4  # steps 1, 2, 4 and 8
