"""The paper's networks."""

from .paper import OverRows, Transformer, cnn, deep_mlp, lstm, mlp, rnn, transformer
from .vision import VGG, FrozenBatchNorm2d, ResNet, resnet, vgg

__all__ = [
    "VGG",
    "FrozenBatchNorm2d",
    "OverRows",
    "ResNet",
    "Transformer",
    "cnn",
    "deep_mlp",
    "lstm",
    "mlp",
    "resnet",
    "rnn",
    "transformer",
    "vgg",
]
