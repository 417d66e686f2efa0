"""The tail of an eager step as a program in stages: same numbers, nothing taken for granted that may change. Runs on a CPU as on a GPU."""

import gc
import itertools
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import planner, tracing
from clipwise.compiled import arrivals, in_place, programs, staged, stages, tails
from clipwise.compiled.stages import Stages
from clipwise.compiled.trace import graph_of
from clipwise.compiled.views import memory_of, written_by
from clipwise.experience import experience_of
from clipwise.methods.base import Clipped
from clipwise.models import Transformer, cnn, mlp
from clipwise.registry import Use
from helpers import Net, examples
from test_tail import Positions, assert_same, losses_of, step, without_tail, words

STEPS = 20  # a program is there after twelve, and held against the eager step once more after the sixteenth


@pytest.fixture
def replays(monkeypatch):
    """Lets a CPU pretend to record stages. One entry a replay."""
    made = []

    def recorded(run, given, device, pool):
        outputs = list(run(*given))

        def replay():
            made.append(run)
            for mine, new in zip(outputs, run(*given)):
                mine.copy_(new)

        return replay, outputs

    monkeypatch.setattr(in_place, "recorded_in_passing", recorded)
    return made


@pytest.fixture
def runs(monkeypatch, replays):
    """Every model is too large to be recorded, and a CPU does what a GPU does. One entry a run."""
    made = []
    honest = staged.Staged.__call__
    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})
    monkeypatch.setattr(tails, "room_for_recording", lambda device, parameters: 0)
    monkeypatch.setattr(staged.Staged, "__call__", lambda self, *args: made.append(self) or honest(self, *args))
    return made


MODELS = {
    "mlp": (lambda: mlp(12, (8, 9), 3), lambda n: examples(n, 12)),
    "cnn": (lambda: cnn(1, 16, 3), lambda n: examples(n, 1, 16, 16)),
    "transformer": (lambda: Transformer(torch.randn(20, 8), 3, heads=2, hidden=12, longest=8), words),
    "positions": (Positions, words),
    "overlapping slices": (
        lambda: Net(
            lambda s, x: F.linear(x[:, :3], s.w[:, :3]) + F.linear(x[:, 1:4], s.w[:, 1:4]) + s.a(x),
            w=nn.Parameter(torch.randn(3, 4)),
            a=nn.Linear(12, 3),
        ),
        lambda n: examples(n, 12),
    ),
    "a slice and the whole": (
        lambda: Net(lambda s, x: F.linear(x[:, :3], s.w[:, :3]) + F.linear(x[:, 4:8], s.w), w=nn.Parameter(torch.randn(3, 4))),
        lambda n: examples(n, 12),
    ),
    "padded patches": (
        lambda: Net(lambda s, x: s.b(s.c(x).flatten(2).mean(2)), c=nn.Conv1d(8, 8, 2, stride=2, groups=8, padding=1), b=nn.Linear(8, 3)),
        lambda n: examples(n, 8, 6),
    ),
    "frozen statistics": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)).eval(),
        lambda n: examples(n, 2, 6, 6),
    ),
}


@pytest.mark.parametrize("small", [0, stages._SMALL], ids=["in stages", "at the end"])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_every_step(name, small, runs, replays, monkeypatch):
    monkeypatch.setattr(stages, "_SMALL", small)
    build, inputs = MODELS[name]
    model = build().double()
    for number in range(STEPS):
        size = 7 if number % 7 == 6 else 9
        x, y = inputs(size), torch.randint(0, 3, (size,))
        found, losses = step(model, x, y)
        assert_same(found, without_tail(model, x, y))
        assert torch.allclose(found.value(losses), (found.weights * losses).sum())
    assert len(runs) >= 4 and replays


def begun(model, inputs=lambda n: examples(n, 12), size=9):
    """Step until there is a program."""
    for _ in range(STEPS):
        step(model, inputs(size), torch.randint(0, 3, (size,)))
    return next(kind.programs for kind in experience_of([model]).tails.kinds.values() if kind.programs.made)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_counts_for_nothing(bad, runs):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)).double()
    begun(model, lambda n: examples(n, 2, 6, 6))
    count = len(runs)
    x, y = examples(9, 2, 6, 6), torch.randint(0, 3, (9,))
    x[4, 1] = bad
    found, _ = step(model, x, y)
    assert_same(found, without_tail(model, x, y))
    assert not found.finite[4] and int(found.finite.sum()) == 8 and len(runs) == count + 1


