"""private.compile: the numbers, refusals and ledger of the eager loop, by a graph."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.compiled.agreement import agree
from clipwise.compiled.once import make_each_call_once
from clipwise.compiled.rows import Leaves, default_rows, made_up, part_of
from clipwise.compiled.sums import GraphSums
from clipwise.compiled.variant import _is_beyond_inductor
from clipwise.kernels import through_time
from helpers import Net, examples

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining", "ignore::DeprecationWarning")

RECORDS = 200


def mean_loss(model, x, y):
    out = model(x)
    return F.cross_entropy(out.flatten(1)[:, :3], y, reduction="none")


def plan_for(steps, *, clipping=None, batch=12, **options):
    return cw.PrivacyPlan(
        dataset_size=RECORDS, batch_size=batch, steps=steps, delta=1e-4, clipping=clipping or cw.flat(0.3), noise_multiplier=1.0, **options
    )


def train(
    model,
    x,
    *,
    steps=11,
    compiled=True,
    losses_of=mean_loss,
    rows=None,
    backend="eager",
    optimizer=None,
    noise=None,
    after=None,
    plan=None,
    **options,
):
    """Trains for some steps; returns all weights in one vector, the compiled step and the training."""
    data = TensorDataset(x, (torch.arange(RECORDS) % 3).to(x.device))
    optimizer = (optimizer or (lambda p: torch.optim.Adam(p, lr=1e-2)))(model.parameters())
    private = cw.PrivateTraining(model, optimizer, plan or plan_for(steps), noise=noise or cw.reproducible(5), **options)
    step = private.compile(losses_of, rows=rows, backend=backend) if compiled else None
    while private.ledger.spent < steps:
        for x, y in private.loader(data):
            if step is not None:
                step(x, y)
            else:
                private.loss(losses_of(model, x, y)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if after is not None:
                after(optimizer)
            if private.ledger.spent >= steps:
                break
    return torch.cat([p.detach().flatten() for p in model.parameters()]), step, private


def built(build, seed=0):
    torch.manual_seed(seed)
    return build().double()


def assert_same_training(build, x, *, expect_graphs=1, tolerance=1e-9, **options):
    eager_options = {key: value for key, value in options.items() if key not in ("rows", "backend")}
    expected, _, _ = train(built(build), x, compiled=False, **eager_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        warnings.filterwarnings("error", message="the graph could not be compiled")
        found, step, private = train(built(build), x, **options)
    assert len(step.graphs.variants) == expect_graphs
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    return step, private


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), (4,)),
    "cnn": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4)),
    "grouped convolution": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3, groups=2, stride=2), nn.Flatten(), nn.Linear(24, 3)), (4, 8)),
    "sequence": (lambda: Net(lambda s, x: s.b(s.n(torch.tanh(s.a(x)))).mean(1), a=nn.Linear(4, 6), n=nn.LayerNorm(6), b=nn.Linear(6, 3)), (5, 4)),
    "lstm": (lambda: Net(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.LSTM(4, 5, batch_first=True), b=nn.Linear(5, 3)), (6, 4)),
    "gru": (lambda: Net(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.GRU(4, 5, batch_first=True), b=nn.Linear(5, 3)), (6, 4)),
    "rnn": (lambda: Net(lambda s, x: s.b(s.a(x)[0][:, -1]), a=nn.RNN(4, 5, bias=False, batch_first=True), b=nn.Linear(5, 3)), (6, 4)),
    "attention": (
        lambda: Net(
            lambda s, x: s.b(s.a(x, x, x, need_weights=False)[0]).mean(1), a=nn.MultiheadAttention(4, 2, batch_first=True), b=nn.Linear(4, 3)
        ),
        (5, 4),
    ),
    "tied weights": (lambda: Net(lambda s, x: F.linear(torch.tanh(s.a(x)), s.a.weight), a=nn.Linear(4, 4)), (3, 4)),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4)),
    "scale and shift": (lambda: Net(lambda s, x: s.a(x) * s.g + s.h, a=nn.Linear(4, 3), g=nn.Parameter(torch.ones(3)), h=nn.Parameter(torch.zeros(3))), (4,)),
    "class token": (
        lambda: Net(
            lambda s, x: s.b(torch.cat([s.t.expand(len(x), -1, -1), s.a(x)], 1)).mean(1), a=nn.Linear(4, 6), b=nn.Linear(6, 3), t=nn.Parameter(torch.ones(1, 1, 6))
        ),
        (5, 4),
    ),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.Tanh(), nn.Linear(6, 3)), (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_of_the_eager_loop(name):
    build, shape = MODELS[name]
    assert_same_training(build, examples(RECORDS, *shape))


def test_recurrent_weights_are_not_laid_out_anew(monkeypatch):
    """A recurrent layer whose weights were exchanged copies them into one piece, on a GPU by calls that no tape knows."""
    model = built(MODELS["lstm"][0])
    copies = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: copies.append(1))
    step, _ = in_steady_state(model, examples(9, 6, 4))
    step(examples(9, 6, 4), torch.arange(9) % 3)
    assert not copies and model.a._flat_weights[0] is model.a.weight_ih_l0


def test_a_graph_holds_the_identity_that_recurrent_kernels_multiply_by():
    """Computed anew, it took three kernels of every replay."""
    step, _ = in_steady_state(built(MODELS["lstm"][0]), examples(9, 6, 4))
    (variant,) = step.graphs.variants.values()
    code = variant.traced.graph.code
    assert "_tensor_constant" in code and "aten.eye" not in code


def test_a_graph_makes_each_call_once():
    """A layer's weight and its bias need the norm of the same rows."""
    build, shape = MODELS["mlp"]
    step, _ = in_steady_state(built(build), examples(9, *shape))
    (variant,) = step.graphs.variants.values()
    lines = [line.split(" = ", 1)[1].split(";")[0] for line in variant.traced.graph.code.splitlines() if " = " in line]
    assert len(lines) == len(set(lines))


