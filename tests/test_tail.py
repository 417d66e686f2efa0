"""The tail of an eager step as a recording: same numbers, whatever the batch. Graphs need a GPU (test_cuda.py); here a stand-in replays."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import planner, tracing
from clipwise.compiled import tail, tails
from clipwise.compiled.lending import Lending
from clipwise.compiled.sums import GraphSums
from clipwise.experience import experience_of
from clipwise.layout import Layout, Table
from clipwise.models import OverRows, Transformer, cnn, mlp
from clipwise.release import clip
from helpers import Net, examples

STEPS = 17  # of the steps that do not verify the model the sixth is recorded; the next that does is the thirty-second


@pytest.fixture
def replays(monkeypatch):
    """Lets a CPU pretend to record. One entry a replay."""
    made = []

    def recorded(run, inputs):
        outputs = [output.clone() for output in run(*inputs)]

        def replay():
            made.append(run)
            for mine, new in zip(outputs, run(*inputs)):
                mine.copy_(new)

        return replay, outputs

    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})
    monkeypatch.setattr(tail, "recorded", recorded)
    return made


def step(model, x, y, clipping=None):
    with cw.capture(model) as tape:
        losses = losses_of(model, x, y)
    return clip(tape, losses, clipping or cw.flat(0.3), "bookkeep"), losses.detach()


def without_tail(model, x, y, clipping=None):
    devices, tracing.DEVICES = tracing.DEVICES, set()
    try:
        return step(model, x, y, clipping)[0]
    finally:
        tracing.DEVICES = devices


def assert_same(found, expected, tolerance=1e-9):
    assert found.sums.keys() == expected.sums.keys()
    assert torch.equal(found.finite, expected.finite)
    assert torch.allclose(found.weights, expected.weights, rtol=tolerance, atol=0)
    for name, total in expected.sums.items():
        assert float((found.sums[name] - total).norm()) <= tolerance * max(float(total.norm()), 1e-3), name


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.layer, self.head = nn.GRU(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        states, _ = self.layer(self.norm(self.words(x)).transpose(0, 1))
        return self.head(states[-1])


class Positions(nn.Module):
    """Weights that are looked up, sliced and repeated before they meet examples; one of them is used twice."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.first, self.norm = nn.Parameter(torch.randn(1, 1, 8)), nn.LayerNorm(8)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.start = 10

    def forward(self, x):
        places = torch.arange(self.start, self.start + x.shape[1], device=x.device).unsqueeze(0)
        x = self.words(x) + self.places(places)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        x = self.norm(x + F.linear(x, self.layer.weight[:, :8], self.layer.bias)).tanh()
        return self.head(F.linear(x.mean(1), self.layer.weight))


def words(batch):
    return torch.randint(0, 20, (batch, 5))


MODELS = {
    "mlp": (lambda: mlp(12, (8, 9), 3), lambda n: examples(n, 12)),
    "cnn": (lambda: cnn(1, 16, 3), lambda n: examples(n, 1, 16, 16)),
    "lstm": (lambda: OverRows(nn.LSTM, 6, 5, 3), lambda n: examples(n, 1, 7, 6)),
    "words": (Words, words),
    "positions": (Positions, words),
    "transformer": (lambda: Transformer(torch.randn(20, 8), 3, heads=2, hidden=12, longest=8).double(), words),
}


@pytest.mark.parametrize("sizes", [[9], [9, 7, 9, 12, 5, 2]], ids=["one size", "many sizes"])
@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_every_step(name, sizes, replays):
    build, inputs = MODELS[name]
    model = build().double()
    for number in range(STEPS):
        size = sizes[number % len(sizes)]
        x, y = inputs(size), torch.randint(0, 3, (size,))
        found, losses = step(model, x, y)
        assert_same(found, without_tail(model, x, y))
        assert torch.allclose(found.value(losses), (found.weights * losses).sum())
    assert replays


def begun(model, size=9, width=12, clipping=None):
    """Step until there is a recording."""
    for _ in range(STEPS):
        step(model, examples(size, width), torch.randint(0, 3, (size,)), clipping)
    (kind,) = [kind for kind in experience_of([model]).tails.kinds.values() if kind.tail is not None]
    return kind.tail


