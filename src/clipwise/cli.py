"""The command line: clipwise train | bench | data | calibrate | spent | report.

Exit codes: 0 done, 1 refused or failed (the message says why), 2 wrong usage, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from . import __version__
from .commands import bench, data, plan, train
from .runs.bar import Bar


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    warnings.showwarning = lambda message, *_, **__: Bar().print(f"warning: {message}", sys.stderr)
    try:
        return options.run(options) or 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"clipwise {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="clipwise", description="Differentially private training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"clipwise {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for family in (train, bench, data, plan):
        family.add_to(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