def test_calls_that_differ_by_more_than_their_names_are_all_made():
    def function(x):
        same = x.exp() + x.exp()
        numbers = (x * 1.0 + x * 2.0) + (x.sum(0) + x.sum(0, keepdim=True)) + torch.copysign(x, 0.0) * torch.copysign(x, -0.0)
        return [same, numbers, torch.rand_like(x) - torch.rand_like(x)]

    graph = make_fx(function)(torch.ones(3))
    make_each_call_once(graph)
    times = {name: graph.code.count(f"aten.{name}.") for name in ("exp", "mul", "sum", "copysign", "rand_like")}
    assert times == {"exp": 1, "mul": 3, "sum": 2, "copysign": 2, "rand_like": 2}
    x = torch.randn(3)
    for found, wanted in zip(graph(x)[:2], function(x)[:2]):
        torch.testing.assert_close(found, wanted)


def test_what_is_computed_again_to_save_memory_is_computed_again():
    build = lambda: Net(
        lambda s, x: s.b(checkpoint(lambda h: s.a(h).tanh().sin(), x, use_reentrant=False)), a=nn.Linear(4, 8), b=nn.Linear(8, 3)
    )
    step, _ = assert_same_training(build, examples(RECORDS, 4))
    (variant,) = step.graphs.variants.values()
    assert variant.traced.graph.code.count("aten.tanh.") == 2


