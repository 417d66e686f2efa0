"""clipwise train: the main job."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..data import NAMES as DATA
from ..errors import BadPlan
from ..models.zoo import NAMES as MODELS
from ..runs import PRESETS, TrainJob, run
from ..runs.bar import Bar
from ..runs.job import OPTIMIZERS, PRECISIONS, read_settings
from .base import add_command

_TRAIN = """\
Train a network with differential privacy. Without options: the paper's CNN on the images in the package, ε = 3.

examples:
  clipwise train --out first
  clipwise train --preset fashion-mnist --out fashion          # after: clipwise data fetch fashion-mnist
  clipwise train --preset paper-mnist-cnn --epsilon 3 --out cnn
  clipwise train --config job.toml --out run                   # epsilon = 3.0, data = "mnist", …
  clipwise train --resume --out run                            # goes on; every released step stays counted

The folder holds checkpoint.pt, ledger, plan.json, config.json, curve.csv and .png, privacy_report.md, .json and .png.
Ctrl-C stops after the step at hand. Settings in the order of their weight: options, --config, --preset, defaults.
"""
_SETTINGS: dict[str, dict[str, Any]] = {
    "data": dict(help=f"{', '.join(DATA)}; synthetic-NAME for random numbers of that shape (speed only)"),
    "model": dict(metavar="NAME", help=f"{', '.join(MODELS)}"),
    "epsilon": dict(type=float, help="what the training may spend"),
    "delta": dict(type=float, help="well below one over the number of examples"),
    "epochs": dict(type=int, help="passes over the private examples"),
    "batch-size": dict(type=int, help="examples a step draws on average"),
    "clip": dict(type=float, help="bound on each example's gradient"),
    "lr": dict(type=float, help="learning rate"),
    "optimizer": dict(choices=OPTIMIZERS, help="default adam"),
    "momentum": dict(type=float, help="of sgd (default 0.9)"),
    "method": dict(choices=["auto", "bookkeep", "reweight", "multiloss", "nxbp"], help="how gradients are clipped; the result is the same"),
    "sampler": dict(choices=["poisson", "truncated_poisson", "shuffle", "fixed_size"], help="how batches are drawn"),
    "noise": dict(choices=["fast", "secure"], help="where noise comes from"),
    "precision": dict(choices=PRECISIONS, help="of the forward and backward pass"),
    "microbatch": dict(type=int, help="examples at a time, where a draw does not fit into memory"),
    "device": dict(help="cpu, cuda, cuda:1 …; auto takes a GPU where there is one"),
    "workers": dict(type=int, help="processes that load data"),
    "seed": dict(type=int, help="of the first weights; draws and noise do not depend on it"),
    "data-folder": dict(help="where the data set's files are"),
    "image-size": dict(type=int, help="side of LSUN's pictures (default 64)"),
    "limit": dict(type=int, help="at most so many of LSUN's pictures, spread over its classes"),
    "glove": dict(help="GloVe's text file of 200 dimensions, for imdb"),
}


def add_to(commands: Any) -> None:
    train = add_command(commands, "train", "train a network privately", _TRAIN, _train)
    for name, options in _SETTINGS.items():
        train.add_argument(f"--{name}", default=None, **options)
    train.add_argument("--preset", choices=list(PRESETS), metavar="NAME", help=f"{', '.join(PRESETS)}")
    train.add_argument("--config", type=Path, help="settings in a TOML, YAML or JSON file")
    train.add_argument("--compile", action="store_true", default=None, help="compile the step: the same numbers, faster on a GPU")
    train.add_argument("--out", type=Path, required=True, help="folder for everything the training leaves behind")
    train.add_argument("--resume", action="store_true", help="go on with the training in --out")
    train.add_argument("--private-accuracy", action="store_true", help="also show accuracy on the private examples: not covered by ε")


def _job(options: Any) -> TrainJob:
    given = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in [*_SETTINGS, "compile"]}
    chosen = {name: value for name, value in given.items() if value is not None}
    if options.resume:
        kept = options.out / "config.json"
        settings = json.loads(kept.read_text()) if kept.exists() else {}
        others = [name for name, value in chosen.items() if name != "compile" and settings.get(name) != value]
        if others or options.preset or options.config:
            raise BadPlan(
                "--resume goes on with the settings in --out.",
                "Leave out the others: the plan cannot change under way. (--compile may be added.)",
            )
        chosen = settings | chosen
    settings = PRESETS[options.preset] if options.preset else {}
    settings = settings | (read_settings(options.config) if options.config else {}) | chosen
    return TrainJob().changed(settings)


def _train(options: Any) -> int:
    job = _job(options)
    with Bar() as bar:
        say = partial(bar.print, file=sys.stderr) if options.json else bar.print
        outcome = run(job, options.out, resume=options.resume, show=bar.show, say=say, private_accuracy=options.private_accuracy)
    if options.json:
        values = {"finished": outcome.finished, "public_accuracy": outcome.accuracy, "public_loss": outcome.loss}
        print(json.dumps(values | {"budget": asdict(outcome.budget), "written": [str(path) for path in outcome.written]}))
    else:
        bar.print(f"\n{'finished' if outcome.finished else 'stopped; go on with --resume'}")
        bar.print(f"spent   {outcome.budget}")
        bar.print(f"public  accuracy {100 * outcome.accuracy:.2f} %, loss {outcome.loss:.4f}")
        bar.print(f"in      {options.out}: {', '.join(path.name for path in outcome.written)}")
    return 0 if outcome.finished else 130
