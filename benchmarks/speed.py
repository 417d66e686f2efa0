"""Private steps over ordinary ones, eager and as graphs: forward pass to updated weights, Adam, in turns in one run.

    python benchmarks/speed.py [--cases "mlp B128" …] [--steps 100] [--ways ordinary "private, traced" …] [--apart]

ordinary                an ordinary eager step
ordinary, graph         the same recorded as a CUDA graph (Adam with capturable=True)
private                 PrivateTraining's eager loop: clipping, checks, ledger, noise
private, no graphs      the same with CLIPWISE_GRAPHS=0: nothing is recorded, which takes less memory and, of small networks, more time
private, traced         private.compile(backend="eager"): the graph as it was traced, on a GPU replayed
private, compiled       private.compile(): by Inductor, on a GPU replayed
Opacus hooks, ghost     where it is installed, on the cases in float32 whose layers it takes

--apart measures one way after the other, as a training has its process for itself; else they take turns, so that a machine which grows
slower or faster does so for all. Writes a table as JSON, and a plot beside it; a time is the median of several looks at the clock, which the JSON has, too.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from cases import CASES, DEVICE, Case, losses_of
from clipwise import tracing
from clipwise.compiled.recording import recorded
from clipwise.experiments.contenders import OPACUS, available, for_opacus, make_step
from clipwise.plots import new_figure, save_figure
from private_step import ORDINARY, Step, Way, measure, measure_cases, plain_way, private_training, private_way
from report import sign

WARM_UP = (
    22  # a graph is there after six, and anew some steps after 16, 32 …, which verify the model and are few among those that are timed
)
_IN_A_LINE = 7  # cases of the plot
AT_ONCE, AT_ONCE_APART = 5, 20  # steps between two looks at the clock: what a loop does before its first replay counts once for all of them
LOOKS = 5  # at least: one may hold a step that verifies the model, and the next what is recorded anew after it
SETTLE = 3  # steps before them, after those of another way
WARM_UP_APART = 40  # the next verification comes with step 64


def ordinary_graph(model: nn.Module, case: Case) -> Step | None:
    """An ordinary step as a CUDA graph: what graphs alone are worth."""
    if DEVICE != "cuda":
        return None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5, capturable=True)
    x, y = (tensor.to(DEVICE) for tensor in case.batch())

    def step() -> None:
        losses_of(model, x, y, case.bf16).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    # Hugging Face takes slower attention where it sees that a graph is recorded.
    unnoticed = mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False)
    with unnoticed:
        replay_graph, _ = recorded(lambda *_: step() or [], [x, y])

    def replay(new_x: Tensor, new_y: Tensor, keep: Any = (model, optimizer)) -> None:  # the graph reads their memory
        x.copy_(new_x)
        y.copy_(new_y)
        replay_graph()

    return replay


def without_graphs() -> Way:
    """As in a process with CLIPWISE_GRAPHS=0."""

    def make(model: nn.Module, case: Case) -> Step:
        run = private_way()(model, case)
        assert run is not None

        def step(x: Tensor, y: Tensor) -> None:
            before, tracing.DEVICES = tracing.DEVICES, set()
            try:
                run(x, y)
            finally:
                tracing.DEVICES = before

        return step

    return make


def compiled_way(backend: str) -> Way:
    def make(model: nn.Module, case: Case) -> Step:
        private, _ = private_training(model, case)
        rows = private.plan.batch_size  # batches here have one size
        return private.compile(lambda model, x, y: losses_of(model, x, y, case.bf16), rows=rows, backend=backend)

    return make


def peer_way(name: str) -> Way:
    def make(model: nn.Module, case: Case) -> Step | None:
        reason = available(name) or ("it is not run under autocast here" if case.bf16 else None)
        if reason is not None:
            print(f"{name} is left out: {reason}")
            return None
        try:
            own = for_opacus(model)
            step = make_step(name, own, torch.optim.Adam(own.parameters(), lr=1e-5), len(case.batch()[1]))
            step(*(tensor.to(DEVICE) for tensor in case.batch()))
            return step
        except Exception as error:  # it refuses a layer, or raises in it
            print(f"{name} is left out: {type(error).__name__}: {error}".splitlines()[0])
            return None

    return make


def draw(path: Path, cases: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Times an ordinary eager step, one group of bars a case."""
    ways = list(dict.fromkeys(way for rows in cases.values() for way in rows))
    longest = math.ceil(len(cases) / math.ceil(len(cases) / _IN_A_LINE))
    lines = [list(cases.items())[start : start + longest] for start in range(0, len(cases), longest)]
    figure = new_figure()
    figure.set_size_inches(max(7.0, 1.2 + longest * (0.4 + 0.2 * len(ways))), 0.8 + 3.4 * len(lines))
    everyone = figure.subplots(len(lines), 1, sharey=True, squeeze=False)[:, 0]
    for axes, line in zip(everyone, lines):
        _draw_line(axes, line, ways)
        axes.set_xlim(-0.6, longest - 0.4)
    handles = {label: handle for axes in everyone for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    sign(figure)
    save_figure(figure, path)


def _draw_line(axes: Any, cases: list[tuple[str, dict[str, dict[str, Any]]]], ways: list[str]) -> None:
    width = 0.84 / len(ways)
    for number, way in enumerate(ways):
        bars = [
            (place - 0.42 + (number + 0.5) * width, rows[way]["times_ordinary"]) for place, (_, rows) in enumerate(cases) if way in rows
        ]
        if bars:
            axes.bar([x for x, _ in bars], [height for _, height in bars], 0.92 * width, label=way, color=_COLOURS.get(way, "#E69F00"))
        for x, height in bars:
            axes.text(x, height * 1.04, f"{height:.2f}", ha="center", va="bottom", fontsize=7, rotation=90)
    axes.axhline(1.0, color="#999999", linewidth=1)
    axes.set(yscale="log", ylabel="times an ordinary eager step")
    axes.margins(y=0.12)
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "1235" else "")
    axes.set_xticks(range(len(cases)), [name.replace(" ", "\n", 1) for name, _ in cases], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


WAYS: dict[str, Way] = {
    ORDINARY: plain_way("non-private"),
    "ordinary, graph": ordinary_graph,
    "private": private_way(),
    "private, no graphs": without_graphs(),
    "private, traced": compiled_way("eager"),
    "private, compiled": compiled_way("inductor"),
    **{name: peer_way(name) for name in OPACUS},
}
_COLOURS = dict(zip(WAYS, ("#999999", "#444444", "#0072B2", "#88AACC", "#56B4E9", "#009E73", "#CC79A7", "#8B5A83")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args()
    ways = {name: WAYS[name] for name in dict.fromkeys([ORDINARY, *options.ways])}
    warm_up, settle, most = (WARM_UP_APART, 0, AT_ONCE_APART) if options.apart else (WARM_UP, SETTLE, AT_ONCE)
    at_once = max(1, min(most, options.steps // LOOKS))
    path, cases = measure_cases(
        "speed", options.cases, lambda case: measure(case, ways, max(options.steps, LOOKS), warm_up, at_once, settle, apart=options.apart)
    )
    draw(path.with_suffix(".png"), cases)


if __name__ == "__main__":
    main()
