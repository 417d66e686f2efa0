"""Whole networks, by every method: the paper's, and the shapes that others are made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.methods import nonprivate
from clipwise.models import cnn, mlp
from helpers import ALL_METHODS, Net, assert_exact, examples

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
