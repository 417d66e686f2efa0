"""Where the examples lie is measured; what mixes them is refused."""

import copy
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import planner, replay, rerun
from clipwise.separation import Codes
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from clipwise.verify import verified_gradients
from helpers import ALL_METHODS, OUT_OF_MEMORY, Net, assert_exact, examples

P = nn.Parameter


# --- layouts that people use


def test_time_first():
    model = Net(
        lambda s, x: s.out(torch.tanh(s.a(x.transpose(0, 1)) * s.g)).mean(0), a=nn.Linear(4, 3), g=P(torch.randn(3)), out=nn.Linear(3, 2)
    )
    assert_exact(model, examples(5, 7, 4), methods=ALL_METHODS)


def test_as_many_time_steps_as_examples():
    model = Net(lambda s, x: torch.tanh(s.a(x.transpose(0, 1)) + s.t).mean(0), a=nn.Linear(4, 3), t=P(torch.randn(5, 1, 3)))
    assert_exact(model, examples(5, 5, 4), methods=ALL_METHODS)


def test_windows_folded_into_the_batch():
    model = Net(lambda s, x: torch.tanh(s.n(s.a(x.reshape(-1, 2, 4)))).reshape(len(x), -1), a=nn.Linear(4, 3), n=nn.LayerNorm(3))
    assert_exact(model, examples(5, 6, 4), methods=ALL_METHODS)


def test_augmented_views_one_after_the_other():
    """Two views of the whole batch, stacked: rows of an example lie B apart."""
    model = Net(lambda s, x: s.a(torch.cat([x, x.flip(2)])).tanh().unflatten(0, (2, -1)).mean(0).flatten(1), a=nn.Conv1d(2, 3, 2))
    assert_exact(model, examples(5, 2, 6), methods=ALL_METHODS)


def test_several_records_of_one_user():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    users = examples(4, 5, 4)  # five records each
    by_user = lambda output: output.square().sum(1).view(-1, 5).mean(1)
    flat = Net(lambda s, x: s.m(x.flatten(0, 1)), m=model)
    assert_exact(flat, users, loss=by_user, methods=ALL_METHODS)


@pytest.mark.parametrize("numbers", [1, 7, 40])
def test_rows_are_compared_a_few_at_a_time(numbers, monkeypatch):
    """As where a device has little room; a row that mixes examples is found in whichever part it lies."""
    monkeypatch.setattr("clipwise.separation.compared_at_once", lambda device: numbers)
    model = Net(lambda s, x: s.out(torch.tanh(s.a(x.transpose(0, 1)))).mean(0), a=nn.Linear(4, 3), out=nn.Linear(3, 2))
    assert_exact(model, examples(5, 7, 4), methods=["bookkeep"])
    for mixed in (0, 4):

        def forward(net, x, mixed=mixed):
            h = net.a(x)
            return h + (torch.arange(len(x)) == mixed)[:, None] * h.roll(1, 0)

        mixing = Net(forward, a=nn.Linear(4, 3)).double()
        with cw.capture(mixing) as tape:
            losses = squared_output(mixing(examples(5, 4)))
        with pytest.raises(cw.MixedExamples):
            cw.clipped_gradients(tape, losses, cw.flat(1.0))


def test_little_is_compared_at_once_and_nothing_held_where_there_is_no_room(monkeypatch):
    """On a device whose memory a large step has filled, gradients wait on the host, and comparing takes little of what is left."""
    device, free = torch.device("cpu"), 2**30
    monkeypatch.setattr(planner, "room_for_trial", lambda device: free)
    for free in (2**24, 2**28, 2**33):
        assert 2**16 <= planner.compared_at_once(device) <= max(2**16, free // 64, 1)
        room = planner.room_beside_a_pass(device, 2**26)
        assert room.take((free - 2**28) // 4) if free > 2**28 else not room.take(1)
        assert not room.take(1)


def with_room_for(most, monkeypatch, where=rerun._Trial, error=None):
    """Runs on more than `most` examples find no memory. Returns on how many each was tried."""
    sizes, run = [], where._run

    def tight(self, inputs, *rest, **options):
        sizes.append(len(inputs[0][0]) if where is rerun._Trial else len(self.targets[0]))
        if sizes[-1] > most:
            raise error or torch.OutOfMemoryError("CUDA out of memory.")
        return run(self, inputs, *rest, **options)

    monkeypatch.setattr(where, "_run", tight)
    return sizes


def tried_on(batch, forward=lambda s, x: s.a(x), **layers):
    model = Net(forward, a=nn.Linear(4, 3), **layers).double()
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(batch, 4)))
    cw.clipped_gradients(tape, losses, cw.flat(1.0))
    return tape


