"""Results of the scripts here lie in benchmarks/results/, with the day and the machine."""

from __future__ import annotations

import datetime
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
    """Write results/<date>-<name>.json; the directory may be moved with CLIPWISE_RESULTS."""
    folder = Path(os.environ.get("CLIPWISE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-{name}{'-gpu' if torch.cuda.is_available() else ''}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    return path
