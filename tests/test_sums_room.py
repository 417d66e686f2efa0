"""Sums that a program leaves where the recorded update reads them: same numbers, in one place, and nobody else's are written over."""

import random

import pytest
import torch

import clipwise as cw
from clipwise import tracing
from clipwise.compiled import in_loop, in_place, leaving, stages, update
from clipwise.compiled.lending import Lending
from clipwise.compiled.stages import Stages
from clipwise.compiled.sums_room import SumsRoom, place_for
from clipwise.models import mlp
from clipwise.updates import updated_by
from test_in_place import SHAPES, recording, written_at_random  # noqa: F401  (a fixture: a CPU records)
from test_recorded import recordings  # noqa: F401  (of updates, too)
from test_staged import replays, runs, traced  # noqa: F401  (every model is too large for anything but a program)
from test_tail import losses_of

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining")
STEPS = 36


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    for module in (in_place, leaving):
        monkeypatch.setattr(module, "SMALL_RESULT", 0)


def training(model, *, optimizers=1):
    parameters = list(model.parameters())
    made = [torch.optim.Adam(parameters[number::optimizers], lr=0.01) for number in range(optimizers)]
    plan = cw.PrivacyPlan(dataset_size=600, batch_size=18, steps=100, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=0.5)
    return cw.PrivateTraining(model, made, plan, own_batches=True, noise=cw.reproducible(5)), made


def fresh():
    torch.manual_seed(3)
    return mlp(12, (8, 9), 3).double()


def batch(number, size, device):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 12, dtype=torch.float64, generator=generator).to(device), torch.arange(size, device=device) % 3


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def go(private, model, number, size=9, device="cpu"):
    private.loss(losses_of(model, *batch(number, size, device))).backward()


