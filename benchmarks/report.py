"""Where a number came from: the machine, the versions, the day. Results lie in benchmarks/results/."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_results(name: str, results: dict[str, Any]) -> Path:
    """Write results/<date>-<name>.json; the directory may be moved with CLIPWISE_RESULTS."""
    folder = Path(os.environ.get("CLIPWISE_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{datetime.date.today().isoformat()}-{name}{'-gpu' if torch.cuda.is_available() else ''}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"wrote {path}")
    return path