def test_models_are_tried_on_fewer_examples_where_memory_runs_out(monkeypatch):
    sizes = with_room_for(3, monkeypatch)
    tape = tried_on(12)
    assert sizes[:3] == [8, 4, 2] and set(sizes[3:]) <= {1, 2} and len(sizes) > 8
    assert tape.experience.examples_tried == 2  # more are tried in the steps that follow


def test_mixing_is_found_on_fewer_examples_too(monkeypatch):
    with_room_for(3, monkeypatch)
    with pytest.raises(cw.MixedExamples):
        tried_on(12, lambda s, x: s.a(x) - s.a(x).detach().mean(0))


def test_no_more_gradients_are_held_than_are_compared(monkeypatch):
    """They are as large as the model."""
    runs, alive, run = [], [], rerun._Trial._run

    def noted(self, *args, **options):
        alive.append(sum(bool(one.gradient) for reference in runs if (one := reference()) is not None))
        found = run(self, *args, **options)
        runs.append(weakref.ref(found))
        return found

    monkeypatch.setattr(rerun._Trial, "_run", noted)
    tried_on(12)
    assert len(alive) > 8 and max(alive) == 1


@pytest.mark.parametrize("batch", [6, 7, 8])
def test_two_examples_are_the_fewest(batch, monkeypatch):
    """One alone has nobody to mix with. A gate that is zero today: only the gradient tells."""
    with_room_for(2, monkeypatch)
    gate = nn.Linear(3, 3, bias=False)
    nn.init.zeros_(gate.weight)
    with pytest.raises(cw.MixedExamples):
        tried_on(batch, lambda s, x: s.b(s.a(x)) + s.g(s.a(x).detach().mean(0, keepdim=True).expand(len(x), 3)), b=nn.Linear(3, 3), g=gate)


def test_a_model_that_runs_on_all_examples_only_and_finds_no_memory_for_them(monkeypatch):
    def forward(s, x):
        if len(x) != 12:
            raise ValueError("twelve, please")
        return s.a(x)

    sizes = with_room_for(11, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        tried_on(12, forward)
    assert sizes == [8, 12]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", [rerun._Trial, replay._Replay])
def test_a_test_for_mixing_that_finds_no_memory_is_no_test_that_was_passed(where, error, monkeypatch):
    with_room_for(1, monkeypatch, where, error)
    with pytest.raises(type(error)):
        tried_on(12)


@pytest.mark.parametrize("mixed", [0, 2, 4])
def test_one_place_of_the_batch_that_looks_at_its_neighbour(mixed):
    """By a second use of the layer, of which one row alone has a gradient: that a loss owns this row says nothing of the others."""

    def refused():
        model = Net(lambda s, x: s.a(x) + (torch.arange(len(x)) == mixed)[:, None] * s.a(x).roll(1, 0), a=nn.Linear(4, 3)).double()
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(5, 4)))
        try:
            cw.clipped_gradients(tape, losses, cw.flat(1.0))
        except cw.MixedExamples:
            return True
        return False

    assert any(refused() for _ in range(6))  # rows are exchanged at random: one try in five sees nothing


def test_examples_along_two_axes():
    model = Net(lambda s, x: torch.tanh(s.a(x)), a=nn.Linear(4, 3))
    x = examples(6, 4)
    reference = loop_gradients(model, (x,))
    model = model.double()
    with cw.capture(model) as tape:
        losses = squared_output(model(x.view(2, 3, 4)).flatten(0, 1))
    expected, norms = clip_and_add(reference, 1.0)
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
    torch.testing.assert_close(cw.clipped_gradients(tape, losses, cw.flat(1.0))["a.weight"], expected["a.weight"])


def test_rows_in_no_regular_order():
    """A permutation inside the model: no layout fits, so every batch is measured."""

    def forward(s, x):
        order = torch.arange(len(x)).flip(0).roll(1)
        return torch.tanh(s.a(x[order]))[order.argsort()]

    assert_exact(Net(forward, a=nn.Linear(4, 3)), examples(5, 4), methods=ALL_METHODS)


