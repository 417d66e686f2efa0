"""Which models become graphs: those that keep numbers of their own, index, carry masks; and what is said of those that do not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from helpers import Net
from test_compiled import RECORDS, assert_same_training, built, mean_loss, train

pytestmark = pytest.mark.filterwarnings("ignore:reproducible noise", "ignore:an earlier PrivateTraining")
X = torch.randn(RECORDS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def counting(scale):
    def forward(net, x):
        net.calls += 1
        net.log.append(net.calls)
        return net.a(x) * scale(net)

    def build():
        net = Net(forward, a=nn.Linear(4, 3))
        net.calls, net.log = 0, []
        return net

    return build


@pytest.mark.parametrize("scale", [lambda net: 1.0, lambda net: min(1.0, net.calls / 20)], ids=["a counter", "an annealed weight"])
def test_numbers_that_a_model_counts_up_are_those_of_the_eager_loop(scale):
    """Tracing runs the model, too: what it leaves in attributes is undone, and a graph that would not count is not made."""
    eager, compiled = built(counting(scale)), built(counting(scale))
    expected, _, _ = train(eager, X, compiled=False, steps=30)
    with pytest.warns(UserWarning, match=r"changes calls and log of Net, which a graph does not follow"):
        found, step, _ = train(compiled, X, steps=30)
    assert torch.equal(found, expected)
    assert compiled.calls == eager.calls == 30 and compiled.log == eager.log
    assert not step.graphs.variants


def test_counters_are_let_alone_where_a_model_cannot_be_copied():
    """Verification runs a model on copies of it; what cannot be copied, an activation that is kept, is run itself."""

    def forward(net, x):
        net.calls += 1
        net.hidden = net.a(x)
        return net.hidden

    model = Net(forward, a=nn.Linear(4, 3))
    model.calls = 0
    for _ in range(3):
        with cw.capture(model) as tape:
            losses = model(X[:8].float()).square().sum(1)
        cw.per_example_norms(tape, losses)
        assert model.hidden.shape == (8, 3)
    assert model.calls == 3


def test_a_tensor_that_a_model_keeps_to_be_looked_at_does_not_stand_in_the_way():
    def forward(net, x):
        net.hidden = torch.tanh(net.a(x))
        return net.b(net.hidden)

    step, _ = assert_same_training(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3)), X)
    assert type(step.graphs._model.hidden) is torch.Tensor and len(step.graphs._model.hidden) < RECORDS


def _with_buffer(forward, buffer):
    def build():
        net = Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3), t=nn.Parameter(torch.randn(7)))
        net.register_buffer("index", buffer)
        return net

    return build


INDEXED = {
    "a permutation": (lambda s, x: s.b(s.a(x)[:, s.index] + s.t[:6]), torch.tensor([3, 1, 0, 5, 4, 2])),
    "a table of biases": (lambda s, x: s.b(s.a(x) + s.t[s.index]), torch.tensor([6, 1, 0, 5, 6, 2])),
    "one place a row": (
        lambda s, x: s.b(torch.tanh(s.a(x) * s.t[:6]).view(-1, 2, 3)[torch.arange(len(x)), (x[:, 0] > 0).long()].repeat(1, 2)),
        torch.zeros(1),
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_integers_as_indices_have_sizes_that_are_known(name):
    forward, buffer = INDEXED[name]
    assert_same_training(_with_buffer(forward, buffer), X, steps=9)


def test_a_number_in_a_buffer_that_was_written_to():
    """As Gemma scales its embeddings: what stands in for it while a graph is traced was not."""

    def build():
        net = Net(lambda s, x: s.b(torch.tanh(s.a(x) * s.scale)), a=nn.Linear(4, 6), b=nn.Linear(6, 3))
        net.register_buffer("scale", torch.tensor(1.0))
        net.scale.fill_(1.5).mul_(1.1)
        return net

    assert_same_training(build, X)


def test_a_reshape_behind_the_last_layer():
    """Autograd calls it by another name while it is traced."""
    build = lambda: Net(lambda s, x: s.b(torch.tanh(s.a(x)))[:, :6].reshape(-1, 2, 3).sum(1), a=nn.Linear(4, 6), b=nn.Linear(6, 8))
    assert_same_training(build, X)


def test_masks_have_sizes_that_depend_on_the_data():
    forward = lambda net, x: net.b(torch.zeros(len(x), 6, dtype=x.dtype).index_add(0, *_positive(net.a(x))))
    with pytest.warns(UserWarning, match="depends on the data|sorts, picks or joins rows|nobody knows"):
        _, step, _ = train(built(lambda: Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 3))), X, steps=24)
    assert not step.graphs.variants


def _positive(h):
    """Rows whose first entry is positive, and their places."""
    mask = h[:, 0] > 0
    return torch.arange(len(h))[mask], h[mask]


def text(masked):
    """Token ids, a mask of padding and labels."""
    dice = torch.Generator().manual_seed(1)
    ids, mask = torch.randint(1, 40, (60, 8), generator=dice), torch.ones(60, 8, dtype=torch.long)
    if masked:
        mask[::3, 5:] = 0
    return torch.utils.data.TensorDataset(ids, mask, torch.arange(60) % 2)


def _hugging_face(kind, **options):
    transformers = pytest.importorskip("transformers")
    small = dict(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**small, num_labels=2, pad_token_id=0, **options)
    for name in ("attention_probs_dropout_prob", "hidden_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(config, name, 0.0)
    return getattr(transformers, f"{kind}ForSequenceClassification")(config).double()


def trained_on_batches(model, data, losses_of, *, compiled):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = cw.PrivacyPlan(
        dataset_size=60, batch_size=12, steps=9, delta=1e-3, clipping=cw.flat(0.3), noise_multiplier=1.0, sampler="shuffle"
    )
    with cw.PrivateTraining(model, optimizer, plan, noise=cw.reproducible(3)) as private:
        step = private.compile(losses_of, backend="eager") if compiled else None
        while private.ledger.spent < 9:
            for batch in private.loader(data):
                if step is not None:
                    step(*batch)
                else:
                    private.loss(losses_of(model, *batch)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if private.ledger.spent == 9:
                    break
    return torch.cat([p.detach().flatten() for p in model.parameters()]), step


@pytest.mark.parametrize("kind", ["Bert", "Llama", "GPT2"])
@pytest.mark.parametrize("masked", [None, False, True], ids=["no mask", "nothing masked", "masked"])
def test_text_models_with_masks(kind, masked):
    def losses_of(model, ids, mask, labels):
        given = {} if masked is None else {"attention_mask": mask}
        return F.cross_entropy(model(input_ids=ids, **given).logits, labels, reduction="none")

    data = text(masked)
    expected, _ = trained_on_batches(_hugging_face(kind), data, losses_of, compiled=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this step is not compiled")
        found, step = trained_on_batches(_hugging_face(kind), data, losses_of, compiled=True)
    assert len(step.graphs.variants) == 1
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


def test_models_are_told_that_they_are_compiled():
    """In every step of a compiled training, so that eager ones verify the way that is traced; and in none of an eager one."""
    told = []

    def forward(net, x):
        told.append(torch.compiler.is_compiling())
        return net.a(x) if told[-1] else 1.0 * net.a(x)

    train(built(lambda: Net(forward, a=nn.Linear(4, 3))), X)
    assert all(told)
    told.clear()
    train(built(lambda: Net(forward, a=nn.Linear(4, 3))), X, compiled=False)
    assert not any(told)
    assert not torch.compiler.is_compiling()


REASONS = {
    "a number that is fetched": (
        lambda s, x: s.a(x) * (2.0 if float(s.a(x).detach().sum()) > 1e9 else 1.0),
        r"fetches a number.*test_compiled_models.py:\d+",
    ),
    "numpy": (lambda s, x: s.a(torch.as_tensor(x.numpy())), "comes from outside the arguments|numpy"),
    "rows that are sorted": (lambda s, x: s.a(x)[x[:, 0].argsort()][x[:, 0].argsort().argsort()], "sorts, picks or joins rows"),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_a_step_is_not_compiled(name):
    forward, reason = REASONS[name]
    with pytest.warns(UserWarning, match=reason):
        _, step, _ = train(built(lambda: Net(forward, a=nn.Linear(4, 3))), X, losses_of=mean_loss, steps=24)
    assert not step.graphs.variants
