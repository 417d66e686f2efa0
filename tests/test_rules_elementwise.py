"""Bare parameters that meet the examples entry by entry, against a float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, Net, assert_exact, examples

P = nn.Parameter


@given(
    axes=st.lists(st.sampled_from([1, None]), min_size=0, max_size=3),
    operation=st.sampled_from(["add", "mul", "sub", "div", "maximum", "atan2"]),
)
def test_every_broadcast(axes, operation):
    """A parameter that has some of the axes of a (B, 2, 3, 4) tensor, or length one there."""
    full = (2, 3, 4)
    shape = [size if axis is None else 1 for axis, size in zip(axes, full[3 - len(axes) :])]
    model = Net(lambda s, x: torch.tanh(getattr(torch, operation)(x, s.w)), w=P(torch.rand(shape) + 0.5))
    assert_exact(model, examples(4, *full))


USES = {
    "scale": lambda s, x: x * s.w,
    "scale from the left": lambda s, x: s.w * x,
    "one minus": lambda s, x: 1 - s.w * x,
    "minus x": lambda s, x: s.w - x,
    "reciprocal": lambda s, x: s.w / (x.abs() + 1),
    "power": lambda s, x: (x.abs() + 0.1) ** s.w,
    "power of the weight": lambda s, x: (s.w.abs() + 0.1) ** x,
    "where": lambda s, x: torch.where(x > 0, x, s.w),
    "lerp": lambda s, x: torch.lerp(x, x.square(), s.w.sigmoid()),
    "addcmul": lambda s, x: torch.addcmul(x, x, s.w, value=0.3),
    "clamp": lambda s, x: x.clamp(min=s.w),
    "in place add": lambda s, x: x.clone().add_(s.w),
    "operator +=": lambda s, x: _plus(x.clone(), s.w),
    "in place mul": lambda s, x: x.tanh().mul_(s.w),
    "masked_fill": lambda s, x: x.masked_fill(x > 0, s.w.sum()),
    "assigned": lambda s, x: _assigned(x.clone(), s.w),
    "copied": lambda s, x: x.clone().copy_(s.w) * x,
    "used twice": lambda s, x: (x * s.w) * s.w,
    "of itself": lambda s, x: x * (s.w * s.w),
    "softplus": lambda s, x: x * F.softplus(s.w),
    "a piece": lambda s, x: x[..., :2] * s.w[:2],
    "outer product": lambda s, x: x.unsqueeze(-1) * s.w,
    "regulariser": lambda s, x: torch.tanh(x + s.w).sum((1, 2)) + s.w.square().sum(),
}


def _plus(x, w):
    x += w
    return x


def _assigned(x, w):
    x[:, 0] = w
    return x


@pytest.mark.parametrize("name", USES)
def test_uses(name):
    assert_exact(Net(lambda s, x: torch.tanh(USES[name](s, x)), w=P(torch.randn(4))), examples(5, 3, 4), methods=ALL_METHODS)


def test_temperature_without_axes():
    model = Net(lambda s, x: torch.log_softmax(s.a(x) / s.t.exp(), -1), a=nn.Linear(4, 3), t=P(torch.tensor(0.3)))
    assert_exact(model, examples(5, 2, 4), methods=ALL_METHODS)


def test_temperature_keeps_the_precision_of_the_result():
    import clipwise as cw

    model = Net(lambda s, x: x.bfloat16() * s.t, t=P(torch.tensor(0.3)))
    plain = model(torch.ones(3, 2))
    with cw.capture(model):
        assert model(torch.ones(3, 2)).dtype == plain.dtype == torch.bfloat16


def tokens(forward):
    return Net(forward, cls=P(torch.randn(1, 1, 4)), pos=P(torch.randn(1, 6, 4)), a=nn.Linear(3, 4), out=nn.Linear(4, 2))


@pytest.mark.parametrize(
    "prepend",
    [
        lambda s, h: torch.cat([s.cls.expand(len(h), -1, -1), h], 1),
        lambda s, h: torch.cat([s.cls.repeat(len(h), 1, 1), h], dim=1),
        lambda s, h: torch.cat((s.cls.expand_as(h[:, :1]), h), 1),
        lambda s, h: torch.cat([s.cls + h[:, :1] * 0, h], 1),
        lambda s, h: torch.cat(tensors=[s.cls.expand(len(h), 1, 4), h], dim=1),
    ],
)
def test_class_token_and_positions(prepend):
    model = tokens(lambda s, x: s.out(torch.tanh(prepend(s, s.a(x)) + s.pos).mean(1)))
    assert_exact(model, examples(5, 5, 3), methods=ALL_METHODS)


def test_learned_query():
    def forward(s, x):
        keys = s.a(x)
        scores = torch.softmax((s.q * keys).sum(-1), 1)
        return (scores.unsqueeze(-1) * keys).sum(1)

    assert_exact(Net(forward, q=P(torch.randn(4)), a=nn.Linear(3, 4)), examples(5, 6, 3))


def test_learned_queries_through_attention():
    def forward(s, x):
        queries = s.q.expand(len(x), -1, -1)
        return F.scaled_dot_product_attention(s.wq(queries + x.mean(1, keepdim=True)), s.wk(x), x)

    model = Net(forward, q=P(torch.randn(1, 2, 3)), wq=nn.Linear(3, 3), wk=nn.Linear(3, 3))
    assert_exact(model, examples(4, 5, 3))


@pytest.mark.parametrize("channels", [1, 3])
def test_prelu(channels):
    assert_exact(nn.Sequential(nn.Conv2d(2, 3, 2), nn.PReLU(channels)), examples(4, 2, 4, 4))


def test_broadcast_tensors():
    def forward(s, x):
        a, b = torch.broadcast_tensors(x, s.w)
        return torch.tanh(a * b)

    assert_exact(Net(forward, w=P(torch.randn(3, 1))), examples(4, 3, 2))


def test_comparison_with_a_weight_carries_no_gradient():
    assert_exact(Net(lambda s, x: torch.where(x > s.w, x, 2 * x) * s.v, w=P(torch.randn(3)), v=P(torch.randn(3))), examples(4, 3))


def test_stack_and_hstack():
    model = Net(lambda s, x: torch.tanh(torch.stack([x, s.w.expand_as(x)], 1)), w=P(torch.randn(3)))
    assert_exact(model, examples(4, 3))
    model = Net(lambda s, x: torch.tanh(torch.hstack([x, s.w.expand(len(x), -1)])), w=P(torch.randn(3)))
    assert_exact(model, examples(4, 3))


# --- distances to learned prototypes, and losses against learned targets

DISTANCES = {
    "cdist": lambda s, x: torch.cdist(x, s.w),
    "cdist, p=1": lambda s, x: torch.cdist(x, s.w, p=1.0),
    "cdist of sequences": lambda s, x: torch.cdist(x.unflatten(1, (2, 2)), s.w[:, :2]),
    "cdist, weight first": lambda s, x: torch.cdist(s.w, x).t(),
    "pairwise distance": lambda s, x: F.pairwise_distance(x, s.w[:1]).unsqueeze(1),
    "cosine similarity": lambda s, x: F.cosine_similarity(x.unsqueeze(1), s.w, dim=-1),
    "cosine similarity, axis 1": lambda s, x: F.cosine_similarity(x, s.w[:1]).unsqueeze(1),
    "mse loss": lambda s, x: F.mse_loss(x, s.w[0].expand_as(x), reduction="none"),
    "l1 loss": lambda s, x: F.l1_loss(x, s.w[0].expand_as(x), reduction="none"),
    "smooth l1 loss": lambda s, x: F.smooth_l1_loss(x, s.w[0].expand_as(x), reduction="none", beta=0.5),
    "huber loss": lambda s, x: F.huber_loss(x, s.w[0].expand_as(x), reduction="none", delta=0.5),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances(name):
    model = Net(lambda s, x: DISTANCES[name](s, x), w=P(torch.randn(3, 4)))
    x = examples(5, 4)
    assert_exact(model, x, methods=ALL_METHODS)
    with cw.capture(model):
        watched = model(x.float())
    torch.testing.assert_close(watched, model(x.float()), rtol=1e-5, atol=1e-5)
