"""Operators by which graphs on a CPU measure and add up large matrices, against float64."""

import pytest
import torch
from torch import nn

from clipwise.kernels import host
from helpers import Net
from test_compiled import RECORDS, assert_same_training

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining")


def rows():
    found = torch.randn(5, 20_000, generator=torch.Generator().manual_seed(0))
    found[1] *= 1e-25  # its square vanishes in float32
    found[2] *= 1e25  # … overflows
    found[3, 7] = float("nan")
    return found


def test_squares_of_rows():
    found, expected = host.row_squares(rows()), rows().double().square().sum(1)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.0, 0.0, 2.0], [1.0, 0.5, 2.0, 0.0, 1e-30]])
def test_sums_of_rows(weights):
    """A row of weight zero counts for nothing, whatever it holds."""
    weights = torch.tensor(weights)
    expected = (rows().nan_to_num(0.0).double() * weights.double()[:, None]).sum(0)
    torch.testing.assert_close(
        host.weighted_row_sum(rows(), weights).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )


def test_as_operators_of_torch():
    torch.library.opcheck(torch.ops.clipwise.row_squares_on_host.default, (rows()[:3],))
    torch.library.opcheck(torch.ops.clipwise.weighted_row_sum_on_host.default, (rows()[:3], torch.ones(3)))


@pytest.mark.parametrize("spoiled", [None, float("nan"), 1e25])
def test_graphs_of_large_layers(spoiled):
    """Gradients that are written out and kept, 8192 numbers for each example."""
    x = torch.randn(RECORDS, 6, 64, generator=torch.Generator().manual_seed(0))
    if spoiled is not None:
        x[5, 2, 3] = spoiled

    class Single(nn.Module):  # in float32, whatever is asked for
        def __init__(self):
            super().__init__()
            self.net = Net(lambda s, x: s.b(torch.tanh(s.a(x)).mean(1)), a=nn.Linear(64, 128), b=nn.Linear(128, 3))

        def double(self):
            return self

        def forward(self, x):
            return self.net(x)

    step, _ = assert_same_training(Single, x, tolerance=1e-4)
    (variant,) = step.graphs.variants.values()
    targets = {str(node.target) for node in variant.traced.graph.graph.nodes}
    assert {"clipwise.row_squares_on_host.default", "clipwise.weighted_row_sum_on_host.default"} <= targets
