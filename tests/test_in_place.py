"""Stages that are replayed where their inputs lie: same numbers, wherever these lie. Graphs need a GPU (test_cuda.py); here a stand-in reads what
lies at an address."""

import ctypes
import itertools
import math
import random

import pytest
import torch

from clipwise import tracing
from clipwise.compiled import in_place, stages
from clipwise.compiled.agreement import repeats
from clipwise.compiled.stages import Stages
from test_staged import assert_runs, traced


def graph_like(run, given, device, pool):
    """A recording that reads where the tensors lay, as a CUDA graph does. (Those that were made for it live on.)"""
    outputs = list(run(*given))
    addresses = [(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in given]

    def replay():
        for mine, new in zip(outputs, run(*[at(*address) for address in addresses])):
            mine.copy_(new)

    return replay, outputs


def at(address, shape, stride, dtype):
    array = (ctypes.c_byte * (shape.numel() * dtype.itemsize)).from_address(address)
    return torch.frombuffer(array, dtype=dtype).as_strided(shape, stride)


@pytest.fixture
def stage(monkeypatch):
    """A stage of two inputs, one of them large, and how often it ran or was replayed."""
    monkeypatch.setattr(in_place, "_SMALL", 64)
    ran, pools, numbers = [], [], itertools.count(1)
    monkeypatch.setattr(in_place.Room, "pool", lambda self: (0, next(numbers)))

    def compute(large, small):
        return large.sum() + small, large[2:], small * 2

    def recorded(run, given, device, pool):
        pools.append(pool)
        replay, outputs = graph_like(compute, given, device, pool)
        return lambda: ran.append("replay") or replay(), outputs

    monkeypatch.setattr(in_place, "recorded_in_passing", recorded)
    found = in_place.InPlace(
        lambda *given: ran.append("run") or compute(*given), in_place.Room(torch.device("cpu"), torch.float32), hands_over=False
    )
    found.ran, found.pools = ran, pools
    return found


def assert_right(stage, large, small):
    found = stage(large, small)
    assert all(map(torch.equal, found, (large.sum() + small, large[2:], small * 2)))
    assert found[1].data_ptr() == large[2:].data_ptr()


def test_a_stage_is_replayed_where_its_inputs_lie(stage):
    large = torch.randn(40)
    for number in range(6):
        large.copy_(torch.randn(40))
        del stage.ran[:]
        assert_right(stage, large, torch.randn(3))  # what is small may lie anywhere
        assert stage.ran[-1] == ("run" if number == 0 else "replay")
    assert stage.ran == ["replay"]


def test_a_stage_whose_inputs_lie_elsewhere_runs_as_always(stage):
    first, second = torch.randn(40), torch.randn(40)
    for large in (first, first, first, second, first):
        assert_right(stage, large, torch.randn(3))
    assert stage.ran == ["run", "run", "replay", "replay", "run", "replay"]  # the first replay is held against what was found before


def test_what_moves_again_and_again_is_copied(stage):
    for number, large in enumerate([torch.randn(40) for _ in range(8)]):
        del stage.ran[:]
        found = stage(large, torch.ones(3))
        assert torch.equal(found[0], large.sum() + torch.ones(3)) and torch.equal(found[1], large[2:])
        assert stage.ran == (["run"] if number < 2 else ["run", "replay"] if number == 2 else ["replay"])


def test_results_that_are_handed_over_stay_what_they_are(stage):
    stage._hands_over = True
    large = torch.randn(40)
    for _ in range(3):
        first = stage(large, torch.ones(3))
    before = [result.clone() for result in first]
    large.zero_()
    second = stage(large, torch.zeros(3))
    assert all(map(torch.equal, first, before)) and not float(second[0].abs().sum())
    assert second[1].data_ptr() != large[2:].data_ptr()


def test_a_recording_that_is_wrong_is_not_used(stage, monkeypatch):
    def off(run, given, device, pool):
        outputs = [result + 1 for result in run(*given)]
        return lambda: None, outputs

    monkeypatch.setattr(in_place, "recorded_in_passing", off)
    large = torch.randn(40)
    for _ in range(5):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is None and stage._room.is_closed


def test_a_recording_that_takes_too_much_room_is_not_kept(stage, monkeypatch):
    taken = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(in_place.Room, "reserved", lambda self: next(taken))
    large = torch.randn(40)
    for _ in range(4):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is None and "replay" not in stage.ran


def test_a_stage_that_will_take_too_much_room_is_not_recorded(stage):
    """Torch keeps the memory of what is recorded and not used until it finds no other: five stages of a ResNet-50 took 1.2 GB for nothing."""
    stage._takes = in_place._LEAST_ROOM + 1
    large = torch.randn(40)
    for _ in range(4):
        assert_right(stage, large, torch.randn(3))
    assert not stage.pools and stage._room.taken == 0 and "replay" not in stage.ran


def test_a_stage_is_recorded_again_where_it_was_recorded_before(stage, monkeypatch):
    """Else the memory of every graph that is given up would be missing until torch looks for some."""
    reserved, replays = [0], []

    def reserve(self):
        return reserved[0]

    def recorded(run, given, device, pool):
        if pool not in stage.pools:
            reserved[0] += 1000
        found = was_recorded(run, given, device, pool)
        if replays:
            assert stage._before is replays[-1]  # torch keeps memory for graphs that are there
        replays.append(found[0])
        return found

    was_recorded = in_place.recorded_in_passing
    monkeypatch.setattr(in_place.Room, "reserved", reserve)
    monkeypatch.setattr(in_place, "recorded_in_passing", recorded)
    large = torch.randn(40)
    for _ in range(3):
        for _ in range(3):
            assert_right(stage, large, torch.randn(3))
        assert stage._recording is not None and stage._room.taken == 1000 + 3 * 4
        stage.forget()
        assert stage._recording is None and stage._room.taken == 1000 + 3 * 4
    assert stage.pools == [(0, 1)] * 3


def test_what_has_no_room_any_more_gives_it_back(stage, monkeypatch):
    large = torch.randn(40)
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is not None and stage._room.taken > 0
    monkeypatch.setattr(in_place.Room, "most", lambda self, at_the_end: 1)
    stage.forget()
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is None and stage._before is None and stage._room.taken == 0


@pytest.mark.parametrize("why", ["no attempts", "closed", "closed by another"])
def test_what_is_not_recorded_again_gives_its_room_back(stage, why):
    large = torch.randn(40)
    stage._left = 1 if why == "no attempts" else stage._left
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is not None and stage._room.taken > 0
    stage._room.is_closed = why != "no attempts"
    if why != "closed by another":
        stage.forget()
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording is None and stage._before is None and stage._room.taken == 0


def test_recordings_take_little(monkeypatch):
    held, free = [2**34], [2**36]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 2**37))
    room = in_place.Room(torch.device("cuda", 0), torch.float32)
    assert [room.most(at_the_end=last) for last in (False, True)] == [2**29, 2**31]
    held[0] = 2**20
    assert [room.most(at_the_end=last) for last in (False, True)] == [2**26, 2**26]  # what nobody misses
    free[0] = 2**23
    assert room.most(at_the_end=True) == 2**20
    room.taken = 2**24 - 2**23
    assert room.most(at_the_end=True) == 2**21


