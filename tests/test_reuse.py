"""Weights that are used more than once: gradients add before they are measured."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import ALL_METHODS, Net, assert_exact, examples

LAYERS = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4)),
    "conv": (lambda: nn.Conv1d(4, 4, 3, padding=1), (4, 5)),
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 4, 3, padding=1), (4, 5)),
    "layer norm": (lambda: nn.LayerNorm(4), (3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("times", [2, 3])
def test_layer_used_several_times(kind, times):
    build, shape = LAYERS[kind]

    def forward(s, x):
        for _ in range(times):
            x = torch.tanh(s.a(x))
        return x

    assert_exact(Net(forward, a=build()), examples(5, *shape), methods=ALL_METHODS)


def test_layer_used_with_different_lengths():
    model = Net(lambda s, x: torch.cat([s.a(x).mean(1), s.a(x[:, :2]).tanh().flatten(1)], 1), a=nn.Linear(4, 3))
    assert_exact(model, examples(5, 6, 4), methods=ALL_METHODS)


def test_kernel_used_with_different_strides():
    model = Net(lambda s, x: torch.cat([F.conv1d(x, s.w), F.conv1d(x, s.w, stride=2)], 2).tanh(), w=nn.Parameter(torch.randn(3, 2, 2)))
    assert_exact(model, examples(5, 2, 6), methods=ALL_METHODS)


def test_kernel_used_as_convolution_and_as_matrix():
    model = Net(
        lambda s, x: F.conv1d(x, s.w).tanh().flatten(1) + F.linear(x[:, :, 0], s.w[:, :, 0]).repeat(1, 6),
        w=nn.Parameter(torch.randn(3, 2, 1)),
    )
    assert_exact(model, examples(5, 2, 6), methods=ALL_METHODS)


def tied(head):
    return Net(head, table=nn.Embedding(7, 4), mid=nn.Linear(4, 4), out=nn.Linear(4, 7, bias=False))


def test_head_tied_to_its_embedding():
    model = tied(lambda s, ids: s.out(torch.tanh(s.mid(s.table(ids)))))
    model.out.weight = model.table.weight
    assert_exact(model, torch.randint(0, 7, (5, 6)), methods=ALL_METHODS)


def test_head_tied_by_a_function_call():
    model = tied(lambda s, ids: F.linear(torch.tanh(s.mid(s.table(ids))), s.table.weight))
    assert_exact(model, torch.randint(0, 7, (5, 6)), methods=ALL_METHODS)


@pytest.mark.parametrize("way", ["keep", "tiles", "gram"])
def test_tied_head_by_every_way(way, monkeypatch):
    monkeypatch.setattr("clipwise.factors.ways.choose_way", lambda **_: way)
    model = tied(lambda s, ids: F.linear(torch.tanh(s.mid(s.table(ids))), s.table.weight))
    assert_exact(model, torch.randint(0, 7, (5, 6)))


def test_module_and_function_share_a_weight():
    model = Net(lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight, s.a.bias), a=nn.Linear(4, 4))
    assert_exact(model, examples(5, 4), methods=ALL_METHODS)


def test_sub_module_shared_by_two_branches():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = Net(lambda s, x, z: torch.cat([s.left(x), s.right(z)], 1).tanh(), left=shared, right=nn.Sequential(shared, nn.Linear(4, 2)))
    assert_exact(model, examples(5, 4), examples(5, 4), methods=ALL_METHODS)


def test_siamese_forwards_before_one_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    pair = Net(lambda s, x, z: (s.m(x) - s.m(z)).square(), m=model)
    assert_exact(pair, examples(5, 4), examples(5, 4), methods=ALL_METHODS)


def test_bias_of_one_layer_is_the_scale_of_another():
    model = Net(lambda s, x: F.linear(x * s.b, s.w, s.b).tanh(), w=nn.Parameter(torch.randn(4, 4)), b=nn.Parameter(torch.randn(4)))
    assert_exact(model, examples(5, 3, 4), methods=ALL_METHODS)


def test_cancelling_uses():
    """The same layer added and subtracted: the gradients cancel exactly, and so must the norm."""
    model = Net(lambda s, x: s.a(x) - s.a(x) + s.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    assert_exact(model, examples(5, 2, 4), methods=ALL_METHODS)
