"""Ways that are timed: once for each shape, whatever is chosen gives the same norms and sums."""

import contextlib

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise import kernels, tracing, trials
from clipwise.factors import Convolution, FactorSum, Geometry, Outer, Rows
from clipwise.factors import ways as ways_module
from clipwise.methods.multiloss import multiloss_alone
from clipwise.planner import MemoryBudget
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import OUT_OF_MEMORY, Net, examples

CPU = torch.device("cpu")
B = 6


@pytest.fixture
def timed(monkeypatch):
    """Times ways on a CPU too, by a clock that says what the test wants. Returns {way: seconds}, and what was run."""
    seconds, runs = {}, []

    def clock(run, device):
        run()
        runs.append(1)
        return seconds.get(len(runs), 1.0)

    monkeypatch.setattr(trials, "DEVICES", {"cpu"})
    monkeypatch.setattr(ways_module, "TRIALS", trials.Trials())
    monkeypatch.setattr(trials, "_seconds", clock)
    return seconds, runs


def convolution(**options):
    geometry = Geometry((2, 1), (1, 2), (1, 2), **options)
    module = nn.Conv2d(4, 6, (3, 2), geometry.stride, geometry.padding, geometry.dilation, geometry.groups).double()
    x = examples(B, 4, 9, 8)
    return Convolution.of_rows(torch.randn_like(module(x)), x, module.weight.shape, geometry)


FACTORS = {
    "sequence": lambda: [Outer(examples(B, 7, 3), examples(B, 7, 5))],
    "used twice": lambda: [Outer(examples(B, 7, 3), examples(B, 7, 5)), Outer(examples(B, 2, 3), examples(B, 2, 5))],
    "tied": lambda: [Outer(examples(B, 7, 9), examples(B, 7, 5)), Rows(torch.randint(0, 9, (B, 4)), examples(B, 4, 5), torch.Size((9, 5)))],
    "convolution": convolution,
    "grouped": lambda: convolution(groups=2),
}


def total_of(name):
    factors = FACTORS[name]()
    return FactorSum(factors if isinstance(factors, list) else [factors])


@pytest.mark.parametrize("name", FACTORS)
def test_every_way_that_may_be_chosen_is_right(name, timed):
    total = total_of(name)
    dense = total.dense()
    weights = torch.rand(B, dtype=torch.float64)
    total.measure(MemoryBudget())
    (tried,) = ways_module.TRIALS.outcomes.values()
    (names,) = tried.values()
    assert len(names) >= (4 if isinstance(total.factors[0], Convolution) else 3)
    for way in names:
        again = FactorSum(total.factors)
        squares = again.measured_by(way).now()
        torch.testing.assert_close(squares, dense.flatten(1).square().sum(1), rtol=1e-9, atol=0)
        torch.testing.assert_close(again.weighted_sum(weights), torch.einsum("b,b...->...", weights, dense), rtol=1e-9, atol=1e-12)


def in_float32(factor):
    if isinstance(factor, Convolution):
        return Convolution(factor.grad.float(), factor.input.float(), factor.shape, factor.geometry)
    return Outer(factor.left.float(), factor.right.float(), factor.shape, groups=True)


