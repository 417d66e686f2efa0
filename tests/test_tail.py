"""The tail of an eager step as a recording: same numbers, whatever the batch. Graphs need a GPU (test_cuda.py); here a stand-in replays."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import tracing
from clipwise.compiled import tail
from clipwise.models import OverRows, Transformer, cnn, mlp
from clipwise.release import clip
from helpers import examples

STEPS = 14  # known ways begin with the third step, and the sixth of them is recorded


@pytest.fixture
def replays(monkeypatch):
    """Lets a CPU pretend to record. One entry a replay."""
    made = []

    def recorded(run, inputs):
        outputs = [output.clone() for output in run(*inputs)]

        def replay():
            made.append(run)
            for mine, new in zip(outputs, run(*inputs)):
                mine.copy_(new)

        return replay, outputs

    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})
    monkeypatch.setattr(tail, "recorded", recorded)
    return made


def step(model, x, y, clipping=None, losses_of=None):
    with cw.capture(model) as tape:
        losses = F.cross_entropy(model(x), y, reduction="none") if losses_of is None else losses_of(model, x, y)
    return clip(tape, losses, clipping or cw.flat(0.3), "bookkeep"), losses.detach()


def without_tail(model, x, y, clipping=None, losses_of=None):
    devices, tracing.DEVICES = tracing.DEVICES, set()
    try:
        return step(model, x, y, clipping, losses_of)[0]
    finally:
        tracing.DEVICES = devices


def assert_same(found, expected, tolerance=1e-9):
    assert found.sums.keys() == expected.sums.keys()
    assert torch.equal(found.finite, expected.finite)
    assert torch.allclose(found.weights, expected.weights, rtol=tolerance, atol=0)
    for name, total in expected.sums.items():
        assert float((found.sums[name] - total).norm()) <= tolerance * max(float(total.norm()), 1e-3), name


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.layer, self.head = nn.GRU(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        states, _ = self.layer(self.norm(self.words(x)).transpose(0, 1))
        return self.head(states[-1])


def words(batch):
    return torch.randint(0, 20, (batch, 5))


MODELS = {
    "mlp": (lambda: mlp(12, (8, 9), 3), lambda n: examples(n, 12)),
    "cnn": (lambda: cnn(1, 16, 3), lambda n: examples(n, 1, 16, 16)),
    "lstm": (lambda: OverRows(nn.LSTM, 6, 5, 3), lambda n: examples(n, 1, 7, 6)),
    "words": (Words, words),
    "transformer": (lambda: Transformer(torch.randn(20, 8), 3, heads=2, hidden=12, longest=8).double(), words),
}


@pytest.mark.parametrize("sizes", [[9], [9, 7, 9, 12, 5, 2]], ids=["one size", "many sizes"])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_every_step(name, sizes, replays):
    build, inputs = MODELS[name]
    model = build().double()
    for number in range(STEPS):
        size = sizes[number % len(sizes)]
        x, y = inputs(size), torch.randint(0, 3, (size,))
        found, losses = step(model, x, y)
        assert_same(found, without_tail(model, x, y))
        assert torch.allclose(found.value(losses), (found.weights * losses).sum())
    assert replays
