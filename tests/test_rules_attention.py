"""Multi-head attention in all its variants, against a float64 loop; the forward result is PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from helpers import ALL_METHODS, Net, assert_exact, examples, row_norms


def with_biases(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return layer


@given(
    batch_first=st.booleans(),
    bias=st.booleans(),
    bias_kv=st.booleans(),
    zero=st.booleans(),
    cross=st.sampled_from(["self", "cross", "other widths"]),
    mask=st.sampled_from([None, "causal", "float", "padding", "both"]),
    need_weights=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_any_attention(batch_first, bias, bias_kv, zero, cross, mask, need_weights, dtype):
    widths = {"kdim": 3, "vdim": 5} if cross == "other widths" else {}
    layer = with_biases(nn.MultiheadAttention(4, 2, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero, batch_first=batch_first, **widths))
    length = 3 if cross == "self" else 5
    attn_mask = {
        "causal": torch.ones(3, length, dtype=torch.bool).triu(1),
        "both": torch.ones(3, length, dtype=torch.bool).triu(1),
        "float": torch.randn(3, length),
    }.get(mask)

    def forward(s, q, k, v, padding):
        if cross == "self":
            k = v = q
        if not batch_first:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        options = {"attn_mask": attn_mask.to(q.dtype) if mask == "float" else attn_mask} if attn_mask is not None else {}
        if mask in ("padding", "both"):
            options["key_padding_mask"] = padding[:, :length]
        out, weights = s.a(q, k, v, need_weights=need_weights, **options)
        out = out if batch_first else out.transpose(0, 1)
        return torch.cat([out.flatten(1), weights.flatten(1)], 1) if weights is not None else out

    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1, 2:] = padding[2, 1:] = True
    inputs = examples(4, 3, 4), examples(4, 5, widths.get("kdim", 4)), examples(4, 5, widths.get("vdim", 4))
    assert_exact(Net(forward, a=layer), *inputs, padding, dtype=dtype, tolerance=1e-4 if dtype == torch.float32 else None)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 3, "vdim": 5}, {"batch_first": True}])
def test_the_forward_result_is_pytorch_s(options, training):
    layer = with_biases(nn.MultiheadAttention(8, 2, **options)).train(training)
    q, k, v = torch.randn(5, 3, 8), torch.randn(5, 3, options.get("kdim", 8)), torch.randn(5, 3, options.get("vdim", 8))
    for need_weights in (True, False):
        plain = layer(q, k, v, need_weights=need_weights)
        with cw.capture(layer):
            watched = layer(q, k, v, need_weights=need_weights)
        for a, b in zip(plain, watched):
            if a is not None:
                torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoders_and_decoders(norm_first, batch_first, activation):
    options = {"dropout": 0.0, "norm_first": norm_first, "batch_first": batch_first, "activation": activation}
    model = nn.Transformer(4, 2, 2, 2, 6, **options)

    def forward(s, x, y):
        if not batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        out = s.t(x, y, tgt_mask=nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype), tgt_is_causal=True)
        return out if batch_first else out.transpose(0, 1)

    assert_exact(Net(forward, t=model), examples(4, 5, 4), examples(4, 3, 4))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_learned_queries(method):
    model = Net(
        lambda s, x: s.a(s.q.expand(len(x), -1, -1), x, x)[0],
        a=nn.MultiheadAttention(4, 2, batch_first=True),
        q=nn.Parameter(torch.randn(1, 2, 4)),
    )
    assert_exact(model, examples(5, 3, 4), methods=[method])


BACKENDS = [torch.nn.attention.SDPBackend.MATH, torch.nn.attention.SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_dot_product_attention_on_any_back_end(backend):
    def forward(s, x):
        q, k, v = s.a(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        with torch.nn.attention.sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert_exact(Net(forward, a=nn.Linear(4, 24)), examples(5, 3, 4), methods=ALL_METHODS)


def test_grouped_queries():
    def forward(s, x):
        q = s.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in s.kv(x).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert_exact(Net(forward, q=nn.Linear(4, 8), kv=nn.Linear(4, 8)), examples(5, 3, 4))


def test_dropout_in_attention():
    """The masks of one run, by one backward pass a loss."""
    model = Net(lambda s, x: s.e(x), e=nn.TransformerEncoderLayer(4, 2, 6, dropout=0.4, batch_first=True)).double()
    with cw.capture(model) as tape:
        losses = model(examples(5, 3, 4)).square().sum((1, 2))
    norms = cw.per_example_norms(tape, losses)
    rows = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses]
    torch.testing.assert_close(norms, row_norms(rows))
