"""A ledger that no crash makes too small, and runs that go on where they stopped."""

import json
import os
import random
import signal
import time
import traceback
import warnings

import pytest
import torch

import clipwise as cw
from clipwise import ledger as ledgers
from clipwise.facts import weakest
from clipwise.randomness import Reproducible
from training_helpers import data, losses_of, small, small_plan, steps, training

LONG = small_plan(dataset_size=60, batch_size=6, epochs=None, steps=400)


def save(path, value):
    torch.save(value, f"{path}.new")
    os.replace(f"{path}.new", path)


def train(folder, noise, plan=LONG):
    """Goes on from the last checkpoint to the end of the plan; notes every step that was released in a file of its own."""
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    private = cw.PrivateTraining(model, optimizer, plan, noise=noise, ledger=folder / "ledger")
    if (folder / "checkpoint").exists():
        state = torch.load(folder / "checkpoint", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        private.load_state_dict(state["private"])
    released = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while private.loader(data()).batch_sampler.__len__():
            for x, y in private.loader(data()):
                private.loss(losses_of(model, x, y)).backward()
                number = private.position
                optimizer.step()
                os.write(released, f"{number}\n".encode())
                optimizer.zero_grad()
                save(
                    folder / "checkpoint",
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "private": private.state_dict()},
                )
    private.close()
    return model


def in_a_child(folder, noise):
    child = os.fork()
    if child == 0:
        try:
            train(folder, noise)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return child


def killed_and_resumed(folder, noise, kills):
    """Twenty children, each killed at a random moment; then one that may finish."""
    chance = random.Random(3)
    for _ in range(kills):
        child = in_a_child(folder, noise)
        time.sleep(chance.uniform(0.02, 0.35))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitpid(in_a_child(folder, noise), 0)[1] == 0
    return [int(line) for line in (folder / "released").read_text().split()]


def test_killed_at_twenty_points_every_released_step_is_counted(tmp_path):
    released = killed_and_resumed(tmp_path, "fast", 20)
    record = ledgers.read(tmp_path / "ledger")
    assert len(released) <= record.spent <= LONG.steps
    assert len(released) > 50 and record.plan == LONG


def test_killed_at_twenty_points_a_reproducible_run_ends_where_it_should(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = train(tmp_path / "whole", Reproducible(3))
    released = killed_and_resumed(tmp_path / "killed", Reproducible(3), 20)
    record = ledgers.read(tmp_path / "killed" / "ledger")
    assert record.spent == LONG.steps > max(released)
    found = torch.load(tmp_path / "killed" / "checkpoint", weights_only=True)["model"]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, found[name])


def test_a_checkpoint_of_an_earlier_step_does_not_lower_the_count():
    private, model, optimizer = training(seed=None)
    for _ in steps(private, model, optimizer, limit=2):
        pass
    early = private.state_dict()
    for _ in steps(private, model, optimizer, limit=3):
        pass
    private.load_state_dict(early)
    assert private.position == 2 and private.ledger.spent == 5
    assert len(private.loader(data())) == 4
    other, _, _ = training(seed=None)
    other.load_state_dict(private.state_dict())
    assert other.ledger.spent == 5


def test_lost_steps_shorten_the_run():
    private, model, optimizer = training(seed=None, plan=small_plan(epochs=1))
    start = private.state_dict()
    for _ in steps(private, model, optimizer, limit=4):
        pass
    private.load_state_dict(start)
    assert private.position == 0 and len(private.loader(data())) == 2
    assert sum(1 for _ in steps(private, model, optimizer)) == 2
    assert private.ledger.spent == 6


def test_a_state_holds_numbers_only_and_no_generator():
    private, _, _ = training(seed=None)
    state = private.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert set(state) == {"plan", "spent", "position", "bound", "facts"}


