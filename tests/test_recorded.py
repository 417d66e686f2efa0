"""Noise and optimizer as a recorded graph. Graphs need a GPU (test_cuda.py); here a stand-in runs what would be replayed."""

import copy
import sys

import pytest
import torch
from torch import nn

import clipwise as cw
import graph_like
from clipwise import tracing
from clipwise.compiled import recording, update, variant
from clipwise.compiled.optimizers import Numbers, for_a_graph
from helpers import examples
from test_compiled import RECORDS, begun, built, plan_for, train

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining", "ignore:Detected call of")

MLP = lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class FixedOutputs:
    """Like a replayed graph: every call leaves its results in the same tensors."""

    def __init__(self, run, inputs, *, first, last):
        self._run, self._outputs = run, [output.clone() for output in run(*inputs)]

    def __call__(self, *inputs):
        for mine, new in zip(self._outputs, self._run(*inputs)):
            mine.copy_(new)
        return self._outputs


@pytest.fixture(autouse=True)
def recordings(monkeypatch):
    """Lets a CPU pretend to record. Returns one entry for each recording of an update."""
    made = []

    def captured(run, device, generators=()):
        replay = graph_like.captured(run, device, generators)
        made.append(list(generators))
        return replay

    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})
    monkeypatch.setattr(variant, "Recording", FixedOutputs)
    monkeypatch.setattr(update, "captured", captured)
    monkeypatch.setattr(update, "captured_in_passing", captured)
    for name in ("adam", "rmsprop"):
        monkeypatch.setattr(sys.modules[f"torch.optim.{name}"], "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    return made


def trained_eagerly(*args, **options):
    """By a loop in which nothing is recorded (test_in_loop.py has those in which something is)."""
    devices, tracing.DEVICES = tracing.DEVICES, set()
    try:
        return train(*args, compiled=False, **options)[0]
    finally:
        tracing.DEVICES = devices


def assert_same(optimizer, *, tolerance=1e-9, steps=12, dtype=torch.float64, **options):
    x = examples(RECORDS, 4).to(dtype)
    eager = {key: value for key, value in options.items() if key != "rows"}
    expected = trained_eagerly(built(MLP).to(dtype), x, optimizer=optimizer, steps=steps, **eager)
    found, step, private = train(built(MLP).to(dtype), x, optimizer=optimizer, steps=steps, **options)
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    return step, private


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "groups": lambda p: torch.optim.Adam([{"params": (p := list(p))[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_numbers_of_the_eager_loop(name, recordings):
    assert_same(OPTIMIZERS[name])
    assert len(recordings) == 1


FUSED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "as asked": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "not wanted": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "several groups": lambda p: torch.optim.Adam([{"params": (p := list(p))[:1], "lr": 0.1}, {"params": p[1:]}], lr=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": OPTIMIZERS["momentum"],
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_graph_takes_one_kernel_where_torch_may_choose(name, recordings, monkeypatch):
    """The eager steps in between, on which the model is verified, go on with the same state."""
    kernels = []
    for kernel in (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_):
        monkeypatch.setattr(torch, kernel.__name__, lambda *args, run=kernel, **kwargs: (kernels.append(run), run(*args, **kwargs))[1])
    x = examples(RECORDS, 4).float()
    expected = trained_eagerly(built(MLP).float(), x, optimizer=FUSED[name], steps=12)
    kernels.clear()
    found, _, private = train(built(MLP).float(), x, optimizer=FUSED[name], steps=12)
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
    assert len(recordings) == 1 and bool(kernels) == (name != "not wanted")
    [optimizer] = private._updates.optimizers
    assert all(group["fused"] == (True if name == "as asked" else None) for group in optimizer.param_groups)  # as it was


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_what_torch_would_choose_it_still_may(name, recordings, monkeypatch):
    """Where no fused kernel is taken nothing is said about it: fused=False would keep torch from its kernels for several tensors."""
    seen, kind = [], type(OPTIMIZERS[name]([torch.zeros(1, requires_grad=True)]))
    step = kind.step
    monkeypatch.setattr(
        kind, "step", lambda self, *args: (seen.append({group["fused"] for group in self.param_groups}), step(self, *args))[1]
    )
    assert_same(OPTIMIZERS[name])  # in float64
    assert seen and all(fused == {None} for fused in seen)


def test_parameters_in_bf16_are_updated_as_eagerly(recordings, monkeypatch):
    """A fused kernel rounds once where others round several times."""
    monkeypatch.setattr(torch, "_fused_adam_", None)
    x = examples(RECORDS, 4).bfloat16()
    losses_of = lambda model, x, y: nn.functional.cross_entropy(model(x).float(), y, reduction="none")
    train(built(MLP).bfloat16(), x, optimizer=OPTIMIZERS["adam"], losses_of=losses_of)


def test_a_recording_that_is_made_again_does_not_see_the_callers_autocast(monkeypatch):
    """Weights that have moved are noticed when the step is called, inside whatever block the caller is in."""
    seen = []
    recorded = object.__new__(recording.Recording)
    recorded._first, recorded._last, recorded._places, recorded._inputs, recorded._steady = 1, 1, [0], [torch.zeros(2)], []
    recorded._replay, recorded._outputs = (lambda: None), []
    monkeypatch.setattr(
        recording.Recording, "_record", lambda self, inputs: seen.append((torch.is_autocast_enabled("cpu"), inputs[0].requires_grad))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorded(torch.zeros(2, requires_grad=True))
    assert seen == [(False, False)]


def test_generators_of_a_graph_begin_where_nobody_can_know():
    """Torch gives every new one the same seed; noise that was drawn before another is set would be known to all."""
    made = [update._Registered([("noise", False), ("by a kernel", True)], torch.device("cpu")) for _ in range(2)]
    seeds = [(one.generators["noise"].initial_seed(), int(one.seed("by a kernel", 0))) for one in made]
    assert len({torch.Generator().initial_seed(), 0, *seeds[0], *seeds[1]}) == 6


def test_several_rounds_and_several_optimizers(recordings):
    assert_same(OPTIMIZERS["adam"], rows=5)
    assert len(recordings) == 1
    x = examples(RECORDS, 4)
    found = []
    for compiled in (False, True):
        model = built(MLP)
        optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]
        private = cw.PrivateTraining(model, optimizers, plan_for(12), noise=cw.reproducible(3), own_batches=True)
        losses_of = lambda model, x: model(x).square().sum(1)
        step = private.compile(losses_of, rows=12, backend="eager")
        for k in range(12):
            batch = x[12 * k : 12 * k + 12].clone()
            if compiled:
                step(batch)
                continue
            private.loss(losses_of(model, batch)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        private.close()
    assert len(recordings) == 3 and float((found[1] - found[0]).norm()) <= 1e-9 * float(found[0].norm())


@pytest.mark.parametrize(
    "name, dtype, expected",
    [("adam", torch.float64, 1), ("momentum", torch.float64, 4), ("momentum", torch.float32, 1), ("rmsprop", torch.float32, 4)],
)
def test_learning_rates_that_move(name, dtype, expected, recordings):
    """Adam's is an input of the graph, as is SGD's where its step is one kernel; another optimizer is recorded anew."""
    schedulers = {}
    after = lambda optimizer: schedulers.setdefault(id(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)).step()
    assert_same(OPTIMIZERS[name], dtype=dtype, tolerance=1e-9 if dtype == torch.float64 else 1e-5, after=after, steps=20)
    assert len(recordings) == expected


def test_parameters_that_become_wide_after_the_beginning_do_not_leave_a_rate_behind(recordings):
    """SGD's kernels for float64 would fetch the rate to the host, where a graph cannot follow: it is never taken for the first one's."""
    model = built(MLP).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = Numbers(optimizer)
    assert numbers.rates_may_move
    model.double()
    with for_a_graph(optimizer, [torch.zeros((), device="meta")]), pytest.raises(RuntimeError, match="meta"):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def test_an_optimizer_that_changes_with_every_step_runs_eagerly_in_the_end(recordings):
    def after(optimizer):
        optimizer.param_groups[0]["lr"] *= 0.99

    assert_same(OPTIMIZERS["sgd"], after=after, steps=40)
    assert len(recordings) == update._MOST_RECORDINGS


def test_numbers_and_state_that_are_exchanged_are_followed(recordings):
    seen = []

    def after(optimizer):
        seen.append(optimizer)
        if len(seen) == 10:
            optimizer.param_groups[0]["weight_decay"] = 0.1
        if len(seen) == 12:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # other tensors

    x = examples(RECORDS, 4)
    expected = trained_eagerly(built(MLP), x, optimizer=OPTIMIZERS["adam"], steps=15, after=after)
    seen.clear()
    found, _, _ = train(built(MLP), x, optimizer=OPTIMIZERS["adam"], steps=15, after=after)
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm()) and len(recordings) == 3
    (optimizer,) = set(seen)
    assert optimizer.param_groups[0]["capturable"] is False and optimizer.param_groups[0]["lr"] == 0.01


def steady(model, **options):
    """A compiled step whose update is recorded, of batches that the caller makes."""
    step, private = begun(model, **options)
    x = examples(12, 4)
    for _ in range(9):
        step(x.clone(), torch.arange(12) % 3)
    assert step._recorded[0]._found
    return step, private, lambda: step(x.clone(), torch.arange(12) % 3)


def test_noise_is_new_in_every_replay_and_does_not_follow_the_global_seed(recordings):
    model = built(MLP)
    _, private, go = steady(model)
    model[0].weight.requires_grad_(True)
    moves = []
    for _ in range(6):
        torch.manual_seed(0)
        before = model[0].weight.detach().clone()
        go()
        moves.append(model[0].weight.detach() - before)
    assert all(float((a - b).norm()) > 1e-3 for i, a in enumerate(moves) for b in moves[:i])
    state = torch.get_rng_state()
    go()
    assert torch.equal(torch.get_rng_state(), state) and len(recordings) == 1 and len(recordings[0]) == 1
    private.close()


def test_noise_has_the_size_of_the_plan(recordings):
    """Losses of hardly any gradient: what moves the weights is noise alone, lr·z·C/B̄."""
    model = nn.Linear(100, 100).double()
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), plan_for(40), own_batches=True)
    step = private.compile(lambda model, x: model(x).sum(1) * 1e-9, rows=12, backend="eager")
    for _ in range(12):
        before = model.weight.detach().clone()
        step(examples(12, 100))
    move = (model.weight.detach() - before).flatten()
    assert recordings and abs(float(move.std()) / (1.0 * 0.3 / 12) - 1) < 0.03
    private.close()


def test_the_ledger_counts_before_the_replay():
    model = built(MLP)
    step, private, go = steady(model)
    [now], spent = step._recorded[0]._found.values(), []
    object.__setattr__(now, "replay", lambda: spent.append(private.ledger.spent))
    before = private.ledger.spent
    go()
    assert spent == [before + 1]
    private.close()


def test_weights_that_a_replay_changes_have_another_version():
    model = built(MLP)
    step, private, go = steady(model)
    object.__setattr__(*step._recorded[0]._found.values(), "replay", lambda: None)
    before = [p._version for p in model.parameters()]
    go()
    assert all(p._version > version for p, version in zip(model.parameters(), before)) and model[0].weight.grad is None
    private.close()


def test_a_foreign_gradient_is_refused_also_by_the_step_that_records(recordings):
    model = built(MLP)
    step, private = begun(model)
    with pytest.raises(cw.ForeignGradient):
        for _ in range(12):
            if private.ledger.spent > 4 and step.graphs.variants:
                model[0].weight.grad = torch.ones_like(model[0].weight)
            step(examples(12, 4), torch.arange(12) % 3)
    assert len(recordings) == 1
    private.close()


def test_hooks_and_penalties_are_heard(recordings):
    """Whoever listens to the step hears every one; then it is made eagerly."""
    model = built(MLP)
    step, private = begun(model)
    heard = []
    (optimizer,) = step._updates.optimizers
    optimizer.register_step_post_hook(lambda *_: heard.append(1))
    for _ in range(9):
        step(examples(12, 4), torch.arange(12) % 3)
    assert len(heard) == 9 and not recordings
    private.close()
    step, private = begun(built(MLP))
    private.regularizer(lambda: step._training.model[0].weight.square().sum())
    for _ in range(9):
        step(examples(12, 4), torch.arange(12) % 3)
    assert step.graphs.variants and not recordings
    private.close()


@pytest.mark.parametrize("noise", ["secure", "fast"])
def test_what_no_graph_can_do_is_done_eagerly(noise, recordings):
    model = built(MLP)
    optimizer = cw.DPAdamBC(model.parameters()) if noise == "fast" else torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.PrivateTraining(model, optimizer, plan_for(40), own_batches=True, noise=noise)
    step = private.compile(lambda model, x: model(x).square().sum(1), rows=12, backend="eager")
    for _ in range(9):
        step(examples(12, 4))
    assert step.graphs.variants and not recordings
    private.close()


def go(optimizer, *, model=None, steps=9, each=None, plan=None):
    """A compiled step of batches that the caller makes, after some steps."""
    model = model or built(MLP)
    optimizer = optimizer(model)
    private = cw.PrivateTraining(model, optimizer, plan or plan_for(60), own_batches=True)
    step = private.compile(lambda model, x: model(x).square().sum(1), rows=12, backend="eager")
    for number in range(steps):
        if each is not None:
            each(number, optimizer)
        step(examples(12, 4))
    return step, private, model, optimizer


@pytest.mark.parametrize(
    "make", [lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), lambda m: torch.optim.Adam(m.parameters(), lr=0.01)]
)
def test_state_that_is_missing_is_made_by_an_eager_step(make, recordings, monkeypatch):
    """Inside a graph it would begin anew with every replay; on a GPU it would not even be written."""
    step, private, _, optimizer = go(make, steps=9, each=lambda number, optimizer: optimizer.state.clear())
    assert not recordings
    for _ in range(4):
        step(examples(12, 4))
    assert len(recordings) == 1 and step._recorded[0]._left == update._MOST_RECORDINGS - 1

    def interrupted(run, device, generators=()):
        optimizer.state[nn.Parameter(torch.zeros(1))] = {"step": torch.zeros(())}
        raise RuntimeError("no graph today")

    monkeypatch.setattr(update, "captured", interrupted)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.warns(UserWarning, match="not part of the graph: RuntimeError: no graph today"):
        step(examples(12, 4))
    assert len(optimizer.state) == 4 and optimizer.param_groups[0]["lr"] == 0.01
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(count.dtype == torch.float32 for count in steps)  # back on the host, as the optimizer made them
    private.close()


def test_a_step_that_failed_does_not_count_twice(recordings, monkeypatch):
    """What was clipped waits in tensors that the next replay writes over."""
    model = nn.Linear(4, 1, bias=False).double()
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(60), own_batches=True)
    step = private.compile(lambda model, x: 100 * model(x).sum(1), rows=12, backend="eager")
    for _ in range(9):
        step(examples(12, 4))
    real = private._progress.count
    monkeypatch.setattr(private._progress, "count", lambda draw: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError):
        step(torch.ones(12, 4).double())
    monkeypatch.setattr(private._progress, "count", real)
    released = []
    release = update.Recorded.release
    monkeypatch.setattr(update.Recorded, "release", lambda self, *told: (released.append(self.held[-1].clone()), release(self, *told)))
    with pytest.raises(cw.WrongDraw, match="has not been released"):
        step(-torch.ones(5, 4).double())
    private.discard()
    step(-torch.ones(5, 4).double())
    assert abs(float(released[0].norm()) - 0.3 * 5) < 1e-9
    private.close()


def test_gradients_of_frozen_parameters_are_not_taken_up(recordings):
    model = built(MLP)
    model[0].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = model[0].weight.detach().clone()

    def each(number, optimizer):
        model[0].weight.grad = torch.ones_like(before)

    _, private, _, _ = go(lambda m: torch.optim.SGD(m.parameters(), lr=1.0), model=model, each=each)
    assert recordings and torch.equal(model[0].weight, before)
    private.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_learning_rates_in_tensors_are_followed(kind, recordings):
    def each(number, optimizer):
        optimizer.param_groups[0]["lr"].mul_(0.5)

    _, private, _, _ = go(lambda m: kind(m.parameters(), lr=torch.tensor(0.1), foreach=False), each=each, steps=12)
    assert len(recordings) > 3
    private.close()


def test_a_learning_rate_of_one_entry(recordings):
    _, private, _, _ = go(lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor([0.01]), foreach=False), steps=12)
    assert len(recordings) == 1 and private.ledger.spent == 12
    private.close()


def test_a_parameter_that_changes_its_group_is_noticed(recordings):
    def each(number, optimizer):
        if number == 10:
            first, second = optimizer.param_groups
            first["params"].append(second["params"].pop(0))

    make = lambda m: torch.optim.SGD([{"params": [m[0].weight]}, {"params": [m[0].bias, *m[2].parameters()], "lr": 0.5}], lr=0.1)
    _, private, _, _ = go(make, each=each, steps=13)
    assert len(recordings) == 2
    private.close()


def test_a_step_that_was_wrapped_is_called_every_time(recordings):
    calls = []

    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = optimizer.step
        optimizer.step = lambda *args, **kwargs: (calls.append(1), own(*args, **kwargs))
        return optimizer

    _, private, _, _ = go(make, steps=12)
    assert len(calls) == 12 and not recordings
    private.close()