def test_a_loop_over_examples():
    assert_exact(Net(lambda s, x: torch.stack([torch.tanh(s.a(row)) for row in x]), a=nn.Linear(4, 3)), examples(5, 4))


def test_chunks_of_the_batch():
    model = Net(lambda s, x: torch.cat([torch.tanh(s.a(part)) for part in x.split(2)]), a=nn.Linear(4, 3))
    assert_exact(model, examples(5, 4), methods=ALL_METHODS)


def test_more_examples_than_one_pass_can_tell_apart():
    assert_exact(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), examples(70, 3))


def test_codes_are_unique():
    for batch, half in [(2, False), (16, False), (17, False), (300, False), (5, True), (70, True)]:
        codes = Codes.draw(batch, half)
        assert len(set(zip(*codes.digits))) == batch
        assert (codes.owner_of() >= 0).sum() == batch


def test_batch_size_changes_between_steps_without_probing_again(monkeypatch):
    probes = []
    monkeypatch.setattr("clipwise.collect.verified_gradients", lambda *a: probes.append(1) or verified_gradients(*a))
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()
    for batch in (20, 9, 33, 2, 20):
        x = examples(batch, 2, 5)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        expected, _ = clip_and_add(loop_gradients(model, (x,)), 0.5)
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
    assert len(probes) == 3  # steps 1, 2 and 4


# --- taps whose gradient is zero at first


def test_zero_initialised_gates_are_probed_again():
    """LoRA with B = 0: the gradient of A is zero on the first step and must be right on the second."""
    model = Net(
        lambda s, x: s.base(x) + s.up(s.down(x)), base=nn.Linear(4, 3), down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 3, bias=False)
    )
    nn.init.zeros_(model.up.weight)
    model.double()
    for step in range(3):
        x = examples(5, 4)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        expected, _ = clip_and_add(loop_gradients(model, (x,)), 0.5)
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
        assert bool(found["down.weight"].any()) == (step > 0)
        with torch.no_grad():
            model.up.weight.add_(1.0)


def test_mixing_behind_a_zero_gate_is_found_when_the_gate_opens():
    def forward(s, x):
        h = s.a(x)
        return x[:, :3] + s.gate * (h - h.mean(0))

    model = Net(forward, a=nn.Linear(4, 3), gate=P(torch.zeros(3)))
    x = torch.randn(5, 4)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0))
    # … and where the forward pass alone does not show it, because the gate closes it there too:
    with torch.no_grad():
        model.gate.fill_(0.5)
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0))


def test_only_one_example_has_a_gradient():
    """Hinge losses: nothing can be concluded from one example, yet the step is exact and nothing is refused."""
    model = nn.Linear(4, 4)
    hinge = lambda output: F.relu(output.sum(1) - 5)
    x = torch.cat([torch.full((4, 4), -9.0), torch.full((1, 4), 9.0)]).double()
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert_exact(model, x, loss=hinge)


# --- mixing


def contrastive(output):
    similarity = output @ output.t()
    return F.cross_entropy(similarity, torch.arange(len(output)), reduction="none")


MIXERS = {
    "contrastive loss": (nn.Linear(4, 3), contrastive),
    "subtracting the mean": (Net(lambda s, x: s.b(s.a(x) - s.a(x).mean(0)), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), squared_output),
    "detached statistics": (Net(lambda s, x: s.b(s.a(x) - s.a(x).mean(0).detach()), a=nn.Linear(4, 3), b=nn.Linear(3, 2)), squared_output),
    "statistics of the inputs": (Net(lambda s, x: s.a((x - x.mean(0)) / x.std(0)), a=nn.Linear(4, 3)), squared_output),
    "attention over the batch": (Net(lambda s, x: F.scaled_dot_product_attention(s.a(x), s.a(x), x), a=nn.Linear(4, 4)), squared_output),
    "rank in the batch": (Net(lambda s, x: s.a(x) * (x[:, :1].argsort(0).argsort(0) + 1), a=nn.Linear(4, 3)), squared_output),
    "division by a count": (Net(lambda s, x: s.a(x) / (x[:, :1] > 0).sum(), a=nn.Linear(4, 3)), squared_output),
    "division by the batch size": (Net(lambda s, x: s.a(x) / len(x), a=nn.Linear(4, 3)), squared_output),
    "neighbour's row": (Net(lambda s, x: s.a(x) + s.a(x).roll(1, 0), a=nn.Linear(4, 3)), squared_output),
    "cumulative sum": (Net(lambda s, x: s.a(x).cumsum(0), a=nn.Linear(4, 3)), squared_output),
    "losses normalised": (nn.Linear(4, 3), lambda output: squared_output(output) / squared_output(output).detach().mean()),
    "losses subtracted": (nn.Linear(4, 3), lambda output: squared_output(output) - squared_output(output).mean()),
    "focal weights over the batch": (nn.Linear(4, 3), lambda o: squared_output(o) * torch.softmax(squared_output(o).detach(), 0)),
}


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("method", ALL_METHODS)
def test_mixing_is_refused_by_every_method(name, method):
    model, loss = copy.deepcopy(MIXERS[name])
    with cw.capture(model) as tape:
        losses = loss(model(torch.randn(6, 4)))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0), method=method)


