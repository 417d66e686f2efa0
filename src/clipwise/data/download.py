"""A download that shows how far it is, and that goes on where it stopped."""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

_PIECE = 2**18
_SECONDS = 20.0  # without an answer
_CLEAR_LINE = "\r\033[K"  # back to its beginning, and nothing stays on it
_NOTHING_LEFT = 416  # the answer to a question for bytes past the end


class Progress:
    """A line that redraws itself on a terminal, and stays silent in a log but for the end."""

    def __init__(self, name: str, say: Callable[[str], None]):
        self._name = name
        self._say = say

    def at(self, done: int, total: int | None) -> None:
        if sys.stderr.isatty():
            share = f"{100 * done // total:3d} % of {total / 2**20:.1f} MB" if total else f"{done / 2**20:.1f} MB"
            sys.stderr.write(f"{_CLEAR_LINE}  {self._name}: {share} ")
            sys.stderr.flush()

    def finished(self, done: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(_CLEAR_LINE)
        self._say(f"  {self._name}: {done / 2**20:.1f} MB")


def download(address: str, part: Path, progress: Progress) -> Path:
    """Fetch `address` into `part`. What an interrupted download left there is kept, and asked for no more."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=_SECONDS)
    except urllib.error.HTTPError as error:
        if have and error.code == _NOTHING_LEFT:  # whether it is the right thing, its checksum will tell
            return part
        raise
    with answer:
        resumed = have > 0 and answer.status == 206
        have = have if resumed else 0
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else None
        with part.open("ab" if resumed else "wb") as file:
            while piece := answer.read(_PIECE):
                file.write(piece)
                have += len(piece)
                progress.at(have, total)
    if total is not None and have != total:
        raise OSError(f"{address} ended after {have} of {total} bytes; ask again and it goes on")
    progress.finished(have)
    return part
