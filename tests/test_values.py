"""Whether a step is refused depends on structure, never on the values of a record: an exception that one record can trigger is a leak."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, Net


def hinge(output):
    target = torch.arange(len(output)) % output.shape[1]
    return F.multi_margin_loss(output.float(), target, reduction="none")


def cross_entropy(output):
    return F.cross_entropy(output.float(), torch.arange(len(output)) % output.shape[1], reduction="none")


def squares(output):
    return output.float().square().sum(1)


def sequence():
    return Net(
        lambda s, x: s.out((s.norm(s.a(x)) * s.scale).sum(1)),
        a=nn.Linear(6, 8),
        norm=nn.LayerNorm(8),
        scale=nn.Parameter(torch.ones(8)),
        out=nn.Linear(8, 4),
    )


def sorted_rows():
    """Rows sorted by content: where the examples lie is measured on every batch."""

    def forward(s, x):
        rows = x.flatten(0, 1)
        order = rows[:, 0].argsort()
        return s.out(torch.relu(s.a(rows[order]))[order.argsort()].view(len(x), -1, 8).sum(1))

    return Net(forward, a=nn.Linear(6, 8), out=nn.Linear(8, 4))


NETWORKS = {
    "convolution": (lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 4))),
    "sequence": sequence,
    "sorted rows": sorted_rows,
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 4)),
}
LOSSES = {"hinge": hinge, "cross entropy": cross_entropy, "squares": squares}
PRECISIONS = {
    "float32": lambda: torch.autocast("cpu", enabled=False),
    "bf16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fp16": lambda: torch.autocast("cpu", dtype=torch.float16),
}


def alternating(x):
    """Time steps that cancel but for rounding."""
    return 1e5 * x[:1] * torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])[:, None]


RECORDS = {
    "denormal": lambda x: x * 1e-40,
    "tiny": lambda x: x * 1e-8,
    "large": lambda x: x * 1e4,
    "huge": lambda x: x * 1e25,
    "zero": lambda x: x * 0,
    "constant": lambda x: torch.full_like(x, 3.0),
    "not a number": lambda x: x * float("nan"),
    "infinite": lambda x: x * float("inf"),
    "one entry not a number": lambda x: x.index_fill(0, torch.tensor([2]), float("nan")),
    "cancelling": alternating,
}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_no_record_can_cause_a_refusal(network, precision, record):
    for loss in LOSSES.values():
        model = NETWORKS[network]()
        for step, method in enumerate(ALL_METHODS):  # the first steps are verified, in full
            x = torch.randn(6, 5, 6)
            x[step] = RECORDS[record](x[step])
            with cw.capture(model) as tape, PRECISIONS[precision]():
                losses = loss(model(x))
            sums = cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method)
            assert all(bool(value.isfinite().all()) for value in sums.values())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * torch.randn_like(parameter)
