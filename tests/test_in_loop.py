"""Noise and optimizer of an eager loop by one replay, out of the hook before step(). Graphs need a GPU (test_cuda.py); here a stand-in replays."""

import copy
import types
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import clipwise as cw
import graph_like
from clipwise import noise, tracing
from clipwise.compiled import in_loop, sums_room, update
from helpers import examples
from test_compiled import RECORDS, built, plan_for, train
from test_recorded import MLP, OPTIMIZERS, recordings, trained_eagerly  # noqa: F401  (a fixture that records here too)

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining", "ignore:Detected call of")

ALL = {
    **OPTIMIZERS,
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
}


@pytest.fixture(autouse=True)
def devices_for_all(monkeypatch):
    """Which torch's optimizers compute for a graph on: a CPU, too."""
    for name in ("adadelta", "adamax", "asgd", "radam", "rprop"):
        module = __import__(f"torch.optim.{name}", fromlist=["x"])
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"], raising=False)


@pytest.mark.parametrize("name", ALL)
def test_the_numbers_of_a_loop_without_recordings(name, recordings):  # noqa: F811
    x = examples(RECORDS, 4)
    expected = trained_eagerly(built(MLP), x, optimizer=ALL[name], steps=20)
    assert not recordings
    found, _, private = train(built(MLP), x, compiled=False, optimizer=ALL[name], steps=20)
    assert len(recordings) == 1
    tolerance = 1e-6 if name == "asgd" else 1e-9  # which keeps its rate in float32, computed by tensors in a graph and by Python elsewhere
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    assert private.spent().steps == 20