def test_the_refusal_names_the_place():
    model = Net(lambda s, x: s.head(s.encoder(x) - s.encoder(x).mean(0)), encoder=nn.Sequential(nn.Linear(4, 3)), head=nn.Linear(3, 2))
    with cw.capture(model) as tape:
        losses = squared_output(model(torch.randn(6, 4)))
    with pytest.raises(cw.MixedExamples, match=r"torch.nn.functional.linear uses encoder\.0\..* \(in encoder\.0, a Linear\)"):
        cw.per_example_norms(tape, losses)


def test_one_pair_of_mixed_examples_among_many():
    """Powers of two that no two examples share: even a single pair is caught, always."""

    def forward(s, x):
        h = s.a(x)
        mixed = h.clone()
        mixed[7] = h[7] + 1e-3 * h[41]
        return mixed

    for _ in range(5):
        model = Net(forward, a=nn.Linear(4, 3))
        with cw.capture(model) as tape:
            losses = squared_output(model(torch.randn(60, 4)))
        with pytest.raises(cw.MixedExamples):
            cw.per_example_norms(tape, losses)


def test_dropout_is_not_mixing():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)).double()
    x = examples(6, 4)
    state = torch.get_rng_state()
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    assert not torch.equal(torch.get_rng_state(), state)
    after = torch.get_rng_state()
    norms = cw.per_example_norms(tape, losses)
    assert torch.equal(torch.get_rng_state(), after), "verifying must not draw random numbers"
    each = torch.stack(
        [torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)]).norm() for loss in losses]
    )
    torch.testing.assert_close(norms, each.to(norms))


@pytest.mark.parametrize("length", [4, 5])
def test_a_shared_mask_is_not_mixing(length):
    def forward(s, x, mask):
        h = s.a(x)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=mask)

    model = Net(forward, a=nn.Linear(3, 3)).double()
    x, mask = examples(5, length, 3), torch.randn(length, length, dtype=torch.float64)
    expected = Net(lambda s, x: s.m(x, mask), m=model)
    _, norms = clip_and_add(loop_gradients(expected, (x,)), 1.0)
    with cw.capture(model) as tape:
        losses = squared_output(model(x, mask))
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


def test_declared_constants():
    """A table of prototypes that has as many rows as the batch, handed in from outside."""
    model = Net(lambda s, x, prototypes: torch.cdist(s.a(x), s.b(prototypes)), a=nn.Linear(4, 3), b=nn.Linear(2, 3)).double()
    x, prototypes = examples(5, 4), torch.randn(7, 2, dtype=torch.float64)
    with cw.capture(model, fallback=True) as tape:
        losses = squared_output(model(x, prototypes))
    with pytest.raises(cw.MixedExamples, match=r"clipwise\.constant"):
        cw.per_example_norms(tape, losses)
    with cw.capture(model, fallback=True) as tape:
        losses = squared_output(model(x, cw.constant(prototypes)))
    _, norms = clip_and_add(loop_gradients(Net(lambda s, x: s.m(x, prototypes), m=model), (x,)), 1.0)
    torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


def test_class_weights_as_many_as_examples():
    weights = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    target = torch.tensor([0, 2, 1])
    model = nn.Linear(4, 3).double()
    with cw.capture(model) as tape:
        losses = F.cross_entropy(model(examples(3, 4)), target, weight=weights, reduction="none")
    assert cw.per_example_norms(tape, losses).shape == (3,)


