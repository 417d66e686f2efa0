"""Look-ups in a table, against a float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, Net, assert_exact


@given(shape=st.lists(st.integers(1, 4), max_size=2), rows=st.integers(1, 6), padding=st.sampled_from([None, 0, -1]), sparse=st.booleans())
def test_ids_of_any_shape(shape, rows, padding, sparse):
    model = Net(lambda s, ids: torch.tanh(s.table(ids)), table=nn.Embedding(rows, 3, padding_idx=padding, sparse=sparse))
    nn.init.normal_(model.table.weight)
    assert_exact(model, torch.randint(0, rows, (4, *shape)))


def test_repeated_ids_add_before_they_are_squared():
    model = Net(lambda s, ids: s.table(ids).sum(1), table=nn.Embedding(3, 2))
    assert_exact(model, torch.tensor([[0, 0, 0, 1], [1, 2, 1, 2], [2, 2, 2, 2]]), methods=ALL_METHODS)


@pytest.mark.parametrize(
    "positions",
    [
        lambda s, ids: s.position(torch.arange(ids.shape[1])),
        lambda s, ids: s.position(torch.arange(ids.shape[1])[None]),
        lambda s, ids: s.position(torch.arange(ids.shape[1]).expand(len(ids), -1)),
        lambda s, ids: s.position(torch.zeros_like(ids)),
        lambda s, ids: s.position.weight[: ids.shape[1]],
        lambda s, ids: s.position.weight[torch.arange(ids.shape[1])],
        lambda s, ids: F.embedding(torch.arange(ids.shape[1]), s.position.weight.clone(), padding_idx=1),
        lambda s, ids: torch.index_select(s.position.weight, 0, torch.arange(ids.shape[1])),
    ],
)
def test_shared_positions(positions):
    model = Net(lambda s, ids: torch.tanh(s.token(ids) + positions(s, ids)), token=nn.Embedding(7, 3), position=nn.Embedding(9, 3))
    assert_exact(model, torch.randint(0, 7, (4, 5)), methods=ALL_METHODS)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda w, ids: w[ids],
        lambda w, ids: torch.index_select(w, 0, ids.flatten()).unflatten(0, ids.shape),
        lambda w, ids: w[:, 0][ids].unsqueeze(-1),
        lambda w, ids: F.embedding(ids, w * 2.0),
        lambda w, ids: F.embedding(ids, w.t().contiguous().t()),
    ],
)
def test_other_spellings(look_up):
    model = Net(lambda s, ids: torch.tanh(look_up(s.w, ids)), w=nn.Parameter(torch.randn(6, 3)))
    assert_exact(model, torch.randint(0, 6, (4, 5)))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_options_without_a_gradient_of_one_example_are_refused(option):
    model = Net(lambda s, ids: s.table(ids), table=nn.Embedding(5, 3, **option))
    with pytest.raises(cw.UncoveredUse, match=next(iter(option))), cw.capture(model):
        model(torch.randint(0, 5, (4, 2)))


def test_position_ids_given_as_input():
    model = Net(
        lambda s, positions, ids: torch.tanh(s.position(positions) + s.token(ids)), token=nn.Embedding(7, 3), position=nn.Embedding(9, 3)
    )
    ids, positions = torch.randint(0, 7, (4, 5)), torch.arange(5)[None]
    expected = Net(lambda s, ids: s.inner(positions, ids), inner=model)
    reference = cw.testing.loop_gradients(expected, (ids,))
    with cw.capture(model) as tape:
        losses = cw.testing.squared_output(model(positions, ids))
    norms = torch.stack([grad.flatten(1).square().sum(1) for grad in reference.values()]).sum(0).sqrt()
    assert torch.allclose(cw.per_example_norms(tape, losses).double(), norms, rtol=1e-5)
