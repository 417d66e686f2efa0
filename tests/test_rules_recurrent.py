"""RNN, LSTM and GRU through the stock kernels, and their cells, against a float64 loop."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import clipwise as cw
from clipwise.kernels import through_time
from clipwise.rules import recurrent
from clipwise.testing import clip_and_add, squared_output
from helpers import ALL_METHODS, Net, assert_exact, examples, row_norms, sensitivity

P = nn.Parameter
LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}


@pytest.fixture(scope="module", params=["own", "identity"], autouse=True)
def backward(request):
    """Whose backward pass gives the gradients of pre-activations: our own on a CPU (LSTM, GRU), or the kernel's, which is fed them through an identity."""
    with pytest.MonkeyPatch.context() as patch:
        for kernel in through_time._LEAST_WORK:
            patch.setitem(through_time._LEAST_WORK, kernel, 0 if request.param == "own" else math.inf)
        yield request.param


def everything(output):
    """Loss of outputs and final states, examples first. output: what a batch-first layer returns."""
    out, state = output
    parts = [out, *(part.transpose(0, 1) for part in (state if isinstance(state, tuple) else (state,)))]
    return squared_output(torch.cat([part.flatten(1) for part in parts], 1))


@given(
    kind=st.sampled_from(sorted(LAYERS)),
    layers=st.integers(1, 3),
    both=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    time=st.integers(1, 4),
    width=st.integers(1, 4),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_any_recurrent_layer(kind, layers, both, bias, batch_first, time, width, dtype):
    layer = LAYERS[kind](3, width, num_layers=layers, bidirectional=both, bias=bias, batch_first=batch_first)

    def forward(s, x):
        if batch_first:
            return s.a(x)
        out, state = s.a(x.transpose(0, 1))
        return out.transpose(0, 1), state

    assert_exact(
        Net(forward, a=layer), examples(5, time, 3), loss=everything, dtype=dtype, tolerance=2e-5 if dtype == torch.float32 else None
    )


@pytest.mark.parametrize("kind", LAYERS)
def test_every_method(kind):
    model = Net(lambda s, x: s.out(torch.tanh(s.a(x)[0])[:, -1]), a=LAYERS[kind](3, 4, 2, batch_first=True), out=nn.Linear(4, 2))
    assert_exact(model, examples(5, 4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_in_one_piece_of_memory(kind, bias, backward, monkeypatch):
    """As a GPU gets them: where cuDNN looks for them, and part of the graph as before."""
    if backward == "own" and kind in ("lstm", "gru"):
        pytest.skip("the kernel is fed nothing")
    monkeypatch.setattr(recurrent, "_IN_ONE_PIECE", {"cpu"})
    seen = []
    monkeypatch.setattr(
        recurrent, "_one_behind_the_other", lambda weights, make=recurrent._one_behind_the_other: seen.append(make(weights)) or seen[-1]
    )
    layer = LAYERS[kind](3, 4, 2, bias=bias, bidirectional=True, batch_first=True)
    assert_exact(Net(lambda s, x: s.a(x), a=layer), examples(5, 4, 3), loss=everything, methods=ALL_METHODS)
    for weights in seen:
        places = [(weight.data_ptr(), weight.nbytes) for weight in weights]
        assert all(place + size == next_place for (place, size), (next_place, _) in itertools.pairwise(places))
    assert seen and len(seen[0]) == (4 if bias else 2)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("method, passes", [("auto", [False]), ("reweight", [False, True])])
def test_gradients_of_weights_are_summed_only_for_a_pass_that_wants_them(kind, method, passes, backward, monkeypatch):
    if backward == "identity":
        pytest.skip("the kernel itself decides")
    model = Net(lambda s, x: s.out(s.a(x)[0][:, -1]), a=LAYERS[kind](3, 4, batch_first=True), out=nn.Linear(4, 2))
    asked = []
    monkeypatch.setattr(through_time, "_backward", lambda *args, run=through_time._backward: asked.append(args[-1]) or run(*args))
    for _ in range(6):  # at first, what is found is compared with what a pass says
        asked.clear()
        with cw.capture(model) as tape:
            losses = squared_output(model(examples(5, 4, 3).float()))
        cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method)
    assert asked == passes


def test_final_states_may_be_changed_in_place():
    """They share the kernel's memory, and nobody needs them as they were."""

    def forward(s, x):
        out, (hidden, memory) = s.a(x)
        hidden.mul_(2), memory.tanh_(), out.add_(1)
        return out, (hidden, memory)

    assert_exact(Net(forward, a=nn.LSTM(3, 4, batch_first=True)), examples(5, 4, 3), loss=everything, methods=ALL_METHODS)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("given_state", [True, False])
def test_projected_lstm(both, layers, given_state):
    layer = nn.LSTM(3, 5, layers, proj_size=2, bidirectional=both, batch_first=True)
    count = layers * (2 if both else 1)
    if not given_state:
        assert_exact(Net(lambda s, x: s.a(x), a=layer), examples(4, 3, 3), loss=everything, methods=ALL_METHODS)
        return
    model = Net(lambda s, x, h, c: s.a(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous())), a=layer)
    assert_exact(model, examples(4, 3, 3), examples(4, count, 2), examples(4, count, 5), loss=everything, methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("which", ["parameters", "inputs"])
def test_initial_states(kind, which):
    layer = LAYERS[kind](3, 4, 2, batch_first=True)
    if which == "parameters":

        def forward(s, x):
            state = [part.expand(-1, len(x), -1) for part in (s.h, s.c)]
            return s.a(x, tuple(state) if kind == "lstm" else state[0])

        assert_exact(
            Net(forward, a=layer, h=P(torch.randn(2, 1, 4)), c=P(torch.randn(2, 1, 4))),
            examples(5, 3, 3),
            loss=everything,
            methods=ALL_METHODS,
        )
    else:

        def forward(s, x, h, c):
            state = [part.transpose(0, 1).contiguous() for part in (h, c)]
            return s.a(x, tuple(state) if kind == "lstm" else state[0])

        assert_exact(Net(forward, a=layer), examples(5, 3, 3), examples(5, 2, 4), examples(5, 2, 4), loss=everything, methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(kind, both, enforce_sorted):
    """Lengths differ, rows lie by time: which belongs to whom is measured. The reference runs every sequence alone."""
    layer = LAYERS[kind](3, 4, 2, bidirectional=both, batch_first=True).double()
    lengths = torch.tensor([5, 4, 4, 2, 1])
    lengths = lengths if enforce_sorted else lengths[[3, 0, 4, 2, 1]]
    x = examples(5, 5, 3)

    def forward(s, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=enforce_sorted)
        out, state = s.a(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        final = state[0] if isinstance(state, tuple) else state
        return torch.cat([padded.sum(1), final.transpose(0, 1).flatten(1)], 1)

    model = Net(forward, a=layer)
    rows = []
    for i, length in enumerate(lengths):
        loss = squared_output(forward(model, x[i : i + 1, :length], lengths[i : i + 1])).sum()
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    reference = {name: torch.stack(column) for (name, _), column in zip(model.named_parameters(), zip(*rows))}
    expected, norms = clip_and_add(reference, 0.5)
    for method in ALL_METHODS:
        with cw.capture(model) as tape:
            losses = squared_output(model(x, lengths))
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)
        found = cw.clipped_gradients(tape, losses, cw.flat(0.5), method=method)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell, lambda i, h, **o: nn.RNNCell(i, h, nonlinearity="relu", **o)])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_in_a_loop_of_the_user(cell, bias):
    def forward(s, x):
        state = None
        for step in x.unbind(1):
            state = s.a(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    assert_exact(Net(forward, a=cell(3, 4, bias=bias)), examples(5, 4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_the_forward_result_is_pytorch_s(kind, options):
    layer, x = LAYERS[kind](6, 8, **options), torch.randn(7, 5, 6)
    plain, state = layer(x)
    with cw.capture(layer):
        watched, seen = layer(x)
    torch.testing.assert_close(watched, plain, rtol=1e-6, atol=1e-6)
    for a, b in zip(state if isinstance(state, tuple) else (state,), seen if isinstance(seen, tuple) else (seen,)):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("way", ["in place", "as it is"])
@pytest.mark.parametrize("frozen", [("weight_hh_l0", "bias_hh_l0"), ("weight_ih_l0", "bias_ih_l0")], ids=["hidden side", "input side"])
def test_one_side_frozen(kind, frozen, way):
    def forward(s, x):
        out, state = s.a(x)
        if way == "in place":
            out.mul_(2)
            (state[0] if isinstance(state, tuple) else state).tanh_()
        return out, state

    model = Net(forward, a=LAYERS[kind](3, 4, batch_first=True))
    for name in frozen:
        getattr(model.a, name).requires_grad_(False)
    assert_exact(model, examples(5, 4, 3), loss=everything, methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
def test_no_examples_and_no_steps(kind):
    model = Net(lambda s, x: s.out(s.a(x)[0].sum(1)), a=LAYERS[kind](3, 4, batch_first=True), out=nn.Linear(4, 2))
    for method in ALL_METHODS:
        with cw.capture(model) as tape:
            losses = squared_output(model(torch.zeros(0, 4, 3)))
        assert all(float(total.abs().sum()) == 0 for total in cw.clipped_gradients(tape, losses, cw.flat(1.0), method=method).values())
    with pytest.raises(RuntimeError, match=r"[Ee]xpected sequence length to be larger than 0"), cw.capture(model):
        model(torch.zeros(5, 0, 3))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_gradient_penalty_is_refused_by_its_name(kind):
    model, x = LAYERS[kind](3, 4, batch_first=True), examples(5, 3, 3).float().requires_grad_()
    with cw.capture(model) as tape:
        losses = squared_output(model(x)[0])
        (slopes,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        losses = losses + slopes.square().sum((1, 2))
    with pytest.raises(cw.UnseenUse, match="a penalty on gradients"):
        cw.clipped_gradients(tape, losses, cw.flat(1.0))


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("frozen", ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"])
def test_partly_frozen(kind, frozen):
    layer = LAYERS[kind](3, 4, batch_first=True)
    getattr(layer, frozen).requires_grad_(False)
    assert_exact(Net(lambda s, x: s.a(x)[0], a=layer), examples(5, 4, 3))


def test_dropout_between_layers():
    """The masks of one run, by one backward pass a loss."""
    model = Net(lambda s, x: s.a(x)[0], a=nn.LSTM(3, 6, 3, dropout=0.5, batch_first=True)).double()
    with cw.capture(model) as tape:
        losses = squared_output(model(examples(6, 4, 3)))
    norms = cw.per_example_norms(tape, losses)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    torch.testing.assert_close(norms, row_norms(rows))


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_is_not_mixing(kind):
    for _ in range(3):
        model = Net(lambda s, x: s.a(x)[0], a=LAYERS[kind](4, 4, 3, dropout=0.3, batch_first=True))
        for batch in (4, 12, 4, 12):
            with cw.capture(model) as tape:
                losses = squared_output(model(torch.randn(batch, 5, 4)))
            cw.per_example_norms(tape, losses)


@pytest.mark.parametrize("kind", LAYERS)
def test_used_twice_and_checkpointed(kind):
    from torch.utils.checkpoint import checkpoint

    def forward(s, x):
        h, _ = s.a(x)
        return checkpoint(lambda h: s.a(h)[0], h, use_reentrant=False) + x

    assert_exact(Net(forward, a=LAYERS[kind](3, 3, batch_first=True)), examples(5, 4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
def test_outputs_changed_in_place(kind):
    def forward(s, x):
        out, _ = s.a(x)
        out.mul_(2.0)
        return torch.relu_(out)

    assert_exact(Net(forward, a=LAYERS[kind](3, 4, batch_first=True)), examples(5, 4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
def test_only_the_final_state(kind):
    def forward(s, x):
        state = s.a(x)[1]
        return (state[1] if isinstance(state, tuple) else state)[-1]

    assert_exact(Net(forward, a=LAYERS[kind](3, 4, batch_first=True)), examples(5, 4, 3), methods=ALL_METHODS)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_sensitivity(kind, precision):
    if (kind, precision) == ("lstm", "fp16"):
        pytest.skip("PyTorch has no LSTM in float16 on this device")
    model = Net(lambda s, x: s.a(x)[0], a=LAYERS[kind](3, 4, batch_first=True))
    x = examples(4, 6, 3).float()
    x[1] *= 1e6
    x[2] = float("nan")
    context = (
        None if precision == "float32" else lambda: torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    )
    assert sensitivity(model, [x], 0.7, loss=lambda out: out.float().flatten(1).sum(1), context=context) <= 1 + 1e-3


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch", [3, 5])
def test_a_packed_sequence_as_the_model_s_input(kind, batch):
    layer = LAYERS[kind](3, 4, batch_first=True).double()
    lengths = torch.tensor([2, 5, 1, 4, 3][:batch])
    packed = pack_padded_sequence(examples(batch, 5, 3), lengths, batch_first=True, enforce_sorted=False)
    loss = lambda out: squared_output(pad_packed_sequence(out[0], batch_first=True)[0])
    rows = [torch.autograd.grad(loss(layer(packed))[i], list(layer.parameters())) for i in range(batch)]
    norms = row_norms(rows)
    for _ in range(4):
        with cw.capture(layer) as tape:
            losses = loss(layer(packed))
        torch.testing.assert_close(cw.per_example_norms(tape, losses), norms)


@pytest.mark.parametrize("kind", LAYERS)
def test_sequences_that_were_packed_before_are_placed_anew_in_every_batch(kind):
    """Of one length for twenty steps, then of several, with as many rows as fit the layout that would be remembered."""
    model = LAYERS[kind](3, 4).double()
    for lengths in [*[[4] * 4] * 20, [7, 4, 3, 2]]:
        sequences = [torch.randn(length, 3, dtype=torch.float64) for length in lengths]
        packed = nn.utils.rnn.pack_sequence(sequences)
        with cw.capture(model) as tape:
            state = model(packed)[1]
            losses = (state[0] if isinstance(state, tuple) else state)[0].square().sum(1)
        found = cw.per_example_norms(tape, losses)
    expected = []
    for sequence in sequences:
        state = model(sequence.unsqueeze(1))[1]
        loss = (state[0] if isinstance(state, tuple) else state).square().sum()
        expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_model_that_ran_on_stand_ins_runs_on_numbers_afterwards():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.GRU(4, 11, batch_first=True)
    with FakeTensorMode(allow_non_fake_inputs=True), cw.capture(model):
        model(torch.randn(6, 3, 4))
    assert_exact(model.double(), examples(6, 3, 4), loss=lambda out: out[0].flatten(1).square().sum(1))
