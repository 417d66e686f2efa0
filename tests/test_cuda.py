"""The same exactness on a GPU, where autograd has threads of its own. Skipped where there is none."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import clipwise as cw
from clipwise.factors import Outer
from clipwise.randomness import Fast, Reproducible, Secure
from clipwise.testing import clip_and_add, loop_gradients, squared_output
from helpers import ALL_METHODS, Net, assert_exact, clipped, examples, sensitivity
from test_models import NETWORKS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    build, batch = NETWORKS[name]
    assert_exact(build().cuda(), batch().cuda(), methods=ALL_METHODS)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_float32(name, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # on by default, and good for three digits only
    build, batch = NETWORKS[name]
    assert_exact(build().cuda(), batch().cuda(), dtype=torch.float32)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_checkpointing_recomputes_under_the_tape_on_autograd_s_own_thread(method):
    """A region without any module call: only the tape itself can put the taps back."""
    model = Net(
        lambda s, x: s.b(checkpoint(lambda h: torch.tanh(F.linear(h, s.w)), s.a(x), use_reentrant=False)),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 3),
        w=nn.Parameter(torch.randn(4, 4)),
    )
    assert_exact(model.cuda(), examples(5, 2, 4).cuda(), methods=[method])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4)).cuda()
    x = torch.randn(16, 10, 32, device="cuda")
    loss = lambda output: output.float().square().mean((1, 2))
    norms, found = clipped(model, [x], 0.05, loss=loss, context=lambda: torch.autocast("cuda", dtype=dtype))
    reference = loop_gradients(model, (x,), loss=lambda output: output.square().mean((1, 2)))
    expected, expected_norms = clip_and_add(reference, 0.05)
    assert ((norms.double() - expected_norms) / expected_norms).abs().max() < 3e-2
    for name, value in expected.items():
        assert (found[name].double() - value).norm() <= 5e-2 * value.norm()


def test_tf32_products_are_covered_by_the_norm():
    x = torch.randn(6, 64, 16, device="cuda")
    x[-1] = 1e3 * torch.randn(16, device="cuda") * torch.tensor([1.0, -1.0], device="cuda").repeat(32)[:, None]
    model = Net(lambda s, x: s.a(x).sum(1), a=nn.Linear(16, 32, bias=False)).cuda()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert sensitivity(model, [x], 1.0, loss=lambda output: output.sum(1)) <= 1 + 1e-3
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_examples(value):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).cuda().double(), examples(5, 4).cuda()
    good = [0, 1, 3, 4]
    expected, _ = clip_and_add(loop_gradients(model, (x[good],)), 0.5)
    x[2] = value
    for method in ALL_METHODS:
        _, found = clipped(model, [x], 0.5, method=method)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


def test_a_model_on_two_devices():
    model = Net(lambda s, x: s.b(torch.tanh(s.a(x)).cuda()), a=nn.Linear(4, 5), b=nn.Linear(5, 3).cuda())
    x = examples(6, 4)
    reference = loop_gradients(model, (x,))
    expected, norms = clip_and_add({name: grad.cpu() for name, grad in reference.items()}, 0.5)
    model.double()
    with cw.capture(model) as tape:
        losses = squared_output(model(x))
    torch.testing.assert_close(cw.per_example_norms(tape, losses).cpu(), norms)
    cw.clipped_loss(tape, losses, cw.flat(0.5)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), expected[name])


RECURRENT = {
    "lstm": lambda: nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True),
    "projected lstm": lambda: nn.LSTM(6, 8, proj_size=4, batch_first=True),
    "gru": lambda: nn.GRU(6, 8, 2, batch_first=True),
    "rnn": lambda: nn.RNN(6, 8, bidirectional=True, batch_first=True),
    "relu": lambda: nn.RNN(6, 8, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_layers_through_cudnn(kind):
    model = Net(lambda s, x: torch.tanh(s.a(x)[0]), a=RECURRENT[kind]())
    assert_exact(model.cuda(), examples(5, 7, 6).cuda(), methods=["bookkeep", "reweight", "nxbp"])


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recurrent_layers_under_autocast(kind, dtype):
    model = Net(lambda s, x: s.a(x)[0], a=RECURRENT[kind]()).cuda()
    x = examples(4, 6, 6).float().cuda()
    x[1] *= 1e3
    worst = sensitivity(
        model, [x], 0.7, loss=lambda out: out.float().flatten(1).sum(1), context=lambda: torch.autocast("cuda", dtype=dtype)
    )
    assert worst <= 1 + 1e-3


def test_recurrent_layers_give_pytorch_s_own_result(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for build in RECURRENT.values():
        layer, x = build().cuda(), torch.randn(5, 7, 6, device="cuda")
        with cw.capture(layer):
            watched = layer(x)[0]
        torch.testing.assert_close(watched, layer(x)[0], rtol=1e-5, atol=1e-6)


def cuda_training(optimizer_class=torch.optim.SGD, *, dtype=torch.float32, noise=None, **options):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to("cuda", dtype)
    optimizer = optimizer_class(model.parameters(), lr=0.1, **options.pop("optimizer_options", {}))
    plan = cw.PrivacyPlan(dataset_size=60, batch_size=10, epochs=3, delta=1e-3, clipping=cw.flat(0.7), noise_multiplier=1.3)
    private = cw.PrivateTraining(model, optimizer, plan, noise=noise or Reproducible(7), own_batches=True, **options)
    x, y = torch.randn(9, 5, device="cuda", dtype=dtype), torch.randint(0, 3, (9,), device="cuda")
    return private, model, optimizer, lambda: F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("noise", [Fast(), "secure", Reproducible(7)])
def test_a_step_adds_noise_of_the_right_size(noise):
    if noise == "secure":
        pytest.importorskip("cryptography")
        noise = Secure()
    private, model, optimizer, losses = cuda_training(noise=noise, dtype=torch.float64)
    found = []
    for _ in range(15):
        private.loss(losses()).backward()
        sums = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        found += [((p.grad * 10 - total) / (1.3 * 0.7)).flatten() for p, total in zip(model.parameters(), sums)]
        optimizer.zero_grad()
    values = torch.cat(found).cpu()
    assert abs(float(values.square().mean()) - 1) < 5 * (2 / len(values)) ** 0.5 and len(set(values.tolist())) == len(values)
    private.close()


def test_gaussians_on_the_gpu():
    for source in (Fast(), Reproducible(1)):
        drawn = source.gaussians(10**7, "noise", 0, torch.device("cuda"))
        assert drawn.is_cuda and drawn.dtype == torch.float64
        assert abs(float(drawn.square().mean()) - 1) < 5 * (2 / 10**7) ** 0.5
    torch.cuda.manual_seed(0)
    one = Fast().gaussians(5, "noise", 0, torch.device("cuda"))
    torch.cuda.manual_seed(0)
    assert not torch.equal(one, Fast().gaussians(5, "noise", 0, torch.device("cuda")))


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler(fused):
    ends = []
    for scaled in (True, False):
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cuda", enabled=scaled)
        private, model, optimizer, losses = cuda_training(
            torch.optim.Adam, scaler=scaler, optimizer_options={"fused": True} if fused and scaled else {}
        )
        for _ in range(5):
            scaler.scale(private.loss(losses())).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        private.close()
    assert torch.allclose(*ends, atol=1e-5)


def test_a_scaled_loss_is_refused_before_the_step():
    private, model, optimizer, losses = cuda_training()
    (10 * private.loss(losses())).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(cw.WrongScale, match="multiplied by 10"):
        optimizer.step()
    assert private.ledger.spent == 0 and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    private.close()


def test_a_loss_that_is_scaled_later_is_noticed_one_step_later():
    private, _, optimizer, losses = cuda_training()
    for factor in (1, 1, 1, 1, 1, 10):
        (factor * private.loss(losses())).backward()
        optimizer.step()
        optimizer.zero_grad()
    private.loss(losses()).backward()
    with pytest.raises(cw.WrongScale, match="multiplied by 10"):
        optimizer.step()
    assert private.ledger.spent == 6
    private.close()


def test_a_gradient_that_the_device_has_yet_to_compute_is_refused():
    """Numbers that are sent to the host without waiting are read too early there: what lay in that memory before, zeros say."""
    private, model, optimizer, losses = cuda_training(dtype=torch.float64)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    private.loss(losses()).backward()
    torch.cuda._sleep(10**9)
    with pytest.raises(cw.ForeignGradient, match="was not zero"):
        optimizer.step()
    private.close()


def test_a_stale_gradient_is_refused():
    private, model, optimizer, losses = cuda_training()
    sum(p.square().sum() for p in model.parameters()).backward()
    private.loss(losses()).backward()
    with pytest.raises(cw.ForeignGradient, match="was not zero"):
        optimizer.step()
    private.close()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "gru", "rnn", "sequence"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_steps_give_the_numbers_of_eager_ones(name, backend):
    from test_compiled import MODELS, RECORDS, built, train

    build, shape = MODELS[name]
    x = examples(RECORDS, *shape).cuda()
    expected, _, _ = train(built(build).cuda(), x, compiled=False, steps=9)
    found, step, _ = train(built(build).cuda(), x, rows=10, backend=backend, steps=9)
    (variant,) = step.graphs.variants.values()
    assert type(variant._run).__name__ == "Recording" and float((found - expected).norm()) <= 1e-8 * float(expected.norm())
    assert step._recorded[0]._found, "noise and optimizer are part of the graph"


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "rmsprop", "groups", "fused"])
@pytest.mark.filterwarnings("ignore")
def test_recorded_optimizers_give_the_numbers_of_eager_ones(name):
    """With a learning rate that moves, in draws that take several rounds."""
    from test_compiled import RECORDS, built, train
    from test_recorded import MLP, OPTIMIZERS, trained_eagerly

    optimizer = OPTIMIZERS.get(name, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    schedulers = {}
    after = lambda one: schedulers.setdefault(id(one), torch.optim.lr_scheduler.StepLR(one, 4, 0.5)).step()
    x = examples(RECORDS, 4).cuda()
    expected = trained_eagerly(built(MLP).cuda(), x, steps=14, optimizer=optimizer, after=after)
    found, step, _ = train(built(MLP).cuda(), x, rows=7, steps=14, optimizer=optimizer, after=after)
    assert step._recorded[0]._found and float((found - expected).norm()) <= 1e-6 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw", "rmsprop", "groups", "fused"])
@pytest.mark.filterwarnings("ignore")
def test_recorded_optimizers_of_a_loop_give_the_numbers_of_eager_ones(name, dtype):
    """Noise included; with a learning rate that moves, where it is part of a recording every ten steps."""
    from test_compiled import RECORDS, built, train
    from test_recorded import MLP, OPTIMIZERS, trained_eagerly

    optimizer = OPTIMIZERS.get(name, lambda p: torch.optim.AdamW(p, lr=0.01, fused=True))
    schedulers = {}
    is_input = name in ("adam", "adamw", "groups", "fused") or (name in ("sgd", "momentum") and dtype == torch.float32)
    every = 4 if is_input else 10
    after = lambda one: schedulers.setdefault(id(one), torch.optim.lr_scheduler.StepLR(one, every, 0.5)).step()
    losses_of = lambda model, x, y: F.cross_entropy(model(x).double(), y, reduction="none")
    x, options = examples(RECORDS, 4).cuda().to(dtype), dict(steps=24, optimizer=optimizer, after=after, losses_of=losses_of)
    expected = trained_eagerly(built(MLP).cuda().to(dtype), x, **options)
    found, _, private = train(built(MLP).cuda().to(dtype), x, compiled=False, **options)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())
    update = private._in_loop[0]._update
    assert update is not None and update._found, "noise and optimizer are replayed"
    private.close()


def test_noise_of_a_replayed_update_is_new_every_time_and_of_the_right_size():
    """After a step p.grad is what was released, whether or not it was replayed."""
    private, model, optimizer, losses = cuda_training(noise=Fast())
    found = []
    for _ in range(17):
        torch.cuda.manual_seed(0)
        private.loss(losses()).backward()
        sums = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        found.append(torch.cat([((p.grad * 10 - total) / (1.3 * 0.7)).flatten() for p, total in zip(model.parameters(), sums)]).double())
        optimizer.zero_grad()
    assert private._in_loop[0]._update._found
    values = torch.stack(found).cpu()
    assert abs(float(values.square().mean()) - 1) < 5 * (2 / values.numel()) ** 0.5
    for one, other in itertools.pairwise(values):
        assert abs(float((one * other).mean())) < 6 / values.shape[1] ** 0.5
    private.close()


@pytest.mark.parametrize("in_passing", [False, True])
def test_the_first_replay_draws_from_its_own_seed(in_passing, monkeypatch):
    """Torch puts the seed of the recording in place on the recording's stream, and that of a replay on the caller's: where the first came last, noise was
    drawn from the seed that every generator of torch begins with."""
    from clipwise.compiled.recording import captured, captured_in_passing, recording_stream

    device = torch.device("cuda", torch.cuda.current_device())
    generator, found = torch.Generator(device).manual_seed(1), []
    torch.randn(9, device=device)
    for name in ("synchronize", "empty_cache"):  # torch calls them before a recording, and waits
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    with torch.cuda.stream(recording_stream(device)):
        torch.cuda._sleep(10**9)  # a device that is busy
    record = captured_in_passing if in_passing else captured
    replay = record(lambda: found.append(torch.randn(1000, generator=generator, device=device)), device, [generator])
    generator.manual_seed(2)
    replay()
    monkeypatch.undo()
    torch.cuda.synchronize()
    assert torch.equal(found[0], torch.randn(1000, generator=torch.Generator(device).manual_seed(2), device=device))


def test_a_recording_leaves_alone_what_is_on_its_way_to_the_host():
    """Torch puts the seed of a generator that a recording draws from where there is memory: that of a number, say, of which nobody here knows any more,
    but which has yet to be fetched. On a busy device the seed came first, and a private loss was refused as scaled by 3.6e-34."""
    from clipwise.compiled.recording import captured_in_passing

    device = torch.device("cuda", torch.cuda.current_device())
    noise = torch.zeros(9, device=device)
    record = lambda generator: captured_in_passing(lambda: nn.init.normal_(noise, generator=generator), device, [generator])
    record(torch.Generator(device))  # libraries have taken their room
    others = [torch.empty((), device=device) for _ in range(10_000)]  # no room is left but what is let go below, one place beside another
    tensors = [torch.full((), 1.0, device=device) for _ in range(64)]
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)  # a device that is busy
    fetched = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    others += tensors[1::2]
    del tensors
    record(torch.Generator(device).manual_seed(1))
    torch.cuda.synchronize()
    assert [float(number) for number in fetched] == [1.0] * 64


@pytest.mark.parametrize("how", ["another graph dies", "Inductor"])
def test_graphs_keep_the_room_of_their_libraries(how):
    """cuBLAS adds up parts of long products in memory that torch lets go of when another graph of the stream dies (from 2.12 on), or Inductor records one: graphs
    that hold its address wrote into what somebody else had got."""
    from clipwise.compiled.recording import captured_in_passing, recorded

    device = torch.device("cuda", torch.cuda.current_device())
    a, b = torch.randn(64, 2**20, device=device), torch.randn(2**20, 64, device=device)
    replay, (found,) = recorded(lambda a, b: [a @ b], [a, b])
    replay()
    torch.cuda.synchronize()
    right = found.clone()
    other = captured_in_passing(lambda: b.mul_(1), device)
    if how == "Inductor":
        torch._C._cuda_clearCublasWorkspaces()
    del other
    torch.cuda.empty_cache()
    others = [torch.full((2**20,), 7.0, device=device) for _ in range(64)]
    for _ in range(20):
        replay()
    torch.cuda.synchronize()
    assert torch.allclose(found, right, rtol=1e-3) and all(bool((one == 7).all()) for one in others)
    again, (also,) = recorded(lambda a, b: [a @ b], [a, b])
    again()
    assert torch.allclose(also, right, rtol=1e-3)


@pytest.mark.parametrize("in_passing", [False, True])
def test_a_recording_that_cuda_breaks_off_leaves_nothing_behind(in_passing):
    from clipwise.compiled.recording import captured, captured_in_passing

    device = torch.device("cuda", torch.cuda.current_device())
    x, here = torch.ones(8, device=device), torch.cuda.current_stream()
    captured_in_passing(lambda: x.mul_(1), device)  # libraries have taken their room
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError):
        (captured_in_passing if in_passing else captured)(lambda: (torch.empty(2**26, device=device), x.sum().item()), device)
    assert torch.cuda.current_stream() == here
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before + 2**28  # what the recording took is given back
    F.dropout(x)
    held = torch.empty(2**26, device=device)
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 2**28
    replay = captured_in_passing(lambda: x.add_(1), device)
    replay()
    assert torch.equal(x, torch.full_like(x, 2.0))


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_be_recorded_is_trained_all_the_same():
    """linalg.solve asks the device whether it failed, which breaks a recording off; dropout draws from the generator that torch then took for a graph's."""
    from test_compiled import plan_for

    model = Net(
        lambda s, x: s.b(F.dropout(torch.linalg.solve(s.m, s.a(x).unsqueeze(-1)).squeeze(-1), 0.1)), a=nn.Linear(4, 4), b=nn.Linear(4, 3)
    )
    model.register_buffer("m", 2 * torch.eye(4))
    model.cuda()
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_for(20), own_batches=True)
    step = private.compile(lambda m, x, y: F.cross_entropy(m(x), y, reduction="none"), rows=12, backend="eager")
    here = torch.cuda.current_stream()
    for _ in range(9):
        step(torch.randn(12, 4).cuda(), torch.arange(12).cuda() % 3)
        assert torch.cuda.current_stream() == here
    private.close()