@pytest.fixture
def interpreted(timed, monkeypatch):
    """Kernels on a CPU, by Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU kernels are compiled")
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    return timed


def transposed():
    geometry = Geometry((2, 1), (1, 0), (1, 2), 2, True, (1, 0))
    module = nn.ConvTranspose2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 0), 2, dilation=(1, 2)).double()
    x = examples(B, 4, 5, 4)
    return Convolution.of_rows(torch.randn_like(module(x)), x, module.weight.shape, geometry)


@pytest.mark.parametrize(
    "make", [convolution, lambda: convolution(groups=2), transposed, FACTORS["sequence"]], ids=["plain", "grouped", "transposed", "outer"]
)
def test_kernels_are_candidates_and_agree_with_their_twins(make, interpreted, monkeypatch):
    monkeypatch.setattr(ways_module, "CONVOLUTION_TILES", (16,))  # test_kernels.py tries other sizes
    monkeypatch.setattr(ways_module, "OUTER_TILES", (32,))
    monkeypatch.setattr(ways_module, "GRAM_TILES", {torch.float32: (64,)})
    made = make()
    exact = (made[0] if isinstance(made, list) else made).examples(0, 2)
    total = FactorSum([in_float32(exact)])
    total.measure(MemoryBudget())
    ((seconds,),) = [list(found.values()) for found in ways_module.TRIALS.outcomes.values()]
    names = [name for name in seconds if "kernel" in name]
    grams = int(exact.blocks == 1)
    assert len(names) == (1 if isinstance(exact, Outer) else 2) + grams and all(seconds[name] < float("inf") for name in names)
    weights = torch.rand(2)
    for name in names:
        again = FactorSum(total.factors)
        squares, dense = again.measured_by(name).now(), exact.dense()
        true = dense.flatten(1).square().sum(1)
        assert bool((squares >= true * (1 - 1e-6)).all()) and bool((squares <= true * (1 + 1e-3)).all())
        found = again.weighted_sum(weights)
        torch.testing.assert_close(found.double(), torch.einsum("b,b...->...", weights.double(), dense), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fault", ["wrong", "raises"])
def test_a_kernel_that_disagrees_with_its_twin_or_fails_is_left_out(fault, interpreted, monkeypatch):
    def faulty(self, tile, keep=False):
        if fault == "raises":
            raise RuntimeError("no such instruction")
        return torch.ones(B, dtype=torch.float64), None

    monkeypatch.undo()
    monkeypatch.setattr(trials, "DEVICES", {"cpu"})
    monkeypatch.setattr(ways_module, "TRIALS", trials.Trials())
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    monkeypatch.setattr(Outer, "by_kernel", faulty)
    monkeypatch.setattr(ways_module, "GRAM_TILES", {})
    total = FactorSum([in_float32(FACTORS["sequence"]()[0])])
    with pytest.warns(UserWarning, match="no such instruction" if fault == "raises" else "other norms than its plain twin"):
        total.measure(MemoryBudget())
    assert "kernel" not in total.way


def test_a_network_is_clipped_right_by_kernels(interpreted, monkeypatch):
    monkeypatch.setattr(ways_module, "CONVOLUTION_TILES", (16,))
    seconds, _ = interpreted
    seconds.update(dict.fromkeys(range(5, 60), 0.0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(2), nn.Linear(36, 3))
    x = examples(5, 2, 8, 8).float()
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
    expected, _ = clip_and_add(loop_gradients(model, [x.double()]), 0.5)
    for name, total in found.items():
        torch.testing.assert_close(total.double(), expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fastest", range(1, 4))
def test_the_fastest_way_is_taken_and_tried_once_for_a_shape(fastest, timed):
    seconds, runs = timed
    seconds[fastest] = 0.5
    found = []
    for batch in (6, 8, 5, 20):
        total = FactorSum([Outer(examples(batch, 7, 3), examples(batch, 7, 5))])
        total.measure(MemoryBudget())
        found.append(total.way)
    assert found[:3] == [["keep", "tiles", "gram"][fastest - 1]] * 3
    assert len(runs) == 6  # batches of up to eight, and of up to 32
    FactorSum([Outer(examples(6, 7, 3), examples(6, 7, 4))]).measure(MemoryBudget())
    assert len(runs) == 9


@pytest.mark.parametrize("fault", [False, True])
def test_without_room_a_kernel_is_tried_before_it_is_believed(fault, interpreted, monkeypatch):
    monkeypatch.undo()
    for module in (trials, kernels):
        monkeypatch.setattr(module, "DEVICES", {"cpu"})
    monkeypatch.setattr(ways_module, "TRIALS", trials.Trials())
    monkeypatch.setattr(ways_module, "GRAM_TILES", {})
    monkeypatch.setattr(ways_module, "OUTER_TILES", (32,))
    if fault:
        monkeypatch.setattr(Outer, "by_kernel", lambda self, tile, keep=False: (torch.ones(2, dtype=torch.float64), None))
    total = FactorSum([Outer(torch.randn(2, 40, 20), torch.randn(2, 40, 24))])
    with pytest.warns(UserWarning, match="other norms") if fault else contextlib.nullcontext():
        total.measure(MemoryBudget(left=0))
    assert total.way == ("tiles" if fault else "kernel of 32") and (total.seconds is None) == fault


def test_what_is_written_out_for_a_moment_needs_room_too(timed):
    """Where there is none, ways that write nothing out are all that is left."""
    for room, way in ((20_000, "gram"), (10**6, "keep")):
        total = FactorSum([Outer(examples(6, 7, 30), examples(6, 7, 50))])  # 72 kB at once, its products 5 kB
        total.measure(MemoryBudget(left=room))
        assert total.way == way


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_a_way_that_runs_out_of_memory_is_left_out(error, monkeypatch):
    monkeypatch.setattr(trials, "DEVICES", {"cpu"})

    def too_large():
        raise error

    found = trials.Trials().fastest("x", 4, {"keep": too_large, "tiles": lambda: None}, "keep", CPU)
    assert found[0] == "tiles" and found[1] >= 0
    assert trials.Trials().fastest("x", 4, {"keep": too_large, "tiles": too_large}, "keep", CPU) == ("keep", None)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_a_kernel_that_runs_out_of_memory_is_not_said_to_be_wrong(error, monkeypatch):
    def too_large(total, way):
        raise error

    monkeypatch.setattr(FactorSum, "measured_by", too_large)
    with pytest.raises(type(error)) as raised:
        ways_module._checked(FactorSum([Outer(examples(2, 3, 4), examples(2, 3, 5))]), "kernel of 32")
    assert raised.value is error


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_a_pass_that_runs_out_of_memory_is_not_made_once_more_for_each_example(error, monkeypatch):
    """Which is for operations that cannot be batched, and takes the same memory."""
    model, calls = Net(lambda s, x: s.a(x), a=nn.Linear(4, 3)).double(), []

    def too_large(*args, **options):
        calls.append(options)
        raise error

    losses = squared_output(model(examples(3, 4)))
    monkeypatch.setattr(torch.autograd, "grad", too_large)
    with pytest.raises(type(error)):
        multiloss_alone(model, losses, cw.flat(1.0))
    assert len(calls) == 1


def test_rules_decide_where_nothing_may_be_timed(timed):
    _, runs = timed
    ways = {"keep": lambda: None, "tiles": lambda: None}
    assert trials.Trials().fastest("x", 4, ways, "tiles", torch.device("meta")) == ("tiles", None)
    torch.use_deterministic_algorithms(True)
    try:
        assert trials.Trials().fastest("x", 4, ways, "tiles", CPU) == ("tiles", None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not runs


def test_a_graph_takes_what_was_found_for_batches_of_its_size_and_stays_with_it(timed):
    seconds, runs = timed
    found = trials.Trials()
    ways = {"keep": lambda: None, "tiles": lambda: None}
    with tracing.tracing():
        assert found.fastest("unseen", 4, ways, "tiles", CPU) == ("tiles", None)
    seconds.update({2: 0.1, 3: 0.1})  # up to 4: tiles; up to 64: keep
    assert found.fastest("x", 4, ways, "keep", CPU) == ("tiles", 0.1)
    assert found.fastest("x", 50, ways, "tiles", CPU) == ("keep", 0.1)
    with tracing.tracing():
        assert found.fastest("x", 6, ways, "keep", CPU)[0] == "tiles"
        assert found.fastest("x", 40, ways, "tiles", CPU)[0] == "keep"
        assert found.fastest("unseen", 4, ways, "keep", CPU) == ("tiles", None)
    assert len(runs) == 4


def test_a_network_is_clipped_right_by_whatever_is_fastest(timed):
    seconds, _ = timed
    seconds.update({number: 1 / (1 + number * 7 % 5) for number in range(1, 40)})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(1), nn.Linear(64, 3)).double()
    x = examples(5, 2, 8, 8)
    for _ in range(4):
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
    expected, _ = clip_and_add(loop_gradients(model, [x]), 0.5)
    for name, total in found.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=1e-12)


def test_lengths_that_vary_from_batch_to_batch_are_not_all_tried(timed):
    """Text is padded to the longest of a batch: about as long is as good."""
    _, runs = timed
    tried = []
    for terms in (100, 128, 97, 120, 129):
        FactorSum([Outer(examples(6, terms, 3), examples(6, terms, 5))]).measure(MemoryBudget())
        tried.append(len(runs))
    first = tried[0]
    assert first > 1 and tried == [first] * 4 + [2 * first]
