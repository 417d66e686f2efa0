"""Black-box sensitivity: taking any one example away moves the clipped sum by at most S, whatever the example does."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, Net, clipped, examples, sensitivity

LIMIT = {torch.float64: 1 + 1e-6, torch.float32: 1 + 1e-3, torch.bfloat16: 1 + 1e-3}


def sequence_model():
    """Weights of every kind, used over time; the loss is linear in the output, so that time steps may cancel."""
    return Net(
        lambda s, x: s.out(torch.cat([s.a(x) * s.scale, s.conv(x.transpose(1, 2)).transpose(1, 2)], 2) + s.shift).sum(1),
        a=nn.Linear(4, 3),
        conv=nn.Conv1d(4, 3, 1),
        scale=nn.Parameter(torch.ones(3)),
        shift=nn.Parameter(torch.zeros(6)),
        out=nn.Linear(6, 2),
    )


def plain_sum(output):
    return output.flatten(1).sum(1)


def cancelling(x, time):
    """The last example's time steps cancel: alternating signs of a huge vector."""
    signs = torch.tensor([1.0, -1.0]).repeat(time // 2)
    x[-1] = 1e6 * torch.randn(x.shape[-1]) * signs[:, None]
    return x


ATTACKS = {
    "cancelling time steps": lambda x: cancelling(x, x.shape[1]),
    "cancelling but for a little": lambda x: cancelling(x, x.shape[1]) + 1e-3 * torch.randn_like(x),
    "one huge coordinate": lambda x: x.index_put((torch.tensor(0), torch.tensor(0), torch.tensor(0)), torch.tensor(1e18, dtype=x.dtype)),
    "huge": lambda x: x * torch.tensor([1e12] + [1.0] * (len(x) - 1), dtype=x.dtype).view(-1, 1, 1),
    "tiny": lambda x: x * 1e-30,
    "denormal": lambda x: x * 1e-42,
    "not a number": lambda x: x.index_fill(0, torch.tensor([1]), float("nan")),
    "infinite": lambda x: x.index_fill(0, torch.tensor([1]), float("inf")),
    "zero": lambda x: x * 0,
    "all alike": lambda x: x[:1].expand_as(x).clone(),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", ["bookkeep", "reweight"])
def test_no_example_moves_the_sum_by_more_than_the_bound(attack, dtype, method):
    model = sequence_model().to(dtype)
    x = ATTACKS[attack](examples(4, 8, 4, dtype=torch.float64)).to(dtype)
    assert sensitivity(model, [x], 0.7, loss=plain_sum, method=method) <= LIMIT[dtype]


@pytest.mark.parametrize("attack", ["cancelling time steps", "one huge coordinate", "not a number"])
@pytest.mark.parametrize("method", ["multiloss", "nxbp"])
def test_the_slow_methods_too(attack, method):
    x = ATTACKS[attack](examples(4, 8, 4)).float()
    assert sensitivity(sequence_model(), [x], 0.7, loss=plain_sum, method=method) <= LIMIT[torch.float32]


def halves(dtype):
    """(type of the model, context): autocast to `dtype`, or a model made of it."""
    return {
        "bf16 autocast": (torch.float32, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        "fp16 autocast": (torch.float32, lambda: torch.autocast("cpu", dtype=torch.float16)),
        "pure bf16": (torch.bfloat16, None),
    }[dtype]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("precision", ["bf16 autocast", "fp16 autocast", "pure bf16"])
@pytest.mark.parametrize("method", ALL_METHODS)
@pytest.mark.parametrize("squared", [False, True])
def test_in_lower_precision(attack, precision, method, squared):
    dtype, context = halves(precision)
    x = ATTACKS[attack](examples(4, 8, 4)).to(dtype)
    loss = (lambda output: output.float().square().sum(1)) if squared else (lambda output: plain_sum(output.float()))
    assert sensitivity(sequence_model().to(dtype), [x], 0.7, loss=loss, method=method, context=context) <= LIMIT[torch.bfloat16]


def alike(count, dtype):
    """(model, so many examples whose gradients nearly agree): their sum is much larger than any of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3)).to(dtype)
    return model, (torch.ones(count, 6) + 0.1 * torch.randn(count, 6)).to(dtype)


def total(model, x, method, context=None):
    with cw.capture(model) as tape, context() if context else contextlib.nullcontext():
        losses = F.cross_entropy(model(x).float(), torch.zeros(len(x), dtype=torch.long), reduction="none")
    sums = cw.clipped_gradients(tape, losses, cw.flat(0.1), method=method)
    return torch.cat([found.double().flatten() for found in sums.values()]) / 0.1


@pytest.mark.parametrize("precision", ["bf16 autocast", "fp16 autocast", "pure bf16"])
@pytest.mark.parametrize("method", ["bookkeep", "reweight"])
def test_the_sum_of_many_is_not_rounded_in_lower_precision(precision, method):
    """A sum of a thousand in bf16 moves by several bounds, or not at all, when one of them goes. Autograd's own sums are of that kind."""
    dtype, context = halves(precision)
    model, x = alike(1024, dtype)
    whole = total(model, x, method, context)
    assert whole.norm() > 900
    for less in (1, 2, 3):
        assert (whole - total(model, x[:-less], method, context)).norm() <= less * LIMIT[torch.bfloat16]


@pytest.mark.parametrize("precision", [None, "bf16 autocast", "fp16 autocast", "pure bf16"])
@pytest.mark.parametrize("method", ["bookkeep", "reweight", "multiloss"])
def test_one_example_that_is_no_number_leaves_the_others_as_they_are(precision, method):
    """It made all of them go another way, with other norms: nineteen bounds for a thousand examples in bf16."""
    dtype, context = halves(precision) if precision else (torch.float32, None)
    model, x = alike(1024, dtype)
    bad = torch.cat([x, torch.full_like(x[:1], float("nan"))])
    bound = 1e-2 if method == "multiloss" else 1e-3  # whose norms allow for no rounding, as those by factors do
    assert (total(model, x, method, context) - total(model, bad, method, context)).norm() <= bound


def verified(model, steps=9):
    """This model, after steps that were measured."""
    for _ in range(steps):
        clipped(model, [examples(8, 6)], 0.3)
    return model


def test_a_second_pass_adds_nothing_that_a_hook_makes_of_the_sum():
    model = verified(Net(lambda s, x: s.b(torch.tanh(s.a(x))), a=nn.Linear(6, 4), b=nn.Linear(4, 3)).double())
    x = examples(8, 6)
    expected = clipped(model, [x], 0.3, method="bookkeep")[1]
    model.b.weight.register_hook(lambda grad: 10 * grad)
    torch.testing.assert_close(clipped(model, [x], 0.3, method="reweight")[1], expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_a_second_pass_adds_nothing_that_no_tap_has_seen():
    """Between two verifications: the sum of a second pass is autograd's own, and has what goes past the taps, too."""
    scripted = torch.jit.script(_scaled)
    model = Net(
        lambda s, x: s.b(scripted(torch.tanh(s.a(x)), s.b.weight) if s.late else torch.tanh(s.a(x))), a=nn.Linear(6, 4), b=nn.Linear(4, 3)
    )
    model.late = False
    verified(model.double()).late = True
    with pytest.raises(cw.UnseenUse, match=r"b\.weight"):
        clipped(model, [examples(8, 6)], 0.3, method="reweight")


def _scaled(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return h * (1.0 + 50.0 * weight.sum())


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_where_rows_lie_in_no_regular_order(attack, dtype):
    """Rows are sorted by their content: which example a row belongs to is measured for every batch."""

    def forward(s, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort()
        return (s.a(rows[order]) * s.scale)[order.argsort()].view(*x.shape[:2], 3).sum(1)

    model = Net(forward, a=nn.Linear(4, 3), scale=nn.Parameter(torch.ones(3))).to(dtype)
    x = ATTACKS[attack](examples(4, 8, 4)).to(dtype)
    assert sensitivity(model, [x], 0.7, loss=plain_sum) <= LIMIT[dtype]


CLIPPINGS = {
    "flat": cw.flat(0.7),
    "per layer": cw.per_layer(0.7),
    "per group": cw.per_group({"out.*": 0.3, "*": 0.6}),
    "automatic": cw.automatic(0.7),
}


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_clipping_keeps_its_own_bound(name, method):
    x = examples(5, 8, 4)
    worst = sensitivity(sequence_model().double(), [x], 0.7, loss=plain_sum, method=method, clipping=CLIPPINGS[name])
    assert 0.5 < worst <= LIMIT[torch.float64]


def test_aligned_gradients_of_a_layer_used_three_times():
    """The adversary of a library that measures each use alone: equal gradients that add up to three times the norm."""
    model = Net(lambda s, x: sum(F.linear(x, s.w) for _ in range(3)), w=nn.Parameter(torch.randn(2, 4)))
    assert sensitivity(model.double(), [examples(4, 4)], 1.0, loss=plain_sum) <= LIMIT[torch.float64]


def test_a_loss_of_the_wrong_shape_cannot_slip_through():
    """(B, 1) minus (B,) is (B, B): the mean over the batch of a matrix, which no clipping bounds."""
    model = nn.Linear(3, 1)
    x, y = torch.randn(8, 3), torch.randn(8)
    with cw.capture(model) as tape:
        losses = ((model(x) - y) ** 2).mean(1)
    with pytest.raises(cw.MixedExamples) as refused:
        cw.clipped_loss(tape, losses, cw.flat(1.0))
    assert "(B, B)" in str(refused.value)


SEQUENCES = {
    "attention": lambda: Net(lambda s, x: s.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True)),
    "encoder": lambda: Net(lambda s, x: s.e(x), e=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)),
    "lstm": lambda: Net(lambda s, x: s.l(x)[0], l=nn.LSTM(4, 3, batch_first=True)),
    "gru": lambda: Net(lambda s, x: s.l(x)[0], l=nn.GRU(4, 3, bidirectional=True, batch_first=True)),
    "experts": lambda: Net(lambda s, x: torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1), w=nn.Parameter(torch.randn(8, 4, 3))),
    "prototypes": lambda: Net(lambda s, x: torch.cdist(x, s.w), w=nn.Parameter(torch.randn(3, 4))),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_of_sequences(name, attack, dtype):
    x = ATTACKS[attack](examples(4, 8, 4)).to(dtype)
    assert sensitivity(SEQUENCES[name]().to(dtype), [x], 0.7, loss=plain_sum) <= LIMIT[dtype]


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_with_huge_rows(mode):
    model = Net(lambda s, ids: s.e(ids), e=nn.EmbeddingBag(6, 3, mode=mode))
    with torch.no_grad():
        model.e.weight[2] *= 1e12
        model.e.weight[3] = float("nan")
    ids = torch.tensor([[2, 2, 2], [0, 1, 0], [3, 1, 0], [5, 5, 2]])
    assert sensitivity(model, [ids], 0.7, loss=lambda out: out.square().sum(1)) <= LIMIT[torch.float32]
