"""The paper's experiments: one file a figure, and what measures, draws and reports them."""

from . import architecture, batch_size, depth, image_size, memory, resnet, vgg
from .figure import Figure, Measured

FIGURES: dict[str, Figure] = {
    module.FIGURE.name: module.FIGURE for module in (architecture, batch_size, depth, resnet, vgg, image_size, memory)
}

__all__ = ["FIGURES", "Figure", "Measured"]
