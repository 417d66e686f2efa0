"""Networks by name, in the shape that a data set needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..data import DataSet
from .paper import cnn, deep_mlp, lstm, mlp, rnn, transformer
from .tuned import tanh_cnn, tanh_vgg
from .vision import resnet, vgg

Build = Callable[[int, int, int], nn.Module]  # channels, size, classes


def _flat(make: Callable[..., nn.Module], rows: bool = False, **options: Any) -> Build:
    """A network that reads an image as one vector, or row by row."""
    return lambda channels, size, classes: (
        make(inputs=channels * size * size, classes=classes, **options)
        if not rows
        else make(features=channels * size, classes=classes, **options)
    )


def _coloured(make: Callable[..., nn.Module], *options: Any, **named: Any) -> Build:
    """A network that takes images of any size."""
    return lambda channels, size, classes: make(*options, classes=classes, **named)


_IMAGES: dict[str, Build] = {
    "mlp": _flat(mlp), "cnn": cnn, "rnn": _flat(rnn, rows=True), "lstm": _flat(lstm, rows=True),
    "tanh-cnn": tanh_cnn, "tanh-vgg": _coloured(tanh_vgg),
    **{f"mlp-{depth}": _flat(deep_mlp, depth=depth) for depth in (2, 4, 6, 8)},
    **{f"resnet{depth}": _coloured(resnet, depth) for depth in (18, 34, 50, 101)},
    **{f"resnet{depth}-group": _coloured(resnet, depth, norm="group") for depth in (18, 34, 50, 101)},
    **{f"vgg{depth}": _coloured(vgg, depth) for depth in (11, 13, 16, 19)},
    **{f"vgg{depth}-group": _coloured(vgg, depth, norm="group") for depth in (11, 13, 16, 19)},
}  # fmt: skip
NAMES = (*_IMAGES, "transformer")


def build(name: str, data: DataSet) -> nn.Module:
    """The network `name` for the examples of `data`."""
    if name not in NAMES:
        raise ValueError(f"there is no model {name!r}; choose one of {', '.join(NAMES)}")
    if (name == "transformer") != (data.vectors is not None):
        raise ValueError(f"{name} does not read {data.name}: the transformer is for text, the others are for images")
    if name == "transformer":
        return transformer(classes=data.classes, vectors=data.vectors)
    _, channels, size, _ = data.train.inputs.shape
    if name.startswith(("resnet", "vgg")) and channels != 3:
        raise ValueError(f"{name} needs images of three channels, {data.name} has {channels}")
    return _IMAGES[name](channels, size, data.classes)
