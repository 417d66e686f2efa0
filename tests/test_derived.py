"""Weights made from other weights: transposes, slices, chunks, casts, normalised and low-rank weights."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import clipwise as cw
from clipwise.testing import squared_output
from helpers import ALL_METHODS, Net, assert_exact, examples, row_norms

P = nn.Parameter


def two_halves(s, x):
    a, b = s.w.chunk(2)
    return torch.tanh(F.linear(x, a)) * F.linear(x, b)


USES = {
    "transposed": lambda s, x: x @ s.w.t(),
    "twice transposed": lambda s, x: F.linear(x, s.w.t().t()),
    "permuted": lambda s, x: x @ s.w.permute(1, 0),
    "reshaped": lambda s, x: F.linear(x, s.w.view(-1).view(6, 4)),
    "unsqueezed": lambda s, x: F.conv1d(x.unsqueeze(-1), s.w.unsqueeze(-1)).squeeze(-1),
    "rows": lambda s, x: F.linear(x, s.w[1:4]),
    "columns": lambda s, x: F.linear(x[:, :2], s.w[:, :2]),
    "columns with a step": lambda s, x: F.linear(x[:, :2], s.w[:, ::2]),
    "a row as a vector": lambda s, x: x * s.w[2],
    "chunks": two_halves,
    "overlapping rows": lambda s, x: F.linear(x, s.w[:4]) + F.linear(x, s.w[2:]),
    "the same rows twice": lambda s, x: F.linear(torch.tanh(F.linear(x, s.w[:4])), s.w[:4]),
    "a part and the whole": lambda s, x: torch.cat([F.linear(x, s.w), F.linear(x, s.w[:2])], 1),
    "disjoint columns": lambda s, x: F.linear(x[:, :2], s.w[:, :2]) * F.linear(x[:, 2:], s.w[:, 2:]),
    "cast and back": lambda s, x: F.linear(x, s.w.to(torch.float64)),
    "cloned": lambda s, x: F.linear(x, s.w.clone()),
    "made contiguous": lambda s, x: x @ s.w.t().contiguous(),
    "rows of a copy": lambda s, x: F.linear(x, s.w.clone()[1:4]),
    "split": lambda s, x: sum(F.linear(x, part).sum(1, keepdim=True).tanh() for part in s.w.split([1, 2, 3])),
    "unbind": lambda s, x: torch.stack([(x * row).sum(1) for row in s.w.unbind()], 1),
    "scaled": lambda s, x: F.linear(x, s.w * 0.5),
    "normalised": lambda s, x: F.linear(F.normalize(x, dim=1), F.normalize(s.w, dim=1)),
    "masked": lambda s, x: F.linear(x, s.w * (torch.arange(4) > 1)),
    "softmaxed": lambda s, x: F.linear(x, s.w.softmax(1)),
    "expanded": lambda s, x: F.linear(x, s.w[:1].expand(5, -1)),
    "repeated": lambda s, x: F.linear(x, s.w.repeat(2, 1)),
    "plus low rank": lambda s, x: F.linear(x, s.w + s.w[:, :2] @ s.w[:2]),
    "direct and scaled": lambda s, x: F.linear(x, s.w) + F.linear(x, 2 * s.w).tanh(),
    "written into zeros": lambda s, x: F.linear(x, _written(s.w)),
    "as bias": lambda s, x: F.linear(x, s.w, s.w.sum(1)),
    "sum of a table": lambda s, x: x * s.w.sum(0),
}


def _written(w):
    out = torch.zeros(3, 4, dtype=w.dtype)
    out[1] = w[0] * 2
    out[2] += w[1]
    return out


@pytest.mark.parametrize("name", USES)
def test_derived_weights(name):
    assert_exact(Net(lambda s, x: torch.tanh(USES[name](s, x)), w=P(torch.randn(6, 4))), examples(5, 4), methods=ALL_METHODS)


STEPS = {  # a (4, 4) weight becomes another one
    "transposed": lambda w: w.t(),
    "reshaped": lambda w: w.reshape(2, 8).reshape(4, 4),
    "cast": lambda w: w.to(torch.float64).to(w.dtype),
    "halves joined again": lambda w: torch.cat(w.chunk(2)[::-1]),
    "rolled": lambda w: w.roll(1, 0),
    "scaled": lambda w: w * 0.5,
    "shifted by itself": lambda w: w + w[:1],
    "rows normalised": lambda w: F.normalize(w, dim=1),
    "times itself": lambda w: w @ w,
    "lower triangle": lambda w: w.tril(),
    "contiguous": lambda w: w.contiguous(),
    "flipped": lambda w: w.flip(0),
    "masked": lambda w: w.masked_fill(torch.eye(4, dtype=torch.bool), 0.0),
}


@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    also_bare=st.booleans(),
    middle=st.lists(st.integers(1, 3), max_size=1),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_chains_of_derived_weights(steps, also_bare, middle, dtype):
    def forward(s, x):
        w = s.w
        for step in steps:
            w = STEPS[step](w)
        return torch.tanh(F.linear(x, w) + (F.linear(x, s.w) if also_bare else 0.0))

    assert_exact(Net(forward, w=P(torch.randn(4, 4))), examples(5, *middle, 4), dtype=dtype)


def test_low_rank_update():
    model = Net(
        lambda s, x: torch.tanh(F.linear(x, s.w + s.b @ s.a)), w=P(torch.randn(4, 3)), a=P(torch.randn(2, 3)), b=P(torch.randn(4, 2))
    )
    assert_exact(model, examples(5, 6, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("layer", [nn.Linear(4, 3), nn.Conv1d(2, 3, 2)])
def test_weight_norm(layer):
    shape = (4,) if isinstance(layer, nn.Linear) else (2, 5)
    assert_exact(Net(lambda s, x: torch.tanh(s.a(x)), a=parametrizations.weight_norm(layer)), examples(5, *shape), methods=ALL_METHODS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_way_back_that_rounds_more_than_sums_do(dtype):
    """The gradient of torch.matrix_exp is less exact the larger its matrix: an orthogonal layer was refused once it was trained."""
    layer = parametrizations.orthogonal(nn.Linear(64, 64))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    assert_exact(
        Net(lambda s, x: torch.tanh(s.a(x)), a=layer), examples(5, 64), dtype=dtype, tolerance=1e-4 if dtype == torch.float32 else 1e-9
    )


class SquaredOnTheWayBack(torch.autograd.Function):
    """No linear map."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.abs()

    @staticmethod
    def vmap(info, in_dims, weight):
        return SquaredOnTheWayBack.apply(weight), in_dims[0]