def test_sums_that_were_handed_out_stay_what_they_are(replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    first, _ = step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    before = [total.clone() for total in (*first.sums.values(), first.weights, first.finite, first.total)]
    count = len(replays)
    step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    assert len(replays) == count + 1
    assert all(map(torch.equal, before, (*first.sums.values(), first.weights, first.finite, first.total)))


def test_sums_lie_where_the_graph_leaves_them_unless_somebody_holds_them(replays):
    """A copy of them would be a fifth of what a small network's step takes."""
    model = mlp(12, (8, 9), 3).double()
    tail = begun(model)
    places = {output.data_ptr() for output in tail._outputs}
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    first, _ = step(model, x, y)
    assert all(total.data_ptr() in places for total in first.sums.values())
    second, _ = step(model, x, y)
    assert all(total.data_ptr() in places for total in second.sums.values())
    assert not any(total.data_ptr() in places for total in first.sums.values())
    assert_same(first, second)


def test_sums_that_are_held_while_there_is_no_room_for_them_stay_what_they_are(replays, monkeypatch):
    """They move to memory of their own before the next replay; if that fails, and is tried again, it is not too late."""
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    first, _ = step(model, x, y)
    before = [total.clone() for total in first.sums.values()]
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "_foreach_add", without_room)
        step(model, examples(9, 12), y)
    step(model, examples(9, 12), y)
    assert all(map(torch.equal, before, first.sums.values()))


def without_room(*_):
    raise torch.OutOfMemoryError("out of memory")


def test_what_saved_tensor_hooks_keep_of_sums_stays_what_it_is(replays):
    """They may keep a sum by another name than the one that is followed."""
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    expected = without_tail(model, x, y)
    with cw.capture(model) as tape:
        losses = losses_of(model, x, y)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor):
        loss = cw.clipped_loss(tape, losses, cw.flat(0.3))
    step(model, examples(9, 12), y)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.sums[name])


def test_what_cannot_be_lent_is_copied():
    """Flags of many examples, say."""
    lending, flags, sums = Lending(), torch.ones(5, dtype=torch.bool), torch.ones(3)
    held = lending.lend([flags, sums])
    lending.take_back()
    flags.zero_(), sums.zero_()
    assert held[0].dtype == torch.bool and held[0].all() and torch.equal(held[1], torch.ones(3))


def test_views_of_clipped_gradients_stay_what_they_are(replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model)

    def first_row(x, y):
        with cw.capture(model) as tape:
            losses = losses_of(model, x, y)
        return next(iter(cw.clipped_gradients(tape, losses, cw.flat(0.3)).values()))[0]

    count, found = len(replays), first_row(examples(9, 12), torch.zeros(9, dtype=torch.long))
    before = found.clone()
    first_row(examples(9, 12), torch.ones(9, dtype=torch.long))
    assert len(replays) == count + 2 and torch.equal(found, before)


@pytest.mark.parametrize("at_once", [False, True], ids=["one after the other", "both losses first"])
def test_a_draw_in_parts(at_once, replays, monkeypatch):
    """The second part is replayed before what the first came to is released, or even back-propagated."""

    def trained():
        torch.manual_seed(0)
        model = mlp(12, (8, 9), 3).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = cw.PrivacyPlan(dataset_size=600, batch_size=12, steps=40, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=1.0)
        private = cw.PrivateTraining(model, optimizer, plan, own_batches=True, noise=cw.reproducible(5))
        values = []
        for _ in range(STEPS):
            batch, y = examples(12, 12), torch.arange(12) % 3
            parts = [lambda part=part: private.loss(losses_of(model, batch[part].clone(), y[part])) for part in (slice(0, 7), slice(7, 12))]
            waiting = []
            for part in parts:
                waiting.append(part())
                values.append(waiting[-1].detach())
                while waiting and (not at_once or len(waiting) == 2 or part is parts[-1]):
                    waiting.pop(0).backward()
            optimizer.step()
            optimizer.zero_grad()
        private.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.stack(values)

    found, values = trained()
    assert replays
    monkeypatch.setattr(tracing, "DEVICES", set())
    expected, expected_values = trained()
    assert torch.allclose(found, expected, rtol=1e-9) and torch.allclose(values, expected_values, rtol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_example_that_is_not_finite_counts_for_nothing(bad, replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    x[4, 2] = bad
    found, _ = step(model, x, y)
    assert_same(found, without_tail(model, x, y))
    assert not found.finite[4] and int(found.finite.sum()) == 8
    others = torch.arange(9) != 4
    assert_same(step(model, x[others], y[others])[0], without_tail(model, x[others], y[others]))


def test_rows_of_an_earlier_batch_leave_nothing_behind(replays):
    """A small batch after a large one whose numbers were not finite."""
    model = mlp(12, (8, 9), 3).double()
    sizes = [12, 9]
    for number in range(STEPS):
        step(model, examples(sizes[number % 2], 12), torch.randint(0, 3, (sizes[number % 2],)))
    step(model, torch.full((12, 12), math.nan, dtype=torch.float64), torch.randint(0, 3, (12,)))
    count = len(replays)
    x, y = examples(3, 12), torch.randint(0, 3, (3,))
    found, _ = step(model, x, y)
    assert len(replays) == count + 1
    assert_same(found, without_tail(model, x, y))


def test_a_larger_batch_is_recorded_anew(replays):
    model = mlp(12, (8, 9), 3).double()
    assert begun(model).rows == 9
    for size in (20, 15, 9):
        x, y = examples(size, 12), torch.randint(0, 3, (size,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
    (kind,) = experience_of([model]).tails.kinds.values()
    assert kind.tail.rows >= 20


def test_another_bound_is_another_recording(replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model, clipping=cw.flat(0.3))
    for clipping in (cw.flat(0.01), cw.per_layer(0.3), cw.automatic(0.3)):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y, clipping)[0], without_tail(model, x, y, clipping))


def test_a_number_that_changes_is_followed(replays):
    """eps of a normalisation goes into its gradient."""
    model = nn.Sequential(nn.LayerNorm(12, eps=1e-5), nn.Linear(12, 3)).double()
    begun(model)
    model[0].eps = 0.5
    for _ in range(STEPS):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))


