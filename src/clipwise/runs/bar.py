"""A bar that redraws itself on a terminal: the step at hand beside ε, accuracy and loss as they were last measured. In a log it is silent."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from typing import Any, TextIO

from ..budget import rounded_up
from .curve import Point

_CLEAR_LINE = "\r\033[K"  # back to its beginning, and nothing stays on it
_NARROWEST, _WIDEST = 5, 40
_SECONDS = 0.05  # between two pictures of it
_LABEL = re.compile(r"\S* {2,}|")  # of a line: "plan    ε = …"


class Bar:
    """Drawn on stderr. Text is printed through it, so that the two never share a line; at the end nothing of it is left.

    with Bar() as bar:
        bar.show(step, steps, None)          # at every step: cheap, nothing is accounted for
        bar.print("after the first epoch")
    """

    def __init__(self) -> None:
        self._drawn = float("-inf")

    def show(self, step: int, steps: int, measured: Point | None) -> None:
        """measured: what was last known, shown with the step it belongs to."""
        now = time.monotonic()
        if now - self._drawn > _SECONDS and (columns := _columns(sys.stderr)) is not None:
            self._drawn = now
            sys.stderr.write(_CLEAR_LINE + line(step, steps, measured, columns - 1))  # in the last column the cursor would wrap
            sys.stderr.flush()

    def print(self, text: str, file: TextIO | None = None) -> None:
        """In place of the bar, to stdout or `file`; on a terminal broken between words."""
        self._clear()
        file = file or sys.stdout
        if (columns := _columns(file)) is not None:
            text = "\n".join(_wrapped(part, columns - 1) for part in text.split("\n"))
        print(text, file=file, flush=True)

    def _clear(self) -> None:
        if _columns(sys.stderr) is not None:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: Any) -> None:
        self._clear()


def line(step: int, steps: int, measured: Point | None, columns: int) -> str:
    """[====    ] 120/320  at step 80: ε = 1.81 …, in the longest words that leave room for the bar; never more than `columns` characters."""
    texts = [f" {step}/{steps}  {words}" for words in _in_words(measured)]
    text = next((text for text in texts if columns - len(text) - 2 >= _NARROWEST), texts[-1])
    width = max(_NARROWEST, min(_WIDEST, columns - len(text) - 2))
    filled = width * step // steps
    return f"[{'=' * filled}{' ' * (width - filled)}]{text}"[:columns]


def _in_words(measured: Point | None) -> list[str]:
    """From long to short."""
    if measured is None:
        return ["ε, accuracy and loss come after the epoch", "ε comes after the epoch"]
    epsilon, accuracy = rounded_up(measured.epsilon), f"{100 * measured.accuracy:.1f} %"
    return [
        f"at step {measured.step}: ε = {epsilon}, public accuracy {accuracy}, public loss {measured.loss:.3f}",
        f"at {measured.step}: ε {epsilon}, public {accuracy}, loss {measured.loss:.3f}",
        f"at {measured.step}: ε {epsilon}, public {accuracy}",
    ]


def _columns(stream: TextIO) -> int | None:
    """Of the terminal; None where there is none."""
    if not stream.isatty():
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _wrapped(text: str, columns: int) -> str:
    """Broken between words; what follows a label stays to its right."""
    label = _LABEL.match(text)
    indent = " " * (label.end() if label else 0)
    return textwrap.fill(text, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
