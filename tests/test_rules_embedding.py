"""Look-ups in a table, against a float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from clipwise.testing import squared_output
from helpers import ALL_METHODS, Net, assert_exact, examples, row_norms


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


# --- bags


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_one_length_with_repeated_ids(mode, padding):
    model = Net(lambda s, ids: torch.sin(s.e(ids)), e=nn.EmbeddingBag(5, 3, mode=mode, padding_idx=padding))
    ids = torch.tensor([[0, 0, 1], [2, 2, 2], [4, 2, 4], [1, 3, 1]])
    assert_exact(model, ids, methods=ALL_METHODS)
    torch.testing.assert_close(_watched(model, ids), model(ids))


def test_bags_with_weights_of_every_record():
    model = Net(lambda s, ids, w: torch.sin(F.embedding_bag(ids, s.e.weight, per_sample_weights=w, mode="sum")), e=nn.EmbeddingBag(5, 3))
    assert_exact(model, torch.randint(0, 5, (4, 3)), examples(4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_bags_of_different_lengths(mode, last, weighted):
    """One long vector of ids and where each bag begins; the reference is one loss at a time."""
    if weighted and mode != "sum":
        pytest.skip("PyTorch has weights for sums only")
    model = Net(
        lambda s, ids, offsets, w: s.out(s.e(ids, offsets, w)),
        e=nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=last),
        out=nn.Linear(3, 2),
    ).double()
    for _ in range(3):
        ids = torch.randint(0, 6, (11,))
        offsets = torch.tensor([0, 3, 3, 7, 8] + [11] * last)
        scales = torch.randn(11, dtype=torch.float64) if weighted else None
        rows = [
            torch.autograd.grad(loss, list(model.parameters()))
            for loss in [squared_output(model(ids, offsets, scales))[i] for i in range(5)]
        ]
        norms = row_norms(rows)
        for method in ALL_METHODS:
            with cw.capture(model) as tape:
                losses = squared_output(model(ids, offsets, scales))
            torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
            found = cw.clipped_gradients(tape, losses, cw.flat(1e9), method=method)
            for name, column in zip(found, zip(*rows)):
                torch.testing.assert_close(found[name], torch.stack([grad.to_dense() for grad in column]).sum(0))


def _watched(model, *inputs):
    with cw.capture(model):
        return model(*inputs)


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True, "mode": "sum"}])
def test_bags_whose_gradient_depends_on_the_batch(option):
    model = nn.EmbeddingBag(5, 3, **option)
    with pytest.raises(cw.UncoveredUse, match=next(iter(option))), cw.capture(model):
        model(torch.randint(0, 5, (4, 3)))


# --- other ways to pick

PICKS = {
    "rows": lambda s, i: s.w[i[:, 0]],
    "columns": lambda s, i: s.w[:, i[:, 0]].t(),
    "entries": lambda s, i: s.w[i[:, 0], i[:, 1]].unsqueeze(1),
    "entries of a row": lambda s, i: s.w[2, i[:, 1]].unsqueeze(1),
    "negative ids": lambda s, i: s.w[-1 - i],
    "index_select": lambda s, i: torch.index_select(s.w, 1, i[:, 0]).t(),
    "gather": lambda s, i: torch.gather(s.w[:1].expand(len(i), -1), 1, i),
    "gather along rows": lambda s, i: s.w[:, :2].gather(0, i),
    "a vector": lambda s, i: s.w[0][i],
    "three axes": lambda s, i: s.w.view(2, 2, 4)[i[:, 0] % 2, i[:, 1] % 2],
    "the last axis of three": lambda s, i: s.w.view(2, 2, 4)[:, :, i[:, 0]].permute(2, 0, 1),
}


@pytest.mark.parametrize("name", PICKS)
def test_picks(name):
    model = Net(lambda s, i: torch.sin(PICKS[name](s, i)), w=nn.Parameter(torch.randn(4, 4)))
    assert_exact(model, torch.randint(0, 4, (5, 2)), methods=ALL_METHODS)


def test_as_many_ids_as_bags():
    """Six ids in six bags of different lengths: not one id a bag."""
    for _ in range(3):
        model = Net(lambda s, ids, offsets: s.out(s.e(ids, offsets)), e=nn.EmbeddingBag(9, 3, mode="sum"), out=nn.Linear(3, 2)).double()
        for _ in range(3):
            ids, offsets = torch.randint(0, 9, (6,)), torch.tensor([0, 3, 3, 4, 6, 6])
            rows = [torch.autograd.grad(squared_output(model(ids, offsets))[i], list(model.parameters())) for i in range(6)]
            with cw.capture(model) as tape:
                losses = squared_output(model(ids, offsets))
            norms = row_norms(rows)
            torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_few_ids_with_learned_weights(count):
    model = Net(
        lambda s, ids, offsets: F.embedding_bag(ids, s.e.weight, offsets, mode="sum", per_sample_weights=s.w[ids]),
        e=nn.EmbeddingBag(9, 3, mode="sum"),
        w=nn.Parameter(torch.randn(9)),
    ).double()
    for _ in range(3):
        ids, offsets = torch.randint(0, 9, (count,)), torch.arange(count)
        rows = [torch.autograd.grad(squared_output(model(ids, offsets))[i], list(model.parameters())) for i in range(count)]
        with cw.capture(model) as tape:
            losses = squared_output(model(ids, offsets))
        norms = row_norms(rows)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