def test_learning_rates_bounds_and_state_that_change(recordings):  # noqa: F811
    """A schedule, a bound that follows the norms, and other tensors in the optimizer's state."""
    x, seen = examples(RECORDS, 4), []

    def after(optimizer):
        seen.append(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.9
        if len(seen) == 14:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    options = dict(optimizer=OPTIMIZERS["adam"], steps=24, after=after)
    adaptive = plan_for(24, clipping=cw.adaptive(0.3))
    expected = trained_eagerly(built(MLP), x, plan=adaptive, **options)
    seen.clear()
    found, _, private = train(built(MLP), x, compiled=False, plan=adaptive, **options)
    assert len(recordings) == 2 and private.clipping.sensitivity != 0.3
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


def begun(model, optimizer, **options):
    """A training with a step of it that the test takes, after so many that its update is recorded."""
    private, x = cw.PrivateTraining(model, optimizer, plan_for(80), own_batches=True, **options), examples(12, 4)

    def go(step=True):
        private.loss(model(x.clone()).square().sum(1)).backward()
        if step:
            optimizer.step()

    for _ in range(10):
        go()
        optimizer.zero_grad()
    return private, go


def test_after_a_step_p_grad_is_what_was_released(recordings, monkeypatch):  # noqa: F811
    """The same as after a step that was made eagerly; a tensor of one's own, which later steps leave alone."""
    found = []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(tracing, "DEVICES", devices)
        model = built(MLP)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private, go = begun(model, optimizer, noise=cw.reproducible(5))
        before = [p.detach().clone() for p in model.parameters()]
        go()
        mine = [p.grad for p in model.parameters()]
        kept = [grad.clone() for grad in mine]
        assert all(torch.allclose(b - 0.1 * g, p, atol=1e-12) for b, g, p in zip(before, mine, model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            go()
        assert all(map(torch.equal, mine, kept)) and all(p.grad is not g for p, g in zip(model.parameters(), mine))
        found.append(kept)
        private.close()
    assert len(recordings) == 1 and all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(*found))


def test_a_step_reads_nothing_of_the_one_before(recordings, monkeypatch):  # noqa: F811
    """What is released is written over the sums. A parameter that the losses no longer reach gets noise alone."""
    monkeypatch.setattr(noise, "_chunks", lambda parameters: ([place] for place in range(len(parameters))))
    model = nn.ModuleDict({"one": nn.Linear(4, 3, bias=False), "two": nn.Linear(4, 3, bias=False)}).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = cw.PrivacyPlan(
        dataset_size=1000, batch_size=12, steps=40, delta=1e-5, clipping=cw.flat(100.0), noise_multiplier=1e-9
    )  # all but no noise
    private = cw.PrivateTraining([model["one"], model["two"]], optimizer, plan, own_batches=True)
    for number in range(16):
        batch, before = examples(12, 4), [p.detach().clone() for p in model.parameters()]
        both = number % 2 == 0
        losses = model["one"](batch).sum(1) + (model["two"](batch).sum(1) if both else 0)
        private.loss(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        move = (batch.sum(0) / 12).expand(3, 4)
        for parameter, old, reached in zip(model.parameters(), before, (True, both)):
            assert torch.allclose(old - parameter, move * reached, atol=1e-6), number
    assert len(recordings) == 1
    private.close()


def test_microbatches_and_several_optimizers(recordings):  # noqa: F811
    x, found = examples(RECORDS, 4), []
    for recorded in (False, True):
        tracing.DEVICES = {"cpu"} if recorded else set()  # the fixture puts it back
        model = built(MLP)
        optimizers = [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.1)]
        private = cw.PrivateTraining(model, optimizers, plan_for(20), noise=cw.reproducible(3), own_batches=True)
        for k in range(20):
            for part in x[12 * (k % 8) : 12 * (k % 8) + 12].clone().chunk(3):
                private.loss(model(part).square().sum(1)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        private.close()
    assert len(recordings) == 2 and float((found[1] - found[0]).norm()) <= 1e-9 * float(found[0].norm())


def test_refusals_are_those_of_every_step(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    assert len(recordings) == 1
    spent, weights = private.ledger.spent, [p.detach().clone() for p in model.parameters()]
    with pytest.raises(cw.NothingClipped, match="nothing clipped"):
        optimizer.step()
    go(step=False)
    model[0].weight.grad.mul_(2)
    with pytest.raises(cw.ForeignGradient):
        optimizer.step()
    private.discard()
    optimizer.zero_grad()
    go(step=False)
    with pytest.raises(cw.NothingClipped, match="closure"):
        optimizer.step(lambda: 0.0)
    assert private.ledger.spent == spent and all(map(torch.equal, weights, model.parameters()))
    optimizer.step()
    with pytest.raises(cw.NothingClipped, match="nothing clipped"):
        optimizer.step()
    assert private.ledger.spent == spent + 1
    private.close()


def interrupt(private, number, *, after):
    """The next replay is interrupted, after it has moved the weights or before."""
    [now] = private._in_loop[number]._update._found.values()
    replay, spent = now.replay, []

    def interrupted():
        object.__setattr__(now, "replay", replay)
        spent.append(private.ledger.spent)
        if after:
            replay()
        raise KeyboardInterrupt

    object.__setattr__(now, "replay", interrupted)
    return spent


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("sampler", ["poisson", "shuffle"])
def test_a_step_that_is_interrupted_is_not_taken_twice(after, sampler, recordings):  # noqa: F811
    """It was counted first; whether the weights have moved nobody can tell, and with new noise they must not move again for the same draw."""
    model, data = built(MLP), torch.utils.data.TensorDataset(examples(RECORDS, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.PrivateTraining(model, optimizer, plan_for(30, sampler=sampler), noise=cw.reproducible(3))
    batches = (batch for _ in range(9) for batch in private.loader(data))
    for step, (x,) in enumerate(batches):
        private.loss(model(x).square().sum(1)).backward()
        if step == 12:
            before, weights = private.ledger.spent, model[0].weight.detach().clone()
            spent = interrupt(private, 0, after=after)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            assert spent == [before + 1] and torch.equal(model[0].weight, weights) != after
            weights = model[0].weight.detach().clone()
            with pytest.raises(cw.NothingClipped):
                optimizer.step()
            assert torch.equal(model[0].weight, weights) and private.ledger.spent == before + 1
        else:
            optimizer.step()
        optimizer.zero_grad()
        if step == 14:
            break
    assert private.ledger.spent == 15 and len(recordings) == 1
    private.close()


def test_of_several_optimizers_one_that_was_interrupted_steps_no_more(recordings):  # noqa: F811
    model = built(MLP)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    private = cw.PrivateTraining(model, optimizers, plan_for(30), own_batches=True)
    for step in range(14):
        private.loss(model(examples(12, 4)).square().sum(1)).backward()
        optimizers[0].step()
        if step == 12:
            interrupt(private, 1, after=True)
            with pytest.raises(KeyboardInterrupt):
                optimizers[1].step()
            weights = model[2].weight.detach().clone()
            with pytest.raises(cw.NothingClipped):
                optimizers[1].step()
            assert torch.equal(model[2].weight, weights)
        else:
            optimizers[1].step()
        model.zero_grad()
    assert private.ledger.spent == 14 and len(recordings) == 2
    private.close()


def test_losses_that_reach_no_parameter_of_an_optimizer(recordings):  # noqa: F811
    """Its parameters get noise alone."""
    modules = [nn.Linear(4, 3).double(), nn.Linear(4, 3).double()]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    private = cw.PrivateTraining(modules, optimizers, plan_for(30), own_batches=True)
    for step in range(14):
        x, before = examples(12, 4), modules[1].weight.detach().clone()
        losses = modules[0](x).square().sum(1)
        private.loss(losses if step > 10 else losses + modules[1](x).square().sum(1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(modules[1].weight, before)
    assert private.ledger.spent == 14 and len(recordings) == 2
    private.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_a_tape_that_is_still_on_has_nothing_to_do_with_the_step(recorded, recordings, monkeypatch):  # noqa: F811
    """Somebody looks at the model with gradients enabled between backward() and step()."""
    monkeypatch.setattr(tracing, "DEVICES", {"cpu"} if recorded else set())
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    for _ in range(3):
        go(step=False)
        seen, before = model(examples(5, 4)), model[0].weight.detach().clone()
        optimizer.step()
        assert not torch.equal(model[0].weight, before) and model[0].weight.grad is not None and seen.requires_grad
        optimizer.zero_grad()
    assert private.ledger.spent == 13 and len(recordings) == int(recorded)
    private.close()


def changed_on_the_way(change, *, optimizer=OPTIMIZERS["adam"], build=MLP, dtype=torch.float64, steps=24):
    """A training in which `change(model, optimizer)` happens after the 14th step; its weights, and those of one in which nothing is recorded."""
    x, found = examples(RECORDS, 4).to(dtype), []
    for devices in (set(), {"cpu"}):
        tracing.DEVICES, seen, model = devices, [], built(build).to(dtype)  # the fixture puts it back

        def after(one, model=model, seen=seen):
            seen.append(one)
            if len(seen) == 14:
                change(model, one)

        losses_of = lambda model, x, y: model(x).double().square().sum(1)
        weights, _, private = train(model, x, compiled=False, optimizer=optimizer, steps=steps, after=after, losses_of=losses_of)
        found.append((weights.double(), private))
    (expected, _), (weights, private) = found
    return float((weights - expected).norm() / expected.norm()), private


SQUARE = lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def transposed(model, optimizer):
    model[0].weight.data = model[0].weight.data.t()


def halved(model, optimizer):
    """In another precision, with hooks that make up for it."""
    model[2].to(torch.float32)
    model[2].register_forward_pre_hook(lambda module, args: (args[0].float(),))
    optimizer.state.clear()


@pytest.mark.parametrize("change", [transposed, halved])
def test_parameters_that_lie_otherwise_are_recorded_anew(change, recordings):  # noqa: F811
    difference, _ = changed_on_the_way(change, build=SQUARE)
    assert difference <= 1e-6 and len(recordings) == 2


def test_a_scaler_that_was_not_declared_is_not_part_of_a_recording(recordings):  # noqa: F811
    def scaled(model, optimizer):
        optimizer.grad_scale, optimizer.found_inf = torch.full((), 65536.0), torch.zeros(())

    difference, _ = changed_on_the_way(scaled, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    assert difference <= 1e-9 and len(recordings) == 1


def test_a_step_of_ones_own_under_a_scheduler_runs_once(recordings):  # noqa: F811
    averages = []

    def optimizer(parameters):
        made, average = torch.optim.SGD(parameters, lr=0.1), []
        step = made.step.__func__

        def and_average(self, closure=None):
            step(self, closure)
            average.append(float(self.param_groups[0]["params"][0].detach().norm()))

        made.step = types.MethodType(and_average, made)
        torch.optim.lr_scheduler.StepLR(made, 100)
        averages.append(average)
        return made

    difference, _ = changed_on_the_way(lambda *_: None, optimizer=optimizer)
    assert difference <= 1e-9 and not recordings and [len(average) for average in averages] == [24, 24]


def test_numbers_that_change_with_every_step_are_not_recorded(recordings):  # noqa: F811
    """Each recording would be used once."""
    x, options = examples(RECORDS, 4), dict(optimizer=OPTIMIZERS["momentum"], steps=24)

    def after(one):
        one.param_groups[0]["momentum"] *= 0.99

    expected = trained_eagerly(built(MLP), x, after=after, **options)
    found, _, _ = train(built(MLP), x, compiled=False, after=after, **options)
    assert not recordings and torch.equal(found, expected)


def test_little_is_held(recordings, monkeypatch):  # noqa: F811
    """The last recording, and nothing once there will be no other."""
    rooms = []
    room_for_sums = sums_room.room_for_sums
    monkeypatch.setattr(
        sums_room, "room_for_sums", lambda parameters: [rooms.append(weakref.ref(t)) or t for t in room_for_sums(parameters)]
    )
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    for number in range(40):
        if number % 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        go()
        optimizer.zero_grad()
        [mine] = private._in_loop.values()
        assert len(mine._update._found) <= 1
    assert len(recordings) == update._MOST_RECORDINGS and not mine._update._found
    assert rooms and not any(room() is not None for room in rooms)
    steps = {(state["step"].dtype, state["step"].device.type) for state in optimizer.state.values()}
    assert steps == {(torch.float32, "cpu")}
    private.close()
    rooms.clear()
    model = built(MLP)
    private, _ = begun(model, torch.optim.Adagrad(model.parameters(), lr=0.01))
    assert not rooms
    private.close()


@pytest.mark.parametrize("how", ["closed", "hook", "regularizer", "compiled"])
def test_an_optimizer_is_left_as_torch_has_it(how, recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    private, go = begun(model, optimizer)
    counts = lambda: {(state["step"].dtype, float(state["step"])) for state in optimizer.state.values()}
    assert counts() == {(torch.float64, 10.0)}
    if how == "closed":
        private.close()
    elif how == "hook":
        optimizer.register_step_post_hook(lambda *_: None)
    elif how == "regularizer":
        private.regularizer(lambda: 1e-3 * model[0].weight.square().sum())
    else:
        private.compile(lambda model, x: model(x).sum(1), backend="eager")
    if how in ("hook", "regularizer"):
        go()
    assert counts() == {(torch.float32, 11.0 if how in ("hook", "regularizer") else 10.0)}
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    private.close()


def test_noise_is_new_in_every_step_and_does_not_follow_the_global_seed(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private, go = begun(model, optimizer)
    moves = []
    for _ in range(6):
        torch.manual_seed(0)
        before = model[0].weight.detach().clone()
        go()
        optimizer.zero_grad()
        moves.append(model[0].weight.detach() - before)
    assert all(float((a - b).norm()) > 1e-3 for i, a in enumerate(moves) for b in moves[:i])
    state = torch.get_rng_state()
    go()
    assert torch.equal(torch.get_rng_state(), state) and len(recordings) == 1
    private.close()


def test_frozen_parameters_stay(recordings):  # noqa: F811
    """Also with a gradient of somebody's left in p.grad. A layer that is frozen on the way is recorded anew without it."""
    model = built(MLP)
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, go = begun(model, optimizer)
    bias = model[0].bias.detach().clone()
    model[0].bias.grad = torch.ones_like(bias)
    go()
    optimizer.zero_grad()
    model[2].requires_grad_(False)
    head = model[2].weight.detach().clone()
    for _ in range(3):
        go()
        optimizer.zero_grad()
    assert torch.equal(model[0].bias, bias) and torch.equal(model[2].weight, head) and len(recordings) == 2
    private.close()


class TwiceAsked(torch.optim.Adam):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("why", ["secure", "hook", "global hook", "regularizer", "subclass", "large", "no graph", "compiled", "patient"])
def test_what_is_made_eagerly_as_before(why, recordings, monkeypatch):  # noqa: F811
    model, heard, handle = built(MLP), [], None
    kind = TwiceAsked if why == "subclass" else torch.optim.Adam
    optimizer = kind(model.parameters(), lr=0.01)
    if why == "hook":
        optimizer.register_step_post_hook(lambda *_: heard.append(model[0].weight.grad is not None))
    if why == "global hook":
        handle = register_optimizer_step_pre_hook(lambda *_: heard.append(True))
    if why == "large":
        monkeypatch.setattr(in_loop, "room_for_update", lambda device: 100)
    if why == "no graph":

        def refused(*_):
            raise RuntimeError("no graph today")

        monkeypatch.setattr(update, "captured_in_passing", refused)
    if why == "patient":
        monkeypatch.setattr(in_loop, "_PATIENCE", 11)
    private = cw.PrivateTraining(model, optimizer, plan_for(80), own_batches=True, noise="secure" if why == "secure" else "fast")
    if why == "regularizer":
        private.regularizer(lambda: 1e-3 * model[0].weight.square().sum())
    if why == "compiled":
        private.compile(lambda model, x: model(x).sum(1), backend="eager")
    before = model[0].weight.detach().clone()
    try:
        for _ in range(10):
            private.loss(model(examples(12, 4)).square().sum(1)).backward()
            optimizer.step()
            assert model[0].weight.grad is not None and not torch.equal(model[0].weight, before)
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
    finally:
        if handle is not None:
            handle.remove()
    assert not recordings and len(heard) == (10 if "hook" in why else 0) and all(heard)
    private.close()


@pytest.mark.parametrize("fault", ["no noise", "a parameter is left out", "nothing"])
def test_a_replay_that_does_something_else_is_not_used(fault, recordings, monkeypatch):  # noqa: F811
    """It is held against the step it was recorded from before it is used, and the step is made eagerly."""
    replays = []

    def faulty(run, device, generators=(), pool=None):
        replay = graph_like.captured(run, device, generators)

        def wrong():
            replays.append(fault)
            kept = model[2].bias.detach().clone()
            if fault == "no noise":
                for generator in generators:
                    generator.manual_seed(0)
            if fault != "nothing":
                replay()
            if fault == "a parameter is left out":
                model[2].bias.data.copy_(kept)

        return wrong

    monkeypatch.setattr(update, "captured_in_passing", faulty)
    x = examples(RECORDS, 4)
    expected = trained_eagerly(built(MLP), x, optimizer=OPTIMIZERS["adam"], steps=20)
    model = built(MLP)
    found, _, private = train(model, x, compiled=False, optimizer=OPTIMIZERS["adam"], steps=20)
    assert len(replays) == 1 and not private._in_loop[0]._update._found
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


def test_closed_trainings_hold_no_graphs(recordings):  # noqa: F811
    model = built(MLP)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private, _ = begun(model, optimizer)
    [graph] = map(weakref.ref, private._in_loop[0]._update._found.values())
    private.close()
    assert graph() is None and not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