def test_a_checkpoint_of_another_plan_is_refused():
    private, _, _ = training(seed=None)
    other, _, _ = training(seed=None, plan=small_plan(noise_multiplier=1.2))
    with pytest.raises(cw.BadLedger, match=r"noise_multiplier was 1\.2 and is 1\.3"):
        private.load_state_dict(other.state_dict())
    with pytest.raises(cw.BadLedger, match="no state of a PrivateTraining"):
        private.load_state_dict({"model": 1})


def test_a_ledger_goes_on(tmp_path):
    path = tmp_path / "ledger"
    for expected in (2, 4, 6):
        private, model, optimizer = training(seed=None, plan=small_plan(epochs=1), ledger=path)
        for _ in steps(private, model, optimizer, limit=2):
            pass
        assert private.ledger.spent == expected
        private.close()
    private, model, _ = training(seed=None, plan=small_plan(epochs=1), ledger=path)
    with pytest.warns(UserWarning, match="spent"):
        assert list(private.loader(data())) == []


def test_a_ledger_of_another_plan_in_use_or_damaged_is_refused(tmp_path):
    path = tmp_path / "ledger"
    private, _, _ = training(seed=None, ledger=path)
    with pytest.raises(cw.BadLedger, match="in use by another training"):
        training(seed=None, ledger=path)
    private.close()
    with pytest.raises(cw.BadLedger, match="belongs to another plan: delta was"):
        training(seed=None, ledger=path, plan=small_plan(delta=1e-4))
    training(seed=None, ledger=path)[0].close()
    content = path.read_text()
    for damaged in ("", "{}\nspent 1\n", content[:40], content.replace("spent", "spend"), content + "more\n"):
        path.write_text(damaged)
        with pytest.raises(cw.BadLedger, match="not a ledger"):
            training(seed=None, ledger=path)
    with pytest.raises(cw.BadLedger, match="no folder"):
        training(seed=None, ledger=tmp_path / "nowhere" / "ledger")
    with pytest.raises(cw.BadLedger, match="there is no ledger"):
        ledgers.read(tmp_path / "other")


def test_a_count_that_was_cut_off_or_changed_is_no_smaller_one(tmp_path):
    path = tmp_path / "ledger"
    private, model, optimizer = training(seed=None, ledger=path)
    for _ in steps(private, model, optimizer, limit=3):
        pass
    private.close()
    whole = path.read_bytes()
    assert whole.endswith(b"\nspent 000000000003 000000000003\n") and ledgers.read(path).spent == 3
    for cut in range(2, 30):
        path.write_bytes(whole[:-cut])
        if cut == 14:  # the first of the two is whole
            assert ledgers.read(path).spent == 3
            continue
        with pytest.raises(cw.BadLedger, match="is damaged"):
            ledgers.read(path)
    for place in range(len(whole) - 26, len(whole) - 1):  # in one of the two counts, or between them
        path.write_bytes(whole[:place] + b"0" + whole[place + 1 :])
        try:
            assert ledgers.read(path).spent == 3
        except cw.BadLedger:
            assert whole[place : place + 1] == b" "
    path.write_bytes(whole.replace(b" 000000000003\n", b"\n"))  # as it was written before there were two
    assert ledgers.read(path).spent == 3
    path.write_bytes(whole.replace(b" 000000000003\n", b" 000000000004\n"))  # the machine stopped in between
    assert ledgers.read(path).spent == 4


def test_the_step_is_counted_before_it_is_released(tmp_path, monkeypatch):
    path = tmp_path / "ledger"
    private, model, optimizer = training(seed=None, ledger=path)
    seen = []
    real = private._updates.release
    monkeypatch.setattr(private._updates, "release", lambda *args: (seen.append(ledgers.read(path).spent), real(*args)))
    for _ in steps(private, model, optimizer, limit=3):
        pass
    assert seen == [1, 2, 3]


