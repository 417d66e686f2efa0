"""How the cost of a private step grows with the batch and with the length of sequences, beside an ordinary step's; with a plot.

    python benchmarks/scaling.py [--longest 8192] [--largest 256]

(On a CPU sequences end at 2048 unless --longest says otherwise: 8192 take some minutes.) A language model of two layers. Operations are those of FlopCounterMode,
attention included, the same on any machine; milliseconds are medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from cases import DEVICE, losses_of
from clipwise.machine import machine
from clipwise.plots import new_figure, save_figure
from flops import Transformer, counter
from report import sign, write_results

VERIFIED = 4  # steps before one that is counted: none of the next three is verified
TIMED = 3
WAYS = ("ordinary", "private")


def _step(model: nn.Module, ids: Tensor, way: str) -> None:
    if way == "ordinary":
        losses_of(model, ids, ids, bf16=False).sum().backward()
    else:
        with cw.capture(model) as tape:
            losses = losses_of(model, ids, ids, bf16=False)
        cw.clipped_loss(tape, losses, cw.flat(1.0)).backward()
    for parameter in model.parameters():
        parameter.grad = None


def _seconds(model: nn.Module, ids: Tensor, way: str) -> float:
    start = time.perf_counter()
    _step(model, ids, way)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(batch: int, length: int, width: int = 64) -> dict[str, dict[str, float]]:
    """{way: {gigaflops, milliseconds}}"""
    model = Transformer(width, length, 200).to(DEVICE)
    ids = torch.randint(0, 200, (batch, length), device=DEVICE)
    found = {}
    for way in WAYS:
        for _ in range(VERIFIED if way == "private" else 2):
            _step(model, ids, way)
        with counter() as counted:
            _step(model, ids, way)
        seconds = statistics.median(_seconds(model, ids, way) for _ in range(TIMED if way == "ordinary" else TIMED - 1))
        found[way] = {"gigaflops": counted.get_total_flops() / 1e9, "milliseconds": round(1e3 * seconds, 2)}
    return found


def draw(path: Path, results: dict[str, Any]) -> None:
    figure = new_figure()
    figure.set_size_inches(9, 4)
    panels = [("by length", "tokens a sequence"), ("by batch", "examples a batch")]
    for axes, (title, label) in zip(figure.subplots(1, 2), panels):
        rows = results[title]
        for way, colour, marker in (("ordinary", "#999999", "o"), ("private", "#0072B2", "s")):
            sizes = [int(size) for size in rows]
            axes.plot(sizes, [row[way]["milliseconds"] for row in rows.values()], marker + "-", color=colour, label=f"{way}: milliseconds")
            axes.plot(
                sizes, [row[way]["gigaflops"] for row in rows.values()], marker + ":", color=colour, label=f"{way}: GFLOP",
                markersize=8 if way == "ordinary" else 4, linewidth=3 if way == "ordinary" else 1,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel=label, title=f"{title}, {results['about'][title]}")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    figure.axes[0].set_ylabel("a step (log scale)")
    sign(figure)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=8192 if DEVICE == "cuda" else 2048)
    parser.add_argument("--largest", type=int, default=256)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine(), "about": {"by length": "B = 4", "by batch": "T = 64"}, "by length": {}, "by batch": {}}
    lengths = [size for size in (128, 512, 2048, 8192) if size <= options.longest]
    batches = [size for size in (4, 16, 64, 256) if size <= options.largest]
    print(f"{'':10s} {'size':>6s} {'GFLOP':>9s} {'x ordinary':>11s} {'ms':>9s} {'x ordinary':>11s}")
    for title, sizes in (("by length", lengths), ("by batch", batches)):
        for size in sizes:
            found = results[title][str(size)] = measure(4, size) if title == "by length" else measure(size, 64)
            ordinary, private = (found[way] for way in WAYS)
            print(f"{title:10s} {size:6d} {private['gigaflops']:9.3f} {private['gigaflops'] / ordinary['gigaflops']:11.3f} "
                  f"{private['milliseconds']:9.1f} {private['milliseconds'] / ordinary['milliseconds']:11.2f}", flush=True)  # fmt: skip
    path = write_results("scaling", results)
    draw(path.with_suffix(".png"), results)


if __name__ == "__main__":
    main()