def test_numbers_of_rows_are_read_anew(runs):
    model = Positions().double()
    begun(model, words)
    for model.start in (12, 21):
        count = len(runs)
        x, y = words(9), torch.randint(0, 3, (9,))
        found, _ = step(model, x, y)
        assert_same(found, without_tail(model, x, y))
        reached = found.sums["places.weight"].abs().sum(1) > 0
        assert reached.tolist() == [model.start <= place < model.start + 5 for place in range(30)] and len(runs) == count + 1


def changed(change):
    model = Net(
        lambda s, x: s.b(F.layer_norm(s.a(x), (8,), s.w, None, s.eps)), a=nn.Linear(12, 8), b=nn.Linear(8, 3), w=nn.Parameter(torch.ones(8))
    )
    model.eps = 1e-5
    return model.double(), change


def _another_weight(model):
    model.b = nn.Linear(8, 3).double()


def _another_number(model):
    model.eps = 1e-2


def _frozen(model):
    model.a.weight.requires_grad_(False)


@pytest.mark.parametrize("change", [_another_weight, _another_number, _frozen])
def test_what_changes_is_noticed(change, runs):
    model, _ = changed(change)
    begun(model)
    count = len(runs)
    change(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert len(runs) == count


def test_sequences_of_another_length(runs):
    model = Net(lambda s, x: s.b(s.a(x).tanh().mean(1)), a=nn.Linear(12, 8), b=nn.Linear(8, 3)).double()
    begun(model, lambda n: examples(n, 5, 12))
    count = len(runs)
    for length in (7, 3):
        x, y = examples(9, length, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert len(runs) == count


def test_a_number_that_no_trail_shows(runs):
    """Sizes are left out of the path by which steps are told apart; here one of them is a rule's business."""
    model = Net(
        lambda s, x: s.b(F.layer_norm(s.a(x), s.shape, s.w)),
        a=nn.Linear(12, 16),
        b=nn.Linear(16, 3),
        w=nn.Parameter(torch.ones(16)),
        shape=(16,),
    )
    model = model.double()
    program = next(iter(begun(model).made.values()))
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    with cw.capture(model) as tape:
        losses = losses_of(model, x, y)
    layouts = {record().key: program._layouts[program._place[record().key]] for record in tape.taps}
    assert program.fits(tape, losses, layouts)
    record = next(record() for record in tape.taps if record().use.func is F.layer_norm)
    use = record.use
    record.use = Use(use.func, (use.args[0], (4, 4), *use.args[2:]), use.kwargs, use.tracked)
    assert not program.fits(tape, losses, layouts)


def test_a_program_that_is_wrong_is_not_used(runs, monkeypatch):
    honest = staged.graph_of

    def off(function, inputs, **options):
        return honest(lambda *given: [1.2 * out if out.dim() > 1 else out for out in function(*given)], inputs, **options)

    monkeypatch.setattr(staged, "graph_of", off)
    model = MODELS["frozen statistics"][0]().double()
    for _ in range(STEPS):
        x, y = examples(9, 2, 6, 6), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert not runs


def test_a_program_that_turns_out_wrong_is_left(runs, monkeypatch):
    """After each verification it is held against the eager step again, before it is used."""
    model = mlp(12, (8, 9), 3).double()
    found = begun(model)
    monkeypatch.setattr(staged, "are_same", lambda *args: False)
    for _ in range(STEPS):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
        if found.made:
            count = len(runs)
    assert experience_of([model]).steps > 33 and not found.made and len(runs) == count


class Losses(nn.Module):
    """Two heads of one shape, one or both of which are trained."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.a(x).tanh()
        return self.b(hidden), self.c(hidden)


def test_heads_that_look_alike(runs):
    model = Losses().double()

    def sums(x, y, number):
        with cw.capture(model) as tape:
            losses = F.cross_entropy(model(x)[number % 2], y, reduction="none")
        return cw.clipped_gradients(tape, losses, cw.flat(0.3))

    for number in range(2 * STEPS):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        found = sums(x, y, number)
        devices, tracing.DEVICES = tracing.DEVICES, set()
        expected = sums(x, y, number)
        tracing.DEVICES = devices
        assert found.keys() == expected.keys() and ("b.weight" in found) == (number % 2 == 0)
        assert all(torch.allclose(found[name], total, rtol=1e-9, atol=1e-12) for name, total in expected.items())
    assert len(set(runs)) == 2


def test_a_small_parameter_or_a_norm_that_is_wrong_is_noticed():
    """In a step its gradient may be the largest."""
    names, weights, finite = ("large", "small"), torch.ones(4), torch.ones(4, dtype=torch.bool)
    sums, squares = {"large": torch.full((50, 50), 10.0), "small": torch.ones(2)}, torch.ones(2, 4, dtype=torch.float64)

    def same(squares_found=squares, weights_found=weights, **changed):
        found = arrivals.Measured(Clipped({name: changed.get(name, sums[name]) for name in names}, weights_found, finite), squares_found)
        return arrivals.are_same(found, arrivals.Measured(Clipped(sums, weights, finite), squares), torch.float32)

    assert same() and same(small=sums["small"] * 1.001)
    assert not same(small=torch.zeros(2)) and not same(large=sums["large"] * 1.1)
    assert not same(torch.ones(2, 4).index_fill(0, torch.tensor(1), 0.0).double()) and not same(weights_found=weights * 0.9)


def test_a_program_that_fits_no_more_takes_no_other_with_it(runs, monkeypatch):
    """Also where no further one is made."""
    model = mlp(12, (8, 9), 3).double()
    for _ in range(2):
        begun(model, size=9)
        found = begun(model, size=7)
    assert {size for size, _ in found.made} == {7, 9}
    found.attempts = programs._MOST
    with monkeypatch.context() as patched:
        patched.setattr(staged.Staged, "fits", lambda *args: False)
        step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    assert {size for size, _ in found.made} == {7}


def test_no_room_to_try_it_out(runs, monkeypatch):
    monkeypatch.setattr(programs, "room_for_trial", lambda device: 3000)
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    assert not runs
    assert planner.room_for_trial(torch.device("cpu")) > 0


def test_a_tap_that_hears_nothing_this_time(runs):
    """A function of the user's may hand back no gradient at all, as the data says: then nothing is made of the step, and none after it fails."""

    class Fickle(torch.autograd.Function):
        silent = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None if Fickle.silent else grad

    model = Net(lambda s, x: s.b(x) + Fickle.apply(s.a(x)), a=nn.Linear(12, 3), b=nn.Linear(12, 3)).double()
    begun(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    Fickle.silent = True
    with pytest.raises(cw.ConsumedTape, match="reached other calls"):
        step(model, x, y)
    found, _ = step(model, x, y)
    assert set(found.sums) == {"b.weight", "b.bias"}
    assert_same(found, without_tail(model, x, y))


def test_a_function_of_the_users_that_is_called_like_ours(runs):
    class Tap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    model = Net(lambda s, x: s.b(Tap.apply(s.a(x).tanh())), a=nn.Linear(12, 8), b=nn.Linear(8, 3)).double()
    begun(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert runs


def test_rows_of_a_user_who_mixes_them_are_refused(runs):
    model = Net(lambda s, x: s.a(x - x.mean(0)) if s.mixes else s.a(x), a=nn.Linear(12, 3), mixes=False).double()
    begun(model)
    model.mixes = True
    with pytest.raises(cw.MixedExamples):
        for _ in range(STEPS):
            step(model, examples(9, 12), torch.randint(0, 3, (9,)))


def test_a_whole_training_has_the_numbers_of_the_eager_one(runs, monkeypatch):
    def trained():
        torch.manual_seed(3)
        model = cnn(1, 16, 3).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plan = cw.PrivacyPlan(dataset_size=60, batch_size=9, steps=30, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=0.5)
        private = cw.PrivateTraining(model, optimizer, plan, own_batches=True, noise=cw.reproducible(5))
        for _ in range(STEPS):
            private.loss(losses_of(model, examples(9, 1, 16, 16), torch.randint(0, 3, (9,)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        private.close()
        assert experience_of([model]).tails is None
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found = trained()
    assert runs
    monkeypatch.setattr(tracing, "DEVICES", set())
    expected = trained()
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


def test_a_step_leaves_nothing_behind(runs):
    """The gradients that reached the taps are gone with the step, without the garbage collector."""
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    seen = []
    gc.disable()
    try:
        with cw.capture(model) as tape:
            output = model(examples(9, 12))
            output.grad_fn.register_prehook(lambda grads: seen.append(weakref.ref(grads[0])) and None)
            losses = F.cross_entropy(output, torch.randint(0, 3, (9,)), reduction="none")
        cw.clipped_gradients(tape, losses, cw.flat(0.3))
        del output, losses, tape
        assert seen and seen[0]() is None
    finally:
        gc.enable()


def traced(function, *inputs):
    with torch._subclasses.fake_tensor.FakeTensorMode():
        stand_ins = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype) for one in inputs]
    return graph_of(function, stand_ins, in_steps=True)


def test_stages_in_any_order_let_go_of_what_is_not_needed(monkeypatch):
    monkeypatch.setattr(stages, "_SMALL", 0)

    def function(a, b, c):
        return [(a @ a.mT).sum(1) * b, b.sin().cos() + c]

    inputs = [torch.randn(4, 3), torch.randn(4), torch.randn(4)]
    program = Stages(traced(function, *inputs), [1, 1, 1])
    for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0]):
        running = program.begin()
        for number, place in enumerate(order):
            assert running.outputs() is None
            running.give(place, [inputs[place]])
            if order == [0, 1, 2] and number == 0:
                assert [tuple(value.shape) for value in running._values.values()] == [(4,)]  # not the matrix
        assert all(map(torch.equal, running.outputs(), function(*inputs)))
        assert len(running._values) == 2


def test_what_a_stage_makes_at_once_is_known_before_it_runs():
    def function(a, b):
        doubled = a * 2
        sine = doubled.view(10, 100).sin()  # and the double is gone
        return [sine.sum() + b, sine[0] + b]

    first, last = Stages(traced(function, torch.randn(1000), torch.randn(())), [1, 1])._stages
    assert first.makes_at_once == 0 and last.makes_at_once == 4 * (1000 + 1000)
    kept = Stages(traced(lambda a: [a * 2, (a * 3).sin().sum()], torch.randn(1000)), [1])._stages
    assert kept[0].makes_at_once == 4 * (1000 + 1000 + 1000)


def test_what_is_written_to_is_read_before_and_after_as_it_was():
    """b comes last, and is added to what `a` was before c is written there."""

    def function(a, c, b):
        memory = a * 2
        early, part = memory + b, memory[1:]
        part.add_(c[1:])
        return [early, memory * 3, part.clone()]

    inputs = [torch.randn(4) for _ in range(3)]
    running = Stages(traced(function, *inputs), [1, 1, 1]).begin()
    for place, tensor in enumerate(inputs):
        running.give(place, [tensor])
    assert all(map(torch.equal, running.outputs(), function(*inputs)))


@pytest.mark.parametrize("view", ["view", "as_strided", "t"])
def test_what_is_written_through_a_view_is_read_after_it(view):
    """Nothing but the memory they share tells that one comes before the other."""

    def function(a, c, b):
        memory = a * 2
        part = {"view": memory.view(2, 8), "as_strided": memory.as_strided((2, 4), (8, 1), 4), "t": memory.t()}[view]
        part.add_(c.view(-1)[: part.numel()].view(part.shape))
        return [memory.square().sum(), memory.view(16) + b]

    inputs = [torch.randn(4, 4), torch.randn(4, 4), torch.randn(16)]
    running = Stages(traced(function, *inputs), [1, 1, 1]).begin()
    for place, tensor in enumerate(inputs):
        running.give(place, [tensor])
    assert all(map(torch.equal, running.outputs(), function(*inputs)))


def test_views_by_strides_of_what_was_computed_are_left_alone():
    def function(a, c):
        turned = (a * 2).as_strided((2, 2), (1, 2))
        return [turned.unsqueeze(0) + c, turned.unsqueeze(0).squeeze(0) * c, a.as_strided((2,), (1,), 2).view(1, 2).exp()]

    inputs = [torch.randn(4), torch.randn(2, 2)]
    running = Stages(traced(function, *inputs), [1, 1]).begin()
    for place, tensor in enumerate(inputs):
        running.give(place, [tensor])
    assert all(map(torch.equal, running.outputs(), function(*inputs)))


def test_views_are_shortened_and_stay_what_they_are():
    def function(x, y):
        turned = x.transpose(0, 1).reshape(6, 4).view(2, 3, 4).mT.unsqueeze(0).flatten(0, 1)
        part = x[1].mT[2:]
        same = (y.view(3, 4).view(12) + 1).view(4, 3).view(2, 6)
        return [turned.mul(2), part.exp(), same, y.view(3, 4).view(12).sin(), y.view(12).sin(), x.expand(5, 2, 3, 4).sum(0)]

    whole = torch.randn(3, 4, 2, 4)
    for x in (torch.randn(2, 3, 4), torch.randn(4, 3, 2).permute(2, 1, 0), whole[:, 1].transpose(0, 1)[:, :, :]):
        inputs = [x, torch.randn(12)]
        graph = traced(function, *inputs)
        before = len(graph.graph.nodes)
        running = Stages(graph, [2]).begin()
        running.give(0, inputs)
        assert all(map(torch.equal, running.outputs(), function(*inputs)))
        assert len(graph.graph.nodes) < before


def test_a_gradient_laid_out_otherwise_is_copied():
    like = staged.Like.of(torch.empty(3, 4))
    turned = torch.randn(4, 3).t()
    assert torch.equal(like.laid_out(turned), turned) and like.laid_out(turned).stride() == (4, 1)
    straight = torch.randn(3, 4)
    assert like.laid_out(straight) is straight
    repeated = staged.Like.of(torch.zeros(()).expand(3, 4))
    assert repeated.stride == (4, 1) and repeated.nbytes == 48


def test_what_is_written_elsewhere_lies_there():
    """mul(a, b, out=c) gives c, not a."""

    def function(a, b):
        scaled = torch.empty_like(a)
        product = torch.mul(a, b, out=scaled)
        return [product + 1, scaled * 2, a.sin()]

    graph = traced(function, torch.randn(3), torch.randn(3))
    memory = memory_of(list(graph.graph.nodes))
    (node,) = [node for node in memory if written_by(node)]
    assert memory[node] is written_by(node)[0] and memory[node].op == "call_function"


def test_results_of_several_leave_their_stage_one_by_one(monkeypatch):
    monkeypatch.setattr(stages, "_SMALL", 0)

    def function(a, b):
        largest, places = (a @ a.mT).max(1)
        return [largest * b, places]

    inputs = [torch.randn(4, 3), torch.randn(4)]
    program = Stages(traced(function, *inputs), [1, 1])
    running = program.begin()
    running.give(0, inputs[:1])
    assert {type(value) for value in running._values.values()} == {torch.Tensor}
    running.give(1, inputs[1:])
    assert all(map(torch.equal, running.outputs(), function(*inputs)))


def test_what_lets_go_of_nothing_waits_for_the_end():
    """Kernels that are started together, as one graph, take the processor less time."""
    large = torch.zeros(600, 600)

    def function(a, b, c):
        return [a.sum(1), a.mT @ b, a @ c]  # only `b` is not needed to the last

    program = Stages(traced(function, large, large, torch.zeros(600)), [1, 1, 1])
    assert [stage.run is None for stage in program._stages] == [True, False, False]
    assert [len(stage.last) for stage in program._stages][:2] == [0, 1]


def test_constants_are_read_before_they_are_written_to():
    def function(a, b):
        zeros, numbers = torch.zeros(3), torch.arange(3.0)
        both = zeros + numbers
        zeros.add_(a)
        return [zeros * b, both * b]

    assert_runs(function, [torch.randn(3), torch.randn(3)])


def test_what_is_returned_is_nobody_elses():
    def function(a, b):
        return [a.new_zeros(3), b.new_zeros(3), a * b]

    first, second, _ = assert_runs(function, [torch.randn(3), torch.randn(3)])
    assert first is not second


def assert_runs(function, inputs, room=None):
    """As a program, each input a group, it gives what the function gives."""
    program = Stages(traced(function, *inputs), [1] * len(inputs), room)
    for order in itertools.permutations(range(len(inputs))):
        running = program.begin()
        for place in order:
            running.give(place, [inputs[place]])
        found = running.outputs()
        assert all(map(torch.allclose, found, function(*inputs)))
    return found