def test_a_ledger_that_cannot_be_written_releases_nothing(tmp_path, monkeypatch):
    private, model, optimizer = training(seed=None, ledger=tmp_path / "ledger")
    x, y = next(iter(private.loader(data())))
    private.loss(losses_of(model, x, y)).backward()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr(os, "pwrite", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and private.ledger.spent == 0


def test_loader_processes_do_not_hold_the_ledger(tmp_path):
    """Killed with its workers still alive, a run can go on at once."""
    ready, done = os.pipe(), 0
    child = os.fork()
    if child == 0:
        private, _, _ = training(seed=None, ledger=tmp_path / "ledger")
        batches = iter(private.loader(data(), num_workers=1, persistent_workers=True))
        next(batches)
        os.write(ready[1], b"x")
        time.sleep(60)
        os._exit(0)
    os.read(ready[0], 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    private, model, optimizer = training(seed=None, ledger=tmp_path / "ledger")
    for _ in steps(private, model, optimizer, limit=1):
        done += 1
    assert done == 1


def test_a_training_that_is_gone_leaves_its_ledger_to_others(tmp_path):
    import gc

    def work():
        training(seed=None, ledger=tmp_path / "ledger")

    work()
    gc.collect()
    training(seed=None, ledger=tmp_path / "ledger")[0].close()


def test_two_that_start_at_once_lose_no_count(tmp_path, monkeypatch):
    """The lock comes before the reading."""
    path = tmp_path / "ledger"
    training(seed=None, ledger=path)[0].close()
    order = []
    monkeypatch.setattr(ledgers.Ledger, "_lock", lambda self, path, real=ledgers.Ledger._lock: (order.append("lock"), real(self, path)))
    monkeypatch.setattr(ledgers, "read", lambda path, real=ledgers.read: (order.append("read"), real(path))[1])
    training(seed=None, ledger=path)[0].close()
    assert order == ["lock", "read"]


def test_a_state_carries_what_the_report_must_say():
    for options, fact, value in (({"seed": 3}, "noise", "reproducible"), ({"seed": None, "own_batches": True}, "batches", "caller")):
        private, model, optimizer = training(**options)
        x, y = data().tensors if private.own_batches else next(iter(private.loader(data())))
        private.loss(losses_of(model, x, y)).backward()
        optimizer.step()
        other, _, _ = training(seed=None)
        other.load_state_dict(private.state_dict())
        assert other.report().facts[fact] == value
    assert weakest({"noise": "fast"}, {"noise": "secure"})["noise"] == "fast"


def test_a_ledger_remembers_that_noise_was_reproducible(tmp_path):
    path = tmp_path / "ledger"
    private, model, optimizer = training(ledger=path)
    for _ in steps(private, model, optimizer, limit=1):
        pass
    private.close()
    private, _, _ = training(seed=None, ledger=path)
    assert private.ledger.facts["noise"] == "reproducible" and private.report().is_void


def test_an_interrupted_pass_of_a_shuffle_counts_whole(tmp_path):
    plan = small_plan(sampler="shuffle")
    private, model, optimizer = training(seed=None, plan=plan, ledger=tmp_path / "ledger")
    for _ in steps(private, model, optimizer, limit=2):
        pass
    for _ in steps(private, model, optimizer, limit=2):  # the loop began anew, the pass did not
        pass
    state = private.state_dict()
    assert private.ledger.spent == 4
    private.close()
    private, model, optimizer = training(seed=None, plan=plan, ledger=tmp_path / "ledger")
    private.load_state_dict(state)
    assert private.ledger.spent == private.position == 6 and len(private.loader(data())) == 6
    repeatable, model, optimizer = training(plan=plan)
    repeatable.load_state_dict(state)
    assert repeatable.position == 4 and len(repeatable.loader(data())) == 2


def test_within_a_pass_no_record_comes_twice_whatever_the_loop_does():
    private, model, optimizer = training(seed=None, plan=small_plan(sampler="shuffle"), own_batches=False)
    seen = []
    while len(seen) < 60:
        for x, y in private.loader(data()):
            seen += [tuple(row) for row in x.tolist()]
            private.loss(losses_of(model, x, y)).backward()
            optimizer.step()
            optimizer.zero_grad()
            break
    assert len(set(seen)) == 60
