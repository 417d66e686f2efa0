"""Models that move rows about as the data says: verified on one batch, they must be right on the next."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import clipwise as cw
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import Net, examples, row_norms


def sorted_by_length(s, x):
    """Longest first, and back: the identity on a batch of equal lengths."""
    order = x[:, 0, 0].argsort(stable=True)
    return torch.tanh(s.a(x[order]))[order.argsort()].sum(1)


def sorted_with_index_select(s, x):
    order = x[:, 0, 0].argsort(stable=True)
    return torch.tanh(s.a(x.index_select(0, order))).index_select(0, order.argsort()).sum(1)


def sorted_time_first(s, x):
    order = x[:, 0, 0].argsort(stable=True)
    moved = x.transpose(0, 1)[:, order].transpose(0, 1)
    return torch.tanh(s.a(moved))[order.argsort()].sum(1)


def only_what_counts(s, x):
    """Tokens above a threshold, without padding: rows an example may have any number."""
    mask = x[:, :, 1] >= 0
    owner = torch.arange(len(x)).unsqueeze(1).expand_as(mask)[mask]
    return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, owner, torch.tanh(s.a(x[mask])))


def ragged_by_slices(s, x):
    lengths = (x[:, :, 1] >= 0).sum(1).clamp(min=1).tolist()
    rows = torch.tanh(s.a(torch.cat([row[:length] for row, length in zip(x, lengths)])))
    return torch.stack([part.sum(0) for part in rows.split(lengths)])


def packed(s, x):
    lengths = (x[:, :, 1] >= 0).sum(1).clamp(min=1)
    together = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    rows = torch.tanh(s.a(together.data))
    owner = pack_padded_sequence(
        torch.arange(len(x)).unsqueeze(1).expand(x.shape[:2]), lengths, batch_first=True, enforce_sorted=False
    ).data
    return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, owner, rows)


def repeated(s, x):
    counts = (x[:, :, 1] >= 0).sum(1).clamp(min=1)
    rows = torch.tanh(s.a(x[:, 0].repeat_interleave(counts, 0)))
    return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, torch.arange(len(x)).repeat_interleave(counts), rows)


MOVERS = [sorted_by_length, sorted_with_index_select, sorted_time_first, only_what_counts, ragged_by_slices, packed, repeated]


def in_order():
    """Already sorted, everything counts."""
    x = examples(4, 6, 4).abs()
    x[:, 0, 0] = torch.arange(4)
    return x


def disordered():
    """Another order, other counts that add up to the same number of rows."""
    x = examples(4, 6, 4).abs()
    x[:, 0, 0] = torch.tensor([3, 1, 0, 2])
    x[0, 2:, 1], x[1, 4:, 1], x[2, 1:, 1], x[3, 5:, 1] = -1.0, -1.0, -1.0, -1.0  # 2 + 4 + 1 + 5 = 12 tokens: three an example
    return x


@pytest.mark.parametrize("forward", MOVERS, ids=lambda forward: forward.__name__)
def test_rows_that_move_with_the_data(forward):
    model = Net(forward, a=nn.Linear(4, 3)).double()
    for x in (in_order(), disordered(), disordered(), in_order()):
        expected, norms = clip_and_add(loop_gradients(model, (x,)), 0.5)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_the_last_token_of_each_sequence_is_not_probed_every_step(monkeypatch):
    """h[arange(B), lengths] moves nothing along the batch."""
    from clipwise.verify import verified_gradients

    probes = []
    monkeypatch.setattr("clipwise.collect.verified_gradients", lambda *a: probes.append(1) or verified_gradients(*a))
    model = Net(lambda s, x: s.a(x)[torch.arange(len(x)), (x[:, :, 1] >= 0).sum(1) - 1], a=nn.Linear(4, 3)).double()
    for x in (in_order(), disordered()) * 4:
        x[:, 0, 1] = 1.0
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    assert len(probes) == 5  # steps 1 to 4, until enough examples were looked at, and 8


@pytest.mark.parametrize("mix", [0.3, 0.0])
def test_mixup_inside_the_model_is_refused(mix):
    """Also where the shares are such that the first draw mixes nothing visible: a random permutation is held still, not undone."""

    def forward(s, x):
        share = torch.full((), 1 - mix, dtype=x.dtype)
        return s.a(share * x + (1 - share) * x[torch.randperm(len(x))])

    model = Net(forward, a=nn.Linear(4, 3)).double()
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(6, 4)))
    if mix:
        with pytest.raises(cw.MixedExamples):
            cw.clipped_gradients(tape, losses, cw.flat(1.0))
    else:
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


def test_a_random_order_of_rows():
    """Shuffled and put back, another way every step."""

    def forward(s, x):
        order = torch.randperm(len(x))
        return torch.tanh(s.a(x[order]))[order.argsort()]

    model = Net(forward, a=nn.Linear(4, 3)).double()
    for seed in (3, 0, 1, 2):
        torch.manual_seed(seed)
        x = examples(3, 4)
        expected, _ = clip_and_add(loop_gradients(model, (x,)), 0.5)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_a_flag_that_begins_to_mix():
    """The same torch calls with another argument are another way to the losses."""

    def forward(s, x):
        h = s.a(x)
        return s.b(h[s.start :].cumsum(s.axis)[: len(x)]) if s.start == 0 else s.b(torch.cat([h[s.start :], h[: s.start]]))

    model = Net(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2)).double()
    model.start, model.axis = 0, 1
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(6, 4)))
    cw.clipped_gradients(tape, losses, cw.flat(1.0))
    model.axis = 0
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(6, 4)))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


# --- pieces of the batch that Python puts together in another order

PIECES = {
    "unbind": lambda t, order: [t.unbind(0)[i] for i in order],
    "iteration": lambda t, order: [list(t)[i] for i in order],
    "split": lambda t, order: [t.split(1)[i][0] for i in order],
    "chunk": lambda t, order: [t.chunk(len(order))[i].squeeze(0) for i in order],
    "integers of numpy": lambda t, order: [t[np.int64(i)] for i in order],
}


@pytest.mark.parametrize("how", [*PIECES, "array of numpy"])
def test_an_order_that_only_python_knows(how):
    """The identity on the first steps, a permutation afterwards: nothing may be remembered."""

    def forward(s, x, order):
        h = torch.tanh(s.a(x))
        back = np.argsort(order)
        if how == "array of numpy":
            return s.c(s.b(h[np.array(order)])[back])
        rows = s.b(torch.stack(PIECES[how](h, order))).unbind(0)
        return s.c(torch.stack([rows[i] for i in back]))

    model = Net(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2)).double()
    for step in range(10):
        order = list(range(16)) if step < 2 or step == 3 else torch.randperm(16).tolist()
        x = torch.randn(16, 3, dtype=torch.float64)
        losses = model(x, order).square().sum(1)
        rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
        with cw.capture(model) as tape:
            losses = model(x, order).square().sum(1)
        expected = row_norms(rows)
        torch.testing.assert_close(cw.per_example_norms(tape, losses), expected)


def _written_over(w):
    matrix = torch.empty(len(w), len(w), dtype=w.dtype)
    matrix[:] = w
    return matrix


MIXERS = {
    "clamp by place": lambda v, w: torch.clamp(v.unsqueeze(1).expand(-1, len(v)), None, w),
    "clamp by name": lambda v, w: torch.clamp(v.unsqueeze(1).expand(-1, len(v)), max=w),
    "minimum": lambda v, w: torch.minimum(v.unsqueeze(1).expand(-1, len(v)), w),
    "repeated before": lambda v, w: torch.minimum(v.unsqueeze(1).expand(-1, len(v)), w.unsqueeze(0).expand(len(v), -1)),
    "as another": lambda v, w: torch.minimum(v.unsqueeze(1).repeat(1, len(v)), w.expand_as(v.unsqueeze(1).repeat(1, len(v)))),
    "broadcast together": lambda v, w: torch.minimum(*torch.broadcast_tensors(v.unsqueeze(1), w)),
    "where": lambda v, w: torch.where(v.unsqueeze(1) < w, v.unsqueeze(1), w),
    "clamp_max": lambda v, w: v.unsqueeze(1).clamp_max(w),
    "clip": lambda v, w: torch.clip(v.unsqueeze(1), max=w),
    "less": lambda v, w: v.unsqueeze(1) + torch.less(w, v.unsqueeze(1)) * (w - v.unsqueeze(1)),
    "copied": lambda v, w: torch.minimum(v.unsqueeze(1).repeat(1, len(v)), torch.empty(len(v), len(v), dtype=v.dtype).copy_(w)),
    "margin": lambda v, w: v.unsqueeze(1) + F.margin_ranking_loss(v.unsqueeze(1), w.unsqueeze(0), -torch.ones(1, 1), reduction="none"),
    "letters, nobody's": lambda v, w: torch.einsum("b,c->bc", v, (w.detach() > 0).double()),
    "letters, all added": lambda v, w: (v + torch.einsum("b,c->b", v, (w.detach() < 0).double()))[:, None],
    "on later axes": lambda v, w: torch.minimum(v.repeat(3, 1)[:, :, None], w.repeat(3, 1)[:, None]).mean(0),
    "a loss": lambda v, w: F.huber_loss(v.unsqueeze(1), w.clamp(min=0).detach() * 0 + (w - 1e6).clamp(max=-1e7), reduction="none"),
    "linear": lambda v, w: v.unsqueeze(1) + F.linear(v.unsqueeze(1), (w.detach() < 0).double().unsqueeze(1)),
    "written": lambda v, w: torch.minimum(v.unsqueeze(1).repeat(1, len(v)), _written_over(w)),
    "outer": lambda v, w: torch.outer(v, (w.detach() > 0).double()),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_examples_that_meet_only_where_one_of_them_is_large_are_refused(mixer):
    """Every example is compared with every other, and nobody is larger than the bound: until somebody is."""
    model = Net(lambda s, x: (lambda v: MIXERS[mixer](v, v + 1e6).mean(1))(s.a(x).squeeze(1)), a=nn.Linear(5, 1)).double()

    def step(x):
        with cw.capture(model) as tape:
            losses = model(x)
        return cw.clipped_gradients(tape, losses, cw.flat(1e-3))

    x = examples(6, 5)
    for _ in range(20):
        step(x)
    x[0] = -1e8 * model.a.weight.detach()[0].sign()
    with pytest.raises(cw.Refusal):
        step(x)


SHIFTED = {
    "flip": lambda v: v.flip(0),
    "flip by a tuple": lambda v: torch.flip(v, (0, 1)).flip(-1),
    "flipud": lambda v: torch.flipud(v),
    "roll": lambda v: v.roll(1, 0),
    "roll of everything": lambda v: v.roll(v.shape[1]),
    "rot90 twice": lambda v: torch.rot90(v, 2).flip(1),
}


@pytest.mark.parametrize("name", SHIFTED)
def test_rows_that_meet_others_where_these_win_are_measured_on_every_batch(name):
    """No neighbour wins on a batch that was verified; later one does."""
    model = Net(lambda s, x: torch.minimum(s.a(x), SHIFTED[name](s.a(x)) + 1e4), a=nn.Linear(4, 3)).double()
    for step in range(10):
        x = examples(8, 4)
        if step == 9:
            x[3] *= -1e7
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        if step < 9:
            cw.clipped_gradients(tape, losses, cw.flat(0.5))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_gradients(tape, losses, cw.flat(0.5))


def test_an_order_that_a_coin_decides():
    """Rows there and back, or as they are: each batch is measured, so that no record exceeds the bound."""
    coins = iter([True] * 9 + [False] * 8)

    def forward(net, x):
        stays = next(coins)
        h = torch.where(torch.tensor(stays), x, x.flip(0))
        z = net.a(h)
        return torch.where(torch.tensor(stays), z, z.flip(0))

    model = Net(forward, a=nn.Linear(4, 3)).double()
    for _ in range(4):
        x = examples(8, 4)
        coins = iter([True] * 200)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    coins = iter([False] * 200)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    norms = cw.per_example_norms(tape, losses)
    coins = iter([True] * 200)
    expected = clip_and_add(loop_gradients(model, [x]), 1.0)[1]
    torch.testing.assert_close(norms, expected)


def test_pictures_that_are_turned_are_no_reason_to_measure_every_batch(monkeypatch):
    """Windows that are shifted, sequences that are read backwards: other axes than that of the examples."""
    from clipwise import collect

    verified = []
    real = collect.verified_gradients
    monkeypatch.setattr(collect, "verified_gradients", lambda *args: verified.append(1) or real(*args))
    model = Net(lambda s, x: s.a(x.roll((1, 2), (1, 2)).flip(2) + torch.rot90(x, 1, (1, 2))).mean((1, 2)), a=nn.Linear(4, 3)).double()
    for _ in range(20):
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(8, 8, 8, 4)))
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    assert len(verified) <= 6


PLAIN_ROWS = {
    "a cast": lambda s, x: s.a(x.bfloat16().double()),
    "ravel": lambda s, x: s.a((x.ravel() * +x.ravel()).view(x.shape)),
    "what a mask fills": lambda s, x: _filled(s.a(x)),
    "a picture that is warped": lambda s, x: s.a(F.grid_sample(x[:, None, None, :], F.affine_grid(x[:, :6].view(-1, 2, 3), [len(x), 1, 1, 6], False), align_corners=False)[:, 0, 0]),
    "determinants": lambda s, x: s.a(x) * torch.linalg.slogdet(s.a(x)[:, :4].view(-1, 2, 2))[1][:, None],
    "bins of its own": lambda s, x: s.a(x) * torch.searchsorted(x[:, :3].sort(1).values, x[:, 3:4].contiguous()),
    "bits": lambda s, x: s.a(x * ((x.long() << 1) & 3)),
    "attention by letters": lambda s, x: s.a(torch.einsum("bhtd,bhsd->bhts", x.view(-1, 1, 2, 3), s.a(x)[:, :3].view(-1, 1, 1, 3)).sum((1, 3)).repeat(1, 3)),
    "powers": lambda s, x: s.a(torch.float_power(x.abs() + 1, 0.5) + torch.special.expit(x)),
}  # fmt: skip


def _filled(h):
    h = h.clone()
    h[h < 0] = 0.5
    h[h.sum(1) > 3] = -1.0
    return h


@pytest.mark.parametrize("name", PLAIN_ROWS)
def test_functions_that_keep_rows_apart_are_no_reason_to_measure_every_batch(name, monkeypatch):
    """And what is remembered of them is right."""
    from clipwise import collect

    verified = []
    real = collect.verified_gradients
    monkeypatch.setattr(collect, "verified_gradients", lambda *args: verified.append(1) or real(*args))
    model = Net(PLAIN_ROWS[name], a=nn.Linear(6, 5)).double()
    for _ in range(9):
        x = examples(16, 6)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        norms = cw.per_example_norms(tape, losses)
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    assert len(verified) <= 5
    torch.testing.assert_close(norms, clip_and_add(loop_gradients(model, (x,)), 0.5)[1])


def test_a_mask_that_deals_rows_out_is_measured():
    """x[mask] = rows: which of them a row gets goes by what the others hold."""

    def forward(s, x):
        h = s.a(x).clone()
        h[x[:, 0] > 0] = s.a(x)[x[:, 0] > 0].flip(0)
        return h

    model = Net(forward, a=nn.Linear(6, 5)).double()
    with cw.capture(model) as tape:
        model(examples(6, 6))
    assert tape.moves.may_move_rows(6, [0])


@pytest.mark.parametrize("product", ["bc,cd->bd", "bc,c...->b...", "hbc,hcd->hbd"])
def test_an_equation_that_may_deal_rows_out_is_measured(product):
    """An order that the data says, as a matrix."""

    def forward(s, x):
        order = F.one_hot(x[:, 0].argsort(), len(x)).to(x.dtype)
        if "h" in product:
            return torch.einsum(
                product, order.mT.expand(2, -1, -1), torch.einsum(product, order.expand(2, -1, -1), s.a(x).expand(2, -1, -1))
            )[0]
        return torch.einsum(product, order.mT, torch.einsum(product, order, s.a(x)))

    model = Net(forward, a=nn.Linear(6, 5)).double()
    with cw.capture(model) as tape:
        model(examples(7, 6))
    assert tape.moves.may_move_rows(7, [0])


def _order(x):
    """(B, B): sorts rows by their first entry."""
    return F.one_hot(x[:, 0].argsort(), len(x)).to(x.dtype)


def _filled_by_order(x, order):
    copies = x[:, None].repeat(1, len(x), 1)
    copies[(order == 0).T] = 0.0
    return copies.sum(0)


DEALT = {
    "linear": lambda x, order: F.linear(order, x.T),
    "transposed product": lambda x, order: (order.T[:, :, None] * x[:, None]).sum(0),
    "mask": _filled_by_order,
    "slices by tensors": lambda x, order: torch.cat([x[place : place + 1] for place in x[:, 0].argsort()]),
}


@pytest.mark.parametrize("name", DEALT)
def test_rows_that_are_dealt_out_and_back(name):
    """In order on the batches that are verified, then not."""
    model = Net(lambda s, x: _order(x).T @ torch.tanh(s.a(DEALT[name](x, _order(x)))), a=nn.Linear(6, 5)).double()
    for step in range(6):
        x = examples(8, 6)
        if step < 5:
            x[:, 0] = torch.arange(8)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.per_example_norms(tape, losses)
    torch.testing.assert_close(found, clip_and_add(loop_gradients(model, (x,)), 0.5)[1])


@pytest.mark.parametrize("value", [lambda h: h.sum(), lambda h: h.detach().mean()])
def test_a_mask_that_fills_in_what_examples_say_is_measured(value):
    model = Net(lambda s, x: _with_value(s.a(x), x, value), a=nn.Linear(6, 5)).double()
    with cw.capture(model) as tape:
        model(examples(7, 6))
    assert tape.moves.may_move_rows(7, [0])


def _with_value(h, x, value):
    h = h.clone()
    h[x[:, 0] > 1e3] = value(h)
    return h


def test_numbers_for_every_feature_are_no_reason_to_measure():
    """Means and deviations of a data set, from outside."""
    mean, deviation = torch.randn(6).double(), torch.rand(6).double() + 1
    model = Net(lambda s, x: s.a((x - mean) / deviation) * s.a(x).mean(1, keepdim=True), a=nn.Linear(6, 5)).double()
    for batch in (7, 8, 5):
        with cw.capture(model) as tape:
            model(examples(batch, 6))
        assert not tape.moves.may_move_rows(batch, [0])
