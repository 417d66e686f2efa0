"""How many steps were released, counted before each of them, so that no crash makes the count too small.

In a file the count is written before the noise is drawn. The file survives the death of the process at any point; if the machine
itself loses power, steps since the last flush (at most a second) may be missing from it, together with the memory that held
their results; a checkpoint carries its own count, and the larger of the two holds.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadLedger
from .facts import weakest
from .files import write_whole
from .plan import PrivacyPlan

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]

_FORMAT = 1
_FLUSH_SECONDS = 1.0


@dataclass(frozen=True)
class Record:
    """What a ledger file says."""

    plan: PrivacyPlan
    spent: int
    facts: dict[str, Any]  # how the training was set up: who drew the batches, which noise, versions


class Ledger:
    """Counts the released steps of a plan, in memory and, given a path, in a file that later runs go on with."""

    def __init__(self, plan: PrivacyPlan, path: str | Path | None = None, facts: dict[str, Any] | None = None):
        self.plan = plan
        self.spent = 0
        self.facts = facts or {}
        self.path = Path(path) if path is not None else None
        self._file: int | None = None
        self._lock_file: int | None = None
        self._place = 0
        self._flushed = 0.0
        if self.path is not None:
            self._open(self.path)

    def _open(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise BadLedger(f"there is no folder {path.parent} for the ledger.", "Create it first.")
        self._lock(path)
        try:
            if path.exists():
                before = read(path)
                check_same_plan(before.plan, self.plan, str(path))
                self.spent = before.spent
                if before.spent:
                    self.facts = weakest(before.facts, self.facts)
            self._write()
        except BaseException:
            self.close()
            raise

    def _write(self) -> None:
        """The whole file, anew."""
        assert self.path is not None
        header = json.dumps({"clipwise_ledger": _FORMAT, "plan": self.plan.to_dict(), "facts": self.facts}, ensure_ascii=False) + "\n"
        write_whole(self.path, header + _line(self.spent))
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._place = len(header.encode("utf-8"))

    def _lock(self, path: Path) -> None:
        """Nobody else may count here. The lock is on a file beside, which is never replaced, and is not inherited by loader processes."""
        in_use = BadLedger(f"{path} is in use by another training.", "Two runs need two ledgers, or one after the other: private.close().")
        if path.resolve() in _locked_here:
            raise in_use
        self._lock_file = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        if fcntl is not None:
            try:
                fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock_file)
                self._lock_file = None
                raise in_use from None
        _locked_here.add(path.resolve())

    def note(self, facts: dict[str, Any]) -> None:
        """The training turns out to have been set up otherwise."""
        self.facts = facts
        if self._file is not None:
            self._write()

    def raise_to(self, spent: int) -> None:
        """So many steps are released, or about to be."""
        if self._file is not None:
            os.pwrite(self._file, _line(spent).encode(), self._place)
            now = time.monotonic()
            if now - self._flushed > _FLUSH_SECONDS:
                os.fsync(self._file)
                self._flushed = now
        self.spent = spent

    def close(self) -> None:
        for handle in (self._file, self._lock_file):
            if handle is not None:
                os.close(handle)
        if self._lock_file is not None and self.path is not None:
            _locked_here.discard(self.path.resolve())
        self._file = self._lock_file = None


_locked_here: set[Path] = set()  # a process does not lock itself out


def _line(spent: int) -> str:
    return f"spent {spent:012d} {spent:012d}\n"


_LINE = re.compile(r"spent (\d{12})(?: (\d{12}))?")


def read(path: str | Path) -> Record:
    """What a ledger file says, without touching it. The count stands there twice: where the two differ (the machine stopped in between), the larger one."""
    repair = "Give the file that PrivateTraining(…, ledger=path) or `clipwise train` wrote."
    try:
        header, count = Path(path).read_text(encoding="utf-8").splitlines()
        values = json.loads(header)
        line = _LINE.fullmatch(count)
        if values.get("clipwise_ledger") != _FORMAT or line is None:
            raise ValueError("another format, or cut off")
        return Record(PrivacyPlan.from_dict(values["plan"]), max(int(number) for number in line.groups() if number), values["facts"])
    except FileNotFoundError:
        raise BadLedger(f"there is no ledger {path}.", repair) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadLedger(f"{path} is not a ledger, or is damaged ({error}).", repair) from None


def check_same_plan(before: PrivacyPlan, now: PrivacyPlan, where: str) -> None:
    """A count of steps means something only together with the plan they were taken under."""
    old, new = before.to_dict(), now.to_dict()
    changed = [f"{name} was {old[name]} and is {new[name]}" for name in new if old[name] != new[name]]
    if changed:
        raise BadLedger(
            f"{where} belongs to another plan: {'; '.join(changed)}.",
            "Go on with the plan it was begun with, or begin a new ledger and add the two up with clipwise.compose.",
        )
