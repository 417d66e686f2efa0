"""ResNet (He et al. 2016) and VGG (Simonyan & Zisserman 2015), with BatchNorm frozen as in the paper, or GroupNorm.

Parameters and buffers have torchvision's names, so that its state dicts load.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that never trains: statistics, scale and shift stay at the values they were loaded with."""

    def __init__(self, channels: int):
        super().__init__(channels)
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        super().train(False)
        return self


def _norm(name: str) -> Norm:
    if name == "frozen_batch":
        return FrozenBatchNorm2d
    if name == "group":
        return lambda channels: nn.GroupNorm(min(32, channels // 4), channels)
    raise ValueError(f'norm must be "frozen_batch" or "group", got {name!r}')


class _Basic(nn.Module):
    """Two 3 × 3 convolutions and the way past them."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.downsample = _downsample(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(h)) + self.downsample(x))


class _Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions and the way past them."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), norm(outputs)
        self.downsample = _downsample(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        h = torch.relu(self.bn2(self.conv2(h)))
        return torch.relu(self.bn3(self.conv3(h)) + self.downsample(x))


def _downsample(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Sequential:
    """The way past a block: empty where shapes agree."""
    if stride == 1 and inputs == outputs:
        return nn.Sequential()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class ResNet(nn.Module):
    """Residual blocks in four stages."""

    def __init__(self, block: type[_Basic] | type[_Bottleneck], counts: list[int], classes: int, norm: Norm):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = 64
        for stage, count in enumerate(counts):
            width = 64 * 2**stage
            blocks = []
            for place in range(count):
                blocks.append(block(inputs, width, 2 if stage and place == 0 else 1, norm))
                inputs = width * block.expansion
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        h = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        for stage in (1, 2, 3, 4):
            h = getattr(self, f"layer{stage}")(h)
        return self.fc(h.mean((2, 3)))


_RESNETS: dict[int, tuple[type[_Basic] | type[_Bottleneck], list[int]]] = {
    18: (_Basic, [2, 2, 2, 2]), 34: (_Basic, [3, 4, 6, 3]), 50: (_Bottleneck, [3, 4, 6, 3]), 101: (_Bottleneck, [3, 4, 23, 3]),
}  # fmt: skip
_VGGS = {11: [1, 1, 2, 2, 2], 13: [2, 2, 2, 2, 2], 16: [2, 2, 3, 3, 3], 19: [2, 2, 4, 4, 4]}


def resnet(depth: int, classes: int = 1000, norm: str = "frozen_batch") -> ResNet:
    """ResNet-18, -34, -50 or -101; norm: "frozen_batch" (the paper's) or "group"."""
    if depth not in _RESNETS:
        raise ValueError(f"there are ResNets of depth {', '.join(map(str, _RESNETS))}, not {depth}")
    return ResNet(*_RESNETS[depth], classes, _norm(norm))


class VGG(nn.Module):
    """3 × 3 convolutions in five stages, then three fully connected layers."""

    def __init__(self, counts: list[int], classes: int, norm: Norm | None):
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for count, width in zip(counts, (64, 128, 256, 512, 512)):
            for _ in range(count):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), *([norm(width)] if norm else []), nn.ReLU()]
                inputs = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def vgg(depth: int, classes: int = 1000, norm: str | None = None) -> VGG:
    """VGG-11, -13, -16 or -19; norm: None (as published), "frozen_batch" or "group" after every convolution."""
    if depth not in _VGGS:
        raise ValueError(f"there are VGGs of depth {', '.join(map(str, _VGGS))}, not {depth}")
    return VGG(_VGGS[depth], classes, _norm(norm) if norm else None)