@pytest.mark.filterwarnings("ignore")
def test_noise_of_a_replay_is_new_every_time_and_of_the_right_size():
    from test_compiled import plan_for

    model = nn.Linear(100, 100).cuda()
    private = cw.PrivateTraining(model, torch.optim.SGD(model.parameters(), lr=1.0), plan_for(40), own_batches=True)
    step = private.compile(lambda model, x: model(x).sum(1) * 1e-9, rows=12, backend="eager")
    moves = []
    for _ in range(15):
        torch.cuda.manual_seed(0)
        before = model.weight.detach().clone()
        step(torch.randn(12, 100, device="cuda"))
        moves.append((model.weight.detach() - before).flatten().double())
    assert step._recorded[0]._found
    size = 0.3 / 12
    assert all(abs(float(move.std()) / size - 1) < 0.03 for move in moves)
    assert all(abs(float((a * b).mean())) < 6 * size**2 / 100 for i, a in enumerate(moves) for b in moves[:i])
    private.close()


@pytest.mark.filterwarnings("ignore")
def test_a_replay_draws_new_dropout_and_follows_parameters_that_move():
    from test_compiled import built, expected_sums, in_steady_state, sums_of

    build = lambda: nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    model, x, y = built(build).cuda(), examples(9, 4).cuda(), torch.arange(9).cuda() % 3
    step, _ = in_steady_state(model, x)
    assert not torch.equal(sums_of(step, x, y)[0][0].clone(), sums_of(step, x, y)[0][0])
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))).cuda()
    step, _ = in_steady_state(model, x)
    for change in (lambda p: p.mul_(2), lambda p: setattr(p, "data", 3 * p.data)):
        with torch.no_grad():
            change(model[0].weight)
        for a, b in zip(sums_of(step, x, y)[0], expected_sums(model, x, y)):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    step(x.cpu(), y.cpu())  # batches on the host go where the model is