def test_a_model_for_one_batch_size_only():
    """It cannot be run on fewer examples, but with others exchanged."""
    for mixes in (False, True):
        model = Net(lambda s, x, mixes=mixes: s.a(x.view(6, 4) - mixes * x.mean(0)), a=nn.Linear(4, 3))
        with cw.capture(model) as tape:
            losses = squared_output(model(torch.randn(6, 4)))
        if mixes:
            with pytest.raises(cw.MixedExamples):
                cw.per_example_norms(tape, losses)
        else:
            assert cw.per_example_norms(tape, losses).shape == (6,)


@pytest.fixture
def flushed():
    """Numbers below 1e-38 count as zero, as in many kernels of a GPU."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor keeps small numbers")
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("smallest", [1e-35, 1e-36, 1e-37])
def test_a_vanishing_gradient_is_no_mixing(smallest, flushed):
    """An example that the model is sure of has a gradient near the smallest number there is, and loses digits of it on the way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(20, 6)
    sure = torch.logspace(0, math.log10(smallest), 20)
    with cw.capture(model) as tape:
        losses = model(x).square().sum(1) * sure
    sums = cw.clipped_gradients(tape, losses, cw.flat(0.01))
    assert all(total.isfinite().all() for total in sums.values())


@pytest.fixture
def verified(monkeypatch):
    """Grows with every step on which the model is verified."""
    from clipwise import collect

    steps = []
    real = collect.verified_gradients
    monkeypatch.setattr(collect, "verified_gradients", lambda *args: steps.append(1) or real(*args))
    return steps


def test_float16_is_not_verified_on_every_step(verified):
    """Its small gradients are all it has: they prove where examples lie."""
    model = nn.Linear(4, 3).half()
    for _ in range(20):
        with cw.capture(model) as tape:
            losses = model(torch.randn(8, 4).half()).float().square().sum(1) * 1e-4
        cw.clipped_gradients(tape, losses, cw.flat(1e-3))
    assert len(verified) <= 6  # steps 1, 2, 4, 8, 16, and what the first ones left open


def test_kernels_repeat_themselves_while_a_model_is_verified():
    """On a GPU atomic sums differ from pass to pass; the user's own choice is back afterwards, also after a refusal."""
    seen = []
    linear = nn.Linear(3, 2).double()

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.backends.cudnn.deterministic)
            return grad

    for _ in range(5):
        with cw.capture(linear) as tape:
            losses = Looking.apply(linear(examples(4, 3))).square().sum(1)
        cw.clipped_loss(tape, losses, cw.flat(1.0))
    assert seen[:2] == [True, True] and seen[-1] is False
    with cw.capture(linear) as tape:
        output = linear(examples(4, 3))
        losses = (output - output.mean(0)).square().sum(1)
    with pytest.raises(cw.MixedExamples):
        cw.clipped_loss(tape, losses, cw.flat(1.0))
    assert torch.backends.cudnn.deterministic is False


UNUSED = {
    "beside": Net(lambda s, x: (s.a(x), s.b(x))[0], a=nn.Linear(4, 3), b=nn.Linear(4, 2)),
    "behind": Net(lambda s, x: (lambda h: (h, torch.tanh(s.b(h)))[0])(s.a(x)), a=nn.Linear(4, 3), b=nn.Linear(3, 2)),
    "a final state": Net(lambda s, x: s.a(x.view(-1, 2, 2))[0][:, -1], a=nn.LSTM(2, 5, proj_size=3, batch_first=True)),
}


@pytest.mark.parametrize("name", UNUSED)
def test_outputs_that_the_losses_do_not_use_are_no_reason_to_verify_every_step(name, verified):
    """A pooled output that nobody asked for, a second head."""
    model = UNUSED[name].double()
    for _ in range(20):
        x = examples(8, 4)
        with cw.capture(model) as tape:
            losses = squared_output(model(x))
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    assert len(verified) <= 6
    assert_exact(model, x)


def test_an_output_that_is_used_all_at_once_is_verified(verified):
    """By the same calls, and the same way from an output to the losses."""
    model = Net(lambda s, x: (s.a(x), s.b(x - x.mean(0)))[s.used], a=nn.Linear(4, 3), b=nn.Linear(4, 3)).double()
    model.used = 0
    for _ in range(11):
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(8, 4)))
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
    assert len(verified) <= 5
    model.used = 1
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(8, 4)))
    with pytest.raises(cw.MixedExamples):
        cw.clipped_gradients(tape, losses, cw.flat(0.5))
