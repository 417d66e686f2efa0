"""What the commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_command(commands: Any, name: str, summary: str, text: str, run: Callable[[Any], int | None]) -> argparse.ArgumentParser:
    """A sub-command whose text begins with a sentence and ends with examples."""
    first, _, rest = text.partition("\n")
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run)
    return command