def test_a_hundred_layers_in_tf32_are_not_taken_for_mixing():
    """Atomic sums in the backward pass of the pools and convolutions, rounded to TF32 by every layer on the way."""
    torch.manual_seed(0)
    model = cw.models.resnet(101).cuda()
    for _ in range(4):
        x, y = torch.randn(20, 3, 64, 64, device="cuda"), torch.arange(20, device="cuda") % 10
        with cw.capture(model) as tape:
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        cw.clipped_loss(tape, losses, cw.flat(1.0))


@pytest.fixture
def compiled_kernels(monkeypatch):
    pytest.importorskip("triton")
    from clipwise import kernels

    monkeypatch.setattr(kernels, "DEVICES", {"cuda"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 1, 7, 33, 70), (3, 2, 200, 128, 257), (64, 1, 49, 300, 300), (2, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_the_kernel_for_sums_of_products(compiled_kernels, shape, dtype, tile):
    from clipwise.kernels.outer import outer_squares

    examples_, blocks, terms, p, d = shape
    left = torch.randn(examples_, blocks, terms, p, device="cuda").to(dtype)
    right = torch.randn(examples_, blocks, d, terms, device="cuda").to(dtype).mT
    expected = torch.matmul(left.double().mT, right.double()).flatten(1).square().sum(1)
    for tf32, tolerance in ((False, 2e-5), (True, 2e-5 if dtype != torch.float32 else 5e-3)):
        torch.testing.assert_close(outer_squares(left, right, tile, tf32), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "case", [(64, 56, 64, 3, 1, 1), (512, 7, 512, 3, 1, 1), (3, 64, 64, 7, 2, 1), (20, 12, 50, 5, 1, 1), (32, 14, 64, 3, 1, 4)], ids=str
)
def test_the_kernel_for_convolutions(compiled_kernels, case, layout):
    from clipwise.kernels.convolution import convolution_gradients

    channels, size, out, kernel, stride, groups = case
    x = torch.randn(4, channels, size, size, device="cuda").to(memory_format=layout)
    module = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups).cuda()
    grad = torch.randn_like(module(x))
    shape = list(module.weight.shape)
    rows = [
        torch.ops.aten.convolution_backward(
            grad[i : i + 1].double(), x[i : i + 1].double(), module.weight.double(), None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups,
            [False, True, False],
        )[1]
        for i in range(4)
    ]  # fmt: skip
    expected = torch.stack(rows)
    for tile in (16, 32, 64):
        squares, kept = convolution_gradients(
            grad.unsqueeze(1), x.unsqueeze(1), shape, [stride] * 2, [kernel // 2] * 2, [1, 1], groups, tile, False, True
        )
        torch.testing.assert_close(squares, expected.flatten(1).square().sum(1), rtol=2e-5, atol=0)
        assert float((kept.double() - expected).norm()) <= 1e-5 * float(expected.norm())


@pytest.mark.filterwarnings("error:a faster way is left out")
def test_whatever_is_fastest_is_right(compiled_kernels, monkeypatch):
    """Ways are timed on the real tensors; kernels are among them, eagerly and in a graph."""
    from clipwise import trials
    from clipwise.factors import ways
    from test_compiled import RECORDS, built, train

    monkeypatch.setattr(ways, "TRIALS", trials.Trials())
    build = lambda: nn.Sequential(
        nn.Conv2d(2, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.Flatten(2), nn.Linear(16, 5), nn.Flatten(), nn.Linear(80, 3)
    )
    x = examples(RECORDS, 2, 8, 8).cuda().float()
    torch.backends.cudnn.allow_tf32, before = False, torch.backends.cudnn.allow_tf32
    try:
        runs = [train(built(build).float().cuda(), x, compiled=compiled, steps=9) for compiled in (False, True)]
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert any("kernel" in way for found in ways.TRIALS.outcomes.values() for seconds in found.values() for way in seconds)
    assert float((runs[0][0] - runs[1][0]).norm()) <= 1e-4 * float(runs[0][0].norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [32, 64, 128])
@pytest.mark.parametrize("shape", [(5, 7, 33, 70), (3, 197, 768, 3072), (64, 49, 300, 300), (2, 1, 1, 1), (2, 1100, 64, 40)], ids=str)
def test_the_kernel_for_products_of_terms(compiled_kernels, shape, tile, dtype):
    from clipwise.factors.inner import gram_kernel_roundoff
    from clipwise.kernels import GRAM_TILES
    from clipwise.kernels.gram import gram_squares
    from clipwise.kernels.terms import masses

    if tile not in GRAM_TILES[dtype]:
        pytest.skip("not a candidate")
    examples_, terms, p, d = shape
    left = torch.randn(examples_, terms, p, device="cuda").to(dtype)
    right = torch.randn(examples_, d, terms, device="cuda").to(dtype).mT
    left[:, terms // 2 :].mul_(-1)
    left[0, 1::2] = -left[0, : terms - terms % 2 : 2]  # terms that cancel
    right[0, 1::2] = right[0, : terms - terms % 2 : 2]
    squares, mass = gram_squares(left, right, tile)
    expected = torch.matmul(left.double().mT, right.double()).flatten(1).square().sum(1)
    exact_mass = (left.double().norm(dim=2) * right.double().norm(dim=2)).sum(1)
    assert ((squares - expected).abs() <= gram_kernel_roundoff(Outer(left, right)) * exact_mass**2).all()
    torch.testing.assert_close(squares[1:], expected[1:], rtol=1e-4, atol=0)
    assert (mass >= exact_mass).all() and (mass <= (1.0012 + 4 * max(p, d) * 2.0**-24) * exact_mass).all()
    torch.testing.assert_close(masses(left, right), exact_mass, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(32, 3, 64, 64, 7, 2, 3), (8, 64, 14, 14, 3, 1, 1), (4, 16, 7, 7, 3, 2, 1), (3, 5, 40, 33, 1, 2, 0)], ids=str
)
def test_the_kernel_for_windows(compiled_kernels, shape, dtype):
    from clipwise.kernels.windows import windows_of

    *image, kernel, stride, padding = shape
    images = torch.randn(image, device="cuda").to(dtype)
    expected = F.unfold(images, kernel, 1, padding, stride)
    places = [(size + 2 * padding - kernel) // stride + 1 for size in image[2:]]
    for laid_out in (images, images.to(memory_format=torch.channels_last)):
        found = windows_of(laid_out, [kernel] * 2, places, [stride] * 2, [padding] * 2, [1, 1])
        assert torch.equal(found.flatten(1, 3).flatten(2), expected)


def test_the_kernels_for_noise_and_normalisation(compiled_kernels):
    from clipwise.kernels.noise import noised, plain_normals
    from clipwise.kernels.normalization import normalized_sums

    seed, sums = 2**62 + 5, torch.randn(300_001, device="cuda")
    number = lambda value: torch.tensor(value, dtype=torch.float64, device="cuda")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = noised(sums, torch.tensor(seed, device="cuda"), number(0.5), number(2.0), torch.empty_like(sums, dtype=dtype))
        exact = sums.double() * 0.5 + plain_normals(seed, 300_001).cuda() * 2
        assert torch.allclose(found.double(), exact.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-12)
    exact = sums.double() * 0.5 + plain_normals(seed, 300_001).cuda() * 2
    noised(sums, torch.tensor(seed, device="cuda"), number(0.5), number(2.0), sums)  # in place
    assert torch.allclose(sums.double(), exact, rtol=2.0**-23, atol=1e-12)
    for shape in ((64, 197, 768), (3, 5, 1000), (2, 33, 4096)):
        grad, x = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda") + 1
        for is_centred, normalize in ((True, F.layer_norm), (False, F.rms_norm)):
            scale, shift = normalized_sums(grad, x, 1e-5, is_centred)
            exact = (grad.double() * normalize(x.double(), shape[2:], eps=1e-5)).sum(1)
            assert torch.allclose(scale.double(), exact, atol=1e-3) and torch.allclose(shift.double(), grad.double().sum(1), atol=1e-3)


@pytest.mark.parametrize("shape", [(16, 1024, 768, 50257), (64, 128, 300, 20), (3, 1, 5, 2)], ids=str)
def test_the_kernel_for_embeddings(compiled_kernels, shape):
    from clipwise.kernels.segments import segment_squares

    examples_, terms, width, height = shape
    ids, rows = torch.randint(0, height, (examples_, terms), device="cuda"), torch.randn(examples_, terms, width, device="cuda")
    found = segment_squares(*ids.sort(1), rows)
    for i in range(examples_):
        table = torch.zeros(height, width, dtype=torch.float64, device="cuda").index_add_(0, ids[i], rows[i].double())
        torch.testing.assert_close(found[i], table.square().sum(), rtol=1e-6, atol=0)
    assert torch.equal(found, segment_squares(*ids.sort(1), rows))


def test_the_norm_of_a_head_tied_to_its_embedding_in_bf16(compiled_kernels):
    """Products of terms by the kernel, between head and embedding by plain operations; never less than the norm."""
    from clipwise.factors import FactorSum, Outer, Rows

    left, right = (torch.randn(4, 30, width, device="cuda").bfloat16() for width in (101, 16))
    ids, rows = torch.randint(0, 101, (4, 30), device="cuda"), torch.randn(4, 30, 16, device="cuda").bfloat16()
    total = FactorSum([Outer(left, right), Rows(ids, rows, torch.Size((101, 16)))])
    exact = torch.einsum("btp,btd->bpd", left.double(), right.double())
    for i in range(4):
        exact[i].index_add_(0, ids[i], rows[i].double())
    exact = exact.flatten(1).norm(dim=1)
    for way in ("gram", "tiles"):
        found = FactorSum(total.factors).measured_by(way).now().sqrt().cuda()
        assert (found >= exact * (1 - 1e-9)).all() and (found <= 1.1 * exact).all()


def test_a_stage_that_is_recorded_again_takes_no_more_memory():
    from clipwise.compiled.in_place import InPlace, Room

    def compute(x):
        return ((x * 2).sin() @ x,)

    x = torch.randn(2048, 2048, device="cuda")
    stage, reserved = InPlace(compute, Room(x.device, torch.float32), hands_over=True), []
    for _ in range(4):
        for _ in range(4):
            (found,) = stage(x)
            torch.testing.assert_close(found, *compute(x))
            x.add_(0.1)
        assert stage._recording is not None and stage._used > 0
        reserved.append(torch.cuda.memory_reserved())
        stage.forget()
    assert reserved[0] == reserved[-1]


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["recording", "program"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm", "words", "transformer", "positions", "frozen statistics"])
def test_the_tail_of_an_eager_step(name, kind, low, monkeypatch):
    """Batches of several sizes, one example of them not finite, against the same steps without recordings and programs."""
    import test_staged
    import test_tail
    from clipwise import tracing
    from clipwise.compiled import in_place, staged, tails
    from clipwise.experience import experience_of
    from clipwise.release import clip

    if kind == "program" and name in ("lstm", "words"):
        pytest.skip("what a recurrent kernel keeps is known only when it has run")
    if kind == "program":
        monkeypatch.setattr(tails, "room_for_recording", lambda device, parameters: 0)
    ran, honest = [], staged.Staged.__call__
    monkeypatch.setattr(staged.Staged, "__call__", lambda self, *args: ran.append(self) or honest(self, *args))
    replays, replayed = [], in_place.InPlace._replayed
    monkeypatch.setattr(in_place.InPlace, "_replayed", lambda self, *args: replays.append(self) or replayed(self, *args))
    build, inputs = (test_tail.MODELS | test_staged.MODELS)[name]
    sizes = (9, 7, 12, 5) if kind == "recording" else (9, 9, 9, 9, 9, 7)
    model = build().cuda().float()

    def sums(x, y):
        with cw.capture(model) as tape, torch.autocast("cuda", dtype=torch.bfloat16, enabled=low):
            losses = F.cross_entropy(model(x).float(), y, reduction="none")
        return clip(tape, losses, cw.flat(0.3), "bookkeep")

    for number in range(24):
        size = sizes[number % len(sizes)]
        x, y = inputs(size).cuda(), torch.randint(0, 3, (size,), device="cuda")
        if x.is_floating_point():
            x = x.float()
            x[2] = x[2] * (torch.inf if number % 3 == 0 else 1)
        found = sums(x, y)
        with monkeypatch.context() as patched:
            patched.setattr(tracing, "DEVICES", set())
            expected = sums(x, y)
        assert torch.equal(found.finite.cpu(), expected.finite.cpu())
        difference = sum(float((found.sums[name] - total).square().sum()) for name, total in expected.sums.items()) ** 0.5
        assert difference <= (3e-2 if low else 2e-3) * 0.3 * size
    assert any(found.tail is not None for found in experience_of([model]).tails.kinds.values()) == (kind == "recording")
    assert bool(ran) == bool(replays) == (kind == "program")


@pytest.mark.parametrize("sizes", [(9,), (9, 7)], ids=["whole", "in parts"])
@pytest.mark.filterwarnings("ignore")
def test_sums_of_a_program_lie_where_the_recorded_update_reads_them(sizes, monkeypatch):
    """And the numbers are those of steps without graphs."""
    import test_sums_room as rooms
    from clipwise import tracing
    from clipwise.compiled import in_place, leaving, tails

    monkeypatch.setattr(tails, "room_for_recording", lambda device, parameters: 0)
    for module in (in_place, leaving):
        monkeypatch.setattr(module, "SMALL_RESULT", 0)
    in_room = []

    def trained():
        model = rooms.fresh().cuda()
        private, made = rooms.training(model)
        for number in range(rooms.STEPS):
            for part, size in enumerate(sizes):
                rooms.go(private, model, 100 * number + part, size, "cuda")
            in_room.append(rooms.is_in_room(private))
            rooms.finish(made)
        private.close()
        return rooms.weights(model)

    found = trained()
    assert len(sizes) > 1 or sum(in_room) > rooms.STEPS // 4
    monkeypatch.setattr(tracing, "DEVICES", set())
    expected = trained()
    assert float((found - expected).norm()) <= 1e-9 * float(expected.norm())


@pytest.mark.parametrize("shares_a_weight", [False, True])
def test_a_branch_on_another_stream(shares_a_weight):
    """Autograd runs its backward pass there; what reaches the taps is read after it, also where a weight is used on both streams."""
    side = torch.cuda.Stream()

    def branches(net, x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            heavy = net.a(x)
            for _ in range(20):
                heavy = torch.tanh(heavy @ net.mixing)
        torch.cuda.current_stream().wait_stream(side)
        return heavy + (net.a if shares_a_weight else net.b)(x)

    model = Net(branches, a=nn.Linear(32, 512), b=nn.Linear(32, 512)).double().cuda()
    if shares_a_weight:
        del model.b
    model.register_buffer("mixing", torch.eye(512, dtype=torch.float64, device="cuda"))
    x = examples(6, 32).cuda()
    for _ in range(20):
        assert_exact(model, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_weights_reach_cudnn_in_one_piece(kind, dtype, monkeypatch):
    """Eagerly and in graphs; else it copies each of them at every call, and says so."""
    from clipwise.rules import recurrent
    from test_compiled import in_steady_state

    seen, asked = [], recurrent._takes_one_piece
    monkeypatch.setattr(recurrent, "_takes_one_piece", lambda *args: (seen.append(asked(*args)), seen[-1])[1])
    model = Net(lambda s, x: s.b(s.a(x)[0][:, -1]), a=kind(4, 8, batch_first=True), b=nn.Linear(8, 3)).cuda().to(dtype)
    x = torch.randn(9, 6, 4, device="cuda", dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="RNN module weights")
        step, _ = in_steady_state(model, x)
        step(x.clone(), torch.arange(9, device="cuda") % 3)
    assert seen and all(seen) and step.graphs.variants
