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
    "stack of weights, examples between": (lambda s, x: torch.matmul(x.transpose(0, 1), s.w).transpose(0, 1), (2, 4, 3), (2, 4)),
    "stack of weights, one axis broadcast": (lambda s, x: torch.matmul(x, s.w), (2, 1, 4, 3), (2, 3, 5, 4)),
    "stack of weights, input broadcast": (lambda s, x: torch.matmul(x.unsqueeze(1), s.w), (2, 4, 3), (5, 4)),
    "stack of weights for all": (lambda s, x: torch.matmul(x, s.w).transpose(0, 1), (2, 4, 3), (4,)),
    "stack of weights, left, time first": (lambda s, x: torch.matmul(s.w, x.permute(1, 2, 0)).permute(2, 0, 1), (2, 3, 4), (2, 4)),
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


def test_einsum_with_a_weight_as_long_as_the_batch():
    """Positions expanded over the batch and projected, as XLNet has it: a derived weight with a part for each example."""

    def forward(s, x):
        positions = torch.linspace(-1, 1, 12, dtype=x.dtype).view(3, 1, 4).expand(-1, len(x), -1)
        keys = torch.einsum("jbh,hd->jbd", positions, s.w)
        return torch.einsum("bid,jbd->bij", x, keys)

    assert_exact(Net(forward, w=W(torch.randn(4, 5))), examples(6, 2, 5), methods=ALL_METHODS)


def test_einsum_diagonal_of_a_weight_is_refused():
    import clipwise as cw

    model = Net(lambda s, x: torch.einsum("bi,ii->b", x, s.w), w=W(torch.randn(3, 3)))
    with pytest.raises(cw.UncoveredUse, match="diagonal"), cw.capture(model):
        model(torch.randn(4, 3))


dtypes = st.sampled_from([torch.float64, torch.float32])
# softplus below, not tanh: where tanh is flat, 1 - tanh² cancels in float32, in PyTorch as here


@given(middle=st.lists(sizes, max_size=2), width=sizes, height=sizes, left=st.booleans(), transposed=st.booleans(), dtype=dtypes)
def test_matmul_of_any_rank(middle, width, height, left, transposed, dtype):
    """x @ w, w @ x, and the same with the weight's transpose."""
    shape = (height, width) if left != transposed else (width, height)

    def forward(s, x):
        w = s.w.mT if transposed else s.w
        return F.softplus(w @ x.mT if left else x @ w)

    assert_exact(Net(forward, w=W(torch.randn(shape))), examples(5, *middle, 2, width), dtype=dtype)


@given(time=sizes, width=sizes, height=sizes, stack=st.booleans(), dtype=dtypes)
def test_bmm_of_any_size(time, width, height, stack, dtype):
    """A weight an example would be no weight; a weight a head, batched behind the example axis, is one."""
    if stack:
        model = Net(lambda s, x: F.softplus(torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1)), w=W(torch.randn(time, width, height)))
    else:
        model = Net(lambda s, x: F.softplus(torch.bmm(x, s.w.expand(len(x), -1, -1))), w=W(torch.randn(1, width, height)))
    assert_exact(model, examples(4, time, width), dtype=dtype)


def experts(weight_left):
    """Tokens go to slots of the expert that their first entry chooses: rows (expert, slot), of any example."""

    def forward(s, x):
        tokens = x.flatten(0, 1)
        expert = (tokens[:, 0] > 0).long()
        slot = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
        slots = tokens.new_zeros(2, len(tokens), tokens.shape[1]).index_put((expert, slot), tokens)
        done = torch.bmm(s.w, slots.mT).mT if weight_left else torch.bmm(slots, s.w)
        return F.softplus(done[expert, slot]).view(len(x), -1)

    return forward


@pytest.mark.parametrize("weight_left", [True, False])
def test_slots_of_experts(weight_left):
    model = Net(experts(weight_left), w=W(torch.randn((2, 3, 4) if weight_left else (2, 4, 3))))
    assert_exact(model, examples(5, 6, 4), methods=ALL_METHODS)


@given(
    width=sizes, height=sizes, alpha=st.floats(-2, 2), beta=st.floats(-2, 2), dtype=dtypes, bias=st.sampled_from(["row", "scalar", "data"])
)
def test_addmm_of_any_size(width, height, alpha, beta, dtype, bias):
    shift = {"row": lambda s, x: s.b, "scalar": lambda s, x: s.b[:1], "data": lambda s, x: x[:, :1]}[bias]
    model = Net(
        lambda s, x: F.softplus(torch.addmm(shift(s, x), x, s.w, alpha=alpha, beta=beta)) + s.b,
        w=W(torch.randn(width, height)),
        b=W(torch.randn(height)),
    )
    assert_exact(model, examples(5, width), dtype=dtype)


@st.composite
def equations(draw):
    """An einsum of a batch with a weight: letters of the input, the weight, both (summed or kept) in any order."""
    letters = draw(st.permutations("ijkl"))[: draw(st.integers(1, 4))]
    kinds = {letter: draw(st.sampled_from(["input", "weight", "summed", "kept"])) for letter in letters}
    order = lambda text: "".join(draw(st.permutations(text)))
    x = order([a for a in letters if kinds[a] != "weight"])
    w = order([a for a in letters if kinds[a] != "input"])
    output = order(["b", *(a for a in letters if kinds[a] != "summed")])
    place = draw(st.integers(0, len(x)))
    return x[:place] + "b" + x[place:], w, output, {letter: draw(st.integers(1, 3)) for letter in letters}


@given(equation=equations(), dtype=dtypes, weight_first=st.booleans())
def test_einsum_of_any_letters(equation, dtype, weight_first):
    left, right, output, size = equation
    plan = f"{right},{left}->{output}" if weight_first else f"{left},{right}->{output}"
    axis, batch = left.index("b"), output.index("b")

    def forward(s, x):
        pair = (s.w, x.movedim(0, axis)) if weight_first else (x.movedim(0, axis), s.w)
        return F.softplus(torch.einsum(plan, *pair)).movedim(batch, 0)

    model = Net(forward, w=W(torch.randn([size[letter] for letter in right])))
    assert_exact(model, examples(5, *[size[letter] for letter in left.replace("b", "")]), dtype=dtype)


@given(left=sizes, right=sizes, out=sizes, middle=st.lists(sizes, max_size=1))
def test_bilinear(left, right, out, middle):
    model = Net(lambda s, x, z: s.a(x, z), a=nn.Bilinear(left, right, out))
    assert_exact(model, examples(4, *middle, left), examples(4, *middle, right))