def test_a_parameter_of_another_size_is_noticed(replays):
    """What reaches an embedding says nothing about how many rows it has."""
    model = Words().double()
    for _ in range(STEPS):
        step(model, words(9), torch.randint(0, 3, (9,)))
    assert any(kind.tail is not None for kind in experience_of([model]).tails.kinds.values())
    model.words.weight = nn.Parameter(torch.randn(25, 8, dtype=torch.float64))
    x, y = torch.randint(0, 25, (9, 5)), torch.randint(0, 3, (9,))
    found, _ = step(model, x, y)
    assert found.sums["words.weight"].shape == (25, 8)
    assert_same(found, without_tail(model, x, y))


def test_what_is_measured_in_other_ways_is_not_recorded(replays):
    """Weights made from others, checkpointed regions, one example, no example, norms asked for first."""
    derived = Net(lambda s, x: F.linear(x, s.w @ s.v), w=nn.Parameter(torch.randn(3, 2)), v=nn.Parameter(torch.randn(2, 12))).double()
    again = Net(lambda s, x: torch.utils.checkpoint.checkpoint(s.a, x, use_reentrant=False), a=nn.Linear(12, 3)).double()
    for model, size in ((derived, 9), (again, 9), (nn.Linear(12, 3).double(), 1)):
        for _ in range(STEPS):
            x, y = examples(size, 12), torch.randint(0, 3, (size,))
            assert_same(step(model, x, y)[0], without_tail(model, x, y))
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        with cw.capture(model) as tape:
            losses = F.cross_entropy(model(examples(9, 12)), torch.randint(0, 3, (9,)), reduction="none")
        norms = cw.per_example_norms(tape, losses)
        weights = clip(tape, losses, cw.flat(0.3), "bookkeep").weights
        assert torch.allclose(weights, (0.3 / norms).clamp(max=1))
    assert not replays


@pytest.mark.parametrize("room", [100, 3000])
def test_a_model_that_needs_much_room_is_not_recorded(room, replays, monkeypatch):
    """Nor are its gradients kept until all of them are there, if they alone tell that (1440 bytes; with the inputs of the layers 3528)."""
    monkeypatch.setattr(tails, "room_for_recording", lambda device, parameters: room)
    kept = []
    honest = tails.arrivals_at
    monkeypatch.setattr(tails, "arrivals_at", lambda *args: kept.append(1) or honest(*args))
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    assert not replays and len(kept) == (room == 3000)


def test_room_for_a_recording(monkeypatch):
    device = torch.device("cpu")
    monkeypatch.setattr(planner, "_CPU_BUDGET", 2**34)
    assert planner.room_for_recording(device, 2**20) == 2**28  # of 16 GB that may be taken a quarter of one: more is not copied
    assert planner.room_for_recording(device, 2**32) == 2**33  # twice the parameters
    monkeypatch.setattr(planner, "_CPU_BUDGET", 2**28)
    assert planner.room_for_recording(device, 2**20) == 2**26  # what nobody misses
    assert planner.room_for_recording(device, 2**30) == 2**28  # never more than there is
    monkeypatch.setattr(planner, "_CPU_BUDGET", 2**20)
    assert planner.room_for_recording(device, 2**30) == 2**20


