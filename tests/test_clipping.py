"""Norms to weights: each clipping by its own formula, on explicit per-example gradients."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from clipwise.testing import loop_gradients, squared_output
from helpers import ALL_METHODS, examples


def model():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 3))).double()


def expected(gradients, groups, scale):
    """{name: Σ_i scale(‖g_i in its group‖, bound)·g_i}"""
    out = {}
    for names, bound in groups:
        norms = torch.stack([gradients[name].flatten(1).square().sum(1) for name in names]).sum(0).sqrt()
        for name in names:
            out[name] = torch.einsum("b,b...->...", scale(norms, bound), gradients[name])
    return out


def clip(norms, bound):
    return (bound / norms).clamp(max=1)


LAYERS = [["0.weight", "0.bias"], ["2.0.weight", "2.0.bias"], ["2.1.weight", "2.1.bias"]]
EVERYTHING = [name for layer in LAYERS for name in layer]
CASES = {
    "flat": (cw.flat(0.6), [(EVERYTHING, 0.6)], clip, 0.6),
    "per layer": (cw.per_layer(0.6), [(layer, 0.6 / math.sqrt(3)) for layer in LAYERS], clip, 0.6),
    "per group": (
        cw.per_group({"0.*": 0.3, "*.bias": 0.2, "*": 0.5}),
        [(LAYERS[0], 0.3), (["2.0.bias", "2.1.bias"], 0.2), (["2.0.weight", "2.1.weight"], 0.5)],
        clip,
        math.sqrt(0.3**2 + 0.2**2 + 0.5**2),
    ),
    "automatic": (cw.automatic(0.6, stability=0.1), [(EVERYTHING, 0.6)], lambda norms, bound: bound / (norms + 0.1), 0.6),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_weights_follow_the_formula(name, method):
    clipping, groups, scale, sensitivity = CASES[name]
    net, x = model(), examples(6, 4)
    reference = expected(loop_gradients(net, (x,)), groups, scale)
    with cw.capture(net) as tape:
        losses = squared_output(net(x))
    found = cw.clipped_gradients(tape, losses, clipping, method=method)
    for parameter, value in reference.items():
        torch.testing.assert_close(found[parameter], value)
    assert clipping.sensitivity == pytest.approx(sensitivity)


@given(norms=st.lists(st.floats(0, 1e12), min_size=1, max_size=8), bound=st.floats(1e-3, 1e3))
def test_no_weight_lets_more_than_the_bound_through(norms, bound):
    norms = torch.tensor(norms, dtype=torch.float64)
    for clipping in (cw.flat(bound), cw.automatic(bound)):
        weights, finite = clipping.weights({"w": norms.square()}, ["w"])
        assert bool(finite.all())
        assert (weights["w"] * norms <= bound * (1 + 1e-12)).all()
    assert (cw.flat(bound).weights({"w": norms.square()}, ["w"])[0]["w"] <= 1).all()


def test_one_bad_group_silences_the_example_everywhere():
    squares = {"a": torch.tensor([1.0, float("nan"), 1.0]), "b": torch.tensor([1.0, 1.0, float("inf")])}
    weights, finite = cw.per_group({"a": 1.0, "b": 1.0}).weights(squares, ["a", "b"])
    assert finite.tolist() == [True, False, False]
    assert weights["a"].tolist() == weights["b"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("bound", [0, -1.0, float("nan"), float("inf"), "1", None, True])
@pytest.mark.parametrize("make", [cw.flat, cw.per_layer, cw.automatic, lambda bound: cw.per_group({"*": bound})])
def test_impossible_bounds_are_refused(bound, make):
    with pytest.raises(cw.BadClipping, match="positive"):
        make(bound)


def test_patterns_must_fit():
    net = model()
    for bounds, message in (
        ({"encoder.*": 1.0, "*": 1.0}, "gets no parameter"),
        ({"0.*": 1.0}, "no pattern of per_group matches the parameter 2.0"),
    ):
        with cw.capture(net) as tape:
            losses = squared_output(net(examples(4, 4)))
        with pytest.raises(cw.BadClipping, match=message):
            cw.clipped_loss(tape, losses, cw.per_group(bounds))
        cw.clipped_loss(tape, losses, cw.flat(1.0))  # nothing was lost
    with pytest.raises(cw.BadClipping, match="at least one pattern"):
        cw.per_group({})


def test_a_clipping_is_a_value():
    assert cw.flat(1.0) == cw.flat(1.0) != cw.flat(2.0)
    assert hash(cw.per_group({"*": 1.0})) == hash(cw.per_group({"*": 1.0}))
    with pytest.raises(AttributeError):
        cw.flat(1.0).bound = 2.0
