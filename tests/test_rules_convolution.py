"""Convolutions of every kind, against a float64 loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from clipwise.factors import convolution as factor
from helpers import ALL_METHODS, Net, assert_exact, examples

CLASSES = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
WAYS = {"windows": 2**60, "grouped": 0}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Both ways to write a kernel's gradients out."""
    monkeypatch.setattr(factor, "_WINDOWS_THAT_FIT_A_CACHE", WAYS[request.param])


@st.composite
def geometries(draw, transposed=False):
    n = draw(st.integers(1, 3))
    each = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(n))
    groups = draw(st.sampled_from([1, 2]))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    options = dict(kernel_size=each(1, 3), stride=each(1, 2), dilation=each(1, 2), groups=groups, bias=draw(st.booleans()))
    if transposed:
        limits = zip(options["stride"], options["dilation"])
        options["output_padding"] = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in limits)
        options["padding"] = each(0, 1)
        return TRANSPOSED[n], inputs, outputs, options, n
    options["padding"] = draw(st.sampled_from(["valid", "same", each(0, 2)]))
    if options["padding"] == "same":
        options["stride"] = 1
    options["padding_mode"] = (
        draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"])) if options["padding"] != "valid" else "zeros"
    )
    return CLASSES[n], inputs, outputs, options, n


@given(geometry=geometries(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_convolution(way, geometry, dtype):
    layer, inputs, outputs, options, n = geometry
    model = Net(lambda s, x: torch.tanh(s.a(x)), a=layer(inputs, outputs, **options))
    assert_exact(model, examples(3, inputs, *[6] * n), dtype=dtype)


@given(geometry=geometries(transposed=True))
def test_transposed_convolution(way, geometry):
    layer, inputs, outputs, options, n = geometry
    model = Net(lambda s, x: torch.tanh(s.a(x)), a=layer(inputs, outputs, **options))
    try:
        model(torch.randn(1, inputs, *[4] * n))
    except RuntimeError:
        assume(False)
    assert_exact(model, examples(3, inputs, *[4] * n))


def test_every_method_agrees(way):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 3))
    assert_exact(model, examples(5, 2, 8, 8), methods=ALL_METHODS)


def test_frozen_kernel_with_trainable_bias():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh())
    model[0].weight.requires_grad_(False)
    assert_exact(model, examples(4, 2, 5, 5))


def test_channels_last():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last)
    assert_exact(model, examples(4, 2, 6, 6).contiguous(memory_format=torch.channels_last))


def test_a_single_image_without_batch_axis():
    model = Net(lambda s, x: torch.stack([torch.tanh(s.a(image)) for image in x]), a=nn.Conv2d(2, 3, 3))
    assert_exact(model, examples(4, 2, 5, 5))


def test_depthwise_and_pointwise(way):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=4), nn.Tanh(), nn.Conv2d(8, 3, 1))
    assert_exact(model, examples(4, 4, 5, 5))


def test_weights_that_are_standardised_by_batch_norm():
    """As vision models do: of a weight, statistics over what looks like a batch are its own."""

    def forward(s, x):
        weight = F.batch_norm(s.c.weight.reshape(1, 3, -1), None, None, training=True, momentum=0.0).reshape_as(s.c.weight)
        return F.conv2d(x, weight, s.c.bias).flatten(1)

    assert_exact(Net(forward, c=nn.Conv2d(2, 3, 2)), examples(5, 2, 4, 4))
