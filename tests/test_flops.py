"""Repeatable costs: FLOPs of a private step, and no tensor of batch × parameters where a cheaper way exists."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import clipwise as cw

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import flops
from clipwise import models


@pytest.mark.parametrize("case", flops.PEER)
def test_norms_come_for_free(case):
    """Writing gradients out replaces the ordinary weight gradient: at most a tenth more, and no more than the best peer needs."""
    (row,) = flops.ratios({case: flops.cases()[case]}, ("bookkeep",)).values()
    assert row["bookkeep"] <= min(1.10, flops.PEER[case] + 5e-3)


def test_reweighting_costs_one_more_backward_pass():
    """The paper's networks; benchmarks/flops.py counts all cases."""
    papers = {name: case for name, case in flops.cases().items() if name in ("mlp 784-128-256-10", "paper's cnn")}
    assert all(1.1 <= row["reweight"] <= 1.7 for row in flops.ratios(papers).values())


def test_sequence_layers():
    """Attention costs nothing more; an LSTM or GRU its gates once more, an RNN's kernel products with an identity matrix."""
    found = flops.ratios(flops.sequence_cases(), ("bookkeep",))
    limits = {"lstm 28-128": 1.4, "gru 28-128": 1.5, "rnn 28-128": 1.65, "multi-head attention d64": 1.05}
    assert {name: row["bookkeep"] for name, row in found.items() if row["bookkeep"] > limits[name]} == {}


class LargestTensor(TorchDispatchMode):
    """The most elements any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def private_step(model, x, loss):
    with cw.capture(model) as tape:
        losses = loss(model(x))
    cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()


def largest(model, x, loss):
    for _ in range(2):
        private_step(model, x, loss)  # verified
    with LargestTensor() as mode:
        private_step(model, x, loss)
    return mode.elements


def test_linear_layers_write_no_gradient_out():
    model = nn.Linear(300, 200)
    assert largest(model, torch.randn(32, 300), lambda out: out.square().sum(1)) <= 300 * 200


def test_short_sequences_write_no_gradient_out():
    model = nn.Linear(300, 200)
    assert largest(model, torch.randn(32, 2, 300), lambda out: out.square().sum((1, 2))) <= 300 * 200


def test_embeddings_write_no_gradient_out():
    model = nn.Embedding(5000, 8)
    assert largest(model, torch.randint(0, 5000, (16, 12)), lambda out: out.square().sum((1, 2))) <= 5000 * 8


def test_tied_heads_of_short_sequences_write_no_gradient_out():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4000, 64)

        def forward(self, ids):
            return F.linear(torch.tanh(self.table(ids)), self.table.weight)

    elements = largest(Tied(), torch.randint(0, 4000, (16, 2)), lambda out: out.log_softmax(-1)[..., 0].sum(1))
    assert elements <= 4000 * 64


def test_small_feature_maps_write_no_gradient_out():
    model = nn.Conv2d(64, 64, 3, padding=1)
    assert largest(model, torch.randn(16, 64, 2, 2), lambda out: out.square().sum((1, 2, 3))) <= 16 * 64 * 9 * 4


def test_gradients_are_not_kept_beyond_the_memory_budget(monkeypatch):
    monkeypatch.setattr("clipwise.planner._CPU_BUDGET", 0)
    monkeypatch.setattr("clipwise.planner.MemoryBudget.on", classmethod(lambda cls, device, most=None: cls(0)))
    model, x = nn.Linear(64, 64), torch.randn(8, 100, 64)
    for _ in range(2):
        private_step(model, x, lambda out: out.square().sum((1, 2)))  # verified
    with FlopCounterMode(display=False) as counter:
        private_step(model, x, lambda out: out.square().sum((1, 2)))
    forward = 2 * 8 * 100 * 64 * 64
    # forward, gradients written out and forgotten, the weighted sum; a little for the bias
    assert 3 * forward <= counter.get_total_flops() <= 3.01 * forward


def test_a_private_step_of_small_layers_takes_few_operations():
    """Small networks are bound by starting kernels: forward, clipping and sums of the paper's MLP, views included, beside an ordinary step."""

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    model, x, y = models.mlp(), torch.randn(8, 1, 28, 28), torch.randint(0, 10, (8,))

    def private():
        with cw.capture(model) as tape:
            losses = F.cross_entropy(model(x), y, reduction="none")
        cw.clipped_gradients(tape, losses, cw.flat(1.0))

    for _ in range(8):  # verified on steps 1, 2, 4 and 8
        private()
    with Count() as ordinary:
        F.cross_entropy(model(x), y).backward()
    with Count() as clipped:
        private()
    assert clipped.calls <= 2.2 * ordinary.calls, (clipped.calls, ordinary.calls)
