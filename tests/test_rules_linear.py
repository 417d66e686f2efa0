"""Matrix products with a weight, against a float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers import ALL_METHODS, Net, assert_exact, examples

sizes = st.integers(1, 5)


@given(
    middle=st.lists(sizes, max_size=3), width=sizes, height=sizes, bias=st.booleans(), dtype=st.sampled_from([torch.float64, torch.float32])
)
def test_linear_of_any_rank(middle, width, height, bias, dtype):
    model = Net(lambda s, x: torch.tanh(s.a(x)), a=nn.Linear(width, height, bias=bias))
    assert_exact(model, examples(5, *middle, width), dtype=dtype)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_agrees_on_a_small_network(method):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    assert_exact(model, examples(6, 4, 5), methods=[method])


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_partly_frozen_linear(frozen):
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    getattr(model[0], frozen).requires_grad_(False)
    assert_exact(model, examples(5, 3, 4))


W = nn.Parameter

PRODUCTS = {
    "x @ w": (lambda s, x: x @ s.w, (4, 3), (2, 4)),
    "x @ w.T": (lambda s, x: x @ s.w.T, (3, 4), (2, 4)),
    "x @ w.mT, 2d": (lambda s, x: torch.matmul(x, s.w.mT), (3, 4), (4,)),
    "mm": (lambda s, x: torch.mm(x, s.w), (4, 3), (4,)),
    "mm, weight left": (lambda s, x: torch.mm(s.w, x.t()).t(), (3, 4), (4,)),
    "matmul, weight left": (lambda s, x: torch.matmul(s.w, x), (3, 4), (4, 2)),
    "matmul, weight left, 4d": (lambda s, x: torch.matmul(s.w, x), (3, 4), (2, 4, 2)),
    "matmul, vector right": (lambda s, x: torch.matmul(x, s.w), (4,), (3, 4)),
    "matmul, vector left": (lambda s, x: torch.matmul(s.w, x), (4,), (4, 2)),
    "mv": (lambda s, x: torch.mv(x, s.w), (4,), (4,)),
    "stack of weights": (lambda s, x: torch.matmul(x, s.w), (2, 4, 3), (2, 5, 4)),
    "stack of weights, left": (lambda s, x: torch.matmul(s.w, x), (2, 3, 4), (2, 4, 5)),
    "bmm with an expanded weight": (lambda s, x: torch.bmm(x, s.w.expand(len(x), -1, -1)), (1, 4, 3), (5, 4)),
    "baddbmm": (lambda s, x: torch.baddbmm(s.w[:, :1].expand(len(x), -1, -1), x, s.w.expand(len(x), -1, -1)), (1, 4, 3), (5, 4)),
    "addmm, bias": (lambda s, x: torch.addmm(s.w[0], x, s.w, beta=0.5, alpha=2.0), (4, 3), (4,)),
    "addmm, weight left": (lambda s, x: torch.addmm(s.w[:, :1], s.w, x.t()).t(), (3, 4), (4,)),
    "addmv": (lambda s, x: torch.addmv(x[:, 0], x, s.w), (4,), (4,)),
    "inner": (lambda s, x: torch.inner(x, s.w), (3, 4), (2, 4)),
    "tensordot": (lambda s, x: torch.tensordot(x, s.w, dims=([2, 1], [1, 0])), (2, 4, 3), (2, 4)),
    "tensordot, integer": (lambda s, x: torch.tensordot(x, s.w, dims=1), (4, 3, 2), (2, 4)),
    "outer": (lambda s, x: torch.outer(x[:, 0], s.w), (3,), (2,)),
    "linear with a vector": (lambda s, x: F.linear(x, s.w), (4,), (3, 4)),
    "dot of one example at a time": (lambda s, x: torch.stack([torch.dot(row, s.w) for row in x]), (4,), (4,)),
    "matmul of one example at a time": (lambda s, x: torch.stack([s.w @ row for row in x]), (3, 4), (4,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    forward, weight, shape = PRODUCTS[name]
    assert_exact(Net(lambda s, x: torch.tanh(forward(s, x)), w=W(torch.randn(weight))), examples(5, *shape), methods=ALL_METHODS)


EQUATIONS = [
    ("bi,oi->bo", (4,), (3, 4)),
    ("bti,io->bto", (2, 4), (4, 3)),
    ("bti,ihd->bthd", (2, 4), (4, 2, 3)),
    ("bthd,hdo->bto", (3, 2, 4), (2, 4, 5)),
    ("beci,eio->beco", (2, 3, 4), (2, 4, 3)),
    ("...i,oi->...o", (2, 4), (3, 4)),
    ("b...,oi...->boi", (2,), (3, 4, 2)),
    ("bi,oi", (4,), (3, 4)),
    ("bij,ji->b", (3, 4), (4, 3)),
    ("bij,kj->bki", (3, 4), (2, 4)),
    ("b,o->bo", (), (3,)),
]


@pytest.mark.parametrize(("equation", "shape", "weight"), EQUATIONS)
def test_einsum(equation, shape, weight):
    model = Net(lambda s, x: torch.tanh(torch.einsum(equation, x, s.w)), w=W(torch.randn(weight)))
    assert_exact(model, examples(5, *shape))


def test_einsum_with_two_weights_and_two_inputs():
    model = Net(lambda s, x: torch.einsum("bi,ir,ro,bo->bo", x, s.a, s.b, x[:, :3]), a=W(torch.randn(4, 2)), b=W(torch.randn(2, 3)))
    assert_exact(model, examples(5, 4), methods=ALL_METHODS)


def test_einsum_diagonal_of_a_weight_is_refused():
    import clipwise as cw

    model = Net(lambda s, x: torch.einsum("bi,ii->b", x, s.w), w=W(torch.randn(3, 3)))
    with pytest.raises(cw.UncoveredUse, match="diagonal"), cw.capture(model):
        model(torch.randn(4, 3))


@given(left=sizes, right=sizes, out=sizes, middle=st.lists(sizes, max_size=1))
def test_bilinear(left, right, out, middle):
    model = Net(lambda s, x, z: s.a(x, z), a=nn.Bilinear(left, right, out))
    assert_exact(model, examples(4, *middle, left), examples(4, *middle, right))
