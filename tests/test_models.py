"""Whole networks, by every method: the paper's, and the shapes that others are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise import models as paper
from clipwise.methods import nonprivate, nxbp_alone
from clipwise.models import cnn, mlp
from clipwise.testing import squared_output
from helpers import ALL_METHODS, Net, assert_exact, clipped, examples

P = nn.Parameter


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.GroupNorm(2, channels))

    def forward(self, x):
        y = self.body(x)
        y += x
        return F.relu(y, inplace=True)


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, stride=4)
        self.token = P(torch.randn(1, 1, 8))
        self.position = P(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.position
        return self.head(self.layer(h)[:, 0])


class LanguageModel(nn.Module):
    """GPT-2 in small: addmm layers, causal attention, a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(9, 8)
        self.norm, self.final = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention, self.attention_bias = P(torch.randn(8, 24) * 0.3), P(torch.randn(24) * 0.1)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, ids):
        h = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        flat = self.norm(h).view(-1, 8)
        q, k, v = (
            part.view(*ids.shape, 2, 4).transpose(1, 2)
            for part in torch.addmm(self.attention_bias, flat, self.attention).view(*ids.shape, 24).split(8, 2)
        )
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = h + self.down(F.gelu(self.up(h)))
        return F.linear(self.final(h), self.token.weight)


class Mixture(nn.Module):
    """Every example through every expert, mixed by a gate: a stack of weights."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = P(torch.randn(3, 4, 5))

    def forward(self, x):
        return torch.einsum("be,beo->bo", self.gate(x).softmax(-1), torch.einsum("bi,eio->beo", x, self.experts))


NETWORKS = {
    "the paper's mlp": (lambda: mlp(16, (6, 5), 3), lambda: examples(5, 4, 4)),
    "the paper's cnn": (lambda: cnn(1, 16, 3), lambda: examples(3, 1, 16, 16)),
    "residual": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), Residual(4), Residual(4), nn.Flatten(), nn.Linear(64, 3)), lambda: examples(4, 1, 6, 6)),
    "vision transformer": (VisionTransformer, lambda: examples(4, 1, 8, 8)),
    "language model": (LanguageModel, lambda: torch.randint(0, 11, (4, 6))),
    "mixture": (Mixture, lambda: examples(5, 4)),
    "3D": (lambda: nn.Sequential(nn.Conv3d(1, 3, 2), nn.ReLU(), nn.MaxPool3d(2), nn.Flatten(), nn.Linear(3, 2)), lambda: examples(4, 1, 3, 3, 3)),
    "encoder and decoder": (
        lambda: Net(lambda s, x: s.t(x, x[:, :2]), t=nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)),
        lambda: examples(4, 5, 8),
    ),
    "attention, time first": (lambda: Net(lambda s, x: s.a(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1), a=nn.MultiheadAttention(8, 2)), lambda: examples(4, 5, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_every_method_is_exact(name):
    build, batch = NETWORKS[name]
    assert_exact(build(), batch(), methods=ALL_METHODS)


@pytest.mark.parametrize("name", ["the paper's mlp", "the paper's cnn", "residual", "vision transformer", "language model"])
def test_in_float32(name):
    build, batch = NETWORKS[name]
    assert_exact(build(), batch(), dtype=torch.float32)


def test_the_paper_s_sizes():
    assert [tuple(p.shape) for p in mlp().parameters()] == [(128, 784), (128,), (256, 128), (256,), (10, 256), (10,)]
    assert [tuple(p.shape) for p in cnn().parameters()] == [
        (20, 1, 5, 5),
        (20,),
        (50, 20, 5, 5),
        (50,),
        (128, 800),
        (128,),
        (10, 128),
        (10,),
    ]
    assert cnn(3, 32)(torch.randn(2, 3, 32, 32)).shape == mlp()(torch.randn(2, 1, 28, 28)).shape == (2, 10)


def test_nonprivate_is_ordinary_training():
    """The comparison method gives autograd's own gradient, clipped by nothing, and clipped_loss does not offer it."""
    model, x = mlp(), torch.randn(6, 1, 28, 28)
    with cw.capture(model) as tape:
        losses = model(x).square().sum(1)
    found = nonprivate(tape, losses).sums
    own = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for name, expected in zip(dict(model.named_parameters()), own):
        torch.testing.assert_close(found[name], expected)
    assert sum(float(value.square().sum()) for value in found.values()) > 1.0