def test_a_way_back_that_is_not_linear_is_refused():
    model = Net(lambda s, x: F.linear(x, SquaredOnTheWayBack.apply(s.w)), w=nn.Parameter(torch.randn(3, 4))).double()
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(5, 4)))
    with pytest.raises(cw.WrongRule, match=r"the factors of w do not add up"):
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


def test_a_hook_that_changes_the_sum_of_gradients_is_named():
    model = nn.Linear(4, 3).double()
    model.weight.register_hook(lambda grad: grad * (torch.arange(4) % 2))
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(5, 4)))
    with pytest.raises(cw.WrongRule, match=r"has a hook \(register_hook\)"):
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


def test_orthogonal_parametrization():
    assert_exact(Net(lambda s, x: torch.tanh(s.a(x)), a=parametrizations.orthogonal(nn.Linear(4, 4))), examples(5, 4))


def test_spectral_norm_with_its_buffers_at_rest():
    model = Net(lambda s, x: torch.tanh(s.a(x)), a=parametrizations.spectral_norm(nn.Linear(4, 3)).eval())
    assert_exact(model, examples(5, 4), methods=ALL_METHODS)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_spectral_norm_while_its_buffers_move(old):
    """Power iteration writes the weight into buffers, no example: nothing to refuse."""
    layer = (nn.utils.spectral_norm if old else parametrizations.spectral_norm)(nn.Linear(4, 3))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), layer).double()
    for _ in range(4):
        with cw.capture(model) as tape:
            losses = model(examples(5, 4)).square().sum(1)
        rows = [torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], retain_graph=True) for loss in losses]
        norms = row_norms(rows)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


def test_embedding_of_a_derived_table_keeps_its_gradient_exact():
    model = Net(lambda s, ids: torch.tanh(F.embedding(ids, F.normalize(s.w, dim=1))), w=P(torch.randn(6, 3)))
    assert_exact(model, torch.randint(0, 6, (4, 5)))


def test_cast_of_a_weight_in_half_of_a_model():
    model = Net(lambda s, x: F.linear(x, s.w.to(torch.float32).to(torch.float64)).tanh(), w=P(torch.randn(3, 4)))
    assert_exact(model, examples(5, 4), tolerance=1e-6)


def test_several_axes_of_examples_with_an_expanded_token():
    """(2, 3) examples in two axes, flattened only at the end."""

    def forward(s, x):
        grid = x.view(2, -1, *x.shape[1:]) if len(x) % 2 == 0 else x.unsqueeze(0)
        return s.out(torch.tanh(s.a(grid) + s.token)).flatten(0, 1)

    assert_exact(Net(forward, a=nn.Linear(3, 4), token=P(torch.randn(4)), out=nn.Linear(4, 2)), examples(6, 3))