def test_what_is_copied_takes_room_too(stage, monkeypatch):
    monkeypatch.setattr(in_place.Room, "most", lambda self, at_the_end: 150)
    for _ in range(5):
        stage(torch.randn(40), torch.randn(3))
    assert stage._recording is None and "replay" not in stage.ran


def test_a_place_that_changes_once_is_no_reason_to_copy(stage):
    first, second = torch.randn(40), torch.randn(40)
    for large in (first, first, first, second, second, second, first, first, first):
        assert_right(stage, large, torch.randn(3))
    assert stage._recording.read == [0]


def test_a_stage_is_held_against_itself_anew(stage):
    large = torch.randn(40)
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    stage.forget()
    del stage.ran[:]
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    assert stage.ran == ["run", "run", "replay", "replay"]


def test_on_another_stream_nothing_is_replayed(stage, monkeypatch):
    large, here = torch.randn(40), [True]
    monkeypatch.setattr(in_place.Room, "is_here", lambda self: here[0])
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    here[0] = False
    del stage.ran[:]
    assert_right(stage, large, torch.randn(3))
    assert stage.ran == ["run"]


def test_a_room_is_on_the_stream_that_it_was_first_used_on(monkeypatch):
    stream = [7]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream[0], raising=False)
    room = in_place.Room(torch.device("cuda", 0), torch.float32)
    assert room.is_here()
    stream[0] = 8
    assert not room.is_here()


@pytest.mark.parametrize(
    "found, expected, same",
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0001], True),
        ([1e6, 0, 0, 0], [1e6, 1, 1, 1], False),  # three examples lost their norms
        ([0.0, 0.0], [1e20, 1e20], False),
        ([0.0, 0.0], [1e-25, 1e-25], False),
        ([-1.0, 1e-6], [-1.0, 2e-6], True),  # of a sum
        ([1.0, math.nan], [1.0, math.nan], True),
        ([1.0, 0.0], [1.0, math.nan], False),
        ([1.0, math.inf], [1.0, math.inf], True),
        ([1.0, math.nan], [1.0, 3.0], False),
    ],
)
def test_what_counts_as_found_again(found, expected, same):
    assert repeats(torch.tensor(found), torch.tensor(expected), torch.float32) == same
    assert not repeats(torch.zeros(1000, dtype=torch.float16), torch.full((1000,), 3e4, dtype=torch.float16), torch.float16)


def test_what_is_not_finite_is_no_reason_to_record_nothing(stage):
    large = torch.full((40,), torch.nan)
    for _ in range(3):
        stage(large, torch.ones(3))
    assert stage._recording is not None