PAPER = {
    "mlp": (lambda: paper.mlp(), (4, 1, 28, 28)),
    "deep mlp": (lambda: paper.deep_mlp(6), (4, 1, 28, 28)),
    "cnn": (lambda: paper.cnn(), (4, 1, 28, 28)),
    "cnn for CIFAR-10": (lambda: paper.cnn(3, 32), (4, 3, 32, 32)),
    "rnn": (lambda: paper.rnn(), (4, 1, 28, 28)),
    "lstm": (lambda: paper.lstm(96), (4, 3, 32, 32)),
    "transformer": (lambda: paper.transformer(50, 16), None),
    "resnet-18": (lambda: paper.resnet(18, 10), (2, 3, 16, 16)),
    "resnet-50 with group norm": (lambda: paper.resnet(50, 10, "group"), (2, 3, 32, 32)),
    "vgg-11 without its head": (lambda: paper.vgg(11, 10, "group").features, (2, 3, 32, 32)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "norm" in name or "vgg" in name else []) for name in PAPER]
)
def test_the_papers_networks_give_the_same_by_every_method(name):
    """So that figures compare speed alone."""
    build, shape = PAPER[name]
    torch.manual_seed(0)
    model = build().double()
    x = torch.randn(*shape, dtype=torch.float64) if shape else torch.randint(0, 50, (4, 9))
    norms, _ = clipped(model, [x], 1.0)
    bound = float(norms.median())
    results = {method: clipped(model, [x], bound, method=method)[1] for method in ALL_METHODS}
    alone = nxbp_alone(model, lambda rows: squared_output(model(rows)), [x], cw.flat(bound)).sums
    for method, sums in {**results, "nxbp alone": alone}.items():
        for key, value in results["bookkeep"].items():
            assert (sums[key] - value).norm() <= 1e-8 * max(1.0, float(value.norm())), (method, key)


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: paper.resnet(18), 11_689_512), (lambda: paper.resnet(34), 21_797_672), (lambda: paper.resnet(50), 25_557_032),
        (lambda: paper.resnet(101), 44_549_160), (lambda: paper.vgg(11), 132_863_336), (lambda: paper.vgg(13), 133_047_848),
        (lambda: paper.vgg(16), 138_357_544), (lambda: paper.vgg(19), 143_667_240),
    ],
)  # fmt: skip
def test_published_sizes(build, count):
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in build().parameters()) == count


@pytest.mark.parametrize(("ours", "theirs"), [("resnet", "resnet18"), ("resnet", "resnet50"), ("vgg", "vgg11"), ("vgg", "vgg16_bn")])
def test_torchvisions_state_dicts_load(ours, theirs):
    models = pytest.importorskip("torchvision").models
    reference = getattr(models, theirs)(weights=None).eval()
    depth = int("".join(c for c in theirs if c.isdigit()))
    model = getattr(paper, ours)(depth, **({"norm": "frozen_batch"} if theirs.endswith("bn") else {})).eval()
    model.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.allclose(model(x), reference(x), atol=1e-4)


def test_frozen_batch_norm_stays_frozen():
    model = paper.resnet(18, 10).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and not any(module.training or module.weight.requires_grad for module in norms)
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(torch.equal(before[name], value) for name, value in model.named_buffers())


def test_a_review_without_a_word_is_no_number_less():
    model = paper.transformer(50, 16)
    words = torch.zeros(3, 6, dtype=torch.long)
    words[0, :3] = torch.tensor([4, 5, 6])
    output = model(words)
    assert output.isfinite().all()
    assert torch.allclose(model(words[:1, :3]), output[:1], atol=1e-6)  # padding changes nothing


@pytest.mark.parametrize("build", [lambda: paper.resnet(20), lambda: paper.vgg(12), lambda: paper.resnet(18, norm="batch")])
def test_unknown_networks(build):
    with pytest.raises(ValueError, match=r"of depth|norm must be"):
        build()
