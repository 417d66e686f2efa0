"""Clipping alone over an ordinary step, by both methods: time and memory, in the same run on the same machine, methods in turns.

    python benchmarks/wall_clock.py [--cases "mlp B128" …] [--steps 20]

A step is forward pass, gradients and Adam's update, without noise or ledger. Steps 4, 8, 16 …, on which clipwise verifies the model
again, fall out of the median. Without a GPU the large cases are left out, and memory is not measured. GPT-2 and ViT need
transformers, ResNet-50 needs torchvision; what is not installed is left out and named.
"""

from __future__ import annotations

import argparse

from cases import CASES
from private_step import ORDINARY, measure, measure_cases, plain_way

WAYS = {ORDINARY: plain_way("non-private"), "bookkeep": plain_way("bookkeep"), "reweight": plain_way("reweight")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    measure_cases("wall_clock", options.cases, lambda case: measure(case, WAYS, options.steps))


if __name__ == "__main__":
    main()