@pytest.fixture
def recording(monkeypatch):
    """A CPU records, and stages let go of everything as soon as they can."""
    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})
    monkeypatch.setattr(stages, "_SMALL", 0)
    monkeypatch.setattr(in_place, "recorded_in_passing", graph_like)
    return in_place.Room(torch.device("cpu"), torch.float32)


def test_a_view_of_a_copied_input_is_a_view_of_the_input(recording):
    def function(a, b, c):
        first = a.sin()
        row = first[0]
        found = (b * row).sin().cos()  # the second stage reads the view and hands it on
        row.add_(c)  # the last writes through it …
        return [first + 1, found * 2]  # … and reads what it is a view of

    assert_runs(function, [torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)], recording)


def test_what_an_early_stage_found_is_handed_over_as_well(recording, monkeypatch):
    monkeypatch.setattr(in_place, "_SMALL", 2**20)
    program = Stages(traced(lambda a, c: [(a @ a).sin().sum(1), c + 1], torch.randn(4, 4), torch.randn(4)), [1, 1], recording)
    held = []
    for _ in range(5):
        a, c = torch.randn(4, 4), torch.randn(4)
        running = program.begin()
        running.give(0, [a])
        running.give(1, [c])
        held.append((running.outputs()[0], (a @ a).sin().sum(1)))
    assert all(torch.allclose(found, right) for found, right in held)


SHAPES = [(4, 4), (4,)]


def written_at_random(seed):
    """A function that computes, looks at and writes to what it has, in some order."""

    def function(*given):
        dice = random.Random(seed)
        ours, all_ = [], list(given)  # to ours it may write

        def pick(shape=None, among=None):
            fit = [t for t in (all_ if among is None else among) if shape is None or t.shape == shape]
            return dice.choice(fit[-4:] + fit[:2]) if fit else None

        def make(tensor, *, own=True):
            all_.append(tensor)
            if own:
                ours.append(tensor)

        def view(of):
            kind = dice.randrange(5)
            own = any(of is one for one in ours)
            for one in [of[dice.randrange(4)], of.mT, of[:, 1], of.unbind(1)[2], of.split(2)[1][0]][kind : kind + 1]:
                make(one, own=own)

        def write(to):
            other = pick(to.shape)
            [
                lambda: to.add_(other.clone()),
                lambda: to.mul_(0.5),
                lambda: to.copy_(other * 2),
                to.square_,
                lambda: to.index_add_(0, torch.arange(4), other.sin()),
            ][dice.randrange(5)]()

        for _ in range(dice.randint(8, 40)):
            kind, one = dice.randrange(12), pick()
            matrix = pick(SHAPES[0])
            if kind == 0:
                make(torch.zeros(dice.choice(SHAPES)))
            elif kind == 1:
                make(dice.choice([torch.zeros_like, torch.ones_like])(one))
            elif kind == 2:
                make(torch.arange(4.0) + 0)
            elif kind == 3:
                make(one * pick(one.shape) + 1)
            elif kind == 4:
                make(torch.mul(one, pick(one.shape), out=torch.empty_like(one)))
            elif kind in (5, 6) and matrix is not None:
                view(matrix)
            elif kind == 7 and matrix is not None:
                largest, places = matrix.max(1)
                make(largest)
                make(places.to(largest.dtype))
            elif kind == 8 and matrix is not None:
                make(matrix @ pick(SHAPES[0]))
            elif ours:
                write(pick(among=ours))
        return [given[-1].sum(), *ours]

    return function


@pytest.mark.parametrize("seed", range(60))
def test_programs_made_at_random(seed, recording, monkeypatch):
    """Whatever is read, looked at through views and written to, in whatever order groups come and wherever they lie."""
    dice = random.Random(seed)
    monkeypatch.setattr(stages, "_SMALL", dice.choice([0, 17, 2**20]))
    monkeypatch.setattr(in_place, "_SMALL", dice.choice([0, 20, 2**20]))
    function = written_at_random(seed)
    places = [torch.randn(dice.choice(SHAPES)) for _ in range(dice.randint(2, 5))]
    program = Stages(traced(function, *places), [1] * len(places), recording)
    for _ in range(5):
        for number, place in enumerate(places):
            new = torch.randn(place.shape)
            places[number] = new if dice.random() < 0.2 else place.copy_(new)
        expected, before = function(*[place.clone() for place in places]), [place.clone() for place in places]
        running = program.begin()
        for number in dice.sample(range(len(places)), len(places)):
            running.give(number, [places[number]])
        for found, right in zip(running.outputs(), expected, strict=True):
            assert torch.allclose(found, right, equal_nan=True, rtol=1e-4)
        assert all(map(torch.equal, places, before))


def test_after_a_recording_that_failed_no_other_is_tried(stage, monkeypatch):
    def fails(run, given, device, pool):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(in_place, "recorded_in_passing", fails)
    large = torch.randn(40)
    for _ in range(3):
        assert_right(stage, large, torch.randn(3))
    other = in_place.InPlace(stage._run, stage._room, hands_over=False)
    for _ in range(3):
        assert_right(other, large, torch.randn(3))
    assert stage._room.is_closed and stage.ran == ["run"] * 6 and not other._places
