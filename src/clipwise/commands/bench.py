"""clipwise bench: the paper's figures, measured on this machine."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch

from ..experiments import FIGURES
from ..experiments.charts import save_chart
from ..experiments.contenders import NAMES, available
from ..experiments.memory import PAPERS_GIGABYTES
from ..experiments.page import describe, save_page
from ..experiments.report import TABLE_HEAD, Run, as_json, from_json, measure_figure, save_numbers
from ..experiments.timing import Settings
from ..machine import chosen_device, machine
from .base import add_command

_BENCH = f"""\
Measure the paper's figures: seconds an epoch by every way to clip, in turns on this machine. One figure, or all of them.

figures:
{chr(10).join(f"  {figure.name:13s} {figure.title}" for figure in FIGURES.values())}
  all           every one of them

examples:
  clipwise bench all --quick --out figures          # two cores, under ten minutes
  clipwise bench depth --out figures                # full size
  clipwise bench memory --out figures               # on a GPU; --memory 11 by default there, the paper's card
  clipwise bench all --draw figures/results.json    # draw the pictures and the page of an earlier run again

The folder holds results.json and results.csv with every number and the machine, a PNG for each figure, and index.html, a page
that needs nothing else.
"""
_QUICK: dict[str, Any] = dict(warm_up=1, least=3, most=20, seconds=0.5)


def add_to(commands: Any) -> None:
    bench = add_command(commands, "bench", "measure the paper's figures", _BENCH, _bench)
    bench.add_argument("figure", choices=[*FIGURES, "all"], metavar="FIGURE", help=f"{', '.join(FIGURES)} or all")
    bench.add_argument("--out", type=Path, default=Path("figures"), help="folder for numbers, pictures and page (default figures)")
    bench.add_argument("--quick", action="store_true", help="small networks' full figures, large ones scaled down, few steps")
    bench.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=f"some of {', '.join(NAMES)}")
    bench.add_argument(
        "--data", choices=["synthetic", "real"], default="synthetic", help="stand-ins of each data set's shape, or its files"
    )
    bench.add_argument("--precision", choices=["fp32", "tf32", "bf16"], default="fp32", help="fp32 leaves torch's settings alone")
    bench.add_argument("--device", default="auto", help="cpu, cuda …; auto takes a GPU where there is one")
    bench.add_argument("--seconds", type=float, help="how long to time one way on one network")
    bench.add_argument("--memory", type=float, metavar="GB", help="pretend that the GPU has no more (default: 11 for the figure memory)")
    bench.add_argument("--draw", type=Path, nargs="+", metavar="JSON", help="measure nothing: draw the results.json of earlier runs")


def _bench(options: Any) -> None:
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if options.json else (lambda text: print(text, flush=True))
    run = from_json([json.loads(path.read_text()) for path in options.draw], FIGURES) if options.draw else _measured(options, say)
    options.out.mkdir(parents=True, exist_ok=True)
    written = save_numbers(run, options.out)
    pictures = {}
    for figure, measured in run.figures:
        pictures[figure.name] = options.out / f"{figure.name}.png"
        save_chart(figure, measured, pictures[figure.name], f"{describe(run)} {run.settings['data_note']}")
    written += [*pictures.values(), save_page(run, options.out, pictures)]
    if options.json:
        print(json.dumps(as_json(run)))
    else:
        for figure, measured in run.figures:
            print(f"\n{figure.title}")
            for statement in figure.statements:
                print(_wrapped("paper", statement.paper))
                print(_wrapped("measured", statement.measured(measured)))
        print("\nwritten:\n" + "\n".join(f"  {path}" for path in written))


def _wrapped(who: str, text: str) -> str:
    return textwrap.fill(text, 100, initial_indent=f"  {who:9s} ", subsequent_indent=" " * 12)


def _measured(options: Any, say: Any) -> Run:
    device = chosen_device(options.device)
    if options.precision == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    chosen = dict(_QUICK) if options.quick else {}
    if options.seconds is not None:
        chosen["seconds"] = options.seconds
    settings = Settings(device=device, real_data=options.data == "real", precision=options.precision, **chosen)
    figures = [figure for name, figure in FIGURES.items() if options.figure in (name, "all")]
    note = (
        "Data: SYNTHETIC stand-ins, random numbers of each data set's shape, which tell speed and nothing else."
        if options.data == "synthetic"
        else "Data: the data sets' own files."
    )
    about: dict[str, Any] = {
        "device": str(device), "quick": options.quick, "precision": options.precision, "data": options.data, "data_note": note,
        "methods": ", ".join(options.methods), "memory_gigabytes": options.memory,
    }  # fmt: skip
    run = Run(machine(), about, [])
    say(f"{textwrap.fill(describe(run), 100)}\n{textwrap.fill(note, 100)}")
    for method in options.methods:
        if (reason := available(method)) is not None:
            say(f"without {method}: {reason}")
    for figure in figures:
        if figure.largest_batch and device.type != "cuda":
            say(f"\n{figure.title}: left out, it needs a GPU")
            continue
        start = time.monotonic()
        say(f"\n{figure.title}\n{TABLE_HEAD}")
        memory = options.memory if options.memory is not None or not figure.largest_batch else PAPERS_GIGABYTES
        measured = measure_figure(figure, options.methods, settings, quick=options.quick, memory_gigabytes=memory, say=say)
        say(f"  {time.monotonic() - start:.0f} s")
        run.figures.append((figure, measured))
    if not run.figures:
        raise ValueError("nothing was measured: this figure needs a GPU")
    return run
