"""Seconds and peak memory of a private step over an ordinary one, in the same run on the same machine, methods in turns.

    python benchmarks/wall_clock.py [--cases mlp cnn …] [--steps 20]

A step is forward pass, gradients and Adam's update. The first steps are left out: clipwise verifies the model on them (and
again on steps 4, 8, 16 …, which the median passes over). Without a GPU the large cases are left out, and memory is not
measured. GPT-2 and ViT need transformers, ResNet-50 needs torchvision; what is not installed is left out and named.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw
from clipwise.machine import machine
from clipwise.models import cnn, mlp
from flops import OverRows, Transformer
from report import write_results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 3
METHODS = ("non-private", "bookkeep", "reweight")


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    bf16: bool = False
    large: bool = False  # only on a GPU


def _images(batch: int, channels: int, size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,)))


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
    "lstm 28-128 B128": Case(lambda: OverRows(nn.LSTM), _images(128, 1, 28)),
    "gru 28-128 B128": Case(lambda: OverRows(nn.GRU), _images(128, 1, 28)),
    "rnn 28-128 B128": Case(lambda: OverRows(nn.RNN), _images(128, 1, 28)),
    "gpt2 B16 T1024 bf16": Case(_gpt2, _text(16, 1024, 50257), bf16=True, large=True),
    "gpt2 B64 T128 bf16": Case(_gpt2, _text(64, 128, 50257), bf16=True, large=True),
    "vit-b/16 B64 bf16": Case(_vit, _images(64, 3, 224), bf16=True, large=True),
    "resnet50 B32 224": Case(_resnet50, _images(32, 3, 224), large=True),
}


def losses_of(model: nn.Module, x: Tensor, y: Tensor, bf16: bool) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=bf16):
        output: Any = model(x)
        logits = output if isinstance(output, Tensor) else output.logits
    losses = F.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
    return losses if y.dim() == 1 else losses.view(y.shape).mean(1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, method: str, x: Tensor, y: Tensor, bf16: bool) -> None:
    optimizer.zero_grad()
    if method == "non-private":
        losses_of(model, x, y, bf16).sum().backward()
    else:
        with cw.capture(model) as tape:
            losses = losses_of(model, x, y, bf16)
        cw.clipped_loss(tape, losses, cw.flat(1.0), method=method).backward()
    optimizer.step()


def _synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, steps: int) -> dict[str, dict[str, float]]:
    """{method: {milliseconds, spread, times_ordinary, first_step_ms, peak_memory_times_ordinary}}"""
    model = case.build().to(DEVICE)
    x, y = (tensor.to(DEVICE) for tensor in case.batch())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    peaks = dict.fromkeys(METHODS, 0)
    for number in range(WARM_UP + steps):
        for method in METHODS:
            if DEVICE == "cuda":
                torch.cuda.reset_peak_memory_stats()
            _synchronize()
            start = time.perf_counter()
            step(model, optimizer, method, x, y, case.bf16)
            _synchronize()
            times[method].append(1e3 * (time.perf_counter() - start))
            if DEVICE == "cuda" and number == WARM_UP + steps - 1:
                peaks[method] = torch.cuda.max_memory_allocated()
    medians = {method: statistics.median(values[WARM_UP:]) for method, values in times.items()}
    return {
        method: {
            "milliseconds": round(medians[method], 3),
            "spread": round(
                statistics.quantiles(times[method][WARM_UP:], n=4)[2] - statistics.quantiles(times[method][WARM_UP:], n=4)[0], 3
            ),
            "times_ordinary": round(medians[method] / medians["non-private"], 3),
            "first_step_ms": round(times[method][0], 1),
            **({"peak_memory_times_ordinary": round(peaks[method] / peaks["non-private"], 3)} if DEVICE == "cuda" else {}),
        }
        for method in METHODS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    print(f"{'case':26s} {'method':12s} {'ms a step':>10s} {'x ordinary':>11s} {'memory':>7s} {'first ms':>9s}")
    for name in options.cases:
        case = CASES[name]
        if case.large and DEVICE == "cpu":
            continue
        try:
            found = measure(case, options.steps)
        except ImportError as missing:
            print(f"{name:26s} left out: {missing}")
            continue
        results["cases"][name] = found
        for method, row in found.items():
            print(f"{name:26s} {method:12s} {row['milliseconds']:10.2f} {row['times_ordinary']:11.2f} "
                  f"{row.get('peak_memory_times_ordinary', float('nan')):7.2f} {row['first_step_ms']:9.0f}", flush=True)  # fmt: skip
        gc.collect()
        torch.cuda.empty_cache()
    write_results("wall_clock", results)


if __name__ == "__main__":
    main()