def test_a_recording_that_is_wrong_is_not_used(replays, monkeypatch):
    honest = tail.graph_of

    def off(function, inputs):
        return honest(lambda *tensors: [1.2 * output if output.dim() == 2 else output for output in function(*tensors)], inputs)

    monkeypatch.setattr(tail, "graph_of", off)
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert len(replays) == 1  # the one that was held against the eager step


def test_a_machine_that_cannot_record_steps_as_always(monkeypatch):
    monkeypatch.setattr(tracing, "DEVICES", {"cpu"})

    def no_graphs(run, inputs):
        raise RuntimeError("no graphs here")

    monkeypatch.setattr(tail, "recorded", no_graphs)
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))


def test_the_same_losses_are_not_used_twice(replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    with cw.capture(model) as tape:
        losses = F.cross_entropy(model(examples(9, 12)), torch.randint(0, 3, (9,)), reduction="none")
    clip(tape, losses, cw.flat(0.3), "bookkeep")
    with pytest.raises(cw.ConsumedTape):
        clip(tape, losses, cw.flat(0.3), "bookkeep")


def test_examples_that_are_mixed_are_still_refused(replays):
    model = Net(lambda s, x: s.a(x) + s.a(x).mean(0, keepdim=True) if s.mixes else s.a(x), a=nn.Linear(12, 3), mixes=False).double()
    begun(model)
    model.mixes = True
    with pytest.raises(cw.Refusal):
        step(model, examples(9, 12), torch.randint(0, 3, (9,)))


def test_a_whole_training_has_the_numbers_of_the_eager_one(replays, monkeypatch):
    """Poisson draws, Adam, noise from a seed: the weights after some steps."""

    def trained():
        torch.manual_seed(3)
        model = mlp(12, (8, 9), 3).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        plan = cw.PrivacyPlan(dataset_size=60, batch_size=12, steps=30, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=0.5)
        with pytest.warns(UserWarning, match="reproducible"):
            private = cw.PrivateTraining(model, optimizer, plan, noise=cw.reproducible(1))
        data = torch.utils.data.TensorDataset(examples(60, 12), torch.arange(60) % 3)
        while private.ledger.spent < 30:
            for x, y in private.loader(data):
                private.loss(F.cross_entropy(model(x), y, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    found = trained()
    assert replays
    monkeypatch.setattr(tracing, "DEVICES", set())
    expected = trained()
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


def losses_of(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


ROWS = 3
IN_BLOCKS = torch.kron(torch.eye(8), torch.ones(1, ROWS)).double()
IN_TURNS = torch.kron(torch.ones(1, ROWS), torch.eye(8)).double()


def by_loop(model, x, y, bound):
    """Σ clip(g_i) by one backward pass an example."""
    total = 0.0
    for loss in losses_of(model, x, y):
        gradient = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)])
        total = total + gradient * min(1.0, bound / float(gradient.norm()))
    return total


@pytest.mark.parametrize("by_tail", [False, True])
@pytest.mark.parametrize("then", [IN_TURNS, IN_BLOCKS.roll(1, 1)], ids=["another layout", "no layout"])
def test_rows_that_lie_elsewhere_since_the_last_verification(then, by_tail, replays, monkeypatch):
    """A table of the model says whose rows are whose, and is changed before a step that verifies the model."""
    if not by_tail:
        monkeypatch.setattr(tracing, "DEVICES", set())
    model = Net(lambda s, x: s.pool @ s.a(x).tanh(), a=nn.Linear(12, 3)).double()
    model.register_buffer("pool", IN_BLOCKS.clone())
    for number in range(40):
        if experience_of([model]).steps == 31:
            model.pool.copy_(then)
        x, y = torch.randn(8 * ROWS, 12, dtype=torch.float64), torch.randint(0, 3, (8,))
        expected = by_loop(model, x, y, 0.3)
        flat = torch.cat([total.flatten() for total in step(model, x, y)[0].sums.values()])
        assert float((flat - expected).norm()) <= 1e-8 * float(expected.norm()), number
    assert bool(replays) == by_tail


def test_what_was_verified_otherwise_is_forgotten():
    """Layouts that say the same of this batch do not contradict each other."""
    model, shape = nn.Linear(2, 2), torch.Size([4, 3, 2])
    experience = experience_of([model])
    experience.layouts[0] = {7: Layout((0, 1), "block")}
    for same in (Layout((0,), "single"), Table((0,), torch.arange(4)), Table((0, 1), torch.arange(12) // 3), Layout((1, 0), "strided")):
        experience.compare(0, [(7, same, shape)], 4)
    assert experience.layouts[0] and not experience.revision
    experience.compare(0, [(7, Layout((0, 1), "strided"), torch.Size([5, 3, 2]))], 4)  # a shape that it does not fit
    assert experience.layouts[0]
    experience.compare(0, [(7, Layout((0, 1), "strided"), shape)], 4)
    assert not experience.layouts[0] and experience.revision == 1


def test_a_layout_that_was_replaced_is_not_taken_for_the_one_that_fitted():
    """Rows lie time first, then once batch first, by the same calls; then time first again."""

    def forward(s, x, sizes):
        found = s.b(s.a(x).tanh()).squeeze(-1).square()
        return F.interpolate(found.view(1, 1, *x.shape[:2]), sizes, None, "area").view(9)

    model = Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 1)).double()
    for steps, sizes in [*[(18, (1, 9))] * 9, (10, (9, 1)), (18, (1, 9))]:
        x = examples(*((steps, 9, 5) if sizes[0] == 1 else (9, steps, 5)))
        with cw.capture(model) as tape:
            losses = model(x, sizes)
        found = cw.per_example_norms(tape, losses)
        gradients = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in model(x, sizes)]
        torch.testing.assert_close(found, torch.stack([torch.cat([g.flatten() for g in one]).norm() for one in gradients]))


