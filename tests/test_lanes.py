"""Calls that take the short cut leave what the long way leaves: the same trail, marks and refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import lanes, watch
from clipwise.errors import MixedExamples, StateWrite
from helpers import Net, assert_exact, examples

WAYS = {
    "activation": lambda s, h: torch.tanh(F.relu(h)),
    "in place": lambda s, h: F.relu((h * 1.5).add_(h).mul_(2.0), inplace=True) + h,
    "sum of two": lambda s, h: h + torch.sigmoid(h) - h.square(),
    "numbers": lambda s, h: torch.clamp(h, -0.5, 0.5) * 3 + h.mean(-1, keepdim=True) + F.softmax(h, dim=-1),
    "numbers first": lambda s, h: torch.pow(2, h) + torch.rsub(h, 1) + 1 / (1 + h.square()),
    "broadcast by a third": lambda s, h: (
        torch.clamp(h, None, h.amax(-1, keepdim=True)) + torch.where(s.mask, 0.0, h.mean(-1, keepdim=True))
    ),
    "broadcast by name": lambda s, h: torch.clamp(h, max=h.mean(-1, keepdim=True)),
    "broadcast": lambda s, h: h * h.mean(-1, keepdim=True) + h.sum(-2, keepdim=True),
    "reshaped": lambda s, h: h.reshape(-1, 4).view(h.shape).transpose(1, 2).flatten(1).unflatten(1, (4, 3)).transpose(1, 2),
    "sizes together": lambda s, h: h.view((len(h), -1)).reshape([len(h), 3, 4]).view(h.shape).view((-1, 3, 4)).contiguous(),
    "attention": lambda s, h: F.scaled_dot_product_attention(h, 2 * h, h.tanh(), dropout_p=0.0) + F.scaled_dot_product_attention(h, h, h),
    "statistics of the model": lambda s, h: s.norm(h.transpose(1, 2)).transpose(1, 2),
    "a constant of the model": lambda s, h: h * s.scale + torch.where(s.mask, h, -h),
    "detached": lambda s, h: h * (h.detach() > 0) + h.detach().sum(-1, keepdim=True),
    "several results": lambda s, h: torch.cat([part.relu() for part in h.chunk(2, -1)], -1) + h.max(-1, keepdim=True)[0],
}


def model_of(way):
    norm = nn.BatchNorm1d(4).eval().requires_grad_(False)
    norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    model = Net(lambda s, x: s.b(WAYS[way](s, s.a(x))), a=nn.Linear(5, 4), b=nn.Linear(4, 2), norm=norm)
    model.register_buffer("scale", torch.rand(4) + 0.5)
    model.register_buffer("mask", torch.rand(3, 4) > 0.5)
    return model.double()


@pytest.mark.parametrize("way", WAYS)
def test_the_short_cut_leaves_what_the_long_way_leaves(way, monkeypatch):
    model, x = model_of(way), examples(6, 3, 5)
    found, taken = [], []
    monkeypatch.setattr(watch, "passed", lambda *call: _counted(taken, lanes.passed(*call)))
    for is_open in (True, False):
        monkeypatch.setattr(watch, "lane_of", lanes.lane_of if is_open else lambda *_: lanes.NONE)
        with cw.capture(model) as tape:
            losses = model(x).square().sum((1, 2))
        found.append((tape.trail, list(tape.created), tape.moves, cw.per_example_norms(tape, losses)))
    (trail, created, moves, norms), (*expected, expected_norms) = found
    assert [trail, created, moves] == expected and torch.equal(norms, expected_norms) and taken
    monkeypatch.setattr(watch, "lane_of", lanes.lane_of)
    assert_exact(model, x)


def _counted(taken, result):
    if result is not lanes.MISSED:
        taken.append(1)
    return result


def test_numbers_of_a_call_are_told_apart():
    """The axis is part of the path by which a tap is known."""
    model = Net(lambda s, x: s.b(s.a(x).softmax(s.axis)), a=nn.Linear(5, 4), b=nn.Linear(4, 2)).double()
    trails = []
    for model.axis in (-1, -2, 1, -1):
        with cw.capture(model) as tape:
            model(examples(6, 3, 5))
        trails.append(tape.trail)
    assert len(set(trails)) == 3 and trails[0] == trails[-1]


def test_what_is_refused_on_the_long_way_is_refused():
    x = examples(6, 4)
    training = Net(lambda s, x: s.b(s.norm(s.a(x))), a=nn.Linear(4, 4), norm=nn.BatchNorm1d(4, affine=False), b=nn.Linear(4, 2)).double()
    with pytest.raises(MixedExamples), cw.capture(training):
        training(x)
    keeps = Net(lambda s, x: s.kept.add_(s.a(x).mean(0)), a=nn.Linear(4, 4)).double()
    keeps.register_buffer("kept", torch.zeros(4).double())
    with pytest.raises(StateWrite), cw.capture(keeps):
        keeps(x)


def test_a_tensor_that_took_the_memory_of_a_buffer_takes_no_short_cut():
    def forward(s, x):
        h = s.a(x)
        alias = h * 1.0
        alias.data = s.kept
        return alias.add_(h)

    model = Net(forward, a=nn.Linear(4, 4)).double()
    model.register_buffer("kept", torch.zeros(6, 4).double())
    with pytest.raises(StateWrite), cw.capture(model):
        model(examples(6, 4))
    assert not model.kept.any()


def test_a_weight_never_takes_the_short_cut(monkeypatch):
    taken = []

    def passed(*call):
        result = lanes.passed(*call)
        if result is not lanes.MISSED:
            taken.extend(value for value in call[-2] if isinstance(value, nn.Parameter))
        return result

    monkeypatch.setattr(watch, "passed", passed)
    model = Net(lambda s, x: s.b(torch.tanh(s.a(x)) * s.scale + s.shift), a=nn.Linear(5, 4), b=nn.Linear(4, 2),
                scale=nn.Parameter(torch.rand(4)), shift=nn.Parameter(torch.rand(4)))  # fmt: skip
    assert_exact(model, examples(6, 3, 5))
    assert not taken