def finish(optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def same_as_without_recordings(trained, monkeypatch):
    found = trained()
    monkeypatch.setattr(tracing, "DEVICES", set())
    expected = trained()
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def is_in_room(private):
    """Whether every sum of the step in the making lies where the update reads it."""
    loops = private._in_loop
    if len(loops) < len(private._updates.optimizers) or any(loop._room is None for loop in loops.values()):
        return False
    return all(are_in_room(private, number, private._intake.pending.sums) for number in loops)


def are_in_room(private, number, sums):
    """Whether the sums that one optimizer uses do."""
    places = zip(updated_by(private._updates.optimizers[number]), private._in_loop[number]._room.places)
    return all(sums[id(parameter)].data_ptr() == place.data_ptr() for parameter, place in places)


@pytest.mark.parametrize("optimizers", [1, 2])
def test_sums_lie_where_the_update_reads_them(optimizers, runs, recordings, monkeypatch):  # noqa: F811
    in_room = []

    def trained():
        model = fresh()
        private, made = training(model, optimizers=optimizers)
        for number in range(STEPS):
            go(private, model, number)
            in_room.append(is_in_room(private))
            finish(made)
        private.close()
        return weights(model)

    same_as_without_recordings(trained, monkeypatch)
    assert runs and sum(in_room) > STEPS // 4 and len(recordings) == optimizers


def test_a_draw_in_parts_of_several_sizes(runs, recordings, monkeypatch):  # noqa: F811
    """Two programs leave sums in one room: what one has left there is not lost when the other is replayed."""

    def trained():
        model = fresh()
        private, made = training(model)
        for number in range(STEPS):
            for part, size in enumerate((9, 7)):
                go(private, model, 100 * number + part, size)
            finish(made)
        private.close()
        return weights(model)

    same_as_without_recordings(trained, monkeypatch)
    assert len({id(program) for program in runs}) >= 2 and recordings


@pytest.mark.parametrize("optimizers", [1, 2])
def test_sums_stay_there_until_their_own_optimizer_has_stepped(optimizers, runs, recordings):  # noqa: F811
    """A room of one optimizer makes way for nobody's sums but its own."""
    model = fresh()
    private, made = training(model, optimizers=optimizers)
    in_room = []
    for number in range(STEPS):
        go(private, model, number)
        sums = dict(private._intake.pending.sums)
        for place, optimizer in enumerate(made):
            if is_in_room(private):
                in_room.append(all(are_in_room(private, other, sums) for other in range(place, optimizers)))
            optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()
        del sums
    private.close()
    assert sum(in_room) > optimizers * STEPS // 4 and all(in_room)


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("where", ["at once", "take_back", "copies", "noise"])
def test_a_step_that_fails_leaves_no_sums_without_noise(where, optimizers, runs, recordings, monkeypatch):  # noqa: F811
    """Nobody knows of them any more, once the step counts as taken; any optimizer would release them."""
    model = fresh()
    private, made = training(model, optimizers=optimizers)
    for number in range(STEPS - 1):
        go(private, model, number)
        finish(made)
    go(private, model, STEPS)
    assert is_in_room(private)

    def out_of_memory(*args, **more):
        raise torch.OutOfMemoryError("no memory")

    target = {
        "at once": (in_loop.UpdateInLoop, "_make"),
        "take_back": (Lending, "take_back"),
        "copies": (torch, "_foreach_zero_"),
        "noise": (update.Recorded, "release"),
    }[where]
    if where == "copies":
        private._intake.pending.sums.pop(id(updated_by(made[0])[0]))
    with monkeypatch.context() as patched:
        patched.setattr(*target, out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            made[0].step()
    assert all(parameter.grad is None for parameter in updated_by(made[0])) and private.spent().steps == STEPS
    private.discard()
    private.close()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_room_is_offered_for_tensors_like_its_own_and_as_long_as_it_is_there():
    parameter = torch.zeros(3, 4)
    assert place_for(parameter, torch.zeros(3, 4)) is None and place_for(None, torch.zeros(3, 4)) is None
    room = SumsRoom([parameter])
    found, place = place_for(parameter, torch.zeros(3, 4))
    assert found is room and place.data_ptr() == room.places[0].data_ptr()
    assert place_for(parameter, torch.zeros(4, 3)) is None
    assert place_for(parameter, torch.zeros(3, 4, dtype=torch.float64)) is None
    del room, found, place
    assert place_for(parameter, torch.zeros(3, 4)) is None


def test_who_holds_what_lies_in_the_room_keeps_it():
    room = SumsRoom([torch.zeros(4), torch.zeros(2)])
    mine, others = room.places
    mine.fill_(1.0)
    others.fill_(2.0)
    used, held = room.lending.lend([mine, others])
    room.lending.take_back(but={id(used)})
    for place in room.places:
        place.fill_(7.0)
    assert torch.equal(used, torch.full((4,), 7.0)) and torch.equal(held, torch.full((2,), 2.0))


def test_where_results_lie_elsewhere_a_stage_needs_what_it_works_in(recording):  # noqa: F811
    """Each result is copied as soon as it is done: of these three one is there at a time."""
    stage = Stages(traced(lambda a: [(a @ a).sin(), (a @ a.mT).sin(), (a.mT @ a).sin()], torch.randn(8, 8)), [1], recording)._stages[-1]
    one = 8 * 8 * 4
    assert stage.makes_at_once >= 3 * one and stage.works_in <= 2 * one


@pytest.mark.parametrize("seed", range(60))
def test_whatever_a_stage_does_with_a_result_before_and_after(seed, recording, monkeypatch):  # noqa: F811
    """Written to through views, read once more, returned by two names: what is left in its place is what was returned."""
    dice = random.Random(1000 + seed)
    monkeypatch.setattr(stages, "_SMALL", dice.choice([0, 17, 2**20]))
    monkeypatch.setattr(in_place, "_SMALL", dice.choice([0, 20, 2**20]))
    function, given = written_at_random(seed), [torch.randn(dice.choice(SHAPES)) for _ in range(dice.randint(2, 5))]
    likes = [torch.empty_like(result) for result in function(*[tensor.clone() for tensor in given])]
    wanted = [number for number in range(len(likes)) if dice.random() < 0.6]
    room = SumsRoom(likes)

    def places(number, total):
        return place_for(likes[number], total) if number in wanted else None

    program = Stages(traced(function, *given), [1] * len(given), recording, places)
    held, in_room = [], 0
    for _ in range(6):
        for number, tensor in enumerate(given):
            new = torch.randn(tensor.shape)
            given[number] = new if dice.random() < 0.2 else tensor.copy_(new)
        expected = function(*[tensor.clone() for tensor in given])
        running = program.begin()
        for number in dice.sample(range(len(given)), len(given)):
            running.give(number, [given[number]])
        found = running.outputs()
        in_room += sum(found[number].data_ptr() == room.places[number].data_ptr() for number in wanted)
        held.append((found, [result.clone() for result in expected]))
        for results, right in held:  # of steps before, too
            assert all(torch.allclose(mine, other, equal_nan=True, rtol=1e-4) for mine, other in zip(results, right, strict=True))
    if program._in_place[-1].run is not program._stages[-1].run and wanted and program._in_place[-1].run._used > 1:
        assert in_room


def test_memory_of_results_that_have_moved_into_a_room_is_given_up(recording, monkeypatch):  # noqa: F811
    """The pool they lay in would keep it."""
    pools, room = [], []
    monkeypatch.setattr(in_place.Room, "pool", lambda self: pools.append((0, len(pools) + 1)) or pools[-1])
    monkeypatch.setattr(in_place, "_SMALL", 2**20)
    parameter = torch.zeros(4, 4)
    program = Stages(
        traced(lambda a: [(a @ a).sin(), a.sum()], torch.randn(4, 4)),
        [1],
        recording,
        lambda n, *given: None if n else place_for(parameter, *given),
    )
    for number in range(9):
        if number == 4:
            room.append(SumsRoom([parameter]))
            program.forget_recordings()
        running, a = program.begin(), torch.randn(4, 4)
        running.give(0, [a])
        found = running.outputs()
        assert torch.allclose(found[0], (a @ a).sin(), rtol=1e-5)
    assert len(pools) == 2 and found[0].data_ptr() == room[0].places[0].data_ptr()