def test_a_clipping_of_ones_own_that_moves(replays):
    class Moving(type(cw.flat(1.0)).__base__):
        bound = 0.3

        @property
        def sensitivity(self):
            return self.bound

        def groups(self, names):
            return cw.flat(self.bound).groups(names)

    model, clipping = mlp(12, (8, 9), 3).double(), Moving()
    graphs = GraphSums(model, losses_of, clipping, rows=9, backend="eager")
    for number in range(2 * STEPS):
        clipping.bound = 0.3 if number < STEPS else 0.01
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y, clipping)[0], without_tail(model, x, y, cw.flat(clipping.bound)))
    with pytest.warns(UserWarning, match="a clipping of your own"):
        assert graphs.due(graphs.batch((x, y), 9)) is None
    assert not replays


def test_a_bound_that_moves_needs_no_other_recording(replays):
    model = mlp(12, (8, 9), 3).double()
    begun(model)
    count = len(replays)
    for bound in (0.3, 0.01, 2.0, 1e-6):
        x, y = examples(9, 12), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y, cw.flat(bound))[0], without_tail(model, x, y, cw.flat(bound)))
    assert len(replays) == count + 4 and len(experience_of([model]).tails.kinds) == 1


def test_a_rule_of_the_users_is_asked_every_time(replays, monkeypatch):
    """It may read what changes unnoticed."""
    from clipwise.registry import RULES

    monkeypatch.setitem(RULES, F.linear, replace(RULES[F.linear], trusted=False))
    model = mlp(12, (8, 9), 3).double()
    for _ in range(STEPS):
        step(model, examples(9, 12), torch.randint(0, 3, (9,)))
    assert not replays


def test_frozen_statistics_do_not_hide_a_wrong_recording(replays, monkeypatch):
    """Made-up variances would be negative, every example not finite, and nothing equal to nothing."""
    honest = tail.graph_of
    monkeypatch.setattr(
        tail,
        "graph_of",
        lambda function, inputs: honest(lambda *given: [1.2 * out if out.dim() > 1 else out for out in function(*given)], inputs),
    )
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double().eval()
    for _ in range(STEPS):
        x, y = examples(9, 2, 6, 6), torch.randint(0, 3, (9,))
        assert_same(step(model, x, y)[0], without_tail(model, x, y))
    assert len(replays) == 1


def test_a_number_of_another_type_does_not_stop_a_step(replays):
    numpy = pytest.importorskip("numpy")
    model = Net(lambda s, x: s.a(F.rms_norm(x, (12,), s.w, s.eps)), a=nn.Linear(12, 3), w=nn.Parameter(torch.ones(12)), eps=None).double()
    begun(model)
    model.eps = numpy.float32(1e-3)
    x, y = examples(9, 12), torch.randint(0, 3, (9,))
    assert_same(step(model, x, y)[0], without_tail(model, x, y))


def test_a_training_that_is_closed_holds_no_recordings(replays):
    model = mlp(12, (8, 9), 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.PrivacyPlan(dataset_size=60, batch_size=9, steps=30, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=0.5)
    with cw.PrivateTraining(model, optimizer, plan, own_batches=True) as private:
        for _ in range(STEPS):
            private.loss(losses_of(model, examples(9, 12), torch.randint(0, 3, (9,)))).backward()
            optimizer.step()
            optimizer.zero_grad()
        (recording,) = [weakref.ref(kind.tail) for kind in experience_of([model]).tails.kinds.values()]
    del private
    gc.collect()
    assert replays and recording() is None
