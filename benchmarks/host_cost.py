"""What Python does in a step, where graphs are replayed: calls and microseconds of each part, over an ordinary step. Needs no GPU.

    python benchmarks/host_cost.py [--cases mlp …] [--steps 40]

On a GPU the time of small steps is the processor's. Here a CPU pretends to record, and replays do nothing, so that what is left of a private step is what
Python does around them; tensors are tiny, so that arithmetic vanishes. The numbers that such a step computes are wrong. Calls of functions, Python's and
built-in ones, are the same on any machine; microseconds are a minimum over the steps. The compiled step has no parts.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 products hang or crash on some processors otherwise

import torch
from torch import Tensor, nn

from cases import Case, losses_of
from clipwise import noise, tracing
from clipwise.compiled import in_loop, in_place, recording, tail, update, variant
from clipwise.machine import machine
from clipwise.models import cnn, mlp, resnet, transformer
from private_step import private_training
from report import write_results

WARM_UP = 70  # the next step that verifies the model is the 128th
PARTS = ("forward", "loss", "backward", "step")


def _vit() -> nn.Module:
    """As many layers as ViT-B/16, and narrow ones."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4)
    return ViTForImageClassification(ViTConfig(num_labels=10, num_hidden_layers=12, **sizes))


CASES = {
    "mlp": Case(mlp, lambda: (torch.randn(5, 1, 28, 28), torch.arange(5))),
    "cnn": Case(cnn, lambda: (torch.randn(5, 1, 28, 28), torch.arange(5))),
    "transformer": Case(transformer, lambda: (torch.randint(1, 2000, (5, 16)), torch.arange(5) % 2)),
    "resnet18": Case(lambda: resnet(18), lambda: (torch.randn(5, 3, 32, 32), torch.arange(5))),
    "vit bf16": Case(_vit, lambda: (torch.randn(5, 3, 8, 8), torch.arange(5)), bf16=True),
}
Run = Callable[..., Sequence[Tensor]]


class Pretended:
    """Results that a replay would leave in the same tensors; computed until it is told that nobody looks at them."""

    idle = False

    def __init__(self, run: Run, inputs: Sequence[Tensor]):
        self._run, self._inputs = run, inputs
        self.outputs = [output.clone() for output in run(*inputs)]

    def __call__(self) -> None:
        if not Pretended.idle:
            for mine, new in zip(self.outputs, self._run(*self._inputs)):
                mine.copy_(new)


def _recorded(run: Run, inputs: Sequence[Tensor], *_: Any) -> tuple[Callable[[], None], list[Tensor]]:
    replay = Pretended(run, inputs)
    return replay, replay.outputs


def _captured(run: Callable[[], None], *_: Any) -> Callable[[], None]:
    return lambda: None if Pretended.idle else run()


@contextlib.contextmanager
def pretending() -> Iterator[None]:
    """A CPU takes the ways of a GPU."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (tracing, "DEVICES", {"cpu"}),
            (tail, "recorded", _recorded),
            (recording, "recorded", _recorded),
            (in_place, "recorded_in_passing", _recorded),
            (update, "captured", _captured),
            (update, "captured_in_passing", _captured),
            (in_loop, "_copies", list),
            (variant, "can_be_recorded", lambda device: True),
            (noise, "_is_drawn_by_kernel", lambda parameter, count: True),
            (noise, "_by_kernel", lambda total, deviation, scale, seed, over: over),
            (sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *_, **__: ["cpu"]),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def _ordinary(model: nn.Module, case: Case) -> list[Callable[..., Any]]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, foreach=True)
    return _parts(model, optimizer, lambda losses: losses.sum(), case.bf16)


def _private(model: nn.Module, case: Case) -> list[Callable[..., Any]]:
    private, optimizer = private_training(model, case)
    return _parts(model, optimizer, private.loss, case.bf16)


def _compiled(model: nn.Module, case: Case) -> list[Callable[..., Any]]:
    private, _ = private_training(model, case)
    step = private.compile(lambda model, x, y: losses_of(model, x, y, case.bf16), rows=private.plan.batch_size, backend="eager")
    return [lambda batch: step(*batch)]


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer, scalar: Callable[[Tensor], Tensor], bf16: bool) -> list[Callable[..., Any]]:
    return [
        lambda batch: (optimizer.zero_grad(), losses_of(model, *batch, bf16))[1],
        scalar,
        lambda loss: loss.backward(),
        lambda _: optimizer.step(),
    ]


def measure(case: Case, way: Callable[..., list[Callable[..., Any]]], steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = case.batch()
    parts = way(case.build(), case)
    Pretended.idle = False
    for _ in range(WARM_UP):
        _run(parts, (x.clone(), y.clone()))
    Pretended.idle = True
    calls = _run(parts, (x.clone(), y.clone()), count=True)
    microseconds = [_run(parts, (x.clone(), y.clone())) for _ in range(steps)]
    names = PARTS if len(parts) > 1 else ("whole",)
    return {
        "calls": dict(zip(names, map(int, calls))) | {"all": int(sum(calls))},
        "microseconds": dict(zip(names, (round(min(part), 1) for part in zip(*microseconds))))
        | {"all": round(min(map(sum, microseconds)), 1)},
    }


def _run(parts: list[Callable[..., Any]], value: Any, *, count: bool = False) -> list[float]:
    """Microseconds of each part, or how many calls it makes."""
    found = []
    for part in parts:
        profile = cProfile.Profile()
        start = time.perf_counter()
        value = profile.runcall(part, value) if count else part(value)
        taken = 1e6 * (time.perf_counter() - start)
        found.append(sum(entry.callcount for entry in profile.getstats()) if count else taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine(), "cases": {}}
    with pretending():
        for name in options.cases:
            try:
                CASES[name].build()
            except ModuleNotFoundError as error:
                print(f"{name} is left out: {error.name} is not installed")
                continue
            rows = {way.__name__[1:]: measure(CASES[name], way, options.steps) for way in (_ordinary, _private, _compiled)}
            results["cases"][name] = rows
            for way, row in rows.items():
                print(f"{name:9s} {way:9s} calls {row['calls']}  microseconds {row['microseconds']}")
    write_results("host_cost", results)


if __name__ == "__main__":
    main()
