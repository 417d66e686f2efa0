"""Normalisation layers, against a float64 loop."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from clipwise.testing import clip_and_add, loop_gradients
from helpers import ALL_METHODS, Net, assert_exact, clipped, examples


def shaken(module):
    """Scales and shifts away from one and zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


@given(
    middle=st.lists(st.integers(1, 3), max_size=2),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=2),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_layer_norm(middle, shape, bias, dtype):
    model = Net(lambda s, x: torch.sin(s.a(x)), a=shaken(nn.LayerNorm(shape, bias=bias)))
    assert_exact(model, examples(4, *middle, *shape), dtype=dtype)


dtypes = st.sampled_from([torch.float64, torch.float32])


@given(middle=st.lists(st.integers(1, 3), max_size=2), width=st.integers(1, 5), eps=st.sampled_from([None, 1e-3]), dtype=dtypes)
def test_rms_norm(middle, width, eps, dtype):
    model = Net(lambda s, x: torch.sin(s.a(x)), a=shaken(nn.RMSNorm(width, eps=eps)))
    assert_exact(model, examples(4, *middle, width), dtype=dtype)


@given(space=st.lists(st.integers(2, 3), max_size=3), groups=st.sampled_from([1, 2]), dtype=dtypes)
def test_group_norm(space, groups, dtype):
    model = Net(lambda s, x: torch.sin(s.a(x)), a=shaken(nn.GroupNorm(groups, 4)))
    assert_exact(model, examples(4, 4, *space), dtype=dtype)


INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


@given(
    space=st.lists(st.integers(2, 4), min_size=1, max_size=3), channels=st.integers(1, 4), eps=st.sampled_from([1e-5, 0.1]), dtype=dtypes
)
def test_instance_norm(space, channels, eps, dtype):
    layer = shaken(INSTANCE[len(space)](channels, affine=True, eps=eps))
    assert_exact(Net(lambda s, x: torch.sin(s.a(x)), a=layer), examples(4, channels, *space), dtype=dtype, tolerance=CONDITION.get(dtype))


# Normalising four nearly equal numbers amplifies rounding of the input: float32 is as good as PyTorch's own forward, not better.
CONDITION = {torch.float32: 1e-4}

FAR_FROM_ZERO = {
    "layer norm": (lambda: nn.LayerNorm(6), ()),
    "layer norm of a sequence": (lambda: nn.LayerNorm(6), (4,)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (2, 2)),
    "group norm without space": (lambda: nn.GroupNorm(2, 6), ()),
    "instance norm": (lambda: nn.InstanceNorm1d(6, affine=True), (4,)),
}


@pytest.mark.parametrize("offset", [100.0, 3000.0])
@pytest.mark.parametrize("layer", FAR_FROM_ZERO)
def test_inputs_far_from_zero(layer, offset):
    """autograd subtracts sums that are as large as the inputs: what it rounds there is no fault of the rule's, but counts for a second pass."""
    build, space = FAR_FROM_ZERO[layer]
    x = torch.randn(5, *space, 6) if layer.startswith("layer") else torch.randn(5, 6, *space)
    model = Net(lambda s, x: torch.sin(s.a(x)), a=shaken(build()))
    assert_exact(model, (x + offset).float(), dtype=torch.float32, methods=["bookkeep"], tolerance=1e-6 * offset)
    assert_exact(model, (x + offset).float(), dtype=torch.float32, methods=["reweight"], tolerance=3e-5 * offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_one_number(dtype):
    """They are normalised to zero, so that the scale has no gradient; autograd's own is what it rounds."""
    model = nn.Sequential(nn.Linear(4, 6), shaken(nn.GroupNorm(6, 6)), nn.Linear(6, 3)).to(dtype)
    norms, found = clipped(model, [torch.randn(5, 4, dtype=dtype)], 1.0)
    assert torch.equal(found["1.weight"], torch.zeros_like(found["1.weight"]))
    assert bool((norms > 0).all())


WITHOUT_PARAMETERS = {
    "layer norm": (lambda: nn.LayerNorm(6, elementwise_affine=False), ()),
    "rms norm": (lambda: nn.RMSNorm(6, elementwise_affine=False), ()),
    "group norm": (lambda: nn.GroupNorm(2, 6, affine=False), (3,)),
    "instance norm": (lambda: nn.InstanceNorm1d(6), (3,)),
    "frozen batch norm": (lambda: frozen(nn.BatchNorm1d(6, affine=False), affine=False), ()),
}


@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_norms_without_parameters_let_gradients_through(name):
    build, space = WITHOUT_PARAMETERS[name]
    model = Net(lambda s, x: torch.sin(s.n(s.a(x).unflatten(-1, (6, *space)))), a=nn.Linear(4, 6 * (space or (1,))[0]), n=build())
    if not space:
        model._forward = lambda s, x: torch.sin(s.n(s.a(x)))
    assert_exact(model, examples(4, 4), methods=ALL_METHODS)


def frozen(layer, *, affine):
    with torch.no_grad():
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 2.0)
    shaken(layer).requires_grad_(affine)
    return layer.eval()


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("layer", "space"), [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (5,)), (nn.BatchNorm2d, (3, 4)), (nn.BatchNorm3d, (2, 3, 2))]
)
def test_frozen_batch_norm(layer, space, affine):
    model = Net(lambda s, x: torch.sin(s.b(s.a * x)), a=nn.Parameter(torch.randn(3, *[1] * len(space))), b=frozen(layer(3), affine=affine))
    assert_exact(model, examples(4, 3, *space), methods=ALL_METHODS)


