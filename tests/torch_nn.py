"""Every module of torch.nn and how clipwise treats it: the table behind tests/test_torch_nn.py and docs/support.md.

python tests/torch_nn.py > docs/support.md
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

B = 5
EXACT, FREE, REFUSED, LOSS, BASE = "exact", "no parameters", "refused", "loss", "container or base class"


@dataclass(frozen=True)
class Entry:
    """A module, inputs for a batch, and the way from its call to a tensor with examples first.

    The first input is scaled by a trainable tensor, so that a gradient flows through modules without parameters too.
    """

    status: str
    build: Callable[[], nn.Module] | None = None
    inputs: Callable[[], tuple[Tensor, ...]] | None = None
    call: Callable[..., Any] = field(default=lambda layer, *inputs: layer(*inputs))
    note: str = ""
    random: bool = False  # draws numbers: compared within one run
    refusal: str = ""  # what the refusal says


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(B, *shape, dtype=torch.float64),)


def free(build: Callable[[], nn.Module], *shape: int, random: bool = False, note: str = "") -> Entry:
    return Entry(FREE, build, floats(*shape), random=random, note=note)


def exact(build: Callable[[], nn.Module], *shape: int, note: str = "", call: Any = None) -> Entry:
    return Entry(EXACT, build, floats(*shape), note=note, **({"call": call} if call else {}))


def loss(build: Callable[[], nn.Module], target: Callable[[], tuple[Tensor, ...]], *shape: int, call: Any = None, note: str = "") -> Entry:
    inputs = lambda: (*floats(*shape)(), *target())
    return Entry(LOSS, build, inputs, note=note or 'with `reduction="none"`', **({"call": call} if call else {}))


def classes(count: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, count, (B, *shape)),)


def signs(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: ((torch.rand(B, *shape) > 0.5).double() * 2 - 1,)


def probabilities(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.rand(B, *shape, dtype=torch.float64),)


def away_from_one(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.rand_like(parameter))
    return module


def frozen_statistics(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        module.running_mean.normal_()
        module.running_var.uniform_(0.5, 2)
    return away_from_one(module).eval()


def unpool(pool: type[nn.Module]) -> Callable[..., Tensor]:
    return lambda layer, x: layer(*pool(2, return_indices=True)(x))


def decoder(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, x.flip(1) * 0.5)


def first(layer: nn.Module, *inputs: Tensor) -> Tensor:
    return layer(*inputs)[0]


NAMES_OF_ACTIVATIONS = """CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU Sigmoid
    Softplus Softshrink Softsign Tanh Tanhshrink""".split()
BN = "in evaluation mode (frozen statistics); refused in training mode: it normalises with the statistics of the whole batch"
SIZES = {1: (6,), 2: (6, 6), 3: (4, 4, 4)}

TABLE: dict[str, Entry] = {name: free(getattr(nn, name), 6) for name in NAMES_OF_ACTIVATIONS}
for _d, _space in SIZES.items():
    TABLE |= {
        f"AdaptiveAvgPool{_d}d": free(lambda d=_d: getattr(nn, f"AdaptiveAvgPool{d}d")(2), 2, *_space),
        f"AdaptiveMaxPool{_d}d": free(lambda d=_d: getattr(nn, f"AdaptiveMaxPool{d}d")(2), 2, *_space),
        f"AvgPool{_d}d": free(lambda d=_d: getattr(nn, f"AvgPool{d}d")(2), 2, *_space),
        f"MaxPool{_d}d": free(lambda d=_d: getattr(nn, f"MaxPool{d}d")(2), 2, *_space),
        f"LPPool{_d}d": free(lambda d=_d: getattr(nn, f"LPPool{d}d")(2, 2), 2, *_space),
        f"MaxUnpool{_d}d": Entry(
            FREE, lambda d=_d: getattr(nn, f"MaxUnpool{d}d")(2), floats(2, *_space), unpool(getattr(nn, f"MaxPool{_d}d"))
        ),
        f"CircularPad{_d}d": free(lambda d=_d: getattr(nn, f"CircularPad{d}d")(1), 2, *_space),
        f"ConstantPad{_d}d": free(lambda d=_d: getattr(nn, f"ConstantPad{d}d")(1, 0.5), 2, *_space),
        f"ReflectionPad{_d}d": free(lambda d=_d: getattr(nn, f"ReflectionPad{d}d")(1), 2, *_space),
        f"ReplicationPad{_d}d": free(lambda d=_d: getattr(nn, f"ReplicationPad{d}d")(1), 2, *_space),
        f"ZeroPad{_d}d": free(lambda d=_d: getattr(nn, f"ZeroPad{d}d")(1), 2, *_space),
        f"Conv{_d}d": exact(
            lambda d=_d: getattr(nn, f"Conv{d}d")(2, 4, 3, groups=2), 2, *_space, note="every stride, padding, dilation, group"
        ),
        f"ConvTranspose{_d}d": exact(lambda d=_d: getattr(nn, f"ConvTranspose{d}d")(2, 3, 2, stride=2), 2, *_space),
        f"LazyConv{_d}d": exact(lambda d=_d: getattr(nn, f"LazyConv{d}d")(3, 2), 2, *_space, note="initialised by its first call"),
        f"LazyConvTranspose{_d}d": exact(
            lambda d=_d: getattr(nn, f"LazyConvTranspose{d}d")(3, 2), 2, *_space, note="initialised by its first call"
        ),
        f"BatchNorm{_d}d": exact(lambda d=_d: frozen_statistics(getattr(nn, f"BatchNorm{d}d")(3)), 3, *_space, note=BN),
        f"LazyBatchNorm{_d}d": Entry(
            REFUSED, lambda d=_d: getattr(nn, f"LazyBatchNorm{d}d")(), floats(3, *_space), note=BN, refusal="statistics of the whole batch"
        ),
        f"InstanceNorm{_d}d": exact(
            lambda d=_d: away_from_one(getattr(nn, f"InstanceNorm{d}d")(3, affine=True)),
            3,
            *_space,
            note="refused with `track_running_stats=True` in training mode: it writes statistics of the examples into buffers",
        ),
        f"LazyInstanceNorm{_d}d": exact(
            lambda d=_d: getattr(nn, f"LazyInstanceNorm{d}d")(affine=True, track_running_stats=False),
            3,
            *_space,
            note="with `track_running_stats=False`; initialised by its first call",
        ),
        f"Dropout{_d}d": free(lambda d=_d: getattr(nn, f"Dropout{d}d")(), 3, *_space, random=True),
    }

TABLE |= {
    "AdaptiveLogSoftmaxWithLoss": Entry(
        EXACT,
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 9, [3, 6]),
        lambda: (torch.randn(B, 4, dtype=torch.float64), torch.tensor([0, 4, 8, 2, 5])),
        lambda layer, x, y: layer(x, y).output,
        note="`.output`, one entry an example; its `.loss` is a mean over the batch",
    ),
    "AlphaDropout": free(nn.AlphaDropout, 6, random=True),
    "Bilinear": Entry(
        EXACT, lambda: nn.Bilinear(3, 4, 2), lambda: (torch.randn(B, 3, dtype=torch.float64), torch.randn(B, 4, dtype=torch.float64))
    ),
    "ChannelShuffle": free(lambda: nn.ChannelShuffle(2), 4, 3, 3),
    "CosineSimilarity": Entry(FREE, nn.CosineSimilarity, lambda: (*floats(6)(), *floats(6)())),
    "CrossMapLRN2d": free(lambda: nn.CrossMapLRN2d(2), 4, 3, 3),
    "DataParallel": Entry(EXACT, lambda: nn.DataParallel(nn.Linear(3, 2)), floats(3), note="without GPUs, where it only passes on"),
    "Dropout": free(nn.Dropout, 6, random=True),
    "Embedding": Entry(
        EXACT,
        lambda: nn.Embedding(7, 3, padding_idx=0),
        lambda: (torch.ones(B, 1, dtype=torch.float64), torch.randint(0, 7, (B, 4))),
        lambda layer, x, i: layer(i) * x.unsqueeze(-1),
        note="refused with `max_norm` and `scale_grad_by_freq`: one example's gradient would depend on others",
    ),
    "EmbeddingBag": Entry(
        EXACT,
        lambda: nn.EmbeddingBag(7, 3),
        lambda: (torch.ones(B, 1, dtype=torch.float64), torch.randint(0, 7, (B, 4))),
        lambda layer, x, i: layer(i) * x,
        note="sum, mean, max, offsets, per-sample weights; refused with `max_norm` and `scale_grad_by_freq`",
    ),
    "FeatureAlphaDropout": free(nn.FeatureAlphaDropout, 3, 4, random=True),
    "Flatten": free(nn.Flatten, 2, 3),
    "Fold": free(lambda: nn.Fold((4, 4), 2), 8, 9),
    "FractionalMaxPool2d": free(lambda: nn.FractionalMaxPool2d(2, output_size=3), 2, 6, 6, random=True),
    "FractionalMaxPool3d": free(lambda: nn.FractionalMaxPool3d(2, output_size=2), 2, 4, 4, 4, random=True),
    "GLU": free(nn.GLU, 6),
    "GRU": exact(
        lambda: nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), 4, 3, call=first, note="through the stock kernel, packed or not"
    ),
    "GRUCell": exact(lambda: nn.GRUCell(3, 4), 3),
    "GroupNorm": exact(lambda: away_from_one(nn.GroupNorm(2, 4)), 4, 3),
    "Identity": free(nn.Identity, 6),
    "LSTM": exact(
        lambda: nn.LSTM(3, 4, 2, proj_size=2, batch_first=True), 4, 3, call=first, note="through the stock kernel, packed or not"
    ),
    "LSTMCell": exact(lambda: nn.LSTMCell(3, 4), 3, call=first),
    "LayerNorm": exact(lambda: away_from_one(nn.LayerNorm(4)), 3, 4),
    "LazyLinear": exact(lambda: nn.LazyLinear(3), 4, note="initialised by its first call"),
    "Linear": exact(lambda: nn.Linear(4, 3), 2, 4),
    "LocalResponseNorm": free(lambda: nn.LocalResponseNorm(2), 4, 3, 3),
    "LogSoftmax": free(lambda: nn.LogSoftmax(-1), 6),
    "MultiheadAttention": exact(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        3,
        4,
        call=lambda layer, x: layer(x, x * 2, x)[0],
        note="self and cross, masks, `add_bias_kv`",
    ),
    "PReLU": exact(lambda: nn.PReLU(3), 3, 4),
    "PairwiseDistance": Entry(FREE, nn.PairwiseDistance, lambda: (*floats(6)(), *floats(6)())),
    "PixelShuffle": free(lambda: nn.PixelShuffle(2), 4, 3, 3),
    "PixelUnshuffle": free(lambda: nn.PixelUnshuffle(2), 2, 4, 4),
    "RMSNorm": exact(lambda: away_from_one(nn.RMSNorm(4)), 3, 4),
    "RNN": exact(
        lambda: nn.RNN(3, 4, 2, batch_first=True), 4, 3, call=first, note="tanh and relu, through the stock kernel, packed or not"
    ),
    "RNNCell": exact(lambda: nn.RNNCell(3, 4), 3),
    "RReLU": free(nn.RReLU, 6, random=True),
    "Softmax": free(lambda: nn.Softmax(-1), 6),
    "Softmax2d": free(nn.Softmax2d, 3, 2, 2),
    "Softmin": free(lambda: nn.Softmin(-1), 6),
    "SyncBatchNorm": Entry(EXACT, lambda: frozen_statistics(nn.SyncBatchNorm(3)), floats(3, 4), note=BN),
    "Threshold": free(lambda: nn.Threshold(0.1, 0.2), 6),
    "Transformer": exact(lambda: nn.Transformer(4, 2, 1, 1, 6, dropout=0.0, batch_first=True), 3, 4, call=decoder),
    "TransformerDecoder": exact(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 2), 3, 4, call=decoder
    ),
    "TransformerDecoderLayer": exact(lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 3, 4, call=decoder),
    "TransformerEncoder": exact(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False),
        3,
        4,
    ),
    "TransformerEncoderLayer": exact(lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True), 3, 4),
    "Unflatten": free(lambda: nn.Unflatten(1, (2, 3)), 6),
    "Unfold": free(lambda: nn.Unfold(2), 2, 4, 4),
    "Upsample": free(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), 2, 3, 3),
    "UpsamplingBilinear2d": free(lambda: nn.UpsamplingBilinear2d(scale_factor=2), 2, 3, 3),
    "UpsamplingNearest2d": free(lambda: nn.UpsamplingNearest2d(scale_factor=2), 2, 3, 3),
}

NONE = {"reduction": "none"}
TABLE |= {
    "BCELoss": loss(lambda: nn.BCELoss(**NONE), probabilities(4), 4, call=lambda layer, x, y: layer(x.sigmoid(), y)),
    "BCEWithLogitsLoss": loss(lambda: nn.BCEWithLogitsLoss(**NONE), probabilities(4), 4),
    "CTCLoss": loss(
        lambda: nn.CTCLoss(**NONE),
        classes(3, 2),
        6,
        4,
        call=lambda layer, x, y: layer(x.log_softmax(-1).transpose(0, 1), y + 1, torch.full((len(x),), 6), torch.full((len(x),), 2)),
    ),
    "CosineEmbeddingLoss": loss(lambda: nn.CosineEmbeddingLoss(**NONE), lambda: (*floats(4)(), *signs()()), 4),
    "CrossEntropyLoss": loss(lambda: nn.CrossEntropyLoss(**NONE), classes(4), 4),
    "GaussianNLLLoss": loss(lambda: nn.GaussianNLLLoss(**NONE), lambda: (*floats(4)(), *probabilities(4)()), 4),
    "HingeEmbeddingLoss": loss(lambda: nn.HingeEmbeddingLoss(**NONE), signs(4), 4),
    "HuberLoss": loss(lambda: nn.HuberLoss(**NONE), floats(4), 4),
    "KLDivLoss": loss(lambda: nn.KLDivLoss(**NONE), probabilities(4), 4, call=lambda layer, x, y: layer(x.log_softmax(-1), y)),
    "L1Loss": loss(lambda: nn.L1Loss(**NONE), floats(4), 4),
    "LinearCrossEntropyLoss": loss(
        lambda: nn.LinearCrossEntropyLoss(4, 3, **NONE), classes(3), 4, note='with `reduction="none"`; its weights are trained too'
    ),
    "MSELoss": loss(lambda: nn.MSELoss(**NONE), floats(4), 4),
    "MarginRankingLoss": loss(
        lambda: nn.MarginRankingLoss(**NONE), lambda: (*floats()(), *signs()()), call=lambda layer, x, z, y: layer(x, z, y)
    ),
    "MultiLabelMarginLoss": loss(lambda: nn.MultiLabelMarginLoss(**NONE), lambda: (torch.tensor([[0, 2, -1, 1]] * B),), 4),
    "MultiLabelSoftMarginLoss": loss(lambda: nn.MultiLabelSoftMarginLoss(**NONE), probabilities(4), 4),
    "MultiMarginLoss": loss(lambda: nn.MultiMarginLoss(**NONE), classes(4), 4),
    "NLLLoss": loss(lambda: nn.NLLLoss(**NONE), classes(4), 4, call=lambda layer, x, y: layer(x.log_softmax(-1), y)),
    "NLLLoss2d": loss(lambda: nn.NLLLoss2d(**NONE), classes(4, 2, 2), 4, 2, 2, call=lambda layer, x, y: layer(x.log_softmax(1), y)),
    "PoissonNLLLoss": loss(lambda: nn.PoissonNLLLoss(**NONE), probabilities(4), 4),
    "SmoothL1Loss": loss(lambda: nn.SmoothL1Loss(**NONE), floats(4), 4),
    "SoftMarginLoss": loss(lambda: nn.SoftMarginLoss(**NONE), signs(4), 4),
    "TripletMarginLoss": loss(lambda: nn.TripletMarginLoss(**NONE), lambda: (*floats(4)(), *floats(4)()), 4),
    "TripletMarginWithDistanceLoss": loss(lambda: nn.TripletMarginWithDistanceLoss(**NONE), lambda: (*floats(4)(), *floats(4)()), 4),
}
for _name in "Container Module ModuleDict ModuleList ParameterDict ParameterList RNNBase RNNCellBase Sequential".split():
    TABLE[_name] = Entry(BASE, note="whatever is inside counts")


def page() -> str:
    """docs/support.md"""
    lines = [
        "# What is supported",
        "",
        "Written by `python tests/torch_nn.py > docs/support.md` from the tables that the tests run through; a test compares the two.",
        "*Exact* means: norms and clipped sums equal a float64 loop over examples to 1e-10, by one backward pass. *Refused* means: an",
        "exception that names the parameter, the place and the repair, before any gradient is handed out.",
        "",
        "## torch.nn",
        "",
        "| module | | |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {TABLE[name].status} | {TABLE[name].note} |" for name in sorted(TABLE)]
    lines += [
        "",
        "## torch functions with trainable weights among their arguments",
        "",
        *_functions(),
        "",
        "## Hugging Face",
        "",
        *_models(),
    ]
    return "\n".join(lines) + "\n"


def _functions() -> list[str]:
    from clipwise.functions import full_name
    from clipwise.registry import INSIDE, REWRITES, RULES, SPREADS

    def names(functions: Any) -> str:
        found = sorted({full_name(function).replace("torch.nn.functional.", "F.") for function in functions})
        return ", ".join(f"`{name}`" for name in found if not name.startswith("torch.Tensor.") and "._" not in name)

    return [
        f"- by a rule of their own: {names(RULES)};",
        f"- entry by entry, whatever the function does to the entries: {names(SPREADS)};",
        f"- written with simpler calls: {names([*REWRITES, *INSIDE])};",
        "- functions of `torch.nn.functional` that are themselves written in Python: looked into;",
        "- anything on weights and constants alone: a derived weight, pulled back by autograd;",
        "- the methods of `torch.Tensor` of the same names, operators, and in-place forms;",
        "- everything else: refused by name, or `fallback=True`. Complex numbers and `torch.func` transforms are refused.",
    ]


def _models() -> list[str]:
    from huggingface import CASES
    from test_huggingface import ADAPTERS

    models = ", ".join(f"`{type(case.build(0.0)).__name__}`" for case in CASES.values())
    return [
        "Models as they come, built from small random configurations, with and without dropout, tied weights left tied, exact to 1e-8",
        f"against a float64 loop: {models}.",
        "",
        f"Adapters (peft): {', '.join(ADAPTERS)}; also on a quantised base.",
        "",
        "A scalar `model(labels=…).loss` is refused; `clipwise.token_losses(logits, labels)` gives one loss a sequence. CLIP's contrastive",
        "loss is refused: every example's loss depends on the whole batch.",
    ]


if __name__ == "__main__":
    print(page(), end="")
