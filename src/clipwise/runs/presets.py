"""Trainings by name: the paper's settings, and ones that reach published accuracy."""

from __future__ import annotations

from typing import Any

# Lee & Kifer: Adam, step size 0.001, C = 1, σ = 0.05 on the mean gradient of 128: z = 6.4, which is ε ≈ 0.10 for 20 epochs.
_PAPER: dict[str, Any] = dict(optimizer="adam", lr=1e-3, clip=1.0, batch_size=128, epochs=20, epsilon=0.101, delta=1e-5)


def _paper(data: str, model: str) -> dict[str, Any]:
    return {**_PAPER, "data": data, "model": model}


PRESETS: dict[str, dict[str, Any]] = {
    **{f"paper-{data}-{model}": _paper(data, model) for data in ("mnist", "fashion-mnist", "cifar10") for model in ("mlp", "cnn", "rnn", "lstm")},
    "paper-imdb-transformer": _paper("imdb", "transformer"),
    # Tanh networks and large batches (Papernot et al. 2021; Tramèr & Boneh 2021).
    "mnist": dict(data="mnist", model="tanh-cnn", epsilon=3.0, delta=1e-5, epochs=40, batch_size=2048, clip=0.1, lr=2.0, optimizer="sgd"),
    "fashion-mnist": dict(data="fashion-mnist", model="tanh-cnn", epsilon=3.0, delta=1e-5, epochs=40, batch_size=2048, clip=0.1, lr=4.0, optimizer="sgd"),
    "cifar10": dict(data="cifar10", model="tanh-vgg", epsilon=7.5, delta=1e-5, epochs=60, batch_size=4096, clip=0.1, lr=8.0, optimizer="sgd", microbatch=1024),
    "imdb": dict(data="imdb", model="transformer", epsilon=3.0, delta=1e-5, epochs=10, batch_size=512, clip=0.5, lr=2e-3, optimizer="adam"),
}  # fmt: skip