def test_inductor_is_not_asked_where_a_kernel_returns_the_memory_that_it_was_given():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten._cudnn_rnn.default, ()))
    assert _is_beyond_inductor(torch.fx.GraphModule(nn.Module(), graph))
    assert not _is_beyond_inductor(make_fx(lambda x: x.exp())(torch.ones(3)))


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_recurrent_layers_train_by_inductor_or_as_traced_without_a_word(name):
    """oneDNN's LSTM is beyond Inductor."""
    build, shape = MODELS[name]
    x = torch.randn(RECORDS, *shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        warnings.filterwarnings("error", message="the graph could not be compiled")
        _, step, _ = train(build(), x, backend="inductor", steps=7)
    assert len(step.graphs.variants) == 1


@pytest.mark.parametrize("kernel", [torch.lstm, torch.gru])
def test_one_node_runs_all_steps_of_a_recurrent_layer_and_one_goes_back(kernel, monkeypatch):
    """Where its backward pass on a CPU is our own; and so the rest is compiled."""
    monkeypatch.setitem(through_time._LEAST_WORK, kernel, 0)
    sizes = []
    for time in (3, 30):
        step, _ = assert_same_training(MODELS[kernel.__name__][0], examples(RECORDS, time, 4), backend="inductor")
        (variant,) = step.graphs.variants.values()
        names = [str(node.target) for node in variant.traced.graph.graph.nodes]
        assert names.count("clipwise.recurrent_on_host.default") == names.count("clipwise.recurrent_on_host_backward.default") == 1
        assert not _is_beyond_inductor(variant.traced.graph)
        sizes.append(len(names))
    assert sizes[0] == sizes[1]


def test_before_something_is_changed_in_place_every_call_is_made():
    def function(x):
        first, second = x.exp(), x.exp()
        first.view(-1).add_(1)
        return [first - second, x.sin() + x.sin()]

    graph = make_fx(function)(torch.ones(3))
    make_each_call_once(graph)
    torch.testing.assert_close(graph(torch.ones(3))[0], torch.ones(3))
    assert graph.code.count("aten.exp.") == 2 and graph.code.count("aten.sin.") == 1


def test_embeddings():
    build = lambda: Net(lambda s, x: s.b(s.e(x).mean(1)), e=nn.Embedding(20, 5, padding_idx=0), b=nn.Linear(5, 3))
    assert_same_training(build, torch.randint(0, 20, (RECORDS, 7)))


def test_parameters_with_one_gradient_share_an_output_of_the_graph():
    """A compiler finds out that both biases have the same sum, and returns one tensor twice; rounds are added up all the same."""
    build = lambda: Net(lambda s, x: s.a(x) + s.b, a=nn.Linear(4, 3), b=nn.Parameter(torch.zeros(3)))
    assert_same_training(build, examples(RECORDS, 4), rows=5, backend="inductor")


def test_draws_larger_than_the_graph_take_several_rounds():
    build, shape = MODELS["mlp"]
    step, _ = assert_same_training(build, examples(RECORDS, *shape), rows=5)
    assert step.graphs.rows == 5


@pytest.mark.parametrize(
    "clipping", [cw.per_layer(0.3), cw.per_group({"0.*": 0.1, "*": 0.4}), cw.automatic(0.5), cw.adaptive(0.3)], ids=["layers", "groups", "automatic", "adaptive"]
)  # fmt: skip
def test_every_clipping(clipping):
    build, shape = MODELS["mlp"]
    assert_same_training(build, examples(RECORDS, *shape), plan=plan_for(11, clipping=clipping))


@pytest.mark.parametrize("sampler", ["shuffle", "fixed_size", "truncated_poisson"])
def test_every_sampler(sampler):
    build, shape = MODELS["mlp"]
    step, _ = assert_same_training(build, examples(RECORDS, *shape), plan=plan_for(11, sampler=sampler))
    assert step.graphs.rows == (12 if sampler != "truncated_poisson" else 24)


def test_learning_rate_schedules():
    build, shape = MODELS["mlp"]
    schedulers = {}

    def after(optimizer):
        schedulers.setdefault(id(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)).step()

    assert_same_training(build, examples(RECORDS, *shape), after=after)


def test_several_modules_and_optimizers():
    def run(compiled):
        torch.manual_seed(0)
        body, head = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
        optimizers = [torch.optim.SGD(body.parameters(), lr=0.1), torch.optim.Adam(head.parameters())]
        private = cw.PrivateTraining([body, head], optimizers, plan_for(9), noise=cw.reproducible(1))
        losses_of = lambda m, x, y: F.cross_entropy(m[1](torch.tanh(m[0](x))), y, reduction="none")
        step = private.compile(losses_of, backend="eager")
        for x, y in private.loader(TensorDataset(examples(RECORDS, 4), torch.arange(RECORDS) % 3)):
            if private.ledger.spent == 9:
                break
            if compiled:
                step(x, y)
            else:
                private.loss(losses_of([body, head], x, y)).backward()
                for one in optimizers:
                    one.step()
                    one.zero_grad()
        return torch.cat([p.detach().flatten() for m in (body, head) for p in m.parameters()]), step

    (expected, _), (found, step) = run(False), run(True)
    assert len(step.graphs.variants) == 1 and torch.allclose(found, expected, rtol=1e-10, atol=0)


def test_batches_of_any_structure():
    def losses_of(model, batch, scale):
        return scale * mean_loss(model, batch["x"], batch["y"])

    build, shape = MODELS["mlp"]
    x, results = examples(RECORDS, *shape), []
    for compiled in (False, True):
        model = built(build)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = cw.PrivateTraining(model, optimizer, plan_for(9), noise=cw.reproducible(1))
        step = private.compile(losses_of, backend="eager")
        for part, y in private.loader(TensorDataset(x, torch.arange(RECORDS) % 3)):
            if private.ledger.spent == 9:
                break
            if compiled:
                step({"x": part, "y": y}, 2.0)
            else:
                private.loss(losses_of(model, {"x": part, "y": y}, 2.0)).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert len(step.graphs.variants) == 1 and torch.allclose(*results, rtol=1e-10, atol=0)


def in_steady_state(model, x, *, losses_of=mean_loss, backend="eager", rows=16, steps=200, **options):
    """A compiled step whose graph exists, and its training, of batches that the caller makes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = cw.PrivateTraining(model, optimizer, plan_for(steps), own_batches=True, noise=cw.reproducible(5), **options)
    step = private.compile(losses_of, rows=rows, backend=backend)
    while not step.graphs.variants or private.ledger.spent in (3, 7, 15, 31):
        step(x.clone(), torch.arange(len(x)) % 3)
        assert private.ledger.spent < 40, "no graph was made"
    return step, private


def begun(model, losses_of=mean_loss, *, rows=12, **options):
    """A training of batches that the caller makes, and its compiled step."""
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(40), own_batches=True, **options)
    return private.compile(losses_of, rows=rows, backend="eager"), private


def sums_of(step, x, y):
    """What the graph finds for a batch."""
    (variant,) = step.graphs.variants.values()
    clipped = step.graphs.clipped(variant, step.graphs.batch((x, y), len(x)), 1.0)
    return list(clipped.sums.values()), clipped.weights, clipped.finite


def expected_sums(model, x, y):
    with cw.capture(model) as tape:
        losses = mean_loss(model, x, y)
    return list(cw.clipped_gradients(tape, losses, cw.flat(0.3)).values())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_rows_that_are_not_real_or_not_finite_count_for_nothing(backend):
    """By the compiled graph too: a compiler may take 0·x for 0, and then a NaN goes through."""
    model = built(MODELS["cnn"][0]).float()
    x, y = examples(11, 2, 4, 4).float(), torch.arange(11) % 3
    step, _ = in_steady_state(model, x, backend=backend)
    for bad in (float("nan"), float("inf"), 1e30):
        spoiled = x.clone()
        spoiled[4], spoiled[7, 0, 0, 0] = bad, bad
        sums, weights, finite = sums_of(step, spoiled, y)
        expected = expected_sums(model, spoiled, y)
        for a, b in zip(sums, expected):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)
        assert len(weights) == len(finite) == 11 and bool(((weights == 0) == ~finite).all())
    (variant,) = step.graphs.variants.values()
    padded = [torch.cat([x, x[:5]]), torch.cat([y, y[:5]])]
    assert all(not total.any() for total in variant.run(padded, 0, 1.0)[:-2])  # no row is real: exactly nothing


def test_the_bound_holds_for_every_example_alone():
    model = built(MODELS["sequence"][0])
    x, y = examples(6, 5, 4), torch.arange(6) % 3
    step, _ = in_steady_state(model, x)
    for scale in (1e-3, 1.0, 1e6):
        for i in range(6):
            sums, weights, _ = sums_of(step, scale * x[i : i + 1], y[i : i + 1])
            norm = sum(float(total.square().sum()) for total in sums) ** 0.5
            assert norm <= 0.3 * (1 + 1e-12) and (norm > 0.29 or float(weights) == 1)


def test_dropout_is_drawn_anew_in_every_round():
    model = built(lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)))
    step, _ = in_steady_state(model, examples(8, 4))
    (variant,) = step.graphs.variants.values()
    assert variant.traced.is_random
    x, y = examples(8, 4), torch.arange(8) % 3
    assert not torch.equal(sums_of(step, x, y)[0][0].clone(), sums_of(step, x, y)[0][0])


def test_each_mode_of_the_model_has_a_graph_of_its_own():
    model = built(lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3)))
    x, y = examples(8, 4), torch.arange(8) % 3
    step, _ = in_steady_state(model, x)
    model.eval()
    while len(step.graphs.variants) == 1:
        step(x.clone(), y)
    assert sorted(variant.traced.is_random for variant in step.graphs.variants.values()) == [False, True]


def test_autocast():
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).float()
    x = examples(RECORDS, 4).float()

    def losses_of(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y, reduction="none")

    expected, _, _ = train(model, x, compiled=False, losses_of=losses_of)
    torch.manual_seed(0)
    found, step, _ = train(built(MODELS["mlp"][0]).float(), x, losses_of=losses_of)
    (variant,) = step.graphs.variants.values()
    assert variant.precision == torch.bfloat16
    assert float((found - expected).norm()) <= 2e-2 * float(expected.norm())


def test_a_replaced_parameter_or_a_frozen_one_is_not_missed():
    model = built(MODELS["mlp"][0])
    x, y = examples(9, 4), torch.arange(9) % 3
    step, _ = in_steady_state(model, x)
    with torch.no_grad():
        model[0].weight.mul_(2)  # in place: the graph sees it
    for a, b in zip(sums_of(step, x, y)[0], expected_sums(model, x, y)):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-14)
    variants = dict(step.graphs.variants)
    model[2].bias.requires_grad_(False)
    for _ in range(3):
        step(x.clone(), y)
    assert all("2.bias" not in variant.names for variant in step.graphs.variants.values() if variant not in variants.values())
    assert list(step.graphs.variants) != list(variants) or list(step.graphs.variants.values()) != list(variants.values())


def test_it_trains_by_inductor():
    build, shape = MODELS["sequence"]
    assert_same_training(build, examples(RECORDS, *shape), backend="inductor", steps=6)


# What is refused, counted and noticed


def test_the_ledger_counts_before_anything_is_released(tmp_path, monkeypatch):
    model = built(MODELS["mlp"][0])
    _, step, private = train(model, examples(RECORDS, 4), steps=6, plan=plan_for(9), ledger=tmp_path / "ledger.json")
    seen, real = [], private._updates.release
    monkeypatch.setattr(private._updates, "release", lambda *args: (seen.append(private.ledger.spent), real(*args)))
    data = TensorDataset(examples(RECORDS, 4), torch.arange(RECORDS) % 3)
    for x, y in private.loader(data):
        step(x, y)
        break
    assert seen == [7] and private.position == 7


def test_a_spent_budget():
    model = built(MODELS["mlp"][0])
    x, y = examples(9, 4), torch.arange(9) % 3
    step, private = in_steady_state(model, x, steps=6)
    while private.ledger.spent < 6:
        step(x.clone(), y)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(cw.BudgetSpent):
        step(x.clone(), y)
    assert private.ledger.spent == 6 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_rows_go_through_once():
    model = built(MODELS["mlp"][0])
    data = TensorDataset(examples(RECORDS, 4), torch.arange(RECORDS) % 3)
    _, step, private = train(model, data.tensors[0], steps=6, plan=plan_for(20))
    batches = iter(private.loader(data))
    x, y = next(batches)
    step(x, y)
    with pytest.raises(cw.WrongDraw, match="belong to no draw"):
        step(x, y)
    next(batches)
    later = next(batches)
    with pytest.raises(cw.WrongDraw, match="handed out after"):
        step(*later)


def test_a_part_of_a_draw_is_not_taken_for_the_draw():
    model = built(MODELS["mlp"][0])
    data = TensorDataset(examples(RECORDS, 4), torch.arange(RECORDS) % 3)
    _, step, private = train(model, data.tensors[0], steps=6, plan=plan_for(20))
    for x, y in private.loader(data):
        with pytest.raises(cw.WrongDraw):
            step(x[:-1], y[:-1])
        break
    assert private.ledger.spent == 6


def test_a_closed_training():
    model = built(MODELS["mlp"][0])
    step, private = in_steady_state(model, examples(9, 4))
    private.close()
    with pytest.raises(cw.NothingClipped, match="closed"):
        step(examples(9, 4), torch.arange(9) % 3)


def test_a_foreign_gradient():
    model = built(MODELS["mlp"][0])
    step, private = in_steady_state(model, examples(9, 4))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    spent = private.ledger.spent
    with pytest.raises(cw.ForeignGradient):
        step(examples(9, 4), torch.arange(9) % 3)
    assert private.ledger.spent == spent


def test_what_cannot_be_compiled_is_refused_by_name():
    model = nn.Linear(4, 3)
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(5), method="reweight")
    with pytest.raises(ValueError, match="bookkeep"):
        private.compile(mean_loss)
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(5), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="bf16"):
        private.compile(mean_loss)
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(5))
    for options in (dict(rows=0), dict(rows=2.5), dict(backend="magic")):
        with pytest.raises(ValueError, match=next(iter(options))):
            private.compile(mean_loss, **options)


def test_an_unsafe_model_is_refused_as_in_the_eager_loop():
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    with pytest.raises(cw.Refusal):
        train(model, examples(RECORDS, 4))


def test_data_from_outside_the_arguments_is_not_baked_in():
    build, _ = MODELS["mlp"]
    x = examples(12, 4)
    hidden = examples(12, 4)
    losses_of = lambda m, x, y: mean_loss(m, x + hidden, y)
    model = built(build)
    step, private = begun(model, losses_of)
    with pytest.warns(UserWarning, match="pass it to step"):
        for _ in range(7):
            step(x.clone(), torch.arange(12) % 3)
    assert not step.graphs.variants and private.ledger.spent == 7


def test_a_number_that_changes_is_noticed():
    build, _ = MODELS["mlp"]
    factor = [1e-3]  # small enough that nothing is clipped
    losses_of = lambda m, x, y: factor[0] * mean_loss(m, x, y)
    model = built(build)
    step, _ = in_steady_state(model, examples(9, 4), losses_of=losses_of)
    factor[0] = 2e-3
    with pytest.warns(UserWarning, match="not compiled"):
        for _ in range(8):
            step(examples(9, 4), torch.arange(9) % 3)
    assert not step.graphs.variants


def test_losses_that_depend_on_how_many_rows_there_are_are_noticed():
    build, _ = MODELS["mlp"]
    model = built(build)
    step, _ = begun(model, lambda m, x, y: 1e-3 * len(x) * mean_loss(m, x, y))
    with pytest.warns(UserWarning, match="not compiled"):
        for _ in range(9):
            step(examples(9, 4), torch.arange(9) % 3)
    assert not step.graphs.variants


def test_models_whose_rows_move_run_eagerly():
    build = lambda: Net(lambda s, x: s.a(x[x[:, 0].argsort()].flip(0))[x[:, 0].argsort().flip(0).argsort()], a=nn.Linear(4, 3))
    with pytest.warns(UserWarning, match="not compiled"):
        _, step, private = train(built(build), examples(RECORDS, 4), steps=14)
    assert not step.graphs.variants and private.ledger.spent == 14


# What a review found: each of these was silently wrong once


def test_autocast_around_the_step_does_not_touch_our_arithmetic():
    """A graph of float32 products that runs under autocast is a graph of bf16 ones: an example then moves the sum by several bounds."""
    model = built(MODELS["sequence"][0]).float()
    x, y = examples(9, 5, 4).float(), torch.arange(9) % 3
    step, _ = in_steady_state(model, x)
    expected = sums_of(step, x, y)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sums_of(step, x, y)[0]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(found, expected))


@pytest.mark.parametrize("kind", ["numbers one by one", "integers inside the module", "attribute"])
def test_examples_that_come_in_by_another_door_are_not_baked_in(kind):
    import numpy as np

    x, y = examples(8, 4), torch.arange(8) % 3
    model = built(
        lambda: Net(
            lambda s, x: s.b(s.a(x)) + (s.e.weight[s.ids] if s.ids is not None else 0),
            a=nn.Linear(4, 6),
            b=nn.Linear(6, 3),
            e=nn.Embedding(9, 3),
        )
    )
    model.ids = None
    outside = {"ids": torch.arange(8) % 9, "weights": np.ones(8)}

    def losses_of(model, x, y):
        model.ids = outside["ids"] if kind != "numbers one by one" else None
        losses = mean_loss(model, x, y)
        return losses * torch.stack([torch.as_tensor(w) for w in outside["weights"]]) if kind == "numbers one by one" else losses

    if kind == "attribute":
        losses_of = mean_loss
    step, _ = begun(model, losses_of, rows=8, fallback=True)
    with pytest.warns(UserWarning, match="not compiled"):
        for _ in range(20):
            if kind == "attribute":
                model.ids = torch.randint(0, 9, (8,))
            step(x.clone(), y)
    assert not step.graphs.variants or kind == "attribute"


def test_attention_without_dropout_draws_nothing():
    model = built(MODELS["attention"][0])
    step, _ = in_steady_state(model, examples(9, 5, 4))
    assert [variant.traced.is_random for variant in step.graphs.variants.values()] == [False]


def test_another_clipping_is_followed():
    model = built(MODELS["mlp"][0])
    x, y = examples(9, 4), torch.arange(9) % 3
    step, private = in_steady_state(model, x)
    private.clipping = cw.flat(1e-3)
    seen, real = [], private._intake.hand_in
    private._intake.hand_in = lambda clipped, *rest: (
        seen.append(float(torch.cat([t.flatten() for t in clipped.sums.values()]).norm())),
        real(clipped, *rest),
    )
    for _ in range(5):
        step(x.clone(), y)
    assert seen and max(seen) <= 9 * 1e-3 * (1 + 1e-9)


def _double_the_output(module, args, output):
    return 2 * output


CHANGES = {
    "hook": lambda m: m[0].register_forward_hook(_double_the_output),
    "module": lambda m: m.__setitem__(1, nn.Sigmoid()),
    "number": lambda m: setattr(m[3], "p", 0.5),
    "dtype": lambda m: m.float().double(),
    "mode": lambda m: m.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_has_changed_gets_another_graph(change):
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Dropout(1e-9)))
    x, y = examples(9, 4), torch.arange(9) % 3
    step, _ = in_steady_state(model, x)
    before = list(step.graphs.variants.values())
    CHANGES[change](model)
    used, real = [], step.graphs.clipped
    step.graphs.clipped = lambda variant, *rest: (used.append(variant), real(variant, *rest))[1]
    for _ in range(6):
        step(x.clone(), y)
    assert change == "dtype" or (used and all(variant not in before for variant in used))
    if change not in ("number", "mode"):
        variant = list(step.graphs.variants.values())[-1]
        found = real(variant, step.graphs.batch((x, y), 9), 1.0).sums.values()
        assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in zip(found, expected_sums(model, x, y)))


class Counts(nn.Module):
    """A buffer that every forward pass writes to."""

    def __init__(self, replaces):
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.replaces = replaces
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count += 1
        return self.a(x)


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_are_written_once_a_step(replaces):
    model = built(lambda: Counts(replaces))
    step, _ = begun(model, rows=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            step(examples(8, 4), torch.arange(8) % 3)
    assert float(model.count) == 12 and not step.graphs.variants


def test_whether_there_is_a_graph_does_not_depend_on_a_record():
    """Graph and tape are compared on numbers that are nobody's; integers stay as they are."""
    x, y = examples(6, 4), torch.arange(6)
    numbers, labels = made_up([x, y], [True, True])
    assert numbers.shape == x.shape and not torch.equal(numbers, x)
    assert torch.equal(labels, y) and labels is not y  # nobody writes to the user's own
    assert torch.equal(numbers, made_up([1e9 * x, y], [True, True])[0])


def test_a_first_tensor_without_rows():
    model = built(MODELS["mlp"][0])
    step, _ = begun(model, lambda m, anchors, x, y: mean_loss(m, x, y))
    with pytest.warns(UserWarning, match="12 losses for a batch whose first tensor has 5 rows"):
        for _ in range(6):
            step(torch.zeros(5, 4), examples(12, 4), torch.arange(12) % 3)
    assert not step.graphs.variants


def test_arguments_that_may_change_behind_their_name():
    model = built(MODELS["mlp"][0])
    step, _ = begun(model, lambda m, x, y, how: mean_loss(m, x, y))
    with pytest.warns(UserWarning, match="of type object"):
        for _ in range(6):
            step(examples(12, 4), torch.arange(12) % 3, object())
    assert not step.graphs.variants


def test_no_tape_stays_on():
    from clipwise.modes import stacked

    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    step, _ = begun(model)
    with pytest.raises(cw.Refusal):
        step(examples(12, 4), torch.arange(12) % 3)
    assert not list(stacked())
    model = built(MODELS["mlp"][0])
    step, _ = in_steady_state(model, examples(9, 4))
    model(examples(9, 4))  # an evaluation with gradients opens a block
    step(examples(9, 4), torch.arange(9) % 3)
    assert not list(stacked())


# Small pieces


def test_which_tensors_have_rows():
    leaves = Leaves()
    shared = torch.zeros(4, 2)
    assert leaves.flat((torch.zeros(4, 3), shared, 1.5), 4)[2] == (True, True, False)
    _, structure, has_rows = leaves.flat((torch.zeros(5, 3), shared, 1.5), 5)
    assert has_rows == (True, False, False)
    assert leaves.flat((torch.zeros(4, 3), shared, 1.5), 4)[2] == (True, True, False)  # no step was made with that
    leaves.remember(structure, has_rows)
    assert leaves.flat((torch.zeros(4, 3), shared, 1.5), 4)[2] == (True, False, False)  # its length was no number of rows
    assert Leaves().flat((torch.zeros(4, 3), cw.constant(torch.zeros(4))), 4)[2] == (True, False)


def test_a_batch_goes_where_the_model_is_now():
    """Also after a layer was replaced, which is kept by nobody."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    graphs = GraphSums(model, lambda model, x: model(x), cw.flat(1.0), rows=4, backend="eager")
    assert graphs.batch((torch.zeros(4, 4),), 4).leaves[0].device.type == "cpu"
    old = weakref.ref(model[0].weight)
    model[0] = nn.Linear(4, 4)
    model.to("meta")
    gc.collect()
    assert graphs.batch((torch.zeros(4, 4),), 4).leaves[0].device.type == "meta" and old() is None


@pytest.mark.parametrize("own_batches", [False, True])
def test_pinned_memory_of_the_callers_own_is_read_before_the_step_returns(own_batches, monkeypatch):
    """They may fill it with the next batch by then; what a loader has made nobody fills again."""
    waits, moved = [], torch.Tensor.to

    def to(tensor, *args, **kwargs):
        if "non_blocking" in kwargs:
            waits.append(not kwargs["non_blocking"])
        return moved(tensor, *args, **kwargs)

    model = nn.Linear(4, 3)
    plan = cw.PrivacyPlan(dataset_size=RECORDS, batch_size=8, steps=9, delta=1e-3, clipping=cw.flat(0.1), noise_multiplier=1.0)
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, own_batches=own_batches)
    step = private.compile(mean_loss, backend="eager")
    x, y = torch.randn(RECORDS, 4), torch.arange(RECORDS) % 3
    batch = (x[:8], y[:8]) if own_batches else next(iter(private.loader(TensorDataset(x, y))))
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr("clipwise.compiled.sums._home", lambda modules: torch.device("meta"))
    monkeypatch.setattr(type(step), "_eager_step", lambda self, batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(*batch)
    assert waits == [own_batches] * 2
    private.close()


def test_parts_are_filled_up():
    x = torch.arange(10).view(5, 2)
    (part,) = part_of([x], [True], 3, 5, 4)
    assert part.tolist() == [[6, 7], [8, 9], [6, 7], [6, 7]]
    assert part_of([x], [True], 0, 5, 5)[0].data_ptr() == x.data_ptr()


def test_how_many_rows_a_graph_has():
    assert default_rows(plan_for(5)) == 24  # 12 + 2·√12, to a multiple of eight
    assert default_rows(plan_for(5, sampler="fixed_size")) == 12
    assert default_rows(plan_for(5, batch=200)) == 200


def test_agreement():
    a = torch.randn(100, dtype=torch.float64)
    assert agree([(a, a * (1 + 1e-9))], torch.float64, 1.0)
    assert not agree([(a, a * 1.01)], torch.float64, 1.0)
    assert not agree([(a, a * 1.01)], torch.float32, 1.0)
    assert not agree([(a, a * float("nan"))], torch.float32, 1.0)


def test_modules_that_take_turns_have_a_graph_each(monkeypatch):
    """They are known again: two graphs, however often they change places."""
    model = built(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))
    step, private = begun(model)
    one, other = model[1], nn.Sigmoid()
    for number in range(40):
        model[1] = (one, other)[number % 2]
        step(examples(12, 4), torch.arange(12) % 3)
    assert len(step.graphs.variants) == 2 and len(step.graphs._attempts) == 2
    private.close()
