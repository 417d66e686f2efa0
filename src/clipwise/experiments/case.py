"""One column of a figure: a network, a data set, a batch size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import torch
from torch import Tensor, nn

from ..data import DataSet, load
from ..data.catalog import SYNTHETIC
from ..models.zoo import build

EPOCHS = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000, "imdb": 25_000, "lsun": 10_000}
_TITLES = {"mnist": "MNIST", "fashion-mnist": "FMNIST", "cifar10": "CIFAR10", "imdb": "IMDB", "lsun": "LSUN"}


@dataclass(frozen=True)
class Case:
    """`panel` and `label` say where it stands in the figure; the rest says what is trained."""

    panel: str
    label: str
    model: str
    data: str
    batch_size: int
    size: int = 64  # side of LSUN's pictures

    @property
    def steps_an_epoch(self) -> int:
        return math.ceil(EPOCHS[self.data] / self.batch_size)

    def prepare(self, real_data: bool, device: torch.device, count: int = 4) -> tuple[nn.Module, Iterator[tuple[Tensor, Tensor]]]:
        """The network, and `count` batches that come round again and again."""
        data = self._load(real_data, count)
        torch.manual_seed(0)
        return build(self.model, data).to(device).train(), self.batches(real_data, device, count)

    def batches(self, real_data: bool, device: torch.device, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        train = self._load(real_data, count).train
        rows = torch.arange(count * self.batch_size) % len(train.labels)
        return cycle([(train.inputs[part].to(device), train.labels[part].to(device)) for part in rows.split(self.batch_size)])

    def _load(self, real_data: bool, count: int) -> DataSet:
        return _load(self.data if real_data else SYNTHETIC + self.data, self.size, count * self.batch_size)


@lru_cache(maxsize=1)
def _load(name: str, size: int, count: int) -> DataSet:
    return load(name, size=size, limit=count)


def title_of(data: str) -> str:
    return _TITLES[data]
