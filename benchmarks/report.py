"""Results of the scripts here lie in benchmarks/results/, with the day and the machine."""

from __future__ import annotations

import datetime
import itertools
import json
import os
from pathlib import Path
from typing import Any

import torch

from clipwise.machine import machine

RESULTS = Path(__file__).parent / "results"


def sign(figure: Any) -> None:
    """The machine and the day, in a corner of a plot."""
    here = machine()
    figure.supxlabel(f"{here['gpu'] or here['processor']}, torch {here['torch']}, {here['date']}", fontsize=8, x=0.98, ha="right")


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write results/<date>-<name>.json, or …-2.json and so on where there is one; the directory may be moved with CLIPWISE_RESULTS."""
    folder = Path(os.environ.get("CLIPWISE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{datetime.date.today().isoformat()}-{name}{'-gpu' if torch.cuda.is_available() else ''}"
    names = (f"{title}{f'-{number}' if number > 1 else ''}.json" for number in itertools.count(1))
    path = next(folder / one for one in names if not (folder / one).exists())
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    return path