FROZEN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


@given(space=st.lists(st.integers(1, 3), max_size=3), channels=st.integers(1, 4), eps=st.sampled_from([1e-5, 0.1]), dtype=dtypes)
def test_frozen_batch_norm_of_any_size(space, channels, eps, dtype):
    layer = frozen(FROZEN[len(space)](channels, eps=eps), affine=True)
    assert_exact(Net(lambda s, x: torch.sin(s.a(x)), a=layer), examples(4, channels, *space), dtype=dtype)


def test_instance_norm_in_evaluation_mode_uses_running_statistics():
    layer = frozen(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), affine=True)
    assert_exact(Net(lambda s, x: torch.sin(s.a(x)), a=layer), examples(4, 3, 3, 4))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_in_training_mode_is_refused(affine, track):
    model = nn.Sequential(nn.BatchNorm1d(3, affine=affine, track_running_stats=track), nn.Linear(3, 2))
    with pytest.raises(cw.MixedExamples, match="whole batch"), cw.capture(model):
        model(torch.randn(4, 3))


def test_a_refused_batch_norm_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3)))
    with pytest.raises(cw.MixedExamples, match=r"in 1\.0"), cw.capture(model):
        model(torch.randn(4, 3))


def test_batch_norm_without_statistics_is_refused_in_evaluation_mode_too():
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2)).eval()
    with pytest.raises(cw.MixedExamples), cw.capture(model):
        model(torch.randn(4, 3))


def test_running_statistics_of_instance_norm_are_refused():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, track_running_stats=True))
    with pytest.raises(cw.StateWrite, match="running"), cw.capture(model):
        model(torch.randn(4, 1, 5, 5))


def test_functional_norms_with_only_a_bias():
    model = Net(lambda s, x: torch.sin(F.layer_norm(x, (3,), bias=s.b)), b=nn.Parameter(torch.randn(3)))
    assert_exact(model, examples(4, 2, 3))


SCALE_IS_SHIFT = {
    "layer norm": lambda s, x: F.layer_norm(F.linear(x, s.w), (4,), s.v, s.v),
    "layer norm by name": lambda s, x: F.layer_norm(F.linear(x, s.w), (4,), bias=s.v, weight=s.v),
    "group norm": lambda s, x: F.group_norm(F.linear(x, s.w), 2, s.v, s.v),
    "batch norm": lambda s, x: F.batch_norm(F.linear(x, s.w), torch.zeros(4).to(x), torch.ones(4).to(x), s.v, s.v),
    "instance norm": lambda s, x: F.instance_norm(
        F.linear(x, s.w).unsqueeze(2).repeat(1, 1, 3) * torch.arange(3).to(x), weight=s.v, bias=s.v
    ),
}


@pytest.mark.parametrize("name", SCALE_IS_SHIFT)
def test_one_weight_as_scale_and_shift(name):
    """Both uses count, in every precision: under bf16 nothing else would notice."""
    model = Net(SCALE_IS_SHIFT[name], w=nn.Parameter(torch.randn(4, 4)), v=nn.Parameter(torch.randn(4)))
    x = examples(6, 4)
    assert_exact(model, x)
    assert_exact(model, x, dtype=torch.float32)
    norms = clip_and_add(loop_gradients(copy.deepcopy(model).double(), [x]), 1.0)[1]
    for _ in range(3):
        found, _ = clipped(model, [x.float()], 1.0, context=lambda: torch.autocast("cpu", torch.bfloat16))
        torch.testing.assert_close(found.double(), norms, rtol=0.05, atol=0)
