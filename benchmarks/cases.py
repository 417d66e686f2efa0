"""Models and batches that the scripts here measure: the paper's networks, and the sizes in which they and larger ones are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.models import cnn, mlp, resnet, transformer, vgg
from flops import OverRows, Transformer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    bf16: bool = False
    large: bool = False  # only on a GPU


def _images(batch: int, channels: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,)))


def _reviews(batch: int, length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(1, 20_000, (batch, length)), torch.randint(0, 2, (batch,)))


def _text(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch, length)))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=10))


def _resnet50() -> nn.Module:
    """BatchNorm frozen, as in the paper."""
    import torchvision

    model = torchvision.models.resnet50(weights=None).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return model


CASES = {
    "mlp B128": Case(mlp, _images(128, 1, 28)),
    "cnn B128": Case(cnn, _images(128, 1, 28)),
    "transformer d256 B16 T64": Case(lambda: Transformer(256, 64, 1000), _text(16, 64, 1000)),
    "imdb transformer B128": Case(transformer, _reviews(128, 256)),
    "lstm 28-128 B128": Case(lambda: OverRows(nn.LSTM), _images(128, 1, 28)),
    "gru 28-128 B128": Case(lambda: OverRows(nn.GRU), _images(128, 1, 28)),
    "rnn 28-128 B128": Case(lambda: OverRows(nn.RNN), _images(128, 1, 28)),
    "gpt2 B16 T1024 bf16": Case(_gpt2, _text(16, 1024, 50257), bf16=True, large=True),
    "gpt2 B64 T128 bf16": Case(_gpt2, _text(64, 128, 50257), bf16=True, large=True),
    "vit-b/16 B64 bf16": Case(_vit, _images(64, 3, 224), bf16=True, large=True),
    "resnet18 B20 64": Case(lambda: resnet(18), _images(20, 3, 64), large=True),
    "vgg16 B20 64": Case(lambda: vgg(16), _images(20, 3, 64), large=True),
    "resnet50 B32 224": Case(_resnet50, _images(32, 3, 224), large=True),
}


def losses_of(model: nn.Module, x: Tensor, y: Tensor, bf16: bool) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
        output: Any = model(x)
        logits = output if isinstance(output, Tensor) else output.logits
    losses = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
    return losses if y.dim() == 1 else losses.view(y.shape).mean(1)
